"""Experience: one piece of advice and its record of success."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Experience:
    """Two sentences: `when` to use it, and its `content`, which is put into the prompt.

    `key` is the text that is embedded and searched: a query of the tasks it is for, or `when`
    itself. `uses` counts the guided rollouts that carried it, `wins` those that succeeded.
    `expected` sums, over the same rollouts, the success rate of the unguided rollouts of their
    groups, which estimates the wins without it.
    """

    id: str
    when: str
    content: str
    key: str
    sources: list[str] = field(default_factory=list)  # ids of the training tasks it comes from
    step: int = 0  # training step of its extraction
    uses: int = 0
    wins: int = 0
    expected: float = 0.0

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, record: dict[str, Any]) -> Experience:
        """Return the experience of a record. Raises ValueError if `to_dict` cannot have written
        it."""
        types = dict.fromkeys(("id", "when", "content", "key"), str) | {"sources": list}
        types |= dict.fromkeys(("step", "uses", "wins"), int) | {"expected": (int, float)}
        if not isinstance(record, dict) or set(record) != set(types):
            raise ValueError(f"an experience is an object with the keys {', '.join(types)}")
        for key, kind in types.items():
            if not isinstance(record[key], kind) or isinstance(record[key], bool):
                raise ValueError(f"the value of '{key}' has the wrong type: {record[key]!r}")
        return cls(**{**record, "expected": float(record["expected"])})


def new_experience(
    when: str, content: str, *, sources: list[str], key: str = "", step: int = 0
) -> Experience:
    """Return an experience whose id is the hash of its text, so that the same text always has the
    same id."""
    digest = hashlib.blake2b(json.dumps([when, content]).encode(), digest_size=8).hexdigest()
    return Experience(
        id=f"exp/{digest}",
        when=when,
        content=content,
        key=key or when,
        sources=list(sources),
        step=step,
    )
