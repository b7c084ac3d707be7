"""Trained tokens/s of our learner on a batch, as `experiments.bench.learner` runs it."""

import functools

import jax

from experiments import commands
from experiments.bench.harness import clocked, report
from experiments.bench.samples import samples_of
from experiments.bench.workload import load_batch
from models import hf
from rl import learner, optim
from rl.forward import Forward
from rl.losses.ppo import ppo
from rl.packing import pack


def main(
    model: str, batch: str, *, micro: int = 8, chunk: int = 1024, widths: int = 1, repeats: int = 5
) -> None:
    """Report seconds and tokens/s of a step. Rows are as long as the longest sample."""
    shape, params = hf.load(model)
    work = load_batch(batch)
    samples = samples_of(work)
    width = -(-max(map(len, samples)) // 32) * 32
    optimizer = optim.optimizer(lr=1e-5)
    forward = Forward(shape, micro=micro, chunk=chunk, widths=widths)
    loss = functools.partial(ppo, clip_low=0.2, clip_high=0.2)
    logp_RT = learner.make_logp(forward)(params, pack(samples, width))
    update = learner.make_update(forward, optimizer=optimizer, loss=loss)
    state = learner.init_state(shape, params, optimizer)

    def step() -> None:
        nonlocal state
        packed = pack(samples, width)
        packed.logp_RT = logp_RT
        state, metrics = update(state, packed)
        jax.block_until_ready((state, metrics))

    seconds = clocked(step, repeats + 2)
    fill = pack(samples, width).fill
    name = f"here ({micro} rows of {width}, fill {fill:.2f}, widths {widths}, chunks of {chunk})"
    report(name, work.trained_tokens, seconds, warm_up=2)


if __name__ == "__main__":
    commands.program(main)
