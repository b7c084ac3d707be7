"""Prompts for language models, one text file each.

A file begins with `version: N`, followed by a `# system` and a `# user` part. `{{name}}` marks a
slot. The version is part of the cache key of every answer, so raise it when the wording changes.
"""

import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from evolver.llm.answers import Schema
from evolver.llm.questions import Question

_SLOT = re.compile(r"\{\{(\w+)\}\}")


@dataclass(frozen=True)
class Prompt:
    """A prompt whose slots are not yet filled."""

    name: str
    version: str
    system: str
    user: str

    @property
    def path(self) -> str:
        """The file, seen from the root of the project."""
        return f"evolver/llm/prompts/{self.name}.txt"

    def lines(self) -> list[str]:
        """Return the lines to show to people."""
        return ["# system", *self.system.splitlines(), "# user", *self.user.splitlines()]

    @property
    def slots(self) -> set[str]:
        return set(_SLOT.findall(self.system + self.user))

    def question(
        self,
        role: str,
        schema: Schema | None,
        seed: int | None = None,
        about: str = "",
        /,
        **values: str,
    ) -> Question:
        """Return the question to a role, with the values of its slots. about: see `Question`."""
        return Question(role, self.messages(**values), schema, self.version, seed, about)

    def empty(self) -> list[dict[str, str]]:
        """Return the messages with empty slots, the shortest that there are."""
        return self.messages(**dict.fromkeys(self.slots, ""))

    def messages(self, **values: str) -> list[dict[str, str]]:
        """Return the system and user messages with their slots filled. Slots inside a value are
        left alone.

        Raises KeyError for a slot without a value and ValueError for a value without a slot.
        """
        if extra := values.keys() - self.slots:
            raise ValueError(f"prompt {self.name} has no slot {', '.join(sorted(extra))}")
        fill = {"system": self.system, "user": self.user}
        return [
            {"role": role, "content": _SLOT.sub(lambda slot: values[slot[1]], text)}
            for role, text in fill.items()
        ]


@cache
def prompt(name: str) -> Prompt:
    """Return the prompt in `<name>.txt`. Raises ValueError if the file is malformed."""
    text = (Path(__file__).parent / f"{name}.txt").read_text(encoding="utf-8")
    match = re.fullmatch(r"version: (\S+)\n+# system\n(.*?)\n# user\n(.*)", text, re.DOTALL)
    if not match:
        form = "must begin with a version, then have `# system` and `# user`"
        raise ValueError(f"evolver/llm/prompts/{name}.txt {form}")
    version, system, user = match.groups()
    return Prompt(name, f"{name}-{version}", system.strip(), user.strip())
