"""The device mesh, and the sharding of each weight on it.

Each weight names its logical axes (models/qwen.py); a table of rules maps them to mesh axes. All
axes are of type Auto: shardings are given where arrays enter and leave `jit`, and the compiler
derives the others.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from jax import Array
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from models import qwen

# data: each device has a whole copy of the model and its own rows. fsdp: like data, but the weights
# are sharded and gathered when used. tensor: splits heads, feed-forward and vocabulary; needs a
# fast interconnect. sequence: splits the tokens of long rows.
AXES = ("data", "fsdp", "tensor", "sequence")
# The mesh axes that split each logical axis: none (""), one, or several ("fsdp,sequence"). Weights
# are sharded over the sequence axis too; otherwise each piece of a row would need a whole copy of
# the model.
RULES = {
    "vocab": "tensor",
    "embed": "fsdp,sequence",
    "heads": "tensor",
    "kv_heads": "tensor",
    "mlp": "tensor",
    "layers": "",
    "rank": "",
}


class MeshError(ValueError):
    """A mesh that does not fit the devices or does not divide the model."""


def make_mesh(shape: Mapping[str, int]) -> Mesh:
    """Return a mesh with the axes of `AXES`. Omitted axes have size 1; one axis of size -1 takes
    the remaining devices.

    If the mesh needs fewer devices than there are, it uses the first ones. Raises MeshError.
    """
    unknown = sorted(set(shape) - set(AXES))
    if unknown:
        raise MeshError(f"unknown mesh axis {', '.join(unknown)}; the axes are {', '.join(AXES)}")
    sizes = [shape.get(axis, 1) for axis in AXES]
    text = " x ".join(f"{axis}={size}" for axis, size in zip(AXES, sizes))
    if any(size < 1 and size != -1 for size in sizes) or sizes.count(-1) > 1:
        raise MeshError(
            f"mesh {text}: sizes are positive, and at most one is -1 (the remaining devices)"
        )
    devices = jax.devices()
    named = abs(math.prod(sizes))
    if -1 in sizes:
        if len(devices) % named:
            raise MeshError(f"mesh {text}: {named} does not divide the {len(devices)} devices")
        sizes[sizes.index(-1)] = len(devices) // named
    needed = math.prod(sizes)
    if needed > len(devices):
        raise MeshError(f"mesh {text} needs {needed} devices; there are {len(devices)}")
    if needed < len(devices) and jax.process_count() > 1:
        raise MeshError(
            f"mesh {text} uses {needed} of {len(devices)} devices; a run on several hosts must use"
            " all devices"
        )
    return jax.make_mesh(
        tuple(sizes), AXES, axis_types=(AxisType.Auto,) * len(AXES), devices=devices[:needed]
    )


def places(weights: Any, mesh: Mesh | AbstractMesh, rules: Mapping[str, str] = RULES) -> Any:
    """Return a NamedSharding for each `Weight` of a tree, such as `qwen.weights` returns. Raises
    MeshError naming every axis that cannot be split."""
    declared = jax.tree.leaves(weights)
    pairs = list(itertools.chain.from_iterable(zip(w.axes, w.shape) for w in declared))
    split = {axis: _split(axis, mesh, rules) for axis, _ in pairs}
    problems: dict[str, None] = {}
    for axis, size in pairs:
        if size % math.prod(mesh.shape[over] for over in split[axis]):
            over = " * ".join(f"{over}={mesh.shape[over]}" for over in split[axis])
            problems[f"{over} does not divide {axis}={size}"] = None
    for weight, over in itertools.product(declared, AXES):
        axes = [axis for axis in weight.axes if over in split[axis]]
        if sum(split[axis].count(over) for axis in axes) > 1:
            problems[f"{over} would split two axes of one weight, {' and '.join(axes)}"] = None
    if problems:
        raise MeshError("the mesh does not divide the model: " + "; ".join(problems))

    def place(weight: qwen.Weight) -> NamedSharding:
        spec = (split[axis] for axis in weight.axes)
        return NamedSharding(
            mesh, PartitionSpec(*(over[0] if len(over) == 1 else over or None for over in spec))
        )

    return jax.tree.map(place, weights)


def _split(
    axis: str | None, mesh: Mesh | AbstractMesh, rules: Mapping[str, str]
) -> tuple[str, ...]:
    """Return the mesh axes of more than one device that split a logical axis. Raises MeshError."""
    rule = rules.get(axis or "", "")
    named = [over for over in rule.split(",") if over]
    unknown = [over for over in named if over not in AXES]
    if unknown:
        raise MeshError(
            f"rule {axis}={rule!r}: {', '.join(unknown)} is not a mesh axis; the axes are"
            f" {', '.join(AXES)}"
        )
    return tuple(over for over in named if mesh.shape.get(over, 1) > 1)


def put(tree: Any, where: Any) -> Any:
    """Place arrays with the shardings in `where`. Every process passes the same arrays and uploads
    its own slices."""

    def put_one(x: Any, sharding: NamedSharding) -> Array:
        if jax.process_count() == 1 or getattr(x, "sharding", None) == sharding:
            return jax.device_put(x, sharding)
        x = np.asarray(x)
        return jax.make_array_from_callback(x.shape, sharding, lambda index: x[index])

    return jax.tree.map(put_one, tree, where)


def rows(mesh: Mesh) -> NamedSharding:
    """Return the sharding of packed rows (R, T): rows over data and fsdp, tokens over sequence."""
    return NamedSharding(mesh, PartitionSpec(("data", "fsdp"), "sequence"))
