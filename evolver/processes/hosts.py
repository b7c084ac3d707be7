"""Several processes as one run: connecting them, exchanging data, and ending all of them when one
dies.

Every process runs the same loop. Rollouts and labels are divided among the processes and gathered
again, so that all of them hold the same trajectories in the same order. Other work on the host is
repeated by every process, or done by the first one, which sends its result to the others. Weights,
updates and checkpoints span all devices. Only the first process writes metrics and records.
"""

import contextlib
import functools
import os
import pickle
import socket
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, Protocol, TypeVar

import jax
import numpy as np

from evolver.metrics import Metrics
from evolver.processes import coordinator
from evolver.processes.interrupt import Interrupted, RunEnds, tell
from rl.engines import EngineFault

T = TypeVar("T")
LOST = 75  # exit code of a process that ends because another one did; EX_TEMPFAIL of sysexits.h
HEARTBEAT = 1.0  # seconds between two heartbeats
SETTINGS = b"\4"  # the kind of the first frame of HTTP/2, which comes after the frame's length
GREETING = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(3) + SETTINGS + bytes(5)
DIFFERENCES = 5  # between processes, that a message names


class HostsError(Exception):
    """The processes of a run could not connect."""


@contextlib.contextmanager
def connected(config: Any) -> Iterator[None]:
    """Connect to the other processes of `config.hosts` for the duration of the block.

    count=1 means a single process; with count=0 the scheduler (Slurm, Kubernetes, a TPU pod)
    provides the settings. Raises HostsError if the processes do not connect within the deadline.
    """
    c = config.hosts
    if c.count == 1:
        yield
        return
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    # Do not abort other processes when one dies.
    jax.config.update("jax_enable_recoverability", True)
    with contextlib.ExitStack() as stack:
        try:
            _join(c, stack)
        except Exception as error:
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            raise HostsError(
                f"process {c.index} of {c.count} did not connect to the others at"
                f" {c.coordinator or 'the coordinator'} within {c.deadline:g} s ({reason})."
                " config.hosts.coordinator must be host:port of process 0, the same for all"
                " processes"
            ) from None
        with _watched(c.deadline):
            yield


def _join(c: Any, stack: contextlib.ExitStack) -> None:
    """Connect to the coordination service; process 0 starts it, and `stack` stops it."""
    address = c.coordinator
    count = c.count
    index = c.index
    devices = None
    if not count:
        from jax._src.clusters import ClusterEnv  # as jax.distributed.initialize does, later

        found = ClusterEnv.auto_detect_unset_distributed_params(
            None, None, None, None, None, int(c.deadline)
        )
        address, count, index, devices = found
    bind = None
    if not index and address:
        stack.enter_context(coordinator.serving(address, count, c.deadline))
        bind = "127.0.0.1:0"  # of JAX's own service, which is not used
    elif address:
        await_port(address, c.deadline)
    jax.distributed.initialize(
        address,
        num_processes=count,
        process_id=index,
        local_device_ids=devices,
        coordinator_bind_address=bind,
        initialization_timeout=int(c.deadline),
        heartbeat_timeout_seconds=coordinator.SILENCE,
    )


def await_port(address: str, deadline: float) -> None:
    """Return once a service answers at host:port. Raises the last OSError after `deadline` seconds.

    JAX would abort a client without its coordinator from C++, before it could print a message of
    ours.
    """
    host, _, port = address.rpartition(":")
    until = time.monotonic() + deadline
    while True:
        try:
            with socket.create_connection((host.strip("[]"), int(port)), timeout=1.0) as found:
                found.sendall(GREETING)
                if found.recv(4)[3:] == SETTINGS:
                    return
            raise OSError("another program listens there")
        except OSError:
            if time.monotonic() > until:
                raise
            time.sleep(0.2)


@contextlib.contextmanager
def _watched(deadline: float) -> Iterator[None]:
    """Exchange heartbeats with the other processes during the block, and sign off after it."""
    watch = Watch(deadline)
    try:
        yield
    except BaseException as error:
        if isinstance(error, jax.errors.JaxRuntimeError) or "Gloo" in str(error):
            # a collective failed: if its other end is dead, this process ends here with code 75
            time.sleep(deadline + 3 * HEARTBEAT)
        # A checkpoint in progress waits for the other processes, which are ending, and would block
        # interpreter exit.
        give_up = threading.Timer(min(deadline, 30.0), os._exit, [1])
        give_up.daemon = True
        give_up.start()
        reason = f"failed {type(error).__name__}: {error}"
        watch.stop("done" if isinstance(error, SystemExit) or in_all(error) else reason)
        raise
    watch.stop("done")
    jax.distributed.shutdown()


class Watch:
    """Heartbeats between the processes, in a thread.

    This process exits when another one reports a failure or sends no heartbeat for `deadline`
    seconds: it would wait forever for that process in the next collective.
    """

    def __init__(self, deadline: float):
        self._client = _client()
        self._deadline = deadline
        self._me = index()
        self._count = count()
        self._name = f"{self._me} {socket.gethostname()} {os.getpid()}"
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watch", daemon=True)
        self._thread.start()

    def stop(self, state: str) -> None:
        """Stop, and tell the other processes how this one ended: "done", or "failed" and why."""
        self._ended.set()
        self._thread.join(2 * HEARTBEAT)
        with contextlib.suppress(Exception):
            self._publish(state)

    def _publish(self, state: str) -> None:
        key = f"evolver/alive/{self._me}"
        text = f"{self._name}|{state}"
        self._client.key_value_set(key, text, allow_overwrite=True)

    def _run(self) -> None:
        messages: dict[int, str] = {}
        last = time.monotonic()
        heard = [("", last)] * self._count  # each one's message and when it changed
        while not self._ended.wait(HEARTBEAT):
            now = time.monotonic()
            if now - last > self._deadline / 2:
                # This process, or its machine, stood still: how long others did is not known.
                heard = [(text, now) for text, _ in heard]
            last = now
            # Without the service, on the machine of process 0, that process counts as silent.
            with contextlib.suppress(Exception):
                self._publish(str(now))
                pairs = self._client.key_value_dir_get("evolver/alive/")
                messages |= {int(key.rpartition("/")[2]): text for key, text in pairs}
            for i in range(self._count):
                text = messages.get(i, "")
                if text != heard[i][0]:
                    heard[i] = text, now
                name, _, state = text.partition("|")
                if state.startswith("failed"):
                    self._end(f"process {name or i} failed ({state.removeprefix('failed ')})")
                if state != "done" and now - heard[i][1] > self._deadline and i != self._me:
                    self._end(
                        f"process {name or i} of {self._count} sent no heartbeat for"
                        f" {self._deadline:g} s"
                    )

    def _end(self, why: str) -> None:
        if not self._ended.is_set():
            tell(
                f"\n{why}; process {self._me} ends too. The last checkpoint is intact: start all"
                " processes again to resume from it."
            )
            os._exit(LOST)


def agree(mine: Mapping[str, str]) -> None:
    """Compare what this process is with the others. Raises HostsError in all of them, with what
    differs, unless they are the same: they would wait for each other in different places, or
    learn from different numbers."""
    parts = gather((socket.gethostname(), dict(mine)))
    (host, first), *others = parts
    for number, (other_host, other) in enumerate(others, 1):
        names = sorted(k for k in first.keys() | other.keys() if first.get(k) != other.get(k))
        if names:
            more = f" and {len(names) - DIFFERENCES} more" if len(names) > DIFFERENCES else ""
            error = HostsError(
                f"process {number} ({other_host}) differs from process 0 ({host}) in"
                f" {', '.join(names[:DIFFERENCES])}{more}: give all processes the same code,"
                " packages and settings"
            )
            error.__dict__["in_all"] = True
            raise error


# --- exchanging data ------------------------------------------------------------------------------


def alone() -> bool:
    """Return True if the run has one process only."""
    return count() == 1


def count() -> int:
    """Return the number of processes of the run."""
    return jax.process_count()


def index() -> int:
    """Return the number of this process."""
    return jax.process_index()


def first() -> bool:
    """Return True in the process that writes metrics and records."""
    return index() == 0


def own_name(name: str) -> str:
    """Return the name of this process's own file or folder in the workdir, which all share: `name`
    in the first process, with the number of the process in the others."""
    stem, dot, ending = name.partition(".")
    return name if first() else f"{stem}_{index()}{dot}{ending}"


def share(items: Sequence[T]) -> list[T]:
    """Return this process's part: every n-th item, which balances long and short ones."""
    return list(items[index() :: count()])


def gather_shares(part: Sequence[T]) -> list[T]:
    """Return all items in their original order, from the parts that `share` made."""
    parts = gather(list(part))
    return [parts[i % len(parts)][i // len(parts)] for i in range(sum(map(len, parts)))]


def gather(value: T) -> list[T]:
    """Return the values of all processes, by process index. Every process must call this; they wait
    for each other."""
    if alone():
        return [value]
    from jax.experimental import multihost_utils

    mine = np.frombuffer(pickle.dumps(value), np.uint8)
    sizes = multihost_utils.process_allgather(np.array([mine.size], np.int32))[:, 0]
    width = 1 << int(sizes.max() - 1).bit_length()  # few shapes, because each one is compiled
    padded = np.zeros(width, np.uint8)
    padded[: mine.size] = mine
    everything = multihost_utils.process_allgather(padded)
    return [pickle.loads(row[:size].tobytes()) for row, size in zip(everything, sizes)]


class Stream:
    """Values from one process to another, in order, which one end puts and the other one gets.
    JAX's coordination service keeps those on the way."""

    def __init__(self, name: str):
        self._name = name
        self.sent = self.received = 0
        self._lock = threading.Lock()

    def put(self, value: Any) -> None:
        """Send a value."""
        with self._lock:
            key = f"evolver/{self._name}/{self.sent}"
            self.sent = self.sent + 1
            _client().key_value_set_bytes(key, pickle.dumps(value))

    def get(self) -> Any:
        """Wait for the next value, and return it."""
        key = f"evolver/{self._name}/{self.received}"
        self.received = self.received + 1
        while True:  # a signal is handled between two rounds
            try:
                value = _client().blocking_key_value_get_bytes(key, 1000)
            except jax.errors.JaxRuntimeError as error:
                if "DEADLINE_EXCEEDED" not in str(error):
                    raise
            else:
                _client().key_value_delete(key)
                return pickle.loads(value)


def _client() -> Any:
    """Return the client of the coordination service, to which there is no public access."""
    from jax._src import distributed

    return distributed.global_state.client


class Helpers(Protocol):
    """Lets the other processes help the first one: they are in `serve` while it is in `lent`."""

    def lent(self) -> contextlib.AbstractContextManager[None]: ...
    def serve(self) -> None: ...


def on_first(part: Any, work: Callable[[], T], helpers: Helpers | None = None) -> T:
    """Run `work()` in the first process only, and return its result in all of them.

    The other processes also copy the first one's state of `part`, which `work` may have changed.
    Raises what `together` raises.
    """
    if alone():
        return work()

    def here() -> list[Any]:
        if first():
            with helpers.lent() if helpers else contextlib.nullcontext():
                return [work(), part.state()]
        if helpers:
            helpers.serve()
        return []

    value, state = gather(together(here))[0]
    if not first():
        part.load_state(state)
    return value


def together(work: Callable[[], T]) -> T:
    """Return `work()`. If it ends the run in one process, raise that process's Interrupted, RunEnds
    or EngineFault in all of them.

    Alone, the one would save a checkpoint while the others wait for its part of another exchange.
    """
    results = []
    ending: Exception | None = None
    try:
        results.append(work())
    except (Interrupted, RunEnds, EngineFault) as error:
        ending = error
    for found in gather(ending):
        if found is not None:
            found.__dict__["in_all"] = True
            raise found
    return results[0]


def in_all(error: BaseException | None) -> bool:
    """Return True if `together` raised an error, or the one that it stands for, in all processes:
    each of them ends by itself, after it has saved its part."""
    return error is not None and (hasattr(error, "in_all") or in_all(error.__context__))


def merge_metrics(metrics: Metrics, largest: Collection[str] = ()) -> Metrics:
    """Return the metrics of all processes: counts are added, rates averaged over the processes that
    have them, and of times and of what `largest` names the largest is taken."""
    parts = gather(metrics)
    combined = {}
    for name in sorted(set().union(*parts)):
        values = [part[name] for part in parts if name in part]
        if name in largest or name.startswith("time/"):
            combined[name] = max(values)
        else:
            combined[name] = sum(values) / (len(values) if name.endswith("_rate") else 1)
    return combined


def local(params: Any) -> Any:
    """Return arrays sharded over all processes as whole arrays on this process's first device."""
    if all(x.is_fully_addressable for x in jax.tree.leaves(params)):
        return params
    copied = _copying(jax.tree.leaves(params)[0].sharding.mesh)(params)
    return jax.tree.map(lambda x: x.addressable_data(0), copied)


@functools.cache  # a new function would be compiled again at every update
def _copying(mesh: jax.sharding.Mesh) -> Callable[[Any], Any]:
    """Return the program that copies arrays to all devices of a mesh."""
    replicated = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    return jax.jit(lambda x: x, out_shardings=replicated)
