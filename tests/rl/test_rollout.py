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
from hypothesis import given, settings
from hypothesis import strategies as st

from envs.world import Evaluation, Observation, StepResult, Task, World
from models.tokenizer import train_bpe
from rl import samples
from rl.contexts import Limits, cut, inject
from rl.contexts.causal import Causal
from rl.engines import ContextFull, EngineFault
from rl.rollout import Actor, Job, Worlds, rollout, rollouts
from rl.seeds import seed_of
from rl.trajectory import Completion, EndsRun, Sampling, StopReason

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
    misbehaves: it raises, exits, or waits for `seconds` unless `late` is set in the meantime;
    `inside` counts the waiting calls."""

    name = "fake"

    def __init__(self, at="", how="raise", seconds=0.05, answer="ok", tools=None, late=None):
        self.at, self.how, self.seconds, self.answer, self.new_tools = (
            at,
            how,
            seconds,
            answer,
            tools,
        )
        self.late, self.calls, self.closed, self.actions = (
            late or threading.Event(),
            collections.Counter(),
            0,
            [],
        )
        self.inside = 0

    def misbehave(self, what):
        self.calls[what] += 1
        if what != self.at:
            return
        if self.how == "raise":
            raise RuntimeError("the database is gone")
        if self.how == "exit":
            raise SystemExit("bye")
        if isinstance(self.how, type):
            raise self.how("odd")
        self.inside += 1
        self.late.wait(self.seconds)
        self.inside -= 1

    def reset(self, task, seed=0):
        self.misbehave("reset")
        assert seed == task.seed
        return Observation(
            [{"role": "system", "content": "You count."}, {"role": "user", "content": task.query}]
        )

    def step(self, action):
        self.misbehave("step")
        self.actions.append(action)
        info = {"parse_error": "not a number"} if action == "garbage" else {}
        messages = [{"role": "tool", "content": self.answer}]
        return StepResult(
            messages,
            terminated=action == "done",
            truncated=action == "stop",
            tools=self.new_tools,
            info=info,
        )

    def evaluate(self):
        self.misbehave("evaluate")
        return Evaluation(2.0, True) if self.how == "score" else Evaluation(0.5, False)

    def close(self):
        self.closed += 1


class Scripted:
    """An engine that generates the given texts in turn; None stands for a turn cut by its token
    limit."""

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
        tokens = tokenizer().encode("one two three " * 40 if turn is None else turn)
        tokens = tokens if turn is None else [*tokens, tokenizer().im_end]
        stop = "length" if len(tokens) > sampling.max_tokens else "stop"
        tokens = tokens[: sampling.max_tokens]
        return Completion(tokens, [-1.0] * len(tokens), stop, 7)

    async def release(self, session):
        self.open.pop(session, None)


def play(world, engine, limits=ROOMY, *, sampling=SAMPLING, experience=(), **settings):
    job = Job(TASK, 1, 5, sampling, list(experience))
    actor = Actor(engine, tokenizer(), limits, **settings)
    return asyncio.run(asyncio.wait_for(rollout(job, actor, world), 60))


HANG, THREADS = {"env_timeout": 1.0}, {"threads": True}
REASONS = {
    "done": (Script(), ("one", "done"), {}, {}, StopReason.DONE, 2),
    "truncated by the world": (Script(), ("stop",), {}, {}, StopReason.MAX_TURNS, 1),
    "out of turns": (Script(), ("one",), {}, {}, StopReason.MAX_TURNS, 4),
    "no room for a turn": (Script(), ("one",), {"context": 20}, {}, StopReason.CONTEXT_FULL, 0),
    "a turn cut by the context": (Script(), (None,), {"context": 80}, {}, StopReason.CONTEXT_FULL, 1),
    "a turn cut by its limit": (Script(), (None,), {}, {}, StopReason.LENGTH, 1),
    "by its own limit": (Script(), (None,), {}, {"sampling": Sampling(max_tokens=9)}, StopReason.LENGTH, 1),
    "a cut turn goes on": (Script(), (None, "done"), {}, {"cut_turn": "continue"}, StopReason.DONE, 2),
    "unreadable": (Script(), ("garbage", "done"), {}, {"parse_error": "end"}, StopReason.PARSE_ERROR, 1),
    "unreadable, answered": (Script(), ("garbage", "done"), {}, {}, StopReason.DONE, 2),
    "reset raises": (Script("reset"), (), {}, {}, StopReason.ENV_ERROR, 0),
    "step raises": (Script("step"), (), {}, {}, StopReason.ENV_ERROR, 1),
    "step exits": (Script("step", "exit"), (), {}, THREADS, StopReason.ENV_ERROR, 1),
    "evaluate raises": (Script("evaluate"), ("done",), {}, {}, StopReason.ENV_ERROR, 1),
    "a score out of range": (Script(how="score"), ("done",), {}, {}, StopReason.ENV_ERROR, 1),
    "an unreadable observation": (Script(answer=None), ("one",), {}, {}, StopReason.ENV_ERROR, 1),
    "reset is late": (Script("reset", "late", 0.6), (), {"env_timeout": 0.4}, {}, StopReason.ENV_TIMEOUT, 0),
    "step is late": (Script("step", "late", 0.6), (), {"env_timeout": 0.4}, {}, StopReason.ENV_TIMEOUT, 1),
    "reset hangs": (Script("reset", "hang", LONG), (), HANG, THREADS, StopReason.ENV_TIMEOUT, 0),
    "step hangs": (Script("step", "hang", LONG), (), HANG, THREADS, StopReason.ENV_TIMEOUT, 1),
    "evaluate hangs": (
        Script("evaluate", "hang", LONG), ("done",), HANG, THREADS, StopReason.ENV_TIMEOUT, 1
    ),
    "episode too long": (Script(), ("slow",), {"timeout": 0.3}, {}, StopReason.CANCELLED, 0),
    "setup too long": (
        Script("reset", "hang", LONG), (), {"timeout": 0.3}, THREADS, StopReason.CANCELLED, 0
    ),
    "a step past the deadline": (
        Script("step", "hang", LONG), (), {"timeout": 0.3}, THREADS, StopReason.CANCELLED, 1
    ),
    "a late step past it": (Script("step", "late", 0.6), (), {"timeout": 0.4}, {}, StopReason.CANCELLED, 1),
}  # fmt: skip


@pytest.mark.parametrize("case", REASONS)
def test_every_end_has_its_reason(case):
    world, turns, limits, options, reason, steps = REASONS[case]
    engine = Scripted(*turns, wait=LONG if turns == ("slow",) else 0)
    trajectory = play(world, engine, dataclasses.replace(ROOMY, **limits), **options)
    assert world.inside == (world.how == "hang"), "the call that hangs was abandoned"
    world.late.set()
    assert (trajectory.stop, len(trajectory.turns)) == (reason, steps), trajectory.error
    failed = reason in (StopReason.ENV_ERROR, StopReason.ENV_TIMEOUT)
    assert bool(trajectory.error) == (failed or reason is StopReason.CANCELLED)
    unknown = failed or world.how == "hang"
    assert trajectory.evaluation.score == (0.0 if unknown else 0.5), (
        "unfinished episodes are evaluated too"
    )
    if world.how == "hang" and world.at != "evaluate":
        assert not world.calls["evaluate"], "a world that hangs is not called again"
    assert not engine.open, "the session is released"


@pytest.mark.parametrize(
    "turns,score", [(("one", "done"), 0.5), (("stop",), 0.0), (("one",), 0.0), ((None,), 0.0)]
)
def test_an_episode_that_must_end_fails_at_a_limit(turns, score):
    trajectory = play(Script(), Scripted(*turns), dataclasses.replace(ROOMY, must_end=True))
    assert trajectory.evaluation == Evaluation(score, False, {} if score else {"reached": 0.5})


def test_errors_say_where_and_what():
    late = dataclasses.replace(ROOMY, env_timeout=0.4)
    assert play(Script("step"), Scripted()).error == "step 0: RuntimeError: the database is gone"
    assert "no answer within 0.4 s" in play(Script("step", "late", 0.6), Scripted(), late).error
    short = dataclasses.replace(ROOMY, timeout=0.3)
    for world, engine, where in (
        (Script("step", "late", 0.4), Scripted(), ", in step 0"),
        (Script(), Scripted(wait=LONG), ""),
    ):
        assert play(world, engine, short).error == f"the episode took longer than 0.3 s{where}"


def test_a_world_in_which_the_deadline_passed_is_not_lent_again():
    """Its call may still be running."""
    made, late = [], threading.Event()

    def make_world():
        made.append(Script("step", "hang", LONG, late=late))
        return made[-1]

    limits = dataclasses.replace(ROOMY, timeout=0.3)
    result = run_many(make_world, Scripted(), n=2, limits=limits, threads=True, concurrency=1)
    late.set()
    assert [t.stop for t in result] == [StopReason.CANCELLED] * 2 and len(made) == 2


@given(
    st.lists(
        st.sampled_from(["one", "two three", "garbage", None, "<|im_end|>", "é ☃"]),
        min_size=1,
        max_size=4,
    )
)
@settings(max_examples=15, deadline=None)
def test_tokens_only_grow(turns):
    engine = Scripted(*turns)
    trajectory = play(Script(answer="a <|im_start|> answer"), engine, cut_turn="continue")
    assert len(trajectory.turns) == ROOMY.max_turns
    for before, after in zip(trajectory.turns, trajectory.turns[1:]):
        grown = before.prompt + before.completion.tokens
        assert after.prompt[: len(grown)] == grown
        between = after.prompt[len(grown) :]
        invented = 0 if before.completion.stop == "stop" else 1
        assert between.count(tokenizer().im_end) == invented + 1, (
            "one for the answer, one for a turn without its own"
        )
        assert between.count(tokenizer().im_start) == 2, "the answer cannot open a turn"
    assert [prompt for prompt, _, _ in engine.requests] == [
        step.prompt for step in trajectory.turns
    ]


def test_no_end_token_is_added_to_a_cut_turn():
    trajectory = play(Script(), Scripted(None))
    assert tokenizer().im_end not in trajectory.turns[0].completion.tokens
    assert len(trajectory.turns[0].completion.tokens) == ROOMY.max_tokens


def test_actions_leave_out_the_stop_token():
    world = Script()
    trajectory = play(world, Scripted("one two", "done"))
    assert world.actions == ["one two", "done"] == [step.action for step in trajectory.turns]
    assert [step.completion.version for step in trajectory.turns] == [7, 7]


def test_each_turn_has_its_own_seed():
    engine = Scripted("one")
    play(Script(), engine)
    assert [sampling.seed for _, sampling, _ in engine.requests] == [
        seed_of(5, "turn", k) for k in range(4)
    ]


def test_experience_goes_in_front_of_the_query_and_can_be_stripped():
    guided = play(Script(), Scripted("done"), experience=TIPS)
    plain = play(Script(), Scripted("done"))
    assert guided.guided and guided.experience == ["e1", "e2"] and not plain.guided
    assert (
        guided.messages[1]["content"]
        == "<EXP>When counting, start at one.\nStop at ten.</EXP>\ncount"
    )
    assert guided.injected == ["When counting, start at one.", "Stop at ten."]
    assert guided.turns[0].stripped == plain.turns[0].prompt and plain.turns[0].stripped == []
    assert guided.turns[0].prompt != guided.turns[0].stripped
    assert inject([{"role": "user", "content": "a"}], []) == [{"role": "user", "content": "a"}]


def test_new_tools_rewrite_the_opening_and_nothing_else():
    first, second, third, *_ = play(Script(tools=[TOOL]), Scripted("one")).turns
    tail = second.prompt[second.prompt.index(tokenizer().im_end, len(second.prompt) // 2) :]
    assert second.prompt[: len(first.prompt)] != first.prompt and "bell" in tokenizer().decode(
        second.prompt
    )
    assert second.prompt[-len(tail) :] == tail and first.completion.tokens[0] in second.prompt
    assert third.prompt[: len(second.prompt)] == second.prompt, (
        "the same tools again change nothing"
    )
    assert play(Script(tools=[TOOL]), Scripted("one")).tools == [TOOL]
    hidden = play(Script(tools=[TOOL]), Scripted("one"), show_tools=False)
    assert "bell" not in tokenizer().decode(hidden.turns[1].prompt)


@given(st.lists(st.text(max_size=200), min_size=1, max_size=4), st.integers(4, 60))
@settings(max_examples=60, deadline=None)
def test_observations_are_cut_at_a_visible_mark(texts, limit):
    messages = [{"role": "tool", "content": text} for text in texts]
    sizes = [len(tokenizer().encode(text)) for text in texts]
    result = cut(tokenizer(), messages, limit)
    if sum(sizes) <= limit:
        assert result == messages
        return
    shown = 0
    for message, text, size in zip(result, texts, sizes):
        if message["content"] != text:
            _, mark = message["content"].rsplit("\n[cut: the first ", 1)
            assert mark.endswith(f" of {size} tokens]")
            shown += int(mark.split()[0])
        else:
            shown += size
    assert shown <= limit


def test_an_observation_of_very_many_messages_is_cut():
    messages = [{"role": "tool", "content": f"not JSON: {i}"} for i in range(5000)]
    result = cut(tokenizer(), messages, 20)
    assert len(result) == 20 and result[-1] == {
        "role": "tool",
        "content": "[cut: 4981 more messages]",
    }
    assert sum(len(tokenizer().encode(m["content"])) for m in result) < 20 * 40
    assert cut(tokenizer(), messages[:3], 1) == [
        {"role": "tool", "content": "[cut: 3 more messages]"}
    ]


def test_a_huge_observation_is_cut_before_it_is_tokenised():
    class Counting:
        def __init__(self):
            self.longest = 0

        def encode(self, text):
            self.longest = max(self.longest, len(text))
            return tokenizer().encode(text)

        def decode(self, ids):
            return tokenizer().decode(ids)

    counting, huge = Counting(), "one two three " * 500_000
    [message] = cut(counting, [{"role": "tool", "content": huge}], 50)
    assert counting.longest < 10_000 and len(message["content"]) < 10_000
    body, mark = message["content"].rsplit("\n[cut: the first 50 of more than ", 1)
    assert (
        huge.startswith(body) and mark.endswith(" tokens]") and len(tokenizer().encode(body)) == 50
    )
    [short, long] = cut(
        counting, [{"role": "tool", "content": "ok"}, {"role": "tool", "content": huge}], 50
    )
    assert short["content"] == "ok" and "more than" in long["content"]


# --- templates ------------------------------------------------------------------------------------

TIPS = [("e1", "When counting, start at one."), ("e2", "Stop at ten.")]
TOOL = {"type": "function", "function": {"name": "bell", "description": "", "parameters": {}}}


class LastTurns(Causal):
    """Show the opening and the last `keep` turns."""

    def __init__(self, opening, *, keep=2):
        super().__init__(opening)
        self.keep = keep

    async def extend(self, completion, messages, tools=None):
        self.add(completion, messages, tools)
        self.show(self.turns[-self.keep :])


class Summary(Causal):
    """Replace the turns by a summary, which takes time, whenever there are two of them."""

    async def extend(self, completion, messages, tools=None):
        self.add(completion, messages, tools)
        if len(self.turns) == 2:
            await asyncio.sleep(0.001)
            self.turns = [self.tokenizer.encode(" so far: two turns ")]
        self.show(self.turns)


@pytest.mark.parametrize("tools", [None, [TOOL]])
@pytest.mark.parametrize("template", [Causal, functools.partial(LastTurns, keep=2), Summary])
def test_guided_rollouts_train_exactly_what_was_generated_and_no_experience(template, tools):
    """A template may rewrite the context, and the tools may change: each generation still trains
    once, under the prompt that the engine saw, less the experience."""
    engine = Scripted("one", "two three", "one two", "three", "two")
    limits = dataclasses.replace(ROOMY, max_turns=6)
    guided = play(Script(tools=tools), engine, limits, context=template, experience=TIPS)
    assert [prompt for prompt, _, _ in engine.requests] == [turn.prompt for turn in guided.turns]
    plain = play(
        Script(tools=tools),
        Scripted("one", "two three", "one two", "three", "two"),
        limits,
        context=template,
    )
    for with_tips, without in zip(guided.turns, plain.turns, strict=True):
        assert "Stop at ten" in tokenizer().decode(with_tips.prompt)
        assert (with_tips.stripped, without.stripped) == (without.prompt, [])
    trained = []
    for sample, same in zip(samples.samples(guided), samples.samples(plain), strict=True):
        assert sample.guided and not same.guided
        assert "<EXP>" not in tokenizer().decode(sample.tokens.tolist())
        for name in ("tokens", "mask", "turn_ids", "logp", "version"):
            np.testing.assert_array_equal(getattr(sample, name), getattr(same, name))
        trained += [
            (int(k), int(token)) for k, token in zip(sample.turn_ids, sample.tokens) if k >= 0
        ]
    assert trained == [
        (k, token) for k, turn in enumerate(guided.turns) for token in turn.completion.tokens
    ]


def test_a_window_shows_the_last_turns_and_every_later_turn_starts_a_sample():
    trajectory = play(
        Script(), Scripted("one"), dataclasses.replace(ROOMY, max_turns=5), context=LastTurns
    )
    sizes = [len(turn.prompt) for turn in trajectory.turns]
    assert sizes[0] < sizes[1] < sizes[2] == sizes[3] == sizes[4]
    turns = [sorted(set(s.turn_ids.tolist()) - {-1}) for s in samples.samples(trajectory)]
    assert turns == [[0, 1, 2], [3], [4]]


class BadTemplate(Causal):
    """Fail in the constructor (`at="start"`) or in extend: raise, time out, return after the
    deadline or hide the stripped prompt."""

    def __init__(self, opening, *, at="extend", how="raise"):
        if at == "start":
            raise RuntimeError("no summariser")
        super().__init__(opening)
        self.how = how

    async def extend(self, completion, messages, tools=None):
        await super().extend(completion, messages, tools)
        if self.how == "raise":
            raise RuntimeError("no summariser")
        if self.how == "timeout":
            raise TimeoutError("the summariser is slow")
        if self.how == "wait":
            await asyncio.sleep(LONG)
        if self.how == "unstripped":
            self.stripped = []


@pytest.mark.parametrize(
    "settings,reason,turns,error",
    [
        ({"at": "start"}, StopReason.ENV_ERROR, 0, "template: RuntimeError: no summariser"),
        ({"how": "raise"}, StopReason.ENV_ERROR, 1, "template: RuntimeError: no summariser"),
        (
            {"how": "timeout"},
            StopReason.ENV_ERROR,
            1,
            "template: TimeoutError: the summariser is slow",
        ),
        ({"how": "wait"}, StopReason.CANCELLED, 1, "the episode took longer than 0.3 s"),
        (
            {"how": "unstripped"},
            StopReason.ENV_ERROR,
            1,
            "template: ValueError: `stripped` is empty",
        ),
    ],
)
def test_a_failing_template_ends_the_episode_with_a_reason(settings, reason, turns, error):
    limits = dataclasses.replace(ROOMY, timeout=0.3) if settings.get("how") == "wait" else ROOMY
    engine = Scripted("one")
    template = functools.partial(BadTemplate, **settings)
    trajectory = play(Script(), engine, limits, context=template, experience=TIPS)
    assert (trajectory.stop, len(trajectory.turns)) == (reason, turns)
    assert trajectory.error.startswith(error) and not engine.open


@pytest.mark.parametrize(
    "error", [EndsRun("the budget is spent"), EngineFault("no server is left")]
)
def test_what_ends_the_run_is_not_only_the_end_of_an_episode(error):
    class Ends(Causal):
        async def extend(self, *_):
            raise error

    with pytest.raises(type(error), match=str(error)):
        run_many(Script, Scripted("one"), context=Ends)


# --- many -----------------------------------------------------------------------------------------


def jobs(n):
    return [
        Job(Task(f"t{i}", "fake", "count"), 0, seed=i, sampling=SAMPLING, draw=i % 3)
        for i in range(n)
    ]


def run_many(make_world, engine, n=12, limits=ROOMY, *, concurrency=64, progress=None, **settings):
    actor = Actor(engine, tokenizer(), limits, **settings)
    done = rollouts(jobs(n), actor, Worlds(make_world), concurrency=concurrency, progress=progress)
    return asyncio.run(asyncio.wait_for(done, 60))


def test_results_come_in_the_order_of_jobs_with_bounded_concurrency():
    seen, made = [], []

    def make_world():
        made.append(Script())
        return made[-1]

    engine = Scripted("one", "done", wait=0.001)
    result = run_many(
        make_world,
        engine,
        concurrency=3,
        progress=lambda done, total, t: seen.append((done, total, t)),
    )
    assert [t.group for t in result] == [(f"t{i}", i % 3) for i in range(12)]
    assert engine.most_busy <= 3 and len(made) <= 3, "one world per concurrent episode, used again"
    assert [done for done, _, _ in seen] == list(range(1, 13)) and {
        total for _, total, _ in seen
    } == {12}


def test_a_bad_world_takes_only_its_own_episode_down():
    class ByTask(Script):
        def reset(self, task, seed=0):
            self.at, self.how = [("", ""), ("step", "raise"), ("reset", "raise"), ("step", "hang")][
                int(task.id[1:]) % 4
            ]
            return super().reset(task, task.seed)

    limits = dataclasses.replace(ROOMY, env_timeout=1.0)
    result = run_many(
        lambda: ByTask(seconds=5), Scripted("one", "done"), limits=limits, threads=True
    )
    assert [bool(t.restarted) for t in result] == [False, False, True, False] * 3
    stops = collections.Counter(t.stop for t in result)
    assert stops == {StopReason.DONE: 3, StopReason.ENV_ERROR: 6, StopReason.ENV_TIMEOUT: 3}
    assert sum(stops.values()) == len(result)


@pytest.mark.parametrize("how", ["raise", "hang"])
def test_a_failed_reset_is_tried_once_more_on_a_new_world_and_counted(how):
    limits = dataclasses.replace(ROOMY, env_timeout=1.0)

    def one_rollout(failing):
        made = []

        def make_world():
            made.append(Script("reset" if len(made) < failing else "", how, 5))
            return made[-1]

        [result] = run_many(make_world, Scripted("done"), n=1, limits=limits, threads=True)
        return result.stop, result.restarted.partition(":")[0], len(made)

    assert one_rollout(failing=1) == (StopReason.DONE, "reset", 2)
    reason = StopReason.ENV_ERROR if how == "raise" else StopReason.ENV_TIMEOUT
    assert one_rollout(failing=5) == (reason, "reset", 2)


def test_a_failed_step_is_not_tried_again():
    made = []

    def make_world():
        made.append(Script("step"))
        return made[-1]

    assert run_many(make_world, Scripted("one"), n=1)[0].restarted == ""
    assert len(made) == 1


def test_a_world_that_cannot_be_made_is_an_environment_error():
    def make_world():
        raise OSError("no such interpreter")

    result = run_many(make_world, Scripted(), n=2)
    assert [t.stop for t in result] == [StopReason.ENV_ERROR] * 2
    assert (
        result[0].error == "make_world: OSError: no such interpreter"
        and result[0].restarted == result[0].error
    )


def test_an_engine_fault_stops_everything():
    with pytest.raises(EngineFault, match="out of memory"):
        run_many(Script, Scripted(error=EngineFault("out of memory")))


def test_an_engine_without_room_is_a_stop_reason():
    assert {t.stop for t in run_many(Script, Scripted("one", context=40))} == {
        StopReason.CONTEXT_FULL
    }


def test_cancelling_leaves_nothing_running():
    engine = Scripted("one", wait=LONG)

    async def main():
        task = asyncio.create_task(
            rollouts(jobs(5), Actor(engine, tokenizer(), ROOMY), Worlds(Script))
        )
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
    limits = dataclasses.replace(ROOMY, env_timeout=0.0001)
    assert play(Slow(), Scripted("one", "done"), limits).stop is StopReason.ENV_TIMEOUT


@pytest.mark.parametrize("threads", [True, False])
@pytest.mark.parametrize("at", ["reset", "step", "evaluate"])
@pytest.mark.parametrize(
    "odd", [StopIteration, StopAsyncIteration, asyncio.CancelledError, GeneratorExit, SystemExit]
)
def test_an_exception_that_means_something_to_the_event_loop_ends_one_episode_at_once(
    odd, at, threads
):
    made = []

    def make_world():
        made.append(Script(at if not made else "", odd))
        return made[-1]

    limits = dataclasses.replace(
        ROOMY, timeout=1e6, env_timeout=1e6
    )  # nothing here waits for a deadline

    engine = Scripted("one", "done")
    first, *others = run_many(make_world, engine, n=3, limits=limits, threads=threads)
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
    late = threading.Event()
    limits = dataclasses.replace(ROOMY, env_timeout=1.0)

    async def main():
        world = Script("step", "hang", LONG, late=late)
        actor = Actor(Scripted("one"), tokenizer(), limits, threads=True)
        trajectory = await rollout(Job(TASK, 0, 0, SAMPLING), actor, world)
        before = dataclasses.asdict(trajectory)
        late.set()
        for _ in range(500):
            await asyncio.sleep(0 if world.actions else 0.01)
        assert world.actions == ["one"], "the late answer did arrive"
        assert dataclasses.asdict(trajectory) == before
        return trajectory

    assert asyncio.run(main()).stop is StopReason.ENV_TIMEOUT


def nested(depth):
    value = 1
    for _ in range(depth):
        value = [value]
    return value


UNSAFE = {
    "an object": {"object": object()},
    "a set": {"set": {1}},
    "deep": {"calls": nested(900)},
    "deep enough to break a copy only": {"calls": nested(500)},
    "a number": {"n": 10**400},
    "not a number": {"n": float("nan")},
    "a list": [1],
}


@pytest.mark.parametrize("case", UNSAFE)
def test_info_that_is_not_json_is_an_error_of_the_world(case):
    class Odd(Script):
        def step(self, action):
            result = super().step(action)
            return dataclasses.replace(result, info=UNSAFE[case])

    trajectory = play(Odd(), Scripted("one"))
    assert trajectory.stop is StopReason.ENV_ERROR and re.match(
        "step 0: (Unsafe|TooDeep): info", trajectory.error
    )
    json.dumps(dataclasses.asdict(trajectory), ensure_ascii=False, allow_nan=False).encode()


def test_lone_surrogates_are_repaired_wherever_a_world_writes_them():
    class Odd(Script):
        def reset(self, task, seed=0):
            tool = {**TOOL, "function": {**TOOL["function"], "description": "\udfff"}}
            return Observation([{"role": "user", "content": "a \ud800"}], [tool])

        def step(self, action):
            messages = [{"role": "tool", "content": "b \ud800", "name": "\ud800"}]
            return StepResult(messages, terminated=True, info={"\ud800": "\ud83d\ude00"})

        def evaluate(self):
            return Evaluation(1.0, True, {"\ud800": 1.0})

    trajectory = play(Odd(), Scripted("one"))
    assert trajectory.stop is StopReason.DONE and trajectory.outcome == 1.0
    assert trajectory.turns[0].observation[0]["content"] == "b \ufffd"
    assert trajectory.turns[0].info == {"\ufffd": "\U0001f600"}
    json.dumps(dataclasses.asdict(trajectory), ensure_ascii=False, allow_nan=False).encode()
