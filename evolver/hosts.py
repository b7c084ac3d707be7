"""Several processes as one run: who they are, what they exchange, and how one that dies ends the others.

Every process runs the same loop. Rollouts and labels are shared out and gathered again, so that all hold the same
trajectories in the same order; the rest of the host's work is done by each alike, or by the first one, which then tells
the others. Weights, updates and checkpoints belong to all devices together. The first process writes the books.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import jax
import numpy as np

from evolver import coordinator

T = TypeVar("T")
LOST = 75  # exit code of a process that ends because another one did: "try again", by sysexits.h
BEAT = 1.0  # seconds between signs of life


class HostsError(Exception):
    """The processes of a run did not find each other."""


@contextlib.contextmanager
def connected(config: Any) -> Iterator[None]:
    """Join the other processes that `config.hosts` speaks of, for as long as the block lasts.

    With `count` of 0 the scheduler says who they are (Slurm, Kubernetes, a TPU pod); 1 = this process is alone. Raises
    HostsError when they do not meet within the deadline.
    """
    c = config.hosts
    if c.count == 1:
        yield
        return
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.config.update("jax_enable_recoverability", True)  # nobody is told to abort because another one is gone
    with contextlib.ExitStack() as stack:
        try:
            _join(c, stack)
        except Exception as error:
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            raise HostsError(
                f"process {c.index} of {c.count} did not meet the others at {c.coordinator or 'the coordinator'} "
                f"within {c.deadline:g} s ({reason}). config.hosts.coordinator is host:port of process 0, the same for "
                "all of them"
            ) from None
        with _watched(c.deadline):
            yield


def _join(c: Any, stack: contextlib.ExitStack) -> None:
    """Meet the others at a service that process 0 starts, and that `stack` ends."""
    address, count, index, devices = c.coordinator, c.count, c.index, None
    if not c.count:
        from jax._src.clusters import ClusterEnv  # as jax.distributed.initialize finds out, but before it

        address, count, index, devices = ClusterEnv.auto_detect_unset_distributed_params(
            None, None, None, None, None, int(c.deadline)
        )
    who = {"coordinator_address": address, "num_processes": count, "process_id": index, "local_device_ids": devices}
    if not index and address:
        stack.enter_context(coordinator.serving(address, count, c.deadline))
        who["coordinator_bind_address"] = "127.0.0.1:0"  # of jax's own service, which nobody uses
    elif address:
        await_port(address, c.deadline)
    jax.distributed.initialize(**who, initialization_timeout=int(c.deadline))


@contextlib.contextmanager
def _watched(deadline: float) -> Iterator[None]:
    """Watch over the others during the block, and take leave of them after it."""
    watch = Watch(deadline)
    watch.start()
    try:
        yield
    except BaseException as error:
        if isinstance(error, jax.errors.JaxRuntimeError) or "Gloo" in str(error):
            watch.wait()  # for the other end of a collective, which may be gone: then this process ends there
        # A checkpoint that is being written waits for the others, who leave, and would hold up the interpreter's end.
        give_up = threading.Timer(min(deadline, 30.0), os._exit, [1])
        give_up.daemon = True
        give_up.start()
        watch.stop("" if isinstance(error, SystemExit) else f"{type(error).__name__}: {error}")
        raise
    watch.stop()
    jax.distributed.shutdown()


def _leave(why: str) -> None:
    print(
        f"\n{why}; process {jax.process_index()} ends too. The last checkpoint is unharmed: started again, all of them "
        "go on from there.",
        file=sys.stderr, flush=True,
    )  # fmt: skip
    os._exit(LOST)


def await_port(address: str, deadline: float) -> None:
    """Return once somebody listens at host:port; raises the last OSError after `deadline` seconds.

    Left to jax, a client without its coordinator aborts the process from C++, and no message of ours is ever printed.
    """
    host, _, port = address.rpartition(":")
    until = time.monotonic() + deadline
    while True:
        try:
            socket.create_connection((host.strip("[]"), int(port)), timeout=1.0).close()
            return
        except OSError:
            if time.monotonic() > until:
                raise
            time.sleep(0.2)


class Watch:
    """Signs of life between the processes, in a thread. One that is silent for `deadline` seconds, or that says it
    failed, ends this process: it would wait for the other in a collective for ever."""

    def __init__(self, deadline: float):
        from jax._src import distributed  # the one way to the service that all processes are connected to

        self._client = distributed.global_state.client
        self._deadline = deadline
        self._me, self._count = jax.process_index(), jax.process_count()
        self._name = f"{self._me} {socket.gethostname()} {os.getpid()}"
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watch", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self, failure: str = "") -> None:
        """This process ends: well, or for the reason given, which the others are told."""
        self._ended.set()
        self._thread.join(2 * BEAT)
        with contextlib.suppress(Exception):
            self._say(f"failed {failure}" if failure else "done")

    def wait(self) -> None:
        """Return if everybody is alive."""
        self._ended.wait(self._deadline + 3 * BEAT)

    def _say(self, what: str) -> None:
        self._client.key_value_set(f"evolver/alive/{self._me}", f"{self._name}|{what}", allow_overwrite=True)

    def _run(self) -> None:
        seen = {i: ("", time.monotonic()) for i in range(self._count)}
        beat = 0
        while not self._ended.wait(BEAT):
            beat += 1
            now, said = time.monotonic(), {}
            try:
                self._say(str(beat))
                pairs = self._client.key_value_dir_get("evolver/alive/")
                said = {int(key.rpartition("/")[2]): text for key, text in pairs}
            except Exception:  # the service lives beside process 0: it is that machine which is silent
                said = {}
            for i in range(self._count):
                text = said.get(i, seen[i][0])
                if text != seen[i][0]:
                    seen[i] = text, now
                who, _, what = text.partition("|")
                if what.startswith("failed"):
                    self._end(f"process {who or i} failed ({what.removeprefix('failed ')})")
                if what != "done" and now - seen[i][1] > self._deadline and i != self._me:
                    self._end(f"process {who or i} of {self._count} has given no sign of life for {self._deadline:g} s")

    def _end(self, why: str) -> None:
        if not self._ended.is_set():
            _leave(why)


# --- what they exchange -----------------------------------------------------------------------------------------------


def first() -> bool:
    """Whether this process writes the books."""
    return jax.process_index() == 0


def share(items: Sequence[T]) -> list[T]:
    """This process's part: every n-th, so that long and short ones are spread alike."""
    return list(items[jax.process_index() :: jax.process_count()])


def whole(part: Sequence[T]) -> list[T]:
    """All items in their order, from the parts that `share` gave."""
    return interleaved(gather(list(part)))


def interleaved(parts: Sequence[Sequence[T]]) -> list[T]:
    """The inverse of `share`, given the parts of all processes."""
    return [parts[i % len(parts)][i // len(parts)] for i in range(sum(map(len, parts)))]


def gather(value: T) -> list[T]:
    """What each process gives here, in their order. All have to come, and wait for each other."""
    if jax.process_count() == 1:
        return [value]
    from jax.experimental import multihost_utils

    mine = np.frombuffer(pickle.dumps(value), np.uint8)
    sizes = multihost_utils.process_allgather(np.array([mine.size], np.int32))[:, 0]
    width = 1 << int(sizes.max() - 1).bit_length()  # few shapes, each of which is a program
    padded = np.zeros(width, np.uint8)
    padded[: mine.size] = mine
    everything = multihost_utils.process_allgather(padded)
    return [pickle.loads(row[:size].tobytes()) for row, size in zip(everything, sizes)]


def led(part: Any, work: Callable[[], T]) -> T:
    """`work()`, done by the first process alone. The others take over its result, and the state of `part`."""
    if jax.process_count() == 1:
        return work()
    value, state = gather((work(), part.state()) if first() else None)[0]
    if not first():
        part.load_state(state)
    return value


def merged(metrics: dict[str, float]) -> dict[str, float]:
    """Figures of all processes: rates are averaged, counts added up."""
    every = gather(metrics)
    if len(every) == 1:
        return metrics
    sums = {name: sum(m.get(name, 0.0) for m in every) for name in metrics}
    return {name: total / len(every) if name.endswith("_rate") else total for name, total in sums.items()}


def local(params: Any) -> Any:
    """Arrays of all devices as whole arrays of this process's first device."""
    if all(x.is_fully_addressable for x in jax.tree.leaves(params)):
        return params
    everywhere = jax.sharding.PartitionSpec()
    mesh = jax.tree.leaves(params)[0].sharding.mesh
    copied = jax.jit(lambda x: x, out_shardings=jax.sharding.NamedSharding(mesh, everywhere))(params)
    return jax.tree.map(lambda x: x.addressable_data(0), copied)
