"""Worker processes: a call ends with the reason of any failure, and no process is left behind."""

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from envs.pool import Pool, PoolFull, PoolWorld, UnknownInstance
from envs.process import ROOT, Deadlines
from envs.source import Source
from envs.toolcalls import CLOSE, Call, parse
from envs.worker import Worlds
from envs.world import Task, World, WorldError, WorldTimeout
from tests.envs.faulty import Coder, Counter
from tests.envs.playing import begin, solve, take_all, told

COUNTER = "tests.envs.faulty:Counter"
CODER = "tests.envs.faulty:Coder"
FAULTY = "tests.envs.faulty:Faulty"
SHORT = Deadlines(start=20.0, reset=1.0, step=1.0)


def is_running(pid: int | str) -> bool:
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


def all_end(*pids: int | str) -> bool:
    """Wait for the end of some processes."""
    return wait_until(lambda: not any(map(is_running, pids)))


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


def test_a_world_in_a_process_is_a_world():
    with alone(COUNTER, {"goal": 2}) as world:
        assert solve(world) == 1.0
        begin(world)
        assert world.step("x").info["pid"] != os.getpid()
        world.restore(1)
        assert world.snapshot() == 1 and world.profile() == {}
        assert world.spell("ab", upper=True) == ["A", "B"]
        known = [hasattr(world, name) for name in ("spell", "no_such_method", "_count")]
        assert known == [True, False, False]


ODD = {"n": ['it\'s "odd"', "two\nlines", "Zürich \U0001f600", None, [[1.5], {"a": True}], CLOSE]}


def check_functions(coder: World, counter: World):
    """Check that functions and the texts of calls are those of the hosted world, with an episode
    and without."""
    with pytest.raises(WorldError, match="reset"):
        coder.functions()
    for world, hosted in ((coder, Coder()), (counter, Counter())):
        begin(world)
        assert world.functions() == hosted.functions()
        assert world.call_text("add", ODD) == hosted.call_text("add", ODD)
    assert parse(counter.call_text("add", ODD)).calls == [Call("add", ODD)]
    with pytest.raises(ValueError, match="no function 'sub'"):
        coder.call_text("sub", {})
    assert coder.functions()  # a mistake of the caller is not a failure of the episode


def test_functions_of_a_world_in_a_process():
    with alone(CODER) as coder, alone(COUNTER) as counter:
        check_functions(coder, counter)


def other_pythons(oldest: tuple[int, int]) -> list[str]:
    """Return other interpreters than this one, each of another version, and this one if there are
    none. None of our packages are installed there."""
    found = {}
    for minor in range(oldest[1], 20):
        name = f"python3.{minor}"
        for path in (shutil.which(name, path=os.defpath), shutil.which(name)):
            works = path and subprocess.run([path, "-c", "import sqlite3"], capture_output=True)
            if works and not works.returncode and not os.path.samefile(path, sys.executable):
                found[minor] = path
    return [*found.values()] or [sys.executable]


def test_the_methods_of_worlds_do_not_depend_on_how_many_there_are():
    worlds = Worlds(COUNTER, {})
    methods = worlds.methods()
    assert methods
    worlds.call("profile", "first", [])
    assert worlds.methods() == methods


@pytest.mark.parametrize("python", other_pythons((3, 10)))
def test_another_interpreter(python):
    with alone(COUNTER, python=python) as world:
        assert solve(world) == 1.0


@pytest.mark.parametrize("python", other_pythons((3, 11)))
@pytest.mark.parametrize("name", ["travel", "home"])
def test_another_interpreter_plays_the_same_world(name, python):
    """Python 3.12.1 confuses a variable of one comprehension with a function that another calls."""
    with alone(name, python=python) as world, alone(name) as same:
        tasks = world.tasks("dev")
        assert tasks == same.tasks("dev")
        assert world.reset(tasks[0]) == same.reset(tasks[0])


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
        if fault == "hang":
            assert "in _hang" in message
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
    assert all_end(pid)


@pytest.mark.parametrize(
    "fault", ["hang_in_c", "stop", "flood", "unending_line", "huge", "close_pipe"]
)
def test_worse_faults_end_the_worker(fault):
    with faulty(fault) as world:
        begin(world)
        pid = world.step("x").info["pid"]
        with pytest.raises(WorldError) as caught:
            world.step("break")
        assert isinstance(caught.value, WorldTimeout) == (fault in ("hang_in_c", "stop"))
        assert len(str(caught.value)) < 10_000
        assert not is_running(pid)
        assert solve(world) == 1.0


@pytest.mark.parametrize("fault, answer", [("noise", "0"), ("print", "0"), ("twice", "early")])
def test_noise_and_a_second_answer_are_skipped(fault, answer):
    with faulty(fault) as world:
        begin(world)
        assert take_all(world, ["break", "+"]) == [answer, "1"]


def test_a_reply_that_is_not_json_is_an_error_and_the_worker_lives():
    with faulty("not_json") as world:
        begin(world)
        pid = worker_pid(world)
        with pytest.raises(WorldError, match="JSON"):
            world.step("break")
        assert worker_pid(world) == pid and is_running(pid)


def test_set_up_has_a_deadline_and_says_what_failed():
    hangs, exits = ({"fault": fault, "at": "start"} for fault in ("hang", "exit"))
    for error, message, env, options in (
        (
            WorldTimeout,
            "start within",
            FAULTY,
            {"kwargs": hangs, "deadlines": Deadlines(start=1.0)},
        ),
        (WorldError, "last words", FAULTY, {"kwargs": exits}),
        (WorldError, "no_such_module", "no_such_module:World", {}),
        (WorldError, "cannot start", COUNTER, {"python": "/no/such/python"}),
        (ValueError, "there is no world", "no_such_world", {}),
    ):
        with pytest.raises(error, match=message):
            Pool(env, **options)


def test_a_workers_child_ends_with_it():
    with faulty("child") as world:
        begin(world)
        with pytest.raises(WorldTimeout) as caught:
            world.step("break")
        child = int(re.search(r"child (\d+)", str(caught.value)).group(1))
        assert all_end(child)


def test_memory_is_limited():
    with alone(FAULTY, {"fault": "grow"}, memory_mb=1000) as world:
        begin(world)
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
    assert all_end(worker)


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
        take_all(world, "+" * (number % 3))
    for call in (lambda: worlds[0].step("break"), worlds[0].evaluate):
        with pytest.raises(WorldError, match="exit code 3"):
            call()
    for number, world in enumerate(worlds[1:], 1):
        assert told(world, "+") == str(number % 3 + 1)
    worlds[0].reset(task)
    assert told(worlds[0], "+") == "1"
    counts = pool.counts
    assert (counts["failures"], counts["replayed"], counts["workers started"]) == (1, 5, 2)
    for world in worlds:
        world.close()
    assert pool.alive() == 0


def test_no_instance_fails_if_a_worker_dies_between_calls(pool):
    worlds = [pool.world() for _ in range(3)]
    for world in worlds:
        begin(world)
    pid = worlds[0].step("+").info["pid"]
    os.kill(pid, signal.SIGKILL)
    assert wait_until(lambda: not pool._slots[0]._worker.alive)
    assert [told(world, "+") for world in worlds] == ["2", "1", "1"]


def test_a_hanging_step_delays_the_others_by_its_deadline_only():
    def act(world, action):
        try:
            return told(world, action)
        except WorldTimeout:
            return "timeout"

    with (
        contextlib.closing(Pool(FAULTY, {"fault": "hang"}, workers=1, deadlines=SHORT)) as pool,
        ThreadPoolExecutor(5) as threads,
    ):
        worlds = [pool.world() for _ in range(5)]
        for world in worlds:
            begin(world)
        outcomes = list(threads.map(act, worlds, ["break", *"++++"]))
    assert outcomes == ["timeout", *"1111"]


def test_a_step_is_executed_once(pool):
    id, _ = pool.create(pool.tasks("train").result()[0]).result()

    def texts(*calls):
        return [call.result()["messages"][0]["content"] for call in calls]

    first = pool.step(id, "+", 0).result()
    assert pool.step(id, "+", 0).result() == first
    assert texts(*[pool.step(id, "+", 1) for _ in range(8)]) == ["2"] * 8
    with pytest.raises(ValueError, match="next step"):
        pool.step(id, "+", 7).result()
    pool.step(id, "stop", 2).result()
    for action, number, message in (("x", 0, "another action"), ("+", 3, "over")):
        with pytest.raises(ValueError, match=message):
            pool.step(id, action, number).result()
    assert texts(pool.step(id, "+", 1), pool.step(id, "+", 0)) == ["2", "1"]


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
            begin(world)
            world.step("+")
        with pytest.raises(WorldError, match="died"):
            second.step("exit")
        if not at:  # `info` holds the pid, which may differ
            assert told(first, "+") == "2"
            return
        for _ in range(2):
            with pytest.raises(WorldError, match=f"not deterministic.* {at}"):
                first.step("+")
        assert pool.counts["diverged"] == 1
        begin(first)
        assert told(first, "+").startswith("1")


def test_a_reset_that_ends_after_its_world_was_closed_is_released(tmp_path):
    late = tmp_path / "late"
    with contextlib.closing(Pool("tests.envs.faulty:Late", {"path": str(late)}, workers=1)) as pool:
        world, other = pool.world(), pool.world()
        with ThreadPoolExecutor(1) as thread:
            starting = thread.submit(world.reset, Task("count-0", "counter", "wait"))
            assert wait_until(lambda: pool.alive() == 1)
            world.close()
            late.touch()
            with pytest.raises(WorldError, match="closed while"):
                starting.result(20)
        assert pool.alive() == 0
        other.reset(Task("count-0", "counter", "now"))
        assert other.count() == 1  # its own


def test_idle_instances_are_released():
    with contextlib.closing(Pool(COUNTER, workers=1, lease_s=0.2)) as pool:
        ids = opened(pool, 3)
        time.sleep(0.3)
        pool.step(ids[0], "+").result()
        assert pool.release_idle() == 2 and pool.alive() == 1
        with pytest.raises(UnknownInstance):
            pool.step(ids[1], "+")
        assert pool.release(ids[0]) and not pool.release(ids[0])
        assert pool.counts["released idle"] == 2 and pool.counts["released client"] == 1


def opened(pool, number):
    """Return the ids of instances, all of which have a place before the first is open."""
    task = pool.tasks("train").result()[0]
    return [call.result()[0] for call in [pool.create(task) for _ in range(number)]]


@pytest.mark.parametrize(
    "recycle, batches, workers",
    [(3, [2, *[1] * 7], 3), (4, [4, 4, 4], 3)],  # 2 and 1, 3 and 3 episodes; 4, 4 and 4
)
def test_places_are_limited_and_workers_are_recycled_between_batches(recycle, batches, workers):
    most, pids = batches[0], []
    with contextlib.closing(Pool(COUNTER, workers=1, per_worker=most, recycle=recycle)) as pool:
        for number in batches:
            ids = opened(pool, number)
            if number == most:
                with pytest.raises(PoolFull):
                    opened(pool, 1)
            pids.append({pool.step(id, "+").result()["info"]["pid"] for id in ids})
            for id in ids:
                pool.release(id)
    assert {len(found) for found in pids} == {1} and len(set.union(*pids)) == workers


@pytest.mark.parametrize("begun", [True, False])
def test_a_closed_pool_leaves_no_process(begun):
    pool = Pool(FAULTY, {"fault": "hang"}, workers=2, deadlines=Deadlines(step=600.0))
    world = pool.world()
    begin(world)
    pids = [slot._worker.pid for slot in pool._slots]
    with ThreadPoolExecutor(1) as thread:
        stepping = thread.submit(world.step, "break")
        if begun:
            assert wait_until(lambda: pool._slots[0].thread._work_queue.empty())
        pool.close()
        with pytest.raises(WorldError):
            stepping.result(20)
    assert all_end(*pids)


def test_a_source_says_what_is_wrong():
    for message, options in (
        ("inprocess, worker, http", {"mode": "thread"}),
        ("needs the url", {"mode": "http"}),
        ("takes no url", {"mode": "worker", "url": "http://localhost:1"}),
    ):
        with pytest.raises(ValueError, match=message):
            Source(COUNTER, **options)
