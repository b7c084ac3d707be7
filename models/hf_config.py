"""Hugging Face's config.json: the shape of a model, read and written without importing jax."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from models.files import BrokenFile, loads, read_whole
from models.rope import record_of as rope_record
from models.rope import scaling_of

if TYPE_CHECKING:
    from models.qwen import Config
    from models.tokenizer import Tokenizer

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "vocab.json",
    "merges.txt",
    "special_tokens_map.json",
    "added_tokens.json",
    "tokenizer.model",
    "tekken.json",
)
# Fields of `qwen.Config` that are sizes, with their keys in config.json.
SIZES = {
    "vocab": "vocab_size",
    "d_model": "hidden_size",
    "layers": "num_hidden_layers",
    "heads": "num_attention_heads",
    "d_ff": "intermediate_size",
}
OPTIONAL_SIZES = {
    "kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "max_positions": "max_position_embeddings",
}
OTHERS = {"rope_theta": "rope_theta", "rms_eps": "rms_norm_eps", "tied": "tie_word_embeddings"}
# Far beyond all models that exist; of other sizes 2^20.
LARGEST = {"layers": 1000, "max_positions": 10**9}
# model_type -> (name of its class, qkv_bias, qk_norm, a key of its own); a model is saved as the
# first that it is
KINDS: dict[str, tuple[Any, ...]] = {
    "qwen2": ("Qwen2", True, False),
    "qwen3": ("Qwen3", False, True),
    "llama": ("Llama", False, False),
    "smollm3": ("SmolLM3", False, False, "no_rope_layers"),
    "mistral": ("Mistral", False, False, "sliding_window"),
}
# What a config.json may leave out, as old ones do.
LEFT_OUT = (
    "num_key_value_heads",
    "max_position_embeddings",
    "rms_norm_eps",
    "tie_word_embeddings",
)
# What every kind of rope has, with the defaults of `transformers`.
ROPE = {"rope_theta": 1e4, "partial_rotary_factor": 1}
SUPPORTED = (
    "supported are qwen2, qwen3, llama, mistral and smollm3: dense, full attention, rope of type"
    " 'default', 'yarn' or 'llama3'"
)


class ModelError(ValueError):
    """A checkpoint that cannot be read; the message names the directory and every problem found."""


def transformers() -> Any:
    """Return the library, which takes half a second to import, and its Auto classes two: they read
    only what nothing else does. Its advice to install torch is not shown."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    import transformers

    return transformers


def read(folder: str | Path, name: str = "config.json") -> dict[str, Any]:
    """Return the content of a file of a model directory, such as config.json. Raises ModelError."""
    folder = Path(folder)
    if not folder.is_dir():
        raise ModelError(f"{folder}: no such directory")
    try:
        record = loads(read_whole(folder / name))
    except FileNotFoundError:
        raise ModelError(
            f"{folder}: no {name}, so this is not a Hugging Face model directory"
        ) from None
    except OSError as error:
        raise ModelError(f"{folder}/{name} cannot be read: {error.strerror}") from None
    except BrokenFile as error:
        raise ModelError(str(error)) from None
    except ValueError as error:
        raise ModelError(f"{folder}/{name} is not JSON: {error}") from None
    if not isinstance(record, dict):
        raise ModelError(f"{folder}/{name} holds a {type(record).__name__}, not a JSON object")
    return record


def end_tokens(folder: str | Path) -> dict[str, set[int]]:
    """Return the tokens that end an answer by config.json and by generation_config.json: {file:
    ids}, without files that name none. Raises ModelError."""
    found = {}
    for name in ("config.json", "generation_config.json"):
        if (Path(folder) / name).exists():
            ends = read(folder, name).get("eos_token_id")
            listed = ends if isinstance(ends, list) else [] if ends is None else [ends]
            if not all(type(end) is int and end >= 0 for end in listed):
                raise ModelError(
                    f"{folder}/{name}: eos_token_id={ends!r} is neither a token id nor a list of"
                    " them"
                )
            if listed:
                found[name] = set(listed)
    return found


def fields(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keyword arguments of `qwen.Config` for the model that a config.json describes.

    Raises ModelError, naming everything that is missing or unsupported.
    """
    kind = record.get("model_type")
    if not isinstance(kind, str) or kind not in KINDS:
        raise ModelError(
            f"config.json: model_type is {str(kind)[:80]!r}; {SUPPORTED}. Choose a checkpoint of"
            " such a model"
        )
    problems: list[str] = []
    sizes, record = _sizes(record, kind, problems)
    rope = _rope(record, problems)
    try:
        scaling = scaling_of(rope, sizes.get("max_positions", 32768))
    except ValueError as error:
        problems.append(str(error))
    if (share := rope["partial_rotary_factor"]) != 1:
        problems.append(f"partial_rotary_factor={share!r} is not supported, only 1")
    theta, eps = rope["rope_theta"], record.get("rms_norm_eps", 1e-6)
    # a base of 1 or less gives no frequencies, and one beyond float32 none but 0
    for key, number, least, most in (
        ("rope_theta", theta, 1.0, 1e12),
        ("rms_norm_eps", eps, 0.0, 1.0),
    ):
        if not (type(number) in (int, float) and least < number < most):
            problems.append(f"{key}={number!r} is not a number between {least:g} and {most:g}")
    problems += _unsupported(record, kind)
    if not problems:
        problems += _misshapen(sizes, kind)
    rotates: Any = record.get("no_rope_layers") if kind == "smollm3" and not problems else []
    listed = isinstance(rotates, list) and all(flag in (0, 1) for flag in rotates)
    if not listed or 0 < len(rotates) < sizes["layers"]:
        problems.append(
            f"no_rope_layers={str(rotates)[:80]} is not a list with 0 or 1 for each layer"
        )
    if problems:
        raise ModelError("config.json: " + "; ".join(problems) + f" ({SUPPORTED})")
    defaults = {
        "kv_heads": sizes["heads"],
        "head_dim": 128 if kind == "qwen3" else sizes["d_model"] // sizes["heads"],
        "max_positions": 32768,
    }
    return defaults | sizes | {
        "rope_theta": float(theta),
        "rms_eps": float(eps),
        "tied": record.get("tie_word_embeddings", False),
        "qkv_bias": KINDS[kind][1],
        "qk_norm": KINDS[kind][2],
        "rope_scaling": scaling,
        "no_rope": tuple(i for i, flag in enumerate(rotates[: sizes["layers"]]) if not flag),
    }  # fmt: skip


def _sizes(
    record: Mapping[str, Any], kind: str, problems: list[str]
) -> tuple[dict[str, Any], Mapping[str, Any]]:
    """Return the sizes that a config.json states, by the fields of `qwen.Config`, and the record
    with what it leaves out."""
    problems += [f"{key} is missing" for key in SIZES.values() if record.get(key) is None]
    sizes = {}
    for keys in (SIZES, OPTIONAL_SIZES):
        for field, key in keys.items():
            if (value := record.get(key)) is not None:
                sizes[field] = value
                limit = LARGEST.get(field, 1 << 20)
                if type(value) is not int or value < 1:
                    problems.append(f"{key}={value!r} is not a positive integer")
                elif value > limit:
                    problems.append(f"{key}={value} is more than any model has, {limit:,} at most")
        if not problems:  # transformers' defaults depend on the sizes
            record = {**_left_out(record, kind, problems), **record}
    return sizes, record


def _unsupported(record: Mapping[str, Any], kind: str) -> Iterator[str]:
    """Yield what the model has that ours have not."""
    if not isinstance(tied := record.get("tie_word_embeddings", False), bool):
        yield f"tie_word_embeddings={tied!r} is neither true nor false"
    window = "sliding_attention" in str(record.get("layer_types"))
    key = "sliding_window" if kind == "mistral" else "use_sliding_window"
    if window or record.get(key):
        yield f"sliding window attention ({key}) is not supported"
    if record.get("hidden_act", "silu") != "silu":
        yield f"hidden_act {record['hidden_act']!r} is not supported, only 'silu'"
    for key in ("attention_bias", "mlp_bias") if kind != "qwen2" else ():
        if record.get(key):
            yield f"{key} is not supported"
    if record.get("quantization_config"):
        yield "quantized weights are not supported"


def _misshapen(sizes: Mapping[str, int], kind: str) -> Iterator[str]:
    """Yield which sizes do not fit one another, the first of them alone."""
    heads, width = sizes["heads"], sizes["d_model"]
    if heads % sizes.get("kv_heads", heads):
        yield f"{sizes['kv_heads']} key/value heads do not divide {heads} heads"
    elif "head_dim" not in sizes and kind != "qwen3" and width % heads:
        yield f"head_dim is missing, and {heads} heads do not divide {width}"
    elif sizes.get("head_dim", 2) % 2:
        yield f"head_dim={sizes['head_dim']} is odd: rope rotates pairs"


def _left_out(record: Mapping[str, Any], kind: str, problems: list[str]) -> dict[str, Any]:
    """Return what a config.json leaves out, as `transformers` understands it.

    What it states is not left to `AutoConfig`, which takes a rope_theta of -1 or NaN, two different
    factors of rope and ten million layers without a word.
    """
    absent = [key for key in (*LEFT_OUT, *KINDS[kind][3:]) if key not in record]
    absent += [] if "rope_theta" in str(record) else ["rope_theta"]  # also of rope_parameters
    if not absent:
        return {}
    try:
        whole = transformers().AutoConfig.for_model(**record).to_dict()
    except Exception as error:  # its validators raise a dozen types
        reason = " ".join(str(error).split())
        problems.append(f"{', '.join(absent)} left out, and transformers has no defaults: {reason}")
        return {}
    return {key: whole.get(key, whole["rope_parameters"].get(key)) for key in absent}


def _rope(record: Mapping[str, Any], problems: list[str]) -> dict[str, Any]:
    """Return the parameters of rope: those of config.json itself, of `rope_scaling`
    (transformers 4) and of `rope_parameters` (5) together.

    Qwen's long-context recipe adds `rope_scaling` of type yarn to a config.json that may have
    `rope_parameters` too.
    """
    parts = [{name: record[name] for name in ROPE if record.get(name) is not None}]
    older_and_newer = ("rope_scaling", "rope_parameters")
    parts += [_rope_object(key, record.get(key), problems) for key in older_and_newer]
    merged: dict[str, Any] = {}
    for name, value in itertools.chain.from_iterable(part.items() for part in parts):
        held = merged.setdefault(name, value)
        if held is not value and held != value:
            problems.append(
                f"the parameters of rope contradict each other: {name} is {held!r} and {value!r}"
            )
    return {"rope_type": "default"} | ROPE | merged


def _rope_object(key: str, value: Any, problems: list[str]) -> dict[str, Any]:
    """Return the parameters that `rope_scaling` or `rope_parameters` states, with their `rope_type`
    if it is not 'default'."""
    if isinstance(value, dict) and value.keys() == {"full_attention"}:  # by type of layer
        value = value["full_attention"]
    if value is None:
        return {}
    if not isinstance(value, dict):
        problems.append(f"{key}: rope parameters {value!r} are not an object")
        return {}
    given = {name: held for name, held in value.items() if held is not None}
    kinds = [given.pop(name) for name in ("rope_type", "type") if name in given] or ["default"]
    if len(kinds) > 1 and kinds[0] != kinds[1]:
        problems.append(f"{key} has rope_type={kinds[0]!r} and type={kinds[1]!r}")
    elif kinds[0] != "default":
        return given | {"rope_type": kinds[0]}
    elif foreign := sorted(given.keys() - ROPE.keys()):
        problems.append(f"{key} has {', '.join(foreign)}, and no rope_type that uses them")
    return given


def record_of(config: Config, dtype: str, tokenizer: Tokenizer | None = None) -> dict[str, Any]:
    """Return the config.json of a model whose weights are of `dtype`, as `transformers` 4 and 5
    read it.

    Raises ModelError where Hugging Face has no such architecture.
    """
    flags, smol = (config.qkv_bias, config.qk_norm), bool(config.no_rope)
    kinds = [k for k in KINDS if KINDS[k][1:3] == flags and smol <= (k == "smollm3")]
    if not kinds:
        raise ModelError(
            "Hugging Face has no model with both qkv_bias and qk_norm, nor with one and no_rope"
        )
    kind, rope = kinds[0], {"rope_type": "default"}
    if config.rope_scaling:
        rope = rope_record(config.rope_scaling)
    stated = SIZES | OPTIONAL_SIZES | OTHERS
    record = {
        "architectures": [f"{KINDS[kind][0]}ForCausalLM"],
        "model_type": kind,
        **{key: getattr(config, field) for field, key in stated.items()},
        "hidden_act": "silu",
        "rope_parameters": {"rope_theta": config.rope_theta, **rope},
        "attention_dropout": 0.0,
        "initializer_range": 0.02,
        "torch_dtype": dtype,
    }
    record |= {"use_sliding_window": False} if kind != "llama" else {"mlp_bias": False}
    if kind != "qwen2":
        record["attention_bias"] = False
    if config.no_rope:
        record["no_rope_layers"] = [int(i not in config.no_rope) for i in range(config.layers)]
        record["pad_token_id"] = None  # that of its class is beyond a small vocabulary
    if config.rope_scaling:  # `transformers` 4 and vLLM read this key
        record["rope_scaling"] = rope
    if tokenizer is not None:
        record |= {"eos_token_id": tokenizer.stops[0], "bos_token_id": tokenizer.id_of("bos_token")}
    return record
