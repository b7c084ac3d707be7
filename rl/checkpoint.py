"""Checkpoints: one directory per step with the training state and a manifest, written by orbax in
the background.

A checkpoint exists once orbax has committed it, so a save that was killed or ran out of disk is
never visible. State, manifest and metric have checksums. A checkpoint that is damaged later is
detected by them (or because it fails to load) and moved aside with a warning, and the one before it
is used. A damaged metric costs only the rank among the best.
"""

import contextlib
import hashlib
import json
import logging
import shutil
import sys
import threading
import time
import zlib
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from jax.experimental import multihost_utils
from orbax.checkpoint.checkpoint_managers import preservation_policy

from envs.values import Json
from models.files import dumps

CHECKSUM_LIMIT = 1 << 30  # bytes; the checksums of larger states are computed on their devices

log = logging.getLogger(__name__)


class CheckpointError(Exception):
    """There are checkpoints but none can be read, one has another step's name, or the last save
    failed."""


class Checkpoints:
    """The checkpoints of one run: the last `keep`, the best by the metric given to `save`, and the
    milestones.

    The processes of a run share the directory and call each method together. `seconds` is the time
    that the last `save` blocked its caller, `failed` the number of failed saves.
    """

    def __init__(self, directory: str | Path, *, keep: int, milestones: int = 0):
        """`milestones`: steps between checkpoints that are kept for good; 0 = none."""
        policies = [
            preservation_policy.LatestN(keep),
            preservation_policy.BestN(
                get_metric_fn=lambda metrics: metrics["best"],
                n=1,
                keep_checkpoints_without_metrics=False,
            ),
        ]
        if milestones:
            policies.append(preservation_policy.EveryNSteps(milestones))
        self.directory = Path(directory).absolute()
        self.seconds, self.failed = 0.0, 0
        self._error = ""  # of the last save
        self._pending = -1  # the step being written, -1 = none
        self._stale = False  # the manager does not know which checkpoints there are
        _drop_damaged_metrics(self.directory)
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
        """Return the steps of the checkpoints, in order."""
        return sorted(self._manager.all_steps())

    def save(
        self,
        step: int,
        state: Any,
        manifest: Json,
        *,
        metric: float | None = None,
        replace: bool = False,
    ) -> None:
        """Write `state` (a pytree of arrays) and `manifest` (JSON, its lists also `Written`) as one
        unit, unless the step exists already.

        replace: write it again if it exists; the earlier one is deleted once the new one is on
        disk. Returns once the arrays are copied, so the caller may donate them. A save that fails
        is logged and counted and does not affect earlier checkpoints; `wait` raises if it was the
        last one.
        """
        began = time.monotonic()
        self._settle()
        if step in self._manager.all_steps() and not replace:
            return
        try:
            self._check_room(state)
            if step in self._manager.all_steps():
                self._move(step, self.directory / "replaced" / str(step))
            record = {"step": step, "checksums": checksums(state), "manifest": manifest}
            text = dumps(record)
            best = None
            if metric is not None:
                best = {"best": metric, "digest": _digest(repr(metric))}
            self._manager.save(
                step,
                args=ocp.args.Composite(
                    state=ocp.args.StandardSave(state),
                    manifest=ocp.args.JsonSave({"text": text, "digest": _digest(text)}),
                ),
                metrics=best,
            )
            self._pending = step
        # orbax and tensorstore have exceptions of their own for a full disk
        except Exception as error:
            self._fail(step, error)
        self.seconds = time.monotonic() - began

    def wait(self) -> None:
        """Wait until the last save is on disk. Raises CheckpointError if it failed."""
        self._settle()
        if self._error:
            raise CheckpointError(
                f"{self._error}; the last checkpoint is of step {max(self.steps(), default='none')}"
            )

    def restore(self, like: Any) -> tuple[int, Any, Json] | None:
        """Return (step, state, manifest) of the newest readable checkpoint, None if there are no
        checkpoints.

        `like` gives shapes, dtypes and shardings; the mesh may differ from the one at the time of
        saving. Newer checkpoints that are damaged are moved to `damaged/`. Raises CheckpointError
        if there are checkpoints and none can be read, because starting over would hide the problem;
        and for one that was renamed or copied to another step: only its owner knows what it should
        be.
        """
        self._settle()
        damaged: dict[int, str] = {}
        for step in reversed(self.steps()):
            reason, saved = "", step
            try:
                state, manifest, saved = self._load(step, like)
            # whatever the damage is, an older checkpoint may be readable
            except Exception as error:
                reason = _reason(error)
            if not _all_agree(saved == step):
                raise CheckpointError(
                    f"{self.directory / str(step)} holds the checkpoint of step {saved}: give it"
                    " back its name, or remove it"
                )
            if _all_agree(not reason):
                for bad, why in damaged.items():
                    aside = self._set_aside(bad)
                    log.warning("checkpoint %d is damaged (%s): moved to %s", bad, why, aside)
                return step, state, manifest
            damaged[step] = reason or "another process cannot read it"
        if damaged:
            reasons = "; ".join(f"step {step}: {reason}" for step, reason in damaged.items())
            raise CheckpointError(
                f"no checkpoint in {self.directory} can be read ({reasons}); remove it to start"
                " over"
            )
        return None

    def close(self) -> None:
        """Wait for the last save and release the directory."""
        self._settle()
        self._manager.close()

    def _settle(self) -> None:
        """Wait for the save in the background and record its error, if any."""
        try:
            self._manager.wait_until_finished()
        except Exception as error:
            self._fail(self._pending, error)
        else:
            self._error = "" if self._pending >= 0 else self._error
        self._pending = -1
        if self._stale:
            self._look()
        self._end_replacing()

    def _fail(self, step: int, error: Exception) -> None:
        self.failed += 1
        self._error = f"the checkpoint of step {step} was not written: {_reason(error)}"
        log.warning("%s; earlier checkpoints are not affected", self._error)
        if jax.process_count() == 1:  # else other processes may still write their part
            _end_waiting()
        self._stale = True
        self._look()

    def _look(self) -> None:
        """Ask the directory again which checkpoints there are, now or, where no file can be opened,
        the next time."""
        with contextlib.suppress(OSError):
            self._manager.reload()
            self._stale = False

    def _check_room(self, state: Any) -> None:
        needed = sum(x.nbytes for x in jax.tree.leaves(state))
        free = shutil.disk_usage(self.directory).free
        if needed > free:
            raise OSError(
                f"it needs {needed / 1e9:.3g} GB and {self.directory} has {free / 1e9:.3g} GB left"
            )

    def _load(self, step: int, like: Any) -> tuple[Any, Json, int]:
        """Return (state, manifest, the step that it was saved as). Raises ValueError, or what orbax
        raises, if it is damaged."""
        args = ocp.args.Composite(
            state=ocp.args.StandardRestore(like), manifest=ocp.args.JsonRestore()
        )
        loaded = self._manager.restore(step, args=args)
        text = loaded["manifest"].get("text", "")
        if _digest(text) != loaded["manifest"].get("digest"):
            raise ValueError("the checksum of the manifest differs")
        record = json.loads(text)
        expected, actual = record["checksums"], checksums(loaded["state"])
        wrong = sorted(name for name in actual if expected.get(name) != actual[name])
        if wrong:
            raise ValueError(f"checksum of {', '.join(wrong[:3])} differs")
        return loaded["state"], record["manifest"], record["step"]

    def _set_aside(self, step: int) -> Path:
        aside = self.directory / "damaged" / str(step)
        while aside.exists():
            aside = aside.with_name(aside.name + "_")
        _all_agree(True)  # no process renames before the others have looked
        self._move(step, aside)
        return aside

    def _move(self, step: int, target: Path) -> None:
        if not jax.process_index():
            target.parent.mkdir(exist_ok=True)
            (self.directory / str(step)).rename(target)
        _all_agree(True)
        self._manager.reload()

    def _end_replacing(self) -> None:
        """Delete checkpoints that were replaced, and put back those whose successor was not
        written."""
        folder = self.directory / "replaced"
        replaced = [] if jax.process_index() else sorted(folder.glob("*"))
        for path in replaced:
            if (self.directory / path.name).exists():
                shutil.rmtree(path)
            else:
                path.rename(self.directory / path.name)
        if not _all_agree(not replaced):
            self._manager.reload()


def _end_waiting() -> None:
    """End the threads of a save that failed. Each waits five minutes for a signal that nobody sends
    any more, and Python waits for them at its exit: orbax has no public way to wake them."""
    # A version of orbax that lacks these names ends its threads when their time is up.
    with contextlib.suppress(ImportError, AttributeError):
        from orbax.checkpoint._src.futures import future

        for thread in threading.enumerate():
            if isinstance(thread, future._SignalingThread):
                thread.cancel()
                operation = thread._operation_id
                future.set_signals(thread._receive_signals, operation_id=operation)


def report_once() -> None:
    """Leave it to `Checkpoints` to report a save that has failed: orbax and tensorstore would print
    a traceback for each array."""
    sys.unraisablehook = unraisablehook
    logging.getLogger("asyncio").addFilter(lambda record: "orbax" not in record.getMessage())


def unraisablehook(report: Any) -> None:
    """A `sys.unraisablehook` that drops what tensorstore raises to nobody when a save has
    failed."""
    error = report.exc_value
    late = isinstance(error, RuntimeError) and str(error) == "Event loop is closed"
    # Python's own reports name the object that was at work
    if not late or report.object is not None:
        sys.__unraisablehook__(report)


def checksums(state: Any) -> dict[str, int]:
    """Return {path: 32-bit checksum} of the arrays of a pytree. It depends on the values alone, not
    on the mesh or the number of processes.

    A small state gets CRC-32, for which every process gathers one array at a time. Otherwise it is
    a position-weighted integer sum, computed on the devices: hashing 100 GB on the host would take
    longer than writing them.
    """
    leaves = jax.tree_util.tree_flatten_with_path(state)[0]
    checksum = _crc if sum(x.nbytes for _, x in leaves) <= CHECKSUM_LIMIT else _weighted_sum
    return {jax.tree_util.keystr(path): checksum(x) for path, x in leaves}


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _drop_damaged_metrics(directory: Path) -> None:
    """Delete the metric files that cannot be trusted: orbax reads those of all checkpoints before
    it opens any."""
    for path in [] if jax.process_index() else directory.glob("*/metrics/metrics"):
        try:
            record = json.loads(path.read_bytes())
            if record["digest"] == _digest(repr(record["best"])):
                continue
        except (ValueError, KeyError, TypeError, RecursionError):
            pass
        log.warning(
            "the metric of checkpoint %s is damaged: it no longer counts as the best",
            path.parts[-3],
        )
        path.unlink()
    _all_agree(True)


def _crc(x: jax.Array) -> int:
    if not x.is_fully_addressable:
        x = multihost_utils.process_allgather(_on_device(x), tiled=True)
    return zlib.crc32(np.ascontiguousarray(x).view(np.uint8).data)


def _weighted_sum(x: jax.Array) -> int:
    total = _sum_on_device(_on_device(x))
    return int(np.asarray(total.addressable_data(0)))


def _on_device(x: jax.Array) -> jax.Array:
    pinned = x.sharding.memory_kind == "pinned_host"
    return jax.device_put(x, x.sharding.with_memory_kind("device")) if pinned else x


@jax.jit
def _sum_on_device(x: jax.Array) -> jax.Array:
    """Return the sum of (2 i + 1) times the bits of element i, modulo 2^32: exact in any order of
    summation."""
    kind = {2: jnp.uint16, 4: jnp.uint32}[x.dtype.itemsize]
    bits = jax.lax.bitcast_convert_type(x, kind).astype(jnp.uint32)
    return jnp.sum(bits * (2 * places(x.shape) + 1), dtype=jnp.uint32)


def places(shape: tuple[int, ...]) -> jax.Array:
    """Return the place of each entry of an array of this shape, modulo 2^32, as uint32."""
    place = jnp.zeros(shape, jnp.uint32)
    for axis, length in enumerate(shape):
        index = jax.lax.broadcasted_iota(jnp.uint32, shape, axis)
        place = place * np.uint32(length) + index
    return place


def _all_agree(mine: bool) -> bool:
    """Return True if `mine` is True in every process. The processes wait for each other."""
    if jax.process_count() == 1:
        return mine
    return bool(np.all(multihost_utils.process_allgather(np.array([mine]))))


def _reason(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0][:200]
