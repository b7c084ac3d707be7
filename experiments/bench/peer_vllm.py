"""Generated tokens/s of vLLM's CPU build on a workload. Runs under the peer's own Python:

    .bench/vllm/bin/python -m experiments.bench.peer_vllm DIR WORKLOAD.json [--mode async|offline]

`async` runs every episode as a coroutine over one AsyncLLM, without HTTP, without a barrier between
turns, and with prefix caching. `offline` calls LLM.generate on all episodes, turn by turn, with the
engine in this process. The comparison uses the faster one. The last line of the output is one JSON
object. No log-probabilities are computed, which favours this peer, and end tokens are ignored.
"""

import asyncio
import os
import time
from typing import Any, Literal

from experiments import commands
from experiments.bench.harness import clocked, report
from experiments.bench.workload import Episode, Workload, extend, load, turns_of

SETTINGS = {
    "VLLM_CPU_KVCACHE_SPACE": "2",  # GiB
    # the default leaves one core idle
    "VLLM_CPU_OMP_THREADS_BIND": f"0-{len(os.sched_getaffinity(0)) - 1}",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "HF_HUB_OFFLINE": "1",
}
os.environ |= SETTINGS | os.environ

BLOCK = 32  # tokens of a KV block; with the default of 128 the prefix cache would hardly ever hit


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


def offline(options: dict[str, Any], workload: Workload, rounds: int) -> list[float]:
    """Return the seconds of each round."""
    from vllm import LLM

    llm = LLM(**options)

    def play() -> None:
        llm.reset_prefix_cache()
        for going_on in turns_of(workload):
            outputs = llm.generate(
                [{"prompt_token_ids": history} for history, _ in going_on],
                [sampling(turn.new_tokens) for _, turn in going_on],
                use_tqdm=False,
            )
            for (history, turn), output in zip(going_on, outputs):
                extend(history, output.outputs[0].token_ids, turn)

    return clocked(play, rounds)


async def online(options: dict[str, Any], workload: Workload, rounds: int) -> list[float]:
    """Return the seconds of each round."""
    from vllm import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    engine = AsyncLLM.from_engine_args(AsyncEngineArgs(**options))

    async def episode(name: str, script: Episode) -> None:
        history = list(script.prompt)
        for number, turn in enumerate(script.turns):
            prompt = {"prompt_token_ids": history}
            async for output in engine.generate(
                prompt, sampling(turn.new_tokens), f"{name}-{number}"
            ):
                last = output
            extend(history, last.outputs[0].token_ids, turn)

    seconds = []
    for repeat in range(rounds):
        await engine.reset_prefix_cache()
        start = time.perf_counter()
        await asyncio.gather(
            *(episode(f"{repeat}-{row}", script) for row, script in enumerate(workload.episodes))
        )
        seconds.append(time.perf_counter() - start)
    engine.shutdown()
    return seconds


def main(
    model: str,
    workload: str,
    *,
    mode: Literal["async", "offline"] = "async",
    repeats: int = 3,
    dtype: Literal["float32", "bfloat16"] = "float32",
) -> None:
    """Report seconds and tokens/s. The first round is a warm-up.

    dtype: of everything
    """
    work = load(workload)
    options = {
        "model": model,
        "dtype": dtype,
        "skip_tokenizer_init": True,
        "max_model_len": -(-work.max_length // BLOCK) * BLOCK,
        "max_num_seqs": len(work.episodes),
        "block_size": BLOCK,
        "enable_prefix_caching": True,
    }
    if mode == "offline":
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # before vllm is imported
        seconds = offline(options, work, repeats + 1)
    else:
        seconds = asyncio.run(online(options, work, repeats + 1))
    import vllm

    name = f"vLLM {vllm.__version__} on CPU ({mode}, {dtype})"
    report(name, work.new_tokens, seconds)


if __name__ == "__main__":
    commands.program(main)
