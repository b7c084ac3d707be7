"""Compile the programs of a run for another machine, from shapes alone.

    python -m evolver.plan.programs < job.json        # started by `evolver.plan.compilers`, in a plan environment

The job is {"config": ..., "target": "h100:8", "phases": [...], "slots": n, "micro_batches": m}; the
last line of the
output is the result as JSON. The programs are those that a run executes: the update and the
log-probabilities of `evolver.learner`, and the prefill and decode steps of the JAX engine. They are
compiled for the target's devices.
"""

from __future__ import annotations

import json
import resource
import sys
import time
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import topologies
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding
from ml_collections import ConfigDict

from evolver import learner as parts
from evolver import plan
from evolver.config.derived import weight_dtype
from evolver.plan import hlo, targets
from models import mesh as meshes
from models import qwen
from rl import learner
from rl.engines.jax import decoding
from rl.packing import Packed


def devices_of(target: targets.Target) -> list[Any]:
    """Return descriptions of the target's devices, for which jax can compile but not run
    programs."""
    if target.chip.platform == "tpu":
        name = targets.TPU_TOPOLOGIES[target.chip.name][target.count]
        return list(topologies.get_topology_desc(platform="tpu", topology_name=name).devices)
    topology = targets.gpu_topology(target.count)
    described = targets.gpu_description(target.chip)
    return list(
        topologies.get_topology_desc(
            platform="cuda", target_config=described, topology=topology
        ).devices
    )


def mesh_of(config: Any, devices: list[Any]) -> Mesh:
    """Return the config's mesh over these devices."""
    sizes = [config.mesh.get(axis, 1) for axis in meshes.AXES]
    return Mesh(
        np.array(devices).reshape(sizes), meshes.AXES, axis_types=(AxisType.Auto,) * len(sizes)
    )


def placed(tree: Any, where: Any) -> Any:
    """Return ShapeDtypeStructs with shardings. where: one sharding for all, or a tree of them."""
    struct = lambda a, s: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=s)  # noqa: E731
    if isinstance(where, jax.sharding.Sharding):
        return jax.tree.map(lambda a: struct(a, where), tree)
    return jax.tree.map(struct, tree, where)


def learner_programs(config: Any, shape: qwen.Config, devices: list[Any]) -> dict[str, Any]:
    """Return {"update", "logp"} of the learner, as functions that trace the program."""
    mesh, optimizer = mesh_of(config, devices), parts.make_optimizer(config)
    update, logp = parts.make_programs(config, shape, mesh, optimizer)
    layout, frozen = parts.make_layout(config), jnp.dtype(config.model.dtype)
    state = learner.state_shapes(shape, optimizer, mesh, layout, frozen_dtype=frozen)
    batch = batch_shapes(config, mesh)
    scored = {name: array for name, array in batch.items() if name != "ref_logp"}
    params = state["params"]
    if "base" in state:
        params = state["base"] | {"layers": state["base"]["layers"] | params["layers"]}
    return {
        "update": partial(update.jitted.trace, state, batch),
        "logp": partial(logp.jitted.trace, params, scored),
    }


def batch_shapes(config: Any, mesh: Mesh) -> dict[str, jax.ShapeDtypeStruct]:
    """Return the arrays of a mini-batch of full rows, as `rl.learner` puts them on the devices."""
    rows, micro = parts.capacity_rows(config), config.learner.micro
    row = np.zeros((1, config.learner.row), np.int32)
    packed = Packed(row, row, row, row > 0, row * 1.0, row * 1.0, row > 0, row)
    packed.ref_logp_RT = packed.logp_RT if config.loss.kl_coef else None
    arrays = learner.device_batch(packed, None, 1, 1)
    where = NamedSharding(mesh, PartitionSpec(None, *meshes.rows(mesh).spec))
    shape = (-(-rows // micro), micro, config.learner.row)
    kinds = {"float64": jnp.float32}
    return {
        name: jax.ShapeDtypeStruct(shape, kinds.get(str(a.dtype), a.dtype), sharding=where)
        for name, a in arrays.items()
    }


def engine_programs(config: Any, shape: qwen.Config, device: Any, slots: int) -> dict[str, Any]:
    """Return {"prefill", "decode"} of the JAX engine on one device, as functions that trace the
    program.

    slots: rows of rollout.context tokens in the cache.
    """
    sharding = SingleDeviceSharding(device)
    dtype, cache_dtype = jnp.dtype(config.model.dtype), jnp.dtype(config.engine.cache_dtype)
    layout = partial(
        qwen.for_decoding, shape, dtype=dtype, matrix_dtype=jnp.dtype(weight_dtype(config))
    )
    weights = placed(jax.eval_shape(layout, qwen.shapes(shape)), sharding)
    cache = jax.eval_shape(
        partial(qwen.init_cache, shape, slots, config.rollout.context, cache_dtype)
    )
    cache = placed(cache, sharding)

    def array(*dims: int, dtype: Any = jnp.int32) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(dims, dtype, sharding=sharding)

    def draw(rows: int) -> decoding.Draw:
        number = array(rows, dtype=jnp.float32)
        return decoding.Draw(
            number, number, array(rows), array(rows, 2, dtype=jnp.uint32), array(rows)
        )

    static = {
        "config": shape,
        "window": config.rollout.context,
        "truncate": config.rollout.top_p < 1 or config.rollout.top_k > 0,
    }
    rows = decoding.Rows(*[array(slots)] * 4, array(slots, 8), draw(slots))
    few, piece = min(4, slots), min(config.engine.prefill, config.rollout.context)
    pieces = [array(few), array(few, piece), array(few), array(few), draw(few)]
    decode = partial(
        decoding.decode.trace, weights, cache, rows, array(), block=config.engine.decode_block
    )
    return {
        "decode": partial(decode, in_place=True, **static),
        "prefill": partial(decoding.prefill.trace, weights, cache, *pieces, **static),
    }


def compiled(trace: Any, platform: str, trips: float) -> dict[str, Any]:
    """Compile a program. Return {"memory", "collectives", "seconds"}, or {"error", "seconds"} if it
    is refused."""
    began = time.monotonic()
    try:
        program = trace().lower(lowering_platforms=(platform,)).compile()
    except Exception as error:  # XLA has no exception types of its own
        return {"error": str(error)[:2000], "seconds": time.monotonic() - began}
    memory = program.memory_analysis()
    collectives = hlo.collectives(program.as_text(), trips=trips)
    sizes = {
        name: getattr(memory, f"{name}_size_in_bytes")
        for name in ("argument", "output", "alias", "temp")
    }
    sizes |= {
        f"host_{name}": getattr(memory, f"host_{name}_size_in_bytes", 0)
        for name in ("argument", "temp")
    }
    return {
        "memory": sizes,
        "collectives": collectives,
        "seconds": round(time.monotonic() - began, 1),
    }


def run(job: dict[str, Any]) -> dict[str, Any]:
    """Return {"jax": version, "phases": {phase: see `compiled`}, "gigabytes": peak memory of this
    process}."""
    config, target = ConfigDict(job["config"]), targets.parse(job["target"])
    shape, devices = plan.model_shape(config), devices_of(target)
    programs: dict[str, Any] = {}
    if {"update", "logp"} & set(job["phases"]):
        programs |= learner_programs(config, shape, devices)
    if {"prefill", "decode"} & set(job["phases"]):
        programs |= engine_programs(config, shape, devices[0], job["slots"])
    phases = {}
    for phase in job["phases"]:
        phases[phase] = compiled(programs[phase], target.chip.platform, job["micro_batches"])
        print(f"compiled {phase} in {phases[phase]['seconds']:.0f} s", flush=True)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9
    return {"jax": jax.__version__, "phases": phases, "gigabytes": round(peak, 1)}


if __name__ == "__main__":
    print(json.dumps(run(json.load(sys.stdin))))
