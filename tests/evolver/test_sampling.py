"""The plug `sampler`: which tasks a step gets."""

from collections import Counter

import pytest

from envs.world import Evaluation, Task
from evolver.parts import Parts
from evolver.sampling import Draw, Sampler, drawn
from evolver.sampling.prioritised import Failures, Learnability
from evolver.sampling.quotas import Quotas, apportioned
from rl.trajectory import StopReason, Trajectory

TASKS = [Task(f"t{n}", "travel", f"q{n}") for n in range(4)]
MADE = [Task(f"s{n}", "travel", f"q{n}", origin="synthetic") for n in range(4)]


def draw(place, n=2, originals=TASKS, synthetic=(), share=0.0):
    return Draw(originals, synthetic, n, share, place, 0)


def rollout(task, success, stop=StopReason.DONE, **options):
    evaluation = Evaluation(float(success), success)
    return Trajectory(task, 0, 0, [], stop=stop, evaluation=evaluation, **options)


def counts(sampler, n=1, **given):
    drawn_ids = [t.id for place in range(600) for t in drawn(sampler, draw(place, n, **given))]
    total = Counter(drawn_ids)
    return {id: total[id] / len(drawn_ids) for id in total}


def test_failed_tasks_come_in_proportion_to_their_failure_rate():
    sampler = Failures(Parts())
    sampler.record([rollout(TASKS[0], True)] * 8 + [rollout(TASKS[1], False)] * 8)
    # Neither broken nor guided rollouts say anything about a task.
    sampler.record([rollout(TASKS[2], True, StopReason.ENV_ERROR)] * 9)
    sampler.record([rollout(TASKS[3], True, experience=["e"])] * 9)
    # (1 - p) = 0.1, 0.9, 0.5, 0.5 of a total of 2
    expected = {"t0": 0.05, "t1": 0.45, "t2": 0.25, "t3": 0.25}
    assert counts(sampler) == pytest.approx(expected, abs=0.05)
    other = Failures(Parts())
    other.load_state(sampler.state())
    assert drawn(other, draw(7)) == drawn(sampler, draw(7))
    same = Failures(Parts(), power=0.0)
    same.load_state(sampler.state())
    assert list(counts(same).values()) == pytest.approx([0.25] * 4, abs=0.05)


def test_tasks_that_are_sometimes_solved_teach_most():
    sampler = Learnability(Parts())
    for task, won in zip(MADE, (0, 4, 8, 8)):
        sampler.record([rollout(task, n < won) for n in range(8)])
    # 4 p (1 - p) = 0.36, 1, 0.36, 0.36 with p = 0.1, 0.5, 0.9, 0.9
    found = counts(sampler, originals=(), synthetic=MADE, share=1.0)
    expected = {"s0": 0.19, "s1": 0.52, "s2": 0.19, "s3": 0.19}
    assert found == pytest.approx(expected, abs=0.08)


def test_each_world_has_its_share_of_a_step_in_epochs_of_its_own():
    home = [Task(f"h{n}", "home", "q") for n in range(6)]
    sampler = Quotas(Parts(), weights={"home": 2})
    chosen = [drawn(sampler, draw(place, 3, [*TASKS, *home])) for place in range(12)]
    for tasks in chosen:
        assert Counter(task.env for task in tasks) == {"home": 2, "travel": 1}
    for world, size in (("home", 6), ("travel", 4)):
        ids = [t.id for tasks in chosen for t in tasks if t.env == world]
        epochs = [ids[i : i + size] for i in range(0, len(ids), size)]
        assert all(len(set(epoch)) == size for epoch in epochs)


@pytest.mark.parametrize(
    "n, weights, sizes, expected",
    [
        (5, {"a": 1, "b": 1}, {"a": 9, "b": 9}, {"a": 3, "b": 2}),
        (6, {"a": 3, "b": 1}, {"a": 2, "b": 9}, {"a": 2, "b": 4}),  # what a cannot give, b does
        (3, {"a": 0, "b": 1}, {"a": 9, "b": 2}, {"a": 1, "b": 2}),
        (0, {"a": 1}, {"a": 1}, {"a": 0}),
    ],
)
def test_tasks_are_apportioned_by_the_largest_remainder(n, weights, sizes, expected):
    assert apportioned(n, weights, sizes) == expected


class Greedy(Sampler):
    def draw(self, draw):
        return [draw.originals[0]] * draw.n


def test_a_sampler_that_does_not_give_what_a_step_needs_is_named():
    with pytest.raises(ValueError, match=r"Greedy.draw returned 2 tasks, 1 of .* a draw needs 2"):
        drawn(Greedy(), draw(0))
    with pytest.raises(ValueError, match="4 tasks are needed"):
        apportioned(4, {"a": 1.0}, {"a": 3})
