"""Compile the programs of a run for another machine, from shapes alone.

    python -m evolver.plan.programs JOB    # in a plan environment, by `evolver.plan.compilers`

JOB is the JSON of {"config": ..., "target": "h100:8", "phases": [...], "slots": n, "micro_batches":
m}; the last line of the output is the result as JSON. The programs are those that a run executes:
the update and the log-probabilities of `evolver.learner`, and the prefill and decode steps of the
JAX engine. They are compiled for the target's devices.
"""

import json
import resource
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import topologies
from jax.sharding import (
    AxisType,
    Mesh,
    NamedSharding,
    PartitionSpec,
    Sharding,
    SingleDeviceSharding,
)
from ml_collections import ConfigDict

from envs.values import Json
from evolver import learner as parts
from evolver.config.derived import needs_reference, weight_dtype
from evolver.llm.roles import engine_context
from evolver.plan import hlo, targets
from evolver.plan.case import LEARNER, model_shape
from models import lora, qwen
from models import mesh as meshes
from rl import forward, learner
from rl.engines.jax import decoding, kv_cache
from rl.packing import Packed

Programs = dict[str, Callable[[], Any]]  # {phase: a function that traces its program}


def devices_of(target: targets.Target) -> list[Any]:
    """Return descriptions of the target's devices, for which jax can compile but not run
    programs."""
    chip = target.chip
    if chip.platform == "tpu":
        name = targets.topologies(chip.name)[target.count]
        return topologies.get_topology_desc(platform="tpu", topology_name=name).devices
    return topologies.get_topology_desc(
        platform="cuda",
        target_config=targets.gpu_description(chip),
        topology=targets.gpu_topology(target.count),
    ).devices


def placed(tree: Any, where: Sharding) -> Any:
    """Return the shapes of a tree of arrays, placed on devices."""
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where), tree)


def learner_programs(config: Any, shape: qwen.Config, devices: list[Any]) -> Programs:
    """Return {"update", "logp"} of the learner."""
    sizes = [config.mesh[axis] for axis in meshes.AXES]
    mesh = Mesh(
        np.array(devices).reshape(sizes), meshes.AXES, axis_types=(AxisType.Auto,) * len(sizes)
    )
    optimizer = parts.make_optimizer(config)
    layout = parts.make_layout(config)
    made: Any = parts.make_programs(config, shape, mesh, optimizer)
    update, logp = (program.jitted for program in made)
    frozen = jnp.dtype(config.model.dtype)
    state = learner.state_shapes(shape, optimizer, mesh, layout, frozen_dtype=frozen)
    batch = batch_shapes(config, mesh)
    scored = {name: array for name, array in batch.items() if name not in ("ref_logp", "weight")}
    params = state["params"]
    if "base" in state:
        params = lora.beside(state["base"], params)
    return {
        "update": partial(update.trace, state, batch, np.float32(0), np.uint32(0)),
        "logp": partial(logp.trace, params, scored),
    }


def batch_shapes(config: Any, mesh: Mesh) -> dict[str, jax.ShapeDtypeStruct]:
    """Return the arrays of a mini-batch of full rows, as `rl.learner` puts them on the devices."""
    row = np.zeros((1, config.learner.row), np.int32)
    real = row.astype(np.float32)
    mask = row > 0
    packed = Packed(row, row, row, mask, real, real, mask, row, row)
    packed.weight_RT = real
    packed.ref_logp_RT = real if needs_reference(config) else None
    # Without a mesh the batch stays on the host, where empty rows take no memory.
    rows = parts.capacity_rows(config)
    batch = forward.device_batch(packed, None, config.learner.micro, rows)
    return placed(batch, NamedSharding(mesh, PartitionSpec(None, *meshes.rows(mesh).spec)))


def engine_programs(config: Any, shape: qwen.Config, where: Sharding, slots: int) -> Programs:
    """Return {"prefill", "decode"} of the JAX engine on one device.

    slots: rows of the cache.
    """
    c = config.engine
    window = engine_context(config)
    dtype = jnp.dtype(config.model.dtype)
    matrices = jnp.dtype(weight_dtype(config))
    prepare = partial(kv_cache.for_decoding, shape, dtype=dtype, matrix_dtype=matrices)
    weights = jax.eval_shape(prepare, qwen.shapes(shape))
    cached = jnp.dtype(c.cache_dtype)
    empty = partial(kv_cache.init_cache, shape, slots, window, cached, transposed=False)
    cache = jax.eval_shape(empty)
    zeros = partial(np.zeros, dtype=np.int32)

    def draw(rows: int) -> decoding.Draw:
        number = np.zeros(rows, np.float32)
        seed = np.zeros((rows, 2), np.uint32)
        return decoding.Draw(number, number, zeros(rows), seed, zeros(rows))

    line = zeros(slots)
    few = min(4, slots)
    piece = min(c.prefill, window)
    rows = decoding.Rows(line, line, line, line, zeros((slots, 8)), draw(slots))
    prompts = (zeros(few), zeros((few, piece)), zeros(few), zeros(few), draw(few))
    truncate = config.rollout.top_p < 1 or config.rollout.top_k > 0
    device: Any = next(iter(where.device_set))
    fused = kv_cache.fuses(shape, device.platform, dtype, cached)
    static = {"config": shape, "window": window, "truncate": truncate, "fused": fused}
    decode = partial(decoding.decode.trace, block=c.decode_block, in_place=True, **static)
    prefill = partial(decoding.prefill.trace, **static)
    return {
        "decode": partial(decode, *placed((weights, cache, rows, zeros(())), where)),
        "prefill": partial(prefill, *placed((weights, cache, *prompts), where)),
    }


def compiled(trace: Callable[[], Any], platform: str, trips: float) -> Json:
    """Compile a program. Return {"memory", "collectives", "seconds", "loop"}, the last of GPUs
    only, or {"error", "seconds"} if it is refused."""
    began = time.monotonic()
    try:
        program = trace().lower(lowering_platforms=(platform,)).compile()
    except Exception as error:  # XLA has no exception types of its own
        return {"error": str(error)[:2000], "seconds": time.monotonic() - began}
    memory = program.memory_analysis()
    text = program.as_text()
    kinds = ("argument", "output", "alias", "temp")
    return {
        "memory": {kind: getattr(memory, f"{kind}_size_in_bytes") for kind in kinds},
        "collectives": hlo.collectives(text, trips=trips),
        "seconds": round(time.monotonic() - began, 1),
        "loop": hlo.loop(text) if platform == "cuda" else {},
    }


def take_for_local(device: Any) -> None:
    """Let jax choose cuDNN's kernels for the target's GPU: it asks the GPU that is here, if any."""
    from jax._src.cudnn import fused_attention_stablehlo as fused

    def version(text: str) -> tuple[int, ...]:
        return tuple(map(int, text.split(".")))

    own = version(device.compute_capability)
    fused.check_compute_capability = lambda least: own >= version(least)


def run(job: Json) -> Json:
    """Return {"jax": version, "phases": {phase: see `compiled`}, "gigabytes": peak memory of this
    process}."""
    config = ConfigDict(job["config"])
    target = targets.parse(job["target"])
    shape = model_shape(config)
    devices = devices_of(target)
    if target.chip.platform == "cuda":
        take_for_local(devices[0])
    where = SingleDeviceSharding(devices[0])
    phases: dict[str, Json] = {}
    programs = engine_programs(config, shape, where, job["slots"])
    if set(LEARNER) & set(job["phases"]):  # the mesh of a config for the engine alone may not fit
        programs |= learner_programs(config, shape, devices)
    for phase in job["phases"]:
        phases[phase] = compiled(programs[phase], target.chip.platform, job["micro_batches"])
        if phase != "decode":  # whose loop is a token
            phases[phase].pop("loop", None)
        print(f"compiled {phase} in {phases[phase]['seconds']:.0f} s", flush=True)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9
    return {"jax": jax.__version__, "phases": phases, "gigabytes": round(peak, 1)}


if __name__ == "__main__":
    print(json.dumps(run(json.loads(sys.argv[1]))))
