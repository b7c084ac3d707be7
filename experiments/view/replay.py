"""Comparison of the labels of a run's judge with those of replay: recorded episodes are played
again in the world.

For runs whose turns a language model labels. Labels by replay agree with themselves, as far as
worlds repeat.
"""

import itertools
import json
from collections import defaultdict
from collections.abc import Iterator
from contextlib import closing

from envs.probed import probed
from envs.source import Source
from envs.values import Json
from envs.world import Evaluation, Task
from evolver.attributing.replay import ReplayJudge
from evolver.files.formats import found
from evolver.llm.questions import SERVED
from evolver.parts import Parts
from experiments.view.runs import Run
from models.files import write_atomically
from rl.trajectory import Completion, StopReason, Trajectory, Turn

PATH = ".view/replay.json"
# The worlds whose arguments name neither code nor a command nor a folder of programs.
PLAIN = ("travel", "home", "bfcl", "reasoning", "scienceworld")
NAMES = {1: "GOOD", -1: "BAD", 0: "abstains"}


class NoReplay(ValueError):
    """A run whose episodes cannot be played again; the message says why."""


def compare(run: Run, count: int, *, trust: bool = False, python: str = "") -> Json:
    """Replay the last `count` labelled rollouts of training and write the comparison into the
    workdir.

    trust: whether `config.json` may name any world, such as my_world:World, and the url of a
    service. python: the interpreter of the world; none is ever taken from a file.

    Returns {"rollouts", "both": turns that both labelled, "agreed": those with equal labels,
    "table": [{"judge", "replay", "turns", "rollouts": [(file, row)]}], "skipped": rollouts whose
    task or end is not known any more}. Raises NoReplay and OSError.
    """
    source = source_of(run, trust, python)
    tasks = {task["id"]: Task.from_dict(task) for task in run.all_tasks()}
    chosen, skipped = [], 0
    for place, record in labelled(run):
        trajectory = trajectory_of(record, tasks)
        if trajectory is None:
            skipped += 1
        else:
            chosen.append((place, trajectory))
        if len(chosen) >= count:
            break
    with source:
        with closing(ReplayJudge(Parts(make_world=lambda: probed(source.world())))) as replay:
            labels = replay.label([trajectory for _, trajectory in chosen])
    places: dict[tuple[int, int], list[tuple[str, int]]] = defaultdict(list)  # of each turn
    for (place, trajectory), row in zip(chosen, labels):
        for turn, label in zip(trajectory.turns, row):
            places[turn.label, label.value].append(place)
    result: Json = {"rollouts": len(chosen), "skipped": skipped, "both": 0, "agreed": 0}
    result["table"] = []
    for (judge, theirs), turns in sorted(places.items(), reverse=True):
        cell = {"judge": judge, "replay": theirs, "turns": len(turns)}
        result["table"].append(cell | {"rollouts": list(dict.fromkeys(turns))})
        if judge and theirs:
            result["both"] += len(turns)
            result["agreed"] += len(turns) * (judge == theirs)
    write_atomically(run.workdir / PATH, json.dumps(result) + "\n")
    return result


def source_of(run: Run, trust: bool, python: str) -> Source:
    """Return the source of the world that `config.json` names. Raises NoReplay."""
    env = found(run.config(), "config.env")
    if not isinstance(env, dict) or not env.get("name"):
        raise NoReplay(f"{run.workdir.path}: no config.json that names the world")
    name, mode = env["name"], env.get("mode", "inprocess")
    if not isinstance(env.get("args", {}), dict):
        raise NoReplay(f"{run.workdir.path}: env.args of config.json is no JSON object")
    if not trust and (name not in PLAIN or mode == "http"):
        raise NoReplay(
            f"{run.workdir.path}: config.json names the world {name!r} (mode {mode!r}), which may"
            " run any code or ask any server. If you trust whoever made this folder, add --trust."
            f" Without it, only {', '.join(PLAIN)} are played"
        )
    url, pool = env.get("url", ""), Json()
    if python or mode == "worker" or url == SERVED:
        pool, url, mode = {"workers": 1, "python": python or None}, "", "worker"
    try:
        return Source(name, env.get("args"), mode=mode, url=url, **pool)
    except (TypeError, ValueError) as error:
        raise NoReplay(f"{run.workdir.path}: the world of config.json: {error}") from None


def labelled(run: Run) -> Iterator[tuple[tuple[str, int], Json]]:
    """Yield ((file, row), record) of the rollouts whose turns have labels, the last steps first."""
    files = run.index()["files"]
    steps = [number for number, file in enumerate(files) if file["kind"] == "step"]
    for number in sorted(steps, key=lambda number: -files[number]["step"]):
        members = range(len(files[number]["members"]))
        parts = (run.records(number, member) for member in members)
        for row, record in enumerate(itertools.chain.from_iterable(parts)):
            if any(turn["label"] for turn in record["turns"]):
                yield (files[number]["name"], row), record


def trajectory_of(record: Json, tasks: dict[str, Task]) -> Trajectory | None:
    """Return a recorded rollout with its labels, None if its task or the reason of its end is not
    known any more."""
    if record["task"] not in tasks or record["stop"] not in [reason.value for reason in StopReason]:
        return None
    turns = []
    for turn in record["turns"]:
        sampled = Completion(turn["tokens"], [], turn.get("stop", "stop"), turn.get("version", 0))
        info = turn.get("info", {})
        reward, label = turn.get("reward", 0.0), turn["label"]
        turns.append(Turn([], sampled, turn["action"], turn["observation"], info, reward, label))
    evaluation = Evaluation(record["score"] or 0.0, record["success"], record["components"])
    return Trajectory(
        tasks[record["task"]], record["rollout"], record["seed"], record["messages"], turns,
        StopReason(record["stop"]), evaluation, draw=record["draw"],
    )  # fmt: skip


def lines(run: Run, result: Json) -> Iterator[str]:
    """Yield the lines that tell a comparison."""
    share = f"{result['agreed'] / result['both']:.1%}" if result["both"] else "none"
    yield f"{run.name}: {result['rollouts']} rollouts replayed, {result['skipped']} skipped"
    yield f"{result['both']:,} turns that both labelled, {share} of them equally"
    for cell in result["table"]:
        judge, replay = NAMES[cell["judge"]], NAMES[cell["replay"]]
        yield f"  judge {judge:9} replay {replay:9} {cell['turns']:7,} turns"
