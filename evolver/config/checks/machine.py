"""Checks of what this machine has: packages, files, kernels and devices."""

import shutil
from collections.abc import Iterator
from typing import Any

from ml_collections import ConfigDict

from envs.packages import how_to_install, is_missing
from evolver.config.derived import mesh_devices
from evolver.config.paths import model_folder, resolve
from evolver.llm.questions import SERVED

# The backend that a kernel of `model.attention` is for; the others run on any.
KERNELS = {"cudnn": "gpu", "cudnn_apart": "gpu", "cudnn_packed": "gpu", "splash": "tpu"}


def install_problems(config: ConfigDict, mode: str) -> Iterator[str]:
    """Yield packages, files and devices that this machine lacks; nothing for a plan, which is for
    another machine."""
    if mode == "plan":
        return
    wanted = {"wandb": config.log.wandb != "off", "tensorboardX": config.log.tensorboard}
    for package in filter(wanted.get, wanted):
        if is_missing(package):
            how = how_to_install(package.lower().removesuffix("x"))
            yield f"config.log needs {package}, which is not installed: {how}"
    if config.env.url == SERVED and is_missing("starlette"):
        yield f"config.env.url={SERVED} needs starlette: {how_to_install('service')}"
    pool = config.navigating.pool
    python = config.env.python
    if pool and not resolve(pool).is_dir():
        yield f"config.navigating.pool={pool}: there is no such directory"
    if python and not (resolve(python).exists() or shutil.which(python)):
        yield f"config.env.python={python}: there is no such program"
    attention = config.model.attention
    kernel = KERNELS.get(attention)
    devices = mesh_devices(config)
    if not kernel and (devices == 1 or config.hosts.count != 1):
        return
    import jax

    from models.attention import packs

    if kernel and jax.default_backend() != kernel:
        yield (
            f"config.model.attention={attention} needs a {kernel.upper()}, but jax sees a"
            f" {jax.default_backend().upper()}: 'auto' picks a kernel for the device"
        )
    elif attention == "cudnn_packed" and not packs(jax.devices()[0]):
        yield (
            "config.model.attention=cudnn_packed needs a Hopper GPU or a later one, and jax 0.11.1"
            f" or later (this is {jax.__version__}): 'auto' picks a kernel for the device"
        )
    if config.hosts.count == 1 and devices > jax.device_count():
        axes = " * ".join(f"{axis}={size}" for axis, size in config.mesh.items())
        yield f"config.mesh needs {axes} = {devices} devices; jax sees {jax.device_count()}"


def mesh_problems(config: ConfigDict) -> Iterator[str]:
    """Yield why the mesh cannot be used: it does not divide the model or a row, or the sharding
    rules are wrong."""
    known = True
    for name, rule in config.sharding.items():
        for axis in rule.split(","):
            if axis and axis not in config.mesh:
                known = False
                yield (
                    f"config.sharding.{name}={rule}: {axis} is not a mesh axis; the axes are"
                    f" {', '.join(config.mesh)}"
                )
    if not known or mesh_devices(config) == 1:
        return
    learner = config.learner
    pieces = config.mesh.sequence
    if learner.widths > 1 and pieces > 1:
        yield (
            f"config.learner.widths={learner.widths} trims rows to their tokens, which"
            f" config.mesh.sequence={pieces} spreads over devices: set one of them to 1"
        )
    if learner.row % pieces:
        yield (
            f"config.learner.row={learner.row} tokens cannot be split into"
            f" config.mesh.sequence={pieces} pieces: make it a multiple"
        )
    from models import hf, qwen

    try:
        path = config.model.path
        shape = hf.config_of(model_folder(path)) if path else qwen.PRESETS[config.model.preset]
    except (OSError, ValueError):
        return  # a problem of the model, which model_problems reports
    if error := mesh_error(config, shape):
        yield f"config.mesh: {error}"


def mesh_error(config: ConfigDict, shape: Any) -> str:
    """Return why a model of this shape, a `qwen.Config`, cannot be spread over the config's mesh by
    its sharding rules; "" if it can."""
    from jax.sharding import AbstractMesh

    from models import mesh, qwen

    sizes = tuple(config.mesh[axis] for axis in mesh.AXES)
    weights = qwen.weights(shape)
    over = AbstractMesh(sizes, mesh.AXES)
    try:
        mesh.places(weights, over, config.sharding.to_dict())
    except mesh.MeshError as error:
        return str(error)
    return ""
