"""Calls to language models: how many a training run makes, by role, and what they cost."""

import math
from typing import Any, NamedTuple

from evolver.config import plugs
from evolver.config.derived import synthetic_tasks
from evolver.config.paths import resolve
from evolver.llm.questions import POLICY_URLS
from evolver.llm.roles import paid, read_prices, role_settings
from evolver.navigating.experience_pool import read_pool
from evolver.navigating.llm import MOST, Reranker
from evolver.plan.amounts import EPISODE, evaluated_tasks, evaluations, first_tasks
from evolver.plan.text import table

ANSWER = 500  # assumed mean tokens of an answer
SECONDS = 10.0  # assumed mean seconds of an answer
EXPERIENCE = 100  # assumed tokens of one experience or one query
# The plugs whose calls are counted, and the episodes that a call reads, assumed. The calls of other
# plugs are unknown.
COUNTED = {
    "explorer": ("questioning.explorer", ("llm",), 0.5),
    "writer": ("questioning.explorer", ("llm", "curiosity"), 1),
    "judge": ("questioning.judge", ("naive", "principle", "reference"), 1),
    "step_judge": ("attributing.judge", ("llm",), 1),
    "summariser": ("navigating.extractor", ("llm",), 2),
    "reranker": ("navigating.refine", ("rerank", "rewrite"), 0),
    "embedder": ("navigating.embedder", ("endpoint",), 0),
}
Count = tuple[int, float]  # the least and the most calls of a run, inf = unknown


class Calls(NamedTuple):
    """The calls of a role in one training run. Answers from the cache count as calls.

    read, written: tokens of all calls, `most` of them if that is known, else `least`. cost: money,
    None without a price of the model; the policy takes time of the engine, but no money.
    """

    model: str
    least: int
    most: float  # inf = unknown
    read: float
    written: float
    cost: float | None


def bill(config: Any, originals: int = 0, held_out: int = 0) -> dict[str, Calls]:
    """Return {role: its calls} for the roles that the config uses.

    originals, held_out: number of original tasks and of evaluated ones, 0 = unknown. Raises OSError
    and ValueError if config.llm.prices cannot be read.
    """
    prices = read_prices(config.llm.prices)
    counts = _counts(config, originals, held_out)
    result = {}
    for role, asked in role_settings(config).items():
        key, names, episodes = COUNTED[role]
        least, most = counts[role] if plugs.chosen(config, key)[1] in names else (0, math.inf)
        number = least if math.isinf(most) else most
        tokens = episodes * EPISODE * config.rollout.context
        answer = min(ANSWER, asked.max_tokens)
        if role == "reranker":
            tokens = EXPERIENCE * (1 + Reranker.candidates * config.navigating.top_k)
        if role == "embedder":
            tokens = EXPERIENCE
            answer = 0
        price = (0.0, 0.0) if asked.is_policy else prices.get(asked.model)
        cost = price and number * (tokens * price[0] + answer * price[1]) / 1e6
        result[role] = Calls(asked.model, least, most, number * tokens, number * answer, cost)
    return result


def lines(config: Any, originals: int = 0, held_out: int = 0) -> list[str]:
    """Return the bill as a section of the plan: a heading, a table, and the assumptions; [] if no
    role is used."""
    roles = bill(config, originals, held_out)
    if not roles:
        return []
    rows = [["", "calls", "read", "written", "cost"]]
    for role, made in roles.items():
        name = f"{role} ({made.model or 'no model'})"
        rows.append([name, _range(made.least, made.most), *_spent(made)])
    rows.append(["total", "", *_spent(*roles.values())])
    episode = EPISODE * config.rollout.context
    assumed = f"assumed: episodes of {episode:,.0f} tokens, answers of {ANSWER} tokens"
    if any(made.least for made in roles.values()):
        assumed += "; the least calls are those of walks that make as many tasks as they may"
    if any(made.model in POLICY_URLS for made in roles.values()):
        assumed += "; what the policy plays costs no money, and its time is not in the plan"
    priced = "costs are in the unit of config.llm.prices"
    return [
        "language models, calls and millions of tokens of a run",
        *table(*rows),
        assumed,
        priced if config.llm.prices else "config.llm.prices gives no prices",
    ]


def grading(config: Any) -> tuple[int, float]:
    """Return the questions about outcomes and turns of one step, and the seconds that their answers
    take, as many at a time as `llm.concurrency` allows."""
    r = config.rollout
    judged = synthetic_tasks(config) * r.group
    roles = {"judge": judged, "step_judge": r.tasks * r.group}
    asked = role_settings(config).items()
    count = sum(roles.get(role, 0) for role, settings in asked if not settings.is_policy)
    return count, math.ceil(count / config.llm.concurrency) * SECONDS


def forecast(config: Any, originals: int, held_out: int) -> str:
    """Return what language models are expected to take, in one line; "" if none may cost money."""
    roles = role_settings(config)
    prices = read_prices(config.llm.prices)
    if not (bought := paid(roles, prices)):
        return ""
    made = [calls for role, calls in bill(config, originals, held_out).items() if role in bought]
    read, written, cost = _spent(*made)
    least = sum(calls.least for calls in made)
    most = sum(calls.most for calls in made)
    c = config.llm
    ends = [f"{c.budget_tokens:,} tokens"] * (c.budget_tokens > 0)
    ends += [f"{c.budget_money:g} of money"] * bool(c.budget_money)
    money = f"; money: {cost}" if config.llm.prices else "; config.llm.prices gives no prices"
    return (
        f"language models ({', '.join(bought)}) are expected to take {_range(least, most)} calls,"
        f" {read} million tokens read and {written} million written{money}."
        f" {'The run ends at ' + ' or '.join(ends) if ends else 'Nothing limits them'}"
    )


def _counts(config: Any, originals: int, held_out: int) -> dict[str, Count]:
    """Return {role: the least and the most calls in one training run}, of the plugs in COUNTED."""
    n = config.navigating
    # Each of these draws tasks for a step, or replacements for groups without signal.
    draws = config.steps * (1 + config.rollout.refill)
    groups = draws * config.rollout.tasks
    judged = draws * synthetic_tasks(config) * config.rollout.group
    first = learnt = first_tasks(config, originals)  # groups that experience is extracted from
    if n.every:
        learnt += config.steps // n.every * (1 + config.rollout.refill) * config.rollout.tasks
    given = plugs.values(*plugs.chosen(config, "navigating.extractor"))
    labelled = first if plugs.trait(config, "navigating.extractor", "reads_labels", True) else 0
    queries = _retrievals(config, groups, held_out)
    # The embedder gets one text to learn the length of vectors, then queries and experiences.
    folder = resolve(n.pool)
    given_texts = len(read_pool(folder)["experiences"]) if n.pool and folder.is_dir() else 0
    texts = 1 + given_texts + learnt * (1 if n.extractor.name == "contrast" else MOST)
    return {
        "explorer": _exploration(config, "explorer", originals),
        "writer": _exploration(config, "writer", originals),
        "judge": (0, judged + first * n.rollouts),
        "step_judge": (0, groups * config.rollout.group + labelled * n.rollouts),
        "summariser": (0, learnt * (1 + bool(given.get("valid")))),
        "reranker": (0, queries),
        "embedder": (0, texts + queries),
    }


def _retrievals(config: Any, groups: int, held_out: int) -> float:
    """Return the number of retrievals of experience: one a group, and one a task of an
    evaluation. inf = unknown."""
    found = groups if round(config.navigating.share * config.rollout.group) else 0
    rounds = evaluations(config)
    tasks = evaluated_tasks(config, held_out)
    if not config.eval.experience or not rounds:
        return found
    return found + rounds * tasks if tasks else math.inf


def _exploration(config: Any, role: str, originals: int) -> Count:
    """Return (least, most) calls: every walk makes as many tasks as it may, or none makes any."""
    q = config.questioning
    later = (config.steps - 1) // q.every if q.every else 0
    budgets = [q.refresh] * later if q.tasks else [q.budget, *[q.refresh] * later]
    # Words from a language model take one call a task.
    worded = sum(budgets) if role == "writer" and q.words.name == "model" else 0
    if q.explorer.name != "llm":
        return 0, worded
    given = plugs.values(*plugs.chosen(config, "questioning.explorer"))
    calls = given["breadth"] + given["depth"] if role == "explorer" else 1  # of one walk
    least = sum(math.ceil(budget / given["per_walk"]) for budget in budgets)
    most = sum(map(bool, budgets)) * given["rounds"] * originals
    return calls * least, calls * max(least, most) + worded if originals else math.inf


def _range(least: int, most: float) -> str:
    if math.isinf(most):
        return f"at least {least:,}" if least else "unknown"
    return f"{least:,} to {most:,}" if least else f"at most {most:,}"


def _spent(*made: Calls) -> list[str]:
    """Return the tokens and the cost of calls as cells: millions read, millions written, money. "?"
    = unknown."""
    read = sum(calls.read for calls in made)
    written = sum(calls.written for calls in made)
    costs = [calls.cost for calls in made if calls.cost is not None]
    cells = [f"{read / 1e6:,.1f}", f"{written / 1e6:,.1f}", f"{sum(costs):,.2f}"]
    if len(costs) < len(made):
        cells[2] = "?"
    if all(math.isfinite(calls.most) for calls in made):
        return cells
    some = any(calls.least or calls.most for calls in made)
    return [f"at least {cell}" if some and cell != "?" else "?" for cell in cells]
