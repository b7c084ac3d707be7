"""Generated tokens/s of `transformers` generate on a workload. Runs under the peer's own Python:

    .bench/trl/bin/python -m experiments.bench.peer_transformers DIR WORKLOAD.json [--batch 16]

Each turn is one static left-padded batch of all episodes, or batches of `--batch` episodes of
similar length, as in trainers without a serving engine: a batch lasts as long as its longest row,
and every turn prefills the whole history again. The last line of the output is one JSON object. No
log-probabilities are computed, which favours this peer. Rows never stop early, and only tokens of
the workload count.
"""

from __future__ import annotations

import os
import sys

import torch
import transformers

from experiments import commands
from experiments.bench.harness import clocked, report
from experiments.bench.workload import Workload, load, padded


@torch.inference_mode()
def play(model: transformers.PreTrainedModel, workload: Workload, batch: int) -> None:
    """Generate every turn of every episode, `batch` episodes at a time."""
    histories = [list(episode.prompt) for episode in workload.episodes]
    for turn in range(max(len(episode.turns) for episode in workload.episodes)):
        rows = [row for row, episode in enumerate(workload.episodes) if turn < len(episode.turns)]
        rows.sort(key=lambda row: len(histories[row]))
        for first in range(0, len(rows), batch):
            generate(model, workload, histories, turn, rows[first : first + batch])


def generate(
    model: transformers.PreTrainedModel,
    workload: Workload,
    histories: list[list[int]],
    turn: int,
    rows: list[int],
) -> None:
    """Generate one turn of the episodes `rows` as one batch and append it to their histories."""
    tokens = torch.tensor(padded([histories[row] for row in rows], left=True))
    mask = torch.tensor(padded([[1] * len(histories[row]) for row in rows], left=True))
    width = tokens.shape[1]
    longest = max(workload.episodes[row].turns[turn].new_tokens for row in rows)
    out = model.generate(
        input_ids=tokens, attention_mask=mask, max_new_tokens=longest, do_sample=True,
        temperature=1.0, top_k=0, eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    assert out.shape[1] == width + longest, "a row ended early"
    for row, generated in zip(rows, out[:, width:].tolist()):
        wanted = workload.episodes[row].turns[turn]
        histories[row] += generated[: wanted.new_tokens] + wanted.observation


def main(model: str, workload: str, *, batch: int = 0, repeats: int = 3) -> None:
    """Report seconds and tokens/s. The first round is a warm-up.

    batch: episodes per batch; 0 = all
    """
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    transformers.logging.set_verbosity_error()
    work = load(workload)
    peer = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    peer.generation_config.eos_token_id = None
    size = batch or len(work.episodes)
    seconds = clocked(lambda: play(peer, work, size), repeats + 1)
    name = f"transformers {transformers.__version__} generate (batches of {size})"
    report(name, work.new_tokens, seconds)


if __name__ == "__main__":
    sys.exit(commands.run(main))
