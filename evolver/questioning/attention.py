"""The tools that a visit of a world attends to, where there are very many: those about one subject,
by the words of their names and descriptions.

Of several hundred tools, a walk over all of them would seldom make two calls that have to do with
each other. Those of one subject are a small world, and what is learnt of a tool there holds
everywhere.
"""

import itertools
import random
import re
from collections import Counter
from collections.abc import Collection

from evolver.questioning.calls import Operations, in_prose
from evolver.questioning.operation_stats import OperationStats
from evolver.questioning.roles import Role
from evolver.questioning.values import group_of, name_parts
from rl.contexts.retrieved import index_of

_MANY = 100  # tools, of which a visit attends to some only
_ATTENDED = 32  # tools of a visit
_DIGIT = re.compile(r"\d")
_LARGE_GROUP = 10  # operations of a group on average, so that operations count as grouped
GROUPS = 2  # that a walk draws of grouped operations


def is_grouped(operations: Collection[str]) -> bool:
    """Return True if there are very many operations, in a few groups."""
    groups = set(map(group_of, operations))
    few = GROUPS < len(groups) <= len(operations) // _LARGE_GROUP
    return few and len(operations) > _MANY


def subjects(operations: Operations) -> int:
    """Return how many visits it takes to attend to all tools; 1 if each visit does."""
    tools = set(map(_tool, operations))
    if len(tools) <= _MANY or in_prose(operations) or is_grouped(operations):
        return 1
    return -(-len(tools) // _ATTENDED)


def attended(
    operations: Operations, stats: OperationStats, rng: random.Random, begun: Collection[str]
) -> Operations:
    """Return the operations of one visit. begun: those that it begins with, which it has to have.

    They are those nearest to one tool: one that no visit has attended to, else one that may show
    something new. What hundreds of tools answer alike counts as much as what a single one does.
    Calls that have shown changes elsewhere and require nothing come with them.
    """
    if subjects(operations) == 1:
        return operations
    roles = stats.roles
    outcomes = {name: _outcomes(name, roles[name]) for name in operations}
    shared = Counter(itertools.chain.from_iterable(outcomes.values()))
    unvisited = [name for name in operations if not roles[name].visits]
    drawn = list(begun) or unvisited or list(operations)
    hopes = []
    for name in drawn:
        rare = sum(1 / shared[outcome] for outcome in outcomes[name])
        hopes.append(roles[name].novelty(0) * rare)
    subject = _tool(rng.choices(drawn, hopes)[0])
    texts: dict[str, str] = {}
    for name, operation in operations.items():
        texts.setdefault(_tool(name), f"{name} {operation.description}")
    tools = list(texts)
    near = index_of(tuple(texts.values())).nearest(texts[subject], len(tools))
    # Where many tools read alike, the same ones would be nearest to all of them.
    new = set(map(_tool, unvisited))
    near = sorted(near, key=lambda n: tools[n] not in new)[:_ATTENDED]
    kept = {subject, *(tools[n] for n in near), *map(_tool, begun)}
    for name, operation in operations.items():
        if roles[name].changes_shown and not operation.required:
            kept.add(_tool(name))
    chosen = {name: operation for name, operation in operations.items() if _tool(name) in kept}
    for name in chosen:
        roles[name].visits += 1
    return chosen


def _outcomes(name: str, role: Role) -> set[str]:
    """Return what has come of an operation, without the words of its name."""
    parts = name_parts(name)
    found = set()
    for outcome in role.outcomes or ("",):
        unnamed = outcome.replace(name, "").replace(_DIGIT.sub("9", name), "")  # as kinds have it
        found.add(" ".join(word for word in unnamed.split() if word not in parts))
    return found


def _tool(name: str) -> str:
    """Return the tool of an operation, which may be one choice of it."""
    return name.partition(" ")[0]
