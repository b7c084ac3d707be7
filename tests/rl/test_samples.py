"""What trains, what does not and why: merging, stripping, and a ledger that adds up."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from envs.world import Evaluation, Task
from rl import samples
from rl.trajectory import Completion, Step, StopReason, Trajectory


def step(prompt, generated, advantage=0.0, version=5):
    logprobs = [-0.01 * token for token in generated]
    return Step(list(prompt), Completion(list(generated), logprobs, "stop", version), "", [], advantage=advantage)


def trajectory(*steps, task="a", stop=StopReason.DONE, **options):
    return Trajectory(
        Task(task, "toy", "q"), rollout=0, seed=0, messages=[], steps=list(steps), stop=stop,
        evaluation=Evaluation(1.0, True), **options,
    )  # fmt: skip


def test_growing_contexts_share_a_sample():
    t = trajectory(step([1, 2], [3, 4], 0.5), step([1, 2, 3, 4, 5], [6], -1.0))
    [sample] = samples.samples(t, index=7)
    np.testing.assert_array_equal(sample.tokens, [1, 2, 3, 4, 5, 6])
    np.testing.assert_array_equal(sample.mask, [0, 0, 1, 1, 0, 1])
    np.testing.assert_array_equal(sample.step_ids, [-1, -1, 0, 0, -1, 1])
    np.testing.assert_allclose(sample.logp, [0, 0, -0.03, -0.04, 0, -0.06])
    np.testing.assert_allclose(sample.advantage, [0, 0, 0.5, 0.5, 0, -1.0])
    assert (sample.guided, sample.trajectory) == (False, 7)
    assert samples.longest(t) == len(sample) == 6


def test_a_rewritten_context_starts_another_sample():
    """Earlier generations stand in the later prompt, where they do not train again."""
    t = trajectory(step([1, 2], [3, 4]), step([1, 9, 3, 4, 5], [6, 7]), step([1, 9, 3, 4, 5, 6, 7, 8], [2]))
    first, second = samples.samples(t)
    np.testing.assert_array_equal(first.tokens, [1, 2, 3, 4])
    np.testing.assert_array_equal(second.tokens, [1, 9, 3, 4, 5, 6, 7, 8, 2])
    np.testing.assert_array_equal(second.step_ids, [-1, -1, -1, -1, -1, 1, 1, -1, 2])


def test_a_retokenised_generation_is_a_rewritten_context():
    """The next prompt spells the same text with other tokens: training on it would not train what was sampled."""
    t = trajectory(step([1, 2], [3, 4]), step([1, 2, 34, 5], [6]))
    assert [len(s) for s in samples.samples(t)] == [4, 5]


def test_a_step_without_a_generation_trains_nothing():
    t = trajectory(step([1, 2], []), step([1, 2, 5], [6]))
    [sample] = samples.samples(t)
    np.testing.assert_array_equal(sample.step_ids, [-1, -1, -1, 1])
    assert samples.samples(trajectory()) == [] and samples.longest(trajectory()) == 0


GUIDED = dict(experience=["e1"], stripped=[1, 2, 5])


def test_guided_rollouts_train_without_their_experience():
    t = trajectory(step([1, 2, 8, 9, 5], [3], 1.0), step([1, 2, 8, 9, 5, 3, 4], [6], 2.0), **GUIDED)
    [sample] = samples.samples(t)
    np.testing.assert_array_equal(sample.tokens, [1, 2, 5, 3, 4, 6])
    np.testing.assert_array_equal(sample.step_ids, [-1, -1, -1, 0, -1, 1])
    np.testing.assert_allclose(sample.advantage, [0, 0, 0, 1, 0, 2])
    np.testing.assert_allclose(sample.logp, [0, 0, 0, -0.03, 0, -0.06])
    assert sample.guided and samples.longest(t) == 6
    [kept] = samples.samples(t, strip=False)
    np.testing.assert_array_equal(kept.tokens, [1, 2, 8, 9, 5, 3, 4, 6])
    assert kept.guided and samples.longest(t, strip=False) == 8


def test_stripping_reaches_rewritten_contexts():
    """The second context keeps the opening with its experience and drops the turn after it."""
    t = trajectory(step([1, 2, 8, 9, 5], [3]), step([1, 2, 8, 9, 7, 7], [6]), step([4, 4], [6]), **GUIDED)
    tokens = [list(s.tokens) for s in samples.samples(t)]
    assert tokens == [[1, 2, 5, 3], [1, 2, 7, 7, 6], [4, 4, 6]]


def test_a_stripped_prompt_may_be_spelled_otherwise():
    t = trajectory(step([1, 2, 8, 9, 5], [3]), experience=["e1"], stripped=[1, 6, 6, 6, 6, 6, 5])
    [sample] = samples.samples(t)
    np.testing.assert_array_equal(sample.tokens, [1, 6, 6, 6, 6, 6, 5, 3])
    assert samples.longest(t) == 8


@given(
    st.lists(st.integers(1, 3), min_size=1, max_size=6),
    st.lists(st.integers(1, 3), min_size=1, max_size=6),
    st.lists(
        st.tuples(st.lists(st.integers(1, 3), max_size=3), st.lists(st.integers(1, 3), max_size=3), st.booleans())
    ),
)
def test_every_generated_token_trains_exactly_once(prompt, stripped, turns):
    """Few distinct tokens, so that prefixes and repetitions of all kinds occur; a turn may rewrite the context."""
    steps, context = [], prompt
    for generated, observation, rewrite in turns:
        steps.append(step(context, generated, advantage=float(len(steps) + 1)))
        context = context + generated + observation
        if rewrite:
            context = context[: len(prompt)] + [2] + context[-2:]
    t = trajectory(*steps, experience=["e"], stripped=stripped)
    trained = [(int(k), int(token)) for s in samples.samples(t) for k, token in zip(s.step_ids, s.tokens) if k >= 0]
    assert trained == [(k, token) for k, s in enumerate(steps) for token in s.completion.tokens]
    for sample in samples.samples(t):
        np.testing.assert_array_equal(sample.mask, sample.step_ids >= 0)
        np.testing.assert_allclose(sample.advantage, np.where(sample.mask, sample.step_ids + 1, 0))
        np.testing.assert_allclose(sample.logp, np.where(sample.mask, -0.01 * sample.tokens, 0), atol=1e-6)
    assert samples.longest(t) == max([len(s) for s in samples.samples(t)], default=0)


def test_samples_refuse_what_cannot_train():
    with pytest.raises(ValueError, match="first token"):
        samples.Sample([1, 2], [True, True])
    with pytest.raises(ValueError, match=r"lengths \[2, 3\]"):
        samples.Sample([1, 2], [False, True, True])


# --- gates -----------------------------------------------------------------------------------------------------------


def test_every_rollout_is_in_the_ledger_under_the_first_reason():
    good = [trajectory(step([1], [2], 0.5)), trajectory(step([1], [2], -0.5)), trajectory(step([1], [2], 0.0))]
    silent = [trajectory(step([1], [2]), task="b"), trajectory(step([1], [2]), task="b")]
    others = {
        "cancelled": [trajectory(step([1], [2], 1.0), stop=StopReason.CANCELLED), trajectory(step([1], []))],
        "env_error": [
            trajectory(step([1], [2], 1.0), stop=StopReason.ENV_TIMEOUT),
            trajectory(stop=StopReason.ENV_ERROR),  # of a reset: it generated nothing, and was not cancelled
        ],
        "parse_error": [trajectory(step([1], [2], 1.0), stop=StopReason.PARSE_ERROR)],
        "stale": [trajectory(step([1], [2], 1.0, version=5), step([1, 2], [3], 1.0, version=2))],
        "overlong": [trajectory(step([1] * 9, [2] * 2, 1.0))],
    }
    everyone = [*silent, *(t for group in others.values() for t in group), *good]
    kept, ledger = samples.admit(everyone, max_tokens=10, version=5, max_staleness=2, drop=samples.REASONS)
    assert kept == good  # the third has no advantage of its own, its group does
    assert ledger == {
        "trained": 3, "cancelled": 2, "env_error": 2, "parse_error": 1, "stale": 1, "overlong": 1, "no_signal": 2,
    }  # fmt: skip
    assert sum(ledger.values()) == len(everyone)


def test_gates_are_a_choice():
    parse_error = trajectory(step([1], [2], 1.0), stop=StopReason.PARSE_ERROR)
    cut_short = trajectory(step([1], [2], 1.0), stop=StopReason.CONTEXT_FULL)
    silent = trajectory(step([1], [2], 0.0), task="b")
    batch = [parse_error, cut_short, silent]
    assert samples.admit(batch, max_tokens=10)[0] == [parse_error, cut_short]
    assert samples.admit(batch, max_tokens=10, drop_truncated=True)[0] == [parse_error]
    assert samples.admit(batch, max_tokens=10, drop=())[0] == batch
    assert samples.admit(batch, max_tokens=1, drop=())[1]["overlong"] == 3  # what fits no row cannot train
    with pytest.raises(ValueError, match="no gate boring"):
        samples.admit(batch, max_tokens=10, drop=("boring",))


def test_stripping_decides_what_is_overlong():
    t = trajectory(step([1, 2, 8, 9, 5], [3], 1.0), **GUIDED)
    assert samples.admit([t], max_tokens=4)[0] == [t]
    assert samples.admit([t], max_tokens=4, strip=False)[1]["overlong"] == 1


def test_an_empty_batch():
    assert samples.admit([], max_tokens=4) == ([], dict.fromkeys(("trained", *samples.REASONS), 0))
