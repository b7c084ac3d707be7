"""Alarms: each is raised by the history that it is for, and by no ordinary one."""

from types import SimpleNamespace

import pytest

import envs
from configs import base
from envs.toolcalls import call_text
from envs.world import Evaluation, Task
from evolver import alarms
from evolver.build import RunError
from evolver.phases import tasks
from models.tokenizer import Tokenizer
from rl.rollout import Actor
from rl.trajectory import Completion, StopReason, Trajectory, Turn
from tests.evolver.runs import figures
from tests.models.test_jinja import SMOL
from tests.tiny import tiny_policy

CALLS = {"calls": [{"name": "look"}]}


def healthy(step, **changes):
    """Return the metrics of a step of a run that learns: success rises, entropy falls with it."""
    success = min(0.2 + 0.1 * step, 0.9)
    line = {
        "step": step,
        "rollout/count": 64,
        "rollout/count/synthetic": 64,
        "rollout/success": success,
        "rollout/tokens": 64 * (80 - 4 * step),
        "rollout/parse_errors": 0.01,
        "entropy": 0.5 / (1 + step),
        "advantage/mean": -0.05,
        "ledger/trained": 48,
        "ledger/no_signal": 16,
        "stop/context_full": 0,
        "stop/length": 2,
        "stop/max_turns": 1,
        "questioning/judge/agreed_rate": 0.85,
        "questioning/judge/compared": 64,
        "alarm/no_call/share": 0.05,
        "alarm/repetition/share": 0.1,
    }
    return line | evaluated(changes.get("eval/avg@8", success)) | changes


def evaluated(success):
    names = {"": success, "/low": success - 0.05, "/high": success + 0.05}
    return {f"eval/avg@8{name}": value for name, value in names.items()}


def history(**of_step):
    """Return ten steps. Metrics that are other than healthy have a value, or a function of the
    step."""
    lines = []
    for step in range(1, 11):
        pairs = of_step.items()
        lines.append(healthy(step, **{k: v(step) if callable(v) else v for k, v in pairs}))
    return lines


def raised(lines):
    """Return the alarms that any step of a run raises."""
    return set().union(*(alarms.raised(lines[:n]) for n in range(1, len(lines) + 1)))


DOOMED = {"ledger/trained": 0, "ledger/no_signal": 64, "rollout/success": 0.0}


def test_a_run_that_learns_raises_none_whatever_it_does_not_measure():
    assert raised(history()) == set()
    for name in healthy(1):
        if not name.startswith(("step", "rollout/", "ledger", "stop", "eval")):
            without = history()
            for line in without:
                del line[name]
            assert raised(without) == raised(history(**{name: None})) == set()
    assert alarms.raised([{"step": 0, "questioning/pool": 8} | evaluated(0.3)]) == []


@pytest.mark.parametrize(
    "name,metrics",
    [
        ("judge", {"questioning/judge/agreed_rate": 0.1}),
        ("judge", {"questioning/judge/agreed_rate": lambda step: 0.9 if step < 5 else 0.5}),
        ("no_call", {"alarm/no_call/share": lambda step: 0.1 * step}),
        ("repetition", {"alarm/repetition/share": lambda step: 0.02 if step < 6 else 0.9}),
        ("balance", {"advantage/mean": lambda step: -0.1 if step < 6 else -0.4}),
        ("length", {"rollout/tokens": lambda step: 6400 if step < 6 else 640}),
        ("entropy", {"entropy": lambda step: 0.5 if step < 5 else 0.01, "rollout/success": 0.2}),
        ("held_out", {"eval/avg@8": lambda step: 0.5 - 0.03 * step}),
        ("no_signal", DOOMED),
    ],
)
def test_each_is_raised_by_what_it_is_for_and_by_nothing_else(name, metrics):
    lines = history(**metrics)
    assert raised(lines) == {name}
    text = alarms.told(name, lines)
    assert text.startswith("ALARM: ") and f"alarm/{name}" in text and ".." not in text


@pytest.mark.parametrize(
    "compared,agreed,alarm",
    [
        (2, 0.0, set()),  # of 64 synthetic rollouts that it judged
        (lambda step: 60 if step % 3 else 2, lambda step: float(bool(step % 3)), set()),
        (lambda step: 60 if step % 3 else 2, lambda step: float(not step % 3), {"judge"}),
    ],
)
def test_a_judge_is_doubted_for_the_rollouts_that_the_world_scored_too(compared, agreed, alarm):
    counts = {"questioning/judge/compared": compared, "questioning/judge/agreed_rate": agreed}
    assert raised(history(**counts)[2:]) == alarm


def test_the_share_of_successes_without_a_call_is_of_all_successes():
    success = {"rollout/success": lambda step: 1 / 64 if step % 3 else 0.5}
    callless = {"alarm/no_call/share": lambda step: float(bool(step % 3))}
    assert raised(history(**success, **callless)) == set()


@pytest.mark.parametrize(
    "change,remedy",
    [
        ({"rollout/success": 1.0}, "too easy"),
        ({"stop/context_full": 60}, "config.rollout.context"),
        ({"stop/length": 60}, "config.rollout.max_tokens"),
        ({"stop/max_turns": 60}, "config.rollout.max_turns"),
        ({"rollout/parse_errors": 0.9}, "format"),
        ({}, "config.questioning.enabled"),
    ],
)
def test_a_step_without_a_signal_says_what_to_do(change, remedy):
    assert remedy in alarms.told("no_signal", [healthy(1, **DOOMED) | change])


@pytest.mark.parametrize(
    "change,remedy",
    [
        ({}, ""),
        ({"prompt": 290}, "raise config.rollout.context"),
        ({"prompt": 900}, "leaves 0 for the episode"),
        ({"shown": False, "bare": 200}, "config.template.show_tools=True"),
        ({"shown": False, "bare": 200, "learned": True}, ""),
        ({"bare": 200}, "the template does not write the world's 4 tools"),
        ({"tools": 0, "bare": 200}, ""),
        ({"tools": 0, "bare": 200, "shown": False}, ""),
    ],
)
def test_a_doomed_run_is_told_from_its_first_prompt(change, remedy):
    plain = {"tools": 4, "prompt": 200, "bare": 90, "shown": True, "learned": False}
    found = alarms.foreseen(**plain | change, context=300, max_tokens=20)
    assert remedy in "\n".join(found) and len(found) == bool(remedy)


@pytest.mark.parametrize(
    "env,show_tools,context,said",
    [
        ("travel", True, 3000, ""),
        ("travel", False, 3000, "does not show the world's 12 tools"),
        ("tests.tiny:Parity", False, 300, ""),
        ("travel", True, 400, "leaves 0 for the episode"),
        ("travel", True, 0, "prompt of travel cannot be written: the chat template lists no tools"),
    ],
)
def test_a_doomed_run_says_so_before_its_first_step(env, show_tools, context, said, tmp_path):
    """With a context of 0 the chat template raises an exception for tools."""
    config = base.get_config()
    world = envs.make(env)
    config.env.name = env
    config.model.path = str(tmp_path)
    config.rollout.context = context
    config.rollout.max_tokens = 20
    tokenizer = Tokenizer.load(tiny_policy(tmp_path))
    if not context:
        raising = "{% if tools %}{{ raise_exception('No tools') }}{% endif %}"
        tokenizer = Tokenizer(tokenizer.to_json(), template=raising + SMOL)
    actor = Actor(None, tokenizer, None, show_tools=show_tools)
    told = []
    doomed = SimpleNamespace(
        config=config,
        actor=actor,
        make_world=lambda: envs.make(env),
        tasks=SimpleNamespace(originals=world.tasks("train")[:1], held_out=[], worlds=()),
        progress=SimpleNamespace(say=told.append),
    )
    if context in (0, 400):
        with pytest.raises(RunError, match=said):
            tasks.look_ahead(doomed)
        return
    tasks.look_ahead(doomed)
    assert len(told) == bool(said) and said in "".join(told)
    (tmp_path / "README.md").write_text(f"trained on `{env}`")
    tasks.look_ahead(doomed)
    assert len(told) == bool(said)


def rollout(*said, success=True, calls=True, **components):
    completions = [Completion(tokens, [0.0] * len(tokens), "stop", 0) for tokens in said]
    turns = [Turn([0], one, "", [], CALLS if calls else {}) for one in completions]
    score = Evaluation(float(success), success, components)
    tools = [{"type": "function"}]
    return Trajectory(Task("t", "w", "q"), 0, 0, [], turns, StopReason.DONE, score, tools=tools)


def test_figures_count_what_the_rollouts_did():
    played = [
        rollout([1, 2], [3], judged=1.0, verified=0.0),
        rollout([1], calls=False, judged=1.0, verified=1.0),
        rollout([5, 6], [5, 6], [5, 6], success=False, judged=0.0, verified=0.0),
        rollout([9] * 40, success=False),
    ]
    assert alarms.figures(played) == {
        "questioning/judge/agreed_rate": 2 / 3,
        "questioning/judge/compared": 3,
        "alarm/no_call/share": 0.5,
        "alarm/repetition/share": 0.5,
    }
    assert alarms.figures([]) == {}


def test_a_world_that_lists_no_calls_and_one_whose_steps_are_alike_raise_nothing():
    silent = rollout([1], calls=False)
    silent.turns[0].info = {}
    silent.turns[0].action = call_text("look", {})
    assert alarms.figures([silent])["alarm/no_call/share"] == 0.0
    moving, stuck = (rollout([5], [5], [5]) for _ in range(2))
    for place, turn in enumerate(moving.turns):
        turn.observation = [{"role": "tool", "content": f"You are at {place}."}]
    assert (alarms.repeats(moving), alarms.repeats(stuck)) == (False, True)


@pytest.mark.parametrize("period", [1, 2, 7, 32])
def test_a_loop_at_the_end_of_a_turn_is_told_from_a_list(period):
    block = list(range(period))
    assert alarms.loops([77, 78] + block * max(4, -(-24 // period)))
    assert not alarms.loops(block * 3)
    assert not alarms.loops(list(range(200)))
    assert not alarms.loops(block * 9 + [1000])


@pytest.mark.slow
def test_a_judge_that_inverts_the_world_is_found_and_stands_in_the_records(finish, capsys):
    words = (
        "steps=2", "env.name=travel", "questioning.enabled=True", "questioning.share=1.0",
        "questioning.budget=6", "questioning.judge.name=tests.evolver.test_alarms:Inverted",
        "rollout.tasks=3", "rollout.group=8", "rollout.max_turns=1", "rollout.context=256", "learner.row=256",
        "eval.every=0",
    )  # fmt: skip
    run = finish("run", *(f"--config.{word}" for word in words))
    assert "step 1: ALARM: the judge of synthetic tasks differs" in capsys.readouterr().out
    lines = figures(run)
    assert [line.get("questioning/judge/agreed_rate") for line in lines] == [None, 0.0, 0.0]
    assert [line["alarm/judge"] for line in lines] == [0.0, 1.0, 1.0]
    assert "alarm/judge: 2 times, steps 1 to 2" in (run / "summary.md").read_text()


class Inverted:
    """Calls each failure a success and each success a failure."""

    replaces_outcome = True

    def __init__(self, parts):
        pass

    def score(self, trajectories):
        failed = [not t.reached.success for t in trajectories]
        return [Evaluation(float(each), each) for each in failed]

    def metrics(self):
        return {}
