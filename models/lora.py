"""Low-rank adapters (LoRA, arXiv:2106.09685): small trainable additions to frozen matrices of every
layer.

Each target matrix W becomes W + (alpha / rank) A B. The adapters are a separate tree, declared like
the weights: {"layers": {"q_lora_a": (L, D, rank), "q_lora_b": (L, rank, H, h), ...}}.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from models import qwen
from models.files import replacing, write_atomically

TARGETS = tuple(qwen.INPUTS)
PEFT = {
    name: f"self_attn.{name}_proj" if len(name) == 1 else f"mlp.{name}_proj" for name in TARGETS
}


@dataclasses.dataclass(frozen=True)
class LoRA:
    """The matrices that get an adapter, its rank, and its scale alpha / rank."""

    rank: int
    alpha: float = 16.0
    targets: tuple[str, ...] = TARGETS

    def __post_init__(self) -> None:
        unknown = [name for name in self.targets if name not in TARGETS]
        if unknown or not self.targets:
            raise ValueError(f"LoRA targets {self.targets!r}: choose from {', '.join(TARGETS)}")
        if self.rank < 1:
            raise ValueError(f"LoRA rank {self.rank}: must be at least 1")


def weights(config: qwen.Config, lora: LoRA) -> dict[str, Any]:
    """Return the tree of `Weight`s that declares the adapters."""
    layers, declared = qwen.weights(config)["layers"], {}
    for name in lora.targets:
        (count, *shape), (_, *axes) = layers[name].shape, layers[name].axes
        cut = qwen.INPUTS[name]
        std = float(np.prod(shape[:cut])) ** -0.5
        a, b = (*shape[:cut], lora.rank), (lora.rank, *shape[cut:])
        declared[name + "_lora_a"] = qwen.Weight((count, *a), ("layers", *axes[:cut], "rank"), std)
        declared[name + "_lora_b"] = qwen.Weight((count, *b), ("layers", "rank", *axes[cut:]), 0.0)
    return {"layers": declared}


def init(config: qwen.Config, lora: LoRA, seed: int, dtype: Any = jnp.float32) -> qwen.Params:
    """Return adapters that leave the model unchanged: A is drawn from `seed`, B is zero."""
    return qwen.draw(weights(config, lora), seed, dtype)


def join(params: qwen.Params, adapters: qwen.Params, lora: LoRA) -> qwen.Params:
    """Return parameters and adapters as the one tree that `qwen.hidden` takes; the matrices are not
    merged."""
    scaled = {
        name: array * (lora.alpha / lora.rank) if name.endswith("_b") else array
        for name, array in adapters["layers"].items()
    }
    return params | {"layers": params["layers"] | scaled}


def merge(params: qwen.Params, adapters: qwen.Params, lora: LoRA) -> qwen.Params:
    """Return parameters with the adapters merged into the matrices, in the dtype of `params`."""
    layers = dict(params["layers"])
    for name in lora.targets:
        a, b = (adapters["layers"][f"{name}_lora_{side}"].astype(jnp.float32) for side in "ab")
        count, rank = a.shape[0], lora.rank
        added = jnp.einsum("lir,lro->lio", a.reshape(count, -1, rank), b.reshape(count, rank, -1))
        whole = layers[name].astype(jnp.float32) + (lora.alpha / rank) * added.reshape(
            layers[name].shape
        )
        layers[name] = whole.astype(layers[name].dtype)
    return params | {"layers": layers}


def save(path: str | Path, adapters: qwen.Params, lora: LoRA, *, base: str = "") -> None:
    """Write adapter_config.json and adapter_model.safetensors, as PEFT and vLLM read them.

    base: the name or directory of the checkpoint that the adapters belong to.
    """
    from safetensors.numpy import save_file

    folder, tensors = Path(path), {}
    for name in lora.targets:
        a, b = (np.asarray(adapters["layers"][f"{name}_lora_{side}"]) for side in "ab")
        for layer in range(a.shape[0]):
            stem = f"base_model.model.model.layers.{layer}.{PEFT[name]}.lora_"
            tensors[stem + "A.weight"] = np.ascontiguousarray(a[layer].reshape(-1, lora.rank).T)
            tensors[stem + "B.weight"] = np.ascontiguousarray(b[layer].reshape(lora.rank, -1).T)
    record = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "target_modules": sorted(PEFT[name].rpartition(".")[2] for name in lora.targets),
        "lora_dropout": 0.0,
        "bias": "none",
        "inference_mode": True,
    }
    with replacing(folder / "adapter_model.safetensors") as temporary:
        save_file(tensors, temporary, metadata={"format": "pt"})
        temporary.chmod(
            0o644
        )  # safetensors creates files that only their owner can read; a server may be another user
    write_atomically(folder / "adapter_config.json", json.dumps(record, indent=2) + "\n")


def shapes(config: qwen.Config, lora: LoRA, dtype: Any = jnp.float32) -> Any:
    """Return the adapters as ShapeDtypeStructs."""
    declared = weights(config, lora)
    return jax.tree.map(
        lambda w: jax.ShapeDtypeStruct(w.shape, dtype), declared, is_leaf=qwen.is_weight
    )
