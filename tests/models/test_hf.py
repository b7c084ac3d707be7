"""Tests of checkpoints: what is saved is loaded again, and problems are named."""

import dataclasses
import itertools
import json
import os
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from configs import base
from evolver.config.checks.model import model_problems
from experiments.imitation.bpe import train_bpe
from models import chat, hf, hf_config, qwen
from models.rope import Llama3, Yarn
from models.tokenizer import Tokenizer
from tests.models.helpers import assert_equal, edit, noise, printed

CONFIG = qwen.Config(
    vocab=40, d_model=16, layers=2, heads=4, kv_heads=2, head_dim=4, d_ff=24, rope_theta=1e4
)
QWEN3 = dataclasses.replace(CONFIG, head_dim=8, tied=False, qkv_bias=False, qk_norm=True)
LLAMA = qwen.Config(40, 36, 2, 9, 3, 4, 24, rope_theta=1e5, rms_eps=1e-5, qkv_bias=False, tied=True)
SMOL3 = dataclasses.replace(LLAMA, no_rope=(1,))
LLAMA3 = dataclasses.replace(LLAMA, tied=False, rope_scaling=Llama3(8.0, 1.0, 4.0, 64))


def noisy(config, dtype=jnp.float32):
    """Return random parameters, norms and biases included."""
    return noise(qwen.shapes(config), dtype=dtype)


@pytest.mark.parametrize("config", [CONFIG, QWEN3, LLAMA, LLAMA3, SMOL3])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("shard_bytes", [hf.SHARD_BYTES, 3000])
def test_round_trip(tmp_path, monkeypatch, config, dtype, shard_bytes):
    params = noisy(config, dtype)
    monkeypatch.setattr(hf, "SHARD_BYTES", shard_bytes)
    hf.save(tmp_path, config, params)
    assert (tmp_path / "model.safetensors.index.json").exists() == (shard_bytes == 3000)
    loaded_config, loaded = hf.load(tmp_path, dtype=dtype)
    assert loaded_config == config
    assert_equal(loaded, params)
    assert ("lm_head.weight" in dict(hf.to_hf(config, params))) != config.tied


def test_a_second_save_replaces_the_first(tmp_path, monkeypatch):
    monkeypatch.setattr(hf, "SHARD_BYTES", 3000)
    hf.save(tmp_path, CONFIG, noisy(CONFIG))
    monkeypatch.undo()
    params = qwen.init(CONFIG, 1)
    hf.save(tmp_path, CONFIG, params)
    assert [p.name for p in tmp_path.glob("*.safetensors*")] == ["model.safetensors"]
    assert_equal(hf.load(tmp_path)[1], params)


def test_tokenizer_card_and_generation_config(tmp_path):
    tokenizer = train_bpe(["a b c"], 300)
    config = dataclasses.replace(CONFIG, vocab=tokenizer.vocab_size)
    hf.save(tmp_path, config, qwen.init(config, 0), tokenizer=tokenizer, card="# A model\n")
    assert Tokenizer.load(tmp_path).encode("abc") == tokenizer.encode("abc")
    assert (tmp_path / "chat_template.jinja").exists()
    generation = json.loads((tmp_path / "generation_config.json").read_text())
    assert generation["eos_token_id"] == [tokenizer.im_end, tokenizer.endoftext]
    assert (tmp_path / "README.md").read_text() == "# A model\n"


# --- problems -------------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path):
    hf.save(tmp_path, CONFIG, noisy(CONFIG))
    return tmp_path


LLAMA3_ROPE = hf_config.record_of(LLAMA3, "float32")["rope_parameters"]


def complaint(folder) -> str:
    with pytest.raises(hf.ModelError) as error:
        hf.load(folder)
    return str(error.value)


def test_every_bad_tensor_is_named_at_once(folder):
    file = folder / "model.safetensors"
    tensors = load_file(file)
    del tensors["model.norm.weight"], tensors["model.layers.1.mlp.up_proj.weight"]
    tensors["model.layers.2.mlp.up_proj.weight"] = np.zeros((2, 2), np.float32)
    tensors["model.layers.0.self_attn.q_proj.bias"] = np.zeros(3, np.float32)
    tensors["model.embed_tokens.weight"] = tensors["model.embed_tokens.weight"].astype(np.float16)
    # old exports: harmless
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.zeros(2, np.float32)
    save_file(tensors, file)
    text = complaint(folder)
    assert "missing: model.layers.1.mlp.up_proj.weight, model.norm.weight" in text
    assert "unexpected: model.layers.2.mlp.up_proj.weight" in text
    assert "model.layers.0.self_attn.q_proj.bias (3,) instead of (16,)" in text
    assert "model.embed_tokens.weight F16" in text
    assert "inv_freq" not in text


def test_more_layers_than_the_files_hold_is_one_short_message(folder):
    """Whatever their number: nothing is made for each of them."""
    for layers in (3, 1000):
        edit(folder / "config.json", {"num_hidden_layers": layers})
        text = complaint(folder)
        assert "model.layers.2.input_layernorm.weight" in text or "hold 26 tensors" in text
        assert len(text) < 2000


def test_a_head_beside_a_tied_embedding_must_be_its_copy(folder):
    file = folder / "model.safetensors"
    tensors = load_file(file)
    embed = tensors["model.embed_tokens.weight"]
    save_file(tensors | {"lm_head.weight": embed.copy()}, file)
    assert hf.load(folder)[0].tied
    other = np.where(embed == embed[-1], 0, embed)
    for head in (-embed, embed[:-1], embed.astype(np.float16), other):
        save_file(tensors | {"lm_head.weight": np.ascontiguousarray(head)}, file)
        assert "tie_word_embeddings=true, and lm_head.weight is not a copy" in complaint(folder)


def test_the_tokens_that_end_an_answer_are_those_of_both_files(folder):
    (folder / "generation_config.json").write_text('{"eos_token_id": [3, 5]}')
    edit(folder / "config.json", {"eos_token_id": 4})
    assert hf_config.end_tokens(folder) == {"config.json": {4}, "generation_config.json": {3, 5}}
    for bad in ("true", '"</s>"', "[[1]]", "-1", "[1, null]"):
        (folder / "generation_config.json").write_text(f'{{"eos_token_id": {bad}}}')
        with pytest.raises(hf.ModelError, match="is neither a token id nor a list"):
            hf_config.end_tokens(folder)
    (folder / "generation_config.json").write_text("{")
    with pytest.raises(hf.ModelError, match=r"generation_config\.json is not JSON"):
        hf_config.end_tokens(folder)


def test_directories_without_a_sound_checkpoint(folder):
    assert "no such directory" in complaint(folder / "nowhere")
    weights = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(weights[: len(weights) // 2])
    assert "model.safetensors is corrupt or truncated" in complaint(folder)
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    assert "no *.safetensors file; the directory holds pytorch_model.bin" in complaint(folder)
    index = folder / "model.safetensors.index.json"
    index.write_text('{"weight_map": {"a": "model-1.safetensors"}}')
    assert "files that do not exist: model-1.safetensors" in complaint(folder)
    index.write_text("[]")
    assert "not an index" in complaint(folder)
    (folder / "config.json").write_text("{")
    assert "config.json is not JSON" in complaint(folder)
    (folder / "config.json").unlink()
    assert "no config.json" in complaint(folder)


YARN = {"rope_type": "yarn", "factor": 4.0}
POSITIVE = hf_config.SIZES.values()
UNSUPPORTED = [
    ({"model_type": "mixtral"}, "model_type is 'mixtral'; supported are qwen2, qwen3, llama, mistral and smollm3: dense"),
    ({"model_type": None}, "supported are qwen2"),
    ({"num_attention_heads": 0, "num_key_value_heads": 0}, "num_attention_heads=0 is not a positive integer"),
    ({"rope_parameters": {"rope_type": "llama3"}}, "rope type 'llama3'"),
    ({"model_type": "mistral", "sliding_window": 4096}, r"sliding window attention \(sliding_window\)"),
    ({"model_type": "smollm3", "no_rope_layers": [1]}, r"no_rope_layers=\[1\] is not a list with 0 or 1 for each"),
    ({"model_type": "smollm3", "no_rope_layers": [1, "x"]}, "is not a list with 0 or 1 for each"),
    ({"model_type": "llama", "mlp_bias": True, "attention_bias": True}, "attention_bias is not.*mlp_bias is not"),
    ({"model_type": "llama", "hidden_size": 18, "head_dim": None}, "head_dim is missing, and 4 heads"),
    ({"model_type": "llama", "partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5 is not supported"),
    ({"partial_rotary_factor": 0}, "partial_rotary_factor=0 is not supported"),
    ({"rope_parameters": {"rope_type": "llama3", "factor": 8}}, "'llama3' needs low_freq_factor"),
    ({"rope_parameters": LLAMA3_ROPE | {"low_freq_factor": 4}}, "low_freq_factor=4.0 is not below high_freq_factor=4.0"),
    ({"hidden_size": None, "vocab_size": None}, "vocab_size is missing; hidden_size is missing"),
    ({"hidden_size": "32", "num_attention_heads": 0}, "hidden_size='32' is not a positive integer; num_attention_heads=0"),
    *(({name: size}, f"{name}={size!r} is not a positive integer") for name, size in itertools.product(POSITIVE, (0, -4, "331", 1.5))),
    ({"layer_types": ["full_attention", "sliding_attention"]}, "sliding window"),
    ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
    ({"rope_parameters": [1]}, r"rope parameters \[1\] are not an object"),
    ({"rope_parameters": {"full_attention": 4}}, "rope parameters 4 are not an object"),
    ({"rope_parameters": {"full_attention": YARN, "sliding_attention": {}}}, "full_attention, sliding_attention, and no rope_type"),
    ({"rope_parameters": {"layers": YARN}}, "has layers, and no rope_type"),
    ({"rope_parameters": None, "rope_scaling": {"factor": 4.0}}, "has factor, and no rope_type"),
    ({"rope_scaling": {"rope_type": float("nan")}}, "rope type nan is not supported"),
    ({"rope_scaling": {"rope_type": "default", "type": "yarn"}}, "rope_type='default' and type='yarn'"),
    ({"rope_parameters": None, "rope_scaling": {"type": "yarn"}}, "rope type 'yarn' needs a factor"),
    ({"rope_scaling": YARN | {"factor": float("nan")}}, "'yarn' needs positive numbers, not factor=nan"),
    ({"rope_scaling": YARN | {"factor": 0.5}}, "needs a factor of at least 1"),
    ({"rope_scaling": YARN | {"original_max_position_embeddings": 0.5}}, "not original_max_position_embeddings=0.5"),
    ({"rope_scaling": YARN | {"beta_fast": 1}}, "beta_slow=1.0 is not below beta_fast=1.0"),
    ({"rope_scaling": YARN | {"truncate": "no"}}, "truncate true or false"),
    ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope type 'linear' is not supported"),
    ({"rope_parameters": YARN, "rope_scaling": YARN | {"factor": 2.0}}, "factor is 2.0 and 4.0"),
    ({"rope_theta": 1e6, "rope_parameters": {"rope_theta": 1e5}}, "rope_theta is 1000000.0 and 100000.0"),
    *(({"rms_norm_eps": eps}, f"rms_norm_eps={eps!r} is not a number between 0 and 1") for eps in ("small", -1, float("nan"))),
    ({"model_type": "qwen3", "attention_bias": True}, "attention_bias"),
    ({"use_sliding_window": True}, "sliding window"),
    ({"quantization_config": {"bits": 4}}, "quantized"),
    ({"num_key_value_heads": 3}, "3 key/value heads do not divide 4"),
    ({"num_hidden_layers": 10**7}, "num_hidden_layers=10000000 is more than any model has, 1,000"),
    ({"vocab_size": 10**12, "hidden_size": 1 << 21}, "vocab_size=1000000000000 .* hidden_size=2097152"),
    ({"max_position_embeddings": 10**18}, "at most"),
    ({"head_dim": 3}, "head_dim=3 is odd"),
    ({"tie_word_embeddings": "false"}, "tie_word_embeddings='false' is neither true nor false"),
]  # fmt: skip


def record(**changes) -> dict:
    """Return the config.json of CONFIG, with changes."""
    return hf_config.record_of(CONFIG, "float32") | changes


@pytest.mark.parametrize("change, text", UNSUPPORTED)
def test_configs_that_are_not_supported(change, text):
    with pytest.raises(hf.ModelError, match=text):
        hf_config.fields(record(**change))


@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
def test_a_pipe_in_place_of_a_file_is_not_waited_for(folder, name):
    (folder / name).unlink(missing_ok=True)
    os.mkfifo(folder / name)
    with pytest.raises(hf_config.ModelError, match=re.escape(f"{name} is not a regular file")):
        hf_config.read(folder, name)
    os.mkfifo(folder / chat.SYSTEM_FILE)
    with pytest.raises(chat.ChatError, match="is not a regular file"):
        chat.system_message(folder)


@pytest.mark.parametrize(
    "theta", [0, 0.0, -1, 1, True, "NaN", float("nan"), float("inf"), 1e39, [1e4]]
)
@pytest.mark.parametrize("nested", [False, True])
def test_a_base_without_frequencies_is_refused(theta, nested):
    given = {"rope_theta": None, "rope_parameters": {"rope_theta": theta}}
    change = given if nested else {"rope_theta": theta, "rope_parameters": None}
    with pytest.raises(hf.ModelError, match=r"rope_theta=.* is not a number between 1 and 1e"):
        hf_config.fields(record(**change))


def test_rope_by_type_of_layer_is_read():
    rope = YARN | {"rope_theta": CONFIG.rope_theta}
    found = hf_config.fields(record(rope_parameters={"full_attention": rope}))
    assert found == hf_config.fields(record(rope_parameters=rope))
    assert found["rope_scaling"].factor == 4.0


def test_llama_is_saved_as_llama(tmp_path):
    hf.save(tmp_path, LLAMA, noisy(LLAMA))
    saved = json.loads((tmp_path / "config.json").read_text())
    assert saved["architectures"] == ["LlamaForCausalLM"] and saved["model_type"] == "llama"
    assert not any(name.endswith(".bias") for name in load_file(tmp_path / "model.safetensors"))
    with pytest.raises(hf.ModelError, match="both"):
        hf_config.record_of(dataclasses.replace(LLAMA, qkv_bias=True, qk_norm=True), "float32")


def test_both_spellings_of_rope_and_the_defaults():
    assert qwen.Config(**hf_config.fields(record())) == CONFIG
    legacy = record(rope_scaling=None, sliding_window=32768)
    del legacy["rope_parameters"], legacy["head_dim"]
    assert qwen.Config(**hf_config.fields(legacy)) == CONFIG
    without = record()
    del without["rope_theta"], without["rope_parameters"]
    assert hf_config.fields(without)["rope_theta"] == 1e4


@pytest.mark.parametrize("parameters", [None, {"rope_type": "default", "rope_theta": 1e4}])
def test_yarn_is_never_ignored(parameters):
    """Qwen2.5's recipe for long contexts adds it to a config.json that may have rope_parameters of
    type default."""
    recipe = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
    given = record(rope_parameters=parameters, rope_scaling=recipe)
    config = qwen.Config(**hf_config.fields(given))
    assert config.rope_scaling == Yarn(4.0, 32768, pytest.approx(1.1386, abs=1e-4))
    assert config.rope_theta == 1e4
    assert qwen.Config(**hf_config.fields(hf_config.record_of(config, "float32"))) == config


@pytest.mark.parametrize("kind", hf_config.KINDS)
def test_what_config_json_leaves_out_is_as_transformers_understands_it(kind):
    sizes = {"model_type": kind} | dict.fromkeys(hf_config.SIZES.values(), 64)
    theirs = hf_config.transformers().AutoConfig.for_model(**sizes)
    found = hf_config.fields(sizes | ({"sliding_window": None} if kind == "mistral" else {}))
    assert found["rope_theta"] == theirs.rope_parameters["rope_theta"]
    stated = hf_config.OPTIONAL_SIZES | hf_config.OTHERS
    for ours in ("kv_heads", "max_positions", "rms_eps", "tied"):
        assert found[ours] == getattr(theirs, stated[ours])
    left_out = [i for i, flag in enumerate(getattr(theirs, "no_rope_layers", [])) if not flag]
    assert list(found["no_rope"]) == left_out and bool(left_out) == (kind == "smollm3")
    whole = record(model_type=kind, no_rope_layers=[1, 1], sliding_window=None, pad_token_id="x")
    del whole["rms_norm_eps"]
    with pytest.raises(hf.ModelError, match="rms_norm_eps left out, and transformers has no def"):
        hf_config.fields(whole)


@pytest.mark.parametrize("cached", [True, False])
def test_a_model_of_the_hub_is_taken_from_the_cache_or_named(tmp_path, cached):
    """Without a network, in a process of its own: the library reads its variables once."""
    if cached:
        kept = tmp_path / "hub/models--owner--model/snapshots/abc"
        kept.mkdir(parents=True)
        (kept / "config.json").write_text("{}")
        (kept.parents[1] / "refs").mkdir()
        (kept.parents[1] / "refs/main").write_text("abc")
    code = "from models import hub\ntry: print(hub.fetch('owner/model'))\nexcept ValueError as e: print(e)"
    (line,) = printed(code, HF_HOME=str(tmp_path), HF_HUB_OFFLINE="1").splitlines()
    if cached:
        assert line == str(kept)
    else:
        assert "owner/model is not a local directory" in line and "give its directory" in line


def test_a_gated_model_is_one_message_that_says_what_to_do(monkeypatch):
    def refuse(*_, **__):
        raise OSError("401 Client Error.\n\nCannot access gated repo for url https://x/y.\n")

    monkeypatch.setattr("huggingface_hub.snapshot_download", refuse)
    config = base.get_config()
    config.model.path = "owner/gated"
    (problem,) = model_problems(config, "train")
    assert "Cannot access gated repo" in problem and "`hf auth login`" in problem
    assert "\n" not in problem


def damage(folder, kind):
    if kind == "cut":
        (folder / "model.safetensors").write_bytes(b"cut")
    elif kind == "index":
        index = {"weight_map": {"model.norm.weight": "model-2.safetensors"}}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    else:
        edit(folder / "config.json", kind)


@pytest.mark.parametrize(
    "kind, words",
    [
        ({"intermediate_size": 66}, "of the wrong shape: model.layers.0.mlp.gate_proj.weight"),
        ({"num_hidden_layers": 3}, "missing: model.layers.2.input_layernorm.weight"),
        ({"tie_word_embeddings": False}, "missing: lm_head.weight"),
        ("cut", "model.safetensors is corrupt or truncated"),
        ("index", "names files that do not exist: model-2.safetensors"),
    ],
)
@pytest.mark.parametrize("mode", ["plan", "train"])
def test_weights_that_are_not_those_of_config_json_are_one_problem_before_the_start(
    tmp_path, kind, words, mode
):
    tokenizer = train_bpe(["a b c"], 300)
    shape = dataclasses.replace(CONFIG, vocab=tokenizer.vocab_size, max_positions=32768)
    hf.save(tmp_path, shape, qwen.init(shape, 0), tokenizer=tokenizer)
    config = base.get_config()
    config.model.path = str(tmp_path)
    assert not list(model_problems(config, mode))
    damage(tmp_path, kind)
    (problem,) = model_problems(config, mode)
    assert problem.startswith(f"config.model.path: {tmp_path}") and words in problem


def test_config_json_is_read_without_jax():
    code = "import sys; from models import hf_config, hub; assert not {'jax', 'numpy', 'transformers'} & set(sys.modules)"
    printed(code)


@pytest.mark.parametrize("dtype", [None, "bfloat16"])
def test_an_accelerator_casts_what_it_sends(monkeypatch, dtype):
    """With no device that counts as this host's."""
    config = qwen.Config(vocab=64, d_model=16, layers=2, heads=4, kv_heads=2, head_dim=4, d_ff=24)
    params = qwen.init(config, 0)
    expected = list(hf.to_hf(config, params, dtype))
    monkeypatch.setattr(jax, "devices", lambda *_: [])
    for (name, array), (same, other) in zip(hf.to_hf(config, params, dtype), expected, strict=True):
        assert name == same
        np.testing.assert_array_equal(array, other, strict=True)
