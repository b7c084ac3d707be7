"""Checks of the world and its tasks: unknown worlds, empty splits, too few tasks, broken files of
tasks, and held-out tasks among those that are trained on."""

import contextlib
import itertools
import random
import shutil
from collections.abc import Generator, Iterator
from typing import Any

from ml_collections import ConfigDict

from envs import boundary, make, mixture, world_class
from envs.world import Task, World
from evolver.config import plugs
from evolver.config.config_file import reason
from evolver.config.derived import originals_needed, synthetic_tasks, worlds
from evolver.config.paths import resolve
from evolver.config.values import hint
from evolver.files.workdir import read_tasks
from evolver.llm import roles
from evolver.navigating.experience_pool import read_pool
from models.files import BrokenFile

TASK_FILE = ".jsonl"  # the end of an `eval.split` that is a file of tasks
# Tasks by the key that names them, such as "env.split", as far as they are known.
Known = dict[str, list[Task]]


def evaluated(tasks: list[Task], config: ConfigDict) -> list[Task]:
    """Return the tasks of a split that are evaluated. config: `config.eval`."""
    kept = sampled([task for task in tasks if task.env not in config.worlds], config.tasks)
    for world, count in config.worlds.items():
        kept = kept + sampled([task for task in tasks if task.env == world], count)
    ids = {task.id for task in kept}
    return [task for task in tasks if task.id in ids]


def sampled(tasks: list[Task], count: int) -> list[Task]:
    """Return `count` tasks in order, drawn with a fixed seed; all of them for 0 or for more than
    there are.

    Taking every n-th task instead would miss a whole difficulty wherever a split cycles through the
    difficulties.
    """
    if not 0 < count < len(tasks):
        return tasks
    chosen = random.Random("held-out tasks").sample(range(len(tasks)), count)
    return [tasks[i] for i in sorted(chosen)]


def held_out_tasks(world: World, split: str) -> list[Task]:
    """Return the tasks of `eval.split`: a split of the world, a file of tasks, or "" for none."""
    if split.endswith(TASK_FILE):
        return read_tasks(resolve(split))
    return boundary.tasks(world, split) if split else []


def world_problems(config: ConfigDict, mode: str) -> Iterator[str]:
    """Yield problems with the world and its tasks."""
    tasks: Known = {}
    held_out = []
    yield from file_problems(config, tasks)
    mixed = list(mixture_problems(config)) if config.env.name == mixture.Mixture.name else []
    yield from mixed
    # A check starts no workers and asks no service.
    if config.env.mode == "inprocess" and not mixed:
        world = yield from made(config.env.name, config.env.args.to_dict(), "config.env")
        if world is None:
            return
        yield from split_problems(config, mode, world, tasks)
        with contextlib.suppress(Exception):  # a split that is not evaluated on may be unknown
            held_out = held_out_tasks(world, config.eval.split)
        world.close()
    yield from name_problems(config, tasks, held_out)
    yield from leaks(roles.for_evaluation(config) if mode == "eval" else config, tasks, held_out)
    yield from shared_ids(tasks)
    if mode in ("train", "plan"):
        yield from shortages(config, tasks)


def mixture_problems(config: ConfigDict) -> Iterator[str]:
    """Yield problems with the worlds of a mixture."""
    env = config.env.to_dict()
    key = "config.env.args.worlds"
    worlds = env["args"].get("worlds")
    if wrong := mixture.problems(worlds):
        yield from (f"config.env.args.{problem}" for problem in wrong)
        return
    for name, given in worlds.items():
        own = given.get("name", name)
        args = given.get("args", {})
        python = given.get("python", "")
        if python and not (resolve(python).exists() or shutil.which(python)):
            yield f"{key}.{name}.python={python}: there is no such program"
        if env["mode"] == "worker":
            continue
        for place in mixture.PLACE.keys() & given.keys():
            yield f"{key}.{name}.{place} is for config.env.mode=worker; it is {env['mode']}"
        if env["mode"] == "inprocess" and (world := (yield from made(own, args, f"{key}.{name}"))):
            world.close()


def made(name: str, args: dict[str, Any], key: str) -> Generator[str, None, World | None]:
    """Return the world of a name and arguments that are at a place of the config. If it cannot be
    made, yield why, and return None."""
    given = f" with {key}.args={args}" if args else ""
    try:
        wrong = plugs.misfits(world_class(name), args)
        yield from (f"{key}.args.{n}={args[n]!r} {why}" for n, why in wrong.items())
        return None if wrong else make(name, **args)
    except (Exception, SystemExit) as error:  # an adapter may raise anything
        yield f"{key}.name={name}{given}: {reason(error)}"
        return None


def name_problems(config: ConfigDict, tasks: Known, held_out: list[Task]) -> Iterator[str]:
    """Yield what names a world that there is not: keys of the config, and tasks of a mixture. The
    worlds are those of the mixture, or of the tasks as far as these are known."""
    known = dict.fromkeys(task.env for task in [*itertools.chain(*tasks.values()), *held_out])
    mixed = config.env.name == mixture.Mixture.name
    names = list(worlds(config) if mixed else known)
    if not names:
        return
    there = f"there are {', '.join(names)}"
    if mixed and (strangers := [world for world in known if world not in names]):
        yield f"tasks of {', '.join(strangers)} are given, which the mixture does not have; {there}"
    given = {f"{group}.worlds": config[group].worlds for group in ("template", "advantage", "eval")}
    with contextlib.suppress(plugs.PlugError):
        argument = plugs.trait(config, "sampler", "of_worlds", "")
        if isinstance(weights := config.sampler.args.get(argument), ConfigDict):
            given[f"sampler.args.{argument}"] = weights
    for key, named in given.items():
        for name in named:
            if name not in names:
                yield f"config.{key} names the world {name!r}{hint(name, names)}; {there}"


def file_problems(config: ConfigDict, tasks: Known) -> Iterator[str]:
    """Yield problems with files of tasks. Add the tasks to `tasks`, by the key of their file."""
    for key in ("env", "questioning"):
        name = f"{key}.tasks"
        path = config[key].tasks
        try:
            if path:
                tasks[name] = read_tasks(resolve(path))
                if not tasks[name]:
                    yield f"config.{name}={path} holds no tasks"
        except FileNotFoundError:
            yield f"config.{name}={path}: there is no such file"
        except (OSError, ValueError) as error:
            yield f"config.{name}: {error}"


def split_problems(config: ConfigDict, mode: str, world: World, tasks: Known) -> Iterator[str]:
    """Yield problems with the splits that this mode needs. Add their tasks to `tasks`."""
    needed = {
        "env": mode not in ("eval", "evolve") and not config.env.tasks,
        "eval": mode == "eval" or (mode != "evolve" and config.eval.every),
    }
    for key in filter(needed.get, needed):
        name = f"{key}.split"
        split = config[key].split
        try:
            tasks[name] = (
                held_out_tasks(world, split) if key == "eval" else boundary.tasks(world, split)
            )
            if not tasks[name]:
                yield f"config.{name}={split}: {config.env.name} has no tasks there"
        except (Exception, SystemExit) as error:
            args = config.env.args.to_dict()
            given = f" with config.env.args={args}" if args else ""
            yield f"config.{name}={split}: {config.env.name}{given}: {reason(error)}"
            if isinstance(error, NotImplementedError):  # and so is every other split
                break


def shortages(config: ConfigDict, tasks: Known) -> Iterator[str]:
    """Yield sources of tasks, as far as they are known, that have too few for a training step."""
    name = "env.tasks" if config.env.tasks else "env.split"
    there = len(tasks.get(name, ()))
    needed = originals_needed(config)
    if 0 < there < needed:
        yield (
            f"config.rollout.tasks={config.rollout.tasks} needs {needed} different original tasks"
            f" for a step; config.{name}={config.env.tasks or config.env.split} of"
            f" {config.env.name} has {there}"
        )
    there = len(tasks.get("questioning.tasks", ()))
    invented = synthetic_tasks(config)
    if not config.questioning.every and 0 < there < invented:
        yield (
            f"config.rollout.tasks={config.rollout.tasks} needs {invented} synthetic tasks for a"
            f" step; config.questioning.tasks={config.questioning.tasks} has {there}: give more, or"
            " lower config.questioning.share"
        )


def shared_ids(tasks: Known) -> Iterator[str]:
    """Yield a problem if a task of `questioning.tasks` has the id of an original task: their
    rollouts would train as one group. tasks: as for `leaks`."""
    invented = {task.id for task in tasks.get("questioning.tasks", ())}
    for name in ("env.tasks", "env.split"):
        if both := [task.id for task in tasks.get(name, ()) if task.id in invented]:
            yield (
                f"{len(both)} tasks of config.questioning.tasks have the id of a task of"
                f" config.{name}, as {both[0]!r}: give each task an id of its own"
            )


def leaks(config: ConfigDict, tasks: Known, held_out: list[Task]) -> Iterator[str]:
    """Yield a problem for each source of training that contains held-out tasks.

    held_out: all tasks of `eval.split`. tasks: those of "env.split", "env.tasks" and
    "questioning.tasks", as far as they are known. A task leaks if its id is that of a held-out task
    or its split is `eval.split`; a synthetic task has the split of the task that it grew from. A
    pool leaks if one of its splits, or a task that it names as a source, does.
    """
    split = config.eval.split
    ids = {task.id for task in held_out}
    if not split:
        return
    hint = (
        f"that config.eval.split={split} holds out for evaluation: use others, or another"
        " config.eval.split"
    )
    used = {"env.tasks": config.env.tasks} if config.env.tasks else {"env.split": config.env.split}
    if config.questioning.enabled:
        used["questioning.tasks"] = config.questioning.tasks
    for name, value in used.items():
        given = tasks.get(name, ()) if value else ()
        leaked = [task.id for task in given if task.id in ids or task.split == split]
        if leaked or (name == "env.split" and value == split):
            example = f" such as {leaked[0]}" if leaked else ""
            yield f"config.{name}={value} trains on tasks{example} {hint}"
    path = config.navigating.pool
    if config.navigating.enabled and path and resolve(path).is_dir():
        try:
            pool = read_pool(resolve(path))
        except (OSError, BrokenFile) as error:
            yield f"config.navigating.pool: {error}"
            return
        sources = set().union(*(experience["sources"] for experience in pool["experiences"]))
        if split in pool["splits"] or sources & ids:
            yield f"config.navigating.pool={path} holds experience from tasks {hint}"
