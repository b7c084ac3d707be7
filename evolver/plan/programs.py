"""The programs of a run, compiled from shapes alone for a machine that is not here.

    python -m evolver.plan.programs < job.json        # started by `evolver.plan.compilers`, under a plan environment

The job is {"config": ..., "target": "h100:8", "phases": [...], "slots": n, "micro_batches": m}; the last line of the
output is one JSON object. The programs are the run's own: the update and the log-probabilities of `evolver.parts`, the
prefill and decode steps of the JAX engine, on a mesh of the target's devices and with its compiler.
"""

from __future__ import annotations

import json
import re
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

from evolver import parts, plan
from evolver.plan import hlo, targets
from models import mesh as meshes
from models import qwen
from rl import learner
from rl.engines import decoding
from rl.packing import Packed


def devices_of(target: targets.Target) -> list[Any]:
    """Descriptions of the target's devices, which jax can compile for and nothing else."""
    if target.chip.platform == "tpu":
        name = targets.TPU_TOPOLOGIES[target.chip.name][target.count]
        return list(topologies.get_topology_desc(platform="tpu", topology_name=name).devices)
    topology = targets.gpu_topology(target.count)
    described = targets.gpu_description(target.chip)
    return list(topologies.get_topology_desc(platform="cuda", target_config=described, topology=topology).devices)


def mesh_of(config: Any, devices: list[Any]) -> Mesh:
    """The config's mesh over these devices."""
    sizes = [config.mesh.get(axis, 1) for axis in meshes.AXES]
    return Mesh(np.array(devices).reshape(sizes), meshes.AXES, axis_types=(AxisType.Auto,) * len(sizes))


def placed(tree: Any, where: Any) -> Any:
    """ShapeDtypeStructs with a sharding: one for all, or a tree of them."""
    struct = lambda a, s: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=s)  # noqa: E731
    if isinstance(where, jax.sharding.Sharding):
        return jax.tree.map(lambda a: struct(a, where), tree)
    return jax.tree.map(struct, tree, where)


def learner_programs(config: Any, shape: qwen.Config, devices: list[Any]) -> dict[str, Any]:
    """{"update", "logp"}: traced, with nothing computed."""
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
    """What `learner` puts on the devices for a mini-batch of whole rows."""
    rows, micro = parts.capacity_rows(config), config.learner.micro
    row = np.zeros((1, config.learner.row), np.int32)
    packed = Packed(row, row, row, row > 0, row * 1.0, row * 1.0, row > 0, row)
    packed.ref_logp_RT = packed.logp_RT if config.loss.kl else None
    arrays = learner._batch(packed, None, 1, 1)
    where = NamedSharding(mesh, PartitionSpec(None, *meshes.rows(mesh).spec))
    shape = (-(-rows // micro), micro, config.learner.row)
    kinds = {"float64": jnp.float32}
    return {
        name: jax.ShapeDtypeStruct(shape, kinds.get(str(a.dtype), a.dtype), sharding=where)
        for name, a in arrays.items()
    }


def engine_programs(config: Any, shape: qwen.Config, device: Any, slots: int) -> dict[str, Any]:
    """{"prefill", "decode"} of the JAX engine on one device, with `slots` rows of rollout.context tokens."""
    here = SingleDeviceSharding(device)
    dtype, cache_dtype = jnp.dtype(config.model.dtype), jnp.dtype(config.engine.cache_dtype)
    weights = placed(jax.eval_shape(partial(qwen.for_decoding, shape, dtype=dtype), qwen.shapes(shape)), here)
    cache = jax.eval_shape(partial(qwen.init_cache, shape, slots, config.rollout.context, cache_dtype))
    cache = placed(cache, here)

    def array(*dims: int, dtype: Any = jnp.int32) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(dims, dtype, sharding=here)

    def draw(rows: int) -> decoding.Draw:
        half = array(rows, dtype=jnp.float32)
        return decoding.Draw(half, half, array(rows), array(rows, 2, dtype=jnp.uint32), array(rows))

    static = {"config": shape, "window": config.rollout.context, "truncate": config.rollout.top_p < 1}
    rows = decoding.Rows(*[array(slots)] * 4, array(slots, 8), draw(slots))
    few, piece = min(4, slots), min(config.engine.prefill, config.rollout.context)
    pieces = [array(few), array(few, piece), array(few), array(few), draw(few)]
    return {
        "decode": partial(
            decoding.decode.trace,
            weights,
            cache,
            rows,
            array(),
            block=config.engine.decode_block,
            in_place=True,
            **static,
        ),
        "prefill": partial(decoding.prefill.trace, weights, cache, *pieces, **static),
    }


def compiled(trace: Any, platform: str, trips: float) -> dict[str, Any]:
    """Memory, collectives and the seconds it took; {"error", "needed"} for what the compiler refuses."""
    began = time.monotonic()
    try:
        program = trace().lower(lowering_platforms=(platform,)).compile()
    except Exception as error:  # XLA has no types for its refusals
        text = str(error)
        return {"error": text[:2000], "needed": needed(text), "seconds": time.monotonic() - began}
    memory = program.memory_analysis()
    found = hlo.totals(hlo.collectives(program.as_text(), trips=trips))
    sizes = {name: getattr(memory, f"{name}_size_in_bytes") for name in ("argument", "output", "alias", "temp")}
    sizes |= {f"host_{name}": getattr(memory, f"host_{name}_size_in_bytes", 0) for name in ("argument", "temp")}
    return {"memory": sizes, "collectives": found, "seconds": round(time.monotonic() - began, 1)}


def needed(text: str) -> float:
    """Bytes that the TPU compiler says a program needs, 0 if it does not say."""
    used = re.search(r"Used ([\d.]+)([KMGT]?) of", text)
    return float(used[1]) * 1024 ** " KMGT".index(used[2] or " ") if used else 0.0


def run(job: dict[str, Any]) -> dict[str, Any]:
    """{"jax": version, "phases": {phase: see `compiled`}, "gigabytes": most memory used}."""
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
        print(f"compiled {phase} in {phases[phase]['seconds']:.0f} s", file=sys.stderr, flush=True)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9
    return {"jax": jax.__version__, "phases": phases, "gigabytes": round(peak, 1)}


if __name__ == "__main__":
    print(json.dumps(run(json.load(sys.stdin))))
