"""Drafts of environment profiles for self-questioning, from tool schemas: `python -m envs.profile
my_module:MyEnv`.

    {"name", "entities": [{"name", "attributes": [...], "operations": [{"name", "description"}]}],
     "task_preference": {"num_entities", "num_operations", "relation_difficulty"}}

A draft is meant to be corrected by hand and returned from the world's `profile()`. Tools whose
names share a noun (`book_flight`, `cancelFlight`) become the operations of one entity, and their
parameters its attributes.
"""

import contextlib
import functools
import itertools
import json
import re
import sys
from collections import Counter
from collections.abc import Sequence

from envs import commands, make
from envs.values import Json
from envs.world import Task, Tool, World

# The paper's task preference.
PREFERENCE = {"num_entities": 2, "num_operations": 3, "relation_difficulty": 3}
_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|[0-9]+")
_FILLERS = {
    "a", "all", "an", "and", "api", "by", "for", "from", "in", "my", "of", "on", "or", "the", "to",
    "with",
}  # fmt: skip


def draft(name: str, tools: Sequence[Tool]) -> Json:
    """Return a profile of the environment `name` from its OpenAI tool schemas; descriptions may be
    missing."""
    functions = [tool["function"] for tool in tools]
    groups: dict[str, list[Json]] = {}
    nouns = _nouns([function["name"] for function in functions])
    for function, noun in zip(functions, nouns):
        groups.setdefault(noun or name, []).append(function)
    return profile_of(name, [entity(noun, members) for noun, members in groups.items()])


def profile_of(name: str, entities: list[Json]) -> Json:
    """Return the profile of an environment with these entities."""
    number = min(PREFERENCE["num_entities"], max(len(entities), 1))
    preference = PREFERENCE | {"num_entities": number}
    return {"name": name, "entities": entities, "task_preference": preference}


def entity(name: str, functions: Sequence[Json]) -> Json:
    """Return an entity with these functions as its operations and their parameters as its
    attributes."""
    attributes = set(itertools.chain(*map(_parameters, functions)))
    operations = [
        {"name": f["name"], "description": str(f.get("description") or "")} for f in functions
    ]
    return {"name": name, "attributes": sorted(attributes), "operations": operations}


def tools_of(world: World, tasks: Sequence[Task]) -> list[Tool]:
    """Return every tool that is available at the start of one of the tasks, in order of
    appearance."""
    tools: dict[str, Tool] = {}
    for task in tasks:
        for tool in world.reset(task, task.seed).tools:
            tools.setdefault(tool["function"]["name"], tool)
    return list(tools.values())


def _parameters(function: Json) -> Json:
    return (function.get("parameters") or {}).get("properties") or {}


def _nouns(names: Sequence[str]) -> list[str]:
    """Return for each tool the noun of its name that most tools share (of a tie the last), "" if
    there is none."""
    words = [[_singular(word.lower()) for word in _WORD.findall(name)] for name in names]
    verbs = {first for first, *rest in filter(None, words) if rest}
    counts = Counter(itertools.chain(*map(set, words)))
    nouns = []
    for parts in words:
        shared = [w for w in parts if counts[w] > 1 and w not in verbs and w not in _FILLERS]
        nouns.append(max(reversed(shared), key=lambda w: counts[w]) if shared else "")
    return nouns


def _singular(word: str) -> str:
    plural = len(word) > 3 and word.endswith("s") and not word.endswith(("ss", "us", "is"))
    return word[:-1] if plural else word


def shown(
    env: str, *, kwargs: Json | None = None, split: str = "train", draft_: bool = False
) -> int:
    """Print an environment's own profile, or a draft if it has none.

    env: my_module:MyEnv or a registered name
    kwargs: JSON arguments of the environment
    split: split whose tasks are reset to collect the tools
    draft_: print a draft even if the environment has a profile
    """
    with contextlib.closing(make(env, **kwargs or {})) as world:
        profile = {} if draft_ else world.profile()
        profile = profile or draft(world.name, tools_of(world, world.tasks(split)))
    json.dump(profile, sys.stdout, indent=2, ensure_ascii=False)
    print()
    return 0


main = functools.partial(commands.called, shown)  # returns the exit code


if __name__ == "__main__":
    sys.exit(main())
