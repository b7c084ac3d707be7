"""Checks of `config.engine` that need no server."""

import os
import re
import shlex
import shutil
from collections.abc import Iterator
from pathlib import Path

from ml_collections import ConfigDict

from envs.packages import how_to_install, is_missing
from evolver.config.checks.contradictions import TRAINING
from evolver.config.derived import sleeps
from evolver.llm.questions import url_problem

# The flags of `vllm serve` that a plan reads: the form of their values, and its description.
READ_FLAGS = {
    "--tensor-parallel-size": (r"0*[1-9]\d{0,3}", "a whole number from 1"),
    "--gpu-memory-utilization": (
        r"0?\.\d*[1-9]\d*|1(\.0*)?",
        "a number above 0 and at most 1",
    ),
}


def engine_problems(config: ConfigDict, mode: str) -> Iterator[str]:
    """Yield the problems that can be found without contacting a server."""
    c = config.engine
    v = c.vllm
    if c.name != "vllm":
        if v.urls or v.python:
            yield (
                f"config.engine.vllm is set, but config.engine.name={c.name}: set"
                " config.engine.name=vllm"
            )
        return
    if c.weight_dtype:
        yield (
            "config.engine.weight_dtype is for config.engine.name=jax; vLLM's servers use"
            " config.model.dtype"
        )
    if config.rollout.top_p < 1 or config.rollout.top_k:
        yield (
            "config.engine.name=vllm reports log-probabilities renormalised by top-p and top-k,"
            " which the learner cannot compare with its own: set config.rollout.top_p=1.0 and"
            " top_k=0"
        )
    if not max(config.rollout.temperature, config.eval.temperature) <= 2:
        yield "config.engine.name=vllm supports temperatures of at most 2"
    if mode in TRAINING and v.transfer == "none":
        yield (
            "config.engine.vllm.transfer=none never updates the servers; training needs shm, nccl"
            " or lora"
        )
    if v.transfer == "lora" and not config.lora.rank:
        yield (
            "config.engine.vllm.transfer=lora needs adapters, and config.lora.rank=0 trains none:"
            " set lora.rank"
        )
    if sleeps(config) and config.rollout.async_depth:
        yield (
            "config.engine.vllm.sleep needs servers without requests during an update, and"
            f" config.rollout.async_depth={config.rollout.async_depth} keeps them busy: set"
            " sleep=False or async_depth=0"
        )
    if sleeps(config) and v.transfer == "nccl":
        yield (
            "config.engine.vllm.sleep is for servers on the learner's GPUs, and"
            " config.engine.vllm.transfer=nccl for servers on others: set transfer=shm, or"
            " sleep=False"
        )
    yield from flags_problems(v.flags)
    if mode != "plan":
        yield from server_problems(v)


def server_problems(v: ConfigDict) -> Iterator[str]:
    """Yield what vLLM's servers lack on this machine. v: `config.engine.vllm`."""
    if is_missing("httpx"):
        yield f"config.engine.name=vllm needs httpx: {how_to_install('llm')}"
    if bool(v.urls) == bool(v.python):
        yield (
            "config.engine.name=vllm needs exactly one of config.engine.vllm.urls (servers that"
            " are running) and config.engine.vllm.python (an interpreter with vLLM, to start them)"
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


def flags_problems(flags: str) -> Iterator[str]:
    """Yield problems with the flags of `vllm serve`: with their form, and with the values that a
    plan reads."""
    words: list[str] = []
    try:
        for word in shlex.split(flags):
            words += word.split("=", 1)
    except ValueError as error:
        yield f"config.engine.vllm.flags={flags} cannot be split into words: {error}"
        return
    for name, value in zip(words, [*words[1:], ""]):
        form, rule = READ_FLAGS.get(name, ("", ""))
        if form and not re.fullmatch(form, value):
            yield f"config.engine.vllm.flags: {name} must be {rule}; it is {value!r}"
