"""The engine of a run, built from its config."""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from evolver.config.derived import sleeps, weight_dtype
from evolver.config.keys import arguments
from evolver.config.paths import model_folder
from evolver.learner import make_layout
from evolver.llm.roles import engine_context
from evolver.processes import hosts
from evolver.processes.interrupt import Stop
from models import hf, qwen
from models.tokenizer import Tokenizer
from rl import learner
from rl.engines import Engine, EngineFault
from rl.engines.jax.engine import JaxEngine
from rl.forward import Forward
from rl.packing import pack
from rl.samples import Sample

if TYPE_CHECKING:
    from rl.engines.vllm.servers import Servers
    from rl.engines.vllm.transfer import Transfer

# Mean rounding difference of log-probabilities on random tokens.
TOLERANCE = {"float32": 1e-3, "bfloat16": 0.1}


def make_engine(
    config: Any,
    shape: qwen.Config,
    params: qwen.Params,
    tokenizer: Tokenizer,
    *,
    mesh: Any,
    workdir: Path,
    stop: Stop,
    say: Callable[[str], None],
    closing: contextlib.ExitStack,
) -> Engine:
    """Return the engine with the initial policy as version 0, which `closing` closes. Raises
    EngineFault."""
    if config.engine.name == "jax":
        local_engine = jax_engine(config, shape, params, config.engine.slots)
        closing.callback(lambda: stop.finish(local_engine.close()))
        return local_engine
    from rl.engines.vllm.engine import VllmEngine

    tolerance = config.engine.vllm.tolerance or TOLERANCE[config.model.dtype]
    engine = VllmEngine(
        _servers(config, shape, params, tokenizer, workdir, say),
        vocab=shape.vocab,
        unused=shape.unused,
        context=engine_context(config),
        transfer=_transfer(config, shape),
        score=scorer(config, shape, mesh),
        in_flight=config.engine.in_flight,
        tolerance=tolerance,
        temperature=config.rollout.temperature,
        sleeps=sleeps(config),
        say=say,
    )
    closing.callback(lambda: stop.finish(engine.close()))
    hosts.together(lambda: stop.run(engine.start()))
    hosts.together(lambda: stop.run(engine.load(params, 0)))
    return engine


def jax_engine(config: Any, shape: qwen.Config, params: qwen.Params, slots: int) -> JaxEngine:
    """Return an engine on the devices of the mesh that this process has, or on the first
    `engine.devices` of them. Each keeps a copy of `params`."""
    c, local = config.engine, jax.local_devices()[: math.prod(config.mesh.values())]
    return JaxEngine(
        shape,
        hosts.local(params),
        devices=local[: c.devices or None],
        slots=slots,
        context=engine_context(config),
        decode_block=c.decode_block,
        leave=c.leave,
        prefill=c.prefill,
        dtype=jnp.dtype(config.model.dtype),
        weight_dtype=jnp.dtype(weight_dtype(config)),
        cache_dtype=jnp.dtype(c.cache_dtype),
    )


def _servers(
    config: Any,
    shape: qwen.Config,
    params: qwen.Params,
    tokenizer: Tokenizer,
    workdir: Path,
    say: Callable[[str], None],
) -> Servers:
    from rl.engines.vllm.servers import BACKEND, OwnServers, Servers

    v = config.engine.vllm
    if v.urls:
        if len(v.urls) < hosts.count():  # where a scheduler says how many there are
            raise EngineFault(
                f"config.engine.vllm.urls has {len(v.urls)} servers for {hosts.count()} processes,"
                " and each asks servers of its own: name at least one for each"
            )
        return Servers(hosts.share(v.urls), model=v.model, key=os.environ.get(v.key, ""))
    if config.model.path and not config.model.tokenizer:
        checkpoint = Path(model_folder(config.model.path, weights=True)).absolute()
    else:  # the policy has no checkpoint of its own with its tokenizer
        checkpoint = workdir.absolute() / "engine" / "initial"
        hf.save(checkpoint, shape, params, tokenizer=tokenizer)
        hosts.gather(None)  # the first process has written it
    return OwnServers(
        **arguments(OwnServers, v),
        checkpoint=checkpoint,
        logs=workdir / hosts.own_name("engine"),
        context=engine_context(config),
        dtype=config.model.dtype,
        slots=config.engine.slots,
        backend={"shm": BACKEND, "nccl": "nccl"}.get(v.transfer, ""),
        say=say,
        sleeps=sleeps(config),
        lora_rank=config.lora.rank if v.transfer == "lora" else 0,
    )


def _transfer(config: Any, shape: qwen.Config) -> Transfer | None:
    from rl.engines.vllm.nccl import NcclBroadcast
    from rl.engines.vllm.transfer import AdapterFiles, SharedMemory

    v, dtype = config.engine.vllm, config.model.dtype
    if v.transfer == "shm":
        return SharedMemory(shape, folder=v.shared, dtype=dtype, bucket=v.bucket)
    if v.transfer == "nccl":
        return NcclBroadcast(shape, dtype=dtype, bucket=v.bucket)
    if v.transfer == "lora":
        adapters = make_layout(config).lora
        assert adapters  # the config is checked for it
        return AdapterFiles(adapters, folder=v.shared)
    return None


def scorer(
    config: Any, shape: qwen.Config, mesh: Any
) -> Callable[[qwen.Params, list[int]], np.ndarray]:
    """Return (params, ids) -> log p(ids[i] | ids[:i]) for i >= 1 at temperature 1, by the learner's
    program."""
    rows = max(1, config.mesh.data * config.mesh.fsdp)
    width = 64 * max(1, config.mesh.sequence)
    dtype = jnp.dtype(config.model.dtype)
    logp = learner.make_logp(Forward(shape, mesh, micro=rows, dtype=dtype))

    def score(params: qwen.Params, ids: list[int]) -> np.ndarray:
        sample = Sample(ids, np.arange(len(ids)) > 0)
        packed = pack([sample], -(-len(ids) // width) * width)
        return logp(params, packed)[0, 1 : len(ids)]

    return score
