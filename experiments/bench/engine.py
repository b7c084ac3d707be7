"""Generated tokens/s of the JAX engine, `transformers` generate and vLLM's CPU build on the same
workloads.

    python -m experiments.bench.engine [--workloads flat multi_turn] [--repeats 5]
    python -m experiments.bench.engine --checkpoint .cache/smollm2-135m-instruct --repeats 2

All load the same checkpoint, by default a random tiny one (width 128, 2 layers, float32), and the
same prompts, lengths and observations. Each runs in its own process, and its fastest setting
counts. `make bench-peers` installs the peers. With a checkpoint, ours and vLLM keep their matrices
in bfloat16, vLLM its keys and values too. Peaks of memory include what compiling takes.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import resource
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from experiments.bench import workload as workloads
from experiments.bench.contest import Contenders, contend, table
from experiments.bench.learner import SHAPE

HERE = "experiments/bench"
CONTENDERS: Contenders = {
    "here": (
        sys.executable,
        ["-m", "experiments.bench.engine"],
        [["--leave", "0.25"], ["--leave", "0.5"], ["--leave", "1", "--block", "64"]],
    ),
    "transformers": (
        ".bench/trl/bin/python",
        [f"{HERE}/peer_transformers.py"],
        [[], ["--batch", "16"]],
    ),
    "vLLM CPU": (
        ".bench/vllm/bin/python",
        [f"{HERE}/peer_vllm.py"],
        [["--mode", "async"], ["--mode", "offline"]],
    ),
}


# Settings for a checkpoint of a real size, where reading the matrices takes much of the time.
LARGE = {
    "here": [
        ["--weight-dtype", "bfloat16", *more] for more in ([], ["--leave", "1", "--block", "64"])
    ],
    "vLLM CPU": [["--dtype", "bfloat16", *mode] for mode in CONTENDERS["vLLM CPU"][2]],
}


def measure(
    workload: workloads.Workload,
    folder: str,
    *,
    slots: int,
    block: int,
    leave: float,
    repeats: int,
    weight_dtype: str,
) -> dict[str, Any]:
    """Return seconds, processor seconds and tokens/s. As in rollouts, every episode is a coroutine.
    The first round compiles."""
    import jax
    import jax.numpy as jnp

    from models import hf
    from rl.engines.jax.engine import JaxEngine
    from rl.trajectory import Sampling

    shape, params = hf.load(folder)
    engine = JaxEngine(
        shape, params, slots=slots, context=-(-workload.max_length // 32) * 32, decode_block=block,
        leave=leave, weight_dtype=jnp.dtype(weight_dtype),
    )  # fmt: skip
    del params

    async def episode(row: int, script: workloads.Episode) -> None:
        history = list(script.prompt)
        for number, turn in enumerate(script.turns):
            sampling = Sampling(max_tokens=turn.new_tokens, seed=100 * row + number)
            completion = await engine.generate(history, sampling, session=str(row))
            assert len(completion.tokens) == turn.new_tokens
            history += [*completion.tokens, *turn.observation]
        await engine.release(str(row))

    async def play() -> None:
        await asyncio.gather(
            *(episode(row, script) for row, script in enumerate(workload.episodes))
        )

    seconds, processor = [], []
    for _ in range(repeats + 1):
        engine.clear_cache()
        start, began = time.perf_counter(), time.process_time()
        asyncio.run(play())
        seconds.append(time.perf_counter() - start)
        processor.append(time.process_time() - began)
    rows = engine.stats()["decode_row_steps"] / max(1, engine.stats()["decode_steps"])
    return {
        "name": f"here ({slots} slots, blocks of {block}, leave {leave}, {weight_dtype}, "
        f"{rows:.0f} rows a step)",
        "version": jax.__version__,
        "workload": workload.name,
        "new_tokens": workload.new_tokens,
        "seconds": seconds[1:],
        "processor_seconds": processor[1:],
        "first_seconds": seconds[0],
        "tokens_per_second": workload.new_tokens / min(seconds[1:]),
        "peak_gb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument(
        "--workloads", nargs="+", default=list(workloads.MAKERS), choices=list(workloads.MAKERS)
    )
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument(
        "--flat-tokens",
        type=int,
        default=128,
        help="new tokens of each prompt of the flat workload",
    )
    parser.add_argument(
        "--checkpoint", default="", help="a model directory, instead of the tiny random model"
    )
    parser.add_argument("--json", default="", help="file to which all results are written too")
    one = parser.add_argument_group(
        "one measurement of the JAX engine, as started by the comparison"
    )
    one.add_argument("--model")
    one.add_argument("--workload")
    one.add_argument("--slots", type=int, default=64)
    one.add_argument("--block", type=int, default=32)
    one.add_argument("--leave", type=float, default=0.25)
    one.add_argument("--weight-dtype", default="float32", choices=["float32", "bfloat16"])
    args = parser.parse_args()
    if args.model:
        workload = workloads.load(args.workload)
        names = ("slots", "block", "leave", "repeats", "weight_dtype")
        options = {name: getattr(args, name) for name in names}
        print(json.dumps(measure(workload, args.model, **options)))
        return

    from models import hf, qwen

    results: dict[str, dict[str, dict[str, Any] | None]] = {}
    with tempfile.TemporaryDirectory() as folder:
        model, contenders = args.checkpoint or folder, dict(CONTENDERS)
        if args.checkpoint:
            shape = hf.config_of(model)
            contenders |= {who: (*CONTENDERS[who][:2], settings) for who, settings in LARGE.items()}
        else:
            shape = qwen.Config(**SHAPE)
            hf.save(folder, shape, qwen.init(shape, 0))
        for name in args.workloads:
            path = Path(folder) / f"{name}.json"
            options = {"new_tokens": args.flat_tokens} if name == "flat" else {}
            workloads.MAKERS[name](vocab=shape.vocab, **options).save(path)
            arguments = ["--model", model, "--workload", str(path), "--repeats", str(args.repeats)]
            results[name] = {who: contend(contenders, who, arguments) for who in contenders}
    print("\n" + table(contenders, "generated tokens/s", results))
    if args.json:
        Path(args.json).write_text(json.dumps(results, indent=2))


if __name__ == "__main__":
    main()
