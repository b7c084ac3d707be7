"""Generated tokens/s of the JAX engine, `transformers` generate and vLLM's CPU build on the same
workloads.

    python -m experiments.bench.engine [--workloads flat multi_turn] [--repeats 5]
    python -m experiments.bench.engine --checkpoint .cache/smollm2-135m-instruct --repeats 2

All load the same checkpoint, by default a random tiny one (width 128, 2 layers, float32), and the
same prompts, lengths and observations. Each runs in its own process, and its fastest setting
counts. `make bench-peers` installs the peers. With a checkpoint, ours and vLLM keep their matrices
in bfloat16, vLLM its keys and values too. Peaks of memory include what compiling takes.
"""

import sys
import tempfile

from experiments import commands
from experiments.bench.harness import Contender, compare
from experiments.bench.workload import MAKERS
from models import hf, qwen

TINY = qwen.Config(704, 128, 2, 4, 2, 32, 384)


def contenders(large: bool) -> dict[str, Contender]:
    """Return the contenders. large: for a checkpoint of a real size, where reading the matrices
    takes much of the time."""
    here = ["--leave 0.25", "--leave 0.5", "--leave 1 --block 64"]
    vllm = ["--mode async", "--mode offline"]
    if large:
        here = [f"--weight-dtype bfloat16 {setting}" for setting in ("", here[-1])]
        vllm = [f"--dtype bfloat16 {setting}" for setting in vllm]
    return {
        "here": Contender(sys.executable, "experiments.bench.our_engine", tuple(here)),
        "transformers": Contender(
            ".bench/trl/bin/python", "experiments.bench.peer_transformers", ("", "--batch 16")
        ),
        "vLLM CPU": Contender(".bench/vllm/bin/python", "experiments.bench.peer_vllm", tuple(vllm)),
    }


def main(
    *, workloads: commands.Words = tuple(MAKERS), repeats: int = 5, checkpoint: str = ""
) -> None:
    """Compare the engines and print a table.

    workloads: flat, multi_turn
    checkpoint: a model directory, instead of the tiny random model
    """
    with tempfile.TemporaryDirectory() as folder:
        if not checkpoint:
            hf.save(folder, TINY, qwen.init(TINY, 0))
        model = checkpoint or folder
        vocab = hf.config_of(model).vocab
        works = {name: MAKERS[name](vocab) for name in workloads}
        compare("generated tokens/s", contenders(bool(checkpoint)), works, model, repeats)


if __name__ == "__main__":
    commands.program(main)
