"""Many instances of one environment on a few warm worker processes.

An instance is one episode; a worker hosts many. The pool records the task, seed and actions of each instance. If a
worker dies, only the instance whose call was running fails; the others are replayed in a new worker before their
next call. This relies on the World contract: the same task, seed and actions give the same episode.

Idle instances are released, and a step that arrives twice is executed once.
"""

from __future__ import annotations

import collections
import functools
import threading
import time
import uuid
from collections.abc import Callable
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import dataclass, field
from typing import Any

from envs.process import DEADLINES, Deadlines, Worker
from envs.world import Evaluation, Observation, StepResult, Task, Tool, World, WorldError, WorldTimeout

Json = dict[str, Any]


class PoolFull(WorldError):
    """Error for a new instance when every worker is full."""


class UnknownInstance(ValueError):
    """Error for the id of an instance that was never created, or was released by its client or because it was idle."""


@dataclass
class Instance:
    """One episode: the call that opened it, the answer to that call, and the actions and results since."""

    id: str
    opening: tuple[str, list[Any]]  # ("reset", [task, seed]) or ("restore", [snapshot])
    slot: Slot
    answer: Json = field(default_factory=dict)
    actions: list[str] = field(default_factory=list)
    results: list[Json] = field(default_factory=list)
    generation: int = -1  # of the worker that hosts it; -1 = not opened yet
    failure: WorldError | None = None
    last_used: float = field(default_factory=time.monotonic)


class Slot:
    """One worker process and the thread that talks to it. `instances` counts the instances assigned to it."""

    def __init__(self, spawn: Callable[[], Worker]):
        self.thread = ThreadPoolExecutor(1, thread_name_prefix="envs-worker")
        self.instances = self.served = self.generation = 0
        self._spawn = spawn
        self._worker: Worker | None = None
        self._closed = False

    def worker(self) -> Worker:
        """Return the running worker; start a new one if it died. Call this on the slot's thread only."""
        if self._worker is None or not self._worker.alive:
            self.generation += 1
            self.served = 0
            self._worker = self._spawn()
            if self._closed:
                self._worker.close()
        if self._closed:
            raise WorldError("the pool is closed")
        return self._worker

    def replace(self) -> Worker:
        """Close the running worker and return a new one. Call this on the slot's thread only."""
        self.worker().close()
        return self.worker()

    def close(self) -> None:
        """Kill the worker, from any thread: a call in progress fails, and its thread cleans up."""
        self._closed = True
        if self._worker:
            self._worker.kill()
        self.thread.shutdown(wait=False, cancel_futures=True)


class Pool:
    """Instances of `env` (a registered name or `module:Class`) on `workers` processes under `python`.

    Calls return futures of JSON values and are safe from any thread. per_worker: maximum number of instances in one
    process. memory_mb: address space of one process. lease_s: seconds without a call after which an instance is
    released. recycle: episodes after which a worker is replaced once it hosts no other instance (0 = never), for
    environments that leak memory.
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
        self._worker_arguments = {
            "kwargs": kwargs,
            "python": python,
            "memory_mb": memory_mb,
            "deadline": deadlines.start,
        }
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
        """Seconds until a call must be answered, including the wait for another call that hangs."""
        return self.deadlines.start + 2 * max(self.deadlines.reset, self.deadlines.step)

    def tasks(self, split: str) -> Future[list[Json]]:
        return self._anywhere("tasks", split)

    def profile(self) -> Future[Json]:
        return self._anywhere("profile")

    def create(self, task: Json, seed: int = 0, id: str | None = None) -> Future[tuple[str, Json]]:
        """Start an episode; the result is (id, observation). Repeating a call with its id, task and seed is safe."""
        return self._open(("reset", [task, seed]), id)

    def restore(self, snapshot: Any, id: str | None = None) -> Future[tuple[str, Json]]:
        """Continue an episode from a snapshot. The instance `id`, if it exists, is replaced."""
        if id is not None:
            self.release(id, "restored")
        return self._open(("restore", [snapshot]), id)

    def step(self, id: str, action: str, number: int | None = None) -> Future[Json]:
        """Take an action. `number` is the index of the step in its episode, None = the next one. A step that was
        taken before is answered from memory; one that skips ahead fails with ValueError."""
        return self._on(id, self._step, action, number)

    def evaluate(self, id: str) -> Future[Json]:
        return self._on(id, self._call, "evaluate", [])

    def snapshot(self, id: str) -> Future[Any]:
        return self._on(id, self._call, "snapshot", [])

    def query(self, id: str, method: str, args: list[Any], kwargs: Json) -> Future[Any]:
        return self._on(id, self._call, "query", [method, args, kwargs])

    def info(self, id: str) -> Json:
        instance = self._find(id)
        opening, args = instance.opening
        task = args[0] if opening == "reset" else {}
        return {"instance_id": id, "task_id": task.get("id", ""), "env": self.env, "steps": len(instance.actions)}

    def release(self, id: str, reason: str = "client") -> bool:
        """Drop an instance. Return False if there is none with this id."""
        with self._lock:
            instance = self._instances.pop(id, None)
            if instance is None:
                return False
            instance.slot.instances -= 1
        self._count(f"released {reason}")
        instance.slot.thread.submit(self._forget, instance)
        return True

    def release_idle(self) -> int:
        """Release the instances that had no call within the lease. Return their number."""
        earliest = time.monotonic() - self.lease_s
        with self._lock:
            idle = [instance.id for instance in self._instances.values() if instance.last_used < earliest]
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

    # `_place`, `_open`, `_on`, `_find`, `_anywhere` run on the caller's thread, `_count` on any, the rest on a slot's.

    def _spawn(self) -> Worker:
        self._count("workers started")
        return Worker(self.env, **self._worker_arguments)

    def _place(self) -> Slot:
        """Return the slot for a new instance. Raises PoolFull."""
        slot = min(self._slots, key=lambda s: s.instances)
        if slot.instances >= self._per_worker:
            raise PoolFull(f"all {len(self._slots) * self._per_worker} places for {self.env} are in use")
        return slot

    def _open(self, opening: tuple[str, list[Any]], id: str | None) -> Future[tuple[str, Json]]:
        with self._lock:
            instance = self._instances.get(id) if id else None
            if instance is None:
                instance = Instance(id or uuid.uuid4().hex, opening, self._place())
                self._instances[instance.id] = instance
                instance.slot.instances += 1
                self.counts["created"] += 1
            elif instance.opening != opening:
                raise ValueError(f"instance {id} exists with another task or seed")
        return instance.slot.thread.submit(self._start, instance)

    def _start(self, instance: Instance) -> tuple[str, Json]:
        try:
            self._ready(instance)
        except Exception:
            self.release(instance.id, "failed")
            raise
        return instance.id, instance.answer

    def _ready(self, instance: Instance) -> Worker:
        """Return the worker of an instance, after opening the instance in it or replaying it in a new worker."""
        if instance.failure:
            raise type(instance.failure)(str(instance.failure))
        slot = instance.slot
        worker = slot.worker()
        if instance.generation == slot.generation:
            return worker
        if self._recycle and slot.served >= self._recycle and slot.instances <= 1:
            worker = slot.replace()
        op, args = instance.opening
        replay = [(op, args), *(("step", [action]) for action in instance.actions)]
        if instance.generation >= 0:
            self._count("replayed")
        slot.served += 1
        for op, args in replay:
            answer = self._guarded(instance, worker, op, args)
            if op in ("reset", "restore"):
                instance.answer = answer or {}
        instance.generation = slot.generation
        return worker

    def _step(self, instance: Instance, action: str, number: int | None) -> Json:
        taken = len(instance.actions)
        number = taken if number is None else number
        if number < taken:
            if instance.actions[number] != action:
                raise ValueError(f"step {number} of instance {instance.id} was taken with another action")
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
        return self._guarded(instance, self._ready(instance), op, args)

    def _guarded(self, instance: Instance, worker: Worker, op: str, args: list[Any]) -> Any:
        """Call the worker and record a failure in the instance, which is then never called again."""
        try:
            return worker.call(op, instance.id, args, deadline=self.deadlines.of(op))
        except WorldError as error:
            self._count("timeouts" if isinstance(error, WorldTimeout) else "failures")
            if op != "query" or not worker.alive:
                instance.failure = error
            if not worker.alive and instance.id in self._instances:
                instance.slot.thread.submit(instance.slot.worker)  # start a new worker before the next call
            raise

    def _count(self, what: str) -> None:
        with self._lock:
            self.counts[what] += 1

    def _forget(self, instance: Instance) -> None:
        if instance.generation == instance.slot.generation:
            worker = instance.slot.worker()
            worker.call("close", instance.id, deadline=self.deadlines.step)

    def _on(self, id: str, function: Callable, *args: Any) -> Future:
        instance = self._find(id)
        return instance.slot.thread.submit(function, instance, *args)

    def _find(self, id: str) -> Instance:
        instance = self._instances.get(id)
        if instance is None:
            raise UnknownInstance(
                f"there is no instance '{id}'; it may have been released after {self.lease_s:g} idle seconds"
            )
        instance.last_used = time.monotonic()
        return instance

    def _anywhere(self, op: str, *args: Any) -> Future:
        slot = min(self._slots, key=lambda s: s.instances)
        return slot.thread.submit(lambda: slot.worker().call(op, "", list(args), deadline=self.deadlines.of(op)))


class PoolWorld(World):
    """A World whose episode is an instance of a pool. `close` releases the instance."""

    def __init__(self, pool: Pool):
        self.name = pool.env
        self._pool = pool
        self._id: str | None = None

    def tasks(self, split: str) -> list[Task]:
        return [Task.from_dict(task) for task in self._wait(self._pool.tasks(split))]

    def reset(self, task: Task, seed: int = 0) -> Observation:
        self.close()
        self._id, observation = self._wait(self._pool.create(task.to_dict(), seed))
        return Observation.from_dict(observation)

    def step(self, action: str) -> StepResult:
        return StepResult.from_dict(self._wait(self._pool.step(self._episode(), action)))

    def evaluate(self) -> Evaluation:
        return Evaluation.from_dict(self._wait(self._pool.evaluate(self._episode())))

    def snapshot(self) -> Any:
        return self._wait(self._pool.snapshot(self._episode()))

    def restore(self, snapshot: Any) -> None:
        self.close()
        self._id, _ = self._wait(self._pool.restore(snapshot))

    def functions(self) -> list[Tool]:
        return self._query("functions")

    def call_text(self, name: str, arguments: dict[str, Any]) -> str:
        return self._query("call_text", name, arguments)

    def profile(self) -> dict[str, Any]:
        return self._wait(self._pool.profile())

    def close(self) -> None:
        if self._id is not None:
            self._pool.release(self._id)
            self._id = None

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name not in self._pool.methods:
            raise AttributeError(f"{self.name} has no method '{name}'")
        return functools.partial(self._query, name)

    def _query(self, method: str, /, *args: Any, **kwargs: Any) -> Any:
        return self._wait(self._pool.query(self._episode(), method, list(args), kwargs))

    def _episode(self) -> str:
        if self._id is None:
            raise WorldError(f"{self.name} has no episode: reset it first")
        return self._id

    def _wait(self, future: Future) -> Any:
        try:
            return future.result(self._pool.patience)
        except FutureTimeout:
            if future.done():
                raise  # the worker's own WorldTimeout
            raise WorldTimeout(f"{self.name} did not answer within {self._pool.patience:g} s") from None
        except CancelledError:
            raise WorldError(f"the pool of {self.name} was closed before the call began") from None
