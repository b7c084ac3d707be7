"""A config that cannot mean anything is one message that names the key or the file, before anything
is computed."""

import json

import jax
import numpy as np
import pytest

import run
from configs import base
from evolver.config import cli
from evolver.config.checks import problems
from models import hf, qwen
from models.tokenizer import Tokenizer, TokenizerError
from tests.evolver.chat_server import Answer, client

LABELS = "attributing.enabled=True; advantage.name=adca"
LLM = f"{LABELS}; attributing.judge.name=llm; llm.model=tiny; llm.url=http://127.0.0.1:9/v1"
VLLM = "engine.name=vllm; engine.vllm.python=python3"


def found(tiny, overrides=""):
    """Return all problems of the tiny config with overrides such as "steps=1; seed=2"."""
    words = [f"--config.{override}" for override in overrides.split("; ") if override]
    command = cli.parse(["run.py", f"--config={tiny}", *words])
    return [*command.problems, *problems(command.config, base.Config, tiny.parent / "run", "train")]


@pytest.mark.parametrize(
    "overrides", ["", LLM, f"{VLLM}; rollout.async_depth=1; loss.importance_high=4.0"]
)
def test_what_can_work_is_not_complained_about(tiny, overrides):
    assert found(tiny, overrides) == []


@pytest.mark.parametrize(
    "override",
    [
        "rollout.top_p=0.0", "rollout.temperature=1e30", "rollout.temperature=1e-30", "eval.temperature=1e30",
        "rollout.timeout=1e-9", "llm.deadline=1e-9", "env.timeout=1e-9", "hosts.deadline=1e-9",
        "template.max_observation=1", "rollout.group=1000000000", "rollout.context=100000000000",
        "engine.slots=100000000", "learner.micro=1000000", "lora.rank=100000000", "steps=100000000000000000000",
        "loss.importance_cap=0.1", "optim.lr=1e30", "lora.alpha=0.0", "loss.kl_estimator=k1", "mesh.data=0",
        "steps=0", "llm.judge.top_p=0.0", "llm.judge.temperature=1e30", "mesh.fsdp=1000000000",
        "engine.vllm.start_timeout=1e-9", "optim.eps=1e30", "optim.weight_decay=1e30", "rollout.group=0",
        "env.memory_mb=1", "env.memory_mb=100000000000000", "navigating.top_k=1000000000", "engine.vllm.tolerance=1e30",
        "eval.temperatures=(1e30,)", "eval.temperatures=('hot',)", "env.timeout=1e308", "rollout.timeout=1e308",
        "llm.deadline=1e308", "hosts.deadline=1e308", "engine.vllm.start_timeout=1e308",
    ],
)  # fmt: skip
def test_a_value_out_of_bounds_is_one_message_with_its_key_and_bounds(tiny, override):
    (problem,) = found(tiny, override)
    assert problem.startswith(f"config.{override.partition('=')[0]} must be ")
    assert "; it is " in problem


@pytest.mark.parametrize(
    "overrides,words",
    [
        (
            "rollout.max_tokens=80; rollout.context=81",
            "config.rollout.max_tokens=80 leaves 1 tokens of",
        ),
        (
            "questioning.enabled=True; questioning.explorer.args.least=7; questioning.explorer.args.most=2",
            "explorer.args.least=7 calls of a task are above most=2",
        ),
        ("loss.args.dual_clip=1e999", "dual_clip"),
        (
            "learner.row=6",
            "config.learner.row=6 tokens cannot hold a turn of config.rollout.max_tokens=6",
        ),
        (
            "rollout.context=40000",
            "config.rollout.context=40000 is more than the max_position_embeddings=32768",
        ),
        ("lora.rank=1000", "config.lora.rank=1000 is more than the hidden_size=32"),
        (f"{LLM}; advantage.args.alpha=1e30", "alpha=1e+30 must be at most 1000"),
        (f"{LLM}; advantage.args.alpha_min=0.5", "alpha_min=0.5 is above alpha=0.1"),
        (f"{LABELS}; attributing.judge.args.max_replayed=0", "max_replayed=0 must be at least 1"),
        (
            f"{LLM}; llm.budget_tokens=5",
            "config.llm.budget_tokens=5 is less than one answer may take",
        ),
        (
            LLM + '; llm.step_judge.extra={"messages":[]}',
            "config.llm.step_judge.extra may not replace messages",
        ),
        (
            LLM + '; llm.step_judge.extra={"max_tokens":"many"}',
            "use config.llm.step_judge.max_tokens",
        ),
        (
            f"{LLM}; llm.step_judge.extra={'[' * 100_000}",
            "config.llm.step_judge.extra must be a JSON object",
        ),
        (
            f"{LLM}; llm.url=http://[::1/v1",
            "is not a URL such as http://127.0.0.1:8000/v1 (Invalid IPv6 URL)",
        ),
        (f"{LLM}; llm.url=http://127.0.0.1:port/v1", "8000/v1 (Port could not"),
        (
            LLM + '; llm.step_judge.extra={"a": NaN}',
            "config.llm.step_judge.extra must be a JSON object",
        ),
        (LLM + '; llm.step_judge.extra={"a": 1e999}', "a value.a is inf"),
        (f"{LLM}; llm.cache=README.md", "config.llm.cache=README.md is a file"),
        (f"{LLM}; llm.prices=README.md", "config.llm.prices=README.md must be a JSON file"),
        (
            "env.mode=http; env.url=http://[::1/x",
            "config.env.url=http://[::1/x is not the url of a service",
        ),
        (
            "env.mode=http; env.url=http://a:b/",
            "config.env.url=http://a:b/ is not the url of a service",
        ),
        (
            "sharding.vocab=nope",
            "sharding.vocab=nope: nope is not a mesh axis; the axes are data, fsdp",
        ),
        (
            "model.path=~nobody-has-this-name/a",
            "config.model.path=~nobody-has-this-name/a: there is no such directory",
        ),
        ("log.tags=(1,)", "config.log.tags must be of type str"),
        ("hosts.count=2; hosts.coordinator=a:999999", "needs config.hosts.coordinator=host:port"),
        ("env.name=envs.world:World", "its class does not define a method that a world needs"),
        (
            "env.name=travel; env.args.n_dev=abc",
            "config.env.args.n_dev='abc' must be of type int",
        ),
        ("navigating.enabled=True; navigating.pool=README.md", "there is no such directory"),
        ("rollout.async_depth=2", "older than config.learner.max_staleness=1 allows"),
        ("loss.importance_high=0.5", "exclude a weight of 1"),
        (
            "loss.importance_high=2.0; loss.importance_cap=0.0",
            "need config.loss.importance_cap above 0",
        ),
        # The engine.
        ("engine.name=vlm", "did you mean vllm?"),
        ("engine.vllm.python=python3", "set config.engine.name=vllm"),
        (
            "engine.name=vllm",
            "needs exactly one of config.engine.vllm.urls (servers that are running) and config.engine.vllm.python",
        ),
        (
            f"{VLLM}; engine.vllm.urls=('http://127.0.0.1:1',)",
            "needs exactly one of config.engine.vllm.urls",
        ),
        (f"{VLLM}; engine.vllm.python=/nowhere/python", "/nowhere/python is not an executable"),
        (f"{VLLM}; engine.vllm.transfer=lora", "config.lora.rank=0 trains none: set lora.rank"),
        (f"{VLLM}; engine.vllm.transfer=none", "training needs shm, nccl or lora"),
        (f"{VLLM}; engine.vllm.key=EVOLVER_NO_SUCH_KEY", "this environment variable is not set"),
        (
            f"{VLLM}; engine.vllm.shared=/nowhere",
            "config.engine.vllm.shared=/nowhere is not a directory",
        ),
        (
            f"{VLLM}; engine.vllm.sleep=True; rollout.async_depth=1",
            "config.engine.vllm.sleep needs servers without requests during an update",
        ),
        (
            f"{VLLM}; engine.vllm.sleep=True; engine.vllm.transfer=nccl",
            "config.engine.vllm.transfer=nccl for servers on others",
        ),
        (f"{VLLM}; rollout.top_p=0.9", "set config.rollout.top_p=1.0 and top_k=0"),
        (
            "engine.name=vllm; engine.vllm.urls=('localhost:8000',)",
            "is not a URL such as http://127.0.0.1:8000",
        ),
        (
            "engine.name=vllm; engine.vllm.urls=('http://[::1/v1',)",
            "config.engine.vllm.urls: 'http://[::1/v1' is not a URL",
        ),
        (
            f"{VLLM}; engine.vllm.devices=(1,)",
            "config.engine.vllm.devices must be of type str; it is (1,)",
        ),
        (f'{VLLM}; engine.vllm.flags="', "cannot be split into words: No closing quotation"),
        (
            f"{VLLM}; engine.vllm.flags=--gpu-memory-utilization .",
            "must be a number above 0 and at most 1; it is '.'",
        ),
        (
            f"{VLLM}; engine.vllm.flags=--gpu-memory-utilization=9",
            "must be a number above 0 and at most 1; it is '9'",
        ),
        (
            f"{VLLM}; engine.vllm.flags=--tensor-parallel-size 0",
            "must be a whole number from 1; it is '0'",
        ),
    ],
)
def test_values_that_cannot_mean_anything_together_are_one_message(tiny, overrides, words):
    (problem,) = found(tiny, overrides)
    assert words in problem


def test_a_table_of_prices_that_is_nested_too_deeply_is_one_message(tiny, tmp_path):
    (tmp_path / "prices.json").write_text("[" * 100_000)
    (problem,) = found(tiny, f"{LLM}; llm.prices={tmp_path / 'prices.json'}")
    assert "nested too deeply" in problem


def test_a_home_directory_of_nobody_is_one_message(tiny):
    command = cli.parse(["run.py", f"--config={tiny}", "--workdir=~nobody-has-this-name/run"])
    (problem,) = problems(command.config, base.Config, command.workdir, "train")
    assert problem.startswith("--workdir=~nobody-has-this-name/run: there is no such user")


@pytest.mark.parametrize(
    "values,words",
    [
        ({"num_attention_heads": -4}, "num_attention_heads=-4 is not a positive integer"),
        ({"eos_token_id": [[1]]}, "eos_token_id=[[1]] is neither a token id nor a list of them"),
        (
            {"rope_parameters": {"rope_theta": float("nan")}},
            "and nan",
        ),
        ({"max_position_embeddings": 1}, "max_position_embeddings=1 of"),
        (
            {"rope_scaling": {"rope_type": "yarn", "factor": int("9" * 400)}},
            "is not JSON: a number of 400 digits",
        ),
    ],
)
def test_a_model_config_that_cannot_be_is_one_message_with_file_and_key(
    tiny, checkpoint, values, words
):
    path = checkpoint / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))
    (problem,) = found(tiny, f"model.path={checkpoint}")
    assert words in problem and str(checkpoint) in problem and "config.json" in problem


def test_a_folder_in_the_place_of_a_config_is_one_message(tiny, checkpoint):
    (checkpoint / "config.json").unlink()
    (checkpoint / "config.json").mkdir()
    (problem,) = found(tiny, f"model.path={checkpoint}")
    assert "config.json is a directory and not a regular file" in problem


def test_a_tokenizer_with_a_hole_is_one_message(tiny, checkpoint):
    path = checkpoint / "tokenizer.json"
    spec = json.loads(path.read_text())
    vocab = spec["model"]["vocab"]
    gone = next(text for text in reversed(list(vocab)) if len(text) > 1)
    spec["model"]["merges"] = [
        m for m in spec["model"]["merges"] if "".join(m).replace(" ", "") != gone
    ]
    del vocab[gone]
    path.write_text(json.dumps(spec))
    with pytest.raises(TokenizerError, match="it has a hole"):
        Tokenizer.load(checkpoint)
    (problem,) = found(tiny, f"model.path={checkpoint}")
    assert f"{checkpoint}: tokenizer.json gives" in problem and "it has a hole" in problem


@pytest.mark.parametrize("value", [0.0, 1e30])
def test_weights_that_nobody_trained_are_refused(tmp_path, value):
    shape = qwen.Config(40, 16, 2, 4, 2, 4, 24)
    filled = lambda weight: np.full(weight.shape, value, np.float32)
    hf.save(tmp_path, shape, jax.tree.map(filled, qwen.shapes(shape)))
    with pytest.raises(hf.ModelError, match=r"\.weight is corrupt: it holds (only zeros|.*1e\+30)"):
        hf.load(tmp_path)


def test_an_index_that_names_no_files_is_one_message(checkpoint):
    for content in ({"weight_map": {"a": 3}}, {"weight_map": {"a": "../other.safetensors"}}):
        (checkpoint / "model.safetensors.index.json").write_text(json.dumps(content))
        with pytest.raises(
            hf.ModelError, match="is not an index of safetensors files: weight_map holds"
        ):
            hf.load(checkpoint)


def test_a_list_of_models_that_is_nested_too_deeply_is_no_list():
    models = []
    for _ in range(900):
        models = [models]
    with client(lambda body, n: Answer({}, 400)) as chat:
        chat.server.models = models
        assert chat.server_problems() == [] and "lists no models" in chat.lines[0]


HEAD = "from configs import base\ndef get_config():\n    c = base.get_config()\n"


@pytest.mark.parametrize(
    "text,words",
    [
        ("def get_config():\n    pass\n", "get_config() returned None; it must return the config"),
        ("def get_config():\n    return 7\n", "get_config() returned 7; it must return the config"),
        ("x = 1\n", "the file defines no get_config()"),
        (
            HEAD + "    c.rolout.tasks = 3\n    return c\n",
            'Did you mean "rollout" instead of "rolout"',
        ),
        ("import sys\nsys.exit(3)\n", "line 2: SystemExit: 3"),
        (HEAD + "    raise KeyError('it said \"no\"')\n", 'it said "no"'),
        (HEAD + "    c.env.args.x = c.env\n    return c\n", "the config contains itself"),
        (
            HEAD + "    a = []\n    a.append(a)\n    c.env.args.x = a\n    return c\n",
            "the config contains itself",
        ),
        (
            HEAD + "    c.env.args = [1]\n    return c\n",
            "line 4: TypeError: Could not override field 'args'",
        ),
    ],
)
@pytest.mark.parametrize("folder", ["plain", "with a space"])
def test_a_config_file_that_is_none_is_one_message(capsys, tmp_path, text, words, folder):
    path = tmp_path / folder / "mine.py"
    path.parent.mkdir()
    path.write_text(text)
    assert run.main(["run.py", f"--config={path}", "--mode=plan"]) == 2
    err = capsys.readouterr().err
    assert "1 problem; nothing was started" in err and words in err and str(path) in err


def test_arguments_of_a_world_that_are_none(capsys, tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(HEAD + "    c.env.args = None\n    return c\n")
    assert run.main(["run.py", f"--config={path}", "--mode=plan"]) == 2
    assert "config.env.args must be of type dict; it is None" in capsys.readouterr().err
