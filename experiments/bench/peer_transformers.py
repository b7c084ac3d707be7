"""Generated tokens/s of `transformers` generate on a workload. Runs under the peer's own Python:

    .bench/trl/bin/python experiments/bench/peer_transformers.py --model DIR \\
        --workload FILE.json [--batch 16]

Each turn is one static left-padded batch of all episodes, or batches of `--batch` episodes of
similar length, as in trainers without a serving engine: a batch lasts as long as its longest row,
and every turn prefills the whole history again. The last line of the output is one JSON object. No
log-probabilities are computed, which favours this peer. Rows never stop early, and only tokens of
the workload count.
"""

import argparse
import json
import os
import time

import torch
import transformers
import workload as workloads

PAD = 0


@torch.inference_mode()
def play(model: transformers.PreTrainedModel, workload: workloads.Workload, batch: int) -> None:
    """Generate every turn of every episode, `batch` episodes at a time."""
    histories = [list(episode.prompt) for episode in workload.episodes]
    for turn in range(max(len(episode.turns) for episode in workload.episodes)):
        rows = [row for row, episode in enumerate(workload.episodes) if turn < len(episode.turns)]
        rows.sort(key=lambda row: len(histories[row]))
        for first in range(0, len(rows), batch):
            generate(model, workload, histories, turn, rows[first : first + batch])


def generate(
    model: transformers.PreTrainedModel,
    workload: workloads.Workload,
    histories: list[list[int]],
    turn: int,
    rows: list[int],
) -> None:
    """Generate one turn of the episodes `rows` as one batch and append it to their histories."""
    width = max(len(histories[row]) for row in rows)
    tokens = torch.full((len(rows), width), PAD)
    mask = torch.zeros((len(rows), width), dtype=torch.long)
    for index, row in enumerate(rows):
        tokens[index, width - len(histories[row]) :] = torch.tensor(histories[row])
        mask[index, width - len(histories[row]) :] = 1
    longest = max(workload.episodes[row].turns[turn].new_tokens for row in rows)
    out = model.generate(
        input_ids=tokens, attention_mask=mask, max_new_tokens=longest, do_sample=True,
        temperature=1.0, top_k=0, eos_token_id=None, pad_token_id=PAD,
    )  # fmt: skip
    assert out.shape[1] == width + longest, "a row ended early"
    for index, row in enumerate(rows):
        wanted = workload.episodes[row].turns[turn]
        histories[row] += out[index, width : width + wanted.new_tokens].tolist() + list(
            wanted.observation
        )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True)
    parser.add_argument("--workload", required=True)
    parser.add_argument("--batch", type=int, default=0, help="episodes per batch; 0 = all")
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    transformers.logging.set_verbosity_error()
    workload = workloads.load(args.workload)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        args.model, dtype=torch.float32
    ).eval()
    model.generation_config.eos_token_id = None
    batch = args.batch or len(workload.episodes)
    seconds = []
    for _ in range(args.repeats + 1):  # the first round is a warm-up
        start = time.perf_counter()
        play(model, workload, batch)
        seconds.append(time.perf_counter() - start)
    result = {
        "name": f"transformers generate (batches of {batch})",
        "version": transformers.__version__,
        "workload": workload.name,
        "new_tokens": workload.new_tokens,
        "seconds": seconds[1:],
        "first_seconds": seconds[0],
        "tokens_per_second": workload.new_tokens / min(seconds[1:]),
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
