"""What a mechanism counts is read once, by the name of its metric."""

from concurrent.futures import ThreadPoolExecutor

from envs.world import Evaluation
from evolver.metrics import Meter, rollout_metrics
from tests.rl.test_samples import trajectory, turn


def test_branches_have_figures_of_their_own():
    """A branch that begins with a success's turns says little about its task."""
    whole = trajectory(turn([1], [2]))
    branch = trajectory(turn([1], [2]), turn([1, 2], [3]))
    whole.evaluation = Evaluation(0.0, False)
    branch.turns[0].given = True
    branch.evaluation = Evaluation(1.0, True)
    found = rollout_metrics([whole, branch])
    assert [found[f"rollout/success{kind}"] for kind in ("", "/original", "/branched")] == [0, 0, 1]
    assert found["rollout/count"] == found["rollout/count/branched"] == 1
    assert "rollout/count/branched" not in rollout_metrics([whole])


def test_a_reading_holds_sums_and_means_since_the_last_one():
    meter = Meter("room", "asked", "rate")
    meter.count("asked", 2)
    meter.count("asked")
    meter.count("other", 0.5)
    meter.average("rate", True)
    meter.average("rate", 0.5)
    assert meter.read() == {"room/asked": 3, "room/other": 0.5, "room/rate": 0.75}
    assert meter.read() == {"room/asked": 0, "room/rate": 0}


def test_threads_lose_no_count():
    meter = Meter("room")
    with ThreadPoolExecutor(4) as threads:
        for _ in range(4):
            threads.submit(lambda: [meter.count("n") for _ in range(5000)])
    assert meter.read() == {"room/n": 20000}
