"""Trained tokens/s of TRL's GRPO trainer on a batch. Runs under the peer's own Python:

    .bench/trl/bin/python experiments/bench/peer_trl.py --model DIR --batch FILE.json [--micro 16]

Runs GRPOTrainer.train() with its generation replaced by the given batch; a step is loss, backward
pass, clipping and AdamW. Configured for speed: no gradient checkpointing, no reference model, and
old log-probabilities from the same forward pass. The last line of the output is one JSON object.
"""

import argparse
import json
import os
import tempfile
import time
from typing import Any

import datasets
import tokenizers
import torch
import transformers
import trl
import workload as workloads


class Trainer(trl.GRPOTrainer):
    """GRPO on a fixed batch."""

    fixed: dict[str, torch.Tensor]

    def _generate_and_score_completions(self, inputs: Any) -> dict[str, torch.Tensor]:
        return dict(self.fixed)


class Clock(transformers.TrainerCallback):
    """Seconds of each optimizer step."""

    def __init__(self) -> None:
        self.seconds: list[float] = []

    def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
        self.start = time.perf_counter()

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        self.seconds.append(time.perf_counter() - self.start)


def tensors(batch: workloads.Batch) -> dict[str, torch.Tensor]:
    """Return the result of _generate_and_score_completions: prompts padded on the left, completions
    on the right."""
    rows, prompt, completion = len(batch.rows), batch.max_prompt, batch.max_completion
    out = {
        "prompt_ids": torch.zeros(rows, prompt, dtype=torch.long),
        "prompt_mask": torch.zeros(rows, prompt, dtype=torch.long),
        "completion_ids": torch.zeros(rows, completion, dtype=torch.long),
        "completion_mask": torch.zeros(rows, completion, dtype=torch.long),
        "tool_mask": torch.zeros(rows, completion, dtype=torch.long),
        "advantages": torch.tensor([row.advantage for row in batch.rows]),
        "num_items_in_batch": torch.tensor(float(batch.trained_tokens)),
    }
    for index, row in enumerate(batch.rows):
        out["prompt_ids"][index, prompt - len(row.prompt) :] = torch.tensor(row.prompt)
        out["prompt_mask"][index, prompt - len(row.prompt) :] = 1
        out["completion_ids"][index, : len(row.completion)] = torch.tensor(row.completion)
        out["completion_mask"][index, : len(row.completion)] = 1
        out["tool_mask"][index, : len(row.mask)] = torch.tensor(row.mask)
    return out


def tokenizer_of(vocab: int) -> transformers.PreTrainedTokenizerFast:
    """Return a dummy tokenizer, which the trainer requires but does not use here."""
    words = {f"w{index}": index for index in range(vocab)}
    model = tokenizers.models.WordLevel(words, unk_token="w0")
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizers.Tokenizer(model), pad_token="w0", eos_token="w1"
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True)
    parser.add_argument("--batch", required=True)
    parser.add_argument("--micro", type=int, default=0, help="rows per forward pass; 0 = all")
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    transformers.logging.set_verbosity_error()
    batch = workloads.load_batch(args.batch)
    micro = args.micro or len(batch.rows)
    model = transformers.AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32)
    clock = Clock()
    with tempfile.TemporaryDirectory() as folder:
        config = trl.GRPOConfig(
            output_dir=folder, max_steps=args.repeats + 2, per_device_train_batch_size=micro,
            gradient_accumulation_steps=len(batch.rows) // micro, num_generations=2,
            learning_rate=1e-5, max_completion_length=batch.max_completion,
            gradient_checkpointing=False, bf16=False, use_cpu=True, logging_strategy="no",
            save_strategy="no", report_to="none", disable_tqdm=True,
        )  # fmt: skip
        trainer = Trainer(
            model=model, reward_funcs=lambda prompts, **kwargs: [0.0] * len(prompts), args=config,
            callbacks=[clock],
            train_dataset=datasets.Dataset.from_dict({"prompt": ["w2"] * len(batch.rows)}),
            processing_class=tokenizer_of(batch.vocab),
        )  # fmt: skip
        trainer.fixed = tensors(batch)
        trainer.train()
    steady = clock.seconds[2:]
    result = {
        "name": f"TRL GRPO (micro {micro})",
        "version": trl.__version__,
        "batch": batch.name,
        "trained_tokens": batch.trained_tokens,
        "seconds": steady,
        "first_seconds": clock.seconds[0],
        "tokens_per_second": batch.trained_tokens / min(steady),
    }
    print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
