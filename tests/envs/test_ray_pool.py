"""The pool of Ray actors gives the same guarantees as the local pool."""

import json
from concurrent.futures import ThreadPoolExecutor

import pytest

pytest.importorskip("ray", reason="pip install -r requirements/ray.txt")

import ray

from envs import conformance
from envs.pool import PoolFull
from envs.process import Deadlines
from envs.ray_pool import RayPool
from envs.source import serving
from envs.world import WorldError, WorldTimeout
from tests.envs.playing import begin, solve, told
from tests.envs.test_process import COUNTER, FAULTY

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module", autouse=True)
def cluster():
    yield
    ray.shutdown()


def test_actors_conform():
    pool = RayPool("travel")
    assert conformance.run(pool.world, limit=1)[1] == []
    pool.close()


@pytest.mark.parametrize("fault", ["exit", "raise", "hang"])
def test_a_fault_does_not_affect_other_instances(fault):
    pool = RayPool(FAULTY, {"fault": fault}, deadlines=Deadlines(step=5.0), limit=3)
    worlds = [pool.world() for _ in range(3)]
    for world in worlds:
        begin(world)
        world.step("+")
    with pytest.raises(PoolFull):
        pool.world().reset(worlds[0].tasks("train")[0])
    with pytest.raises(WorldTimeout if fault == "hang" else WorldError):
        worlds[0].step("break")
    assert [told(world, "+") for world in worlds[1:]] == ["2", "2"]
    assert solve(worlds[0]) == 1.0
    for world in worlds:
        world.close()
    assert pool.alive() == 0
    pool.close()


def test_the_service_places_actors():
    pytest.importorskip("starlette", reason="pip install -r requirements/service.txt")
    from envs.remote import RemoteWorld

    ray.shutdown()  # the service starts its own cluster
    with serving(COUNTER, json.dumps({"goal": 2}), "--backend", "ray") as url:
        worlds = [RemoteWorld(url) for _ in range(2)]
        with ThreadPoolExecutor(2) as threads:
            assert list(threads.map(solve, worlds)) == [1.0, 1.0]
