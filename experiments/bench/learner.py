"""Trained tokens/s of our learner, TRL's GRPO and tunix's GRPO on the same batch.

    python -m experiments.bench.learner [--batches flat multi_turn] [--repeats 5]

All load the same random tiny checkpoint (width 128, 2 layers, float32) and the same batch. Each
runs in its own process, and its fastest setting counts. A step is loss, gradient, clipping and
AdamW; ours includes packing the rows. `make bench-peers` installs the peers.
"""

from __future__ import annotations

import argparse
import functools
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from experiments.bench import workload as workloads
from experiments.bench.contest import Contenders, contend, table

HERE = "experiments/bench"
SHAPE: dict[str, Any] = {
    "vocab": 704,
    "d_model": 128,
    "layers": 2,
    "heads": 4,
    "kv_heads": 2,
    "head_dim": 32,
    "d_ff": 384,
}

CONTENDERS: Contenders = {
    "here": (
        sys.executable,
        ["-m", "experiments.bench.learner"],
        [
            ["--row", "0", "--micro", "16"],
            ["--row", "0", "--micro", "4", "--chunk", "512"],
            ["--row", "0", "--micro", "1", "--chunk", "256", "--widths", "8"],
        ],
    ),
    "TRL": (
        ".bench/trl/bin/python",
        [f"{HERE}/peer_trl.py"],
        [["--micro", "64"], ["--micro", "16"], ["--micro", "4"], ["--micro", "2"]],
    ),
    "tunix": (
        ".bench/tunix/bin/python",
        [f"{HERE}/peer_tunix.py"],
        [
            *(["--micro", micro] for micro in ("64", "16", "4", "2", "1")),
            *(["--packed", "1024", "--micro", micro] for micro in ("0", "4", "1")),
        ],
    ),
}


def measure(
    batch: workloads.Batch,
    folder: str,
    *,
    row: int,
    micro: int,
    chunk: int,
    widths: int,
    repeats: int,
) -> dict[str, Any]:
    """Return seconds and tokens/s of our step. row: tokens of a packed row; 0 = the longest
    sample."""
    import jax
    import numpy as np

    from models import hf
    from rl import learner, optim
    from rl.forward import Forward
    from rl.losses.ppo import ppo
    from rl.packing import pack
    from rl.samples import Sample

    shape, params = hf.load(folder)
    samples = []
    for r in batch.rows:
        prompt = [0] * len(r.prompt)
        mask = np.array(prompt + list(r.mask), bool)
        advantage = np.where(mask, np.float32(r.advantage), 0)
        samples.append(Sample(np.array(r.prompt + r.completion), mask, advantage=advantage))
    width = row or -(-max(len(sample) for sample in samples) // 32) * 32
    optimizer = optim.optimizer(lr=1e-5)
    forward = Forward(shape, micro=micro, chunk=chunk, widths=widths)
    loss = functools.partial(ppo, clip_low=0.2, clip_high=0.2)
    logp = learner.make_logp(forward)(params, pack(samples, width))
    update = learner.make_update(forward, optimizer=optimizer, loss=loss)
    state = learner.init_state(shape, params, optimizer)
    seconds = []
    for _ in range(repeats + 2):
        start = time.perf_counter()
        packed = pack(samples, width)
        packed.logp_RT = logp
        state, metrics = update(state, packed)
        jax.block_until_ready((state, metrics))
        seconds.append(time.perf_counter() - start)
    return {
        "name": f"here ({micro} rows of {width}, fill {packed.fill:.2f}, widths {widths}, "
        f"chunks of {chunk})",
        "version": jax.__version__,
        "batch": batch.name,
        "trained_tokens": batch.trained_tokens,
        "seconds": seconds[2:],
        "first_seconds": seconds[0],
        "tokens_per_second": batch.trained_tokens / min(seconds[2:]),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument(
        "--batches", nargs="+", default=list(workloads.MAKERS), choices=list(workloads.MAKERS)
    )
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", default="", help="file to which all results are written too")
    one = parser.add_argument_group("one measurement of our learner, as started by the comparison")
    one.add_argument("--model")
    one.add_argument("--batch")
    one.add_argument("--row", type=int, default=0)
    one.add_argument("--micro", type=int, default=8)
    one.add_argument("--chunk", type=int, default=1024)
    one.add_argument("--widths", type=int, default=1)
    args = parser.parse_args()
    if args.model:
        batch = workloads.load_batch(args.batch)
        options = {
            name: getattr(args, name) for name in ("row", "micro", "chunk", "widths", "repeats")
        }
        print(json.dumps(measure(batch, args.model, **options)))
        return

    from models import hf, qwen

    results: dict[str, dict[str, dict[str, Any] | None]] = {}
    with tempfile.TemporaryDirectory() as folder:
        shape = qwen.Config(**SHAPE)
        hf.save(folder, shape, qwen.init(shape, 0))
        for name in args.batches:
            script = workloads.MAKERS[name](vocab=shape.vocab)
            path = Path(folder) / f"{name}.json"
            workloads.batch_of(script).save(path)
            arguments = ["--model", folder, "--batch", str(path), "--repeats", str(args.repeats)]
            results[name] = {who: contend(CONTENDERS, who, arguments) for who in CONTENDERS}
    print("\n" + table(CONTENDERS, "trained tokens/s", results))
    if args.json:
        Path(args.json).write_text(json.dumps(results, indent=2))


if __name__ == "__main__":
    main()
