"""A first profile from tool schemas alone, for self-questioning: `python -m envs.profile my_module:MyEnv`.

    {"name", "entities": [{"name", "attributes": [...], "operations": [{"name", "description"}]}],
     "task_preference": {"num_entities", "num_operations", "relation_difficulty"}}

A draft is something to correct by hand: return the corrected dict from the world's `profile()`. Tools are put together
by the noun that their names share (`book_flight`, `cancelFlight`), their parameters become its attributes.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import re
import sys
from collections import Counter
from collections.abc import Sequence
from typing import Any

from envs import make
from envs.world import Task, Tool, World

PREFERENCE = {"num_entities": 2, "num_operations": 3, "relation_difficulty": 3}  # the paper's
_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|[0-9]+")
_FILLERS = {"a", "all", "an", "and", "api", "by", "for", "from", "in", "my", "of", "on", "or", "the", "to", "with"}


def draft(name: str, tools: Sequence[Tool]) -> dict[str, Any]:
    """A profile of the environment `name` from its tools, OpenAI schemas; descriptions may be missing."""
    functions = [tool["function"] for tool in tools]
    groups: dict[str, list[dict[str, Any]]] = {}
    nouns = _nouns([function["name"] for function in functions])
    for function, noun in zip(functions, nouns):
        groups.setdefault(noun or name, []).append(function)
    entities = [entity(noun, members) for noun, members in groups.items()]
    fewer = {"num_entities": min(PREFERENCE["num_entities"], max(len(entities), 1))}
    return {"name": name, "entities": entities, "task_preference": {**PREFERENCE, **fewer}}


def entity(name: str, functions: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """One entity with these functions as its operations and their parameters as its attributes."""
    attributes = {parameter for function in functions for parameter in _parameters(function)}
    operations = [{"name": f["name"], "description": str(f.get("description") or "")} for f in functions]
    return {"name": name, "attributes": sorted(attributes), "operations": operations}


def tools_of(world: World, tasks: Sequence[Task]) -> list[Tool]:
    """Every tool that one of the tasks begins with, in order of appearance."""
    found: dict[str, Tool] = {}
    for task in tasks:
        for tool in world.reset(task, task.seed).tools:
            found.setdefault(tool["function"]["name"], tool)
    return list(found.values())


def _parameters(function: dict[str, Any]) -> dict[str, Any]:
    parameters = function.get("parameters") or {}
    return parameters.get("properties") or {}


def _nouns(names: Sequence[str]) -> list[str]:
    """For each tool the last word of its name that other tools have too, in the singular; "" where there is none."""
    words = [[_singular(word.lower()) for word in _WORD.findall(name)] for name in names]
    verbs = {first for first, *rest in filter(None, words) if rest}
    counts = Counter(word for parts in words for word in set(parts))
    found = []
    for parts in words:
        shared = [w for w in parts if counts[w] > 1 and w not in verbs and w not in _FILLERS]
        found.append(max(reversed(shared), key=lambda w: counts[w]) if shared else "")
    return found


def _singular(word: str) -> str:
    return word[:-1] if len(word) > 3 and word.endswith("s") and not word.endswith(("ss", "us", "is")) else word


def main(argv: list[str] | None = None) -> int:
    """Print the profile of an environment: its own, or with --draft or where it has none, a draft."""
    parser = argparse.ArgumentParser(prog="python -m envs.profile", description=__doc__.split("\n")[0])
    parser.add_argument("env", help="my_module:MyEnv, or a name of the registry")
    parser.add_argument("--kwargs", type=json.loads, default={}, help="JSON arguments of the environment")
    parser.add_argument("--split", default="train", help="whose tasks show the tools")
    parser.add_argument("--draft", action="store_true", help="from the tools, even if the environment has a profile")
    args = parser.parse_args(argv)
    with contextlib.closing(make(args.env, **args.kwargs)) as world:
        profile = {} if args.draft else world.profile()
        profile = profile or draft(world.name, tools_of(world, world.tasks(args.split)))
    json.dump(profile, sys.stdout, indent=2, ensure_ascii=False)
    print()
    return 0


if __name__ == "__main__":
    sys.exit(main())
