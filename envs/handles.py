"""Names for what a world hands out anew at each call, such as the token of a login.

Nothing that was written for one episode holds in the next where each login gives another token: no
solution, and no call that checks it. So whoever plays a task reads a name in place of the token,
the same one whenever the same call gives it, and the world is given what the name stands for.
"""

import hashlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from envs.toolcalls import Call, parse
from envs.values import mapped
from envs.world import StepResult

KEY = "handles"  # of `Task.meta`: kinds of values (envs.probed.Cell)


class Handles:
    """The names of one episode. Of two calls alike, the later one gives the name its meaning."""

    def __init__(self, kinds: Sequence[str] = ()):
        """kinds: of the values that get names."""
        self.kinds = frozenset(kinds)
        self.real: dict[str, str] = {}  # name -> what it stands for

    def meant(self, action: str) -> str:
        """Return an action with what its names stand for."""
        return _replaced(action, self.real)

    def show(self, action: str, result: StepResult, cells: Callable[[str, str], Any]) -> None:
        """Put names into the answer to an action that is written with names. cells: returns the
        values in a tool's answer, as `envs.probed.cells` does."""
        for call, message in zip(parse(action).calls, result.messages):
            text, number = str(message.get("content") or ""), 0
            for cell in cells(call.name, text):
                if not self.kinds.isdisjoint(cell.kinds) and cell.value in text:
                    self.real[_name(call, cell.label, number)] = cell.value
                    number += 1
        names = {value: name for name, value in self.real.items()}
        result.messages = mapped(result.messages, lambda text: _replaced(text, names))
        result.info = mapped(result.info, lambda text: _replaced(text, names))


def _name(call: Call, label: str, number: int) -> str:
    made = json.dumps([call.name, call.arguments, label, number], sort_keys=True)
    digits = int.from_bytes(hashlib.blake2b(made.encode(), digest_size=8).digest()) % 10**6
    return f"{label.rpartition('.')[2].strip('$[*]') or 'handle'}_{digits:06}"


def _replaced(text: str, others: Mapping[str, str]) -> str:
    if not others:
        return text
    words = "|".join(map(re.escape, sorted(others, key=len, reverse=True)))
    return re.sub(rf"(?<!\w)(?:{words})(?!\w)", lambda found: others[found[0]], text)
