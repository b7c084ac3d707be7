"""Values that follow from several keys of a config."""

from __future__ import annotations

from typing import Any

from evolver.config import plugs


def weight_dtype(config: Any) -> str:
    """Return the dtype in which the engine holds the policy's matrices."""
    return config.engine.weight_dtype or config.model.dtype


def originals_needed(config: Any) -> int:
    """Return the number of original tasks in a training step."""
    synthetic = (
        round(config.questioning.share * config.rollout.tasks) if config.questioning.enabled else 0
    )
    return config.rollout.tasks - synthetic


def replaces_outcome(config: Any) -> bool:
    """Return True if a judge scores attempts at synthetic tasks, False if the world does."""
    judge = plugs.load("questioning.judge", config.questioning.judge.name)
    return getattr(judge, "replaces_outcome", True)
