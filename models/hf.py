"""Load and save Hugging Face checkpoints of dense Qwen2, Qwen3, Llama, Mistral and SmolLM3 models
in safetensors files.

`HF_NAMES` maps our weights to Hugging Face's tensors. A checkpoint stores the matrices of a layer
as (out, in); here they are (in, out), with the heads on an axis of their own.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax import Array
from jax.experimental.multihost_utils import process_allgather
from jax.sharding import Mesh, Sharding, SingleDeviceSharding
from safetensors import SafetensorError, safe_open

from models import chat, hf_config, qwen
from models.files import replacing, write_atomically, write_json
from models.hf_config import ModelError
from models.mesh import RULES, places
from models.qwen import Config, Params, Weight
from models.tokenizer import Tokenizer

HF_NAMES = {
    "embed": "model.embed_tokens.weight",
    "norm": "model.norm.weight",
    "unembed": "lm_head.weight",
    "layers.attn_norm": "model.layers.{}.input_layernorm.weight",
    "layers.q": "model.layers.{}.self_attn.q_proj.weight",
    "layers.k": "model.layers.{}.self_attn.k_proj.weight",
    "layers.v": "model.layers.{}.self_attn.v_proj.weight",
    "layers.o": "model.layers.{}.self_attn.o_proj.weight",
    "layers.mlp_norm": "model.layers.{}.post_attention_layernorm.weight",
    "layers.gate": "model.layers.{}.mlp.gate_proj.weight",
    "layers.up": "model.layers.{}.mlp.up_proj.weight",
    "layers.down": "model.layers.{}.mlp.down_proj.weight",
    "layers.q_bias": "model.layers.{}.self_attn.q_proj.bias",
    "layers.k_bias": "model.layers.{}.self_attn.k_proj.bias",
    "layers.v_bias": "model.layers.{}.self_attn.v_proj.bias",
    "layers.q_norm": "model.layers.{}.self_attn.q_norm.weight",
    "layers.k_norm": "model.layers.{}.self_attn.k_norm.weight",
}
# Number of input axes of each matrix. Weights not listed (norms, biases, embeddings) are not
# transposed.
INPUTS = {f"layers.{name}": count for name, count in qwen.INPUTS.items()}
DTYPES = {"F32": np.dtype(np.float32), "BF16": np.dtype(ml_dtypes.bfloat16)}
SHARD_BYTES = 5_000_000_000  # of a file, if no tensor is larger
READ_BYTES = 1 << 22
Spans = list[tuple[int, int]]  # of each axis: where a part of it begins and ends
# size of a weight that training can have left; the largest of published checkpoints are near 1e3
LARGEST = 1e6
AHEAD = 4  # weights that are on their way to the host while one is taken


# --- names and layouts ----------------------------------------------------------------------------


class Tensor(NamedTuple):
    """A tensor of a checkpoint: its name, that of our weight, the layer of it, and its shape."""

    name: str
    ours: str
    layer: int | None
    shape: tuple[int, ...]


def _joined(ours: str) -> tuple[slice, ...]:
    """Return for each axis of a tensor the axes of our weight, without that of the layers, that it
    joins."""
    if count := INPUTS.get(ours):
        return slice(count, None), slice(count)
    return (slice(1), slice(1, 2)) if ours in ("embed", "unembed") else (slice(None),)


def tensors_of(config: Config) -> Iterator[Tensor]:
    """Yield every tensor, in the order of the computation."""
    flat = qwen.by_name(qwen.weights(config))
    layered = [ours for ours in HF_NAMES if ours.startswith("layers.")]
    within = itertools.product(range(config.layers), layered)
    for layer, ours in ((None, "embed"), *within, (None, "norm"), (None, "unembed")):
        if ours in flat:
            shape = flat[ours].shape[layer is not None :]
            joined = tuple(math.prod(shape[axes]) for axes in _joined(ours))
            yield Tensor(HF_NAMES[ours].format(layer), ours, layer, joined)


def shapes(config: Config) -> dict[str, tuple[int, ...]]:
    """Return {name: shape} of all tensors, in the order of `to_hf`."""
    return {tensor.name: tensor.shape for tensor in tensors_of(config)}


@dataclasses.dataclass
class Bucket:
    """Tensors that lie in a file, or in one message to a server, without gaps between them.
    offsets: the byte at which each of them begins. transposed: True for those whose weight is (in,
    out), which is our layout of matrices. size: the bytes of all."""

    names: list[str] = dataclasses.field(default_factory=list)
    shapes: list[tuple[int, ...]] = dataclasses.field(default_factory=list)
    offsets: list[int] = dataclasses.field(default_factory=list)
    transposed: list[bool] = dataclasses.field(default_factory=list)
    size: int = 0


def buckets_of(config: Config, dtype: Any, limit: int) -> list[Bucket]:
    """Split a model's tensors, in the order of `to_hf`, into buckets of at most `limit` bytes or of
    one larger tensor."""
    buckets = [Bucket()]
    for name, ours, _, shape in tensors_of(config):
        size = math.prod(shape) * np.dtype(dtype).itemsize
        if buckets[-1].names and buckets[-1].size + size > limit:
            buckets.append(Bucket())
        bucket = buckets[-1]
        bucket.names.append(name)
        bucket.shapes.append(shape)
        bucket.offsets.append(bucket.size)
        bucket.transposed.append(ours in INPUTS)
        bucket.size += size
    return buckets


def to_hf(config: Config, params: Params, dtype: Any = None) -> Iterator[tuple[str, np.ndarray]]:
    """Yield (name, array) of every tensor in Hugging Face's layout, cast to `dtype` (None: no
    cast).

    The arrays are NumPy views wherever the weights are in this process's memory already. If other
    processes hold parts of the weights, all processes must iterate together, because gathering a
    tensor is a collective operation.
    """
    for (name, ours, _, shape), weight in outgoing(config, params, dtype):
        array = np.asarray(weight)
        array = array if dtype is None else array.astype(dtype, copy=False)
        yield name, array.reshape(shape[::-1]).T if ours in INPUTS else array.reshape(shape)


def outgoing(
    config: Config, params: Params, dtype: Any = None
) -> Iterator[tuple[Tensor, Array | np.ndarray]]:
    """Yield (tensor, our weight) in the order of `to_hf`, in our own layout and the memory where it
    is. Accelerators cast weights to `dtype`, and begin to copy the next ones to the host, while the
    caller takes one."""
    arrays, begun = qwen.by_name(params), deque[tuple[Tensor, Array | np.ndarray]]()
    for tensor in tensors_of(config):
        begun.append((tensor, _begun(arrays[tensor.ours], tensor.layer, dtype)))
        if len(begun) > AHEAD:
            yield begun.popleft()
    yield from begun


def _begun(array: Any, layer: int | None, dtype: Any) -> Array | np.ndarray:
    """Return a weight, or one layer of it, gathered if other processes hold parts of it."""
    devices = array.devices() if isinstance(array, Array) else set()
    if devices <= set(jax.devices("cpu")):
        # NumPy casts contiguous arrays at memory speed, and views cost nothing
        array = np.asarray(array) if len(devices) <= 1 else array
        part = array if layer is None else array[layer]
    else:
        part = _cast(array, layer or 0, layered=layer is not None, dtype=dtype)
        if part.is_fully_addressable:
            part.copy_to_host_async()
    elsewhere = isinstance(part, Array) and not part.is_fully_addressable
    return process_allgather(part, tiled=True) if elsewhere else part


@functools.partial(jax.jit, static_argnames=("layered", "dtype"))
def _cast(array: Array, layer: int, *, layered: bool, dtype: Any) -> Array:
    part = array[layer] if layered else array
    return part if dtype is None else part.astype(dtype)


# --- loading --------------------------------------------------------------------------------------


def load(
    path: str | Path,
    *,
    mesh: Mesh | None = None,
    dtype: Any = jnp.float32,
    rules: Mapping[str, str] = RULES,
) -> tuple[Config, Params]:
    """Return (Config, params) of a model directory, with the weights cast to `dtype`.

    With a mesh, each array is created directly in its sharding, shard by shard, and this process
    reads only the slices that it needs: besides the arrays, the host holds one shard at a time.
    Raises ModelError for a directory without config.json or safetensors, for unreadable files, and
    (all in one message) for tensors that are missing, unexpected, of the wrong shape or of a dtype
    other than float32 and bfloat16. The first tensor found to hold an infinity or NaN also raises
    ModelError.
    """
    folder = Path(path)
    config = config_of(folder)
    with ExitStack() as stack:
        tensors = checked(folder, config, stack)
        declared = qwen.weights(config)
        flat = qwen.by_name(declared)
        one = SingleDeviceSharding(jax.local_devices()[0])
        placed = None if mesh is None else qwen.by_name(places(declared, mesh, rules))
        where = placed or dict.fromkeys(flat, one)
        arrays = {
            name: _place(weight.shape, where[name], _reader(folder, name, weight, tensors, dtype))
            # Read the largest weights first, so that memory which the allocator keeps from earlier
            # reads is small.
            for name, weight in sorted(flat.items(), key=lambda item: -math.prod(item[1].shape))
        }
    return config, qwen.nested(config, arrays)


def _place(shape: tuple[int, ...], where: Sharding, read: Callable[[Any], np.ndarray]) -> Array:
    """Assemble an array from its shards. `read` is called once per distinct shard, which is freed
    after its upload."""
    indices = where.addressable_devices_indices_map(shape)
    shards: dict[Any, Array] = {}
    for device, index in indices.items():
        if device in shards:
            continue
        block = read(index)
        for other, same in indices.items():
            if same == index:
                shards[other] = jax.device_put(block, other)
        jax.block_until_ready([shards[device]])
        del block
    return jax.make_array_from_single_device_arrays(
        shape, where, [shards[device] for device in indices]
    )


def config_of(path: str | Path) -> Config:
    """Return the Config of a model directory. Raises ModelError."""
    record = hf_config.read(path)
    try:
        return Config(**hf_config.fields(record))
    except ModelError as error:
        raise ModelError(f"{path}: {error}") from None


def for_tokenizer(config: Config, tokenizer: Tokenizer) -> Config:
    """Return the Config with the rows of the embedding that no id of the tokenizer has as unused.
    Raises ModelError for a tokenizer with more ids than there are rows."""
    unused = config.vocab - tokenizer.vocab_size
    if unused < 0:
        raise ModelError(
            f"the tokenizer has {tokenizer.vocab_size} ids and the model only {config.vocab} rows:"
            " they do not belong together"
        )
    return dataclasses.replace(config, unused=unused)


def _open(folder: Path, stack: ExitStack) -> dict[str, Any]:
    """Return {name: safetensors slice} over all files of the directory."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        try:
            files = sorted(set(hf_config.read(folder, index.name)["weight_map"].values()))
            if not all(isinstance(file, str) and Path(file).name == file for file in files):
                raise ValueError(f"weight_map holds {files[:3]}, not names of files")
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ModelError(f"{index} is not an index of safetensors files: {error}") from None
        absent = [file for file in files if not (folder / file).is_file()]
        if absent:
            raise ModelError(
                f"{folder}: the index names files that do not exist: {', '.join(absent)}"
            )
    else:
        files = sorted(file.name for file in folder.glob("*.safetensors"))
        if not files:
            formats = (".bin", ".pt", ".pth", ".gguf")
            held = sorted(path.name for path in folder.iterdir() if path.suffix in formats)
            others = f"; the directory holds {', '.join(held)}" if held else ""
            raise ModelError(f"{folder}: no *.safetensors file{others}")
    tensors: dict[str, Any] = {}
    for file in files:
        try:
            handle = stack.enter_context(safe_open(folder / file, framework="numpy"))
        except (SafetensorError, OSError) as error:
            raise ModelError(f"{folder / file} is corrupt or truncated: {error}") from None
        tensors |= {name: handle.get_slice(name) for name in handle.keys()}  # noqa: SIM118  (a handle is not a dict)
    return tensors


def checked(folder: Path, config: Config, stack: ExitStack) -> dict[str, Any]:
    """Return {name: safetensors slice} of a checkpoint whose files `stack` closes; only a head that
    must be a copy is read. Raises ModelError naming every tensor that is not as the Config
    requires."""
    tensors = _open(folder, stack)
    if config.layers > len(tensors):
        raise ModelError(
            f"{folder}: num_hidden_layers={config.layers} in config.json, and the files hold"
            f" {len(tensors)} tensors"
        )
    expected = shapes(config)
    held = {name: tensors[name] for name in expected if name in tensors}
    # Old exports contain the rope frequencies, and some exports of tied models a copy of the
    # embedding (`_check_tied`).
    ignored = {name for name in tensors if name.endswith("rotary_emb.inv_freq")}
    ignored |= {HF_NAMES["unembed"]} if config.tied else set()
    problems = {
        "missing": [name for name in expected if name not in tensors],
        "unexpected": [name for name in tensors if name not in expected and name not in ignored],
        "of the wrong shape": [
            f"{name} {tuple(tensor.get_shape())} instead of {expected[name]}"
            for name, tensor in held.items()
            if tuple(tensor.get_shape()) != expected[name]
        ],
        "of a dtype other than F32 and BF16 (convert them first)": [
            f"{name} {tensor.get_dtype()}"
            for name, tensor in held.items()
            if tensor.get_dtype() not in DTYPES
        ],
    }
    messages = [f"{what}: {some(names, 20)}" for what, names in problems.items() if names]
    if messages:
        raise ModelError(f"{folder}: tensors " + "; ".join(messages))
    if config.tied and HF_NAMES["unembed"] in tensors:
        _check_tied(folder, tensors[HF_NAMES["embed"]], tensors[HF_NAMES["unembed"]])
    return tensors


def some(names: Sequence[str], most: int) -> str:
    """Return the first names, and how many more there are."""
    more = f" and {len(names) - most:,} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def _check_tied(folder: Path, embed: Any, head: Any) -> None:
    """Raise ModelError if the head that a tied model has beside its embedding is no copy of it."""
    vocab, width = embed.get_shape()
    same, rows = head.get_shape() == [vocab, width], max(1, READ_BYTES // (4 * width))
    for start in range(0, vocab, rows):
        part = slice(start, min(start + rows, vocab))
        same = same and np.array_equal(embed[part], head[part])
    if not same:
        raise ModelError(
            f"{folder}: config.json says tie_word_embeddings=true, and {HF_NAMES['unembed']} is not"
            f" a copy of {HF_NAMES['embed']}: set it to false to use that head, or remove the head"
        )


def _reader(
    folder: Path, name: str, weight: Weight, tensors: Mapping[str, Any], dtype: Any
) -> Callable[[tuple[slice, ...]], np.ndarray]:
    """Return a function from the index of a shard of our array to its values in `dtype`."""

    def read_tensor(hf_name: str, spans: Spans, shape: tuple[int, ...]) -> np.ndarray:
        part = tuple(_span(spans[axes], shape[axes]) for axes in _joined(name))
        try:
            values = tensors[hf_name][part]
        except (SafetensorError, OSError) as error:
            raise ModelError(f"{folder}: {hf_name} cannot be read: {error}") from None
        if _beyond(values, LARGEST):
            infinite = _beyond(values, math.inf)
            held = "infinities or NaNs" if infinite else f"values such as {np.abs(values).max():g}"
            raise ModelError(f"{folder}: {hf_name} is corrupt: it holds {held}")
        if name == "norm" and not np.any(values):
            raise ModelError(f"{folder}: {hf_name} is corrupt: it holds only zeros")
        lengths = [stop - start for start, stop in spans]
        return (values.T if name in INPUTS else values).reshape(lengths)

    def read(index: tuple[slice, ...]) -> np.ndarray:
        (first, last), *others = [part.indices(size)[:2] for part, size in zip(index, weight.shape)]
        out = np.empty([last - first, *(stop - start for start, stop in others)], dtype)
        layered = name.startswith("layers.")
        # An embedding is read in pieces.
        rows = 1 if layered else max(1, READ_BYTES // (out.itemsize * math.prod(out.shape[1:])))
        for start in range(first, last, rows):
            stop = min(start + rows, last)
            spans = others if layered else [(start, stop), *others]
            piece = read_tensor(HF_NAMES[name].format(start), spans, weight.shape[layered:])
            out[start - first : stop - first] = piece
        return out

    return read


def _beyond(values: np.ndarray, limit: float) -> bool:
    """Return True if any value is NaN or, in size, `limit` or more.

    Compares the bits without the sign, whose order is that of the sizes; functions of ml_dtypes are
    ten times slower.
    """
    kind: Any = np.uint16 if values.itemsize == 2 else np.uint32
    size = np.iinfo(kind).max >> 1
    least = np.asarray(limit, values.dtype).view(kind)
    return bool(np.any((values.view(kind) & kind(size)) >= least))


def _span(spans: Spans, shape: tuple[int, ...]) -> slice:
    """Return the slice of a flattened group of axes, of which only the first is ever split."""
    inner = math.prod(shape[1:])
    return slice(spans[0][0] * inner, spans[0][1] * inner)


# --- saving ---------------------------------------------------------------------------------------


def save(
    path: str | Path,
    config: Config,
    params: Params,
    *,
    tokenizer: Tokenizer | None = None,
    card: str | None = None,
    system: str = "",
    dtype: Any = None,
) -> None:
    """Write a directory that `transformers` and vLLM load: weights, configs, tokenizer, README.md.

    card: the text of README.md. system: the system message with which the model was trained. dtype:
    of the weights in the files; None = as they are. Each file is replaced atomically, and the host
    holds one tensor at a time. In a run of several processes all must call this, and the first one
    writes. Raises ModelError where Hugging Face has no such architecture.
    """
    folder = Path(path)
    dtype = np.dtype(dtype or params["embed"].dtype)
    record = hf_config.record_of(config, dtype.name, tokenizer)
    if jax.process_index():
        for _ in to_hf(config, params):  # takes part in the gathering of each tensor
            pass
        return
    folder.mkdir(parents=True, exist_ok=True)
    _save_weights(folder, config, params, dtype)
    write_json(folder / "config.json", record)
    if tokenizer is not None:
        generation = {
            "eos_token_id": list(tokenizer.stops),
            "pad_token_id": tokenizer.id_of("pad_token"),
            "bos_token_id": tokenizer.id_of("bos_token"),
            "do_sample": True,
        }
        write_json(folder / "generation_config.json", generation)
        tokenizer.save(folder)
    if card is not None:
        write_atomically(folder / "README.md", card)
    if system:
        write_atomically(folder / chat.SYSTEM_FILE, system)


def _save_weights(folder: Path, config: Config, params: Params, dtype: np.dtype) -> None:
    buckets, tensors = buckets_of(config, dtype, SHARD_BYTES), to_hf(config, params, dtype)
    count, files, weight_map = len(buckets), ["model.safetensors"], dict[str, str]()
    if count > 1:
        files = [f"model-{number + 1:05}-of-{count:05}.safetensors" for number in range(count)]
    for file, bucket in zip(files, buckets):
        with replacing(folder / file) as temporary:
            _write_tensors(temporary, bucket, dtype, tensors)
        weight_map |= dict.fromkeys(bucket.names, file)
    if count > 1:
        total = sum(bucket.size for bucket in buckets)
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        files.append("model.safetensors.index.json")
        write_json(folder / files[-1], index)
    # those left by an earlier save with another number of files
    for stale in set(folder.glob("model*.safetensors*")) - {folder / file for file in files}:
        stale.unlink()


def _write_tensors(
    file: Path, bucket: Bucket, dtype: np.dtype, tensors: Iterator[tuple[str, np.ndarray]]
) -> None:
    """Write a safetensors file tensor by tensor: the library's writer needs all of them at once and
    copies them."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    kind = {held: name for name, held in DTYPES.items()}[dtype]
    spans = itertools.pairwise([*bucket.offsets, bucket.size])
    for name, shape, span in zip(bucket.names, bucket.shapes, spans):
        header[name] = {"dtype": kind, "shape": list(shape), "data_offsets": list(span)}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(file, "wb") as out:
        out.write(len(text).to_bytes(8, "little") + text)
        for name in bucket.names:
            written, array = next(tensors)
            assert written == name
            out.write(np.ascontiguousarray(array).view(np.uint8).data)
