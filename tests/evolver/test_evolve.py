"""One command for a world: the stages, what is held out, and what the report says."""

import itertools
import random
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest

import command
from configs import evolve as evolve_config
from envs.hints import when_text
from envs.toolcalls import call_text
from envs.world import Evaluation, Task
from evolver import evolve, imitating, rough_time
from evolver.build import RunError, load_tokenizer, plugged
from evolver.files.workdir import Workdir, read_tasks
from evolver.imitating import with_other_ids
from evolver.questioning.rules import rules_of
from evolver.questioning.split import combination_of, split, start_of
from evolver.questioning.tasks import check_probe
from evolver.replaying import play
from rl.evaluation import Scores
from tests.evolver.runs import flags

SMALL = flags(
    "steps=1 rollout.tasks=2 rollout.group=2 rollout.concurrency=8 rollout.max_tokens=8",
    "learner.micro=1 optim.warmup=0 questioning.budget=16 questioning.explorer.args.rehearsals=2",
    "eval.tasks=3 eval.rollouts=1 eval.temperatures=() evolve.updates=2 evolve.rows=1",
    "evolve.probes=2 engine.slots=8 engine.weight_dtype=float32",
)


@pytest.fixture
def config(policy):
    """Return the config of the desk, for the tiny policy."""
    config = evolve_config.get_config("lending:Lending")
    config.model.path = str(policy)
    return config


@pytest.fixture
def desk(monkeypatch):
    """Return the world of docs/examples, from which the agent is to learn."""
    monkeypatch.syspath_prepend("docs/examples")
    monkeypatch.setenv("PYTHONPATH", str(Path("docs/examples").resolve()))  # of the checks' process
    from lending import Lending

    return Lending()


def test_a_world_that_is_not_checked_says_why(config, tmp_path, capsys):
    config.env.name, config.env.mode = "travel", "worker"
    evolve.checked(config, tmp_path)
    assert capsys.readouterr().out == "not checked in this process: config.env.mode=worker\n"


@pytest.fixture
def evolved(desk, policy, tmp_path, capsys):
    """Evolve the tiny policy in a folder "run", and return what was said."""
    place = [f"--config.model.path={policy}", f"--workdir={tmp_path}/run"]

    def play(*words, code=0) -> str:
        given = ["evolve", "lending:Lending", *SMALL, *place, *flags(*words)]
        assert command.main(given) == code
        said = capsys.readouterr()
        return said.err if code else said.out

    return play


@pytest.mark.slow
def test_one_command_goes_from_a_world_to_a_table_and_resumes(evolved, tmp_path):
    folder, first = tmp_path / "run", evolved()
    for stage in ("18 checks passed", "16 to train on, 32 held out", "imitating 8 solutions"):
        assert stage in first
    table = (folder / "summary.md").read_text()
    assert "pretrained, greedy" in table and "imitated, greedy" in table
    assert "trained (1 steps), greedy" in table and "3 held-out tasks" in table
    assert "sharpening" in table and "difficulty" in table
    assert "success: False" in (folder / "rollouts.txt").read_text()
    assert (folder / "trained/policy/model.safetensors").is_file()
    trained, own = (read_tasks(folder / f"{name}.jsonl") for name in ("renamed", "train"))
    assert [task.id for task in trained] == [task.id for task in own]
    assert sum("ids" in task.meta for task in trained) == len(own)
    assert "On 2 probes, success is " in table and ": use " in table

    again = evolved()
    assert "evaluating" not in again and "imitating" not in again and "step 1/1" not in again
    assert (folder / "summary.md").read_text() == table
    assert "evolve.updates: 2 then, 3 now" in evolved("evolve.updates=3", code=1)


@pytest.mark.slow
def test_without_rounds_of_imitation_the_policy_trains_as_it_is(evolved, tmp_path):
    folder = tmp_path / "run"
    assert "imitating" not in evolved("evolve.rounds=0 recipe.name=standard")
    table = (folder / "summary.md").read_text()
    assert "pretrained, greedy" in table and "imitated" not in table
    assert "trained (1 steps), greedy" in table and not (folder / "pretrained").exists()


HERE, STEPS, DEFAULT = "--workdir=here", "--config.steps=3", "--workdir=runs/evolve-desk_Desk"
DESK, CONFIG = "desk:Desk", "--config=configs/evolve.py"
SERVED = "--config.env.args.command=['python', 'my server.py']"


@pytest.mark.parametrize(
    "words, flags",
    [
        ([DESK], [f"{CONFIG}:{DESK}", DEFAULT]),
        ([DESK, STEPS], [f"{CONFIG}:{DESK}", STEPS, DEFAULT]),
        ([STEPS, DESK, HERE], [f"{CONFIG}:{DESK}", STEPS, HERE]),
        (["--mcp", "python 'my server.py'", HERE], [f"{CONFIG}:mcp", SERVED, HERE]),
        (["--gym=A-v1", HERE], [f"{CONFIG}:gym", "--config.env.args.env=A-v1", HERE]),
        (["--help=evolve", HERE], ["--help=evolve"]),
        (
            [DESK, "--workdir", "here", "--config", "mine.py"],
            ["--config=mine.py", f"--config.env.name={DESK}", HERE],
        ),
    ],
)
def test_a_world_is_named_by_a_word_or_a_flag(words, flags):
    assert command.evolving(words) == flags


@pytest.mark.parametrize("words", [[], ["a:A", "b:B"], ["a:A", "--gym=X-v1"], ["--gym"]])
def test_one_world_is_named(words, capsys):
    with pytest.raises(SystemExit, match="2"):
        command.evolving([*words, "--workdir=here"])
    error = capsys.readouterr().err
    assert "name one world" in error or "--gym: expected one argument" in error


# --- what is held out -----------------------------------------------------------------------------


def invented(start: int, template: str, number: int) -> Task:
    meta = {"source": f"start/{start}", "template": template}
    return Task(f"syn/{start}/{template}/{number}", "desk", f"Do {number}.", seed=start, meta=meta)


TEMPLATES = ("pay", "lend", "pay+lend", "lend+lend", "pay+pay", "pay+?card")


def test_held_out_tasks_have_other_starts_or_other_combinations():
    tasks = [invented(start, name, 0) for start in range(12) for name in TEMPLATES]
    training, held_out = split(tasks, 0.25, seed=0)
    starts = {start_of(task) for task in training}
    combinations = {combination_of(task) for task in training}
    assert (len(starts), len(combinations)) == (9, 4)
    for task in held_out:
        assert start_of(task) not in starts or combination_of(task) not in combinations
    assert {t.id for t in training} | {t.id for t in held_out} == {t.id for t in tasks}
    assert len(training) + len(held_out) == len(tasks)
    assert {"pay", "lend"} <= {task.meta["template"] for task in training}


def test_with_one_start_and_few_combinations_whole_goals_are_held_out():
    tasks = [invented(0, name, n) for name in ("pay", "lend") for n in range(10)]
    training, held_out = split(tasks, 0.25, seed=0)
    assert len(training) == 15 and len(held_out) == 5
    assert not {t.id for t in training} & {t.id for t in held_out}


@pytest.mark.parametrize("seed", range(5))
def test_a_combination_of_very_many_tasks_is_trained_on(seed):
    names = ["book+book"] * 5 + ["pay", "book", "pay+book", "pay+pay", "book+pay"]
    tasks = [invented(start, name, n) for start in range(12) for n, name in enumerate(names)]
    training, held_out = split(tasks, 0.25, seed)
    assert "book+book" in {combination_of(task) for task in training}
    most, count = Counter(map(combination_of, held_out)).most_common(1)[0]
    assert count <= 0.6 * len(held_out), most


@pytest.mark.parametrize("seed", range(5))
def test_probes_are_of_starts_or_combinations_that_nothing_trains_on(seed):
    tasks = [invented(start, name, n) for start in range(12) for n, name in enumerate(TEMPLATES)]
    training, probes = evolve.probes_of(tasks, 5, seed)
    assert len(probes) == 5 and not {t.id for t in training} & {t.id for t in probes}
    starts, combinations = set(map(start_of, training)), set(map(combination_of, training))
    for task in probes:
        assert start_of(task) not in starts or combination_of(task) not in combinations
    assert probes == evolve.probes_of(tasks, 5, seed)[1]
    few, probes = evolve.probes_of(tasks, 8, seed)  # of 72, which are less than ten times as many
    assert few == tasks and len(probes) == 8 and {t.id for t in probes} < {t.id for t in tasks}


@pytest.mark.parametrize("seed", range(5))
def test_a_split_leaves_tasks_on_both_sides(seed):
    rng = random.Random(seed)
    names = ["a", "b", "a+b", "b+a", "a+a"]
    tasks = [invented(rng.randrange(4), rng.choice(names), n) for n in range(rng.randrange(8, 40))]
    training, held_out = split(tasks, 0.25, seed)
    assert len(held_out) >= 2 and len(training) >= 0.3 * len(tasks)


def scores(greedy: Sequence[int] = (0, 0), **sweep: list[list[int]]) -> Scores:
    """Return scores of a policy that solves nothing but greedily and at temperatures of `sweep`."""
    names, zeros = list("abcd"[: len(greedy)]), [[0, 0]] * len(greedy)
    degrees = {name.removeprefix("at_").replace("_", "."): value for name, value in sweep.items()}
    return Scores(names, [1] * len(names), zeros, zeros, list(greedy), sweep=degrees)


def test_two_processes_do_not_use_one_workdir(config, tmp_path):
    with Workdir(tmp_path / "run").locked():
        with pytest.raises(RunError, match="is in use by process"):
            evolve.evolve(config, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_an_interrupted_imitation_goes_on_where_it_was(desk, config, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(imitating, "SAVE_EVERY", 0.0)
    config.learner.row, config.learner.micro = 1024, 1
    config.evolve.updates, config.evolve.rows, config.evolve.other_ids = 4, 1, 1

    def imitated(folder: str) -> bytes:
        evolve.imitated(config, tmp_path / folder, desk.tasks("train"), desk)
        assert not (tmp_path / folder / "checkpoints").exists()
        return (tmp_path / folder / "policy/model.safetensors").read_bytes()

    def interrupted(data, *arguments, **keywords):
        yield from itertools.islice(batches(data, *arguments, **keywords), 3)
        raise KeyboardInterrupt

    batches = imitating.batches
    monkeypatch.setattr(imitating, "batches", interrupted)
    with pytest.raises(KeyboardInterrupt):
        imitated("cut")
    monkeypatch.setattr(imitating, "batches", batches)
    capsys.readouterr()
    goes_on = imitated("cut")
    assert "resuming after update 3" in capsys.readouterr().out
    assert goes_on == imitated("whole")


def test_temperatures_are_those_of_probes():
    probes = scores(at_0_3=[[1, 1], [0, 0]], at_0_6=[[1, 0], [1, 0]])
    assert evolve.at_best(probes)["temperature"] == 0.3 and evolve.best(probes) == 0.5
    assert evolve.hottest(probes) == 0.6  # as good as the best, and it explores more
    assert evolve.hottest(scores()) == 1.0
    assert evolve.at_best(scores())["temperature"] == 1.0


@pytest.mark.parametrize("after, chosen", [(0.5, "old"), (0.75, "new"), (1.0, "new")])
def test_a_policy_that_training_made_worse_is_not_chosen(
    config, tmp_path, monkeypatch, after, chosen
):
    def solving(success):
        return scores([int(n < 4 * success) for n in range(4)])

    folders = {"old": config.model.path, "new": str(tmp_path / "trained/policy")}
    monkeypatch.setattr(evolve, "measured", lambda *_: solving(after))
    policy, why = evolve.better(config, tmp_path, solving(0.75))
    assert policy == folders[chosen] and config.model.path == folders["old"]
    assert f"success is 75.0% before training and {100 * after}% after it" in why
    assert why.endswith(f"use {folders[chosen]}")


@pytest.mark.parametrize("after, rounds", [((0.9,), 1), ((0.7, 0.8), 2), ((0.1, 0.2, 0.3, 0.9), 3)])
def test_rounds_of_imitation_end_when_the_policy_solves_enough(
    desk, config, policy, tmp_path, monkeypatch, after, rounds
):
    config.evolve.rounds, config.evolve.enough = 3, 0.8
    from_which, success = [], iter(after)

    def imitated(config, folder, tasks, world, number):
        from_which.append(Path(config.model.path).parent.name)
        assert folder == tmp_path / f"imitated-{number}"

    monkeypatch.setattr(evolve, "imitated", imitated)
    monkeypatch.setattr(evolve, "measured", lambda *of: next(success))
    monkeypatch.setattr(evolve, "best", lambda success: success)
    assert evolve.taught(config, tmp_path, [], desk, 0.5) == after[rounds - 1]
    assert from_which == [policy.parent.name, "imitated-1", "imitated-2"][:rounds]
    assert config.model.path == str(tmp_path / f"imitated-{rounds}/policy")


# --- hidden rules ---------------------------------------------------------------------------------


def test_a_call_that_another_is_refused_without_is_a_hidden_rule(desk):
    tasks = desk.tasks("train")
    rules = rules_of(desk, tasks)
    fined = [t for t in tasks if any('"pay"' in action for action in t.reference)]
    assert set(rules) == {("pay", "lend")} and 0 < rules["pay", "lend"] == len(fined)


def test_the_solutions_of_the_example_solve_its_tasks_and_their_last_words_end_episodes(desk):
    for task in desk.tasks("train") + desk.tasks("dev"):
        solved = play(desk, task, task.seed, task.reference)
        assert solved["success"] and solved["ended"]
        assert not play(desk, task, task.seed, task.reference[:-1])["ended"]
        assert not play(desk, task, task.seed, [])["success"]


def test_a_world_without_tasks_gets_a_start(desk, config, tmp_path, monkeypatch):
    monkeypatch.setattr(desk, "tasks", lambda split: [])
    evolve.start(config, tmp_path, desk)
    (task,) = read_tasks(config.env.tasks)
    assert task.split == "train" and not task.verifier
    assert desk.reset(task).messages[0]["content"] == task.query
    check_probe(desk, task)  # it can be explored
    assert not desk.step(call_text("pay", {"member": "M0"})).terminated


def test_less_is_said_about_tools_where_a_context_would_be_full(desk, config, monkeypatch, capsys):
    import lending

    tasks, demands, other = desk.tasks("train")[:9], [], config.copy_and_resolve_references()

    def evaluate():
        demands.append(desk._goal)
        return Evaluation(0.0, False)

    monkeypatch.setattr(desk, "evaluate", evaluate)
    evolve.check_room(config, desk)
    assert demands == [tasks[0].verifier["lent"]]  # the task is whole: some worlds need that
    evolve.fit(config.copy_and_resolve_references(), tasks, desk)
    assert "cut to" not in capsys.readouterr().out
    about = " at the desk" * 40
    long = [lending._tool(f"t{n}", f"Do {n}{about}", lending.BOOK) for n in range(9)]
    monkeypatch.setattr(lending, "TOOLS", lending.TOOLS + long)
    evolve.check_room(config, desk)
    evolve.fit(config, tasks, desk)
    assert config.template.args.most < 300 and "cut to" in capsys.readouterr().out
    monkeypatch.setattr(lending, "TOOLS", lending.TOOLS + 40 * long)
    with pytest.raises(RunError, match=r"of the 2048 tokens of config\.rollout\.context"):
        evolve.check_room(other, desk)
    monkeypatch.setattr(desk, "reset", lambda *_: 1 / 0)
    with pytest.raises(RunError, match="lending:Lending cannot play an episode: division by zero"):
        evolve.check_room(other, desk)


@pytest.mark.parametrize("starts, rounds", [(1, 1024), (32, 32), (1024, 16)])
def test_a_world_of_few_starts_is_visited_as_often_as_others(
    desk, config, tmp_path, monkeypatch, starts, rounds
):
    solved = desk.tasks("train")
    monkeypatch.setattr(desk, "tasks", lambda split: [desk._task(split, n) for n in range(starts)])
    given = []

    def invented(config, *_):
        given.append(config.questioning.explorer.args.rounds)
        return solved

    monkeypatch.setattr(evolve, "invented", invented)
    evolve.explored(config, tmp_path, desk)
    assert given == [rounds]


def test_a_solution_that_does_not_fit_is_the_short_one_or_left_out(desk, config, capsys):
    tasks = desk.tasks("train")[:9]
    for task in tasks[:2]:
        task.meta[evolve.TRIED] = [call_text("find", {})] * 12 + task.reference
    tasks[0].reference = tasks[0].meta[evolve.TRIED]  # long in both orders
    config.template.args.most = evolve.LEAST_SAID
    template, tokenizer = plugged(config, "template"), load_tokenizer(config)
    lengths = [evolve.size_of(task, tokenizer, template, desk).tokens for task in tasks]
    config.rollout.context = min(lengths[:2]) - 1
    assert max(lengths[2:]) <= config.rollout.context
    evolve.fit(config, tasks, desk)
    said = capsys.readouterr().out
    assert "not imitated: 1 of 9" in said and not any(evolve.TRIED in t.meta for t in tasks[:2])
    assert config.rollout.max_turns == round(1.5 * max(len(t.reference) for t in tasks[1:])) + 1
    with pytest.raises(RunError, match=r"0 of 9 solutions fit rollout\.context=64"):
        config.rollout.context = 64
        evolve.fit(config, tasks, desk)


def test_guided_demonstrations_begin_with_what_guides_rollouts_and_go_the_short_way(desk, config):
    config.evolve.other_ids = 8
    tasks = desk.tasks("train")[:4]
    for task in tasks:
        task.meta[evolve.TRIED] = [call_text("find", {}), *task.reference]

    def shown(guided):
        config.evolve.guided = guided
        return evolve.demonstrations(config, desk, tasks, 1)

    def beginning(episode):
        return next(m["content"] for m in episode["messages"] if m["role"] == "user")

    def turns(episode):
        return sum(message["role"] == "assistant" for message in episode["messages"])

    short = [len(task.reference) for task in tasks for _ in range(8)]
    assert [turns(episode) for episode in shown(0.0)] == [turns + 1 for turns in short]
    assert not any("<EXP>" in beginning(episode) for episode in shown(0.0))
    assert [turns(episode) for episode in shown(1.0)] == short
    first = beginning(shown(1.0)[0])
    tools = ", ".join(call.name for call in evolve.calls_of(tasks[0]))
    assert first.startswith(f"<EXP>{when_text(tasks[0].query)}: {tools}.</EXP>\n")
    some = [beginning(episode).startswith("<EXP>") for episode in shown(0.25)]
    assert 0 < sum(some) < len(some) / 2
    config.navigating.enabled = False  # its rollouts are never guided
    assert shown(1.0) == shown(0.0)


def lent(*members, tools=()):
    """Return an episode in which M34 is lent a book; `members` are lines of what the desk shows."""
    said = [call_text("lend", {"book": "B70", "member": "M34"}), "M34"]
    messages = [
        {"role": "user", "content": "Lend Dune to Ana by 10 o'clock, as get_v2 says."},
        {"role": "assistant", "content": said[0]},
        {"role": "tool", "content": "\n".join(("M34: Ana, 3rd floor", "B70: Dune", *members))},
        {"role": "assistant", "content": said[1]},
    ]
    return {"messages": messages, "tools": list(tools), "success": True}


def test_other_ids_are_those_of_all_messages_and_nothing_else_changes():
    tools = [{"function": {"name": "get_v2", "description": "Show a card, such as M12's."}}]
    episode = lent("M71: Ben", "M12: Cleo, since 1998", tools=tools)
    seen = set()
    for seed in range(20):
        other = with_other_ids(episode, random.Random(seed))
        assert other == with_other_ids(episode, random.Random(seed))
        texts = [message["content"] for message in other["messages"]]
        ana, dune, ben, cleo = (line.split(":")[0] for line in texts[2].split("\n"))
        assert len({ana, dune, ben, cleo}) == 4 and cleo == "M12"  # which the tools name
        assert texts[1] == call_text("lend", {"book": dune, "member": ana}) and texts[3] == ana
        assert texts[0] == episode["messages"][0]["content"]
        assert texts[2].endswith("since 1998") and "3rd floor" in texts[2]
        assert (ana[0], dune[0], ben[0]) == ("M", "B", "M")
        assert other["tools"] == tools and other["success"]
        seen.add((ana, dune))
    assert len(seen) > 15 and episode == lent("M71: Ben", "M12: Cleo, since 1998", tools=tools)


def test_an_episode_whose_ids_use_up_their_form_stays_as_it_is():
    digits = [f"M{n}: Ben" for n in range(10)]
    episode = lent(*digits)
    for message in episode["messages"]:
        message["content"] = message["content"].replace("M34", "M3").replace("B70", "B7")
    assert with_other_ids(episode, random.Random(0)) == episode
    plain = {"messages": [{"role": "assistant", "content": "done 12"}], "tools": []}
    assert with_other_ids(plain, random.Random(0)) == plain


def test_the_expected_time_is_that_of_the_device(monkeypatch):
    config = evolve_config.get_config("travel")
    on_cpu = rough_time.seconds(config)
    monkeypatch.setattr(rough_time.jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(rough_time, "SIDE", 64)
    monkeypatch.setattr(rough_time, "ACCELERATED", 1e6)
    assert 0 < on_cpu and rough_time.COMPILING < rough_time.seconds(config) < on_cpu + 400
