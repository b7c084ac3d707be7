"""The engine that a config asks for, and what can be wrong with it before any server is started or asked."""

from __future__ import annotations

import importlib.util
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from evolver.paths import model_folder
from evolver.stop import Stop
from rl.engines import Engine

TOLERANCE = {"float32": 1e-3, "bfloat16": 0.1}  # mean difference of log-probabilities on random tokens, by rounding


def problems(config: Any, mode: str) -> Iterator[str]:
    """What no server has to be asked for."""
    c, v = config.engine, config.engine.vllm
    if c.name != "vllm":
        if v.urls or v.python:
            yield f"config.engine.vllm is filled in, but config.engine.name={c.name}: set config.engine.name=vllm"
        return
    if config.rollout.top_p < 1 or config.rollout.top_k:
        yield (
            "config.engine.name=vllm reports log-probabilities among what top-p and top-k leave, which the learner"
            " cannot compare with its own: set config.rollout.top_p=1.0 and top_k=0"
        )
    if not max(config.rollout.temperature, config.eval.temperature) <= 2:
        yield "config.engine.name=vllm samples at temperatures of at most 2"
    if mode == "train" and v.transfer == "none":
        yield "config.engine.vllm.transfer=none leaves the servers with their weights; training needs shm, nccl or lora"
    if v.transfer == "lora" and not config.lora.rank:
        yield "config.engine.vllm.transfer=lora sends adapters, but none are trained: set config.lora.rank"
    if config.hosts.count != 1:
        yield "config.engine.name=vllm is driven by one process: set config.hosts.count=1"
    if mode == "plan":
        return
    if importlib.util.find_spec("httpx") is None:
        yield "config.engine.name=vllm needs httpx: pip install -r requirements/llm.txt"
    if bool(v.urls) == bool(v.python):
        yield (
            "config.engine.name=vllm needs one of config.engine.vllm.urls, servers that run, and"
            " config.engine.vllm.python, an interpreter with vLLM to start them with"
        )
    for url in v.urls:
        if not str(url).startswith(("http://", "https://")):
            yield f"config.engine.vllm.urls: {url!r} is no address like http://127.0.0.1:8000"
    if v.python and shutil.which(v.python) is None:
        yield f"config.engine.vllm.python={v.python}: there is no such interpreter"
    if v.key and not os.environ.get(v.key):
        yield f"config.engine.vllm.key={v.key}: that environment variable is empty"
    if v.transfer in ("shm", "lora") and not Path(v.shared).is_dir():
        yield f"config.engine.vllm.shared={v.shared}: there is no such directory"


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
    """The engine, holding the initial policy as version 0. Raises EngineFault."""
    import jax
    import jax.numpy as jnp

    from evolver import hosts

    c = config.engine
    if c.name == "vllm":
        return _vllm(config, workdir, shape, params, tokenizer, mesh, stop, say)
    from rl.engines.jax_engine import JaxEngine

    return JaxEngine(
        shape, hosts.local(params), device=jax.local_devices()[0], slots=c.slots,
        length=config.rollout.context, decode_block=c.decode_block, leave=c.leave, prefill_tokens=c.prefill,
        dtype=jnp.dtype(config.model.dtype), cache_dtype=jnp.dtype(c.cache_dtype),
    )  # fmt: skip


def _vllm(config, workdir, shape, params, tokenizer, mesh, stop, say) -> Engine:
    from rl.engines.transfer import SharedMemory
    from rl.engines.vllm import VllmEngine
    from rl.engines.vllm_servers import BACKEND, OwnServers, Servers

    v, dtype = config.engine.vllm, config.model.dtype
    backend = {"shm": BACKEND, "nccl": "nccl", "lora": "", "none": ""}[v.transfer]
    if v.urls:
        servers = Servers(v.urls, model=v.model, key=os.environ.get(v.key, "") if v.key else "")
    else:
        servers = OwnServers(
            python=v.python, checkpoint=_checkpoint(config, workdir, shape, params, tokenizer), logs=workdir / "engine",
            replicas=v.replicas, devices=v.devices, length=config.rollout.context, dtype=dtype,
            sequences=config.engine.slots, backend=backend, flags=v.flags, timeout=v.start_timeout,
            restarts=v.restarts, say=say, lora_rank=config.lora.rank if v.transfer == "lora" else 0,
        )  # fmt: skip
    options = {"dtype": dtype, "bucket_bytes": v.bucket << 20}
    transfer = None
    if v.transfer == "shm":
        transfer = SharedMemory(shape, folder=v.shared, **options)
    elif v.transfer == "lora":
        from models.lora import LoRA
        from rl.engines.adapters import AdapterFiles

        transfer = AdapterFiles(LoRA(config.lora.rank, config.lora.alpha, tuple(config.lora.targets)), folder=v.shared)
    elif v.transfer == "nccl":
        from rl.engines.nccl import NcclBroadcast

        transfer = NcclBroadcast(shape, **options)
    engine = VllmEngine(
        servers, vocab=shape.vocab, length=config.rollout.context, transfer=transfer,
        score=_scorer(config, shape, mesh), in_flight=config.engine.in_flight,
        tolerance=v.tolerance or TOLERANCE[dtype], temperature=config.rollout.temperature, say=say,
    )  # fmt: skip
    try:
        stop.run(engine.start())
        stop.run(engine.load(params, 0))
    except BaseException:
        stop.finish(engine.close())
        raise
    return engine


def _checkpoint(config: Any, workdir: Path, shape: Any, params: Any, tokenizer: Any) -> Path:
    """A directory that vLLM can start from: the policy's own, or one written here where there is none."""
    from models import hf

    if config.model.path and not config.model.tokenizer:
        return Path(model_folder(config.model.path, weights=True)).absolute()
    folder = workdir.absolute() / "engine" / "initial"
    hf.save(folder, shape, params, tokenizer=tokenizer)
    return folder


def _scorer(config: Any, shape: Any, mesh: Any) -> Callable[[Any, list[int]], Any]:
    """log p(ids[i] | ids[:i]) for i >= 1 at temperature 1, by the learner's own program."""
    import jax.numpy as jnp
    import numpy as np

    from rl import learner
    from rl.packing import pack
    from rl.samples import Sample

    rows = max(1, config.mesh.data * config.mesh.fsdp)
    logp = learner.make_logp(shape, mesh, micro_rows=rows, temperature=1.0, dtype=jnp.dtype(config.model.dtype))

    def score(params: Any, ids: list[int]) -> np.ndarray:
        width = 64 * max(1, config.mesh.sequence)
        packed = pack([Sample(np.array(ids), np.arange(len(ids)) > 0)], -(-len(ids) // width) * width)
        return logp(params, packed)[0, 1 : len(ids)]

    return score
