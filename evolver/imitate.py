"""Make a base policy where no pretrained one exists: imitate scripted demonstrations.

The demonstrations teach the syntax of tool calls and the copying of ids; how well the tasks are done is left to
learning by reward. Each is tokenized as an episode would be: generations train, everything else is prompt.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from envs.world import Message, Tool
from evolver import demonstrations
from evolver.books import Workdir
from evolver.parts import RunError
from models import chat, hf, qwen
from models.tokenizer import Tokenizer, train_bpe
from rl import learner, optim
from rl.packing import Packed, pack
from rl.samples import Sample
from rl.seeds import seed_of

ORIGIN = (  # of demonstrations, in the model card
    "The demonstrations come from training worlds; no task of the default train, dev and test sets is among them."
)


def imitate(config: Any, workdir: str) -> None:
    """Train a policy of `config.model.preset` on demonstrations and write it to WORKDIR/policy in Hugging Face form.

    Raises RunError where no demonstration fits a row."""
    part, env = config.imitation, config.env.name
    started = time.monotonic()
    world = config.env.args.to_dict()
    careful, careless = (
        demonstrations.make(env, part.demonstrations, config.seed, care=care, hint=part.hint, **world)
        for care in (1.0, part.care)
    )
    unhinted = [episode for episode in careless if not episode["hinted"]]
    success = np.mean([episode["success"] for episode in unhinted or careless])
    took, who = time.monotonic() - started, "careless, unhinted" if unhinted else "careless, hinted"
    print(f"2 x {part.demonstrations} demonstrations in {took:.0f} s; of the {who} {success:.1%} succeed")
    texts = (text for episode in careless for text in demonstrations.texts_of(episode))
    tokenizer = train_bpe(texts, part.vocab, demonstrations.extra_tokens(env))
    data = [samples_of(config, episodes, tokenizer) for episodes in (careful, careless)]
    shape = shape_of(config, tokenizer.vocab_size)
    params = train(config, shape, qwen.init(shape, seed_of(config.seed, "init") % 2**31), *data)
    Workdir(workdir).claim(config.to_dict(), config.seed, "imitation")
    policy = Path(workdir) / "policy"
    told = card(config, shape, len(data[1]), float(success), helped=not unhinted)
    hf.save(policy, shape, params, tokenizer=tokenizer, card=told)
    print(f"{qwen.parameter_count(shape):,} parameters written to {policy}")


def shape_of(config: Any, vocab: int) -> qwen.Config:
    """The preset's shape for a vocabulary of `vocab` entries."""
    return dataclasses.replace(qwen.PRESETS[config.model.preset], vocab=vocab)


def make_optimizer(config: Any) -> Any:
    """Muon and Adam with their schedules. Of config.optim, b1, eps and weight_decay play no part here."""
    part = config.imitation
    schedules = [
        optim.schedule(
            learning_rate=peak,
            decay=config.optim.schedule,
            warmup_steps=config.optim.warmup,
            total_steps=config.steps,
            final=part.final_lr,
        )
        for peak in (part.muon_lr, config.optim.lr)
    ]
    return optim.muon(
        learning_rate=schedules[0],
        adam_learning_rate=schedules[1],
        b2=config.optim.b2,
        clip_norm=config.optim.clip or math.inf,  # 0 = no clipping
    )


def train(config: Any, shape: qwen.Config, params: Any, careful: Sequence[Sample], careless: Sequence[Sample]) -> Any:
    """The weights after `config.steps` updates on packed rows of demonstrations, in shuffled passes.

    The first ones show no slips: what is to be copied from where is learnt several times sooner when it always is. Then
    ever more do; all at once, after a loss near zero, the change would undo part of what was learnt.
    """
    part, optimizer = config.imitation, make_optimizer(config)
    update = learner.make_update(
        shape,
        None,
        optimizer=optimizer,
        objective="nll",
        micro_rows=config.learner.micro,
        capacity_rows=part.rows,
        dtype=jnp.dtype(config.model.dtype),
    )
    state = learner.init_state(shape, params, optimizer)
    started, losses = time.monotonic(), []
    stream = batches(careful, careless, shares(part.careful, config.steps), part.rows, config.learner.row, config.seed)
    for step, packed in enumerate(stream, 1):
        state, metrics = update(state, packed)
        losses.append(float(metrics["loss"]))
        if step % 20 == 0 or step == config.steps:
            seconds = time.monotonic() - started
            speed, left = step * part.rows * config.learner.row / seconds, seconds / step * (config.steps - step)
            loss = np.mean(losses[-20:])
            print(
                f"imitate {step}/{config.steps}  loss {loss:.4f}  {speed:,.0f} tokens/s  {left:.0f} s left", flush=True
            )
        if step == config.steps:
            break
    return state["params"]


def shares(careful: float, steps: int) -> Iterator[float]:
    """Of careless samples, by update, without end: 0 for the first `careful` of the `steps`, then up to 1 halfway
    through the others. With `careful` of 1 there are no others."""
    ramp = (1 - careful) / 2 or 1.0
    return (min(1.0, max(0.0, step / steps - careful) / ramp) for step in itertools.count(1))


def batches(
    careful: Sequence[Sample],
    careless: Sequence[Sample],
    shares: Iterable[float],
    rows: int,
    row_tokens: int,
    seed: int,
) -> Iterator[Packed]:
    """Batches of at most `rows` packed rows, passing over both data for ever, shuffled anew in each pass; `shares` are
    those of careless samples in each batch."""
    draw = np.random.default_rng(seed_of(seed, "batches"))

    def passes(data: Sequence[Sample]) -> Iterator[Sample]:
        while True:
            yield from (data[i] for i in draw.permutation(len(data)))

    streams = passes(careful), passes(careless)
    mean = np.mean([len(sample) for data in (careful, careless) for sample in data])
    n = max(1, int(0.95 * rows * row_tokens / mean))  # leaves first-fit some air: a batch must not need another row
    for share in shares:
        k = round(share * n)
        chosen = [next(streams[i < k]) for i in range(n)]
        while (packed := pack(chosen, row_tokens)).tokens_RT.shape[0] > rows:
            chosen = chosen[:-1]
        yield packed


def samples_of(config: Any, episodes: Sequence[dict[str, Any]], tokenizer: Tokenizer) -> list[Sample]:
    """The episodes that fit a row. Raises RunError where none does."""
    samples = [sample_of(episode["messages"], tokenizer, episode.get("tools", ())) for episode in episodes]
    fitting = [sample for sample in samples if len(sample) <= config.learner.row]
    if not fitting:
        shortest = min(len(sample) for sample in samples)
        raise RunError(
            f"none of {len(samples)} demonstrations fits config.learner.row={config.learner.row}: the shortest has"
            f" {shortest} tokens"
        )
    return fitting


def sample_of(messages: Sequence[Message], tokenizer: Tokenizer, tools: Sequence[Tool] = ()) -> Sample:
    """One demonstrated conversation as an episode's tokens; the assistant's turns train."""
    first = next(i for i, message in enumerate(messages) if message["role"] == "assistant")
    tokens, mask = chat.opening(tokenizer, messages[:first], tools), []
    mask += [False] * len(tokens)
    i = first
    while i < len(messages):
        turn = chat.reply(tokenizer, messages[i])
        j = next((j for j in range(i + 1, len(messages)) if messages[j]["role"] == "assistant"), len(messages))
        answer = chat.observation(tokenizer, messages[i + 1 : j], closed=True) if j < len(messages) else []
        tokens += turn + answer
        mask += [True] * len(turn) + [False] * len(answer)
        i = j
    return Sample(np.array(tokens), np.array(mask))


def card(config: Any, shape: qwen.Config, n: int, success: float, *, helped: bool = False) -> str:
    """The model card. `n` careless demonstrations fit a row; `success` is the share of them that do their task, of
    those without a hint unless `helped`."""
    part, size, demos = config.imitation, qwen.parameter_count(shape), demonstrations.module(config.env.name)
    command = getattr(demos, "COMMAND", "python run.py --config=configs/base_policy.py")
    origin = getattr(demos, "ORIGIN", ORIGIN)
    where = "with a hint" if helped else "where no hint helps"
    then = f", then ever\nmore on {n:,} careless ones, of which {success:.0%} succeed {where}"
    then = then if part.careful < 1 else ""
    return f"""---
license: apache-2.0
library_name: jax
---
# Base policy for the `{config.env.name}` sandbox

A Qwen2.5-shaped transformer of {size:,} parameters ({shape.layers} layers, width {shape.d_model}), made from random
weights by `{command}`, seed {config.seed}: {config.steps} updates of {part.rows}
rows of {config.learner.row} tokens, the first {part.careful:.0%} on scripted demonstrations without slips{then}.

It writes tool calls in Qwen's form, copies ids and names, and does the rest as carelessly as what it saw last: it is
where learning by reward starts, not where it ends. {origin}
It knows no language beyond the sandbox's.
"""
