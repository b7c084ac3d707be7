"""Build the engine of a config, and check its settings before any server is started or
contacted."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from evolver.config.derived import weight_dtype
from evolver.config.paths import model_folder
from evolver.processes.interrupt import Stop
from rl.engines import Engine

if TYPE_CHECKING:
    from rl.engines.vllm.servers import Servers
    from rl.engines.vllm.transfer import Transfer

TOLERANCE = {
    "float32": 1e-3,
    "bfloat16": 0.1,
}  # mean rounding difference of log-probabilities on random tokens


def make_engine(
    config: Any,
    workdir: Path,
    shape: Any,
    params: Any,
    tokenizer: Any,
    *,
    mesh: Any,
    stop: Stop,
    say: Callable[[str], None],
) -> Engine:
    """Return the engine with the initial policy as version 0. Raises EngineFault."""
    if config.engine.name == "vllm":
        return _vllm(config, workdir, shape, params, tokenizer, mesh, stop, say)
    return jax_engine(config, shape, params, config.engine.slots)


def jax_engine(config: Any, shape: Any, params: Any, slots: int) -> Engine:
    """Return an engine on this process's first device, which keeps a copy of `params`."""
    import jax
    import jax.numpy as jnp

    from evolver.processes import hosts
    from rl.engines.jax.engine import JaxEngine

    c = config.engine
    return JaxEngine(
        shape, hosts.local(params), device=jax.local_devices()[0], slots=slots,
        context=config.rollout.context, decode_block=c.decode_block, leave=c.leave, prefill=c.prefill,
        dtype=jnp.dtype(config.model.dtype), weight_dtype=jnp.dtype(weight_dtype(config)),
        cache_dtype=jnp.dtype(c.cache_dtype),
    )  # fmt: skip


def _vllm(
    config: Any,
    workdir: Path,
    shape: Any,
    params: Any,
    tokenizer: Any,
    mesh: Any,
    stop: Stop,
    say: Callable,
) -> Engine:
    from rl.engines.vllm.engine import VllmEngine

    v = config.engine.vllm
    engine = VllmEngine(
        _servers(config, workdir, shape, params, tokenizer, say), vocab=shape.vocab, context=config.rollout.context,
        transfer=_transfer(config, shape), score=_scorer(config, shape, mesh), in_flight=config.engine.in_flight,
        tolerance=v.tolerance or TOLERANCE[config.model.dtype], temperature=config.rollout.temperature, say=say,
    )  # fmt: skip
    try:
        stop.run(engine.start())
        stop.run(engine.load(params, 0))
    except BaseException:
        stop.finish(engine.close())
        raise
    return engine


def _servers(
    config: Any, workdir: Path, shape: Any, params: Any, tokenizer: Any, say: Callable
) -> Servers:
    from rl.engines.vllm.servers import BACKEND, OwnServers, Servers

    v = config.engine.vllm
    if v.urls:
        return Servers(v.urls, model=v.model, key=os.environ.get(v.key, "") if v.key else "")
    return OwnServers(
        python=v.python, checkpoint=_checkpoint(config, workdir, shape, params, tokenizer), logs=workdir / "engine",
        replicas=v.replicas, devices=v.devices, context=config.rollout.context, dtype=config.model.dtype,
        slots=config.engine.slots, backend={"shm": BACKEND, "nccl": "nccl"}.get(v.transfer, ""), flags=v.flags,
        start_timeout=v.start_timeout, restarts=v.restarts, say=say,
        lora_rank=config.lora.rank if v.transfer == "lora" else 0,
    )  # fmt: skip


def _transfer(config: Any, shape: Any) -> Transfer | None:
    v, dtype = config.engine.vllm, config.model.dtype
    if v.transfer == "shm":
        from rl.engines.vllm.transfer import SharedMemory

        return SharedMemory(shape, folder=v.shared, dtype=dtype, bucket=v.bucket)
    if v.transfer == "nccl":
        from rl.engines.vllm.nccl import NcclBroadcast

        return NcclBroadcast(shape, dtype=dtype, bucket=v.bucket)
    if v.transfer == "lora":
        from models.lora import LoRA
        from rl.engines.vllm.transfer import AdapterFiles

        return AdapterFiles(
            LoRA(config.lora.rank, config.lora.alpha, tuple(config.lora.targets)), folder=v.shared
        )
    return None


def _checkpoint(config: Any, workdir: Path, shape: Any, params: Any, tokenizer: Any) -> Path:
    """Return a checkpoint directory for vLLM: the policy's own, or one written here if it has
    none."""
    from models import hf

    if config.model.path and not config.model.tokenizer:
        return Path(model_folder(config.model.path, weights=True)).absolute()
    folder = workdir.absolute() / "engine" / "initial"
    hf.save(folder, shape, params, tokenizer=tokenizer)
    return folder


def _scorer(config: Any, shape: Any, mesh: Any) -> Callable[[Any, list[int]], Any]:
    """Return (params, ids) -> log p(ids[i] | ids[:i]) for i >= 1 at temperature 1, by the learner's
    program."""
    import jax.numpy as jnp
    import numpy as np

    from rl import learner
    from rl.forward import Forward
    from rl.packing import pack
    from rl.samples import Sample

    rows = max(1, config.mesh.data * config.mesh.fsdp)
    forward = Forward(shape, mesh, micro=rows, dtype=jnp.dtype(config.model.dtype))
    logp = learner.make_logp(forward)

    def score(params: Any, ids: list[int]) -> np.ndarray:
        width = 64 * max(1, config.mesh.sequence)
        packed = pack(
            [Sample(np.array(ids), np.arange(len(ids)) > 0)], -(-len(ids) // width) * width
        )
        return logp(params, packed)[0, 1 : len(ids)]

    return score
