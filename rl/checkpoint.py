"""Checkpoints: one directory per step with the training state and one manifest, written by orbax.

A checkpoint exists once orbax has committed it, so a save that was killed half-way is never seen. One that was
damaged afterwards is found by its checksums (or by failing to load), set aside with a warning, and the one before it
is used.
"""

from __future__ import annotations

import json
import logging
import zlib
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from orbax.checkpoint.checkpoint_managers import preservation_policy

CHECKSUM_LIMIT = 1 << 30  # bytes; beyond this, hashing the state would cost more than it is worth on every save

log = logging.getLogger(__name__)


class CheckpointError(Exception):
    """There are checkpoints, and none of them can be read."""


class Checkpoints:
    """The checkpoints of one run: the last `keep`, and the best by the metric given to `save`."""

    def __init__(self, directory: str | Path, *, keep: int = 2, keep_best: bool = True):
        policies = [preservation_policy.LatestN(keep)]
        if keep_best:
            policies.append(
                preservation_policy.BestN(
                    get_metric_fn=lambda metrics: metrics["best"], n=1, keep_checkpoints_without_metrics=False
                )
            )
        self.directory = Path(directory).absolute()
        self._manager = ocp.CheckpointManager(
            self.directory,
            item_names=("state", "manifest"),
            options=ocp.CheckpointManagerOptions(
                preservation_policy=preservation_policy.AnyPreservationPolicy(policies),
                best_fn=lambda metrics: metrics["best"],
                cleanup_tmp_directories=True,
                enable_async_checkpointing=False,
            ),
        )

    def steps(self) -> list[int]:
        return sorted(self._manager.all_steps())

    def save(self, step: int, state: Any, manifest: dict[str, Any], *, metric: float | None = None) -> None:
        """Write `state` (a pytree of arrays) and `manifest` (JSON) as one unit; a step that exists is left alone."""
        if step in self._manager.all_steps():
            return
        self._manager.save(
            step,
            args=ocp.args.Composite(
                state=ocp.args.StandardSave(state),
                manifest=ocp.args.JsonSave({"checksums": checksums(state), "manifest": json.dumps(manifest)}),
            ),
            metrics=None if metric is None else {"best": float(metric)},
        )

    def restore(self, like: Any) -> tuple[int, Any, dict[str, Any]] | None:
        """(step, state, manifest) of the newest sound checkpoint; None when there is none at all.

        `like` gives shapes, dtypes and shardings. Damaged ones that are newer are moved to `damaged/`. Raises
        `CheckpointError` when there are checkpoints and none can be read: starting over would hide what is wrong.
        """
        damaged: dict[int, str] = {}
        for step in reversed(self.steps()):
            try:
                state, manifest = self._load(step, like)
            except Exception as error:  # whatever is wrong with it, an older one may be sound
                damaged[step] = (str(error).strip() or type(error).__name__).splitlines()[0][:200]
                continue
            for bad, reason in damaged.items():
                log.warning("checkpoint %d is damaged (%s): moved to %s", bad, reason, self._set_aside(bad))
            return step, state, manifest
        if damaged:
            reasons = "; ".join(f"step {step}: {reason}" for step, reason in damaged.items())
            raise CheckpointError(f"no checkpoint in {self.directory} can be read ({reasons}); remove it to start over")
        return None

    def close(self) -> None:
        self._manager.close()

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
        aside.parent.mkdir(exist_ok=True)
        while aside.exists():
            aside = aside.with_name(aside.name + "_")
        (self.directory / str(step)).rename(aside)
        self._manager.reload()
        return aside


def checksums(state: Any) -> dict[str, int]:
    """CRC-32 of each array by its path; {} when the state is too large or spread over several processes."""
    leaves = jax.tree_util.tree_flatten_with_path(state)[0]
    if sum(x.nbytes for _, x in leaves) > CHECKSUM_LIMIT or not all(x.is_fully_addressable for _, x in leaves):
        return {}
    return {jax.tree_util.keystr(path): zlib.crc32(np.ascontiguousarray(x).view(np.uint8)) for path, x in leaves}
