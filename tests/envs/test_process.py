"""Worker processes: whatever one does, the call ends with its reason, and nothing stays behind."""

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time

import pytest

from envs.pool import Pool, PoolFull, UnknownInstance
from envs.process import ROOT, Deadlines, ProcessWorld
from envs.source import Source
from envs.world import World, WorldError, WorldTimeout

COUNTER = "tests.envs.faulty:Counter"
FAULTY = "tests.envs.faulty:Faulty"
SHORT = Deadlines(start=20.0, reset=1.0, step=1.0)


def is_running(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rsplit(")", 1)[1].split()[0] not in "ZX"
    except OSError:
        return False


def wait_until(condition, seconds: float = 20.0) -> bool:
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.02)
    return condition()


def faulty(fault: str, at: str = "step") -> ProcessWorld:
    short = fault in ("hang", "hang_in_c", "stop", "child")
    deadlines = SHORT if short else Deadlines(start=20.0, reset=20.0, step=20.0)
    return ProcessWorld(FAULTY, {"fault": fault, "at": at}, deadlines=deadlines)


def solve(world: World) -> float:
    task = world.tasks("train")[0]
    world.reset(task)
    for action in task.reference:
        world.step(action)
    return world.evaluate().score


def test_a_world_in_a_process_is_a_world():
    with contextlib.closing(ProcessWorld(COUNTER, {"goal": 2})) as world:
        assert solve(world) == 1.0
        assert world.step("x").info["pid"] != os.getpid()
        world.restore(1)
        assert world.snapshot() == 1 and world.profile() == {}
        assert world.spell("ab", upper=True) == ["A", "B"]
        assert hasattr(world, "spell") and not hasattr(world, "no_such_method") and not hasattr(world, "_count")


def another_python() -> str:
    """An interpreter that is not this one, if there is one: nothing of ours is installed there."""
    for name in ("python3.13", "python3.12", "python3.11", "python3.10", "python3"):
        found = shutil.which(name, path=os.defpath) or shutil.which(name)
        if found and subprocess.run([found, "-c", "import sys; sys.exit(sys.version_info < (3, 10))"]).returncode == 0:
            if not os.path.samefile(found, sys.executable):
                return found
    return sys.executable


def test_another_interpreter():
    with contextlib.closing(ProcessWorld(COUNTER, python=another_python())) as world:
        assert solve(world) == 1.0


@pytest.mark.parametrize("at", ["reset", "step", "evaluate"])
@pytest.mark.parametrize("fault", ["raise", "exit", "sys_exit", "segfault", "hang"])
def test_a_fault_ends_the_call_and_the_next_episode_goes_on(fault, at):
    world = faulty(fault, at)
    task = world.tasks("train")[0]
    with pytest.raises(WorldTimeout if fault == "hang" else WorldError) as caught:
        world.reset(task)
        world.step("break")
        world.evaluate()
    if fault == "exit":
        assert "died" in str(caught.value) and "exit code 3" in str(caught.value) and "last words" in str(caught.value)
    if fault == "raise":
        assert "KeyError" in str(caught.value) and world._worker.alive
    else:
        assert not world._worker.alive and not is_running(world._worker.pid)
    if at == "step":
        if fault != "raise":
            with pytest.raises(WorldError, match="reset"):
                world.evaluate()
        assert solve(world) == 1.0
    world.close()
    assert not is_running(world._worker.pid) if world._worker else True


@pytest.mark.parametrize("fault", ["hang_in_c", "stop", "flood", "unending_line", "huge", "close_pipe"])
def test_worse_faults_end_the_worker(fault):
    world = faulty(fault)
    world.reset(world.tasks("train")[0])
    pid = world.step("x").info["pid"]
    with pytest.raises(WorldError) as caught:
        world.step("break")
    assert isinstance(caught.value, WorldTimeout) == (fault in ("hang_in_c", "stop"))
    assert len(str(caught.value)) < 10_000
    assert not is_running(pid)
    assert solve(world) == 1.0
    world.close()


@pytest.mark.parametrize("fault", ["noise", "print"])
def test_noise_is_skipped(fault):
    with contextlib.closing(faulty(fault)) as world:
        world.reset(world.tasks("train")[0])
        assert world.step("break").messages[0]["content"] == "0"
        assert world.step("+").messages[0]["content"] == "1"


def test_a_second_answer_is_not_taken_for_the_next():
    with contextlib.closing(faulty("twice")) as world:
        world.reset(world.tasks("train")[0])
        assert world.step("break").messages[0]["content"] == "early"
        assert world.step("+").messages[0]["content"] == "1"


def test_what_is_no_json_is_an_error_and_the_worker_lives():
    with contextlib.closing(faulty("unspeakable")) as world:
        world.reset(world.tasks("train")[0])
        with pytest.raises(WorldError, match="JSON"):
            world.step("break")
        assert world._worker.alive


def test_set_up_has_a_deadline_and_says_what_failed():
    with pytest.raises(WorldTimeout, match="start within"):
        ProcessWorld(FAULTY, {"fault": "hang", "at": "start"}, deadlines=Deadlines(start=1.0)).tasks("train")
    with pytest.raises(WorldError, match="last words"):
        faulty("exit", "start").tasks("train")
    with pytest.raises(WorldError, match="no_such_module"):
        ProcessWorld("no_such_module:World").tasks("train")
    with pytest.raises(WorldError, match="cannot start"):
        ProcessWorld(COUNTER, python="/no/such/python").tasks("train")
    with pytest.raises(ValueError, match="there is no world"):
        ProcessWorld("no_such_world").tasks("train")


def test_a_timeout_says_where_the_worker_hung():
    with contextlib.closing(faulty("hang")) as world:
        world.reset(world.tasks("train")[0])
        with pytest.raises(WorldTimeout, match="in _hang"):
            world.step("break")


def test_what_the_worker_started_ends_with_it():
    world = faulty("child")
    world.reset(world.tasks("train")[0])
    with pytest.raises(WorldTimeout) as caught:
        world.step("break")
    child = int(re.search(r"child (\d+)", str(caught.value)).group(1))
    assert wait_until(lambda: not is_running(child))
    world.close()


def test_memory_is_limited():
    world = ProcessWorld(FAULTY, {"fault": "grow"}, memory_mb=1000)
    world.reset(world.tasks("train")[0])
    with pytest.raises(WorldError, match=r"MemoryError|died"):
        world.step("break")
    world.close()


def test_a_killed_client_leaves_nothing():
    """The client is killed while its worker hangs in a step."""
    script = (
        "from envs.process import ProcessWorld\n"
        f"world = ProcessWorld({FAULTY!r}, {{'fault': 'hang'}})\n"
        "world.reset(world.tasks('train')[0])\n"
        "print(world.step('x').info['pid'], flush=True)\n"
        "world.step('break')\n"
    )
    client = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, cwd=ROOT)
    worker = int(client.stdout.readline())
    assert is_running(worker)
    client.send_signal(signal.SIGKILL)
    client.wait()
    client.stdout.close()
    assert wait_until(lambda: not is_running(worker))


# ------------------------------------------------------------------------------------------------ pools


@pytest.fixture
def pool():
    pool = Pool(FAULTY, {"fault": "exit"}, workers=1)
    yield pool
    pool.close()


def test_a_worker_that_dies_takes_only_the_culprit_along(pool):
    worlds = [pool.world() for _ in range(6)]
    task = worlds[0].tasks("train")[0]
    for number, world in enumerate(worlds):
        world.reset(task)
        for _ in range(number % 3):
            world.step("+")
    with pytest.raises(WorldError, match="exit code 3"):
        worlds[0].step("break")
    with pytest.raises(WorldError, match="exit code 3"):
        worlds[0].evaluate()
    for number, world in enumerate(worlds[1:], 1):
        assert world.step("+").messages[0]["content"] == str(number % 3 + 1)
    worlds[0].reset(task)
    assert worlds[0].step("+").messages[0]["content"] == "1"
    assert pool.counts["failures"] == 1 and pool.counts["replayed"] == 5 and pool.counts["workers started"] == 2
    for world in worlds:
        world.close()
    assert pool.alive() == 0


def test_a_worker_that_dies_between_calls_is_nobodys_fault(pool):
    worlds = [pool.world() for _ in range(3)]
    for world in worlds:
        world.reset(world.tasks("train")[0])
    pid = worlds[0].step("+").info["pid"]
    os.kill(pid, signal.SIGKILL)
    assert wait_until(lambda: not pool._slots[0]._worker.alive)
    assert [world.step("+").messages[0]["content"] for world in worlds] == ["2", "1", "1"]


def test_a_hanging_step_delays_the_others_by_its_deadline_only():
    pool = Pool(FAULTY, {"fault": "hang"}, workers=1, deadlines=SHORT)
    worlds = [pool.world() for _ in range(5)]
    for world in worlds:
        world.reset(world.tasks("train")[0])
    outcomes = {}

    def act(index, action):
        try:
            outcomes[index] = worlds[index].step(action).messages[0]["content"]
        except WorldTimeout:
            outcomes[index] = "timeout"

    threads = [threading.Thread(target=act, args=(i, "break" if i == 0 else "+")) for i in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert outcomes == {0: "timeout", 1: "1", 2: "1", 3: "1", 4: "1"}
    pool.close()


def test_a_step_is_played_once(pool):
    id, _ = pool.create(pool.tasks("train").result()[0].copy()).result()
    first = pool.step(id, "+", 0).result()
    assert pool.step(id, "+", 0).result() == first and first["messages"][0]["content"] == "1"
    assert [f.result()["messages"][0]["content"] for f in [pool.step(id, "+", 1) for _ in range(8)]] == ["2"] * 8
    with pytest.raises(ValueError, match="another action"):
        pool.step(id, "x", 0).result()
    with pytest.raises(ValueError, match="next step"):
        pool.step(id, "+", 7).result()
    pool.step(id, "stop", 2).result()
    with pytest.raises(ValueError, match="over"):
        pool.step(id, "+", 3).result()
    assert pool.step(id, "+", 1).result()["messages"][0]["content"] == "2"


def test_creating_twice_gives_one_instance(pool):
    task, other = pool.tasks("train").result()[:2]
    assert pool.create(task, 0, "a").result() == pool.create(task, 0, "a").result()
    assert pool.alive() == 1
    with pytest.raises(ValueError, match="another task"):
        pool.create(other, 0, "a")
    with pytest.raises(ValueError, match="no task"):
        pool.create({**task, "id": "nothing"}).result()
    assert pool.alive() == 1


def test_idle_instances_are_released():
    pool = Pool(COUNTER, workers=1, lease_s=0.2)
    task = pool.tasks("train").result()[0]
    ids = [pool.create(task).result()[0] for _ in range(3)]
    time.sleep(0.3)
    pool.step(ids[0], "+").result()
    assert pool.release_idle() == 2 and pool.alive() == 1
    with pytest.raises(UnknownInstance):
        pool.step(ids[1], "+")
    assert pool.release(ids[0]) and not pool.release(ids[0])
    assert pool.counts["released idle"] == 2 and pool.counts["released client"] == 1
    pool.close()


def test_places_are_limited_and_workers_are_recycled():
    pool = Pool(COUNTER, workers=1, per_worker=2, recycle=3)
    task = pool.tasks("train").result()[0]
    ids = [pool.create(task).result()[0] for _ in range(2)]
    with pytest.raises(PoolFull):
        pool.create(task)
    pids = set()
    for id in ids:
        pool.release(id)
    for _ in range(7):
        id, _ = pool.create(task).result()
        pids.add(pool.step(id, "+").result()["info"]["pid"])
        pool.release(id)
    assert len(pids) == 3  # 1, 3 and 3 of the 7, after the first 2
    pool.close()


@pytest.mark.parametrize("begun", [True, False])
def test_a_closed_pool_leaves_no_process(begun):
    pool = Pool(FAULTY, {"fault": "hang"}, workers=2, deadlines=Deadlines(step=600.0))
    world = pool.world()
    world.reset(world.tasks("train")[0])
    pids = [slot._worker.pid for slot in pool._slots]
    failures = []

    def act():
        try:
            world.step("break")
        except WorldError as error:
            failures.append(str(error))

    thread = threading.Thread(target=act)
    thread.start()
    if begun:
        assert wait_until(lambda: pool._slots[0].thread._work_queue.empty())
    pool.close()
    thread.join(20)
    assert len(failures) == 1 and wait_until(lambda: not any(map(is_running, pids)))


@pytest.mark.parametrize("mode", ["inprocess", "worker"])
def test_a_source_makes_worlds(mode):
    with Source(COUNTER, {"goal": 2}, mode=mode) as source:
        assert solve(source.world()) == 1.0


def test_a_source_says_what_is_wrong():
    with pytest.raises(ValueError, match="inprocess, worker, http"):
        Source(COUNTER, mode="thread")
    with pytest.raises(ValueError, match="url"):
        Source(COUNTER, mode="http")
    with pytest.raises(ValueError, match="url"):
        Source(COUNTER, mode="worker", url="http://localhost:1")
