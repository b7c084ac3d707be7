"""Trained tokens/s of TRL's GRPO trainer on a batch. Runs under the peer's own Python:

    .bench/trl/bin/python -m experiments.bench.peer_trl DIR BATCH.json [--micro 16]

Runs GRPOTrainer.train() with its generation replaced by the given batch; a step is loss, backward
pass, clipping and AdamW. Configured for speed: no gradient checkpointing, no reference model, and
old log-probabilities from the same forward pass. The last line of the output is one JSON object.
"""

import os
import tempfile
import time
from typing import Any

import datasets
import tokenizers
import torch
import transformers
import trl

from experiments import commands
from experiments.bench.harness import report
from experiments.bench.workload import Batch, load_batch, padded


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


def tensors(batch: Batch) -> dict[str, torch.Tensor]:
    """Return the result of _generate_and_score_completions: prompts padded on the left, completions
    on the right."""
    prompts = torch.tensor(padded([row.prompt for row in batch.rows], left=True))
    completions = torch.tensor(padded([row.completion for row in batch.rows]))
    return {
        "prompt_ids": prompts,
        "prompt_mask": (prompts != 0).long(),
        "completion_ids": completions,
        "completion_mask": (completions != 0).long(),
        "tool_mask": torch.tensor(padded([row.mask for row in batch.rows])),
        "advantages": torch.tensor([row.advantage for row in batch.rows]),
        "num_items_in_batch": torch.tensor(float(batch.trained_tokens)),
    }


def tokenizer_of(vocab: int) -> transformers.PreTrainedTokenizerFast:
    """Return a dummy tokenizer, which the trainer requires but does not use here."""
    words = {f"w{index}": index for index in range(vocab)}
    model = tokenizers.models.WordLevel(words, unk_token="w0")
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizers.Tokenizer(model), pad_token="w0", eos_token="w1"
    )


def main(model: str, batch: str, *, micro: int = 0, repeats: int = 5) -> None:
    """Report seconds and tokens/s of a step.

    micro: rows per forward pass; 0 = all
    """
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    transformers.logging.set_verbosity_error()
    work, clock = load_batch(batch), Clock()
    rows = micro or len(work.rows)
    with tempfile.TemporaryDirectory() as folder:
        config = trl.GRPOConfig(
            output_dir=folder, max_steps=repeats + 2, per_device_train_batch_size=rows,
            gradient_accumulation_steps=len(work.rows) // rows, num_generations=2,
            learning_rate=1e-5, max_completion_length=max(len(row.completion) for row in work.rows),
            gradient_checkpointing=False, bf16=False, use_cpu=True, logging_strategy="no",
            save_strategy="no", report_to="none", disable_tqdm=True,
        )  # fmt: skip
        trainer = Trainer(
            model=transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32),
            reward_funcs=lambda prompts, **kwargs: [0.0] * len(prompts), args=config,
            callbacks=[clock],
            train_dataset=datasets.Dataset.from_dict({"prompt": ["w2"] * len(work.rows)}),
            processing_class=tokenizer_of(work.vocab),
        )  # fmt: skip
        trainer.fixed = tensors(work)
        trainer.train()
    name = f"TRL {trl.__version__} GRPO (micro {rows})"
    report(name, work.trained_tokens, clock.seconds, warm_up=2)


if __name__ == "__main__":
    commands.program(main)
