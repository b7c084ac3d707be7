"""What is wrong with an engine's config is said before anything starts."""

import sys

import pytest

from configs import base
from evolver.build import RunError, open_run
from evolver.config import cli
from evolver.config.checks import problems
from tests.configs import config_of

VLLM = f"engine.name=vllm engine.vllm.python={sys.executable}"
URLS = "engine.name=vllm engine.vllm.urls=('{}',)"
BAD = [
    ("engine.name=vlm", "did you mean vllm?"),
    (
        "engine.name=vllm",
        "needs exactly one of config.engine.vllm.urls (servers that are running) and config.engine.vllm.python",
    ),
    (
        f"{VLLM} {URLS.format('http://127.0.0.1:1')}",
        "needs exactly one of config.engine.vllm.urls",
    ),
    (f"{VLLM} engine.vllm.python=/nowhere/python", "/nowhere/python is not an executable"),
    (f"{VLLM} engine.vllm.transfer=lora", "config.lora.rank=0 trains none: set lora.rank"),
    (f"{VLLM} engine.vllm.transfer=none", "training needs shm, nccl or lora"),
    (f"{VLLM} engine.vllm.key=EVOLVER_NO_SUCH_KEY", "this environment variable is not set"),
    (
        f"{VLLM} engine.vllm.shared=/nowhere",
        "config.engine.vllm.shared=/nowhere is not a directory",
    ),
    (
        f"{VLLM} engine.vllm.sleep=True rollout.async_depth=1",
        "config.engine.vllm.sleep needs servers without requests during an update",
    ),
    (
        f"{VLLM} engine.vllm.sleep=True engine.vllm.transfer=nccl",
        "config.engine.vllm.transfer=nccl for servers on others",
    ),
    (f"{VLLM} rollout.top_p=0.9", "set config.rollout.top_p=1.0 and top_k=0"),
    (URLS.format("localhost:8000"), "is not a URL such as http://127.0.0.1:8000"),
    (f"engine.vllm.python={sys.executable}", "set config.engine.name=vllm"),
    ("rollout.async_depth=2", "older than config.learner.max_staleness=1 allows"),
    ("loss.importance_high=0.5", "exclude a weight of 1"),
    (
        "loss.importance_high=2.0 loss.importance_cap=0.0",
        "need config.loss.importance_cap above 0",
    ),
]


def problems_of(overrides, tmp_path):
    config = config_of("quickstart:grpo", *overrides.split())
    return problems(config, base.Config, tmp_path / "run", "train")


@pytest.mark.parametrize("overrides,words", BAD)
def test_what_cannot_work_is_named(overrides, words, tmp_path):
    (problem,) = problems_of(overrides, tmp_path)
    assert words in problem


def test_what_can_work_is_not_complained_about(tmp_path):
    assert not problems_of(f"{VLLM} rollout.async_depth=1 loss.importance_high=4.0", tmp_path)


def test_an_engine_is_closed_if_a_later_part_cannot_be_built(tiny, tmp_path, monkeypatch):
    closed = []

    async def close(engine):
        closed.append(engine)

    def no_tasks(*args):
        raise ValueError("no tasks can be made")

    monkeypatch.setattr("rl.engines.jax.engine.JaxEngine.close", close)
    monkeypatch.setattr("evolver.build.make_tasks", no_tasks)
    config = cli.parse(["run.py", f"--config={tiny}", f"--workdir={tmp_path / 'run'}"]).config
    with pytest.raises(RunError, match="no tasks can be made"), open_run(config, tmp_path / "run"):
        raise AssertionError("the run must not begin")
    assert len(closed) == 1
