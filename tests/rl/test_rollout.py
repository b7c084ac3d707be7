"""Rollouts: every end is a stop reason, prompts only grow, nothing hangs and nothing is left
running."""

import asyncio
import collections
import dataclasses
import functools
import json
import re
import threading

import numpy as np
import pytest

from envs.world import Evaluation, Observation, StepResult, Task, World, tool_of
from experiments.imitation.bpe import train_bpe
from rl import samples
from rl.contexts import Limits, inject
from rl.contexts.causal import Causal
from rl.engines import ContextFull, EngineFault
from rl.rollout import Actor, Job, Worlds, branch, rollout, rollouts, turns_of
from rl.seeds import seed_of
from rl.trajectory import Completion, EndsRun, Sampling, StopReason
from tests.models.helpers import tool, user

TASK = Task(id="t", env="fake", query="count", seed=3)
SAMPLING = Sampling(max_tokens=10_000)
LONG = 100.0  # seconds, beyond every deadline here
ROOMY = Limits(
    max_turns=4, max_tokens=50, context=5000, max_observation=500, timeout=600.0, env_timeout=60.0
)


@functools.cache
def tokenizer():
    return train_bpe(["the assistant counts to ten: one two three " * 3], 300)


class Script(World):
    """Answer every turn, and end the episode at a turn that says done. `at` names the call that
    misbehaves: it raises (`how` may be the class), or waits for `seconds` unless `late` is set in
    the meantime; `inside` counts the waiting calls."""

    name = "fake"

    def __init__(self, at="", how="raise", seconds=0.05, answer="ok", tools=None):
        self.at, self.how, self.seconds = at, how, seconds
        self.answer, self.new_tools = answer, tools
        self.late, self.calls, self.actions = threading.Event(), collections.Counter(), []
        self.inside = 0

    def misbehave(self, what):
        self.calls[what] += 1
        if what != self.at:
            return
        if self.how == "raise":
            raise RuntimeError("the database is gone")
        if isinstance(self.how, type):
            raise self.how("odd")
        self.inside += 1
        self.late.wait(self.seconds)
        self.inside -= 1

    def reset(self, task, seed=0):
        self.misbehave("reset")
        assert seed == task.seed
        return Observation([{"role": "system", "content": "You count."}, user(task.query)])

    def step(self, action):
        self.misbehave("step")
        self.actions.append(action)
        return StepResult(
            [tool(self.answer)],
            reward=float(len(self.actions)),
            terminated=action == "done",
            truncated=action == "stop",
            tools=self.new_tools,
            info={"parse_error": "not a number"} if action == "garbage" else {},
        )

    def evaluate(self):
        self.misbehave("evaluate")
        return Evaluation(2.0 if self.how == "score" else 0.5, False)


class Scripted:
    """An engine that generates the given texts, or token ids, in turn; None stands for a turn cut by
    its token limit."""

    def __init__(self, *turns, context=10_000, wait=0.0, error=None):
        self.turns, self.context, self.wait, self.error = turns or ("one",), context, wait, error
        self.open, self.requests = collections.defaultdict(int), []
        self.busy = self.most_busy = 0

    async def generate(self, prompt_ids, sampling, *, session):
        if self.error:
            raise self.error
        if len(prompt_ids) + 1 > self.context:
            raise ContextFull("no room")
        turn = self.turns[self.open[session] % len(self.turns)]
        self.open[session] += 1
        self.requests.append((list(prompt_ids), sampling, session))
        self.busy += 1
        self.most_busy = max(self.busy, self.most_busy)
        try:
            await asyncio.sleep(self.wait)
        finally:
            self.busy -= 1
        if turn is None:
            tokens = tokenizer().encode("one two three " * 40)
        elif isinstance(turn, list):
            tokens = turn
        else:
            tokens = [*tokenizer().encode(turn), tokenizer().im_end]
        stop = "length" if len(tokens) > sampling.max_tokens else "stop"
        tokens = tokens[: sampling.max_tokens]
        return Completion(tokens, [-1.0] * len(tokens), stop, 7)

    async def release(self, session):
        self.open.pop(session, None)


def play_job(job, world, engine, limits=ROOMY, **settings):
    actor = Actor(engine, tokenizer(), limits, **settings)
    return asyncio.run(asyncio.wait_for(rollout(job, actor, world), 60))


def play(*played, sampling=SAMPLING, experience=(), **settings):
    """Play a rollout of TASK in a world, by an engine, under limits."""
    return play_job(Job(TASK, 1, 5, sampling, list(experience)), *played, **settings)


def limited(**changes):
    return dataclasses.replace(ROOMY, **changes)


def test_a_rollout_may_begin_with_the_turns_of_another():
    whole = play(Script(), Scripted("one", "two", "done"), experience=[("e", "Count on.")])
    engine, world = Scripted("three", "done"), Script()
    job = branch(whole, 2, Job(TASK, 7, 8, SAMPLING))
    branched = play_job(job, world, engine)
    assert world.actions == ["one", "two", "three", "done"]
    assert [turn.given for turn in branched.turns] == [True, True, False, False]
    assert (branched.experience, branched.rollout, branched.draw) == (["e"], 7, whole.draw)
    for own, first in zip(branched.turns[:3], whole.turns):
        assert own.prompt == first.prompt and own.stripped == first.stripped
    said = [[turn.completion for turn in played.turns[:2]] for played in (branched, whole)]
    assert said[0] == said[1]
    assert len(engine.requests) == 2  # nothing was generated for the turns that were given
    assert len(samples.samples(branched)) == 1
    assert_trained_once(branched)


def test_a_rollout_may_begin_with_actions_in_words():
    engine, world = Scripted("done"), Script()
    prefix = turns_of(tokenizer(), ["one", "two"])
    job = Job(TASK, 0, 0, SAMPLING, prefix=prefix)
    played = play_job(job, world, engine)
    assert world.actions == ["one", "two", "done"] and played.stop is StopReason.DONE
    said = play(Script(), Scripted("one", "two", "done"))
    assert played.turns[-1].prompt == said.turns[-1].prompt
    ended = dataclasses.replace(job, prefix=turns_of(tokenizer(), ["done"]))
    alone = play_job(ended, Script(), engine)
    assert samples.void_reason(alone, ["cancelled"]) and alone.stop is StopReason.DONE


def end(reason, steps, world, *turns, options=None, **limits):
    """Return a case: why an episode ends and after how many turns, the world, the turns of the
    policy, options of the actor, and limits."""
    return reason, steps, world, turns, options or {}, limits


THREADS, HANGS = {"threads": True}, {"how": "hang", "seconds": LONG}
LATE = {"how": "late", "seconds": 0.6}
HUNG, OVERDUE = {"options": THREADS, "env_timeout": 1.0}, {"options": THREADS, "timeout": 0.3}
REASONS = {
    "done": end("done", 2, Script(), "one", "done"),
    "truncated by the world": end("max_turns", 1, Script(), "stop"),
    "out of turns": end("max_turns", 4, Script(), "one"),
    "no room for a turn": end("context_full", 0, Script(), "one", context=20),
    "a turn cut by the context": end("context_full", 1, Script(), None, context=80),
    "a turn cut by its limit": end("length", 1, Script(), None),
    "by its own limit": end("length", 1, Script(), None, options={"sampling": Sampling(max_tokens=9)}),
    "a cut turn goes on": end("done", 2, Script(), None, "done", options={"cut_turn": "continue"}),
    "unreadable": end("parse_error", 1, Script(), "garbage", "done", options={"parse_error": "end"}),
    "unreadable, answered": end("done", 2, Script(), "garbage", "done"),
    "reset raises": end("env_error", 0, Script("reset")),
    "step raises": end("env_error", 1, Script("step")),
    "evaluate raises": end("env_error", 1, Script("evaluate"), "done"),
    "a score out of range": end("env_error", 1, Script(how="score"), "done"),
    "an unreadable observation": end("env_error", 1, Script(answer=None), "one"),
    "reset is late": end("env_timeout", 0, Script("reset", **LATE), env_timeout=0.4),
    "step is late": end("env_timeout", 1, Script("step", **LATE), env_timeout=0.4),
    "reset hangs": end("env_timeout", 0, Script("reset", **HANGS), **HUNG),
    "step hangs": end("env_timeout", 1, Script("step", **HANGS), **HUNG),
    "evaluate hangs": end("env_timeout", 1, Script("evaluate", **HANGS), "done", **HUNG),
    "episode too long": end("cancelled", 0, Script(), "slow", timeout=0.3),
    "setup too long": end("cancelled", 0, Script("reset", **HANGS), **OVERDUE),
    "a step past the deadline": end("cancelled", 1, Script("step", **HANGS), **OVERDUE),
    "a late step past it": end("cancelled", 1, Script("step", **LATE), timeout=0.4),
}  # fmt: skip
ERRORS = {
    "step raises": "step 0: RuntimeError: the database is gone",
    "step is late": "WorldTimeout: no answer within 0.4 s",
    "a late step past it": "took longer than 0.4 s, in step 0",
    "episode too long": "the episode took longer than 0.3 s",
}


@pytest.mark.parametrize("case", REASONS)
def test_every_end_has_its_reason_and_errors_say_where_and_what(case):
    reason, steps, world, turns, options, limits = REASONS[case]
    engine = Scripted(*turns, wait=LONG if turns == ("slow",) else 0)
    trajectory = play(world, engine, limited(**limits), **options)
    assert world.inside == (world.how == "hang"), "the call that hangs was abandoned"
    world.late.set()
    assert (trajectory.stop, len(trajectory.turns)) == (reason, steps), trajectory.error
    failed = reason in ("env_error", "env_timeout")
    assert bool(trajectory.error) == (failed or reason == "cancelled")
    assert trajectory.error.endswith(ERRORS.get(case, ""))
    unknown = failed or world.how == "hang"
    # unfinished episodes are evaluated too
    assert trajectory.evaluation.score == (0.0 if unknown else 0.5)
    if world.how == "hang" and world.at != "evaluate":
        assert not world.calls["evaluate"], "a world that hangs is not called again"
    assert not engine.open, "the session is released"


@pytest.mark.parametrize(
    "turns,score", [(("one", "done"), 0.5), (("stop",), 0.0), (("one",), 0.0), ((None,), 0.0)]
)
def test_an_episode_that_must_end_fails_at_a_limit(turns, score):
    trajectory = play(Script(), Scripted(*turns), limited(must_end=True))
    assert trajectory.evaluation == Evaluation(score, False, {} if score else {"reached": 0.5})


def making(**options):
    """A maker of worlds of which only the first misbehaves, if `at` is given; and those made."""
    made = []

    def make_world():
        made.append(Script(**options) if not made else Script())
        return made[-1]

    return make_world, made


def test_a_world_in_which_the_deadline_passed_is_not_lent_again():
    """Its call may still be running."""
    make_world, made = making(at="step", how="hang", seconds=LONG)
    settings = {"limits": limited(timeout=0.3), "threads": True, "concurrency": 1}
    hung, after = run_many(make_world, Scripted("done"), n=2, **settings)
    made[0].late.set()
    assert (hung.stop, after.stop, len(made)) == (StopReason.CANCELLED, StopReason.DONE, 2)


def test_each_turn_has_its_own_seed_its_action_without_a_stop_token_and_the_worlds_reward():
    engine, world = Scripted("one two", "done"), Script()
    turns = play(world, engine).turns
    assert world.actions == ["one two", "done"] == [turn.action for turn in turns]
    assert [(turn.reward, turn.completion.version) for turn in turns] == [(1.0, 7), (2.0, 7)]
    seeds = [sampling.seed for _, sampling, _ in engine.requests]
    assert seeds == [seed_of(5, "turn", k) for k in range(2)]


def test_experience_goes_in_front_of_the_query_and_can_be_stripped():
    guided = play(Script(), Scripted("done"), experience=TIPS)
    plain = play(Script(), Scripted("done"))
    assert guided.guided and guided.experience == ["e1", "e2"] and not plain.guided
    text = "<EXP>When counting, start at one.\nStop at ten.</EXP>\ncount"
    assert guided.messages[1] == user(text)
    assert guided.injected == ["When counting, start at one.", "Stop at ten."]
    assert inject([user("a")], []) == [user("a")]


@pytest.mark.parametrize("shown", [True, False])
def test_new_tools_are_listed_unless_they_are_hidden(shown):
    played = play(Script(tools=[TOOL]), Scripted("one"), show_tools=shown)
    assert played.tools == [TOOL]
    assert ("bell" in tokenizer().decode(played.turns[1].prompt)) == shown


# --- templates ------------------------------------------------------------------------------------

TIPS = [("e1", "When counting, start at one."), ("e2", "Stop at ten.")]
TOOL = tool_of("bell", "", {}, [])


class LastTurns(Causal):
    """Show the opening and the last two turns."""

    async def extend(self, completion, messages, tools=None):
        self.add(completion, messages, tools)
        self.show(self.turns[-2:])


class Summary(Causal):
    """Replace the turns by a summary, which takes time, whenever there are two of them."""

    async def extend(self, completion, messages, tools=None):
        self.add(completion, messages, tools)
        if len(self.turns) == 2:
            await asyncio.sleep(0.001)
            self.turns = [self.tokenizer.encode(" so far: two turns ")]
        self.show(self.turns)


def assert_trained_once(trajectory):
    """Assert that the samples train every token that was generated, in order, and nothing else."""
    trained, generated = [], []
    for sample in samples.samples(trajectory):
        assert "<EXP>" not in tokenizer().decode(sample.tokens.tolist())
        trained += sample.tokens[sample.mask].tolist()
    for turn in trajectory.turns:
        generated += [] if turn.given else turn.completion.tokens
    assert trained == generated


def play_guided(turns, limits=ROOMY, *, template, **script):
    """Play with and without experience; assert what holds for every template."""
    engine = Scripted(*turns)
    guided = play(Script(**script), engine, limits, context=template, experience=TIPS)
    plain = play(Script(**script), Scripted(*turns), limits, context=template)
    assert [prompt for prompt, _, _ in engine.requests] == [turn.prompt for turn in guided.turns]
    assert_trained_once(guided)
    return guided, plain


@pytest.mark.parametrize("tools", [None, [TOOL]])
@pytest.mark.parametrize("template", [Causal, LastTurns, Summary])
def test_guided_rollouts_train_exactly_what_was_generated_and_no_experience(template, tools):
    """A template may rewrite the context, and the tools may change: each generation still trains
    once, under the prompt that the engine saw, less the experience."""
    said = "one", "two three", "one two", "three", "two"
    guided, plain = play_guided(said, limited(max_turns=6), template=template, tools=tools)
    for with_tips, without in zip(guided.turns, plain.turns, strict=True):
        assert "Stop at ten" in tokenizer().decode(with_tips.prompt)
        assert (with_tips.stripped, without.stripped) == (without.prompt, [])
    for sample, same in zip(samples.samples(guided), samples.samples(plain), strict=True):
        assert sample.guided and not same.guided
        for name in ("tokens", "mask", "logp", "version"):
            np.testing.assert_array_equal(getattr(sample, name), getattr(same, name))


class BadTemplate(Causal):
    """Fail in the constructor (`how="start"`) or in extend: raise, return after the deadline or
    hide the stripped prompt."""

    def __init__(self, opening, *, how):
        if how == "start":
            raise RuntimeError("no summariser")
        super().__init__(opening)
        self.how = how

    async def extend(self, completion, messages, tools=None):
        await super().extend(completion, messages, tools)
        if isinstance(self.how, Exception):
            raise self.how
        if self.how == "wait":
            await asyncio.sleep(LONG)
        if self.how == "unstripped":
            self.stripped = []


@pytest.mark.parametrize(
    "how, reason, turns, error",
    [
        ("start", "env_error", 0, "template: RuntimeError: no summariser"),
        (RuntimeError("no key"), "env_error", 1, "template: RuntimeError: no key"),
        (TimeoutError("it is slow"), "env_error", 1, "template: TimeoutError: it is slow"),
        ("wait", "cancelled", 1, "the episode took longer than 0.3 s"),
        ("unstripped", "env_error", 1, "template: ValueError: `stripped` is empty"),
    ],
)
def test_a_failing_template_ends_the_episode_with_a_reason(how, reason, turns, error):
    engine, limits = Scripted("one"), limited(timeout=0.3) if how == "wait" else ROOMY
    template = functools.partial(BadTemplate, how=how)
    trajectory = play(Script(), engine, limits, context=template, experience=TIPS)
    assert (trajectory.stop, len(trajectory.turns)) == (reason, turns)
    assert trajectory.error.startswith(error) and not engine.open


@pytest.mark.parametrize(
    "error", [EndsRun("the budget is spent"), EngineFault("no server is left")]
)
def test_what_ends_the_run_is_not_only_the_end_of_an_episode(error):
    """A template may raise it, or the engine."""
    template = functools.partial(BadTemplate, how=error)
    for engine, context in ((Scripted("one"), template), (Scripted(error=error), Causal)):
        with pytest.raises(type(error), match=str(error)):
            run_many(Script, engine, context=context)


# --- many -----------------------------------------------------------------------------------------


def jobs(n):
    tasks = [Task(f"t{i}", "fake", "count") for i in range(n)]
    return [Job(task, 0, i, SAMPLING, draw=i % 3) for i, task in enumerate(tasks)]


def run_many(make_world, engine, n=12, limits=ROOMY, *, concurrency=64, progress=None, **settings):
    actor = Actor(engine, tokenizer(), limits, **settings)
    done = rollouts(jobs(n), actor, Worlds(make_world), concurrency=concurrency, progress=progress)
    return asyncio.run(asyncio.wait_for(done, 60))


def test_results_come_in_the_order_of_jobs_with_bounded_concurrency():
    seen, (make_world, made), engine = [], making(), Scripted("one", "done", wait=0.001)
    progress = lambda done, total, trajectory: seen.append((done, total))
    result = run_many(make_world, engine, concurrency=3, progress=progress)
    assert [t.group for t in result] == [(f"t{i}", i % 3) for i in range(12)]
    assert engine.most_busy <= 3 and len(made) <= 3, "one world per concurrent episode, used again"
    assert seen == [(done, 12) for done in range(1, 13)]


def test_a_bad_world_takes_only_its_own_episode_down():
    faults = [("", ""), ("step", "raise"), ("reset", "raise"), ("step", "hang")]

    class ByTask(Script):
        def reset(self, task, seed=0):
            self.at, self.how = faults[int(task.id[1:]) % 4]
            return super().reset(task, task.seed)

    settings = {"limits": limited(env_timeout=1.0), "threads": True}
    result = run_many(lambda: ByTask(seconds=5), Scripted("one", "done"), **settings)
    assert [bool(t.restarted) for t in result] == [False, False, True, False] * 3
    assert [t.stop for t in result] == ["done", "env_error", "env_error", "env_timeout"] * 3


@pytest.mark.parametrize("how, reason", [("raise", "env_error"), ("hang", "env_timeout")])
def test_a_failed_reset_is_tried_once_more_on_a_new_world_and_counted(how, reason):
    misbehaving = {"at": "reset", "how": how, "seconds": 5}
    settings = {"n": 1, "limits": limited(env_timeout=1.0), "threads": True}
    make_world, made = making(**misbehaving)
    [saved] = run_many(make_world, Scripted("done"), **settings)
    [failed] = run_many(lambda: Script(**misbehaving), Scripted("done"), **settings)
    assert (saved.stop, failed.stop, len(made)) == (StopReason.DONE, reason, 2)
    assert saved.restarted.startswith("reset:") and failed.restarted.startswith("reset:")


def test_a_world_that_cannot_be_made_is_an_environment_error():
    def make_world():
        raise OSError("no such interpreter")

    for failed in run_many(make_world, Scripted(), n=2):
        assert failed.stop is StopReason.ENV_ERROR
        assert failed.error == failed.restarted == "make_world: OSError: no such interpreter"


def test_an_engine_without_room_is_a_stop_reason():
    result = run_many(Script, Scripted("one", context=40))
    assert {t.stop for t in result} == {StopReason.CONTEXT_FULL}


def test_cancelling_leaves_nothing_running():
    engine = Scripted("one", wait=LONG)

    async def main():
        actor = Actor(engine, tokenizer(), ROOMY)
        task = asyncio.create_task(rollouts(jobs(5), actor, Worlds(Script)))
        while engine.busy < 5 and not task.done():
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        return asyncio.all_tasks() - {asyncio.current_task()}

    assert asyncio.run(main()) == set()
    assert engine.busy == 0 and not engine.open


def test_worlds_may_be_asynchronous():
    class Slow(Script):
        async def step(self, action):
            await asyncio.sleep(0.001)
            return Script.step(self, action)

    assert play(Slow(), Scripted("one", "done")).stop is StopReason.DONE
    limits = limited(env_timeout=0.0001)
    assert play(Slow(), Scripted("one", "done"), limits).stop is StopReason.ENV_TIMEOUT


@pytest.mark.parametrize("threads", [True, False])
@pytest.mark.parametrize("at", ["reset", "step", "evaluate"])
@pytest.mark.parametrize(
    "odd", [StopIteration, StopAsyncIteration, asyncio.CancelledError, GeneratorExit, SystemExit]
)
def test_an_exception_that_means_something_to_the_event_loop_ends_one_episode_at_once(
    odd, at, threads
):
    make_world, _ = making(at=at, how=odd)
    patient = limited(timeout=1e6, env_timeout=1e6)  # nothing here waits for a deadline
    settings = {"n": 3, "limits": patient, "threads": threads}
    first, *others = run_many(make_world, Scripted("one", "done"), **settings)
    assert [t.stop for t in others] == [StopReason.DONE] * 2
    if at == "reset":
        assert first.stop is StopReason.DONE and first.restarted.startswith("reset: ")
    else:
        assert first.stop is StopReason.ENV_ERROR and odd.__name__ in first.error


def test_slow_worlds_in_threads_overlap():
    all_are_in_it = threading.Barrier(10)

    class Together(Script):
        def step(self, action):
            all_are_in_it.wait(30)
            return super().step(action)

    result = run_many(Together, Scripted("done"), n=10, concurrency=10, threads=True)
    assert [t.stop for t in result] == [StopReason.DONE] * 10, "ten steps side by side"


def test_a_late_result_is_ignored():
    world = Script("step", "hang", LONG)

    async def main():
        actor = Actor(Scripted("one"), tokenizer(), limited(env_timeout=1.0), threads=True)
        trajectory = await rollout(Job(TASK, 0, 0, SAMPLING), actor, world)
        before = dataclasses.asdict(trajectory)
        world.late.set()
        while not world.actions:
            await asyncio.sleep(0.01)
        for _ in range(10):
            await asyncio.sleep(0)
        assert dataclasses.asdict(trajectory) == before
        return trajectory

    assert asyncio.run(asyncio.wait_for(main(), 60)).stop is StopReason.ENV_TIMEOUT


def nested(depth):
    return functools.reduce(lambda value, _: [value], range(depth), 1)


UNSAFE = {
    "an object": {"object": object()},
    "a set": {"set": {1}},
    "deep": {"calls": nested(900)},
    "deep enough to break a copy only": {"calls": nested(500)},
    "a number": {"n": 10**400},
    "not a number": {"n": float("nan")},
    "a list": [1],
}


def assert_is_json(trajectory):
    json.dumps(dataclasses.asdict(trajectory), ensure_ascii=False, allow_nan=False).encode()


@pytest.mark.parametrize("case", UNSAFE)
def test_info_that_is_not_json_is_an_error_of_the_world(case):
    class Odd(Script):
        def step(self, action):
            return dataclasses.replace(super().step(action), info=UNSAFE[case])

    trajectory = play(Odd(), Scripted("one"))
    assert trajectory.stop is StopReason.ENV_ERROR
    assert re.match("step 0: (Unsafe|TooDeep): info", trajectory.error)
    assert_is_json(trajectory)


def test_lone_surrogates_are_repaired_wherever_a_world_writes_them():
    class Odd(Script):
        def reset(self, task, seed=0):
            broken = {**TOOL, "function": {**TOOL["function"], "description": "\udfff"}}
            return Observation([user("a \ud800")], [broken])

        def step(self, action):
            messages = [tool("b \ud800") | {"name": "\ud800"}]
            return StepResult(messages, terminated=True, info={"\ud800": "\ud83d\ude00"})

        def evaluate(self):
            return Evaluation(1.0, True, {"\ud800": 1.0})

    trajectory = play(Odd(), Scripted("one"))
    assert trajectory.stop is StopReason.DONE and trajectory.outcome == 1.0
    assert trajectory.turns[0].observation[0]["content"] == "b \ufffd"
    assert trajectory.turns[0].info == {"\ufffd": "\U0001f600"}
    assert_is_json(trajectory)
