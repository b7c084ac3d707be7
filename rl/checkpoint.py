"""Checkpoints: one directory per step with the training state and one manifest, written by orbax in the background.

A checkpoint exists once orbax has committed it, so a save that was killed half-way, or that found no room, is never
seen. One that was damaged afterwards is found by its checksums (or by failing to load), set aside with a warning, and
the one before it is used.
"""

from __future__ import annotations

import json
import logging
import shutil
import time
import zlib
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from orbax.checkpoint.checkpoint_managers import preservation_policy

CHECKSUM_LIMIT = 1 << 30  # bytes; larger states are summed on their devices

log = logging.getLogger(__name__)


class CheckpointError(Exception):
    """There are checkpoints, and none of them can be read; or the last save failed."""


class Checkpoints:
    """The checkpoints of one run: the last `keep`, the best by the metric given to `save`, and one in `every` steps.

    The processes of a run share the directory, and call each method together. Attributes: `seconds`, for how long the
    last `save` kept its caller waiting; `failed`, saves that came to nothing.
    """

    def __init__(self, directory: str | Path, *, keep: int = 2, keep_best: bool = True, every: int = 0):
        policies = [preservation_policy.LatestN(keep)]
        if keep_best:
            policies.append(
                preservation_policy.BestN(
                    get_metric_fn=lambda metrics: metrics["best"], n=1, keep_checkpoints_without_metrics=False
                )
            )
        if every:
            policies.append(preservation_policy.EveryNSteps(every))
        self.directory = Path(directory).absolute()
        self.seconds, self.failed = 0.0, 0
        self._error, self._pending = "", -1  # of the last save; the step being written
        self._manager = ocp.CheckpointManager(
            self.directory,
            item_names=("state", "manifest"),
            options=ocp.CheckpointManagerOptions(
                preservation_policy=preservation_policy.AnyPreservationPolicy(policies),
                best_fn=lambda metrics: metrics["best"],
                cleanup_tmp_directories=True,
                enable_async_checkpointing=True,
            ),
        )

    def steps(self) -> list[int]:
        return sorted(self._manager.all_steps())

    def save(self, step: int, state: Any, manifest: dict[str, Any], *, metric: float | None = None) -> None:
        """Write `state` (a pytree of arrays) and `manifest` (JSON) as one unit; a step that exists is left alone.

        Returns once the arrays are copied; they may then be changed or given away. A save that fails is logged and
        counted, and leaves those before it as they are: `wait` raises if it was the last one.
        """
        began = time.monotonic()
        self._settle()
        if step in self._manager.all_steps():
            return
        try:
            self._check_room(state)
            self._manager.save(
                step,
                args=ocp.args.Composite(
                    state=ocp.args.StandardSave(state),
                    manifest=ocp.args.JsonSave({"checksums": checksums(state), "manifest": json.dumps(manifest)}),
                ),
                metrics=None if metric is None else {"best": float(metric)},
            )
            self._pending = step
        except Exception as error:  # orbax and tensorstore have their own kinds for a full disk
            self._fail(step, error)
        self.seconds = time.monotonic() - began

    def wait(self) -> None:
        """Until what is being written is on disk. Raises CheckpointError if the last save failed."""
        self._settle()
        if self._error:
            raise CheckpointError(f"{self._error}; the last checkpoint is of step {max(self.steps(), default='none')}")

    def restore(self, like: Any) -> tuple[int, Any, dict[str, Any]] | None:
        """(step, state, manifest) of the newest sound checkpoint; None when there is none at all.

        `like` gives shapes, dtypes and shardings, which may be those of another mesh than the one it was saved from.
        Damaged ones that are newer are moved to `damaged/`. Raises `CheckpointError` when there are checkpoints and
        none can be read: starting over would hide what is wrong.
        """
        self._settle()
        damaged: dict[int, str] = {}
        for step in reversed(self.steps()):
            reason, found = "", None
            try:
                found = self._load(step, like)
            except Exception as error:  # whatever is wrong with it, an older one may be sound
                reason = _reason(error)
            if not _all_agree(found is not None):
                damaged[step] = reason or "another process cannot read it"
                continue
            for bad, reason in damaged.items():
                log.warning("checkpoint %d is damaged (%s): moved to %s", bad, reason, self._set_aside(bad))
            return step, *found
        if damaged:
            reasons = "; ".join(f"step {step}: {reason}" for step, reason in damaged.items())
            raise CheckpointError(f"no checkpoint in {self.directory} can be read ({reasons}); remove it to start over")
        return None

    def close(self) -> None:
        """Wait for what is being written, and let go of the directory."""
        self._settle()
        self._manager.close()

    def _settle(self) -> None:
        """Wait for the save in the background, and note how it ended."""
        try:
            self._manager.wait_until_finished()
        except Exception as error:
            self._fail(self._pending, error)
        else:
            self._error = "" if self._pending >= 0 else self._error
        self._pending = -1

    def _fail(self, step: int, error: Exception) -> None:
        self.failed += 1
        self._error = f"the checkpoint of step {step} was not written: {_reason(error)}"
        log.warning("%s; those before it are unharmed", self._error)
        self._manager.reload()

    def _check_room(self, state: Any) -> None:
        needed = sum(x.nbytes for x in jax.tree.leaves(state))
        free = shutil.disk_usage(self.directory).free
        if needed > free:
            raise OSError(f"it takes {needed / 1e9:.3g} GB, and {self.directory} has {free / 1e9:.3g} GB left")

    def _load(self, step: int, like: Any) -> tuple[Any, dict[str, Any]]:
        target = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), like)
        args = ocp.args.Composite(state=ocp.args.StandardRestore(target), manifest=ocp.args.JsonRestore())
        loaded = self._manager.restore(step, args=args)
        expected, found = loaded["manifest"]["checksums"], checksums(loaded["state"])
        wrong = sorted(name for name in found if expected.get(name) != found[name])
        if wrong:
            raise ValueError(f"checksum of {', '.join(wrong[:3])} differs")
        return loaded["state"], json.loads(loaded["manifest"]["manifest"])

    def _set_aside(self, step: int) -> Path:
        aside = self.directory / "damaged" / str(step)
        if not jax.process_index():
            aside.parent.mkdir(exist_ok=True)
            while aside.exists():
                aside = aside.with_name(aside.name + "_")
            (self.directory / str(step)).rename(aside)
        _all_agree(True)
        self._manager.reload()
        return aside


def checksums(state: Any) -> dict[str, int]:
    """A 32-bit sum of each array by its path; it does not depend on how the array is sharded.

    CRC-32 of what one process holds and is small; else an integer sum in which each number counts by its place, on the
    devices: hashing 100 GB on the host would take longer than writing them.
    """
    leaves = jax.tree_util.tree_flatten_with_path(state)[0]
    small = sum(x.nbytes for _, x in leaves) <= CHECKSUM_LIMIT and all(x.is_fully_addressable for _, x in leaves)
    one = _crc if small else _place_sum
    return {jax.tree_util.keystr(path): one(x) for path, x in leaves}


def _crc(x: jax.Array) -> int:
    return zlib.crc32(np.ascontiguousarray(x).view(np.uint8))


def _place_sum(x: jax.Array) -> int:
    if x.sharding.memory_kind == "pinned_host":
        x = jax.device_put(x, x.sharding.with_memory_kind("device"))
    total = _summed(x)
    return int(np.asarray(total.addressable_data(0)))


@jax.jit
def _summed(x: jax.Array) -> jax.Array:
    """The sum of (2 i + 1) times the bits of number i, modulo 2^32: exact in any order."""
    bits = jax.lax.bitcast_convert_type(x, {2: jnp.uint16, 4: jnp.uint32}[x.dtype.itemsize]).astype(jnp.uint32)
    place, stride = jnp.zeros(x.shape, jnp.uint32), 1
    for axis in reversed(range(x.ndim)):
        place += jax.lax.broadcasted_iota(jnp.uint32, x.shape, axis) * jnp.uint32(stride % (1 << 32))
        stride *= x.shape[axis]
    return jnp.sum(bits * (2 * place + 1), dtype=jnp.uint32)


def _all_agree(mine: bool) -> bool:
    """Whether it is so in every process; they wait for each other."""
    if jax.process_count() == 1:
        return mine
    from jax.experimental import multihost_utils

    return bool(np.all(multihost_utils.process_allgather(np.array([mine]))))


def _reason(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0][:200]
