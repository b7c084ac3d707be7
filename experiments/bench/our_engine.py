"""Generated tokens/s of the JAX engine on a workload, as `experiments.bench.engine` runs it."""

import asyncio
from typing import Literal

import jax.numpy as jnp

from experiments import commands
from experiments.bench.harness import clocked, report
from experiments.bench.workload import Episode, Workload, extend, load
from models import hf
from rl.engines import Engine
from rl.engines.jax.engine import JaxEngine
from rl.trajectory import Sampling

SLOTS = 64


async def play(engine: Engine, workload: Workload, mark: int = 0) -> None:
    """Play all episodes at once; as in rollouts, each is a coroutine. mark: the first token of
    every prompt, where no round may repeat the prompts of an earlier one; 0 = the workload's."""

    async def episode(row: int, script: Episode) -> None:
        history = [mark or script.prompt[0], *script.prompt[1:]]
        for number, turn in enumerate(script.turns):
            sampling = Sampling(max_tokens=turn.new_tokens, seed=100 * row + number)
            completion = await engine.generate(history, sampling, session=str(row))
            extend(history, completion.tokens, turn)
        await engine.release(str(row))

    await asyncio.gather(*(episode(*numbered) for numbered in enumerate(workload.episodes)))


def main(
    model: str,
    workload: str,
    *,
    block: int = 32,
    leave: float = 0.25,
    weight_dtype: Literal["float32", "bfloat16"] = "float32",
    repeats: int = 5,
) -> None:
    """Report seconds and tokens/s. The first round compiles."""
    work = load(workload)
    shape, params = hf.load(model)
    engine = JaxEngine(
        shape, params, slots=SLOTS, context=-(-work.max_length // 32) * 32, decode_block=block,
        leave=leave, weight_dtype=jnp.dtype(weight_dtype),
    )  # fmt: skip
    del params

    def one_round() -> None:
        engine.clear_cache()
        asyncio.run(play(engine, work))

    seconds = clocked(one_round, repeats + 1)
    rows = engine.stats()["decode_row_steps"] / max(1, engine.stats()["decode_steps"])
    settings = f"{SLOTS} slots, blocks of {block}, leave {leave}, {weight_dtype}"
    report(f"here ({settings}, {rows:.0f} rows a step)", work.new_tokens, seconds)


if __name__ == "__main__":
    commands.program(main)
