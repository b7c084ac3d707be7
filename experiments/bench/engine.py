"""Generated tokens/s of the JAX engine, `transformers` generate and vLLM's CPU build on the same workloads.

    python -m experiments.bench.engine [--workloads flat multi_turn] [--repeats 5]

All load the same random tiny checkpoint (width 128, 2 layers, float32) and the same prompts, lengths and observations.
Each runs in its own process, and its fastest setting counts. `make bench-peers` installs the peers.
"""

from __future__ import annotations

import argparse
import asyncio
import json
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
    "transformers": (".bench/trl/bin/python", [f"{HERE}/peer_transformers.py"], [[], ["--batch", "16"]]),
    "vLLM CPU": (".bench/vllm/bin/python", [f"{HERE}/peer_vllm.py"], [["--mode", "async"], ["--mode", "offline"]]),
}


def measure(
    workload: workloads.Workload, folder: str, *, slots: int, block: int, leave: float, repeats: int
) -> dict[str, Any]:
    """Return seconds and tokens/s. As in rollouts, every episode is a coroutine. The first round compiles."""
    import jax

    from models import hf
    from rl.engines.jax.engine import JaxEngine
    from rl.trajectory import Sampling

    shape, params = hf.load(folder)
    context = -(-workload.max_length // 32) * 32
    engine = JaxEngine(shape, params, slots=slots, context=context, decode_block=block, leave=leave)

    async def episode(row: int, script: workloads.Episode) -> None:
        history = list(script.prompt)
        for number, turn in enumerate(script.turns):
            sampling = Sampling(max_tokens=turn.new_tokens, seed=100 * row + number)
            completion = await engine.generate(history, sampling, session=str(row))
            assert len(completion.tokens) == turn.new_tokens
            history += [*completion.tokens, *turn.observation]
        await engine.release(str(row))

    async def play() -> None:
        await asyncio.gather(*(episode(row, script) for row, script in enumerate(workload.episodes)))

    seconds = []
    for _ in range(repeats + 1):
        engine.forget()
        start = time.perf_counter()
        asyncio.run(play())
        seconds.append(time.perf_counter() - start)
    return {
        "name": f"here ({slots} slots, blocks of {block}, leave {leave})",
        "version": jax.__version__,
        "workload": workload.name,
        "new_tokens": workload.new_tokens,
        "seconds": seconds[1:],
        "first_seconds": seconds[0],
        "tokens_per_second": workload.new_tokens / min(seconds[1:]),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--workloads", nargs="+", default=["flat", "multi_turn"], choices=["flat", "multi_turn"])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", default="", help="file to which all results are written too")
    one = parser.add_argument_group("one measurement of the JAX engine, as started by the comparison")
    one.add_argument("--model")
    one.add_argument("--workload")
    one.add_argument("--slots", type=int, default=64)
    one.add_argument("--block", type=int, default=32)
    one.add_argument("--leave", type=float, default=0.25)
    args = parser.parse_args()
    if args.model:
        workload = workloads.load(args.workload)
        options = {name: getattr(args, name) for name in ("slots", "block", "leave", "repeats")}
        print(json.dumps(measure(workload, args.model, **options)))
        return

    from models import hf, qwen

    results: dict[str, dict[str, dict[str, Any] | None]] = {}
    with tempfile.TemporaryDirectory() as folder:
        shape = qwen.Config(**SHAPE)
        hf.save(folder, shape, qwen.init(shape, 0))
        for name in args.workloads:
            path = Path(folder) / f"{name}.json"
            {"flat": workloads.flat, "multi_turn": workloads.multi_turn}[name](vocab=shape.vocab).save(path)
            arguments = ["--model", folder, "--workload", str(path), "--repeats", str(args.repeats)]
            results[name] = {who: contend(CONTENDERS, who, arguments) for who in CONTENDERS}
    print("\n" + table(CONTENDERS, "generated tokens/s", results))
    if args.json:
        Path(args.json).write_text(json.dumps(results, indent=2))


if __name__ == "__main__":
    main()
