"""The profile of a world and the preferred tasks, as text for language models."""

import contextlib
import re
from collections.abc import Sequence

from envs.world import Tool
from evolver.questioning.calls import Json
from evolver.transcripts import shortened

_LEVELS = (
    "easy: one thing to look up or change",
    "medium: a few steps that depend on each other",
    "hard: several steps that depend on each other, and something that has to be found out first",
)
_LONGEST = 160  # characters of a description
_EXAMPLES = 6  # of an entity


def profile_text(profile: Json, tools: Sequence[Tool] = (), limit: int = 8000) -> str:
    """Return a world's profile as lines of text: entities with their attributes, examples and
    operations.

    tools: those of the current world. If some of them are operations of the profile, the other
    operations are left out, and so are entities with no operation left.
    """
    entities = profile.get("entities", ())
    general = profile.get("operations", ())
    known = {_tool_of(operation) for operation in general}
    for entity in entities:
        known.update(map(_tool_of, entity.get("operations", ())))
    offered = known.intersection(tool["function"]["name"] for tool in tools) or known

    def lines_of(operations: Sequence[Json], indent: str) -> list[str]:
        return [f"{indent}{_line_of(op)}" for op in operations if _tool_of(op) in offered]

    lines = [str(profile["description"])] if profile.get("description") else []
    for entity in entities:
        own = lines_of(entity.get("operations", ()), "    ")
        if entity.get("operations") and not own:
            continue
        attributes = ", ".join(entity.get("attributes", ()))
        examples = ", ".join(_examples(entity))
        line = f"- {entity['name']}" + (f" ({attributes})" if attributes else "")
        lines += [line + (f", such as {examples}" if examples else ""), *own]
    lines += lines_of(general, "- ")
    return shortened("\n".join(dict.fromkeys(lines)), limit) or "(nothing is known)"


def _tool_of(operation: Json) -> str:
    return str(operation.get("tool", operation["name"]))


def _line_of(operation: Json) -> str:
    """Return an operation in one line: name, arguments, start of the description."""
    line = str(operation["name"])
    if operation.get("arguments"):
        line += f" ({', '.join(operation['arguments'])})"
    description = str(operation.get("description", "")).split("\n")[0]
    return f"{line}: {shortened(description, _LONGEST)}" if description else line


def _examples(entity: Json) -> list[str]:
    """Return examples of an entity: its own, or else strings that match the pattern of its ids."""
    if entity.get("examples"):
        return [str(example) for example in entity["examples"]][:_EXAMPLES]
    pattern = str(entity.get("id", ""))
    examples = []
    for part in pattern.split("|"):
        example = re.sub(r"\[(\w)[^\]]*\]", r"\1", part.replace(r"\d", "1"))
        with contextlib.suppress(re.error):
            if example and re.fullmatch(pattern, example):
                examples.append(example)
    return examples[:_EXAMPLES]


def preference_text(profile: Json) -> str:
    """Describe the preferred tasks, from `task_preference` or `preference` of the profile. The
    default is the paper's: 2 entities, 3 attributes, 3 operations, hard."""
    wanted = profile.get("task_preference") or profile.get("preference") or {}
    if wanted.keys() & {"calls", "operations", "answers", "style"}:  # as in envs/travel/profile.py
        fewest, most = wanted.get("calls", [1, 10])
        asks = "at most one question" if wanted.get("answers", 1) else "no question"
        text = (
            f"It takes {fewest} to {most} calls, changes up to {wanted.get('operations', 2)}"
            f" things, and asks {asks}."
        )
        return f"{text} Its style: {wanted['style']}." if wanted.get("style") else text
    level = min(max(wanted.get("relation_difficulty", 3), 1), 3)
    return (
        f"It is about up to {wanted.get('num_entities', 2)} entities and"
        f" {wanted.get('num_attributes', 3)} attributes, takes up to"
        f" {wanted.get('num_operations', 3)} different operations, and is {_LEVELS[level - 1]}."
    )
