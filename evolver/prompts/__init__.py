"""What is said to language models: one text file per prompt, with a version that is part of every cached answer's name.

A file opens with `version: N`, then has a `# system` and a `# user` part. `{{name}}` marks a slot. Raise the version
when a change of wording should ask again what was answered under the old one and looks the same.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path

_SLOT = re.compile(r"\{\{(\w+)\}\}")


@dataclass(frozen=True)
class Prompt:
    """A prompt with its slots open."""

    name: str
    version: str
    system: str
    user: str

    @property
    def slots(self) -> set[str]:
        return set(_SLOT.findall(self.system + self.user))

    def messages(self, **values: str) -> list[dict[str, str]]:
        """The system and the user message, slots filled. Values are data: a slot inside of one stays as it is.

        Raises KeyError for a slot without a value and ValueError for a value without a slot.
        """
        if extra := values.keys() - self.slots:
            raise ValueError(f"prompt {self.name} has no slot {', '.join(sorted(extra))}")
        fill = {"system": self.system, "user": self.user}
        return [{"role": role, "content": _SLOT.sub(lambda slot: values[slot[1]], text)} for role, text in fill.items()]


@cache
def prompt(name: str) -> Prompt:
    """The prompt in `<name>.txt`. Raises ValueError for a file of another form."""
    text = (Path(__file__).parent / f"{name}.txt").read_text(encoding="utf-8")
    found = re.fullmatch(r"version: (\S+)\n+# system\n(.*?)\n# user\n(.*)", text, re.DOTALL)
    if not found:
        raise ValueError(f"evolver/prompts/{name}.txt: it has to open with a version, then `# system` and `# user`")
    version, system, user = found.groups()
    return Prompt(name, f"{name}-{version}", system.strip(), user.strip())
