"""Calls to language models: how many a training run makes, by role, and what they cost."""

from __future__ import annotations

import functools
import math
from typing import Any

from evolver.config import plugs
from evolver.config.paths import resolve
from evolver.llm.client import PLAYED
from evolver.llm.roles import read_prices, settings
from evolver.navigating.llm import MOST, Reranker
from evolver.plan.analytic import EPISODE, evaluations

ANSWER = 500  # assumed mean tokens of an answer
EXPERIENCE = 100  # assumed tokens of one experience or one query
EPISODES_READ = {
    "explorer": 0.5,
    "writer": 1,
    "judge": 1,
    "step_judge": 1,
    "summariser": 2,
}  # assumed, per call
# The plugs whose calls are counted; the calls of other plugs are unknown.
COUNTED = {
    "explorer": ("questioning.explorer", ("llm",)),
    "writer": ("questioning.explorer", ("llm", "curiosity")),
    "judge": ("questioning.judge", ("naive", "principle", "reference")),
    "step_judge": ("attributing.judge", ("llm",)),
    "summariser": ("navigating.extractor", ("llm",)),
    "reranker": ("navigating.refine", ("rerank", "rewrite")),
    "embedder": ("navigating.embedder", ("endpoint",)),
}


def bill(config: Any, originals: int = 0, held_out: int = 0) -> dict[str, dict[str, Any]]:
    """Return {role: {"model", "least", "most", "read", "written", "cost"}} for the roles that the
    config uses.

    least, most: calls of a run, None = unknown. Answers from the cache count as calls. read,
    written: tokens of all calls, `most` of them if that is known, else `least`. cost: money, None
    without a price of the model; the policy takes time of the engine, but no money.
    originals, held_out: number of original tasks and of evaluated ones, 0 = unknown. Raises OSError
    and ValueError if config.llm.prices cannot be read.
    """
    prices = read_prices(resolve(config.llm.prices)) if config.llm.prices else {}
    result = {}
    for role, asked in settings(config).items():
        key, names = COUNTED[role]
        known = _plug(config, key).name in names
        least, most = _counts(config, role, originals, held_out) if known else (0, None)
        number = least if most is None else most
        tokens = EPISODES_READ.get(role, 0) * EPISODE * config.rollout.context
        if role == "embedder":
            tokens = EXPERIENCE
        if role == "reranker":
            tokens = EXPERIENCE * (1 + Reranker.candidates * config.navigating.top_k)
        answer = 0 if role == "embedder" else min(ANSWER, asked.max_tokens)
        price = (0, 0) if asked.played else prices.get(asked.model)
        cost = price and number * (tokens * price[0] + answer * price[1]) / 1e6
        result[role] = {
            "model": asked.model, "least": least, "most": most, "read": number * tokens, "written": number * answer,
            "cost": cost,
        }  # fmt: skip
    return result


def lines(config: Any, originals: int = 0, held_out: int = 0) -> list[str]:
    """Return the bill as a section of the plan: a heading, a table, and the assumptions; [] if no
    role is used."""
    from evolver.plan.report import table

    roles = bill(config, originals, held_out)
    if not roles:
        return []
    rows = []
    for role, r in roles.items():
        cost = "?" if r["cost"] is None else f"{r['cost']:,.2f}"
        tokens = map(_millions, (r["read"], r["written"]))
        rows.append(
            [f"{role} ({r['model'] or 'no model'})", _range(r["least"], r["most"]), *tokens, cost]
        )
    total = [sum(r[name] for r in roles.values()) for name in ("read", "written")]
    costs = [r["cost"] for r in roles.values()]
    cost = "?" if None in costs else f"{sum(costs):,.2f}"
    rows.append(["total", "", *map(_millions, total), cost])
    assumed = f"assumed: episodes of {EPISODE * config.rollout.context:,.0f} tokens, answers of {ANSWER} tokens"
    if any(r["least"] for r in roles.values()):
        assumed += "; the least calls are those of walks that make as many tasks as they may"
    if any(r["model"] in PLAYED for r in roles.values()):
        assumed += "; what the policy plays costs no money, and its time is not in the plan"
    return [
        "language models, calls and millions of tokens of a run",
        *table(["", "calls", "read", "written", "cost"], rows),
        assumed,
        "costs are in the unit of config.llm.prices"
        if config.llm.prices
        else "config.llm.prices gives no prices",
    ]


def _plug(config: Any, key: str) -> Any:
    return functools.reduce(getattr, key.split("."), config)


def _arguments(config: Any, key: str) -> dict[str, Any]:
    """Return the arguments of a plug, defaults included."""
    group = _plug(config, key)
    return plugs.values(key, group.name, group.args.to_dict())


def _counts(config: Any, role: str, originals: int, held_out: int) -> tuple[int, int | None]:
    """Return the least and the most calls of a role in one training run."""
    c, q, n = config, config.questioning, config.navigating
    draws = c.steps * (
        1 + c.rollout.refill
    )  # each draws tasks for a step, or replacements for groups without signal
    groups = draws * c.rollout.tasks
    if role in ("explorer", "writer"):
        return _exploration(config, role, originals)
    ignored = not getattr(
        plugs.load("navigating.extractor", n.extractor.name), "reads_labels", True
    )
    first = (
        0
        if role == "reranker" or (role == "step_judge" and ignored)
        else first_tasks(config, originals)
    )
    if first is None:
        return 0, None
    if role == "judge":
        return 0, draws * round(q.share * c.rollout.tasks) * c.rollout.group + first * n.rollouts
    if role == "step_judge":
        return 0, groups * c.rollout.group + first * n.rollouts
    learnt = first  # groups that experience is extracted from
    if n.every:
        learnt += c.steps // n.every * (1 + c.rollout.refill) * c.rollout.tasks
    if role == "summariser":
        return 0, learnt * (1 + bool(_arguments(config, "navigating.extractor")["valid"]))
    retrievals = groups if round(n.share * c.rollout.group) else 0
    if c.eval.experience:
        retrievals += evaluations(c) * (min(c.eval.tasks or held_out, held_out) or c.eval.tasks)
    unknown = c.eval.experience and c.eval.every and not (held_out or c.eval.tasks)
    if role == "embedder":  # one text to learn the length of vectors, then queries and experiences
        retrievals += 1 + learnt * (1 if n.extractor.name == "contrast" else MOST)
    return 0, None if unknown else retrievals


def first_tasks(config: Any, originals: int) -> int | None:
    """Return the most tasks that are attempted for the first pool, None = unknown. originals: as
    for `bill`."""
    q, n = config.questioning, config.navigating
    if not n.enabled or not n.rollouts or n.pool:
        return 0
    share = q.share if q.enabled else 0.0
    unknown = (share < 1 and not originals) or (share > 0 and q.tasks)
    if n.tasks or unknown:
        return n.tasks or None
    return (originals if share < 1 else 0) + (min(q.budget, q.capacity) if share > 0 else 0)


def _exploration(config: Any, role: str, originals: int) -> tuple[int, int | None]:
    """Return (least, most) calls: every walk makes as many tasks as it may, or none makes any. None
    = unknown."""
    q, arguments = config.questioning, _arguments(config, "questioning.explorer")
    later = (config.steps - 1) // q.every if q.every else 0
    budgets = [budget for budget in [q.budget] * (not q.tasks) + [q.refresh] * later if budget]
    worded = (
        sum(budgets) if role == "writer" and q.words.name == "model" else 0
    )  # one call per task
    if q.explorer.name != "llm":
        return 0, worded
    calls = arguments["breadth"] + arguments["depth"] if role == "explorer" else 1  # of one walk
    least = sum(math.ceil(budget / arguments["per_walk"]) for budget in budgets)
    most = len(budgets) * arguments["rounds"] * originals
    return calls * least, calls * max(least, most) + worded if originals else None


def _range(least: int, most: int | None) -> str:
    if most is None:
        return f"at least {least:,}" if least else "unknown"
    return f"{least:,} to {most:,}" if least else f"at most {most:,}"


def _millions(tokens: float) -> str:
    return f"{tokens / 1e6:,.1f}"
