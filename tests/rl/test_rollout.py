"""Rollouts: every way to end is a stop reason, tokens only grow, nothing hangs, nothing is left running."""

import asyncio
import collections
import dataclasses
import functools
import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from envs.world import Evaluation, Observation, StepResult, Task, World
from models.tokenizer import train_bpe
from rl.context import cut, inject
from rl.engines import ContextFull, EngineFault
from rl.rollout import Job, Limits, Retry, Worlds, rollout, rollouts
from rl.seeds import seed_of
from rl.trajectory import Completion, Sampling, StopReason

TASK = Task(id="t", env="fake", query="count", seed=3)
SAMPLING = Sampling(max_tokens=10_000)
LONG = 100.0  # seconds that no deadline here lets pass
ROOMY = Limits(max_steps=4, max_turn_tokens=50, context_tokens=5000, observation_tokens=500)


@functools.cache
def tokenizer():
    return train_bpe(["the assistant counts to ten: one two three " * 3], 300)


class Script(World):
    """Answers every turn, and ends the episode at a turn that says done. `at` names the call that misbehaves: it
    raises, exits, or waits for `seconds` unless `late` is set meanwhile; `inside` counts those that wait."""

    name = "fake"

    def __init__(self, at="", how="raise", seconds=0.05, answer="ok", tools=None, late=None):
        self.at, self.how, self.seconds, self.answer, self.new_tools = at, how, seconds, answer, tools
        self.late, self.calls, self.closed, self.actions = late or threading.Event(), collections.Counter(), 0, []
        self.inside = 0

    def misbehave(self, what):
        self.calls[what] += 1
        if what != self.at:
            return
        if self.how == "raise":
            raise RuntimeError("the database is gone")
        if self.how == "exit":
            raise SystemExit("bye")
        self.inside += 1
        self.late.wait(self.seconds)
        self.inside -= 1

    def reset(self, task, seed=0):
        self.misbehave("reset")
        assert seed == task.seed
        return Observation([{"role": "system", "content": "You count."}, {"role": "user", "content": task.query}])

    def step(self, action):
        self.misbehave("step")
        self.actions.append(action)
        info = {"parse_error": "not a number"} if action == "garbage" else {}
        messages = [{"role": "tool", "content": self.answer}]
        return StepResult(
            messages, terminated=action == "done", truncated=action == "stop", tools=self.new_tools, info=info
        )

    def evaluate(self):
        self.misbehave("evaluate")
        return Evaluation(2.0, True) if self.how == "score" else Evaluation(0.5, False)

    def close(self):
        self.closed += 1


class Scripted:
    """An engine that says given texts in turn, or `text(prompt)`; None stands for a turn cut by its token limit."""

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


def play(world, engine, limits=ROOMY, **options):
    options = {"rollout_index": 1, "seed": 5, "sampling": SAMPLING} | options
    options |= {"world": world, "engine": engine, "tokenizer": tokenizer(), "limits": limits}
    return asyncio.run(asyncio.wait_for(rollout(TASK, **options), 60))


HANG, THREADS = {"step_seconds": 1.0}, {"threads": True}
REASONS = {
    "done": (Script(), ("one", "done"), {}, {}, StopReason.DONE, 2),
    "truncated by the world": (Script(), ("stop",), {}, {}, StopReason.MAX_STEPS, 1),
    "out of turns": (Script(), ("one",), {}, {}, StopReason.MAX_STEPS, 4),
    "no room for a turn": (Script(), ("one",), {"context_tokens": 20}, {}, StopReason.CONTEXT_FULL, 0),
    "a turn cut by the context": (Script(), (None,), {"context_tokens": 80}, {}, StopReason.CONTEXT_FULL, 1),
    "a turn cut by its limit": (Script(), (None,), {}, {}, StopReason.LENGTH, 1),
    "by its own limit": (Script(), (None,), {}, {"sampling": Sampling(max_tokens=9)}, StopReason.LENGTH, 1),
    "a cut turn goes on": (Script(), (None, "done"), {}, {"length_stop": "continue"}, StopReason.DONE, 2),
    "unreadable": (Script(), ("garbage", "done"), {}, {"parse_error": "end"}, StopReason.PARSE_ERROR, 1),
    "unreadable, answered": (Script(), ("garbage", "done"), {}, {}, StopReason.DONE, 2),
    "reset raises": (Script("reset"), (), {}, {}, StopReason.ENV_ERROR, 0),
    "step raises": (Script("step"), (), {}, {}, StopReason.ENV_ERROR, 1),
    "step exits": (Script("step", "exit"), (), {}, THREADS, StopReason.ENV_ERROR, 1),
    "evaluate raises": (Script("evaluate"), ("done",), {}, {}, StopReason.ENV_ERROR, 1),
    "a score out of range": (Script(how="score"), ("done",), {}, {}, StopReason.ENV_ERROR, 1),
    "an unreadable observation": (Script(answer=None), ("one",), {}, {}, StopReason.ENV_ERROR, 1),
    "reset is late": (Script("reset", "late", 0.6), (), {"step_seconds": 0.4}, {}, StopReason.ENV_TIMEOUT, 0),
    "step is late": (Script("step", "late", 0.6), (), {"step_seconds": 0.4}, {}, StopReason.ENV_TIMEOUT, 1),
    "reset hangs": (Script("reset", "hang", LONG), (), HANG, THREADS, StopReason.ENV_TIMEOUT, 0),
    "step hangs": (Script("step", "hang", LONG), (), HANG, THREADS, StopReason.ENV_TIMEOUT, 1),
    "evaluate hangs": (
        Script("evaluate", "hang", LONG), ("done",), HANG, THREADS, StopReason.ENV_TIMEOUT, 1
    ),
    "episode too long": (Script(), ("slow",), {"episode_seconds": 0.3}, {}, StopReason.CANCELLED, 0),
    "setup too long": (
        Script("reset", "hang", LONG), (), {"episode_seconds": 0.3}, THREADS, StopReason.ENV_TIMEOUT, 0
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", REASONS)
def test_every_end_has_its_reason(case):
    world, turns, limits, options, reason, steps = REASONS[case]
    engine = Scripted(*turns, wait=LONG if turns == ("slow",) else 0)
    trajectory = play(world, engine, dataclasses.replace(ROOMY, **limits), **options)
    assert world.inside == (world.how == "hang"), "nobody waited for the call that hangs"
    world.late.set()
    assert (trajectory.stop, len(trajectory.steps)) == (reason, steps), trajectory.error
    failed = reason in (StopReason.ENV_ERROR, StopReason.ENV_TIMEOUT)
    assert bool(trajectory.error) == (failed or reason is StopReason.CANCELLED)
    assert trajectory.evaluation.score == (0.0 if failed else 0.5), "unfinished episodes are evaluated too"
    assert not engine.open, "the session is released"


def test_errors_say_where_and_what():
    assert play(Script("step"), Scripted()).error == "step 0: RuntimeError: the database is gone"
    assert "no answer within" in play(Script("step", "late", 0.6), Scripted(), Limits(step_seconds=0.4)).error


@given(st.lists(st.sampled_from(["one", "two three", "garbage", None, "<|im_end|>", "é ☃"]), min_size=1, max_size=4))
@settings(max_examples=15, deadline=None)
def test_tokens_only_grow(turns):
    engine = Scripted(*turns)
    trajectory = play(Script(answer="a <|im_start|> answer"), engine, length_stop="continue")
    assert len(trajectory.steps) == ROOMY.max_steps
    for before, after in zip(trajectory.steps, trajectory.steps[1:]):
        grown = before.prompt + before.completion.tokens
        assert after.prompt[: len(grown)] == grown
        between = after.prompt[len(grown) :]
        invented = 0 if before.completion.stop == "stop" else 1
        assert between.count(tokenizer().im_end) == invented + 1, "one for the answer, one for a turn without its own"
        assert between.count(tokenizer().im_start) == 2, "the answer cannot open a turn"
    assert [prompt for prompt, _, _ in engine.requests] == [step.prompt for step in trajectory.steps]


def test_a_cut_turn_never_ends_with_an_invented_token():
    trajectory = play(Script(), Scripted(None))
    assert tokenizer().im_end not in trajectory.steps[0].completion.tokens
    assert len(trajectory.steps[0].completion.tokens) == ROOMY.max_turn_tokens


def test_actions_leave_out_the_stop_token():
    world = Script()
    trajectory = play(world, Scripted("one two", "done"))
    assert world.actions == ["one two", "done"] == [step.action for step in trajectory.steps]
    assert [step.completion.version for step in trajectory.steps] == [7, 7]


def test_each_turn_has_a_seed_of_its_own():
    engine = Scripted("one")
    play(Script(), engine)
    assert [sampling.seed for _, sampling, _ in engine.requests] == [seed_of(5, "turn", k) for k in range(4)]


def test_experience_goes_in_front_of_the_query_and_can_be_stripped():
    guided = play(
        Script(), Scripted("done"), experience=[("e1", "When counting, start at one."), ("e2", "Stop at ten.")]
    )
    plain = play(Script(), Scripted("done"))
    assert guided.guided and guided.experience == ["e1", "e2"] and not plain.guided
    assert guided.messages[1]["content"] == "<EXP>When counting, start at one.\nStop at ten.</EXP>\ncount"
    assert guided.stripped == plain.steps[0].prompt and plain.stripped == []
    assert guided.steps[0].prompt != guided.stripped
    assert inject([{"role": "user", "content": "a"}], []) == [{"role": "user", "content": "a"}]


def test_new_tools_rewrite_the_opening_and_nothing_else():
    tool = {"type": "function", "function": {"name": "bell", "description": "", "parameters": {}}}
    first, second, third, *_ = play(Script(tools=[tool]), Scripted("one")).steps
    tail = second.prompt[second.prompt.index(tokenizer().im_end, len(second.prompt) // 2) :]
    assert second.prompt[: len(first.prompt)] != first.prompt and "bell" in tokenizer().decode(second.prompt)
    assert second.prompt[-len(tail) :] == tail and first.completion.tokens[0] in second.prompt
    assert third.prompt[: len(second.prompt)] == second.prompt, "the same tools again change nothing"
    hidden = play(Script(tools=[tool]), Scripted("one"), show_tools=False)
    assert "bell" not in tokenizer().decode(hidden.steps[1].prompt)


@given(st.lists(st.text(max_size=200), min_size=1, max_size=4), st.integers(0, 60))
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


# --- many -----------------------------------------------------------------------------------------------------------


def jobs(n):
    return [Job(Task(id=f"t{i}", env="fake", query="count"), 0, seed=i, sampling=SAMPLING) for i in range(n)]


def run_many(make_world, engine, n=12, **options):
    options = {"limits": ROOMY, "tokenizer": tokenizer(), "engine": engine} | options
    return asyncio.run(rollouts(jobs(n), worlds=Worlds(make_world), **options))


def test_results_come_in_the_order_of_jobs_with_bounded_concurrency():
    seen, made = [], []

    def make_world():
        made.append(Script())
        return made[-1]

    engine = Scripted("one", "done", wait=0.001)
    result = run_many(make_world, engine, concurrency=3, progress=lambda done, total, t: seen.append((done, total, t)))
    assert [t.task.id for t in result] == [f"t{i}" for i in range(12)]
    assert engine.most_busy <= 3 and len(made) <= 3, "one world per concurrent episode, used again"
    assert [done for done, _, _ in seen] == list(range(1, 13)) and {total for _, total, _ in seen} == {12}


def test_a_bad_world_takes_only_its_own_episode_down():
    count = iter(range(100))
    kinds = [{}, {"at": "step"}, {"at": "reset"}, {"at": "step", "how": "hang", "seconds": 5}]
    result = run_many(
        lambda: Script(**kinds[next(count) % 4]),
        Scripted("one", "done"),
        concurrency=12,
        limits=dataclasses.replace(ROOMY, step_seconds=1.0),
        retry=Retry(attempts=1),
        threads=True,
    )
    stops = collections.Counter(t.stop for t in result)
    assert stops == {StopReason.DONE: 3, StopReason.ENV_ERROR: 6, StopReason.ENV_TIMEOUT: 3}
    assert sum(stops.values()) == len(result)


@pytest.mark.parametrize("how", ["raise", "hang"])
def test_a_failed_reset_is_tried_again_on_a_new_world_and_counted(how):
    made = []

    def make_world():
        made.append(Script("reset" if len(made) < 2 else "", how, 5))
        return made[-1]

    limits = dataclasses.replace(ROOMY, step_seconds=1.0)
    result = run_many(make_world, Scripted("done"), n=1, retry=Retry(attempts=3), limits=limits, threads=True)
    assert (result[0].stop, result[0].retries) == (StopReason.DONE, 2)
    made.clear()
    result = run_many(make_world, Scripted("done"), n=1, retry=Retry(attempts=2), limits=limits, threads=True)
    assert result[0].stop is (StopReason.ENV_ERROR if how == "raise" else StopReason.ENV_TIMEOUT)
    assert result[0].retries == 1


def test_a_failed_step_is_not_tried_again():
    made = []

    def make_world():
        made.append(Script("step"))
        return made[-1]

    assert run_many(make_world, Scripted("one"), n=1, retry=Retry(attempts=5))[0].retries == 0
    assert len(made) == 1


def test_a_world_that_cannot_be_made_is_an_environment_error():
    def make_world():
        raise OSError("no such interpreter")

    result = run_many(make_world, Scripted(), n=2)
    assert [t.stop for t in result] == [StopReason.ENV_ERROR] * 2
    assert result[0].error == "make_world: OSError: no such interpreter" and result[0].retries == 1


def test_an_engine_fault_stops_everything():
    with pytest.raises(EngineFault, match="out of memory"):
        run_many(Script, Scripted(error=EngineFault("out of memory")))


def test_an_engine_without_room_is_a_stop_reason():
    assert {t.stop for t in run_many(Script, Scripted("one", context=40))} == {StopReason.CONTEXT_FULL}


def test_cancelling_leaves_nothing_running():
    engine = Scripted("one", wait=LONG)

    async def main():
        task = asyncio.create_task(
            rollouts(jobs(5), worlds=Worlds(Script), engine=engine, tokenizer=tokenizer(), limits=ROOMY)
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
    limits = dataclasses.replace(ROOMY, step_seconds=0.0001)
    assert play(Slow(), Scripted("one", "done"), limits).stop is StopReason.ENV_TIMEOUT


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
    limits = dataclasses.replace(ROOMY, step_seconds=1.0)

    async def main():
        world = Script("step", "hang", LONG, late=late)
        trajectory = await rollout(
            TASK, rollout_index=0, seed=0, world=world, engine=Scripted("one"), tokenizer=tokenizer(),
            limits=limits, sampling=SAMPLING, threads=True,
        )  # fmt: skip
        before = trajectory.to_dict()
        late.set()
        for _ in range(500):
            await asyncio.sleep(0 if world.actions else 0.01)
        assert world.actions == ["one"], "it did answer in the end"
        assert trajectory.to_dict() == before
        return trajectory

    assert asyncio.run(main()).stop is StopReason.ENV_TIMEOUT


def test_wrong_options_are_named():
    with pytest.raises(ValueError, match="length_stop"):
        play(Script(), Scripted(), length_stop="retry")
    with pytest.raises(ValueError, match="attempts"):
        Retry(attempts=0)
