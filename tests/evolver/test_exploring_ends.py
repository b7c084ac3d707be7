"""Exploration ends as soon as the user asks, whatever it waits for."""

import os
import signal
import time
from types import SimpleNamespace

import pytest

import run
from evolver.build import RunError
from evolver.parts import Parts
from evolver.phases.tasks import invent
from evolver.processes.interrupt import Interrupted, Stop
from evolver.questioning.curiosity import Curiosity
from tests.evolver.test_questioning import RandomWalk, pool_of
from tests.evolver.toy import Library
from tests.tiny import config_file, tiny_policy


@pytest.mark.parametrize("step, kept", [(0, 1), (2, 0)])
def test_exploration_ends_at_once_on_a_signal(step, kept):
    """A refresh is made again when the run resumes, and must begin as it did."""

    class Stops(RandomWalk):
        def explore(self, world, seeds, budget, rng):
            yield next(super().explore(world, seeds, budget, rng))
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(600)

    pool = pool_of()
    budgets = SimpleNamespace(budget=9, refresh=9, minutes=0.0)
    with Stop() as stop:
        exploring = SimpleNamespace(
            config=SimpleNamespace(questioning=budgets, seed=0), stop=stop, make_world=Library,
            progress=SimpleNamespace(phase=print),
        )  # fmt: skip
        with pytest.raises(Interrupted):
            invent(exploring, pool, Stops(), step)
        assert stop.asked
        with pytest.raises(Interrupted), stop.at_once():
            raise AssertionError("a run that ends explores no more")
    assert len(pool.tasks) == kept


def test_exploration_ends_with_what_it_has_when_its_time_is_up():
    """Also inside a walk that finds nothing."""

    class Endless(RandomWalk):
        def explore(self, world, seeds, budget, rng):
            yield next(super().explore(world, seeds, budget, rng))
            while True:
                time.sleep(0.01)
                pool.count(walks=1)

    pool, said = pool_of(), []
    limits = SimpleNamespace(budget=9, minutes=0.1 / 60, words=SimpleNamespace(name="plain"))
    with Stop() as stop:
        exploring = SimpleNamespace(
            config=SimpleNamespace(questioning=limits, seed=0), stop=stop, make_world=Library,
            progress=SimpleNamespace(phase=print, say=said.append), tasks=SimpleNamespace(words=None),
        )  # fmt: skip
        invent(exploring, pool, Endless(), 0)
        assert not stop.asked
    assert len(pool.tasks) == 1 and "with 1 of 9 tasks" in said[0]
    pool.count(tried=1)  # as a recipe does that explores by itself


def test_a_world_that_does_not_start_ends_a_run_in_one_message():
    """And without advice about queries, which are not its matter."""

    class Broken(Library):
        def reset(self, task, seed=0):
            raise RuntimeError("no licence is left")

    budgets = SimpleNamespace(budget=9, refresh=9, minutes=0.0)
    with Stop() as stop:
        exploring = SimpleNamespace(
            config=SimpleNamespace(questioning=budgets, seed=0), stop=stop, make_world=Broken
        )
        explorer = Curiosity(Parts(make_world=Broken, task_pool=pool_of()))
        with pytest.raises(RunError, match=r"cannot be explored.*no licence is left") as failure:
            invent(exploring, pool_of(), explorer, 0)
    assert "task.query" not in str(failure.value)


def test_exploration_ends_at_once_while_a_world_starts(tmp_path, capsys):
    config = config_file(tmp_path, tiny_policy(tmp_path / "policy"))
    words = ("--config.env.name=tests.envs.faulty:SlowStart", "--config.eval.every=0")
    words += ("--config.questioning.enabled=True", "--mode=explore", "--config.eval.split=")
    command = ["run.py", f"--config={config}", f"--workdir={tmp_path / 'run'}", *words]
    assert run.main(command) == 130
    assert "stopping" in capsys.readouterr().err
