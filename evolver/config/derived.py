"""Values that follow from several keys of a config."""

import math

from ml_collections import ConfigDict

from envs.mixture import Mixture, problems
from evolver.config import plugs

MECHANISMS = ("questioning", "navigating", "attributing")


def mechanisms_of(config: ConfigDict) -> list[str]:
    """Return the names of the mechanisms that are switched on."""
    return [name for name in MECHANISMS if config[name].enabled]


def worlds(config: ConfigDict) -> dict[str, str]:
    """Return {the `env` of a world's tasks, as far as the config says it: the world's name}: of
    each world of a mixture, {} if there is something wrong with them, or of the one that there
    is."""
    if config.env.name != Mixture.name:
        return {config.env.name: config.env.name}
    given = config.env.args.to_dict().get("worlds")
    return {} if problems(given) else {name: own.get("name", name) for name, own in given.items()}


def mesh_devices(config: ConfigDict) -> int:
    """Return the number of devices that a run uses: those of its mesh."""
    return math.prod(config.mesh.values())


def xla_flags(config: ConfigDict, given: str = "") -> str:
    """Return XLA's flags for GPUs: those that are given, one that keeps what `model.remat` keeps,
    of which XLA would recompute some, and one by which several devices compute while they send.

    XLA sets the latter by itself for Hopper, not for Ampere: there, without it, work goes on during
    1 of the 29 collectives of an update of 14B (jax 0.10.2). Of the other flags that MaxText sets,
    those that change the compiled program recompute more or hold more (docs/decisions.md).
    """
    flags = {
        "--xla_disable_hlo_passes=rematerialization": config.model.remat in ("attention", "dots"),
        "--xla_gpu_enable_latency_hiding_scheduler=true": mesh_devices(config) > 1,
    }
    added = [flag for flag, wanted in flags.items() if wanted and flag.split("=")[0] not in given]
    return " ".join([*given.split(), *added])


def sleeps(config: ConfigDict) -> bool:
    """Return True if the engine's servers sleep during updates: those on the learner's devices."""
    vllm = config.engine.vllm
    return config.engine.name == "vllm" and vllm.sleep and not vllm.urls


def weight_dtype(config: ConfigDict) -> str:
    """Return the dtype in which the engine holds the policy's matrices."""
    return config.engine.weight_dtype or config.model.dtype


def updates_of_a_step(config: ConfigDict) -> int:
    """Return the updates that are planned for a step, which makes fewer where fewer groups have
    signal."""
    return config.learner.updates * config.learner.epochs


def updates(config: ConfigDict) -> int:
    """Return the number of updates that the run plans."""
    return config.steps * updates_of_a_step(config)


def warmup(config: ConfigDict) -> int:
    """Return the updates of the warm-up: those of the config, or half of a run that is not
    longer."""
    planned = updates(config)
    return config.optim.warmup if config.optim.warmup < planned else planned // 2


def synthetic_tasks(config: ConfigDict) -> int:
    """Return the number of synthetic tasks in a training step."""
    share = config.questioning.share if config.questioning.enabled else 0
    return round(share * config.rollout.tasks)


def originals_needed(config: ConfigDict) -> int:
    """Return the number of original tasks in a training step."""
    return config.rollout.tasks - synthetic_tasks(config)


def needs_reference(config: ConfigDict) -> bool:
    """Return True if the log-probabilities of a reference policy are needed: by a KL penalty, or by
    a loss or a recipe with the attribute `needs_reference`."""
    needed = [plugs.trait(config, key, "needs_reference") for key in ("loss", "recipe")]
    return bool(kl_coef(config)) or any(needed)


def kl_coef(config: ConfigDict) -> float:
    """Return the coefficient of the KL to the reference policy, which `loss.fast` leaves out."""
    return 0.0 if config.loss.fast else config.loss.kl_coef


def recomputed(config: ConfigDict) -> bool:
    """Return True if the learner computes the log-probabilities before an update, False if the
    engine's are taken."""
    return config.loss.old_logp == "recomputed" and not config.loss.fast


def networks(config: ConfigDict) -> int:
    """Return how many networks train: one, or two with a critic of its own."""
    return plugs.trait(config, "recipe", "networks", 1)


def replaces_outcome(config: ConfigDict) -> bool:
    """Return True if a judge scores attempts at synthetic tasks, False if the world does."""
    return plugs.trait(config, "questioning.judge", "replaces_outcome", True)
