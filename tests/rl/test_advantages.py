"""Estimators against worked numbers and a slow reference, the formulas with loops and `math.fsum`;
and the plugs."""

import functools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.testing import assert_allclose, assert_array_equal

from envs.world import Evaluation, Task
from rl import advantages
from rl.advantages import attribution, estimators
from rl.advantages import outcome as baselines
from rl.trajectory import Completion, Trajectory, Turn

G, B, A = 1, -1, 0  # good, bad, abstain


def rows(*labels):
    """Return ragged labels as label_NK and steps_N."""
    label_NK = np.zeros((len(labels), max(map(len, labels), default=0)), np.int8)
    for row, label in zip(label_NK, labels):
        row[: len(label)] = label
    return label_NK, np.array([len(label) for label in labels])


def adca(outcome, group, *labels, **options):
    """Return the advantages of trajectories with these labels."""
    return attribution.adca(outcome, group, *rows(*labels), **options)


# --- the slow reference ---------------------------------------------------------------------------


def slow_mean(values):
    values = list(values)
    return math.fsum(values) / len(values)


def slow_std(values, ddof=0):
    mean = slow_mean(values)
    return mean, math.sqrt(math.fsum((v - mean) ** 2 for v in values) / (len(values) - ddof))


def slow_grpo(outcome, group):
    result = []
    for r, g in zip(outcome, group):
        members = [o for o, h in zip(outcome, group) if h == g]
        mean, std = slow_std(members, ddof=1) if len(members) > 1 else (0.0, 1.0)
        result.append((r - mean) / (std + 1e-6))
    return result


def slow_zscore(raw, group, equal):
    """Standardise as in section 2.5 of the reference. `raw` is one list per trajectory; None is an
    abstention."""
    result = [[0.0] * len(row) for row in raw]
    for g in set(group):
        members = [i for i, h in enumerate(group) if h == g]
        kept = [[v for v in raw[i] if v is not None] for i in members]
        kept = [row for row in kept if row]
        if not kept:
            continue
        if equal:
            mean = slow_mean(slow_mean(row) for row in kept)
            variance = slow_mean(slow_mean((v - mean) ** 2 for v in row) for row in kept)
            std = math.sqrt(variance + 1e-8)
        else:
            mean, std = slow_std([v for row in kept for v in row])
            std = max(std, 1e-8)
        for i in members:
            result[i] = [0.0 if v is None else (v - mean) / (std + 1e-12) for v in raw[i]]
    return result


def slow_allocate(label, outcome):
    good, bad = (1.0, 0.2) if outcome > 0.5 else (0.2, 1.0)
    worth = [None if f == A else good if f == G else bad for f in label]
    total = math.fsum(w for w in worth if w is not None)
    sign = 1 if outcome > 0.5 else -1
    return [None if w is None else sign * w / total for w in worth]


def slow_adca(
    outcome, group, labels, *, alpha, scheme, outcome_at, length_normalise, equal, standardise
):
    """Compute ADCA as in sections 2.5 to 2.7 of the reference."""
    if scheme == "decouple":
        raw = [[None if f == A else 0.2 * f for f in row] for row in labels]
    else:
        raw = [slow_allocate(row, o) for row, o in zip(labels, outcome)]
    step = [[v or 0.0 for v in row] for row in raw]
    if standardise:
        step = slow_zscore(raw, group, equal)
    result = []
    for i, row in enumerate(step):
        members = [o for o, h in zip(outcome, group) if h == group[i]]
        mean, std = slow_std(members)
        o = outcome[i] - mean if std <= 1e-8 else (outcome[i] - mean) / (std + 1e-12)
        reward = list(row)
        if outcome_at != "none":
            here = [outcome_at == "all_steps" or j == len(row) - 1 for j in range(len(row))]
            reward = [alpha * v + o * on for v, on in zip(row, here)]
        if length_normalise and scheme == "decouple":
            reward = [v / math.sqrt(len(row)) for v in reward]
        result.append([math.fsum(reward[j:]) for j in range(len(row))])
    return result


outcomes = st.sampled_from([0.0, 0.1, 0.3, 0.5, 0.51, 1.0]) | st.floats(0, 1)
groups = st.sampled_from([7, -3, 10**12, 0])
ragged = st.lists(st.sampled_from([G, B, A]), max_size=7)
trajectories = st.lists(st.tuples(outcomes, groups, ragged), min_size=1, max_size=12)
schemes = st.sampled_from(["decouple", "allocation"])
choices = st.fixed_dictionaries(
    {
        "alpha": st.sampled_from([0.0, 0.1, 1.0]),
        "scheme": schemes,
        "outcome_at": st.sampled_from(["last_step", "all_steps", "none"]),
        "length_normalise": st.booleans(),
        "standardise": st.booleans(),
    }
)


@settings(max_examples=300)
@given(trajectories, choices, st.booleans())
def test_adca_reference(batch, options, equal):
    outcome, group, labels = zip(*batch)
    weight = "equal" if equal else "by_steps"
    got_NK = adca(outcome, group, *labels, **options, norm="reference", trajectory_weight=weight)
    want = slow_adca(outcome, group, labels, equal=equal, **options)
    for got, row in zip(got_NK, want):
        assert_allclose(got[: len(row)], row, atol=1e-5, rtol=1e-5)
        assert not got[len(row) :].any()


@given(trajectories)
def test_grpo_reference(batch):
    outcome, group, _ = zip(*batch)
    got_N = baselines.grpo(outcome, group, std="sample", eps=1e-6, lone="score")
    assert_allclose(got_N, slow_grpo(outcome, group), atol=1e-5, rtol=1e-5)


@given(
    trajectories,
    schemes,
    st.sampled_from(["trajectory", "step", "reference"]),
    st.randoms(use_true_random=False),
)
def test_adca_order_and_names_of_groups_do_not_matter(batch, scheme, norm, random):
    """The rows stay the same, and finite, for any order of the trajectories and any integers for
    the groups."""
    options = {"alpha": 0.3, "scheme": scheme, "norm": norm}
    outcome, group, labels = zip(*batch)
    first = adca(outcome, group, *labels, **options)
    order = list(range(len(batch)))
    random.shuffle(order)
    outcome, group, labels = zip(*(batch[i] for i in order))
    names = {7: 1, -3: 2, 10**12: -(2**40), 0: 5}
    second = adca(outcome, [names[g] for g in group], *labels, **options)
    assert np.isfinite(first).all()
    assert_allclose(second, first[order], atol=1e-7, rtol=1e-7)


# --- worked numbers -------------------------------------------------------------------------------


def test_grpo_worked_example():
    outcome, group = [1, 0, 1, 0], [5, 5, 5, 5]
    sample_N = baselines.grpo(outcome, group)
    assert_allclose(sample_N, [0.8660239, -0.8660239] * 2, atol=1e-6)
    assert_array_equal(sample_N, baselines.grpo(outcome, group, std="sample"))
    population_N = baselines.grpo(outcome, group, std="population")
    assert_allclose(population_N, [1, -1, 1, -1], atol=1e-5)


def test_a_lone_trajectory_has_no_advantage_unless_the_references_rule_is_named():
    scored = baselines.grpo([0.7], [1], std="sample", eps=1e-6, lone="score")
    assert_allclose(scored, [0.7 / (1 + 1e-6)])
    for std in ("sample", "population", None):
        assert baselines.grpo([0.7, 1, 0], [1, 2, 2], std=std)[0] == 0
    with pytest.raises(ValueError, match="zero or score"):
        baselines.grpo([0.7], [1], lone="raw")
    assert baselines.grpo([0.7], [1], std="population", lone="score") == [0]
    assert baselines.rloo([0.7], [1]) == [0]


@pytest.mark.parametrize("name", ["grpo", "dr_grpo", "rloo", "loop"])
def test_a_constant_group_gives_exactly_zero(name):
    assert not getattr(baselines, name)([0.1] * 7, [3] * 7).any()


def test_rloo_and_loop():
    outcome, group = [1, 0, 0, 1, 1], [0, 0, 0, 1, 1]
    want = [1 - 0, 0 - 0.5, 0 - 0.5, 0, 0]
    assert_allclose(baselines.rloo(outcome, group), want)
    assert_allclose(baselines.loop(outcome, group), want)
    assert_allclose(baselines.loop(outcome, group, drop_below=0.6), [1, 0, 0, 0, 0])
    assert_allclose(baselines.dr_grpo(outcome, group), [2 / 3, -1 / 3, -1 / 3, 0, 0])


THREE, REFERENCE = ([G, B], [B, G, B], [G]), {"alpha": 0.1, "norm": "reference"}
# Equations 18 to 21 by hand: the averages of [G, G] and [B, G, B] are 1 and -1/3, so their mean is
# 1/3 and their deviation 2/3, in units of a label.
GOOD, BAD = 0.5 * (1 - 1 / 3) / (2 / 3), 0.5 * (-1 - 1 / 3) / (2 / 3)
WORKED = {
    "decouple": (
        [1, 0, 1], THREE, REFERENCE,
        [[0.6615225, 0.5817501, 0], [-1.5851544, -1.4597979, -1.5395702], [0.7868791, 0, 0]],
    ),
    "allocation": (
        [1, 0, 1], THREE, REFERENCE | {"scheme": "allocation"},
        [[0.7447067, 0.6695068, 0], [-1.7808133, -1.6381043, -1.5569226], [0.8105067, 0, 0]],
    ),
    "a lone trajectory keeps the credit of its labels": ([1.0], ([G, B],), REFERENCE, [[0, -0.1]]),
    "the paper's norm standardises by averages of trajectories": (
        [1, 0], ([G, G], [B, G, B]), {"alpha": 0.5, "norm": "trajectory"},
        [[2 * GOOD + 1, GOOD + 1, 0], [2 * BAD + GOOD - 1, BAD + GOOD - 1, BAD - 1]],
    ),
    "equal averages give no credit under it, though labels differ inside a trajectory": (
        [1, 0], ([G, B], [B, G]), {"alpha": 0.5, "norm": "trajectory"}, [[1, 1], [-1, -1]],
    ),
    "nor anything if outcomes are equal too": (
        [1, 1], ([G, B], [B, G]), {"alpha": 0.5, "norm": "trajectory"}, [[0, 0], [0, 0]],
    ),
    "a trajectory of abstentions keeps its outcome": (
        [1, 0], ([A, A], [A, A]), {"alpha": 0.5}, [[1, 1], [-1, -1]],
    ),
    "rows without turns count in the mean of outcomes only": (
        [1, 0, 0], ([], [G, B], []), {"alpha": 0.0, "norm": "reference"},
        [[0, 0], [-0.7071068] * 2, [0, 0]],
    ),
    "no trajectory has a turn": ([1, 0], ([], []), {"alpha": 0.1}, np.zeros((2, 0))),
    "an outcome at all steps counts for the turns to come": (
        [1, 0], ([A, A, A], [A]), {"alpha": 0.1, "outcome_at": "all_steps"},
        [[3, 2, 1], [-1, 0, 0]],
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", WORKED)
def test_adca_worked_examples(case):
    outcome, labels, options, want = WORKED[case]
    got = adca(outcome, [4] * len(outcome), *labels, **options)
    assert_allclose(got, want, atol=1e-6)


def test_alpha_zero_is_grpo_with_the_population_deviation():
    outcome, group = [1, 0, 0.5, 1, 0, 0], [0, 0, 0, 1, 1, 1]
    got = adca(outcome, group, *[[G, B, G]] * 6, alpha=0.0)
    want_N = baselines.grpo(outcome, group, std="population", eps=0)
    assert_allclose(got, np.repeat(want_N[:, None], 3, 1), atol=1e-6)


def label_scores(outcome_N, group_N, label_NK, steps_N, **args):
    """Return the standardised label of each turn: what is summed over the turns to come."""
    sums_NK = attribution.adca(outcome_N, group_N, label_NK, steps_N, outcome_at="none", **args)
    return sums_NK - np.pad(sums_NK[:, 1:], ((0, 0), (0, 1)))


def test_label_credit_is_bounded_by_default_and_grows_under_equation_18():
    """With 30 turns and nearly equal averages, equation 18 lets labels drown the outcome, which is
    in [0, 1]."""
    steady = ([0.0] * 8, [0] * 8, *rows(*[[G] * 16 + [B] * 14] * 7, [G] * 15 + [B] * 15))

    def largest(function, **options):
        return np.abs(function(*steady, **options)).max()

    assert largest(label_scores) < 1.1 and largest(attribution.adca, alpha=0.1) < 1.7
    literal = {"norm": "trajectory"}
    assert largest(label_scores, **literal) > 40
    assert largest(attribution.adca, alpha=0.1, **literal) > 40


@settings(max_examples=300)
@given(trajectories, schemes, st.booleans(), st.sampled_from(["reference", "step"]))
def test_the_root_mean_square_of_standardised_labels_is_at_most_1(batch, scheme, equal, norm):
    outcome, group, labels = zip(*batch)
    batch, weight = (outcome, group, *rows(*labels)), "equal" if equal else "by_steps"
    scores_NK = label_scores(*batch, scheme=scheme, norm=norm, trajectory_weight=weight)
    n_N = (batch[2] != 0).sum(1)
    weight_N = np.where(equal and norm != "step", n_N > 0, n_N)
    for g in set(group):
        members = np.array(group) == g
        if weight_N[members].any():
            square_N = (scores_NK[members] ** 2).sum(1) / np.maximum(n_N[members], 1)
            assert math.sqrt(np.average(square_N, weights=weight_N[members])) <= 1 + 1e-6


def test_labels_give_credit_when_outcomes_are_equal():
    got = adca([1, 1], [0, 0], [G, B], [G], alpha=0.5, norm="step")
    assert got[0, 1] < 0 < got[1, 0]


@pytest.mark.parametrize("norm", ["trajectory", "step", "reference"])
@pytest.mark.parametrize("scheme", ["decouple", "allocation"])
def test_abstentions_do_not_change_the_credit_of_labelled_turns(norm, scheme):
    """Neither do trajectories that consist of abstentions, if the outcome does not count."""
    options = dict(alpha=0.5, norm=norm, scheme=scheme, outcome_at="none")
    without = adca([1, 0, 1], [0] * 3, *THREE, **options)
    got = adca([1, 0, 1, 1], [0] * 4, [G, A, B], [B, G, A, B], [A, G], [A, A], **options)
    assert_allclose(got[0, [0, 2]], without[0, :2], atol=1e-9)
    assert_allclose(got[1, [0, 1, 3]], without[1], atol=1e-9)
    assert_allclose(got[2, :2], without[2, 0], atol=1e-9)
    assert not got[3].any()


def test_alpha_schedule():
    schedule = {"alpha": 0.1, "alpha_min": 0.02, "alpha_steps": 100}
    at = [attribution.alpha_at(step, **schedule) for step in (0, 25, 50, 75, 100, 900)]
    assert_allclose(at, [0.1, 0.0882843, 0.06, 0.0317157, 0.02, 0.02], atol=1e-7)
    assert attribution.alpha_at(50, alpha=0.1) == 0.1
    batch = ([1, 0], [0, 0], *rows([G, B], [B]))
    scheduled = attribution.adca(*batch, 50, **schedule)
    assert_allclose(scheduled, attribution.adca(*batch, alpha=0.06), atol=1e-12)
    assert_array_equal(attribution.adca(*batch), attribution.adca(*batch, 7, alpha=0.1))


@pytest.mark.parametrize(
    "change, says",
    [
        (dict(outcome_N=[1, float("nan"), 0]), r"outcome_N\[1\]"),
        (dict(scheme="fix"), "decouple, allocation"),
        (dict(norm="batch"), "reference, step, trajectory"),
        (dict(outcome_at="first"), "last_step"),
        (dict(trajectory_weight="half"), "by_steps"),
        (dict(label_NK=[[2], [0], [0]]), "GOOD"),
        (dict(steps_N=[2, 1, 1]), "1 columns"),
        (dict(steps_N=[1, 1]), "3 trajectories"),
        (dict(group_N=[0, 0]), "group_N"),
    ],
)
def test_impossible_arguments_raise(change, says):
    good = {"outcome_N": [1, 0, 0], "group_N": [0] * 3, "steps_N": [1] * 3, "alpha": 0.1}
    good["label_NK"] = np.zeros((3, 1), int)
    with pytest.raises(ValueError, match=says):
        attribution.adca(**good | change)


# --- plugs ----------------------------------------------------------------------------------------


def batch_of(*members):
    """Return the batch of training step 3, from (task id, outcome, labels) of each trajectory."""
    trajectories = []
    for number, (name, outcome, labels) in enumerate(members):
        said = Completion([2], [-1.0], "stop", 0)
        turns = [Turn([1], said, "", [], label=label, reward=label / 2) for label in labels]
        task, evaluation = Task(name, "travel", "query"), Evaluation(outcome, outcome > 0.5)
        trajectories.append(Trajectory(task, number, 0, [], turns, evaluation=evaluation))
    return advantages.Batch.of(trajectories, 3)


@pytest.fixture
def batch():
    return batch_of(("b", 1.0, [G, B]), ("a", 0.0, [G]), ("b", 0.0, [B, A, G]), ("a", 0.5, []))


def test_a_batch_holds_the_trajectories_as_arrays(batch):
    assert batch.outcome_N.tolist() == [1.0, 0.0, 0.0, 0.5] and batch.outcome_N.dtype == np.float64
    assert batch.group_N.tolist() == [0, 1, 0, 1]
    assert batch.label_NK.tolist() == [[1, -1, 0], [1, 0, 0], [-1, 0, 1], [0, 0, 0]]
    assert batch.label_NK.dtype == np.int8
    assert batch.reward_NK.tolist() == [[0.5, -0.5, 0], [0.5, 0, 0], [-0.5, 0, 0.5], [0, 0, 0]]
    assert batch.turns_N.tolist() == [2, 1, 3, 0] and batch.step == 3
    assert batch.on_NK.tolist() == (np.arange(3) < np.array([[2], [1], [3], [0]])).tolist()
    empty = batch_of(("a", 0.0, []))
    assert empty.label_NK.shape == (1, 1)


@pytest.mark.parametrize("name", ["grpo", "rloo", "dr_grpo", "loop"])
def test_one_number_per_trajectory_goes_to_each_of_its_turns(batch, name):
    estimator = getattr(estimators, name)
    assert advantages.ESTIMATORS[name] == f"rl.advantages.estimators:{name}"
    assert estimator.needs_labels is False
    value_N = getattr(baselines, name)(batch.outcome_N, batch.group_N)
    got_NK = advantages.estimate(estimator, batch)
    assert_array_equal(got_NK, np.where(batch.on_NK, value_N[:, None], 0))


def test_an_estimator_is_called_with_the_batch(batch):
    options = {"alpha": 0.4, "alpha_steps": 6, "norm": "step"}
    arrays = batch.outcome_N, batch.group_N, batch.label_NK, batch.turns_N
    got = advantages.estimate(functools.partial(estimators.adca, **options), batch)
    assert_array_equal(got, attribution.adca(*arrays, 3, **options))

    def whole(batch, *, scale):
        return scale * batch.label_NK

    got = advantages.estimate(functools.partial(whole, scale=0.5), batch)
    assert_array_equal(got, 0.5 * batch.label_NK)
    assert got.dtype == np.float64
    assert advantages.estimate(lambda batch: 0 * batch.outcome_N + 2, batch).sum() == 2 * 6


@pytest.mark.parametrize("outcome_at", ["last_step", "all_steps", "none"])
@pytest.mark.parametrize("scheme", ["decouple", "allocation"])
def test_the_part_of_outcomes_and_the_part_of_labels_add_up(batch, scheme, outcome_at):
    arguments = {"scheme": scheme, "outcome_at": outcome_at, "alpha": 0.4}
    bound = functools.partial(estimators.adca, **arguments)
    part_NK = estimators.of_outcomes(functools.partial(bound), batch)
    labels_NK = advantages.estimate(bound, batch) - part_NK
    alone = (batch.outcome_N, batch.group_N, 0 * batch.label_NK, batch.turns_N, 3)
    assert_array_equal(part_NK, attribution.adca(*alone, **arguments))
    if outcome_at == "none":
        assert not part_NK.any()
    else:
        equal = (np.ones(4), batch.group_N, batch.label_NK, batch.turns_N, 3)
        if scheme == "decouple":  # whose labels do not depend on outcomes
            assert_allclose(labels_NK, attribution.adca(*equal, **arguments), atol=1e-12)
    assert labels_NK.any()


def test_the_parts_of_an_advantage_are_known_for_estimators_of_this_package_that_read_labels(batch):
    assert estimators.of_outcomes(estimators.grpo, batch) is None
    assert estimators.of_outcomes(lambda batch: batch.outcome_N, batch) is None


def test_a_wrong_result_names_the_estimator(batch):

    def transposed(batch, *, factor=1):
        return factor * batch.label_NK.T

    def broken(batch):
        return np.where(batch.label_NK < 0, np.nan, 1.0)

    with pytest.raises(ValueError, match=r"test_advantages:.*transposed returned shape \(3, 4\)"):
        advantages.estimate(functools.partial(transposed, factor=2), batch)
    with pytest.raises(ValueError, match="broken returned nan for turn 1 of a rollout of task b"):
        advantages.estimate(broken, batch)
    beyond = np.where(batch.on_NK, 1.0, np.inf)  # of no turn, so ignored
    assert advantages.estimate(lambda batch: beyond, batch).sum() == 6
