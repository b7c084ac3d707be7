"""Other digits in the ids of a task: the agent sees M70 where the world has M12, and what it does
to M70 is done to M12.

A world has few starts, and whoever is trained on them again and again remembers which id is right
in each instead of looking it up. Renaming is a permutation of all words of a form, so that every
word that an agent writes means exactly one of the world's, whatever was shown.
"""

import functools
import itertools
import random
import re
from collections.abc import Callable, Collection
from dataclasses import replace

from envs.values import Json, mapped
from envs.world import Task

KEY = "ids"  # of `Task.meta`: {"key": text, "forms": [...]}
_WORD = re.compile(r"[\w-]*[0-9][\w-]*")
_DIGITS = re.compile(r"[0-9]+")  # those of other scripts would come back as these
_MOST = 4  # digits that are permuted together
_WRITTEN = ("named", "hidden", "sibling", "tried")  # what `Task.meta` holds in the task's words


def form_of(word: str) -> str:
    """Return what ids like this one share: "M00" for M12."""
    return _DIGITS.sub(lambda found: "0" * len(found[0]), word)


def is_id(word: str) -> bool:
    """Return True for a word of letters and digits. Dates and numbers mean something."""
    return bool(_DIGITS.search(word)) and any(map(str.isalpha, word))


def renamed(task: Task, key: str) -> Task:
    """Return the task with other ids in its words and its solution. Its verifier stays: `Probed`
    understands them."""
    words = itertools.chain(*map(_WORD.findall, task.reference))
    forms = sorted({form_of(word) for word in words if is_id(word)})
    if not forms:
        return task
    ids = {"key": key, "forms": forms}
    change = _change(ids, back=False)
    meta = {name: mapped(value, change) for name, value in task.meta.items() if name in _WRITTEN}
    meta = task.meta | meta | {KEY: ids}
    reference = [change(action) for action in task.reference]
    return replace(task, query=change(task.query), reference=reference, meta=meta)


def shown(task: Task) -> Callable[[str], str]:
    """Return the change of what a world says into what the agent of a renamed task reads."""
    return _change(task.meta[KEY], back=False)


def meant(task: Task) -> Callable[[str], str]:
    """Return the change of what the agent of a renamed task writes into what it means there."""
    return _change(task.meta[KEY], back=True)


def _change(ids: Json, back: bool) -> Callable[[str], str]:
    forms = frozenset(ids["forms"])
    return functools.partial(_changed, key=ids["key"], forms=forms, back=back)


def _changed(text: str, *, key: str, forms: Collection[str], back: bool) -> str:
    def other(found: re.Match[str]) -> str:
        word = found[0]
        if form_of(word) not in forms:
            return word
        return _DIGITS.sub(lambda digits: _permuted(digits[0], key, back), word)

    return _WORD.sub(other, text)


def _permuted(digits: str, key: str, back: bool) -> str:
    parts = [digits[n : n + _MOST] for n in range(0, len(digits), _MOST)]
    return "".join(str(_table(len(part), key, back)[int(part)]).zfill(len(part)) for part in parts)


@functools.lru_cache(512)
def _table(length: int, key: str, back: bool) -> list[int]:
    """Return a permutation of the numbers of so many digits, of which those without a leading 0
    keep none."""
    rng, least = random.Random(f"{key} {length}"), 10 ** (length - 1)
    table = [*rng.sample(range(least), least), *rng.sample(range(least, 10 * least), 9 * least)]
    if not back:
        return table
    inverse = [0] * len(table)
    for number, other in enumerate(table):
        inverse[other] = number
    return inverse
