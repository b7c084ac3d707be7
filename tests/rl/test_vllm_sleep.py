"""The vLLM engine's sleep, against servers without a model: the order of the steps, and faults."""

import asyncio
import math

import pytest

from rl.engines import EngineFault
from rl.engines.vllm.client import GENERATE
from rl.engines.vllm.transfer import SLEEP, UPDATE, WAKE
from tests.rl.test_vllm import QUICK, Cluster, ask, ask_all, expected, until, weights

SLEEPS = {"sleeps": True}
ORDER = (SLEEP, WAKE, "/pause", "/start_weight_update", "/finish_weight_update", "/resume")


def test_servers_sleep_until_the_update_and_wake_for_it_in_two_steps(tmp_path):
    async def scenario(engine):
        await ask(engine, 1)
        for fake in cluster.fakes:
            fake.asked.clear()
        await engine.sleep()
        assert all(fake.asleep == {"weights", "kv_cache"} for fake in cluster.fakes)
        await engine.load(weights(0.25), 1)
        return await ask_all(engine, range(4))

    cluster = Cluster(tmp_path, engine=SLEEPS)
    assert {c.version for c in cluster.run(scenario)} == {1}
    for fake in cluster.fakes:
        assert fake.weight == 0.25 and not fake.asleep and not fake.waits
        assert [path for path in fake.asked if path in ORDER] == [
            SLEEP, WAKE, "/start_weight_update", "/finish_weight_update", WAKE, "/resume"
        ]  # fmt: skip
    stats = cluster.engine.stats()
    assert stats["sleep_seconds"] > 0 and stats["gap"] == 0 and stats["lost"] == 0


def test_a_request_of_a_sleeping_engine_wakes_it_with_the_weights_that_it_had(tmp_path):
    async def scenario(engine):
        await engine.load(weights(0.5), 1)
        await engine.sleep()
        assert all(math.isnan(fake.weight) for fake in cluster.fakes)
        return await ask_all(engine, range(4))

    cluster = Cluster(tmp_path, engine=SLEEPS)
    completions = cluster.run(scenario)
    assert [c.tokens for c in completions] == [expected(i) for i in range(4)]
    assert {c.version for c in completions} == {1}
    assert [fake.asked.count(SLEEP) for fake in cluster.fakes] == [1, 1]
    assert all(fake.weight == 0.5 and not fake.waits for fake in cluster.fakes)


def test_requests_in_flight_end_before_a_server_sleeps_and_adapters_leave_it_its_weights(tmp_path):
    how = []

    async def scenario(engine):
        engine.transfer.level = 1  # as of AdapterFiles
        post = engine._replicas[0].server.post

        async def noted(path, *body, **content):
            how.append((path, content.get("params")))
            return await post(path, *body, **content)

        engine._replicas[0].server.post = noted
        await engine.sleep()

    cluster = Cluster(tmp_path, 1, engine=SLEEPS)
    cluster.run(scenario)  # it is closed asleep
    assert how == [(SLEEP, {"level": 1, "mode": "wait"})]
    assert cluster.fake.weight == 0.0 and cluster.fake.asleep


@pytest.mark.parametrize("path", [SLEEP, WAKE])
def test_a_server_that_cannot_sleep_or_wake_ends_and_is_readmitted_after_the_update(tmp_path, path):
    ended = []

    async def scenario(engine):
        async def end(number):
            ended.append(number)

        engine._servers.end = end
        await ask(engine, 1)
        cluster.fake.fails = path
        await engine.sleep()
        await asyncio.sleep(3 * QUICK.check_every)  # it is healthy, but the learner has the memory
        assert engine.stats()["readmitted"] == 0
        await engine.load(weights(0.25), 1)
        assert engine.stats()["replicas"] == 1
        cluster.fake.fails = ""
        await until(lambda: engine.stats()["replicas"] == 2)
        return await ask_all(engine, range(4))

    cluster = Cluster(tmp_path, engine=SLEEPS)
    assert {c.version for c in cluster.run(scenario)} == {1}
    assert ended == [0] * (path == SLEEP)
    assert all(fake.weight == 0.25 and not fake.asleep for fake in cluster.fakes)
    assert cluster.engine.stats()["lost"] == cluster.engine.stats()["readmitted"] == 1


def test_a_server_that_dies_asleep_is_not_started_before_the_update(tmp_path):
    async def scenario(engine):
        started = []

        async def restart(number):
            started.append(engine._asleep)

        engine._servers.restartable = engine._servers.ended = lambda number: number == 0
        engine._servers.restart = restart
        await ask(engine, 1)
        await engine.sleep()
        await asyncio.to_thread(cluster.fake.die)
        await until(lambda: engine.stats()["lost"])
        await asyncio.sleep(3 * QUICK.check_every)
        assert not started
        await engine.load(weights(0.25), 1)
        await until(lambda: started)
        return started[0]

    cluster = Cluster(tmp_path, engine=SLEEPS)
    assert cluster.run(scenario) is False


def test_a_server_without_sleep_is_reported_and_others_are_never_told_to(tmp_path):
    with pytest.raises(EngineFault, match="lacks /sleep, /wake_up"):
        Cluster(tmp_path, 1, engine=SLEEPS, paths=(GENERATE, *UPDATE)).run(lambda engine: None)
    cluster = Cluster(tmp_path, 1)
    cluster.run(lambda engine: engine.sleep())
    assert SLEEP not in cluster.fake.asked
