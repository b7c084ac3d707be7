"""Meshes by number of devices, as starting points. `--mode=plan` says if one of them fits a run.

meshes.use(config, 16)
"""

from ml_collections import ConfigDict

# Weights are spread over all devices of a fast interconnect first (fsdp). Beyond eight devices,
# heads are split in two, so that a device gets more than one row's worth of work; beyond sixteen,
# long rows are cut as well.
AXES = ("data", "fsdp", "tensor", "sequence")
MESHES = {1: (1, 1, 1, 1), 8: (1, 8, 1, 1), 16: (1, 8, 2, 1), 64: (2, 8, 2, 2)}


def use(config: ConfigDict, devices: int) -> ConfigDict:
    """Set the mesh for that many devices, and round `learner.micro` up to a multiple of the devices
    that split rows.

    Raises ValueError for a number without a mesh.
    """
    if devices not in MESHES:
        raise ValueError(
            f"no mesh for {devices} devices; there is one for {', '.join(map(str, MESHES))}"
        )
    config.mesh.update(dict(zip(AXES, MESHES[devices])))
    spread = config.mesh.data * config.mesh.fsdp
    config.learner.micro = -(-config.learner.micro // spread) * spread
    return config
