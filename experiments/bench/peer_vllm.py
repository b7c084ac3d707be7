"""Generated tokens/s of vLLM's CPU build on a workload. Runs under the peer's own Python:

    .bench/vllm/bin/python experiments/bench/peer_vllm.py --model DIR --workload FILE.json \\
        [--mode async|offline]

`async` runs every episode as a coroutine over one AsyncLLM, without HTTP, without a barrier between
turns, and with prefix caching. `offline` calls LLM.generate on all episodes, turn by turn, with the
engine in this process. The comparison uses the faster one. The last line of the output is one JSON
object. No log-probabilities are computed, which favours this peer, and end tokens are ignored.
"""

import argparse
import asyncio
import json
import os
import resource
import time
from collections.abc import Sequence
from typing import Any

os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")  # GiB
os.environ.setdefault(
    "VLLM_CPU_OMP_THREADS_BIND", f"0-{len(os.sched_getaffinity(0)) - 1}"
)  # the default leaves one core idle
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import workload as workloads

BLOCK = 32  # tokens of a KV block; with the default of 128 the prefix cache would hardly ever hit


def engine_options(args: argparse.Namespace, workload: workloads.Workload) -> dict[str, Any]:
    """Return the engine options of both modes."""
    return {
        "model": args.model,
        "dtype": args.dtype,
        "skip_tokenizer_init": True,
        "enforce_eager": args.eager,
        "max_model_len": -(-workload.max_length // BLOCK) * BLOCK,
        "max_num_seqs": len(workload.episodes),
        "block_size": BLOCK,
        "enable_prefix_caching": True,
    }


def sampling(new_tokens: int) -> Any:
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    return SamplingParams(
        temperature=1.0,
        max_tokens=new_tokens,
        ignore_eos=True,
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )


def rounds_offline(args: argparse.Namespace, workload: workloads.Workload) -> list[float]:
    """Return the seconds of each round; the first is a warm-up."""
    from vllm import LLM

    llm = LLM(**engine_options(args, workload))
    seconds = []
    for _ in range(args.repeats + 1):
        llm.reset_prefix_cache()
        start = time.perf_counter()
        histories = [list(episode.prompt) for episode in workload.episodes]
        for turn in range(max(len(episode.turns) for episode in workload.episodes)):
            rows = [
                row for row, episode in enumerate(workload.episodes) if turn < len(episode.turns)
            ]
            outputs = llm.generate(
                [{"prompt_token_ids": histories[row]} for row in rows],
                [sampling(workload.episodes[row].turns[turn].new_tokens) for row in rows],
                use_tqdm=False,
            )
            for row, output in zip(rows, outputs):
                extend(
                    histories[row], output.outputs[0].token_ids, workload.episodes[row].turns[turn]
                )
        seconds.append(time.perf_counter() - start)
    return seconds


def extend(history: list[int], generated: Sequence[int], turn: workloads.Turn) -> None:
    assert len(generated) == turn.new_tokens, (
        f"{len(generated)} tokens instead of {turn.new_tokens}"
    )
    history += [*generated, *turn.observation]


async def rounds_async(args: argparse.Namespace, workload: workloads.Workload) -> list[float]:
    """Return the seconds of each round; the first is a warm-up."""
    from vllm import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    engine = AsyncLLM.from_engine_args(AsyncEngineArgs(**engine_options(args, workload)))

    async def episode(name: str, script: workloads.Episode) -> None:
        history = list(script.prompt)
        for number, turn in enumerate(script.turns):
            prompt = {"prompt_token_ids": history}
            async for output in engine.generate(
                prompt, sampling(turn.new_tokens), f"{name}-{number}"
            ):
                last = output
            extend(history, last.outputs[0].token_ids, turn)

    seconds = []
    for repeat in range(args.repeats + 1):
        await engine.reset_prefix_cache()
        start = time.perf_counter()
        await asyncio.gather(
            *(episode(f"{repeat}-{row}", script) for row, script in enumerate(workload.episodes))
        )
        seconds.append(time.perf_counter() - start)
    engine.shutdown()
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True)
    parser.add_argument("--workload", required=True)
    parser.add_argument("--mode", choices=["async", "offline"], default="async")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument(
        "--dtype", choices=["float32", "bfloat16"], default="float32", help="of everything"
    )
    parser.add_argument(
        "--eager", action="store_true", help="no torch.compile: starts faster, runs slower"
    )
    args = parser.parse_args()
    if args.mode == "offline":
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    workload = workloads.load(args.workload)
    seconds = (
        rounds_offline(args, workload)
        if args.mode == "offline"
        else asyncio.run(rounds_async(args, workload))
    )
    import vllm

    # With `async` the engine is a process of its own.
    processes = (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
    result = {
        "name": f"vLLM CPU ({args.mode}, {args.dtype}{', eager' if args.eager else ''})",
        "version": vllm.__version__,
        "workload": workload.name,
        "new_tokens": workload.new_tokens,
        "seconds": seconds[1:],
        "first_seconds": seconds[0],
        "tokens_per_second": workload.new_tokens / min(seconds[1:]),
        "peak_gb": sum(resource.getrusage(who).ru_maxrss for who in processes) * 1024 / 1e9,
    }
    print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
