"""Hours and money of the runs of a study, before they are run: from the planner, or from the
quickstart's speed."""

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from configs.paper import runs as paper_runs
from evolver.plan import calls, targets
from evolver.plan.amounts import evaluated_episodes, first_tasks
from evolver.plan.case import case_of
from evolver.plan.estimate import overheads, phases, step_seconds
from experiments.compare import Table
from experiments.grid import Run, some
from experiments.paper.study import RUNS, Study

ORIGINALS = {"appworld": 90, "bfcl": 100}  # training tasks
HELD_OUT = {"dev": 57, "test_normal": 168, "val": 100}
# Minutes of one run on two CPU cores with nothing beside it, estimated from the quickstart's speed
# (docs/results.md).
TINY_MINUTES = {"train": 2.5, "eval": 0.5, "pool": 0.5}


@dataclass(frozen=True)
class Cost:
    """The expected cost of a run: hours of wall time; money of language models, None = unknown
    price."""

    hours: float
    money: float | None
    work: str


def cost_of(study: Study, run: Run, target: str, prices: str = "") -> Cost:
    """Return the expected cost of a run. Raises PlanError.

    target: as for `--mode=plan`. prices: as config.llm.prices.
    """
    if study.tiny:
        return Cost(TINY_MINUTES[run.mode] / 60, 0.0, run.mode)
    name = run.config.removeprefix(f"{RUNS}:")
    size, world, _ = name.split(",")
    config = paper_runs.get_config(name)
    config.llm.prices = prices
    seconds, episode = pace(size, world, target)
    if run.mode == "eval":
        tasks = HELD_OUT[run.overrides["eval.split"]]
        episodes = tasks * (run.overrides["eval.rollouts"] + bool(run.overrides["eval.greedy"]))
        return Cost(episode * episodes / 3600, 0.0, f"{episodes:,} episodes")
    if run.mode == "pool":
        config.steps = 1
        episodes = ORIGINALS[world] * config.navigating.rollouts
        money = priced(config, world, ("summariser", "embedder")) if prices else None
        return Cost(episode * episodes / 3600, money, f"{episodes:,} episodes")
    episodes = config.steps * config.rollout.tasks * config.rollout.group
    evaluated = evaluated_episodes(config, HELD_OUT[config.eval.split])
    hours = (seconds * config.steps + episode * evaluated) / 3600
    if config.navigating.enabled:
        first = first_tasks(config, ORIGINALS[world])
        hours += episode * first * config.navigating.rollouts / 3600
    work = f"{config.steps} steps, {episodes + evaluated:,} episodes"
    return Cost(hours, priced(config, world), work)


def priced(config: Any, world: str, roles: tuple[str, ...] = ()) -> float | None:
    """Return the cost of the calls to language models at config.llm.prices, None if a model has no
    price there."""
    bill = calls.bill(config, ORIGINALS[world])
    return total([made.cost for role, made in bill.items() if not roles or role in roles])


def total(costs: Sequence[float | None]) -> float | None:
    """Return the sum of costs, None if one of them is not known."""
    return None if None in costs else float(sum(cost or 0.0 for cost in costs))


@functools.cache
def pace(size: str, world: str, target: str) -> tuple[float, float]:
    """Return the expected seconds of a training step with its share of offload, weight updates and
    checkpoints, and of one more episode among many, on a target."""
    config = paper_runs.get_config(f"{size},{world},q")
    case = case_of(config, target)
    rollout = sum(phases(case)[phase].expected for phase in ("prefill", "decode"))
    around = [seconds for name, seconds in overheads(case).items() if name != "evaluation"]
    return step_seconds(case) + sum(around) / config.steps, rollout / case.trajectories


def spent(money: float | None) -> str:
    """Return the text of a cost in money."""
    return "?" if money is None else f"{money:,.0f}"


def rows(study: Study, target: str, prices: str = "") -> Table:
    """Return the list of the runs as a table, with a last line of totals. Raises PlanError and
    OSError."""
    devices = 0 if study.tiny else targets.parse(target).count
    table = [["run", "what", "hours", "GPU-hours", "models, money", "of cells"]]
    found = {name: cost_of(study, run, target, prices) for name, run in study.runs.items()}
    for name, cost in found.items():
        used = some(list(dict.fromkeys(study.users.get(name, []))), 2)
        money = spent(cost.money) if cost.money != 0 else ""
        gpu = f"{cost.hours * devices:,.1f}" if devices else ""
        what = f"{study.runs[name].mode}: {cost.work}"
        table.append([name, what, f"{cost.hours:.2f}", gpu, money, used])
    hours = sum(cost.hours for cost in found.values())
    gpu = f"{hours * devices:,.0f}" if devices else ""
    money = spent(total([cost.money for cost in found.values()]))
    table.append([f"{len(found)} runs", "", f"{hours:,.1f}", gpu, money, ""])
    return table
