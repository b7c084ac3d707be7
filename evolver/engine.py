"""Build the engine of a config, and check its settings before any server is started or
contacted."""

from __future__ import annotations

import importlib.util
import os
import re
import shlex
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from envs.packages import how_to_install
from evolver.config.paths import model_folder
from evolver.llm.client import url_problem
from evolver.processes.interrupt import Stop
from rl.engines import Engine

if TYPE_CHECKING:
    from rl.engines.vllm.servers import Servers
    from rl.engines.vllm.transfer import Transfer

TOLERANCE = {
    "float32": 1e-3,
    "bfloat16": 0.1,
}  # mean rounding difference of log-probabilities on random tokens


def problems(config: Any, mode: str) -> Iterator[str]:
    """Yield the problems that can be found without contacting a server."""
    c, v = config.engine, config.engine.vllm
    if c.name != "vllm":
        if v.urls or v.python:
            yield f"config.engine.vllm is set, but config.engine.name={c.name}: set config.engine.name=vllm"
        return
    if c.weight_dtype:
        yield "config.engine.weight_dtype is for config.engine.name=jax; vLLM's servers use config.model.dtype"
    if config.rollout.top_p < 1 or config.rollout.top_k:
        yield (
            "config.engine.name=vllm reports log-probabilities renormalised by top-p and top-k, which the learner"
            " cannot compare with its own: set config.rollout.top_p=1.0 and top_k=0"
        )
    if not max(config.rollout.temperature, config.eval.temperature) <= 2:
        yield "config.engine.name=vllm supports temperatures of at most 2"
    if mode == "train" and v.transfer == "none":
        yield "config.engine.vllm.transfer=none never updates the servers; training needs shm, nccl or lora"
    if v.transfer == "lora" and not config.lora.rank:
        yield "config.engine.vllm.transfer=lora needs adapters, and config.lora.rank=0 trains none: set lora.rank"
    if config.hosts.count != 1:
        yield "config.engine.name=vllm supports one process only: set config.hosts.count=1"
    yield from _flags_problems(v.flags)
    if mode == "plan":
        return
    if importlib.util.find_spec("httpx") is None:
        yield f"config.engine.name=vllm needs httpx: {how_to_install('llm')}"
    if bool(v.urls) == bool(v.python):
        yield (
            "config.engine.name=vllm needs exactly one of config.engine.vllm.urls (servers that are running) and"
            " config.engine.vllm.python (an interpreter with vLLM, to start them)"
        )
    for url in v.urls:
        if problem := url_problem(url, "http://127.0.0.1:8000"):
            yield f"config.engine.vllm.urls: {'a URL' if '@' in url else repr(url)} {problem}"
    if v.python and shutil.which(v.python) is None:
        yield f"config.engine.vllm.python={v.python} is not an executable"
    if v.key and not os.environ.get(v.key):
        yield f"config.engine.vllm.key={v.key}: this environment variable is not set"
    if v.transfer in ("shm", "lora") and not Path(v.shared).is_dir():
        yield f"config.engine.vllm.shared={v.shared} is not a directory"


def _flags_problems(flags: str) -> Iterator[str]:
    """Yield problems with the flags of `vllm serve`: with their form, and with the values that a
    plan reads."""
    try:
        words = [part for word in shlex.split(flags) for part in word.split("=", 1)]
    except ValueError as error:
        yield f"config.engine.vllm.flags={flags} cannot be split into words: {error}"
        return
    for name, value in zip(words, [*words[1:], ""]):
        if name == "--tensor-parallel-size" and not re.fullmatch(r"0*[1-9]\d{0,3}", value):
            yield f"config.engine.vllm.flags: {name} must be a whole number from 1; it is {value!r}"
        if name == "--gpu-memory-utilization" and not re.fullmatch(
            r"0?\.\d*[1-9]\d*|1(\.0*)?", value
        ):
            yield f"config.engine.vllm.flags: {name} must be a number above 0 and at most 1; it is {value!r}"


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


def weight_dtype(config: Any) -> str:
    """Return the dtype in which the engine holds the policy's matrices."""
    return config.engine.weight_dtype or config.model.dtype


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
        from rl.engines.vllm.adapters import AdapterFiles

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
    from rl.packing import pack
    from rl.samples import Sample

    rows = max(1, config.mesh.data * config.mesh.fsdp)
    logp = learner.make_logp(
        shape, mesh, micro=rows, temperature=1.0, dtype=jnp.dtype(config.model.dtype)
    )

    def score(params: Any, ids: list[int]) -> np.ndarray:
        width = 64 * max(1, config.mesh.sequence)
        packed = pack(
            [Sample(np.array(ids), np.arange(len(ids)) > 0)], -(-len(ids) // width) * width
        )
        return logp(params, packed)[0, 1 : len(ids)]

    return score
