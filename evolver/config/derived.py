"""Values that follow from several keys of a config."""

from ml_collections import ConfigDict

from evolver.config import plugs


def weight_dtype(config: ConfigDict) -> str:
    """Return the dtype in which the engine holds the policy's matrices."""
    return config.engine.weight_dtype or config.model.dtype


def synthetic_tasks(config: ConfigDict) -> int:
    """Return the number of synthetic tasks in a training step."""
    share = config.questioning.share if config.questioning.enabled else 0
    return round(share * config.rollout.tasks)


def originals_needed(config: ConfigDict) -> int:
    """Return the number of original tasks in a training step."""
    return config.rollout.tasks - synthetic_tasks(config)


def replaces_outcome(config: ConfigDict) -> bool:
    """Return True if a judge scores attempts at synthetic tasks, False if the world does."""
    judge = plugs.load("questioning.judge", config.questioning.judge.name)
    return getattr(judge, "replaces_outcome", True)
