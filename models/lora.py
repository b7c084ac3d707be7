"""Low-rank adapters (LoRA, arXiv:2106.09685): small trainable additions to frozen matrices of every
layer.

Each target matrix W becomes W + (alpha / rank) A B. The adapters are a separate tree, which
`qwen.weights` declares and `qwen.init` draws: {"layers": {"attention": {"q_lora_a": (L, D, rank),
"q_lora_b": (L, rank, H, h), ...}, "mlp": ...}}. In the model they are of type `nnx.LoRAParam`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from models import qwen
from models.files import replacing, write_json
from models.qwen import LoRA, Params


def join(params: Params, adapters: Params, lora: LoRA) -> Params:
    """Return parameters and adapters as the one tree that `qwen.merge` takes; the matrices are not
    merged."""
    scale = lora.alpha / lora.rank
    scaled = jax.tree.map_with_path(
        lambda path, array: array * scale if path[-1].key.endswith("_b") else array, adapters
    )
    return beside(params, scaled)


def beside(params: Params, adapters: Params) -> Params:
    """Return one tree of parameters and adapters, each in the module of its matrix."""
    layers = dict(params["layers"])
    for module, given in adapters["layers"].items():
        layers[module] = layers[module] | given
    return params | {"layers": layers}


def merge(params: Params, adapters: Params, lora: LoRA) -> Params:
    """Return parameters with the adapters merged into the matrices, in the dtype of `params`."""
    given = qwen.by_name(adapters)

    def whole(path: Any, matrix: Array) -> Array:
        name = qwen.name_of(path)
        if f"{name}_lora_a" not in given:
            return matrix
        a, b = (given[f"{name}_lora_{side}"].astype(jnp.float32) for side in "ab")
        added = jax.vmap(lambda a, b: jnp.tensordot(a, b, 1))(a, b)  # for each layer
        scaled = (lora.alpha / lora.rank) * added
        return (matrix.astype(jnp.float32) + scaled).astype(matrix.dtype)

    return jax.tree.map_with_path(whole, params)


def save(path: str | Path, adapters: Params, lora: LoRA, *, base: str = "") -> None:
    """Write adapter_config.json and adapter_model.safetensors, as PEFT and vLLM read them.

    base: the name or directory of the checkpoint that the adapters belong to.
    """
    from safetensors.numpy import save_file

    folder, tensors, given = Path(path), {}, qwen.by_name(adapters)
    for name in lora.targets:
        a, b = (np.asarray(given[f"layers.{name}_lora_{side}"]) for side in "ab")
        module = "self_attn" if name in "qkvo" else "mlp"
        for layer in range(a.shape[0]):
            stem = f"base_model.model.model.layers.{layer}.{module}.{name}_proj.lora_"
            tensors[stem + "A.weight"] = np.ascontiguousarray(a[layer].reshape(-1, lora.rank).T)
            tensors[stem + "B.weight"] = np.ascontiguousarray(b[layer].reshape(lora.rank, -1).T)
    record = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "target_modules": sorted(f"{name}_proj" for name in lora.targets),
        "lora_dropout": 0.0,
        "bias": "none",
        "inference_mode": True,
    }
    with replacing(folder / "adapter_model.safetensors") as temporary:
        save_file(tensors, temporary, metadata={"format": "pt"})
        # safetensors creates files that only their owner can read; a server may be another user
        temporary.chmod(0o644)
    write_json(folder / "adapter_config.json", record)
