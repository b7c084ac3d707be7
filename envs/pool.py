"""Many instances of one environment on a few warm worker processes.

An instance is one episode; a worker hosts many. The pool records the task, seed and actions of each
instance. If a worker dies, only the instance whose call was running fails; the others are replayed
in a new worker before their
next call. This relies on the World contract: the same task, seed and actions give the same episode.

Idle instances are released, and a step that arrives twice is executed once.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import threading
import time
import uuid
from collections.abc import Callable
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from envs.hosted import HostedWorld
from envs.process import DEADLINES, Deadlines, Worker
from envs.values import Json
from envs.world import WorldError, WorldTimeout

if TYPE_CHECKING:
    from envs.ray_pool import RayWorker

GRACE_S = 10.0  # beyond a deadline, for killing the worker that missed it


class PoolFull(WorldError):
    """Error for a new instance when every worker is full."""


class UnknownInstance(ValueError):
    """Error for the id of an instance that was never created, or was released by its client or
    because it was idle."""


@dataclass
class Instance:
    """One episode: the call that opened it, the answer to that call, and the actions and results
    since."""

    id: str
    opening: tuple[str, list[Any]]  # ("reset", [task, seed]) or ("restore", [snapshot])
    slot: Slot
    answer: Json = field(default_factory=dict)
    actions: list[str] = field(default_factory=list)
    results: list[Json] = field(default_factory=list)
    generation: int = -1  # of the worker that hosts it; -1 = not opened yet
    failure: WorldError | None = None
    last_used: float = field(default_factory=time.monotonic)


@dataclass(frozen=True)
class Call:
    """A call whose result `future` gets. `slot` is where it waits for the calls before it."""

    future: Future[Any]
    slot: Slot

    def result(self, timeout: float | None = None) -> Any:
        return self.future.result(timeout)


class Slot:
    """One worker process and the thread that talks to it.

    `instances` counts the instances assigned to it, and `answered` the calls that the worker
    answered or failed.
    """

    def __init__(self, spawn: Callable[[], Worker | RayWorker]):
        self.thread = ThreadPoolExecutor(1, thread_name_prefix="envs-worker")
        self.instances = self.served = self.generation = self.answered = 0
        self._spawn = spawn
        self._worker: Worker | RayWorker | None = None
        self._closed = False

    def submit(self, function: Callable, *args: Any) -> Call:
        """Run a function on the slot's thread. Raises WorldError if the pool is closed."""
        try:
            return Call(self.thread.submit(function, *args), self)
        except RuntimeError:  # of an executor that was shut down
            raise WorldError("the pool is closed") from None

    def call(self, op: str, id: str, args: list[Any], deadline: float) -> Any:
        """Call the running worker. Call this on the slot's thread only."""
        worker = self.worker()
        try:
            return worker.call(op, id, args, deadline=deadline)
        finally:
            self.answered += 1

    def worker(self) -> Worker | RayWorker:
        """Return the running worker; start a new one if it died. Call this on the slot's thread
        only."""
        if self._worker is None or not self._worker.alive:
            self.generation += 1
            self.served = 0
            try:
                self._worker = self._spawn()
            finally:
                self.answered += 1
            if self._closed:
                self._worker.close()
        if self._closed:
            raise WorldError("the pool is closed")
        return self._worker

    def close(self) -> None:
        """Kill the worker, from any thread: a call in progress fails, and its thread cleans up."""
        self._closed = True
        if self._worker:
            self._worker.kill()
        self.thread.shutdown(wait=False, cancel_futures=True)


class Pool:
    """Instances of `env` (a registered name or `module:Class`) on `workers` processes under
    `python`.

    Methods that call a worker return a `Call`, whose result is a JSON value. All are safe from any
    thread. per_worker: maximum of instances in one process. memory_mb: address space of one
    process. lease_s: seconds without a call after which an instance is released. recycle: episodes
    after which a worker is replaced once it hosts no other instance (0 = never), for environments
    that leak memory.
    """

    def __init__(
        self,
        env: str,
        kwargs: Json | None = None,
        *,
        workers: int = 2,
        per_worker: int = 1000,
        python: str | None = None,
        memory_mb: int | None = None,
        deadlines: Deadlines = DEADLINES,
        lease_s: float = 3600.0,
        recycle: int = 0,
    ):
        """Start every worker. Raises what `Worker` raises if the environment cannot be set up."""
        self.env, self.deadlines, self.lease_s = env, deadlines, lease_s
        self._per_worker, self._recycle = per_worker, recycle
        self._lock = threading.Lock()
        self._instances: dict[str, Instance] = {}
        self.counts: collections.Counter[str] = collections.Counter()
        self._new_worker = functools.partial(
            Worker, env, kwargs, python=python, memory_mb=memory_mb, deadline=deadlines.start
        )
        self._slots = [Slot(self._spawn) for _ in range(workers)]
        starting = [slot.thread.submit(slot.worker) for slot in self._slots]
        try:
            started = [future.result() for future in starting]
        except BaseException:
            self.close()
            raise
        self.methods: list[str] = started[0].methods  # names that `query` accepts

    @property
    def patience(self) -> float:
        """Seconds within which a worker ends some call or start, each of which has a shorter
        deadline."""
        return GRACE_S + max(self.deadlines.start, self.deadlines.reset, self.deadlines.step)

    def tasks(self, split: str) -> Call:
        return self._anywhere("tasks", split)

    def profile(self) -> Call:
        return self._anywhere("profile")

    def create(self, task: Json, seed: int = 0, id: str | None = None) -> Call:
        """Start an episode; the result is (id, observation). Repeating a call with its id, task and
        seed is safe."""
        return self._open(("reset", [task, seed]), id)

    def restore(self, snapshot: Any, id: str | None = None) -> Call:
        """Continue an episode from a snapshot. The instance `id`, if it exists, is replaced."""
        if id is not None:
            self.release(id, "restored")
        return self._open(("restore", [snapshot]), id)

    def step(self, id: str, action: str, number: int | None = None) -> Call:
        """Take an action. `number` is the index of the step in its episode, None = the next one. A
        step that was taken before is answered from memory; one that skips ahead fails with
        ValueError."""
        return self._on(id, self._step, action, number)

    def ask(self, id: str, op: str, *args: Any) -> Call:
        """Make another call in an episode: "evaluate", "snapshot", or "query" with the name of a
        method, its arguments and its named arguments."""
        return self._on(id, self._call, op, list(args))

    def info(self, id: str) -> Json:
        instance = self._find(id)
        opening, args = instance.opening
        task = args[0] if opening == "reset" else {}
        return {
            "instance_id": id,
            "task_id": task.get("id", ""),
            "env": self.env,
            "steps": len(instance.actions),
        }

    def release(self, id: str, reason: str = "client") -> bool:
        """Drop an instance. Return False if there is none with this id."""
        with self._lock:
            instance = self._instances.pop(id, None)
            if instance is None:
                return False
            instance.slot.instances -= 1
        self._count(f"released {reason}")
        with contextlib.suppress(WorldError):  # the pool was closed in the meantime
            instance.slot.submit(self._forget, instance)
        return True

    def release_idle(self) -> int:
        """Release the instances that had no call within the lease. Return their number."""
        earliest = time.monotonic() - self.lease_s
        with self._lock:
            idle = [i.id for i in self._instances.values() if i.last_used < earliest]
        return sum(self.release(id, "idle") for id in idle)

    def alive(self) -> int:
        """Return the number of instances."""
        return len(self._instances)

    def close(self) -> None:
        """Kill the workers without waiting for their calls."""
        with self._lock:
            self._instances.clear()
        for slot in self._slots:
            slot.close()

    def world(self) -> PoolWorld:
        return PoolWorld(self)

    # `_place`, `_open`, `_on`, `_find`, `_anywhere` run on the caller's thread, `_count` on any,
    # the rest on a slot's.

    def _spawn(self) -> Worker | RayWorker:
        self._count("workers started")
        return self._new_worker()

    def _place(self) -> Slot:
        """Return the slot for a new instance. Raises PoolFull."""
        slot = min(self._slots, key=lambda s: s.instances)
        if slot.instances >= self._per_worker:
            places = len(self._slots) * self._per_worker
            raise PoolFull(f"all {places} places for {self.env} are in use")
        return slot

    def _open(self, opening: tuple[str, list[Any]], id: str | None) -> Call:
        with self._lock:
            instance = self._instances.get(id) if id else None
            if instance is None:
                instance = Instance(id or uuid.uuid4().hex, opening, self._place())
                self._instances[instance.id] = instance
                instance.slot.instances += 1
                self.counts["created"] += 1
            elif instance.opening != opening:
                raise ValueError(f"instance {id} exists with another task or seed")
        return instance.slot.submit(self._start, instance)

    def _start(self, instance: Instance) -> tuple[str, Json]:
        try:
            self._ready(instance)
        except Exception:
            self.release(instance.id, "failed")
            raise
        return instance.id, instance.answer

    def _ready(self, instance: Instance) -> None:
        """Make sure that the worker hosts an instance: open it, or replay it in a new worker."""
        if instance.failure:
            raise type(instance.failure)(str(instance.failure))
        slot = instance.slot
        slot.worker()
        if instance.generation == slot.generation:
            return
        if self._recycle and slot.served >= self._recycle and not self._hosts(slot):
            slot.worker().close()
            slot.worker()
        again = instance.generation >= 0
        if again:
            self._count("replayed")
        slot.served += 1
        op, args = instance.opening
        answer = self._guarded(instance, op, args) or {}
        if again and answer != instance.answer:
            raise self._diverged(instance, op)
        instance.answer = answer
        for number, (action, recorded) in enumerate(zip(instance.actions, instance.results)):
            result = self._guarded(instance, "step", [action])
            # `info` may hold facts of a process, and the agent never saw it.
            if {**result, "info": None} != {**recorded, "info": None}:
                raise self._diverged(instance, f"step {number}")
        instance.generation = slot.generation

    def _hosts(self, slot: Slot) -> bool:
        """Return True if the worker hosts an instance. `slot.instances` also counts those that only
        have a place: a step of training takes places for all its episodes at once, so that it would
        never be low."""
        with self._lock:
            return any(
                i.slot is slot and i.generation == slot.generation for i in self._instances.values()
            )

    def _diverged(self, instance: Instance, what: str) -> WorldError:
        """Return, and record, the failure of an instance whose replay is another episode than the
        recorded one."""
        self._count("diverged")
        instance.failure = WorldError(
            f"{self.env} is not deterministic: replayed in a new worker, {what} gave another "
            "answer than it did before"
        )
        return instance.failure

    def _step(self, instance: Instance, action: str, number: int | None) -> Json:
        taken = len(instance.actions)
        number = taken if number is None else number
        if number < 0:
            raise ValueError(f"the number of a step is 0 or more, not {number}")
        if number < taken:
            if instance.actions[number] != action:
                raise ValueError(
                    f"step {number} of instance {instance.id} was taken with another action"
                )
            self._count("duplicate steps")
            return instance.results[number]
        if taken and (instance.results[-1]["terminated"] or instance.results[-1]["truncated"]):
            raise ValueError(f"the episode of instance {instance.id} is over")
        if number > taken:
            raise ValueError(f"the next step of instance {instance.id} is {taken}, not {number}")
        result = self._call(instance, "step", [action])
        instance.actions.append(action)
        instance.results.append(result)
        self._count("steps")
        return result

    def _call(self, instance: Instance, op: str, args: list[Any]) -> Any:
        self._ready(instance)
        return self._guarded(instance, op, args)

    def _guarded(self, instance: Instance, op: str, args: list[Any]) -> Any:
        """Call the worker and record a failure in the instance, which is then never called
        again."""
        worker = instance.slot.worker()
        try:
            return instance.slot.call(op, instance.id, args, self.deadlines.of(op))
        except WorldError as error:
            self._count("timeouts" if isinstance(error, WorldTimeout) else "failures")
            if op != "query" or not worker.alive:
                instance.failure = error
            if not worker.alive and instance.id in self._instances:
                # Start a new worker before the next call.
                instance.slot.thread.submit(instance.slot.worker)
            raise

    def _count(self, what: str) -> None:
        with self._lock:
            self.counts[what] += 1

    def _forget(self, instance: Instance) -> None:
        if instance.generation == instance.slot.generation:
            instance.slot.call("close", instance.id, [], self.deadlines.step)

    def _on(self, id: str, function: Callable, *args: Any) -> Call:
        instance = self._find(id)
        return instance.slot.submit(function, instance, *args)

    def _find(self, id: str) -> Instance:
        instance = self._instances.get(id)
        if instance is None:
            raise UnknownInstance(
                f"there is no instance '{id}': it was released after {self.lease_s:g} idle seconds,"
                " or the service has been started again since"
            )
        instance.last_used = time.monotonic()
        return instance

    def _anywhere(self, op: str, *args: Any) -> Call:
        slot = min(self._slots, key=lambda s: s.instances)
        return slot.submit(slot.call, op, "", list(args), self.deadlines.of(op))


class PoolWorld(HostedWorld):
    """A World whose episode is an instance of a pool. `close` releases the instance."""

    def __init__(self, pool: Pool):
        super().__init__(pool.env, pool)

    def end_episode(self) -> None:
        self._release()  # or an idle world would keep its worker from being replaced

    def _wait(self, call: Call) -> Any:
        """Return the result of a call, however many calls of the same worker come first.

        Each of those has its own deadline. So the call itself has one from when it begins, and a
        hang in one episode costs the others time and nothing else.
        """
        while True:
            answered = call.slot.answered
            try:
                return call.result(self._host.patience)
            except FutureTimeout:
                if call.future.done():
                    raise  # the worker's own WorldTimeout
                if call.slot.answered == answered:
                    late = f"{self.name} did not answer within {self._host.patience:g} s"
                    raise WorldTimeout(late) from None
            except CancelledError:
                closed = f"the pool of {self.name} was closed before the call began"
                raise WorldError(closed) from None
