"""Workloads of the benchmarks: the same token ids for every engine and every trainer.

Standard library only, because the peers import this file under their own interpreters. Lengths are
forced (an engine ignores the end token and generates exactly `new_tokens`), so that all contenders
do the same work. No id is 0, so that 0 pads.
"""

import itertools
import json
import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

Ids = list[int]
EPISODES = 64


class Turn(NamedTuple):
    """Exactly `new_tokens` generated tokens, then `observation` (token ids; empty after the last
    turn)."""

    new_tokens: int
    observation: Ids


class Episode(NamedTuple):
    """One conversation: the prompt of turn k+1 is the prompt, generation and observation of turn
    k."""

    prompt: Ids
    turns: list[Turn]


class Workload(NamedTuple):
    """The episodes of one benchmark."""

    vocab: int
    episodes: list[Episode]

    @property
    def new_tokens(self) -> int:
        """The number of tokens to generate, which rates in tokens/s count."""
        turns = itertools.chain.from_iterable(episode.turns for episode in self.episodes)
        return sum(turn.new_tokens for turn in turns)

    @property
    def max_length(self) -> int:
        """The number of tokens of the longest episode, observations included."""
        return max(
            len(prompt) + sum(turn.new_tokens + len(turn.observation) for turn in turns)
            for prompt, turns in self.episodes
        )


class Row(NamedTuple):
    """One training sample: a prompt and a completion; `mask` is 1 on the tokens that train."""

    prompt: Ids
    completion: Ids
    mask: Ids
    advantage: float


class Batch(NamedTuple):
    """The samples of one update."""

    vocab: int
    rows: list[Row]

    @property
    def trained_tokens(self) -> int:
        """The number of tokens that train, which rates in tokens/s count."""
        return sum(sum(row.mask) for row in self.rows)


def load(path: str) -> Workload:
    """Read a workload that was written as JSON."""
    vocab, episodes = json.loads(Path(path).read_text())
    return Workload(
        vocab, [Episode(prompt, [Turn(*t) for t in turns]) for prompt, turns in episodes]
    )


def load_batch(path: str) -> Batch:
    """Read a batch that was written as JSON."""
    vocab, rows = json.loads(Path(path).read_text())
    return Batch(vocab, [Row(*row) for row in rows])


def turns_of(workload: Workload) -> Iterator[list[tuple[Ids, Turn]]]:
    """Yield for each turn the (history, turn) of the episodes that get so far. Whoever plays it
    extends the histories."""
    histories = [list(episode.prompt) for episode in workload.episodes]
    for number in range(max(len(episode.turns) for episode in workload.episodes)):
        yield [
            (history, episode.turns[number])
            for history, episode in zip(histories, workload.episodes)
            if number < len(episode.turns)
        ]


def extend(history: Ids, generated: Sequence[int], turn: Turn) -> None:
    """Append a turn to a history."""
    assert len(generated) == turn.new_tokens, f"{len(generated)} tokens, not {turn.new_tokens}"
    history += [*generated, *turn.observation]


def padded(rows: list[Ids], *, left: bool = False) -> list[Ids]:
    """Return rows of equal length, filled up with zeros."""
    width = max(map(len, rows))
    zeros = [[0] * (width - len(row)) for row in rows]
    return [fill + row if left else row + fill for fill, row in zip(zeros, rows)]


def _ids(rng: random.Random, n: int, vocab: int) -> Ids:
    return [rng.randrange(1, vocab) for _ in range(n)]


def _spread(rng: random.Random, middle: int, spread: float) -> int:
    return max(1, round(middle * rng.uniform(1.0 - spread, 1.0 + spread)))


def flat(vocab: int) -> Workload:
    """Return single-turn prompts of 32 tokens with 128 new tokens each: the best case for a static
    batch."""
    rng = random.Random(0)
    turns = [Turn(128, [])]
    return Workload(vocab, [Episode(_ids(rng, 32, vocab), turns) for _ in range(EPISODES)])


def multi_turn(vocab: int) -> Workload:
    """Return agent episodes of five turns whose lengths are uniform around their means."""
    rng = random.Random(0)
    episodes = []
    for _ in range(EPISODES):
        prompt = _ids(rng, _spread(rng, 200, 0.375), vocab)
        lengths = [(_spread(rng, 32, 0.75), _spread(rng, 48, 0.75)) for _ in range(5)]
        turns = [Turn(new_tokens, _ids(rng, length, vocab)) for new_tokens, length in lengths[:-1]]
        turns.append(Turn(lengths[-1][0], []))
        episodes.append(Episode(prompt, turns))
    return Workload(vocab, episodes)


MAKERS: dict[str, Callable[..., Workload]] = {"flat": flat, "multi_turn": multi_turn}


def batch_of(workload: Workload) -> Batch:
    """Return the update that follows a workload: random tokens as generations, alternating
    advantages of +1 and -1."""
    rng = random.Random(1)
    rows = []
    for index, episode in enumerate(workload.episodes):
        completion: Ids = []
        mask: Ids = []
        for turn in episode.turns:
            completion += [*_ids(rng, turn.new_tokens, workload.vocab), *turn.observation]
            mask += [1] * turn.new_tokens + [0] * len(turn.observation)
        rows.append(Row(episode.prompt, completion, mask, 1.0 if index % 2 else -1.0))
    return Batch(workload.vocab, rows)
