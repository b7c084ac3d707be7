"""Trained tokens/s of tunix's GRPO step on a batch. Runs under the peer's own Python:

    .bench/tunix/bin/python -m experiments.bench.peer_tunix DIR BATCH.json \\
        [--packed TOKENS] [--micro 16]

Runs the jitted train step of its RL trainer with its GRPO loss: loss, gradient, clipping and AdamW.
Configured for speed: no reference model, old log-probabilities from the same forward pass, and with
--packed rows filled as ours are and separated by segment ids. The last line of the output is one
JSON object.
"""

import importlib.metadata
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from tunix.models.qwen2 import model as qwen2
from tunix.models.qwen2 import params as qwen2_params
from tunix.rl import algo_core, common, trainer
from tunix.rl.grpo import grpo_learner
from tunix.sft import peft_trainer

from experiments import commands
from experiments.bench.harness import clocked, report
from experiments.bench.samples import samples_of
from experiments.bench.workload import Batch, load_batch
from experiments.bench.workload import padded as filled
from rl.packing import pack

PAD, END = 0, 1


def padded(batch: Batch) -> common.TrainExample:
    """Return one row per sample: prompts padded on the left, completions on the right."""
    prompts = jnp.array(filled([row.prompt for row in batch.rows], left=True), jnp.int32)
    return common.TrainExample(
        prompt_ids=prompts, prompt_mask=prompts != PAD,
        completion_ids=jnp.array(filled([row.completion for row in batch.rows]), jnp.int32),
        completion_mask=jnp.array(filled([row.mask for row in batch.rows]), jnp.int32),
        advantages=jnp.array([row.advantage for row in batch.rows], jnp.float32),
        ref_per_token_logps=None, old_per_token_logps=None,
    )  # fmt: skip


def packed_rows(batch: Batch, width: int) -> common.TrainExample:
    """Return rows of `width` tokens with several samples each, distinguished by segment ids."""
    rows = pack(samples_of(batch), width)
    empty = jnp.zeros((rows.rows, 0), jnp.int32)
    return common.TrainExample(
        prompt_ids=empty, prompt_mask=empty, completion_ids=jnp.array(rows.tokens_RT),
        completion_mask=jnp.array(rows.mask_RT, jnp.int32),
        advantages=jnp.array(rows.advantage_RT), ref_per_token_logps=None,
        old_per_token_logps=None, segment_ids=jnp.array(rows.segments_RT),
        segment_positions=jnp.array(rows.positions_RT),
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


def main(model: str, batch: str, *, packed: int = 0, micro: int = 0, repeats: int = 5) -> None:
    """Report seconds and tokens/s of a step.

    packed: tokens of a packed row; 0 = one sample per row
    micro: rows per forward pass; 0 = all
    """
    work = load_batch(batch)
    example = packed_rows(work, packed) if packed else padded(work)
    rows = example.completion_ids.shape[0]
    micro = micro or rows
    parts = [jax.tree.map(lambda x, i=i: x[i : i + micro], example) for i in range(0, rows, micro)]
    policy, mesh = load(model)
    config = grpo_learner.GRPOConfig(beta=0.0, loss_agg_mode="token-mean")
    config.temperature = 1.0  # its learner copies this from the rollout config
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-5))
    training = peft_trainer.TrainingConfig(
        eval_every_n_steps=1000, gradient_accumulation_steps=len(parts) if len(parts) > 1 else None
    )
    peer = trainer.Trainer(policy, optimizer, training, custom_checkpoint_metadata_fn=dict)
    peer.with_loss_fn(
        lambda model, train_example, algo_config: algo_core.grpo_loss_fn(
            model, train_example, config, PAD, END
        ),
        has_aux=True,
    )
    peer.with_gen_model_input_fn(lambda x: {"train_example": x, "algo_config": config})
    with mesh:
        step, _ = peer.jit_train_and_eval_step(cache_nnx_graph=True)

        def update() -> None:
            out = [step(part) for part in parts][-1]
            jax.block_until_ready((out, nnx.state(policy)))

        seconds = clocked(update, repeats + 2)
    layout = f"packed {packed}" if packed else "padded"
    version = importlib.metadata.version("google-tunix")
    report(
        f"tunix {version} GRPO ({layout}, micro {micro})", work.trained_tokens, seconds, warm_up=2
    )


if __name__ == "__main__":
    commands.program(main)
