"""The keys of the mesh, and meshes by number of devices, as starting points. `--mode=plan` says if
one of them fits a run.

meshes.use(config, 16)
"""

from ml_collections import ConfigDict

from configs.keys import Group, Many


class Mesh(Group):
    """Devices along each mesh axis; their product is the number of devices used. MESHES has
    presets."""

    data: Many = 1
    """Splits rows; weights are replicated."""
    fsdp: Many = 1
    """Splits rows and weights."""
    tensor: Many = 1
    """Splits heads and hidden units."""
    sequence: Many = 1
    """Splits the tokens of a row."""


class Sharding(Group):
    """Mesh axes that split each axis of the weights: "" = none, or several: "fsdp,sequence"."""

    vocab: str = "tensor"
    """Of the embedding and the output head."""
    embed: str = "fsdp,sequence"
    """The model's width."""
    heads: str = "tensor"
    """Query heads."""
    kv_heads: str = "tensor"
    """Key and value heads."""
    mlp: str = "tensor"
    """Hidden units."""
    layers: str = ""
    """Layers, which are scanned."""
    rank: str = ""
    """Rank of adapters."""


# Weights are spread over all devices of a fast interconnect first (fsdp). Beyond eight devices,
# heads are split in two, so that a device gets more than one row's worth of work; beyond sixteen,
# long rows are cut as well.
MESHES = {
    1: Mesh(),
    8: Mesh(fsdp=8),
    16: Mesh(fsdp=8, tensor=2),
    64: Mesh(data=2, fsdp=8, tensor=2, sequence=2),
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
    mesh = MESHES[devices]
    config.mesh.update(mesh.model_dump())
    spread = mesh.data * mesh.fsdp
    config.learner.micro = -(-config.learner.micro // spread) * spread
    return config
