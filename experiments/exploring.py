"""Measure how many tasks an explorer finds in a world, at what cost, and how well they are checked.

    python -m experiments.exploring                             # travel, BFCL; seeds 0 1 2
    python -m experiments.exploring --worlds textworld appworld --budget 10 --seeds 0 \\
        --python textworld=.venv-worlds/bin/python appworld=.venv-appworld/bin/python
    python -m experiments.exploring --worlds my_module:MyEnv --kwargs 'my_module:MyEnv={"size": 3}'
    python -m rl.engines.serve --model=DIR --port=8001 &
    python -m experiments.exploring --worlds travel \\
        --by curiosity/plain curiosity/model llm/plain \\
        --url http://127.0.0.1:8001/v1 --options 'llm={"breadth": 2, "depth": 4}'

A world is a name of envs.WORLDS or `my_module:MyEnv`. `travel` is explored without its `profile`
and `difference`. Each world and seed has a file in --out, so that the same command goes
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

import functools
import inspect
import itertools
import json
import operator
import random
import re
import sys
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from envs import world_class
from envs.probed import probed
from envs.process import Deadlines
from envs.profile import tools_of
from envs.remote import RemoteWorld
from envs.source import Source
from envs.toolcalls import Call, call_text
from envs.travel import Travel
from envs.values import Json
from envs.world import Task, World, WorldError
from evolver.config import plugs
from evolver.files import formats
from evolver.llm.client import Chat, Limits
from evolver.llm.questions import Role
from evolver.parts import Parts
from evolver.processes.interrupt import RunEnds
from evolver.questioning import EXPLORERS, WORDS, TaskPool
from evolver.questioning.tasks import CLOSING, jaccard
from evolver.questioning.words import ByModel
from evolver.replaying import calls_of, replay
from evolver.transcripts import tool_list
from experiments import commands, compare

PATIENT = Deadlines(start=300.0, reset=300.0, step=300.0)
ALIASES = {"travel": "experiments.exploring:Unaided"}
PAIRS = 5000  # most pairs of queries that are compared
SHOWN = 2000  # characters of an observation, or of the list of tools, that a language model sees
# A small model answers much that cannot be read, which is what is measured and no fault of its
# server.
LIMITS = Limits(concurrency=4, deadline=600.0, attempts=2, failures=10**9)


class Unaided(Travel):
    """The travel agency without anything that tells an explorer about its insides."""

    profile = World.profile

    @property
    def difference(self) -> Any:
        raise AttributeError("difference")


class OutOfBudget(BaseException):
    """Raised in the middle of a measurement that takes too long. No Exception, which would be the
    world's failure."""


class Counted:
    """Makes worlds that count their steps and episodes, and that raise OutOfBudget after `seconds`
    or `steps`."""

    def __init__(self, make_world: Callable[[], World], seconds: float, steps: float):
        self._make, self._end, self._steps = make_world, time.monotonic() + seconds, steps
        self.counts: Counter[str] = Counter()

    def __call__(self) -> World:
        world = self._make()
        for name in ("step", "reset"):
            setattr(world, name, functools.partial(self._call, name, getattr(world, name)))
        return world

    def _call(self, name: str, method: Callable, *args: Any) -> Any:
        if time.monotonic() > self._end:
            raise OutOfBudget("out of time")
        if self.counts["step"] >= self._steps:
            raise OutOfBudget("out of steps")
        self.counts[name] += 1
        return method(*args)


# --- agreement ------------------------------------------------------------------------------------


def _same_apis(a: Any, b: Any) -> bool:
    from envs.bfcl.data import package

    try:
        return bool(package().state_checker(a, b)["valid"])
    except RecursionError:  # a directory was moved into itself
        return False


# World -> what its state is. The explorer and its verifiers never see this.
STATES: dict[str, Callable[[Any], Any]] = {
    "travel": Travel.difference,
    "bfcl": lambda w: w._apis.instances,
    "thermostat": lambda w: dict(w._state),
    "home": lambda w: dict(w._tools.state),
}
SAME = {"bfcl": _same_apis}  # where states are not equal as Python compares them


def agreement(world: World, tasks: Sequence[Task], rng: random.Random) -> Json:
    """Compare each task's verifier with the world in the task's `trials`, as figures of a
    measurement.

    They agree if the verifier finds the state right exactly where it is the state after the
    reference; it is sound if it finds no other state right. Tasks whose reference the world itself
    does not find equal to a repetition of it, as where a folder was copied into itself, cannot be
    compared and do not count.
    """
    state, same = STATES[world.name], SAME.get(world.name, operator.eq)
    agree, sound, episodes = [], [], 0
    wrong: list[Json] = []
    wrapped = probed(world)
    for task in tasks:
        replay(wrapped, task, task.reference)
        wanted, known = state(wrapped.world), len(wrong)
        replay(wrapped, task, task.reference)
        if not same(state(wrapped.world), wanted):
            continue
        for actions in trials(task, tasks, rng):
            replay(wrapped, task, actions)
            expected = same(state(wrapped.world), wanted)
            if bool(wrapped.evaluate().components["state"]) != expected:
                what = {"query": task.query, "source": task.meta["source"]}
                wrong.append(what | {"actions": actions, "right": expected})
            episodes += 1
        agree.append(len(wrong) == known)
        sound.append(all(trial["right"] for trial in wrong[known:]))
    return {"agree": agree, "sound": sound, "trials": episodes, "disagreements": wrong}


def trials(task: Task, tasks: Sequence[Task], rng: random.Random) -> list[list[str]]:
    """Return episodes that try a verifier: the reference, nothing, the reference without each of
    its calls, with another value in each of its calls, and three random sequences of calls that
    solve other tasks of the same world."""
    calls = calls_of(task)
    here = [t for t in tasks if t.meta["source"] == task.meta["source"] and t.seed == task.seed]
    others = list(itertools.chain.from_iterable(map(calls_of, here)))
    made = [calls, []]
    made += [[*calls[:n], *calls[n + 1 :]] for n in range(len(calls))]
    for n, call in enumerate(calls):
        options = []  # the arguments with one of them from another call of the tool
        for other in (other for other in others if other.name == call.name):
            for name, value in call.arguments.items():
                if other.arguments.get(name, value) != value:
                    options.append({**call.arguments, name: other.arguments[name]})
        if options:
            made.append([*calls[:n], Call(call.name, rng.choice(options)), *calls[n + 1 :]])
    made += [rng.choices(others, k=rng.randint(1, 8)) for _ in range(3)]
    return [[*(call_text(c.name, c.arguments) for c in episode), CLOSING] for episode in made]


# --- a measurement --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Settings:
    """Settings that the figures of a measurement depend on, beside the world and the seed.

    kwargs: arguments of the world. seeds: training tasks whose worlds are explored. steps: 0 = no
    limit. by: EXPLORER/WORDS, names as in the config. options: arguments of the explorer. model:
    name of the model on the server.
    """

    kwargs: Json
    budget: int
    seeds: int
    minutes: float
    steps: int
    by: str
    options: Json
    model: str


def measure(make_world: Callable[[], World], settings: Settings, seed: int, role: Role) -> Json:
    """Explore until `settings.budget` tasks are kept, and return the figures of one row as JSON
    values.

    role: the server and model of the explorer and the writer.
    """
    by, _, words = settings.by.partition("/")
    with closing(make_world()) as world:
        starts = world.tasks("train")[: settings.seeds]
        starts = starts or [Task(f"{world.name}/0", world.name, "Use the tools.")]
        tools = tool_list(tools_of(world, starts[:8]), SHOWN)
    counted = Counted(make_world, 60 * settings.minutes, settings.steps or float("inf"))
    pool = TaskPool(starts, overlap=0.8, capacity=10**9)
    asks = by == "llm" or words == "model"
    chat = Chat({"explorer": role, "writer": role}, limits=LIMITS) if asks else None
    parts = Parts(make_world=counted, client=chat, max_chars=SHOWN, task_pool=pool)
    explorer = plugs.plug("questioning.explorer", by, settings.options)(parts)
    started, ended = time.monotonic(), "budget"
    try:
        if len(pool.grow(explorer, counted, settings.budget, seed)) < settings.budget:
            ended = "nothing more found"
    except (OutOfBudget, RunEnds) as reason:
        ended = str(reason)
    figures: Json = {"ended": ended} | {k: counted.counts[k] for k in ("step", "reset")}
    if chat is not None:
        with closing(chat):
            if words == "model":
                figures["wordings"] = _reworded(pool, ByModel(parts), tools)
            for name in ("calls", "unanswered"):
                figures[name] = sum(getattr(a, name) for a in chat.ledger.total.values())
            figures["tokens"] = chat.ledger.tokens
    tasks, explored = list(pool.tasks.values()), pool.metrics()  # which begin again once read
    rng = random.Random(seed)
    figures |= {
        "seconds": time.monotonic() - started,
        "rejected": _last_words(explored, "questioning/rejected/"),
        "walks": int(explored["questioning/walks"]),
        "difficulty": dict(sorted(Counter(str(task.difficulty) for task in tasks).items())),
        "templates": len({task.meta["template"] for task in tasks}),
        "similarity": similarity([task.query for task in tasks], rng),
        "tasks": [{"query": task.query, "reference": task.reference} for task in tasks],
    }
    with closing(make_world()) as world:
        if world.name in STATES and not isinstance(world, RemoteWorld):
            figures |= agreement(world, tasks, rng)
    return figures


def _reworded(pool: TaskPool, words: ByModel, tools: str) -> dict[str, int]:
    """Put the tasks of the pool into a model's words. Return how many were, and why other wordings
    were not used."""
    try:
        pool.reword(words, list(pool.tasks), tools)
    except RunEnds as reason:
        return {str(reason): 1}
    return _last_words(words.metrics())


def _last_words(metrics: Mapping[str, float], prefix: str = "") -> dict[str, int]:
    """Return {last word of the name: count} of the metrics whose names begin with a prefix."""
    return {k.rpartition("/")[2]: int(v) for k, v in metrics.items() if k.startswith(prefix)}


def similarity(queries: Sequence[str], rng: random.Random) -> float:
    """Return the mean Jaccard similarity of the words of two queries; 0 for less than two."""
    bags = [frozenset(re.findall(r"\w+", query.lower())) for query in queries]
    pairs = list(itertools.combinations(bags, 2))
    chosen = rng.sample(pairs, min(PAIRS, len(pairs)))
    return sum(jaccard(a, b) for a, b in chosen) / max(len(chosen), 1)


# --- the table ------------------------------------------------------------------------------------

Figures = Json


def table(rows: dict[str, list[Figures]]) -> str:
    """Return the table in Markdown, one of the costs if a language model was asked, and a line on
    rejected proposals for each world. rows: {world: measurements}."""
    sums = {world: summed(runs) for world, runs in rows.items()}
    text = markdown_of(row_of, sums)
    if any("calls" in found for found in sums.values()):
        text += "\n" + markdown_of(costs_of, sums)
    for world, found in sums.items():
        rejected, ended = listed(found["rejected"]), listed(found["ended"])
        text += f"\n{world}: rejected {rejected or 'nothing'}. Ended by: {ended}.\n"
    return text


def markdown_of(cells: Callable[[Figures], dict[str, str]], sums: dict[str, Figures]) -> str:
    """Return a table with the {column: cell} of each row."""
    lines = [{"world": world} | cells(found) for world, found in sums.items()]
    heads = [list(line) for line in lines[:1]]
    return compare.markdown(heads + [list(line.values()) for line in lines])


def summed(runs: Sequence[Figures]) -> Figures:
    """Return the number of measurements, "runs", and the sums of their figures: lists are joined,
    and words and {reason: count} are counted."""
    sums: Figures = {"runs": len(runs)}
    for name, value in itertools.chain.from_iterable(run.items() for run in runs):
        match value:
            case dict() if name != "settings":
                sums.setdefault(name, Counter()).update(value)
            case str():
                sums.setdefault(name, Counter())[value] += 1
            case int() | float() | list():
                sums[name] = sums[name] + value if name in sums else value
    return sums


def listed(counts: Counter[str]) -> str:
    """Return "3 x reason, 1 x another"."""
    return ", ".join(f"{n} x {reason}" for reason, n in counts.most_common())


def costs_of(found: Figures) -> dict[str, str]:
    """Return {column: cell} of the costs of a row."""
    kept = len(found["tasks"])
    cells = {"tasks": str(kept)}
    cells["reworded"] = str(found["wordings"]["reworded"]) if "wordings" in found else "-"
    cells |= {name: f"{found.get(name, 0):,}" for name in ("calls", "unanswered", "tokens")}
    for name, figure in (("calls", "calls"), ("tokens", "tokens"), ("steps", "step")):
        cells[f"{name} per task"] = f"{found.get(figure, 0) / kept:,.1f}" if kept else "-"
    return cells


def row_of(found: Figures) -> dict[str, str]:
    """Return {column: cell} of a row."""
    kept, levels = len(found["tasks"]), found["difficulty"]
    sound, agree = (compare.percent(found.get(name, ())) for name in ("sound", "agree"))
    return {
        "seeds": str(found["runs"]),
        "tasks": str(kept),
        "per 1,000 steps": f"{1000 * kept / max(found['step'], 1):.2f}",
        "steps": f"{found['step']:,}",
        "walks": str(found["walks"]),
        "seconds": f"{found['seconds']:.0f}",
        "sound": f"{sound}%" if sound else "-",
        "agree": f"{agree}%" if agree else "-",
        "trials": str(found["trials"]) if agree else "-",
        "difficulty: tasks": ", ".join(f"{n}: {levels[n]}" for n in sorted(levels, key=int)),
        "similarity": f"{found['similarity'] / found['runs']:.2f}",
        "templates": f"{found['templates'] / found['runs']:.0f}",
    }


# --- the command ----------------------------------------------------------------------------------


def values_of(
    option: str,
    words: Sequence[str],
    known: Collection[str],
    found: list[str],
    read: Callable[[str], Any] = formats.JSON_OBJECT.validate_json,
) -> Json:
    """Return {name: value} of NAME=VALUE texts; what is wrong with them is added to `found`."""
    values = {}
    for word in words:
        name, equals, text = word.partition("=")
        if not equals:
            found.append(f"--{option} takes NAME=VALUE, not {word}")
        elif name not in known:
            found.append(f"--{option} {name}: choose {', '.join(known)}")
        else:
            try:
                values[name] = read(text)
            except ValueError:
                found.append(f"--{option} {word} is no JSON object, such as {{}}")
    return values


def world_problems(world: str, values: Json) -> Iterator[str]:
    """Yield what is wrong with a world and its arguments. It is not started."""
    try:
        target = world_class(ALIASES.get(world, world))
        inspect.signature(target).bind(**values)
    except (ValueError, ImportError, TypeError) as error:
        yield f"--worlds {world}: {error}"
        return
    for key, why in plugs.misfits(target, values).items():
        yield f"--kwargs {world}: {key}={values[key]!r} {why}"


def measured(
    path: Path, settings: Settings, world: str, seed: int, python: str, role: Role
) -> Json:
    """Return one measurement: from its file if that is of the same settings, else a new one, which
    is written there."""
    figures = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    if figures.get("settings") == asdict(settings):
        return figures
    source = Source(
        ALIASES.get(world, world), settings.kwargs, mode="worker" if python else "inprocess",
        deadlines=PATIENT, per_worker=1, python=python,
    )  # fmt: skip
    with source:
        figures = measure(source.world, settings, seed, role) | {"settings": asdict(settings)}
    path.write_text(json.dumps(figures), encoding="utf-8")
    return figures


def main(
    *,
    worlds: commands.Words = ("travel", "bfcl"),
    by: commands.Words = ("curiosity/plain",),
    budget: int = 100,
    seeds: commands.Numbers = (0, 1, 2),
    tasks: int = 64,
    minutes: float = 10.0,
    steps: int = 0,
    kwargs: commands.Words = (),
    python: commands.Words = (),
    options: commands.Words = (),
    url: str = "",
    model: str = "",
    key: str = "",
    max_tokens: int = 512,
    out: Path = Path("runs/exploring"),
) -> int:
    """Measure what is missing in `out`, and print and write the table of all worlds and means that
    were asked for. A world that fails ends its own measurement only.

    by: explorer/words
    budget: tasks to keep
    tasks: training tasks whose worlds are explored
    minutes: most minutes of one measurement
    steps: most environment steps of one measurement; 0 = no limit
    kwargs: WORLD=JSON: arguments of the world
    python: WORLD=PATH: its interpreter
    options: EXPLORER=JSON: its arguments
    url: OpenAI-compatible server, with /v1, for llm and model
    model: name of the model there
    key: environment variable that holds the server's key
    max_tokens: most tokens of one answer
    """
    known = ["/".join(pair) for pair in itertools.product(EXPLORERS, WORDS)]
    found = [f"--by {name}: choose {', '.join(known)}" for name in by if name not in known]
    if not url and any("llm" in name or "model" in name for name in by):
        found.append("--by with llm or model needs --url, the address of a server")
    interpreters = values_of("python", python, worlds, found, str)
    arguments = values_of("kwargs", kwargs, worlds, found)
    explorers = values_of("options", options, EXPLORERS, found)
    for name, values in explorers.items():
        wrong = plugs.problems("questioning.explorer", name, values)
        found += [f"--options {name}: {why}" for why in wrong]
    for world in worlds:
        if world not in interpreters:  # another interpreter has the packages
            found += world_problems(world, arguments.get(world, {}))
    if found:
        raise commands.Problems(*found)
    out.mkdir(parents=True, exist_ok=True)
    rows: dict[str, list[Figures]] = {}
    failed = []
    role = Role(url, model, key, temperature=1.0, max_tokens=max_tokens)
    for world, name, seed in itertools.product(worlds, by, seeds):
        row = world if name == "curiosity/plain" else f"{world}, {name}"
        given, chosen = arguments.get(world, {}), explorers.get(name.partition("/")[0], {})
        settings = Settings(given, budget, tasks, minutes, steps, name, chosen, model)
        path = out / f"{re.sub(r'[^a-zA-Z0-9_.]', '-', f'{row}-{seed}')}.json"
        try:
            figures = measured(path, settings, world, seed, interpreters.get(world, ""), role)
        except (WorldError, ModuleNotFoundError) as error:
            failed.append(f"{row}, seed {seed}: failed: {error}")
            print(failed[-1], file=sys.stderr, flush=True)
            continue
        rows.setdefault(row, []).append(figures)
        _, *cells = row_of(summed([figures])).items()
        said = ", ".join(map(" ".join, cells))
        print(f"{row}, seed {seed}: {said}", flush=True)
    text = "\n".join([table(rows), *failed])
    (out / "exploring.md").write_text(text, encoding="utf-8")
    print("\n" + text)
    return int(bool(failed))


if __name__ == "__main__":
    commands.program(main)
