"""Make tests/models/golden/*.npz: small random checkpoints and the logits that `transformers`
computes from them.

    python -m tests.models.make_golden        # needs torch and transformers; writes the files that the tests read

Each file holds the weights under Hugging Face's names (exact in float16, to be read as float32),
config.json, the
token ids, and logits of four runs: each sequence alone, all in one right-padded batch, all in one
left-padded batch, and the first sequence token by token with a KV cache.
"""

import json
from pathlib import Path

import numpy as np

FOLDER = Path(__file__).parent / "golden"
LENGTHS = (23, 14, 9)
SHAPE = {
    "vocab_size": 96,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "max_position_embeddings": 64,
}
# The small embedding of "tied" makes rms_norm_eps visible: 1e-6 instead of 1e-5 would move its
# logits by far more than the tolerance of the tests.
VARIANTS = {
    "tied": {"model_type": "qwen2", "tie_word_embeddings": True, "rms_norm_eps": 1e-5, "rope_theta": 1e6},
    "untied": {"model_type": "qwen2", "tie_word_embeddings": False, "rms_norm_eps": 1e-6, "rope_theta": 1e4},
    "qwen3": {"model_type": "qwen3", "tie_word_embeddings": False, "head_dim": 16, "rope_theta": 1e6},
    "smollm3": {
        "model_type": "smollm3", "tie_word_embeddings": True, "rope_theta": 1e4, "no_rope_layers": [1, 0], "pad_token_id": None,
    },
    "yarn": {
        "model_type": "qwen2", "tie_word_embeddings": False, "num_attention_heads": 2, "num_key_value_heads": 1,
        "rope_theta": 100.0, "rope_parameters": {"rope_type": "default", "rope_theta": 100.0},
        "rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
    },
}  # fmt: skip


def make(name: str) -> dict[str, np.ndarray]:
    import torch
    import transformers

    torch.manual_seed(0)
    record = SHAPE | VARIANTS[name]
    kwargs = {k: v for k, v in record.items() if k != "model_type" and not k.startswith("rope")}
    scaling = record.get("rope_scaling", {})
    rope = {
        "rope_theta": record["rope_theta"],
        "rope_type": scaling.get("type", "default"),
        **scaling,
    }
    config = transformers.AutoConfig.for_model(record["model_type"], **kwargs, rope_parameters=rope)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    model = model.float().eval()
    arrays = {"config": np.array(json.dumps(record))}
    with torch.no_grad():
        for key, p in model.named_parameters():
            scale = 3e-3 if key == "model.embed_tokens.weight" and name == "tied" else 0.3
            p.copy_((scale * torch.randn(p.shape) + ("norm" in key)).half().float())
            arrays["weights/" + key] = p.numpy().astype(np.float16)
        ids = [torch.randint(0, config.vocab_size, (n,)) for n in LENGTHS]
        arrays["tokens"] = torch.cat(ids).numpy()
        arrays["alone"] = torch.cat([model(i[None]).logits[0] for i in ids]).numpy()
        for side in ("right", "left"):
            arrays[side] = padded(model, ids, side).numpy()
        past, cached = transformers.DynamicCache(config=config), []
        for token in ids[0]:
            cached.append(model(token[None, None], past_key_values=past, use_cache=True).logits[0])
        arrays["cached"] = torch.cat(cached).numpy()
    return arrays


def padded(model, ids, side: str):
    """Return the logits of a padded batch without the padding, one sequence after the other."""
    import torch

    width = max(LENGTHS)
    tokens, mask = torch.zeros(2, len(ids), width, dtype=torch.long)
    for row, i in enumerate(ids):
        where = slice(width - len(i), width) if side == "left" else slice(0, len(i))
        tokens[row, where], mask[row, where] = i, 1
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    return model(tokens, attention_mask=mask, position_ids=positions).logits[mask.bool()]


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for variant in VARIANTS:
        np.savez_compressed(FOLDER / f"{variant}.npz", **make(variant))
        print(FOLDER.name + f"/{variant}.npz", (FOLDER / f"{variant}.npz").stat().st_size, "bytes")
