"""Generated tokens/s of `transformers` generate on a workload. Runs under the peer's own Python:

    .bench/trl/bin/python -m experiments.bench.peer_transformers DIR WORKLOAD.json [--batch 16]

Each turn is one static left-padded batch of all episodes, or batches of `--batch` episodes of
similar length, as in trainers without a serving engine: a batch lasts as long as its longest row,
and every turn prefills the whole history again. The last line of the output is one JSON object. No
log-probabilities are computed, which favours this peer. Rows never stop early, and only tokens of
the workload count.
"""

import os

import torch
import transformers

from experiments import commands
from experiments.bench.harness import clocked, report
from experiments.bench.workload import Ids, Turn, Workload, extend, load, padded, turns_of


@torch.inference_mode()
def play(model: transformers.PreTrainedModel, workload: Workload, batch: int) -> None:
    """Generate every turn of every episode, `batch` episodes at a time."""
    for going_on in turns_of(workload):
        going_on.sort(key=lambda pair: len(pair[0]))
        for first in range(0, len(going_on), batch):
            generate(model, going_on[first : first + batch])


def generate(model: transformers.PreTrainedModel, rows: list[tuple[Ids, Turn]]) -> None:
    """Generate one turn of these episodes as one batch and append it to their histories."""
    histories = [history for history, _ in rows]
    tokens = torch.tensor(padded(histories, left=True))
    mask = torch.tensor(padded([[1] * len(history) for history in histories], left=True))
    width, longest = tokens.shape[1], max(turn.new_tokens for _, turn in rows)
    out = model.generate(
        input_ids=tokens, attention_mask=mask, max_new_tokens=longest, do_sample=True,
        temperature=1.0, top_k=0, eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    assert out.shape[1] == width + longest, "a row ended early"
    for (history, turn), generated in zip(rows, out[:, width:].tolist()):
        extend(history, generated[: turn.new_tokens], turn)


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
    commands.program(main)
