"""Measure how many tasks the embedded explorer finds in a world, and how far its verifiers can be trusted.

    python -m experiments.exploring                                              # travel, BFCL; seeds 0 1 2
    python -m experiments.exploring --worlds textworld appworld --budget 10 --seeds 0 \\
        --python textworld=.venv-worlds/bin/python appworld=.venv-appworld/bin/python
    python -m experiments.exploring --worlds my_module:MyEnv --kwargs 'my_module:MyEnv={"size": 3}'

A world is a name of envs.WORLDS or `my_module:MyEnv`. `travel` is explored without its `profile`, `describe` and
`difference`. Each world and seed has a file in --out, so that the same command goes on where it was interrupted;
exploring.md there is the table. A measurement ends after --minutes; what was found until then counts.

Columns: tasks kept per 1,000 environment steps, those of checking included; the share of tasks whose verifier agrees
with the world's own comparison of states (`STATES`) in every trial episode (`trials`), and the number of these
episodes; the mean Jaccard similarity of the words of two queries; the number of sequences of goals ("templates").
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import re
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from envs.probed import probed
from envs.process import Deadlines
from envs.remote import RemoteWorld
from envs.source import Source
from envs.toolcalls import Call, call_text, parse
from envs.travel import Travel
from envs.world import Task, World
from evolver.questioning import TaskPool
from evolver.questioning.curiosity import Curiosity
from evolver.questioning.tasks import CLOSING, jaccard
from evolver.traces import play

PATIENT = Deadlines(start=300.0, reset=300.0, step=300.0)
ALIASES = {"travel": "experiments.exploring:Unaided"}
PAIRS = 5000  # most pairs of queries that are compared
Check = Callable[[World], Any]


class Unaided(Travel):
    """The travel agency without anything that tells an explorer about its insides."""

    profile = World.profile

    @property
    def describe(self) -> Any:
        raise AttributeError("describe")

    @property
    def difference(self) -> Any:
        raise AttributeError("difference")


class OutOfBudget(BaseException):
    """Raised in the middle of a measurement that takes too long. No Exception, which would be the world's failure."""


class Counted:
    """Makes worlds that count their steps and episodes, and that raise OutOfBudget after `seconds` or `steps`."""

    def __init__(self, make_world: Callable[[], World], seconds: float, steps: float = float("inf")):
        self._make, self._end, self._steps = make_world, time.monotonic() + seconds, steps
        self.counts: Counter[str] = Counter()

    def __call__(self) -> World:
        world = self._make()
        for name in ("step", "reset"):
            setattr(world, name, self._counting(name, getattr(world, name)))
        return world

    def _counting(self, name: str, method: Callable) -> Callable:
        def counted(*args: Any) -> Any:
            if time.monotonic() > self._end:
                raise OutOfBudget("out of time")
            if self.counts["step"] >= self._steps:
                raise OutOfBudget("out of steps")
            self.counts[name] += 1
            return method(*args)

        return counted


# --- agreement -------------------------------------------------------------------------------------------------------


def _same_apis(a: World, b: Any) -> bool:
    from envs.bfcl.data import package

    try:
        return bool(package().state_checker(a._apis.instances, b)["valid"])
    except RecursionError:  # a directory was moved into itself
        return False


# World -> (what its state is, True if it is in this state). The explorer and its verifiers never see this.
STATES: dict[str, tuple[Check, Callable[[World, Any], bool]]] = {
    "travel": (lambda w: w._agency.difference(), lambda w, state: w._agency.difference() == state),
    "bfcl": (lambda w: w._apis.instances, _same_apis),
    "thermostat": (lambda w: dict(w._state), lambda w, state: w._state == state),
}


def agreement(world: World, tasks: Sequence[Task], rng: random.Random) -> dict[str, Any]:
    """Compare each task's verifier with the world in the task's `trials`, as figures of a measurement.

    They agree if the verifier finds the state right exactly where it is the state after the reference.
    """
    state, same = STATES[world.name]
    agree, episodes, wrong = [], 0, []
    wrapped = probed(world)
    for task in tasks:
        play(wrapped, task, task.reference)
        wanted, known = state(wrapped.world), len(wrong)
        for actions in trials(task, tasks, rng):
            play(wrapped, task, actions)
            expected = same(wrapped.world, wanted)
            if bool(wrapped.evaluate().components["state"]) != expected:
                wrong.append(
                    {"query": task.query, "source": task.meta["source"], "actions": actions, "right": expected}
                )
            episodes += 1
        agree.append(len(wrong) == known)
    return {"agree": agree, "trials": episodes, "disagreements": wrong}


def trials(task: Task, tasks: Sequence[Task], rng: random.Random) -> list[list[str]]:
    """Return episodes that try a verifier: the reference, nothing, the reference without each of its calls, with
    another value in each of its calls, and three random sequences of calls that solve other tasks of the same world."""
    calls = [call for action in task.reference for call in parse(action).calls]
    here = [t for t in tasks if t.meta["source"] == task.meta["source"] and t.seed == task.seed]
    others = [call for t in here for action in t.reference for call in parse(action).calls]
    made = [calls, []]
    made += [[*calls[:n], *calls[n + 1 :]] for n in range(len(calls))]
    for n, call in enumerate(calls):
        options = [
            {**call.arguments, name: other.arguments[name]}
            for other in others
            for name, value in call.arguments.items()
            if other.name == call.name and other.arguments.get(name, value) != value
        ]
        if options:
            made.append([*calls[:n], Call(call.name, rng.choice(options)), *calls[n + 1 :]])
    made += [rng.choices(others, k=rng.randint(1, 8)) for _ in range(3)]
    return [[*(call_text(call.name, call.arguments) for call in made_calls), CLOSING] for made_calls in made]


# --- a measurement ---------------------------------------------------------------------------------------------------


def measure(
    make_world: Callable[[], World], *, budget: int, seed: int, seeds: int, seconds: float, options: dict[str, Any]
) -> dict[str, Any]:
    """Explore until `budget` tasks are kept, and return the figures of one row as JSON values.

    seeds: training tasks whose worlds are explored. options: arguments of Curiosity.
    """
    world = make_world()
    starts = world.tasks("train")[:seeds] or [Task(f"{world.name}/0", world.name, "Use the tools.")]
    world.close()
    counted = Counted(make_world, seconds)
    pool = TaskPool(starts, overlap=0.8, capacity=10**9)
    started, ended = time.monotonic(), "budget"
    try:
        if len(pool.grow(Curiosity(pool, **options), counted, budget, seed)) < budget:
            ended = "nothing more found"
    except OutOfBudget as reason:
        ended = str(reason)
    figures = {"seconds": time.monotonic() - started, "ended": ended} | {
        k: counted.counts[k] for k in ("step", "reset")
    }
    tasks, exploration = list(pool.tasks.values()), pool.metrics()
    prefix = "questioning/rejected/"
    figures["rejected"] = {k.removeprefix(prefix): int(v) for k, v in exploration.items() if k.startswith(prefix)}
    figures["walks"] = int(exploration["questioning/walks"])
    figures["difficulty"] = dict(sorted(Counter(str(task.difficulty) for task in tasks).items()))
    figures["templates"] = len({task.meta["template"] for task in tasks})
    rng = random.Random(seed)
    figures["similarity"] = similarity([task.query for task in tasks], rng)
    world = make_world()
    try:
        if world.name in STATES and not isinstance(world, RemoteWorld):
            figures |= agreement(world, tasks, rng)
    finally:
        world.close()
    figures["tasks"] = [{"query": task.query, "reference": task.reference} for task in tasks]
    return figures


def similarity(queries: Sequence[str], rng: random.Random) -> float:
    """Return the mean Jaccard similarity of the words of two queries; 0 for less than two."""
    bags = [frozenset(re.findall(r"\w+", query.lower())) for query in queries]
    pairs = list(itertools.combinations(range(len(bags)), 2))
    chosen = rng.sample(pairs, min(PAIRS, len(pairs)))
    return sum(jaccard(bags[a], bags[b]) for a, b in chosen) / max(len(chosen), 1)


# --- the table -------------------------------------------------------------------------------------------------------

HEAD = "world|seeds|tasks|per 1,000 steps|steps|walks|seconds|agree|trials|difficulty: tasks|similarity|templates"


def table(rows: dict[str, list[dict[str, Any]]]) -> str:
    """Return the table in Markdown, with a line on rejected proposals for each world. rows: {world: measurements}."""
    lines = ["| " + HEAD.replace("|", " | ") + " |", "|" + "---|" * (HEAD.count("|") + 1)]
    lines += ["| " + " | ".join(_row(world, runs)) + " |" for world, runs in rows.items()]
    for world, runs in rows.items():
        rejected: Counter[str] = Counter()
        for run in runs:
            rejected.update(run["rejected"])
        reasons = ", ".join(f"{n} x {reason}" for reason, n in rejected.most_common()) or "nothing"
        ended = ", ".join(f"{n} x {why}" for why, n in Counter(run["ended"] for run in runs).most_common())
        lines += ["", f"{world}: rejected {reasons}. Ended by: {ended}."]
    return "\n".join(lines) + "\n"


def _row(world: str, runs: list[dict[str, Any]]) -> list[str]:
    kept, steps = (sum(values) for values in zip(*((len(run["tasks"]), run["step"]) for run in runs)))
    difficulty: Counter[int] = Counter()
    for run in runs:
        difficulty.update({int(level): n for level, n in run["difficulty"].items()})
    agree = [value for run in runs for value in run.get("agree", ())]
    mean = lambda key: sum(run[key] for run in runs) / len(runs)  # noqa: E731
    return [
        world,
        str(len(runs)),
        str(kept),
        f"{1000 * kept / max(steps, 1):.2f}",
        f"{steps:,}",
        str(sum(run["walks"] for run in runs)),
        f"{sum(run['seconds'] for run in runs):.0f}",
        f"{100 * sum(agree) / len(agree):.1f}%" if agree else "-",
        str(sum(run.get("trials", 0) for run in runs)) if agree else "-",
        ", ".join(f"{level}: {difficulty[level]}" for level in sorted(difficulty)),
        f"{mean('similarity'):.2f}",
        f"{mean('templates'):.0f}",
    ]


def run(args: argparse.Namespace) -> str:
    """Measure what is missing in `args.out`, and return the table of all worlds that were asked for."""
    args.out.mkdir(parents=True, exist_ok=True)
    rows: dict[str, list[dict[str, Any]]] = {}
    for world in args.worlds:
        kwargs = json.loads(args.kwargs.get(world, "{}"))
        settings = {"kwargs": kwargs, "budget": args.budget, "seeds": args.tasks, "minutes": args.minutes}
        settings["options"] = json.loads(args.options)
        for seed in args.seeds:
            path = args.out / f"{re.sub(r'[^a-zA-Z0-9_.]', '-', world)}-{seed}.json"
            figures = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
            if figures.get("settings") != settings:
                python = args.python.get(world)
                pool = {"mode": "worker", "workers": 2, "per_worker": 1, "python": python} if python else {}
                with Source(ALIASES.get(world, world), kwargs, deadlines=PATIENT, **pool) as source:
                    figures = measure(
                        source.world,
                        budget=args.budget,
                        seed=seed,
                        seeds=args.tasks,
                        seconds=60 * args.minutes,
                        options=settings["options"],
                    )
                figures["settings"] = settings
                path.write_text(json.dumps(figures), encoding="utf-8")
            rows.setdefault(world, []).append(figures)
            cells = dict(zip(HEAD.split("|"), _row(world, [figures])))
            print(f"{world}, seed {seed}: {', '.join(f'{k} {v}' for k, v in list(cells.items())[2:])}", flush=True)
    text = table(rows)
    (args.out / "exploring.md").write_text(text, encoding="utf-8")
    return text


class _Pairs(argparse.Action):
    """Collects NAME=VALUE arguments in a dictionary."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option: str | None = None) -> None:
        pairs = [value.partition("=") for value in values]
        if any(not equals for _, equals, _ in pairs):
            parser.error(f"{option} takes NAME=VALUE, not {' '.join(values)}")
        setattr(namespace, self.dest, {name: value for name, _, value in pairs})


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--worlds", nargs="+", default=["travel", "bfcl"], metavar="WORLD")
    parser.add_argument("--budget", type=int, default=100, help="tasks to keep")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--tasks", type=int, default=64, help="training tasks whose worlds are explored")
    parser.add_argument("--minutes", type=float, default=10.0, help="most minutes of one world and seed")
    parser.add_argument("--kwargs", nargs="+", default={}, action=_Pairs, help="WORLD=JSON: arguments of the world")
    parser.add_argument("--python", nargs="+", default={}, action=_Pairs, help="WORLD=PATH: its interpreter")
    parser.add_argument("--options", default="{}", help="JSON: arguments of Curiosity, such as its breadth")
    parser.add_argument("--out", type=Path, default=Path("runs/exploring"))
    print("\n" + run(parser.parse_args(argv)))


if __name__ == "__main__":
    main()
