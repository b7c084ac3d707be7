"""Exploration ends as soon as the user asks, whatever it waits for."""

import os
import signal
import sys
import time

import pytest

from evolver.build import RunError
from evolver.parts import Parts
from evolver.phases.tasks import invent
from evolver.processes.interrupt import Interrupted, Stop
from evolver.questioning.curiosity import Curiosity
from tests.evolver.explorers import RandomWalk, pool_of, run_of
from tests.evolver.toy import Library


@pytest.mark.parametrize("step, kept", [(0, 1), (2, 0)])
def test_exploration_ends_at_once_on_a_signal(step, kept):
    """A refresh is made again when the run resumes, and must begin as it did."""

    class Stops(RandomWalk):
        def explore(self, world, seeds, budget, rng):
            yield next(super().explore(world, seeds, budget, rng))
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(600)

    pool = pool_of()
    with Stop() as stop:
        with pytest.raises(Interrupted):
            invent(run_of(pool, stop=stop, budget=9, refresh=9), pool, Stops(), step)
        assert stop.asked
        with pytest.raises(Interrupted), stop.at_once():
            raise AssertionError("a run that ends explores no more")
    assert len(pool.tasks) == kept


@pytest.mark.parametrize("found", [True, False])
def test_exploration_ends_with_what_it_has_when_its_time_is_up(found, monkeypatch):
    """It does with and without tasks, and leaves no generator in the middle."""
    unraisable = []
    monkeypatch.setattr(sys, "unraisablehook", unraisable.append)
    pool = pool_of()
    if not found:
        monkeypatch.setattr(pool, "_rejection", lambda world, task: "not wanted")
    with Stop() as stop:
        run = run_of(pool, stop=stop, budget=10**6, minutes=2 / 60)
        explorer = Curiosity(Parts(make_world=Library, task_pool=pool), rounds=10**6, rehearsals=0)
        began = time.monotonic()
        invent(run, pool, explorer, 0)
        assert 2 <= time.monotonic() - began < 60 and not stop.asked
    (said,) = run.progress.say.call_args.args
    assert bool(pool.tasks) is found and f"with {len(pool.tasks)} of 1000000 tasks" in said
    assert not unraisable and not pool.is_over()


def test_a_world_that_does_not_start_ends_a_run_in_one_message():
    """And without advice about queries, which are not its matter."""

    class Broken(Library):
        def reset(self, task, seed=0):
            raise RuntimeError("no licence is left")

    with Stop() as stop:
        pool = pool_of()
        explorer = Curiosity(Parts(make_world=Broken, task_pool=pool))
        with pytest.raises(RunError, match=r"cannot be explored.*no licence is left") as failure:
            invent(run_of(pool, make_world=Broken, stop=stop, budget=9), pool, explorer, 0)
    assert "task.query" not in str(failure.value)


def test_exploration_ends_at_once_while_a_world_starts(ends):
    words = ("--config.env.name=tests.envs.faulty:SlowStart", "--config.eval.every=0")
    words += ("--config.questioning.enabled=True", "--mode=explore", "--config.eval.split=")
    assert "stopping" in ends(130, *words)
