"""Training samples and gates: merging, stripping, and one reason for every rollout that does not train."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from envs.world import Evaluation, Observation, Task
from rl import samples
from rl.contexts import Opening
from rl.contexts.causal import Causal
from rl.forward import device_batch
from rl.packing import pack
from rl.samples import DROPPED, REASONS, drop_reasons, void_reason
from rl.trajectory import Completion, StopReason, Trajectory, Turn
from tests.models.helpers import extend, tool, user
from tests.rl.test_rollout import tokenizer


def turn(prompt=(1,), generated=(2,), advantage=0.0, version=5, stripped=()):
    logprobs = [-0.01 * token for token in generated]
    completion = Completion(list(generated), logprobs, "stop", version)
    return Turn(list(prompt), completion, "", [], advantage=advantage, stripped=list(stripped))


def trajectory(*turns, task="a", stop=StopReason.DONE, **options):
    return Trajectory(
        Task(task, "toy", "q"), rollout=0, seed=0, messages=[], turns=list(turns), stop=stop,
        evaluation=Evaluation(1.0, True), **options,
    )  # fmt: skip


def assert_holds(sample, **expected):
    """Assert what a sample holds of each token, by the name of the array."""
    for name, values in expected.items():
        np.testing.assert_allclose(getattr(sample, name), values, atol=1e-7, err_msg=name)


def test_growing_contexts_share_a_sample():
    t = trajectory(turn([1, 2], [3, 4], 0.5), turn([1, 2, 3, 4, 5], [6], -1.0, version=6))
    [sample] = samples.samples(t)
    assert_holds(
        sample, tokens=[1, 2, 3, 4, 5, 6], mask=[0, 0, 1, 1, 0, 1],
        version=[-1, -1, 5, 5, -1, 6],
        logp=[0, 0, -0.03, -0.04, 0, -0.06], advantage=[0, 0, 0.5, 0.5, 0, -1.0],
    )  # fmt: skip
    assert (sample.guided, sample.env, len(sample)) == (False, "toy", 6)


def test_a_turn_that_was_given_is_part_of_the_prompt_and_of_no_gate():
    first = turn([1, 2], [3, 4], 9.0, version=0)
    first.given = True
    t = trajectory(first, turn([1, 2, 3, 4, 5], [6]))
    [sample] = samples.samples(t)
    assert_holds(sample, tokens=[1, 2, 3, 4, 5, 6], mask=[0, 0, 0, 0, 0, 1])
    assert not samples.stale(t, version=5, max_staleness=0)
    assert samples.no_signal([t])
    assert samples.void_reason(trajectory(first), ["cancelled"])


def test_channels_of_turns_reach_the_rows_at_the_tokens_that_train():
    first, second = turn([1, 2], [3, 4]), turn([1, 2, 3, 4, 5], [6])
    first.channels = {"teacher": np.array([-1.0, -2.0]), "hard": 1}
    second.channels = {"teacher": -3.0}
    made = samples.samples(trajectory(first, second))
    packed = pack([*made, *samples.samples(trajectory(turn([1, 2], [3])))], 10)
    np.testing.assert_array_equal(packed.channels["teacher"], [[0, 0, -1, -2, 0, -3, 0, 0, 0, 0]])
    np.testing.assert_array_equal(packed.channels["hard"], [[0, 0, 1, 1, 0, 0, 0, 0, 0, 0]])
    rows = device_batch(packed, None, 1, 0)
    np.testing.assert_array_equal(rows["channel/hard"], packed.channels["hard"][None])
    packed.channels["hard"] = packed.channels["hard"][0]
    with pytest.raises(ValueError, match=r"hard has the shape \(10,\); the rows have \(1, 10\)"):
        device_batch(packed, None, 1, 0)
    first.channels["teacher"] = [-1.0, -2.0, -3.0]
    with pytest.raises(ValueError, match="turn 0: the channel 'teacher' has 3 numbers for 2 tok"):
        samples.samples(trajectory(first, second))


def test_experience_that_leaves_the_context_does_not_split_a_sample():
    """The learner sees the stripped contexts, so their prefixes decide."""
    t = trajectory(turn([1, 8, 9], [3], stripped=[1]), turn([1, 3, 4], [6]), experience=["e1"])
    assert [list(s.tokens) for s in samples.samples(t)] == [[1, 3, 4, 6]]


pieces = st.lists(st.integers(1, 3), max_size=3)
openings = st.lists(st.integers(1, 3), min_size=1, max_size=6)


@given(openings, openings, st.lists(st.tuples(pieces, pieces, st.booleans())))
def test_every_generated_token_trains_exactly_once(prompt, stripped, parts):
    """Few distinct tokens, so that all kinds of prefixes and repetitions occur; a turn may rewrite
    the context. The advantage of a token tells its turn."""
    turns, since = [], []
    for generated, observation, rewrite in parts:
        turns.append(turn(prompt + since, generated, len(turns) + 1.0, stripped=stripped + since))
        since = since + generated + observation
        if rewrite:
            since = [2] + since[-2:]
    t = trajectory(*turns, experience=["e"])
    result, trained = samples.samples(t), []
    for s in result:
        trained += [(int(k), int(token)) for k, token in zip(s.advantage, s.tokens) if k]
    assert trained == [(t.advantage, x) for t in turns for x in t.completion.tokens]
    for sample in result:
        on = sample.advantage > 0
        assert_holds(sample, mask=on, logp=on * -0.01 * sample.tokens)
        last = turns[int(sample.advantage.max()) - 1]
        assert sample.tokens.tolist() == last.stripped + last.completion.tokens


# --- stripping ------------------------------------------------------------------------------------


def episode(query, experience, turns, window, tools_at=None) -> Trajectory:
    """Write an episode down with the causal template, or with a window of the last turns."""
    messages = [{"role": "system", "content": "You count."}, user(query)]
    context, taken = Causal(Opening(tokenizer(), Observation(messages), experience)), []
    for k, (said, answer, closed) in enumerate(turns):
        tokens = tokenizer().encode(said) + [tokenizer().im_end] * closed
        taken.append(turn(context.prompt, tokens, 0.1 * k - 0.3, stripped=context.stripped))
        tools = [{"type": "function", "function": {"name": f"tool_{k}"}}] if k == tools_at else None
        extend(context, tokens, [tool(answer)], tools)
        context.show(context.turns[-window:])
    return trajectory(*taken, experience=["e"] * len(experience))


words = st.text("one two <EXP/>\n", max_size=12)
episodes = st.lists(st.tuples(words, words, st.booleans()), min_size=1, max_size=4)


@settings(max_examples=60, deadline=None)
@given(
    words,
    st.lists(words, min_size=1, max_size=2),
    episodes,
    st.sampled_from([None, 0, 1, 2, 3]),
    st.integers(1, 4),
)
def test_a_guided_episode_gives_the_samples_of_one_without_experience(
    query, experience, turns, tools_at, window
):
    """Also when the tools, which are part of the opening, change."""
    guided = episode(query, experience, turns, window, tools_at)
    plain = episode(query, [], turns, window, tools_at)
    for sample, expected in zip(samples.samples(guided), samples.samples(plain), strict=True):
        names = ("tokens", "mask", "logp", "advantage", "version")
        assert_holds(sample, **{name: getattr(expected, name) for name in names})


def test_a_sample_refuses_arrays_that_cannot_train():
    with pytest.raises(ValueError, match="first token"):
        samples.Sample([1, 2], [True, True])
    with pytest.raises(ValueError, match="broadcast"):
        samples.Sample([1, 2], [False, True, True])


# --- gates ----------------------------------------------------------------------------------------


def test_every_rollout_has_the_first_reason_that_holds():
    good = [trajectory(turn(advantage=advantage)) for advantage in (0.5, -0.5, 0.0)]
    one = turn(advantage=1.0)
    others = {
        "no_signal": [trajectory(turn(), task="b")] * 2,
        "cancelled": [trajectory(one, stop=StopReason.CANCELLED), trajectory(turn([1], []))],
        # the second is of a reset: it generated nothing, and was not cancelled
        "env_error": [
            trajectory(one, stop=StopReason.ENV_TIMEOUT), trajectory(stop=StopReason.ENV_ERROR)
        ],
        "parse_error": [trajectory(one, stop=StopReason.PARSE_ERROR)],
        "stale": [trajectory(turn(advantage=1.0, version=5), turn([1, 2], [3], 1.0, version=2))],
        "overlong": [trajectory(turn([1] * 9, [2] * 2, 1.0))],
    }  # fmt: skip
    expected = []
    for reason, members in others.items():
        expected += [(reason, t) for t in members]
    # The third has no advantage of its own, but its group has.
    expected += [(None, t) for t in good]
    everyone = [t for _, t in expected]
    reasons = drop_reasons(everyone, row=10, version=5, max_staleness=2, drop=REASONS)
    assert reasons == [reason for reason, _ in expected]
    for t, reason in zip(everyone, reasons):
        of_its_end = reason if reason in ("env_error", "cancelled", "parse_error") else None
        assert void_reason(t, REASONS) == of_its_end
        assert void_reason(t, ("stale", "overlong", "no_signal")) is None


def test_gates_are_a_choice():
    parse_error = trajectory(turn(advantage=1.0), stop=StopReason.PARSE_ERROR)
    cut_short = trajectory(turn(advantage=1.0), stop=StopReason.CONTEXT_FULL)
    silent = trajectory(turn(), task="b")
    batch = [parse_error, cut_short, silent]
    assert drop_reasons(batch, row=10) == [None, None, "no_signal"]
    assert drop_reasons(batch, row=10, drop_truncated=True) == [None, "overlong", "no_signal"]
    assert drop_reasons(batch, row=10, drop=(), drop_truncated=True) == [None] * 3
    # A sample that fits no row cannot train.
    assert drop_reasons(batch, row=1, drop=()) == ["overlong"] * 3
    assert void_reason(parse_error, DROPPED) is None
    with pytest.raises(ValueError, match="no gate boring"):
        drop_reasons(batch, row=10, drop=("boring",))
    assert drop_reasons([], row=4) == []


def test_only_the_rollouts_that_pass_give_their_group_a_signal():
    both = [trajectory(turn()), trajectory(turn(advantage=1.0, version=1))]
    assert drop_reasons(both, row=10, version=5, max_staleness=2) == ["no_signal", "stale"]
    assert drop_reasons(both, row=10, version=5) == [None, None]


def test_the_length_without_experience_decides_what_is_overlong():
    t = trajectory(turn([1, 2, 8, 9, 5], [3], 1.0, stripped=[1, 2, 5]), experience=["e1"])
    assert drop_reasons([t], row=4) == [None] and drop_reasons([t], row=3) == ["overlong"]
