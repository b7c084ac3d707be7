"""The vLLM engine: seconds of a weight update by model size, and tokens/s over HTTP.

    python -m experiments.bench.servers [--python .bench/vllm/bin/python] [--sizes 1,30,120] \\
        [--vllm-flags "--block-size 32"]

For each size in millions of parameters, start one server from a checkpoint of random weights and
time `--repeats` weight updates: staging in shared memory, and the update from the pause to the
verification. Then run `workload.flat` through the vLLM engine, through `vllm bench serve` on the
same server and, after stopping the server, through the JAX engine in this process. Each runs one
warm-up round and `--repeats` rounds, of which the best counts; no round repeats the prompts of an
earlier one. Prints one JSON object per size.
"""

import asyncio
import json
import subprocess
import tempfile
import time
from pathlib import Path

import jax
import numpy as np

from configs import base
from envs.values import Json
from evolver.engines import scorer
from experiments import commands
from experiments.bench.our_engine import play
from experiments.bench.workload import Workload, flat
from experiments.imitation.bpe import train_bpe
from models import hf, qwen
from rl.engines import Engine
from rl.engines.jax.engine import JaxEngine
from rl.engines.vllm.engine import VllmEngine
from rl.engines.vllm.servers import OwnServers
from rl.engines.vllm.transfer import SharedMemory

SHAPES = {
    "1": qwen.Config(800, 128, 4, 4, 2, 32, 384),
    "30": qwen.Config(800, 512, 8, 8, 4, 64, 1536),
    "120": qwen.Config(800, 768, 14, 12, 4, 64, 3072),
    "500": qwen.Config(800, 1536, 16, 12, 4, 128, 6144),
}


def params_of(shape: qwen.Config, seed: int) -> qwen.Params:
    """Return random weights on the host."""
    return jax.tree.map(np.asarray, qwen.init(shape, seed))


async def tokens_per_second(engine: Engine, workload: Workload, repeats: int) -> float:
    """Return the tokens/s of the best of `repeats` rounds, after a warm-up round."""
    seconds = []
    for mark in range(1, repeats + 2):
        began = time.monotonic()
        await play(engine, workload, mark)
        seconds.append(time.monotonic() - began)
    return workload.new_tokens / min(seconds[1:])


def vllm_bench(python: str, url: str, folder: Path, workload: Workload, repeats: int) -> float:
    """Return the output tokens/s that `vllm bench serve` measures, on prompts and answers of the
    same lengths.

    The best of `repeats` rounds counts, after a warm-up round.
    """
    script = workload.episodes[0]
    command = [
        python, "-m", "vllm.entrypoints.cli.main", "bench", "serve", "--backend", "openai",
        "--base-url", url, "--model", "policy", "--tokenizer", str(folder),
        "--dataset-name", "random", "--random-input-len", str(len(script.prompt)),
        "--random-output-len", str(script.turns[0].new_tokens),
        "--num-prompts", str(len(workload.episodes)), "--ignore-eos",
        "--save-result", "--result-dir", str(folder), "--result-filename", "bench.json",
    ]  # fmt: skip
    rates = []
    for round in range(repeats + 1):
        process = subprocess.run(
            [*command, "--seed", str(round)], capture_output=True, text=True, timeout=1800
        )
        if process.returncode:
            raise SystemExit(f"vllm bench serve failed: {process.stderr[-2000:]}")
        rates.append(float(json.loads((folder / "bench.json").read_text())["output_throughput"]))
    return max(rates[1:])


async def measure(size: str, folder: Path, *, python: str, flags: str, repeats: int) -> Json:
    """Return all figures of one size."""
    shape = SHAPES[size]
    tokenizer = train_bpe([f"word {i} {i * i} {i**3}" for i in range(3000)], shape.vocab)
    first = params_of(shape, 0)
    hf.save(folder, shape, first, tokenizer=tokenizer)
    workload = flat(tokenizer.vocab_size)
    context = workload.max_length + 64
    servers = OwnServers(
        python=python, checkpoint=folder, logs=folder, context=-(-context // 32) * 32,
        dtype="float32", slots=len(workload.episodes), flags=flags, start_timeout=1800.0,
    )  # fmt: skip
    transfer = SharedMemory(shape, dtype="float32", folder="/dev/shm")
    engine = VllmEngine(
        servers, vocab=shape.vocab, context=context, transfer=transfer,
        score=scorer(base.get_config(), shape, None), tolerance=1e-2,
    )  # fmt: skip
    try:
        await engine.start()
        await engine.load(first, 0)
        before = engine.stats()
        for version in range(1, repeats + 1):
            await engine.load(params_of(shape, version), version)
        after = engine.stats()
        rate = await tokens_per_second(engine, workload, repeats)
        url = engine.urls[0]
        theirs = await asyncio.to_thread(vllm_bench, python, url, folder, workload, repeats)
    finally:
        await engine.close()
    ours = JaxEngine(shape, first, slots=len(workload.episodes), context=context)
    here = await tokens_per_second(ours, workload, repeats)

    def each(name: str) -> float:
        """Return what an update adds to a figure of the engine."""
        return (after[name] - before[name]) / repeats

    return {
        "benchmark": "servers", "million_parameters": size, "dtype": "float32",
        "megabytes": round(each("bytes") / 1e6, 1), "stage_s": round(each("stage_seconds"), 3),
        "update_s": round(each("update_seconds"), 3), "gap": after["gap"],
        "tokens_per_s": round(rate), "vllm_bench_tokens_per_s": round(theirs),
        "jax_engine_tokens_per_s": round(here),
    }  # fmt: skip


def main(
    *,
    python: str = ".bench/vllm/bin/python",
    sizes: str = "1,30,120",
    vllm_flags: str = "--enforce-eager --block-size 32",
    repeats: int = 3,
) -> None:
    """Print one JSON object per size.

    python: an interpreter with vLLM
    sizes: millions of parameters: 1, 30, 120, 500
    vllm_flags: more arguments of `vllm serve`
    repeats: updates, and rounds of each client
    """
    for size in sizes.split(","):
        with tempfile.TemporaryDirectory() as folder:
            figures = measure(size, Path(folder), python=python, flags=vllm_flags, repeats=repeats)
            print(json.dumps(asyncio.run(figures)), flush=True)


if __name__ == "__main__":
    commands.program(main)
