"""Trained tokens/s of tunix's GRPO step on a batch. Runs under the peer's own Python:

    .bench/tunix/bin/python experiments/bench/peer_tunix.py --model DIR --batch FILE.json \\
        [--packed TOKENS] [--micro 16]

Runs the jitted train step of its RL trainer with its GRPO loss: loss, gradient, clipping and AdamW.
Configured for speed: no reference model, old log-probabilities from the same forward pass, and with
--packed rows filled by first fit and separated by segment ids. The last line of the output is one
JSON object.
"""

import argparse
import importlib.metadata
import json
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import workload as workloads
from flax import nnx
from tunix.models.qwen2 import model as qwen2
from tunix.models.qwen2 import params as qwen2_params
from tunix.rl import algo_core, common, trainer
from tunix.rl.grpo import grpo_learner
from tunix.sft import peft_trainer

PAD, END = 0, 1


def padded(batch: workloads.Batch) -> common.TrainExample:
    """Return one row per sample: prompts padded on the left, completions on the right."""
    rows, prompt, completion = len(batch.rows), batch.max_prompt, batch.max_completion
    prompts, completions = (
        np.full((rows, prompt), PAD, np.int32),
        np.full((rows, completion), PAD, np.int32),
    )
    mask = np.zeros((rows, completion), np.int32)
    for index, row in enumerate(batch.rows):
        prompts[index, prompt - len(row.prompt) :] = row.prompt
        completions[index, : len(row.completion)] = row.completion
        mask[index, : len(row.mask)] = row.mask
    advantages = np.array([row.advantage for row in batch.rows], np.float32)
    return common.TrainExample(
        prompt_ids=jnp.array(prompts), prompt_mask=jnp.array(prompts != PAD),
        completion_ids=jnp.array(completions), completion_mask=jnp.array(mask),
        advantages=jnp.array(advantages), ref_per_token_logps=None, old_per_token_logps=None,
    )  # fmt: skip


def packed(batch: workloads.Batch, width: int) -> common.TrainExample:
    """Return rows of `width` tokens with several samples each, distinguished by segment ids."""
    bins: list[list[workloads.Row]] = []
    room: list[int] = []
    for row in sorted(batch.rows, key=lambda row: -len(row.prompt) - len(row.completion)):
        size = len(row.prompt) + len(row.completion)
        place = next((index for index, free in enumerate(room) if free >= size), None)
        if place is None:
            bins, room, place = [*bins, []], [*room, width], len(bins)
        bins[place].append(row)
        room[place] -= size
    shape = (len(bins), width)
    tokens, mask, segments, positions = (np.zeros(shape, np.int32) for _ in range(4))
    advantages = np.zeros(shape, np.float32)
    for index, rows in enumerate(bins):
        start = 0
        for number, row in enumerate(rows, 1):
            middle, end = start + len(row.prompt), start + len(row.prompt) + len(row.completion)
            tokens[index, start:end] = row.prompt + row.completion
            mask[index, middle:end] = row.mask
            advantages[index, middle:end] = row.advantage
            segments[index, start:end] = number
            positions[index, start:end] = np.arange(end - start)
            start = end
    empty = jnp.zeros((len(bins), 0), jnp.int32)
    return common.TrainExample(
        prompt_ids=empty, prompt_mask=empty, completion_ids=jnp.array(tokens),
        completion_mask=jnp.array(mask), advantages=jnp.array(advantages), ref_per_token_logps=None,
        old_per_token_logps=None, segment_ids=jnp.array(segments),
        segment_positions=jnp.array(positions),
    )  # fmt: skip


def load(folder: str) -> tuple[Any, jax.sharding.Mesh]:
    """Return (tunix's Qwen2 with the checkpoint's weights, mesh)."""
    record = json.loads((Path(folder) / "config.json").read_text())
    heads = record["num_attention_heads"]
    theta = record.get("rope_theta") or record["rope_parameters"]["rope_theta"]
    config = qwen2.ModelConfig(
        num_layers=record["num_hidden_layers"], vocab_size=record["vocab_size"],
        embed_dim=record["hidden_size"], hidden_dim=record["intermediate_size"], num_heads=heads,
        num_kv_heads=record["num_key_value_heads"],
        head_dim=record.get("head_dim") or record["hidden_size"] // heads, rope_theta=theta,
        norm_eps=record["rms_norm_eps"], use_tied_embedding=record["tie_word_embeddings"],
    )  # fmt: skip
    mesh = jax.make_mesh((1, 1), ("fsdp", "tp"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    return qwen2_params.create_model_from_safe_tensors(
        folder, config, mesh=mesh, dtype=jnp.float32
    ), mesh


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True)
    parser.add_argument("--batch", required=True)
    parser.add_argument(
        "--packed", type=int, default=0, help="tokens of a packed row; 0 = one sample per row"
    )
    parser.add_argument("--micro", type=int, default=0, help="rows per forward pass; 0 = all")
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    batch = workloads.load_batch(args.batch)
    example = packed(batch, args.packed) if args.packed else padded(batch)
    rows = example.completion_ids.shape[0]
    micro = args.micro or rows
    parts = [jax.tree.map(lambda x, i=i: x[i : i + micro], example) for i in range(0, rows, micro)]
    model, mesh = load(args.model)
    config = grpo_learner.GRPOConfig(beta=0.0, loss_agg_mode="token-mean")
    config.temperature = 1.0  # its learner copies this from the rollout config
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-5))
    training = peft_trainer.TrainingConfig(
        eval_every_n_steps=1000, gradient_accumulation_steps=len(parts) if len(parts) > 1 else None
    )
    peer = trainer.Trainer(model, optimizer, training, custom_checkpoint_metadata_fn=dict)
    peer.with_loss_fn(
        lambda model, train_example, algo_config: algo_core.grpo_loss_fn(
            model, train_example, config, PAD, END
        ),
        has_aux=True,
    )
    peer.with_gen_model_input_fn(lambda x: {"train_example": x, "algo_config": config})
    seconds = []
    with mesh:
        step, _ = peer.jit_train_and_eval_step(cache_nnx_graph=True)
        for _ in range(args.repeats + 2):
            start = time.perf_counter()
            for part in parts:
                out = step(part)
            jax.block_until_ready((out, nnx.state(model)))
            seconds.append(time.perf_counter() - start)
    layout = f"packed {args.packed}" if args.packed else "padded"
    result = {
        "name": f"tunix GRPO ({layout}, micro {micro})",
        "version": importlib.metadata.version("google-tunix"),
        "batch": batch.name,
        "trained_tokens": batch.trained_tokens,
        "seconds": seconds[2:],
        "first_seconds": seconds[0],
        "tokens_per_second": batch.trained_tokens / min(seconds[2:]),
    }
    print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
