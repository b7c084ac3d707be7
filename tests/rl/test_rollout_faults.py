"""Rollouts over worker processes and services that break: one episode ends with its reason, the
others go on."""

import asyncio
import concurrent.futures
import contextlib
import dataclasses
import re
import signal
import subprocess
import sys
import threading

import pytest

from configs import quickstart
from envs.pool import Pool
from envs.process import ROOT, Deadlines
from envs.remote import RemoteWorld
from envs.world import Task, WorldTimeout
from evolver.build import make_actor
from evolver.worlds import make_source
from rl.rollout import Actor, Job, Worlds, rollouts
from rl.trajectory import StopReason
from tests.envs.test_process import COUNTER, FAULTY, is_running, wait_until
from tests.rl.test_rollout import ROOMY, SAMPLING, Scripted, tokenizer

GROUP = 6


class OneBreaks(Scripted):
    """Says "+", or "break" where the query asks for it, and calls `at_turn` with the number of
    turns so far."""

    def __init__(self, at_turn=lambda n: None):
        super().__init__(wait=0.01)
        self.at_turn = at_turn

    async def generate(self, prompt_ids, sampling, *, session):
        await asyncio.to_thread(self.at_turn, len(self.requests))
        self.turns = ("break",) if "break" in tokenizer().decode(prompt_ids) else ("+",)
        return await super().generate(prompt_ids, sampling, session=session)


def play_group(make_world, engine, limits=ROOMY):
    """Play six rollouts, the first of which breaks its world."""
    tasks = [Task("count-0", "counter", "break" if i == 0 else "count") for i in range(GROUP)]
    jobs = [Job(task, i, seed=0, sampling=SAMPLING) for i, task in enumerate(tasks)]
    worlds, actor = Worlds(make_world), Actor(engine, tokenizer(), limits, threads=True)
    trajectories = asyncio.run(asyncio.wait_for(rollouts(jobs, actor, worlds), 300))
    worlds.close()
    return trajectories


def one_of_a_group(*played):
    """Return the rollout of a group that breaks its world. The others go on."""
    first, *others = play_group(*played)
    assert [(t.stop, t.outcome) for t in others] == [(StopReason.DONE, 1.0)] * (GROUP - 1)
    return first


@pytest.mark.parametrize(
    "fault", ["raise", "exit", "segfault", "hang", "huge", "unspeakable", "flood"]
)
def test_a_worker_that_breaks_takes_one_episode_down(fault):
    """All six share one worker process; the other five continue in its successor."""
    step, stop = 20.0, StopReason.ENV_ERROR
    if fault == "hang":
        step, stop = 1.0, StopReason.ENV_TIMEOUT
    deadlines = Deadlines(start=20.0, reset=20.0, step=step)
    pool = Pool(FAULTY, {"fault": fault}, workers=1, deadlines=deadlines)
    first = one_of_a_group(pool.world, OneBreaks())
    assert first.stop is stop and first.error
    assert pool.alive() == 0
    pool.close()


def test_a_hang_ends_its_own_episode_only_under_the_deadlines_of_a_run():
    """One key sets the deadline of a call. Waiting for another episode of its worker, which hangs,
    is no part of it."""
    config = quickstart.get_config()
    del config.env.args["rules"]  # an argument of the quickstart's world
    config.env.update(name=FAULTY, mode="worker", workers=1, timeout=3.0)
    config.env.args.fault = "hang"
    with make_source(config) as source:
        limits = make_actor(config, None, None, None).limits
        limits = dataclasses.replace(ROOMY, env_timeout=limits.env_timeout)
        first = one_of_a_group(source.world, OneBreaks(), limits)
        assert first.stop is StopReason.ENV_TIMEOUT
        assert source._pool.alive() == 0


def test_several_hangs_on_one_worker_end_their_own_episodes_only(monkeypatch):
    """The last call waits longer than any deadline for the calls before it."""
    deadlines = Deadlines(start=20.0, reset=20.0, step=3.0)
    pool = Pool(FAULTY, {"fault": "hang"}, workers=1, deadlines=deadlines)
    worlds = [pool.world() for _ in range(5)]
    for world in worlds:
        world.reset(world.tasks("train")[0])
    monkeypatch.setattr("envs.pool.GRACE_S", -11.0)  # patience of 9 s

    def act(world, action):
        try:
            return world.step(action).messages[0]["content"]
        except WorldTimeout:
            return "timeout"

    with contextlib.closing(pool), concurrent.futures.ThreadPoolExecutor(5) as threads:
        outcomes = list(threads.map(act, worlds, ["break"] * 4 + ["+"]))
    assert outcomes == ["timeout"] * 4 + ["1"]


@pytest.mark.parametrize("fault", ["twice", "noise"])
def test_duplicate_and_noisy_answers_change_nothing(fault):
    pool = Pool(FAULTY, {"fault": fault}, workers=1)
    first = one_of_a_group(pool.world, OneBreaks())
    assert first.stop is StopReason.MAX_TURNS and not first.error
    pool.close()


@pytest.mark.parametrize("at", ["reset", "evaluate"])
@pytest.mark.parametrize("fault", ["exit", "hang"])
def test_faults_before_and_after_the_turns_end_by_the_deadline_of_their_call(at, fault):
    deadlines = Deadlines(start=20.0, reset=0.5, step=0.5)
    pool = Pool(FAULTY, {"fault": fault, "at": at}, workers=2, deadlines=deadlines)
    patient = dataclasses.replace(ROOMY, timeout=3600.0, env_timeout=3600.0)
    trajectories = play_group(pool.world, OneBreaks(), patient)
    expected = StopReason.ENV_TIMEOUT if fault == "hang" else StopReason.ENV_ERROR
    assert {t.stop for t in trajectories[1:]} == {expected}
    assert pool.alive() == 0
    pool.close()


def test_a_service_restarted_in_mid_rollout_ends_its_episodes_and_serves_the_next():
    port, servers, one_at_a_time = 0, [], threading.Lock()

    def start() -> str:
        words = f"-m envs.service --env {COUNTER} --port {port} --workers 1"
        command = [sys.executable, *words.split()]
        servers.append(subprocess.Popen(command, stdout=subprocess.PIPE, cwd=ROOT))
        return servers[-1].stdout.readline().decode().split()[-1]

    def restart(turns: int) -> None:
        with one_at_a_time:
            if turns >= 8 and len(servers) == 1:
                servers[0].send_signal(signal.SIGKILL)
                servers[0].wait()
                start()

    url = start()
    port = int(url.rsplit(":", 1)[1])
    try:
        before = play_group(lambda: RemoteWorld(url), OneBreaks(restart))
        after = play_group(lambda: RemoteWorld(url), OneBreaks())
    finally:
        for server in servers:
            server.terminate()
            server.wait(20)
            server.stdout.close()
    assert len(servers) == 2
    stops = {t.stop for t in before}
    assert StopReason.ENV_ERROR in stops
    assert stops <= {StopReason.ENV_ERROR, StopReason.DONE, StopReason.MAX_TURNS}
    errors = [t.error for t in before if t.stop is StopReason.ENV_ERROR]
    # The restart came between two steps, or during one.
    assert all(re.search("no instance|did not answer", error) for error in errors), errors
    assert [t.outcome for t in after[1:]] == [1.0] * (GROUP - 1)


def test_no_process_is_left_when_rollouts_are_interrupted():
    """The workers of a client that is killed in mid-rollout end with it."""
    code = (
        "from tests.rl.test_rollout_faults import *\n"
        "pool = Pool(FAULTY, {'fault': 'hang'}, workers=2)\n"
        "print(*(slot.worker().pid for slot in pool._slots), flush=True)\n"
        "play_group(pool.world, OneBreaks())\n"
    )
    client = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE)
    with contextlib.closing(client.stdout):
        workers = [int(word) for word in client.stdout.readline().split()]
        assert len(workers) == 2 and all(map(is_running, workers))
        client.kill()
        client.wait()
    assert wait_until(lambda: not any(map(is_running, workers)))
