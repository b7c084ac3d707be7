"""From a world to an agent that has learned it: check, explore, split, imitate, train, report.

Each stage leaves files in the workdir and is skipped when they are complete:

    checked          the world keeps its contract (envs.check)
    explored/        the tasks that the explorer invented
    train.jsonl, held_out.jsonl, probes.jsonl    their split
    pretrained-probes/, pretrained/    evaluations of the policy that it starts from
    imitated-1/policy, imitated-1-probes/, ...    the policy after each round of imitating half of
                     the explorer's solutions, and its evaluation
    renamed.jsonl    the training tasks with other ids, each with its own, for the run
    trained/, trained-probes/    the run, and an evaluation of its policy
    summary.md, rollouts.txt    the table, and three rollouts to read

Temperatures and policies are compared on probes, so that nothing is chosen on held-out tasks.
"""

import contextlib
import json
import random
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ml_collections import ConfigDict

from envs import check
from envs.probed import probed
from envs.renamed import renamed
from envs.values import Json
from envs.world import Task, World
from evolver import loop, modes
from evolver.build import RunError, load_tokenizer, plugged
from evolver.config.checks.workdir import RESUMABLE, expanded
from evolver.config.checks.world import TASK_FILE, held_out_tasks
from evolver.config.paths import model_folder
from evolver.config.plugs import attribute
from evolver.files.evolved import summary, written_rollouts
from evolver.files.progress import clock
from evolver.files.workdir import Workdir, WorkdirInUse, read_tasks
from evolver.imitating import Diverged, samples_of, train, with_other_ids
from evolver.navigating import extract
from evolver.processes.server import NotServed
from evolver.questioning.own_tasks import solved_by_walks
from evolver.questioning.rules import rules_of
from evolver.questioning.split import split
from evolver.questioning.tried import TRIED, as_tried, solution_of
from evolver.replaying import calls_of, play
from evolver.rough_time import seconds
from evolver.worlds import make_source, open_source
from models import hf
from models.files import write_atomically
from models.tokenizer import Tokenizer
from rl.checkpoint import Checkpoints
from rl.contexts import Template, inject
from rl.evaluation import Scores
from rl.seeds import seed_of

SPARE = 1.5  # tokens and turns of an episode, relative to the longest of the explorer's solutions
FULL, MOSTLY = 0.8, 0.9  # of a context that so many solutions use at most, if it can be helped
LEAST_SAID = 60  # characters about a tool
ROUND = 64  # tokens that the context is a multiple of
START = "Use the tools."  # the query of the task that a world without tasks starts from
VISITS = 1024  # of starts while exploring, at least: a server of tools has one
FEWEST = 8  # invented tasks that can be split
RULES = 60  # solutions that are played without each of their calls, to find hidden rules
PROBED = 10  # times as many tasks as probes, of which those of some starts and goals are probes
NEARLY = 0.75  # of the success at the best temperature


def evolve(config: Any, workdir: str | Path) -> None:
    """Run all stages, resuming those that are in the workdir, and print the table.

    Raises RunError for a world or a workdir that cannot be used, and what `loop.train` raises.
    """
    try:
        with Workdir(workdir).locked():
            run_stages(config.copy_and_resolve_references(), Path(workdir))
    except (WorkdirInUse, NotServed) as error:
        raise RunError(str(error)) from None


def run_stages(config: Any, folder: Path) -> None:
    """Run all stages in a workdir that this process alone uses."""
    claim(config, folder)
    tell(f"The world is {config.env.name}, the policy starts from {config.model.path}.")
    tell(f"Files are in {folder}; the same command resumes. The stages: check the world, explore,")
    tell("imitate if the policy cannot call the tools yet, train, report. Expected: about")
    limit = config.questioning.minutes
    exploring = f"at most {limit:g} minutes of exploring" if limit else "exploring"
    tell(f"{clock(seconds(config))} besides {exploring}, if nothing else runs on this machine.")
    checked(config, folder)
    with open_source(config, folder) as source, contextlib.closing(probed(source.world())) as world:
        start(config, folder, world)
        check_room(config, world)
        explored(config, folder, world)
        solved = read_tasks(folder / "train.jsonl")
        fit(config, solved, world)
        probes = measured(config, folder / "pretrained-probes", probing(folder))
        if config.evolve.rounds and best(probes) < config.evolve.enough:
            measured(config, folder / "pretrained", at_best(probes))
            probes = taught(config, folder, solved, world, probes)
        trained(config, folder, probes)
        policy, why = better(config, folder, probes)
        rules = rules_of(world, solved[:RULES])
    text = summary(folder, rules, min(len(solved), RULES)) + f"\n\n{why}"
    write_atomically(folder / "summary.md", f"# {config.env.name}\n\n```\n{text}\n```\n")
    write_atomically(folder / "rollouts.txt", written_rollouts(folder))
    tell(f"\n{text}\n\nThree rollouts to read: {folder / 'rollouts.txt'}")
    tell(f"The policy: {policy}")


def tell(text: str) -> None:
    """Print a line that is seen at once."""
    print(text, flush=True)


def claim(config: Any, folder: Path) -> None:
    """Record the config. Raises RunError if the folder belongs to another one."""
    files = Workdir(folder)
    before = files.config("evolve")
    if before is None and any(path.name != "lock" for path in folder.iterdir()):
        raise RunError(f"--workdir={folder} is not empty; choose a new directory")
    now = expanded(config)
    then = expanded(before["config"]) if before else now
    other = "".join(
        f"  {name}: {then.get(name)!r} then, {now.get(name)!r} now\n"
        for name in sorted({*then, *now})
        if then.get(name) != now.get(name) and not name.startswith(RESUMABLE)
    )
    if other:
        raise RunError(f"--workdir={folder} holds another config:\n{other}choose a new directory")
    files.claim(config.to_dict(), "evolve")


# --- the world and its tasks ----------------------------------------------------------------------


def checked(config: Any, folder: Path) -> None:
    """Check the world against its contract. Raises RunError, with what is wrong with it."""
    if (folder / "checked").is_file():
        return
    c = config.env
    spec = {"env": c.name, "kwargs": c.args.to_dict(), "split": c.split, "limit": 3}
    names: list[str] = []
    problems: list[check.Problem] = []
    why = f" in this process: config.env.mode={c.mode}" if c.mode != "inprocess" else ""
    if not why:  # a server of tools has no tasks to start from
        with make_source(config) as source, contextlib.closing(source.world()) as world:
            why = "" if starts_of(config, world) else ", as the world lists no tasks"
    if not why:
        names, problems = check.run(spec | {"mode": "inprocess"}, c.timeout)
    endless = [problem for problem in problems if problem.check == "ends_its_episodes"]
    if endless:
        tell(f"an episode ends at a limit: {endless[0].what}")
    if len(problems) > len(endless):
        lines = "\n".join(f"  {problem}" for problem in problems)
        raise RunError(f"{c.name} does not keep the contract of an environment:\n{lines}")
    tell(f"not checked{why}" if why else f"checked: {len(names)} checks passed")
    write_atomically(folder / "checked", f"{len(names)} checks\n")


def start(config: Any, folder: Path, world: World) -> None:
    """Give a world without tasks one to start from, which demands nothing."""
    if not starts_of(config, world):
        config.env.tasks = str(folder / "starts.jsonl")
        write_tasks(config.env.tasks, [Task("start/0", world.name, START, config.env.split)])


def write_tasks(path: str | Path, tasks: Sequence[Task]) -> None:
    """Write tasks as JSON lines."""
    lines = [json.dumps(task.to_dict(), ensure_ascii=False) + "\n" for task in tasks]
    write_atomically(path, "".join(lines))


def starts_of(config: Any, world: World) -> list[Task]:
    """Return the tasks whose starts are explored."""
    return read_tasks(config.env.tasks) if config.env.tasks else world.tasks(config.env.split)


def explored(config: Any, folder: Path, world: World) -> None:
    """Invent tasks and split them. Afterwards `eval.split` names what is held out."""
    own = []
    with contextlib.suppress(ValueError):  # the world may have no such split
        own = held_out_tasks(world, config.eval.split)
    parts = ("train", "held_out", "probes")
    if not all((folder / f"{name}{TASK_FILE}").is_file() for name in parts):
        c = config.copy_and_resolve_references()
        c.eval.every, c.eval.split = 0, config.eval.split if own else ""
        c.attributing.enabled = c.navigating.enabled = False
        c.advantage.name, c.engine.slots = "grpo", 1  # the policy plays nothing here
        args = c.questioning.explorer.args
        if "rounds" in args:
            args.rounds = max(args.rounds, VISITS // len(starts_of(c, world)))
        tasks = invented(c, folder / "explored", world)
        training, held_out = (tasks, own) if own else split(tasks, c.evolve.held_out, c.seed)
        tell(f"putting {len(training)} solutions in the order in which one tries them")
        for task in training:
            task.meta[TRIED] = as_tried(world, task)
        training, probes = probes_of(training, c.evolve.probes, c.seed)
        for name, chosen in zip(parts, (training, held_out, probes)):
            write_tasks(folder / f"{name}{TASK_FILE}", chosen)
    if not own:
        config.eval.split = str(folder / f"held_out{TASK_FILE}")
    training, held_out = (read_tasks(folder / f"{name}{TASK_FILE}") for name in parts[:2])
    whose = "of the world's own" if own else "invented from other starts or of other goals"
    tell(f"tasks: {len(training)} to train on, {len(held_out)} held out, {whose}")


def probes_of(training: Sequence[Task], wanted: int, seed: int) -> tuple[list[Task], list[Task]]:
    """Return (the tasks to train on, the probes). Probes are of other starts or combinations of
    goals: a policy that solves what it was trained on may not solve these. Where the tasks are few,
    probes are among them."""
    seed = seed_of(seed, "probes")
    apart = list(training)
    if len(training) >= PROBED * wanted:
        training, apart = split(training, 1 / PROBED, seed)
    return list(training), random.Random(seed).sample(apart, min(wanted, len(apart)))


def invented(config: Any, folder: Path, world: World) -> list[Task]:
    """Return invented tasks or, where too few have words that say what to do, the world's own
    training tasks that walks solve. Raises RunError for too few of both."""
    tasks = []
    try:
        modes.explore(config, folder)
        tasks = read_tasks(folder / f"tasks{TASK_FILE}")
        if len(tasks) < FEWEST:
            raise RunError(f"{len(tasks)} invented tasks are too few: {FEWEST} are needed")
    except RunError as error:
        own = own_tasks(config, world, str(error))
        if not own:
            raise
        return own
    poor = [task.query for task in tasks if task.meta.get("undescribed")]
    if len(tasks) - len(poor) >= FEWEST:
        return tasks
    why = f"{len(poor)} of {len(tasks)} invented tasks are poorly worded ({poor[0]!r})"
    return own_tasks(config, world, why) or tasks


def own_tasks(config: Any, world: World, why: str) -> list[Task]:
    """Return the world's own training tasks that walks solve, none if they are too few."""
    given = [task for task in starts_of(config, world) if task.query != START]
    if not given:
        return []
    tell(f"\n{why}\nInstead, walks try to solve the world's own {len(given)} training tasks ...")
    rng = random.Random(seed_of(config.seed, "own tasks"))
    tasks = list(solved_by_walks(world, given, rng))
    tell(f"they solved {len(tasks)}; at least {FEWEST} are needed")
    return tasks if len(tasks) >= FEWEST else []


def fit(config: Any, tasks: Sequence[Task], world: World) -> None:
    """Set the lengths of episodes, and of what is said about tools, from the explorer's solutions.

    Where a solution as it is tried is longer than a context, the short one takes its place in
    `task.meta`; where that is too, `imitated` leaves the task out. Raises RunError if few fit.
    """
    c, tokenizer, said = config.rollout, load_tokenizer(config), config.template.args.get("most")
    while True:
        template = plugged(config, "template")
        sizes = [size_of(task, tokenizer, template, world) for task in tasks]
        fitting = [size for size in sizes if size.tokens <= FULL * c.context]
        if len(fitting) >= MOSTLY * len(tasks) or not shortened(config.template):
            break
    if config.template.args.get("most") != said:
        most = config.template.args.most
        tell(f"what is said about a tool is cut to {most} characters, so that episodes have room")
    for number, task in enumerate(tasks):
        if sizes[number].tokens > c.context and task.meta.pop(TRIED, None):
            sizes[number] = size_of(task, tokenizer, template, world)
    fitting = [size for size in sizes if size.tokens <= c.context]
    if len(fitting) < min(FEWEST, len(tasks)):
        lengths = [size.tokens for size in sizes]
        raise RunError(
            f"{len(fitting)} of {len(tasks)} solutions fit rollout.context={c.context}, the"
            f" shortest has {min(lengths)} tokens and the longest {max(lengths)}: raise it"
        )
    if len(fitting) < len(sizes):
        left = f"{len(sizes) - len(fitting)} of {len(sizes)}"
        tell(f"solutions longer than rollout.context={c.context}, which are not imitated: {left}")
    # Some worlds have no way to say that one is done.
    c.must_end &= all(size.ended for size in sizes)
    c.max_turns = min(c.max_turns, round(SPARE * max(size.turns for size in fitting)) + 1)
    c.max_tokens = min(c.max_tokens, round(SPARE * max(size.turn for size in fitting)))
    longest = max(size.tokens for size in fitting)
    room = round(SPARE * longest) + c.max_tokens
    c.context = config.learner.row = min(c.context, -(-room // ROUND) * ROUND)
    tell(
        f"an episode has at most {c.max_turns} turns of {c.max_tokens} tokens and"
        f" {c.context} tokens in all; the longest solution has {longest}"
    )


def shortened(template: Any) -> bool:
    """Let a template say less about tools. Return False if it already says as little as it can."""
    most = template.args.get("most", 0)
    if most <= LEAST_SAID:
        return False
    template.args.most = max(LEAST_SAID, 2 * most // 3)
    return True


def check_room(config: Any, world: World) -> None:
    """Raise RunError if the tools alone leave no room in a context, however little is said about
    them, or no episode can be played, before anything is explored."""
    c = config.copy_and_resolve_references()
    if "most" in c.template.args:
        c.template.args.most = min(c.template.args.most, LEAST_SAID)
    empty = replace(starts_of(c, world)[0], reference=["done"])
    template, tokenizer = plugged(c, "template"), load_tokenizer(c)
    try:
        needed = size_of(empty, tokenizer, template, world).tokens
    except Exception as error:  # whatever code of a world raises
        raise RunError(f"{c.env.name} cannot play an episode: {error}") from error
    if needed > FULL * c.rollout.context:
        raise RunError(
            f"the tools and an empty episode take {needed} of the {c.rollout.context} tokens of"
            " config.rollout.context: raise it, or offer fewer tools"
        )


@dataclass(frozen=True)
class Size:
    """The tokens of a solution, those of its longest turn, its turns, and if it ends an episode."""

    tokens: int
    turn: int
    turns: int
    ended: bool


def size_of(task: Task, tokenizer: Tokenizer, template: Template, world: World) -> Size:
    """Return the size of a task's solution."""
    solution = solution_of(task)
    episode = play(world, task, task.seed, solution)
    (*_, sample) = samples_of([episode], tokenizer, 1 << 30, template)
    turn = max(len(tokenizer.encode(action)) + 1 for action in solution)
    return Size(len(sample), turn, len(solution), episode["ended"])


# --- the policy -----------------------------------------------------------------------------------


def probing(folder: Path) -> Json:
    """Return the settings of an evaluation that compares temperatures on training tasks."""
    return {"split": str(folder / f"probes{TASK_FILE}"), "tasks": 0, "rollouts": 2}


def at_best(probes: Scores) -> Json:
    """Return the settings of an evaluation at the temperature above 0 that is best on probes, among
    equals the lowest."""
    temperature, _ = replace(probes, greedy_N=[]).best_temperature()
    return {"temperature": temperature, "temperatures": ()}


def measured(config: Any, folder: Path, settings: Json) -> Scores:
    """Return the scores of the policy under settings of `eval`, played unless they are there."""
    if not Workdir(folder).evaluations():
        c = config.copy_and_resolve_references()
        c.eval.update(settings)
        tell(f"\nevaluating: {folder.name}")
        modes.evaluate(c, folder)
    return Scores(**Workdir(folder).evaluations()[-1]["scores"][0])


def best(scores: Scores) -> float:
    """Return the success at the best temperature, greedily included."""
    return float(scores.best_temperature()[1].mean())


def hottest(scores: Scores) -> float:
    """Return the highest temperature at which the policy does nearly as well as at its best: there
    the rollouts of a group differ, and some succeed."""
    success = {heat: float(value_NR.mean()) for heat, value_NR in scores.by_temperature.items()}
    return max(t for t, value in success.items() if value >= NEARLY * max(success.values()))


def taught(
    config: Any, folder: Path, tasks: Sequence[Task], world: World, probes: Scores
) -> Scores:
    """Imitate in rounds until the policy does well enough on probes, and return its scores there.
    A fixed number of updates is too few in one world and wasted in another."""
    for number in range(1, config.evolve.rounds + 1):
        if best(probes) >= config.evolve.enough:
            break
        stage = f"imitated-{number}"
        imitated(config, folder / stage, tasks, world, number)
        config.model.path = str(folder / stage / "policy")
        probes = measured(config, folder / f"{stage}-probes", probing(folder))
    return probes


def demonstrations(config: Any, world: World, tasks: Sequence[Task], number: int) -> list[Json]:
    """Return the solutions as episodes, each with several sets of ids, drawn anew in each round.

    Some begin with the experience that guides rollouts of the task. These take the short way, as
    experience names the calls: nothing has to be tried first.
    """
    e, guided = config.evolve, config.evolve.guided if config.navigating.enabled else 0.0
    rng = random.Random(seed_of(config.seed, "ids", number))
    episodes = []
    for task in tasks:
        alone = told = play(world, task, task.seed, solution_of(task))
        if guided:
            told = play(world, task, task.seed, task.reference)
            told["messages"] = inject(told["messages"], [experience_of(config, task)])
        for _ in range(e.other_ids or 1):
            episode = told if guided and rng.random() < guided else alone
            episodes.append(with_other_ids(episode, rng) if e.other_ids else episode)
    return episodes


def experience_of(config: Any, task: Task) -> str:
    """Return the text that guides rollouts of a task whose solution has become experience."""
    args = config.navigating.extractor.args
    render = attribute(args.render) if "render" in args else extract.render
    return render(extract.Lesson(task.query, [call.name for call in calls_of(task)]))


def imitated(
    config: Any, folder: Path, tasks: Sequence[Task], world: World, number: int = 1
) -> None:
    """Train the policy on the solutions of half of the tasks of each difficulty, in the format of
    its template and each with many sets of ids, other ones in each round, and write it."""
    policy = folder / "policy"
    if (policy / "README.md").is_file():
        return
    c, e = config, config.evolve
    shuffled = random.Random(seed_of(c.seed, "solutions")).sample(list(tasks), len(tasks))
    shuffled.sort(key=lambda task: task.difficulty)
    # The easiest tasks alone need not call every tool.
    chosen = shuffled[:: max(2, -(-len(tasks) // max(1, e.solutions)))]
    template, tokenizer = plugged(c, "template"), load_tokenizer(c)
    episodes = demonstrations(config, world, chosen, number)
    samples = samples_of(episodes, tokenizer, c.learner.row, template)
    source = model_folder(c.model.path, weights=True)
    shape, params = hf.load(source)
    what = f"{len(chosen)} solutions of the explorer in {e.updates} updates"
    tell(f"\nimitating {what}, round {number} of at most {e.rounds}")
    settings = ConfigDict(
        {
            "seed": seed_of(c.seed, "round", number), "steps": e.updates,
            "rows": e.rows, "row": c.learner.row, "micro": min(c.learner.micro, e.rows),
            "model": {"path": str(source), "dtype": c.model.dtype},
            "lr": e.lr, "muon_lr": e.lr, "final_lr": 0.05, "b2": 0.98, "clip": 1.0,
            "schedule": "cosine", "warmup": min(3, e.updates - 1), "careful": 1.0,
            "lists": 0.0, "whole": 0.0, "pairs": 0.0, "share_prompts": c.learner.share_prompts,
        }
    )  # fmt: skip
    saved = folder / "checkpoints"
    try:
        with contextlib.closing(Checkpoints(saved, keep=1)) as checkpoints:
            params = train(settings, shape, params, samples, samples, checkpoints)
    except Diverged as error:
        keys = f"config.evolve.lr={e.lr:g}, config.model.dtype={c.model.dtype}"
        raise RunError(f"{error} ({keys})") from None
    card = f"{source.name} after imitating {len(chosen)} solutions in `{c.env.name}`.\n"
    hf.save(policy, shape, params, tokenizer=tokenizer, card=card)
    shutil.rmtree(saved)


def trained(config: Any, folder: Path, probes: Scores) -> None:
    """Train with the invented tasks, evaluating at the best temperature on probes and greedily."""
    scores = Workdir(folder / "trained").scores()
    if config.steps in scores and (folder / "trained/policy/README.md").is_file():
        return
    c = config.copy_and_resolve_references()
    c.questioning.tasks = str(folder / f"train{TASK_FILE}")
    solved = read_tasks(c.questioning.tasks)
    if c.evolve.renames:
        c.questioning.tasks = str(folder / f"renamed{TASK_FILE}")
        write_tasks(c.questioning.tasks, [renamed(task, task.id) for task in solved])
    c.eval.update(at_best(probes))
    c.rollout.temperature = hottest(probes)
    c.rollout.tasks = min(c.rollout.tasks, len(solved))
    tell(f"\ntraining for {c.steps} steps at temperature {c.rollout.temperature:g}")
    loop.train(c, folder / "trained")


def better(config: Any, folder: Path, before: Scores) -> tuple[str, str]:
    """Return the policy that does better on probes, after training or before it, and a sentence
    that says so: training may unlearn what imitation taught. Held-out tasks choose nothing."""
    c = config.copy_and_resolve_references()
    c.model.path = str(folder / "trained/policy")
    after = best(measured(c, folder / "trained-probes", probing(folder)))
    policy = c.model.path if after >= best(before) else config.model.path
    figures = f"{100 * best(before):.1f}% before training and {100 * after:.1f}% after it"
    return policy, f"On {len(before.success_NR)} probes, success is {figures}: use {policy}"
