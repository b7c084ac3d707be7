"""Measure how many tasks an explorer finds in a world, at what cost, and how well they are checked.

    python -m experiments.exploring                             # travel, BFCL; seeds 0 1 2
    python -m experiments.exploring --worlds textworld appworld --budget 10 --seeds 0 \\
        --python textworld=.venv-worlds/bin/python appworld=.venv-appworld/bin/python
    python -m experiments.exploring --worlds my_module:MyEnv --kwargs 'my_module:MyEnv={"size": 3}'
    python -m rl.engines.serve --model=DIR --port=8001 &
    python -m experiments.exploring --worlds travel \\
        --by curiosity/plain curiosity/model llm/plain \\
        --url http://127.0.0.1:8001/v1 --options 'llm={"breadth": 2, "depth": 4}'

A world is a name of envs.WORLDS or `my_module:MyEnv`. `travel` is explored without its `profile`,
`describe` and `difference`. Each world and seed has a file in --out, so that the same command goes
on where it was interrupted; exploring.md there is the table. A measurement ends after --minutes or
--steps; what was found until then counts. --by names explorers and who words their tasks, as
`questioning.explorer` and `questioning.words` do. Language models are asked on any server that is
like OpenAI's, and a second table then has the calls, tokens and environment steps per task.

Columns: tasks kept per 1,000 environment steps, those of checking included; by the world's own
comparison of states (`STATES`), the share of tasks whose verifier accepts no wrong state in any
trial episode (`trials`), the share of those whose verifier agrees with it in all of them, and the
number of these episodes; the mean Jaccard similarity of the words of two queries; the number of
sequences of goals ("templates").
"""

from __future__ import annotations

import argparse
import inspect
import itertools
import json
import random
import re
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from envs import world_class
from envs.probed import probed
from envs.process import Deadlines
from envs.profile import tools_of
from envs.remote import RemoteWorld
from envs.source import Source
from envs.toolcalls import Call, call_text, parse
from envs.travel import Travel
from envs.world import Task, World, WorldError
from evolver.config import plugs
from evolver.llm.client import Chat, Limits
from evolver.llm.questions import Role
from evolver.parts import Parts
from evolver.processes.interrupt import RunEnds
from evolver.questioning import EXPLORERS, WORDS, Explorer, TaskPool
from evolver.questioning.curiosity import Curiosity
from evolver.questioning.llm import LlmExplorer
from evolver.questioning.tasks import CLOSING, jaccard
from evolver.questioning.words import ByModel
from evolver.replaying import replay
from evolver.transcripts import tool_list

PATIENT = Deadlines(start=300.0, reset=300.0, step=300.0)
ALIASES = {"travel": "experiments.exploring:Unaided"}
PAIRS = 5000  # most pairs of queries that are compared
SHOWN = 2000  # characters of an observation, or of the list of tools, that a language model sees
# A small model answers much that cannot be read, which is what is measured and no fault of its
# server.
LIMITS = Limits(concurrency=4, deadline=600.0, attempts=2, failures=10**9)
# A world's class has its own attributes, which nothing but these checks knows.
State = Callable[[Any], Any]
Same = Callable[[Any, Any], bool]


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
    """Raised in the middle of a measurement that takes too long. No Exception, which would be the
    world's failure."""


class Counted:
    """Makes worlds that count their steps and episodes, and that raise OutOfBudget after `seconds`
    or `steps`."""

    def __init__(
        self, make_world: Callable[[], World], seconds: float, steps: float = float("inf")
    ):
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


# --- agreement ------------------------------------------------------------------------------------


def _same_apis(a: Any, b: Any) -> bool:
    from envs.bfcl.data import package

    try:
        return bool(package().state_checker(a._apis.instances, b)["valid"])
    except RecursionError:  # a directory was moved into itself
        return False


# World -> (what its state is, True if it is in this state). The explorer and its verifiers never
# see this.
STATES: dict[str, tuple[State, Same]] = {
    "travel": (lambda w: w.difference(), lambda w, state: w.difference() == state),
    "bfcl": (lambda w: w._apis.instances, _same_apis),
    "thermostat": (lambda w: dict(w._state), lambda w, state: w._state == state),
    "home": (lambda w: dict(w._tools.state), lambda w, state: w._tools.state == state),
}


def agreement(world: World, tasks: Sequence[Task], rng: random.Random) -> dict[str, Any]:
    """Compare each task's verifier with the world in the task's `trials`, as figures of a
    measurement.

    They agree if the verifier finds the state right exactly where it is the state after the
    reference; it is sound if it finds no other state right. Tasks whose reference the world itself
    does not find equal to a repetition of it, as where a folder was copied into itself, cannot be
    compared and do not count.
    """
    state, same = STATES[world.name]
    agree, sound, episodes = [], [], 0
    wrong: list[dict[str, Any]] = []
    wrapped = probed(world)
    for task in tasks:
        replay(wrapped, task, task.reference)
        wanted, known = state(wrapped.world), len(wrong)
        replay(wrapped, task, task.reference)
        if not same(wrapped.world, wanted):
            continue
        for actions in trials(task, tasks, rng):
            replay(wrapped, task, actions)
            expected = same(wrapped.world, wanted)
            if bool(wrapped.evaluate().components["state"]) != expected:
                wrong.append(
                    {
                        "query": task.query,
                        "source": task.meta["source"],
                        "actions": actions,
                        "right": expected,
                    }
                )
            episodes += 1
        agree.append(len(wrong) == known)
        sound.append(all(trial["right"] for trial in wrong[known:]))
    return {"agree": agree, "sound": sound, "trials": episodes, "disagreements": wrong}


def trials(task: Task, tasks: Sequence[Task], rng: random.Random) -> list[list[str]]:
    """Return episodes that try a verifier: the reference, nothing, the reference without each of
    its calls, with another value in each of its calls, and three random sequences of calls that
    solve other tasks of the same world."""
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
    return [
        [*(call_text(call.name, call.arguments) for call in made_calls), CLOSING]
        for made_calls in made
    ]


# --- a measurement --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Means:
    """By what tasks are made. explorer, words: names, as in the config. options: arguments of the
    explorer. role: the server and model of the explorer and the writer."""

    explorer: str = "curiosity"
    words: str = "plain"
    options: dict[str, Any] = field(default_factory=dict)
    role: Role = field(default_factory=lambda: Role("", ""))

    @property
    def name(self) -> str:
        return f"{self.explorer}/{self.words}"

    def chat(self) -> Chat | None:
        """Return a client of the language model, None if none is asked."""
        asks = self.explorer == "llm" or self.words == "model"
        return (
            Chat(dict.fromkeys(("explorer", "writer"), self.role), limits=LIMITS) if asks else None
        )

    def make(self, make_world: Callable[[], World], pool: TaskPool, chat: Chat | None) -> Explorer:
        if self.explorer == "llm":
            return LlmExplorer(
                Parts(make_world=make_world, client=chat, max_chars=SHOWN, task_pool=pool),
                **self.options,
            )
        return Curiosity(Parts(task_pool=pool), **self.options)


def measure(
    make_world: Callable[[], World],
    *,
    budget: int,
    seed: int,
    seeds: int,
    seconds: float,
    steps: float = float("inf"),
    means: Means = Means(),
) -> dict[str, Any]:
    """Explore until `budget` tasks are kept, and return the figures of one row as JSON values.

    seeds: training tasks whose worlds are explored. seconds, steps: after which the measurement
    ends.
    """
    with closing(make_world()) as world:
        starts = world.tasks("train")[:seeds] or [
            Task(f"{world.name}/0", world.name, "Use the tools.")
        ]
        tools = tool_list(tools_of(world, starts[:8]), SHOWN)
    counted = Counted(make_world, seconds, steps)
    pool, chat = TaskPool(starts, overlap=0.8, capacity=10**9), means.chat()
    started, ended = time.monotonic(), "budget"
    try:
        if len(pool.grow(means.make(counted, pool, chat), counted, budget, seed)) < budget:
            ended = "nothing more found"
    except (OutOfBudget, RunEnds) as reason:
        ended = str(reason)
    figures: dict[str, Any] = {"ended": ended} | {k: counted.counts[k] for k in ("step", "reset")}
    if chat is not None:
        with closing(chat):
            figures |= _reworded(pool, chat, tools) if means.words == "model" else {}
            figures |= _cost(chat.ledger.metrics())
    figures["seconds"] = time.monotonic() - started
    tasks, exploration = list(pool.tasks.values()), pool.metrics()
    prefix = "questioning/rejected/"
    figures["rejected"] = {
        k.removeprefix(prefix): int(v) for k, v in exploration.items() if k.startswith(prefix)
    }
    figures["walks"] = int(exploration["questioning/walks"])
    figures["difficulty"] = dict(sorted(Counter(str(task.difficulty) for task in tasks).items()))
    figures["templates"] = len({task.meta["template"] for task in tasks})
    rng = random.Random(seed)
    figures["similarity"] = similarity([task.query for task in tasks], rng)
    with closing(make_world()) as world:
        if world.name in STATES and not isinstance(world, RemoteWorld):
            figures |= agreement(world, tasks, rng)
    figures["tasks"] = [{"query": task.query, "reference": task.reference} for task in tasks]
    return figures


def _reworded(pool: TaskPool, chat: Chat, tools: str) -> dict[str, Any]:
    """Put the tasks of the pool into a model's words. Return how many were, and why other wordings
    were not used."""
    words = ByModel(Parts(client=chat, max_chars=SHOWN))
    try:
        pool.reword(words, list(pool.tasks), tools)
    except RunEnds as reason:
        return {"wordings": {str(reason): 1}}
    return {"wordings": {name.rpartition("/")[2]: int(n) for name, n in words.metrics().items()}}


def _cost(metrics: dict[str, float]) -> dict[str, int]:
    """Return the calls, those without a usable answer, and the tokens of a client's metrics."""
    names = {
        "calls": ("calls",),
        "unanswered": ("unanswered",),
        "tokens": ("prompt_tokens", "completion_tokens"),
    }
    sums = dict.fromkeys(names, 0)
    for key, value in metrics.items():
        for name, parts in names.items():
            sums[name] += (
                int(value) if key.count("/") == 2 and key.rpartition("/")[2] in parts else 0
            )
    return sums


def similarity(queries: Sequence[str], rng: random.Random) -> float:
    """Return the mean Jaccard similarity of the words of two queries; 0 for less than two."""
    bags = [frozenset(re.findall(r"\w+", query.lower())) for query in queries]
    pairs = list(itertools.combinations(range(len(bags)), 2))
    chosen = rng.sample(pairs, min(PAIRS, len(pairs)))
    return sum(jaccard(bags[a], bags[b]) for a, b in chosen) / max(len(chosen), 1)


# --- the table ------------------------------------------------------------------------------------

HEAD = (
    "world|seeds|tasks|per 1,000 steps|steps|walks|seconds|sound|agree|trials|difficulty: tasks"
    "|similarity|templates"
)
COSTS = "world|tasks|reworded|calls|unanswered|tokens|calls per task|tokens per task|steps per task"


def table(rows: dict[str, list[dict[str, Any]]]) -> str:
    """Return the table in Markdown, one of the costs if a language model was asked, and a line on
    rejected proposals for each world. rows: {world: measurements}."""
    lines = _lines(HEAD, [_row(world, runs) for world, runs in rows.items()])
    if any("calls" in run for runs in rows.values() for run in runs):
        lines += ["", *_lines(COSTS, [_costs(world, runs) for world, runs in rows.items()])]
    for world, runs in rows.items():
        rejected: Counter[str] = Counter()
        for run in runs:
            rejected.update(run["rejected"])
        reasons = ", ".join(f"{n} x {reason}" for reason, n in rejected.most_common()) or "nothing"
        ended = ", ".join(
            f"{n} x {why}" for why, n in Counter(run["ended"] for run in runs).most_common()
        )
        lines += ["", f"{world}: rejected {reasons}. Ended by: {ended}."]
    return "\n".join(lines) + "\n"


def _lines(head: str, rows: list[list[str]]) -> list[str]:
    """Return the lines of a table in Markdown."""
    cells = [head.split("|"), ["---"] * (head.count("|") + 1), *rows]
    return ["| " + " | ".join(row) + " |" for row in cells]


def _costs(world: str, runs: list[dict[str, Any]]) -> list[str]:
    total = {
        name: sum(run.get(name, 0) for run in runs)
        for name in ("calls", "unanswered", "tokens", "step")
    }
    kept = sum(len(run["tasks"]) for run in runs)
    reworded = sum(run.get("wordings", {}).get("reworded", 0) for run in runs)
    each = [f"{total[name] / kept:,.1f}" if kept else "-" for name in ("calls", "tokens", "step")]
    counts = [f"{total[name]:,}" for name in ("calls", "unanswered", "tokens")]
    return [
        world,
        str(kept),
        str(reworded) if any("wordings" in run for run in runs) else "-",
        *counts,
        *each,
    ]


def _row(world: str, runs: list[dict[str, Any]]) -> list[str]:
    kept, steps = (
        sum(values) for values in zip(*((len(run["tasks"]), run["step"]) for run in runs))
    )
    difficulty: Counter[int] = Counter()
    for run in runs:
        difficulty.update({int(level): n for level, n in run["difficulty"].items()})
    agree, sound = (
        [value for run in runs for value in run.get(name, ())] for name in ("agree", "sound")
    )
    mean = lambda key: sum(run[key] for run in runs) / len(runs)  # noqa: E731
    return [
        world,
        str(len(runs)),
        str(kept),
        f"{1000 * kept / max(steps, 1):.2f}",
        f"{steps:,}",
        str(sum(run["walks"] for run in runs)),
        f"{sum(run['seconds'] for run in runs):.0f}",
        f"{100 * sum(sound) / len(sound):.1f}%" if sound else "-",
        f"{100 * sum(agree) / len(agree):.1f}%" if agree else "-",
        str(sum(run.get("trials", 0) for run in runs)) if agree else "-",
        ", ".join(f"{level}: {difficulty[level]}" for level in sorted(difficulty)),
        f"{mean('similarity'):.2f}",
        f"{mean('templates'):.0f}",
    ]


def problems(args: argparse.Namespace) -> list[str]:
    """Return what is wrong with the arguments, world by world and explorer by explorer. No world is
    started."""
    found = []
    for option, known in (("kwargs", args.worlds), ("python", args.worlds), ("options", EXPLORERS)):
        given = getattr(args, option)
        found += [
            f"--{option} {name}: choose {', '.join(known)}" for name in given if name not in known
        ]
    if not args.url and any("llm" in by or "model" in by for by in args.by):
        found.append("--by with llm or model needs --url, the address of a server")
    for name, text in args.options.items():
        if name in EXPLORERS and (values := _object(f"--options {name}", text, found)) is not None:
            found += [
                f"--options {name}: {why}"
                for why in plugs.problems("questioning.explorer", name, values)
            ]
    for world in args.worlds:
        values = _object(f"--kwargs {world}", args.kwargs.get(world, "{}"), found)
        if values is None or world in args.python:  # another interpreter has the packages
            continue
        try:
            target = world_class(ALIASES.get(world, world))
            inspect.signature(target).bind(**values)
        except (ValueError, ImportError, TypeError) as error:
            found.append(f"--worlds {world}: {error}")
            continue
        wrong = plugs.misfits(target, values)
        found += [f"--kwargs {world}: {key}={values[key]!r} {why}" for key, why in wrong.items()]
    return found


def _object(name: str, text: str, found: list[str]) -> dict[str, Any] | None:
    """Return a JSON object; None if the text is none, which is added to `found`."""
    try:
        value = json.loads(text)
    except ValueError as error:
        value = error
    if not isinstance(value, dict):
        found.append(f"{name}={text} is no JSON object, such as {{}}")
        return None
    return value


def run(args: argparse.Namespace) -> list[str]:
    """Measure what is missing in `args.out`, and print and write the table of all worlds and means
    that were asked for.

    A world that fails ends its own measurement only. Returns the reasons of those that failed.
    """
    args.out.mkdir(parents=True, exist_ok=True)
    rows: dict[str, list[dict[str, Any]]] = {}
    failed = []
    role = Role(args.url, args.model, args.key, temperature=1.0, max_tokens=args.max_tokens)
    for world, by in itertools.product(args.worlds, args.by):
        explorer, _, words = by.partition("/")
        means = Means(explorer, words, json.loads(args.options.get(explorer, "{}")), role)
        row = world if by == "curiosity/plain" else f"{world}, {by}"
        for seed in args.seeds:
            try:
                figures = _measured(args, world, means, seed, f"{row}-{seed}")
            except (WorldError, ModuleNotFoundError) as error:
                failed.append(f"{row}, seed {seed}: failed: {error}")
                print(failed[-1], file=sys.stderr, flush=True)
                continue
            rows.setdefault(row, []).append(figures)
            cells = dict(zip(HEAD.split("|"), _row(row, [figures])))
            print(
                f"{row}, seed {seed}: {', '.join(f'{k} {v}' for k, v in list(cells.items())[2:])}",
                flush=True,
            )
    text = "\n".join([table(rows), *failed])
    (args.out / "exploring.md").write_text(text, encoding="utf-8")
    print("\n" + text)
    return failed


def _measured(
    args: argparse.Namespace, world: str, means: Means, seed: int, name: str
) -> dict[str, Any]:
    """Return one measurement: from its file if that is of the same settings, else a new one, which
    is written there."""
    kwargs = json.loads(args.kwargs.get(world, "{}"))
    settings = {
        "kwargs": kwargs,
        "budget": args.budget,
        "seeds": args.tasks,
        "minutes": args.minutes,
    }
    settings |= {
        "steps": args.steps,
        "by": means.name,
        "options": means.options,
        "model": means.role.model,
    }
    path = args.out / f"{re.sub(r'[^a-zA-Z0-9_.]', '-', name)}.json"
    figures = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    if figures.get("settings") == settings:
        return figures
    python = args.python.get(world)
    pool = {"mode": "worker", "workers": 2, "per_worker": 1, "python": python} if python else {}
    with Source(ALIASES.get(world, world), kwargs, deadlines=PATIENT, **pool) as source:
        limits = {
            "budget": args.budget,
            "seconds": 60 * args.minutes,
            "steps": args.steps or float("inf"),
        }
        figures = measure(source.world, seed=seed, seeds=args.tasks, means=means, **limits)
    figures["settings"] = settings
    path.write_text(json.dumps(figures), encoding="utf-8")
    return figures


class _Pairs(argparse.Action):
    """Collects NAME=VALUE arguments in a dictionary."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option: str | None = None) -> None:
        pairs = [value.partition("=") for value in values]
        if any(not equals for _, equals, _ in pairs):
            parser.error(f"{option} takes NAME=VALUE, not {' '.join(values)}")
        setattr(namespace, self.dest, {name: value for name, _, value in pairs})


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    means = [f"{explorer}/{words}" for explorer in EXPLORERS for words in WORDS]
    parser.add_argument("--worlds", nargs="+", default=["travel", "bfcl"], metavar="WORLD")
    parser.add_argument(
        "--by", nargs="+", default=["curiosity/plain"], choices=means, help="explorer/words"
    )
    parser.add_argument("--budget", type=int, default=100, help="tasks to keep")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument(
        "--tasks", type=int, default=64, help="training tasks whose worlds are explored"
    )
    parser.add_argument(
        "--minutes", type=float, default=10.0, help="most minutes of one measurement"
    )
    parser.add_argument(
        "--steps",
        type=int,
        default=0,
        help="most environment steps of one measurement; 0 = no limit",
    )
    parser.add_argument(
        "--kwargs", nargs="+", default={}, action=_Pairs, help="WORLD=JSON: arguments of the world"
    )
    parser.add_argument(
        "--python", nargs="+", default={}, action=_Pairs, help="WORLD=PATH: its interpreter"
    )
    parser.add_argument(
        "--options", nargs="+", default={}, action=_Pairs, help="EXPLORER=JSON: its arguments"
    )
    parser.add_argument(
        "--url", default="", help="OpenAI-compatible server, with /v1, for llm and model"
    )
    parser.add_argument("--model", default="", help="name of the model there")
    parser.add_argument(
        "--key", default="", help="environment variable that holds the server's key"
    )
    parser.add_argument("--max-tokens", type=int, default=512, help="most tokens of one answer")
    parser.add_argument("--out", type=Path, default=Path("runs/exploring"))
    args = parser.parse_args(argv)
    if found := problems(args):
        parser.error("\n".join(["", *found]))
    return int(bool(run(args)))


if __name__ == "__main__":
    sys.exit(main())
