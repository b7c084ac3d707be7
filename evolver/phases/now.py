"""The state of a run that is going on, in a file of the workdir that the view shows."""

import contextlib
import itertools
import json
import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax

from evolver.build import Run
from evolver.processes import hosts, server
from models.files import write_atomically

Figures = dict[str, Any]
EVERY = 5.0  # seconds between two writings
NVIDIA = (
    "nvidia-smi",
    "--query-gpu=index,memory.used,memory.total",
    "--format=csv,noheader,nounits",
)


@contextlib.contextmanager
def shown(run: Run) -> Iterator[None]:
    """Write what the run is doing to `now.json` every few seconds while the block lasts. Each
    process of a run has a file of its own."""
    path, ended, watch = run.workdir / hosts.own_name("now.json"), threading.Event(), Watch(run)

    def write() -> None:
        while True:
            # A full disk ends the run where it loses something. Other threads may add to what is
            # read: the next reading has it.
            with contextlib.suppress(OSError, RuntimeError):
                write_atomically(path, json.dumps(watch.figures()))
            if ended.wait(EVERY):
                return

    writer = threading.Thread(target=write, name="now", daemon=True)
    writer.start()
    try:
        yield
    finally:
        ended.set()
        writer.join()
        path.unlink(missing_ok=True)


class Watch:
    """Reads the figures of a run. Those that take a difference are since the last reading."""

    def __init__(self, run: Run):
        self.run = run
        self._before = time.monotonic(), self._generated()

    def figures(self) -> Figures:
        """Return the phase, servers, workers, queues, memory in bytes, speed and cost."""
        run, c = self.run, self.run.config
        (before, tokens), now = self._before, (time.monotonic(), self._generated())
        self._before = now
        engines = itertools.chain(*(engine.servers() for engine in run.engines))
        ledger = run.chat.ledger if run.chat else None
        return {
            "host": socket.gethostname(),
            "phase": run.progress.present(),
            "servers": [*engines, *(each.figures() for each in list(server.RUNNING))],
            "workers": {
                "mode": c.env.mode,
                "processes": c.env.workers,
                "episodes": run.worlds.lent,
            },
            "queues": self._queues(),
            "memory": memory(),
            "tokens_per_s": max(0.0, now[1] - tokens) / max(now[0] - before, 1e-3),
            "money": ledger.money if ledger else 0.0,
            "tokens": ledger.tokens if ledger else 0,
        }

    def _generated(self) -> float:
        counts = [engine.stats() for engine in self.run.engines]
        # of vLLM's, of ours
        return sum(c.get("tokens", 0.0) + c.get("decoded_tokens", 0.0) for c in counts)

    def _queues(self) -> list[Figures]:
        found = self.run.chat.queues() if self.run.chat else []
        if pipeline := self.run.pipeline:
            done, groups = pipeline.counts()
            found.append({"name": "groups ahead", "running": groups - done, "waiting": done})
        return found


def memory() -> list[Figures]:
    """Return the memory of each GPU of this machine, of all processes; without GPUs, that of the
    accelerators as JAX knows it, and of the host."""
    if shutil.which(NVIDIA[0]):
        with contextlib.suppress(OSError, subprocess.SubprocessError, ValueError):
            told = subprocess.run(NVIDIA, capture_output=True, text=True, timeout=10, check=True)
            rows = [map(int, line.split(",")) for line in told.stdout.splitlines()]
            return [
                {"name": f"GPU {n}", "used": used << 20, "of": of << 20} for n, used, of in rows
            ]
    found = []
    for device in jax.local_devices():
        if device.platform != "cpu" and (stats := device.memory_stats()):
            used, of = stats["bytes_in_use"], stats.get("bytes_limit", 0)
            found.append({"name": str(device), "used": used, "of": of})
    with contextlib.suppress(OSError, KeyError, ValueError):
        lines = map(str.split, Path("/proc/meminfo").read_text().splitlines())
        sizes = {name: int(number) << 10 for name, number, *_ in lines}
        of = sizes["MemTotal:"]
        found.append({"name": "host", "used": of - sizes["MemAvailable:"], "of": of})
    return found
