"""Imitation: train a model on demonstrated episodes.

The demonstrations teach the syntax of tool calls and the copying of ids; doing tasks well is left
to learning by reward. Each demonstration becomes samples as an episode does: its context template
makes the prompts, and the agent's turns train.
"""

import asyncio
import functools
import itertools
import json
import random
import re
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
import optax

from envs.values import Json
from envs.world import Message, Observation, Tool
from evolver.files.progress import LOG_EVERY
from models import qwen
from models.tokenizer import Tokenizer
from rl import calls, learner, optim, samples
from rl.checkpoint import Checkpoints
from rl.contexts import Opening, Template
from rl.forward import Forward
from rl.losses.nll import nll
from rl.packing import Packed, beginning_of, pack
from rl.samples import Sample
from rl.seeds import seed_of
from rl.trajectory import Completion, Turn

SAVE_EVERY = 300.0  # seconds between checkpoints
SHORT = 40  # most tokens of a list with which copying begins
_WORD = re.compile(r"\w+")
_DIGITS = re.compile("[0-9]")
TRIES = 100  # draws of an id that is not taken
SKIPPED = 3  # updates in a row without effect after which nothing is learned any more


class NothingFits(Exception):
    """Every demonstration is longer than a row; the message is for the user."""


class Diverged(Exception):
    """The loss is no number any more; the message is for the user."""


def make_optimizer(config: Any) -> optax.GradientTransformation:
    """Return Muon for the matrices of the layers and Adam for all other weights, with their
    schedules; Adam alone for a checkpoint, which has the circuits that Muon finds sooner."""
    c = config
    schedule = functools.partial(
        optim.schedule, schedule=c.schedule, warmup=c.warmup, steps=c.steps, final=c.final_lr
    )
    lr = schedule(lr=c.lr)
    if c.model.path:
        return optim.optimizer(lr=lr, b2=c.b2, weight_decay=0.0, clip=c.clip)
    return optim.muon(lr=schedule(lr=c.muon_lr), adam_lr=lr, b2=c.b2, clip=c.clip)


def train(
    config: Any,
    shape: qwen.Config,
    params: Any,
    careful: Sequence[Sample],
    careless: Sequence[Sample],
    checkpoints: Checkpoints,
) -> Any:
    """Return the weights after `config.steps` updates on packed rows of demonstrations, in shuffled
    passes. It goes on from the checkpoints where it was interrupted. Raises Diverged.

    The first updates show no slips, because copying is learned several times sooner from sources
    that are always right. Careless samples are then added gradually: added all at once, after a
    loss near zero, they would undo part of that.
    """
    c, optimizer = config, make_optimizer(config)
    dtype = jnp.dtype(c.model.dtype)
    forward = Forward(shape, micro=c.micro, capacity_rows=c.rows, dtype=dtype)
    update = learner.make_update(forward, optimizer=optimizer, loss=nll)
    state = learner.init_state(shape, params, optimizer)
    done = 0
    if found := checkpoints.restore(state):
        done, state, _ = found
        print(f"resuming after update {done}", flush=True)
    started = said = saved = time.monotonic()
    losses = []
    running = []  # of updates whose results have not been waited for
    skipped = 0
    stream = curriculum(c, careful, careless)
    for step, packed in enumerate(itertools.islice(stream, done, c.steps), done + 1):
        seed = seed_of(c.seed, "rounding", step) % 2**32
        state, metrics = update(state, packed, seed=seed)
        running.append(metrics)
        while len(running) > (step < c.steps):  # the next batch is packed while this one trains
            metrics = running.pop(0)
            losses.append(float(metrics["loss"]))
            skipped = skipped + 1 if metrics["skipped"] else 0
        if skipped >= SKIPPED:
            raise Diverged(
                f"imitation has diverged: loss or gradient of the updates up to {step} of {c.steps}"
                " is not finite. Lower the learning rate, or compute in float32"
            )
        late = time.monotonic() - said > LOG_EVERY
        if losses and (step % 20 == 0 or step == c.steps or late):
            said = time.monotonic()
            seconds = said - started
            speed = (step - done) * c.rows * c.row / seconds
            left = seconds / (step - done) * (c.steps - step)
            print(
                f"imitate {step}/{c.steps}  loss {np.mean(losses[-20:]):.4f}  "
                f"{speed:,.0f} tokens/s  {left:.0f} s left",
                flush=True,
            )
        if time.monotonic() - saved > SAVE_EVERY:
            saved = time.monotonic()
            checkpoints.save(step, state, {})
    return state["params"]


def curriculum(
    config: Any, careful: Sequence[Sample], careless: Sequence[Sample]
) -> Iterator[Packed]:
    """Return the batches of all updates, without end: lists of pairs, then episodes of which all
    tokens train, then those of which the agent's do."""
    c = config
    first, second = round(c.lists * c.steps), round(c.whole * c.steps)
    careless_shares = itertools.islice(shares(c.careful, c.steps), first, None)
    lists = lists_of_pairs(careful, c.rows, c.row, c.seed)
    data = careful, careless, careless_shares, c.rows, c.row
    whole = batches(*data, c.seed, pairs=c.pairs, whole=True)
    agent = batches(*data, c.seed + (second > 0), pairs=c.pairs, share=c.share_prompts)
    return itertools.chain(itertools.islice(lists, first), itertools.islice(whole, second), agent)


def whole_of(sample: Sample) -> Sample:
    """Return a sample of which all tokens train but the first. Prompts and observations name things
    again and again, which teaches copying many times sooner than the agent's few tokens do."""
    return Sample(sample.tokens, np.arange(len(sample.tokens)) > 0)


def shares(careful: float, steps: int) -> Iterator[float]:
    """Yield the share of careless samples in each update, without end. It is 0 for the first
    `careful` (a fraction) of the `steps`, then grows to 1 halfway through the others; if `careful`
    is 1 there are no others."""
    ramp = (1 - careful) / 2 or 1.0
    return (min(1.0, max(0.0, step / steps - careful) / ramp) for step in itertools.count(1))


def batches(
    careful: Sequence[Sample],
    careless: Sequence[Sample],
    shares: Iterable[float],
    rows: int,
    row: int,
    seed: int,
    pairs: float = 0.0,
    share: bool = False,
    whole: bool = False,
) -> Iterator[Packed]:
    """Yield batches of at most `rows` packed rows of `row` tokens, in endless passes over both data
    sets, each pass shuffled anew. `shares` are the shares of careless samples in the batches.
    pairs: share of the samples of a batch without careless ones that are `random_pairs` instead.
    share: samples share what their prompts begin with (`rl.packing`).
    whole: samples train as `whole_of` says."""
    draw = np.random.default_rng(seed_of(seed, "batches"))
    vocabulary = vocabulary_of(careful) if pairs else np.empty(0)

    def passes(data: Sequence[Sample]) -> Iterator[Sample]:
        while True:
            yield from (data[i] for i in draw.permutation(len(data)))

    streams = passes(careful), passes(careless)
    mean = np.mean([len(sample) for sample in (*careful, *careless)])
    # lists of pairs begin with nothing that a demonstration begins with
    shared = beginning_of([*careful, *careless]) if share and not pairs else 0
    # first-fit packing leaves gaps, and a batch must not need another row
    n = max(1, int(0.95 * rows * (row - shared) / (mean - shared)))
    for careless_share in shares:
        k = round(careless_share * n)
        m = 0 if k else round(pairs * n)
        chosen = [random_pairs(draw, vocabulary, int(mean)) for _ in range(m)]
        drawn = (next(streams[i < k]) for i in range(n - m))
        chosen += map(whole_of, drawn) if whole else drawn
        while (packed := pack(chosen, row, share=share)).rows > rows:
            chosen = chosen[:-1]
        yield packed


def lists_of_pairs(data: Sequence[Sample], rows: int, row: int, seed: int) -> Iterator[Packed]:
    """Yield batches of short lists of `random_pairs` of the tokens in the data, without end."""
    draw = np.random.default_rng(seed_of(seed, "lists"))
    vocabulary = vocabulary_of(data)
    while True:
        chosen = [random_pairs(draw, vocabulary, SHORT) for _ in range(2 * rows * row // SHORT)]
        while (packed := pack(chosen, row)).rows > rows:
            chosen = chosen[: len(chosen) - rows]
        yield packed


def vocabulary_of(data: Sequence[Sample]) -> np.ndarray:
    """Return the ids that the samples hold, in order."""
    return np.flatnonzero(np.bincount(np.concatenate([sample.tokens for sample in data])))


def random_pairs(draw: np.random.Generator, vocabulary: np.ndarray, longest: int) -> Sample:
    """Return a list of random pairs of tokens and the same pairs in another order, whose second
    tokens train.

    It asks for what selecting from a list takes, at every pair: to find a token, and to copy what
    follows it. Tiny policies stay at chance here, but with such lists mixed in they select from the
    lists of demonstrations sooner (docs/results.md, "Learning: in a second world").
    """
    n = int(draw.integers(2, max(3, min(longest, len(vocabulary)) // 4 + 1)))
    pairs_N2 = draw.choice(vocabulary, (n, 2), replace=False)
    tokens = np.concatenate([pairs_N2, pairs_N2[draw.permutation(n)]]).reshape(-1)
    return Sample(tokens, (np.arange(4 * n) > 2 * n) & (np.arange(4 * n) % 2 == 1))


def with_other_ids(episode: Json, rng: random.Random) -> Json:
    """Return the episode with other digits in its ids, the same ones in all of its messages.

    Ids are the words that look like those the agent writes, of letters and digits: all of M12, M70
    and M34 if the agent writes M12. Words of the tools stay. A policy that imitates the same few
    starts again and again remembers which id is right in each; where the ids are new each time, it
    has to look them up. Returns the episode itself if there are too few ids of that form.
    """
    said = [m["content"] for m in episode["messages"] if m["role"] == "assistant"]
    fixed = set(_WORD.findall(json.dumps(episode["tools"], ensure_ascii=False)))
    forms = {
        _form(word)
        for word in _WORD.findall(" ".join(said))
        if _DIGITS.search(word) and not word.isdecimal() and word not in fixed
    }
    texts = " ".join(str(message["content"]) for message in episode["messages"])
    words = dict.fromkeys(word for word in _WORD.findall(texts) if word not in fixed)
    taken = fixed | {word for word in words if _form(word) not in forms}
    others = {}
    for word in [word for word in words if _form(word) in forms]:
        drawn = (_DIGITS.sub(lambda _: rng.choice("123456789"), word) for _ in range(TRIES))
        other = next((new for new in drawn if new not in taken), None)
        if other is None:
            return episode
        others[word] = other
        taken.add(other)
    messages = [
        message | {"content": _WORD.sub(lambda m: others.get(m[0], m[0]), message["content"])}
        for message in episode["messages"]
    ]
    return episode | {"messages": messages}


def _form(word: str) -> str:
    """Return what words like this one share: "A00" for M12 and B34."""
    return re.sub("[a-z]", "a", re.sub("[A-Z]", "A", _DIGITS.sub("0", word)))


def samples_of(
    episodes: Sequence[Json],
    tokenizer: Tokenizer,
    row: int,
    template: Template,
) -> list[Sample]:
    """Return the samples of the episodes that fit a row of `row` tokens. Raises NothingFits if none
    does.

    template: the context template, as a plug.
    """

    async def played() -> list[Sample]:
        turns = [
            await turns_of(e["messages"], tokenizer, e.get("tools", ()), template) for e in episodes
        ]
        return list(itertools.chain.from_iterable(map(samples.of_turns, turns)))

    made = asyncio.run(played())
    fitting = [sample for sample in made if len(sample) <= row]
    if not fitting:
        shortest = min(len(sample) for sample in made)
        raise NothingFits(
            f"none of {len(episodes)} demonstrations fits config.row={row}: "
            f"the shortest sample has {shortest} tokens"
        )
    return fitting


async def turns_of(
    messages: Sequence[Message],
    tokenizer: Tokenizer,
    tools: Sequence[Tool],
    template: Template,
) -> list[Turn]:
    """Return a demonstrated conversation as the turns of an episode, whose prompts are those of the
    template."""
    places = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    opening = Observation(list(messages[: places[0]]), list(tools))
    context = template(Opening(tokenizer, opening))
    turns = []
    for i, following in zip(places, [*places[1:], None]):
        tokens = calls.reply(tokenizer, messages[i])
        said = Completion(tokens, [0.0] * len(tokens), "stop", 0)
        turns.append(Turn(context.prompt, said, messages[i]["content"], []))
        if following:
            await context.extend(said, messages[i + 1 : following], messages[i].get("tools"))
    return turns
