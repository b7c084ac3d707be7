"""What one lesson is."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Experience:
    """When to use it and its content, which is put into the prompt: two sentences.

    `key` is the text that is embedded and searched: a query like those it is for, or `when` itself. `wins` counts the
    guided rollouts that succeeded out of `uses`; `expected` sums, over the same rollouts, the success rate of the
    unguided ones of their groups: what would have been won without it.
    """

    id: str
    when: str
    content: str
    key: str
    sources: list[str] = field(default_factory=list)  # ids of the training tasks it was learnt from
    step: int = 0  # the iteration that learnt it
    uses: int = 0
    wins: int = 0
    expected: float = 0.0

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, record: dict[str, Any]) -> Experience:
        """Raises ValueError naming what is wrong with a record that was not written by `to_dict`."""
        types = {
            "id": str,
            "when": str,
            "content": str,
            "key": str,
            "sources": list,
            "step": int,
            "uses": int,
            "wins": int,
        }
        types["expected"] = (int, float)
        if not isinstance(record, dict) or set(record) != set(types):
            raise ValueError(f"an experience is an object with the keys {', '.join(types)}")
        for key, kind in types.items():
            if not isinstance(record[key], kind) or isinstance(record[key], bool):
                raise ValueError(f"the value of '{key}' has the wrong type: {record[key]!r}")
        return cls(**{**record, "expected": float(record["expected"])})


def new_experience(when: str, content: str, *, sources: list[str], key: str = "", step: int = 0) -> Experience:
    """An experience whose id is the hash of its text: the same lesson learnt twice is the same experience."""
    digest = hashlib.blake2b(json.dumps([when, content]).encode(), digest_size=8).hexdigest()
    return Experience(id=f"exp/{digest}", when=when, content=content, key=key or when, sources=list(sources), step=step)
