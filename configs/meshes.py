"""Meshes by number of devices, as starting points. `--mode=plan` says if one of them fits a run.

meshes.use(config, 16)
"""

from ml_collections import ConfigDict

# Weights are spread over all devices of a fast interconnect first (fsdp). Beyond eight devices,
# heads are split in two, so that a device gets more than one row's worth of work; beyond sixteen,
# long rows are cut as well.
MESHES = {
    1: {"data": 1, "fsdp": 1, "tensor": 1, "sequence": 1},
    8: {"data": 1, "fsdp": 8, "tensor": 1, "sequence": 1},
    16: {"data": 1, "fsdp": 8, "tensor": 2, "sequence": 1},
    64: {"data": 2, "fsdp": 8, "tensor": 2, "sequence": 2},
}


def use(config: ConfigDict, devices: int) -> ConfigDict:
    """Set the mesh for that many devices, and round `learner.micro` up to a multiple of the devices
    that split rows.

    Raises ValueError for a number without a mesh.
    """
    if devices not in MESHES:
        raise ValueError(
            f"no mesh for {devices} devices; there is one for {', '.join(map(str, MESHES))}"
        )
    config.mesh.update(MESHES[devices])
    spread = config.mesh.data * config.mesh.fsdp
    config.learner.micro = -(-config.learner.micro // spread) * spread
    return config
