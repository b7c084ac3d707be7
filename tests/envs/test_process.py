"""Worker processes: a call ends with the reason of any failure, and no process is left behind."""

import contextlib
import dataclasses
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time

import pytest

from envs.pool import Pool, PoolFull, PoolWorld, UnknownInstance
from envs.process import ROOT, Deadlines
from envs.source import Source
from envs.toolcalls import Call, parse
from envs.worker import Worlds
from envs.world import Task, World, WorldError, WorldTimeout
from tests.envs.faulty import Coder, Counter

COUNTER = "tests.envs.faulty:Counter"
CODER = "tests.envs.faulty:Coder"
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


@contextlib.contextmanager
def alone(env: str, kwargs: dict | None = None, **options):
    """Yield a world in the only worker of a pool."""
    with contextlib.closing(Pool(env, kwargs, workers=1, **options)) as pool:
        yield pool.world()


def faulty(fault: str, at: str = "step"):
    short = fault in ("hang", "hang_in_c", "stop", "child")
    deadlines = SHORT if short else Deadlines(start=20.0, reset=20.0, step=20.0)
    return alone(FAULTY, {"fault": fault, "at": at}, deadlines=deadlines)


def worker_pid(world: PoolWorld) -> int:
    return world._host._slots[0]._worker.pid


def solve(world: World) -> float:
    task = world.tasks("train")[0]
    world.reset(task)
    for action in task.reference:
        world.step(action)
    return world.evaluate().score


def test_a_world_in_a_process_is_a_world():
    with alone(COUNTER, {"goal": 2}) as world:
        assert solve(world) == 1.0
        world.reset(world.tasks("train")[0])
        assert world.step("x").info["pid"] != os.getpid()
        world.restore(1)
        assert world.snapshot() == 1 and world.profile() == {}
        assert world.spell("ab", upper=True) == ["A", "B"]
        assert (
            hasattr(world, "spell")
            and not hasattr(world, "no_such_method")
            and not hasattr(world, "_count")
        )


ODD = {
    "n": [
        'it\'s "odd"',
        "two\nlines",
        "Zürich \U0001f600",
        None,
        [[1.5], {"a": True}],
        "</tool_call>",
    ]
}


def check_functions(coder: World, counter: World):
    """Check that functions and the texts of calls are those of the hosted world, with an episode
    and without."""
    with pytest.raises(WorldError, match="reset"):
        coder.functions()
    for world, hosted in ((coder, Coder()), (counter, Counter())):
        world.reset(world.tasks("train")[0])
        assert world.functions() == hosted.functions()
        assert world.call_text("add", ODD) == hosted.call_text("add", ODD)
    assert parse(counter.call_text("add", ODD)).calls == [Call("add", ODD)]
    with pytest.raises(ValueError, match="no function 'sub'"):
        coder.call_text("sub", {})
    assert coder.functions()  # a mistake of the caller is not a failure of the episode


def test_functions_of_a_world_in_a_process():
    with alone(CODER) as coder, alone(COUNTER) as counter:
        check_functions(coder, counter)


def another_python() -> str:
    """Return another interpreter than this one, if there is one. None of our packages are installed
    there."""
    for name in ("python3.13", "python3.12", "python3.11", "python3.10", "python3"):
        found = shutil.which(name, path=os.defpath) or shutil.which(name)
        if (
            found
            and subprocess.run(
                [found, "-c", "import sys; sys.exit(sys.version_info < (3, 10))"]
            ).returncode
            == 0
        ):
            if not os.path.samefile(found, sys.executable):
                return found
    return sys.executable


def test_the_methods_of_worlds_do_not_depend_on_how_many_there_are():
    worlds = Worlds(COUNTER, {})
    methods = worlds.methods()
    assert methods
    worlds.call("profile", "first", [])
    assert worlds.methods() == methods


def test_another_interpreter():
    with alone(COUNTER, python=another_python()) as world:
        assert solve(world) == 1.0


@pytest.mark.parametrize("at", ["reset", "step", "evaluate"])
@pytest.mark.parametrize("fault", ["raise", "exit", "sys_exit", "segfault", "hang"])
def test_a_fault_ends_the_call_and_the_next_episode_works(fault, at):
    with faulty(fault, at) as world:
        task, pid = world.tasks("train")[0], worker_pid(world)
        with pytest.raises(WorldTimeout if fault == "hang" else WorldError) as caught:
            world.reset(task)
            world.step("break")
            world.evaluate()
        message = str(caught.value)
        if fault == "exit":
            assert "died" in message and "exit code 3" in message and "last words" in message
        if fault == "raise":
            assert "KeyError" in message and worker_pid(world) == pid
        assert is_running(pid) == (fault == "raise")
        if at == "reset":
            with pytest.raises(WorldError, match="reset"):
                world.step("+")
        if at == "step":
            with pytest.raises(type(caught.value), match=re.escape(message)):
                world.evaluate()
            assert solve(world) == 1.0
        pid = worker_pid(world)
    assert wait_until(lambda: not is_running(pid))


@pytest.mark.parametrize(
    "fault", ["hang_in_c", "stop", "flood", "unending_line", "huge", "close_pipe"]
)
def test_worse_faults_end_the_worker(fault):
    with faulty(fault) as world:
        world.reset(world.tasks("train")[0])
        pid = world.step("x").info["pid"]
        with pytest.raises(WorldError) as caught:
            world.step("break")
        assert isinstance(caught.value, WorldTimeout) == (fault in ("hang_in_c", "stop"))
        assert len(str(caught.value)) < 10_000
        assert not is_running(pid)
        assert solve(world) == 1.0


@pytest.mark.parametrize("fault", ["noise", "print"])
def test_noise_is_skipped(fault):
    with faulty(fault) as world:
        world.reset(world.tasks("train")[0])
        assert world.step("break").messages[0]["content"] == "0"
        assert world.step("+").messages[0]["content"] == "1"


def test_a_second_answer_is_ignored():
    with faulty("twice") as world:
        world.reset(world.tasks("train")[0])
        assert world.step("break").messages[0]["content"] == "early"
        assert world.step("+").messages[0]["content"] == "1"


def test_a_reply_that_is_not_json_is_an_error_and_the_worker_lives():
    with faulty("not_json") as world:
        world.reset(world.tasks("train")[0])
        pid = worker_pid(world)
        with pytest.raises(WorldError, match="JSON"):
            world.step("break")
        assert worker_pid(world) == pid and is_running(pid)


def test_set_up_has_a_deadline_and_says_what_failed():
    with pytest.raises(WorldTimeout, match="start within"):
        Pool(FAULTY, {"fault": "hang", "at": "start"}, deadlines=Deadlines(start=1.0))
    with pytest.raises(WorldError, match="last words"):
        Pool(FAULTY, {"fault": "exit", "at": "start"})
    with pytest.raises(WorldError, match="no_such_module"):
        Pool("no_such_module:World")
    with pytest.raises(WorldError, match="cannot start"):
        Pool(COUNTER, python="/no/such/python")
    with pytest.raises(ValueError, match="there is no world"):
        Pool("no_such_world")


def test_a_timeout_says_where_the_worker_hung():
    with faulty("hang") as world:
        world.reset(world.tasks("train")[0])
        with pytest.raises(WorldTimeout, match="in _hang"):
            world.step("break")


def test_a_workers_child_ends_with_it():
    with faulty("child") as world:
        world.reset(world.tasks("train")[0])
        with pytest.raises(WorldTimeout) as caught:
            world.step("break")
        child = int(re.search(r"child (\d+)", str(caught.value)).group(1))
        assert wait_until(lambda: not is_running(child))


def test_memory_is_limited():
    with alone(FAULTY, {"fault": "grow"}, memory_mb=1000) as world:
        world.reset(world.tasks("train")[0])
        with pytest.raises(WorldError, match=r"MemoryError|died"):
            world.step("break")


def test_a_killed_client_leaves_nothing():
    """The client is killed while its worker hangs in a step."""
    script = (
        "from envs.pool import Pool\n"
        f"world = Pool({FAULTY!r}, {{'fault': 'hang'}}, workers=1).world()\n"
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


def test_only_the_instance_that_kills_a_worker_fails(pool):
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
    assert (
        pool.counts["failures"] == 1
        and pool.counts["replayed"] == 5
        and pool.counts["workers started"] == 2
    )
    for world in worlds:
        world.close()
    assert pool.alive() == 0


def test_no_instance_fails_if_a_worker_dies_between_calls(pool):
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


def test_a_step_is_executed_once(pool):
    id, _ = pool.create(pool.tasks("train").result()[0].copy()).result()
    first = pool.step(id, "+", 0).result()
    assert pool.step(id, "+", 0).result() == first and first["messages"][0]["content"] == "1"
    assert [
        f.result()["messages"][0]["content"] for f in [pool.step(id, "+", 1) for _ in range(8)]
    ] == ["2"] * 8
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


@pytest.mark.parametrize("at", ["reset", "step", ""])
def test_the_replay_in_a_new_worker_is_compared_with_the_record(at):
    with contextlib.closing(Pool("tests.envs.faulty:Forgetful", {"at": at}, workers=1)) as pool:
        first, second = pool.world(), pool.world()
        for world in (first, second):
            world.reset(world.tasks("train")[0])
            world.step("+")
        with pytest.raises(WorldError, match="died"):
            second.step("exit")
        if not at:  # `info` holds the pid, which may differ
            assert first.step("+").messages[0]["content"] == "2"
            return
        for _ in range(2):
            with pytest.raises(WorldError, match=f"not deterministic.* {at}"):
                first.step("+")
        assert pool.counts["diverged"] == 1
        first.reset(first.tasks("train")[0])
        assert first.step("+").messages[0]["content"].startswith("1")


def test_a_reset_that_ends_after_its_world_was_closed_is_released(tmp_path):
    late = tmp_path / "late"
    with contextlib.closing(Pool("tests.envs.faulty:Late", {"path": str(late)}, workers=1)) as pool:
        world, task, errors = pool.world(), Task("count-0", "counter", "wait"), []

        def start():
            try:
                world.reset(task)
            except WorldError as error:
                errors.append(str(error))

        thread = threading.Thread(target=start)
        thread.start()
        assert wait_until(lambda: pool.alive() == 1)
        world.close()
        late.touch()
        thread.join(20)
        assert "closed while" in errors[0] and pool.alive() == 0
        other = pool.world()
        other.reset(dataclasses.replace(task, query="now"))
        assert other.count() == 1  # its own


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


def test_workers_are_recycled_between_batches_of_episodes():
    pool = Pool(COUNTER, workers=1, per_worker=4, recycle=4)
    task, pids = pool.tasks("train").result()[0], []
    for _ in range(3):
        opened = [pool.create(task) for _ in range(4)]  # all have a place before the first is open
        ids = [future.result()[0] for future in opened]
        pids.append({pool.step(id, "+").result()["info"]["pid"] for id in ids})
        for id in ids:
            pool.release(id)
    assert [len(found) for found in pids] == [1, 1, 1] and len(set.union(*pids)) == 3
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
