"""Workloads of the benchmarks: the same token ids for every engine and every trainer.

Standard library only, because the peers import this file under their own interpreters. Lengths are
forced (an engine ignores the end token and generates exactly `new_tokens`), so that all contenders
do the same work.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True)
class Turn:
    """Exactly `new_tokens` generated tokens, then `observation` (token ids; empty after the last
    turn)."""

    new_tokens: int
    observation: tuple[int, ...] = ()


@dataclass(frozen=True)
class Episode:
    """One conversation: the prompt of turn k+1 is the prompt, generation and observation of turn
    k."""

    prompt: tuple[int, ...]
    turns: tuple[Turn, ...]

    @property
    def new_tokens(self) -> int:
        return sum(turn.new_tokens for turn in self.turns)

    @property
    def length(self) -> int:
        """The number of tokens of the whole episode, observations included."""
        return len(self.prompt) + sum(
            turn.new_tokens + len(turn.observation) for turn in self.turns
        )


@dataclass(frozen=True)
class Workload:
    """The episodes of one benchmark."""

    name: str
    vocab: int
    episodes: tuple[Episode, ...]
    seed: int = 0

    @property
    def new_tokens(self) -> int:
        """The number of tokens to generate, which rates in tokens/s count."""
        return sum(episode.new_tokens for episode in self.episodes)

    @property
    def max_length(self) -> int:
        return max(episode.length for episode in self.episodes)

    def save(self, path: str | Path) -> None:
        Path(path).write_text(json.dumps(dataclasses.asdict(self)))


def load(path: str | Path) -> Workload:
    """Read what `Workload.save` wrote."""
    record = json.loads(Path(path).read_text())
    record["episodes"] = tuple(
        Episode(
            tuple(e["prompt"]),
            tuple(Turn(t["new_tokens"], tuple(t["observation"])) for t in e["turns"]),
        )
        for e in record["episodes"]
    )
    return Workload(**record)


def _ids(rng: random.Random, n: int, vocab: int) -> tuple[int, ...]:
    return tuple(rng.randrange(1, vocab) for _ in range(n))


def _spread(rng: random.Random, middle: int, spread: float) -> int:
    return max(1, round(middle * rng.uniform(1.0 - spread, 1.0 + spread)))


def flat(
    n: int = 64, prompt_len: int = 32, new_tokens: int = 128, vocab: int = 700, seed: int = 0
) -> Workload:
    """Return `n` single-turn prompts of equal length with `new_tokens` each: the best case for a
    static batch."""
    rng = random.Random(seed)
    episodes = tuple(Episode(_ids(rng, prompt_len, vocab), (Turn(new_tokens),)) for _ in range(n))
    return Workload("flat", vocab, episodes, seed)


def multi_turn(
    episodes: int = 64,
    turns: int = 5,
    prompt_len: int = 200,
    new_tokens: int = 32,
    observation_len: int = 48,
    vocab: int = 700,
    spread: float = 0.75,
    seed: int = 0,
) -> Workload:
    """Return agent episodes whose lengths are uniform within a fraction `spread` of their means."""
    rng = random.Random(seed)

    def episode() -> Episode:
        prompt = _ids(rng, _spread(rng, prompt_len, spread / 2), vocab)
        lengths = [
            (_spread(rng, new_tokens, spread), _spread(rng, observation_len, spread))
            for _ in range(turns)
        ]
        return Episode(
            prompt,
            tuple(
                Turn(new, _ids(rng, seen, vocab) if k < turns - 1 else ())
                for k, (new, seen) in enumerate(lengths)
            ),
        )

    return Workload("multi_turn", vocab, tuple(episode() for _ in range(episodes)), seed)


MAKERS: dict[str, Callable[..., Workload]] = {"flat": flat, "multi_turn": multi_turn}


@dataclass(frozen=True)
class Row:
    """One training sample: a prompt and a completion; `mask` is 1 on the tokens that train."""

    prompt: tuple[int, ...]
    completion: tuple[int, ...]
    mask: tuple[int, ...]
    advantage: float


@dataclass(frozen=True)
class Batch:
    """The samples of one update."""

    name: str
    vocab: int
    rows: tuple[Row, ...] = field(default_factory=tuple)

    @property
    def trained_tokens(self) -> int:
        return sum(sum(row.mask) for row in self.rows)

    @property
    def max_prompt(self) -> int:
        return max(len(row.prompt) for row in self.rows)

    @property
    def max_completion(self) -> int:
        return max(len(row.completion) for row in self.rows)

    def save(self, path: str | Path) -> None:
        Path(path).write_text(json.dumps(dataclasses.asdict(self)))


def load_batch(path: str | Path) -> Batch:
    """Read what `Batch.save` wrote."""
    record = json.loads(Path(path).read_text())
    record["rows"] = tuple(
        Row(tuple(r["prompt"]), tuple(r["completion"]), tuple(r["mask"]), r["advantage"])
        for r in record["rows"]
    )
    return Batch(**record)


def batch_of(workload: Workload) -> Batch:
    """Return the update that follows a workload: random tokens as generations, alternating
    advantages of +1 and -1."""
    rng = random.Random(workload.seed + 1)
    rows = []
    for index, episode in enumerate(workload.episodes):
        completion: list[int] = []
        mask: list[int] = []
        for turn in episode.turns:
            completion += [*_ids(rng, turn.new_tokens, workload.vocab), *turn.observation]
            mask += [1] * turn.new_tokens + [0] * len(turn.observation)
        rows.append(Row(episode.prompt, tuple(completion), tuple(mask), 1.0 if index % 2 else -1.0))
    return Batch(workload.name, workload.vocab, tuple(rows))


def main() -> None:
    parser = argparse.ArgumentParser(description="Write a workload or a training batch as JSON.")
    parser.add_argument("name", choices=list(MAKERS))
    parser.add_argument("path")
    parser.add_argument("--vocab", type=int, default=700)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--batch", action="store_true", help="write the training batch that follows the workload"
    )
    args = parser.parse_args()
    workload = MAKERS[args.name](vocab=args.vocab, seed=args.seed)
    (batch_of(workload) if args.batch else workload).save(args.path)


if __name__ == "__main__":
    main()
