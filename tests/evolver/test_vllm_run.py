"""The whole program with rollouts on real vLLM servers. `make test-services` installs vLLM and runs
this."""

import asyncio

import pytest

import run
from evolver.files.workdir import Workdir
from rl.engines.vllm.servers import OwnServers
from tests.rl.vllm_setup import FLAGS, PYTHON, ROOT

pytestmark = [
    pytest.mark.services,
    pytest.mark.skipif(not PYTHON.exists(), reason="no vLLM: `make test-services` installs it"),
]


@pytest.mark.parametrize("depth", [0, 1])
def test_the_quickstart_trains_on_what_vllm_samples(tmp_path, depth, capsys):
    words = [
        "--config=configs/quickstart.py:grpo", f"--workdir={tmp_path / 'run'}", "--config.engine.name=vllm",
        f"--config.engine.vllm.python={PYTHON}", f"--config.engine.vllm.flags={FLAGS}",
        "--config.engine.vllm.start_timeout=1800.0", "--config.steps=3", "--config.eval.every=3",
        "--config.eval.tasks=8", "--config.eval.rollouts=2", f"--config.rollout.async_depth={depth}",
    ]  # fmt: skip
    assert run.main(["run.py", *words]) == 0, capsys.readouterr().err
    lines = Workdir(tmp_path / "run").metrics()
    assert [line["step"] for line in lines] == [0, 1, 2, 3]
    # A step whose rollouts were all begun and ended before the last update has no tokens of the
    # present weights.
    fresh = [line["mismatch/fresh"] for line in lines[1:] if not depth or "mismatch/fresh" in line]
    assert fresh and max(fresh) < 1e-4
    for line in lines[1:]:
        assert (
            line["rollout/count"] == 128
            and line["stop/cancelled"] == 0
            and line["alarm/weights"] == 0
        )
        assert line["engine/gap"] < 1e-4 < line["engine/shift"]
        assert line["engine/version"] == line["step"] and line["staleness/max"] <= depth
        assert line["engine/cached_tokens"] > 0.5 * line["engine/prompt_tokens"]
        assert line["rollout/success"] > 0.02
    assert "eval/avg@2" in lines[-1]


def test_a_quickstart_learns_on_vllm_with_a_judge_on_vllm(tmp_path, capsys):
    """All mechanisms, as many rollouts a step as the quickstart, a quarter of its steps, in which
    it makes most of its
    gain. The judge is the base policy, which cannot judge: the server holds it to the form of an
    answer."""
    flags = f"{FLAGS} --gpu-memory-utilization 0.3"
    judge = OwnServers(
        python=str(PYTHON), checkpoint=ROOT / "configs/assets/travel_base", logs=tmp_path / "judge", backend="",
        context=4096, dtype="float32", slots=32, flags=flags, start_timeout=1800.0,
    )  # fmt: skip
    with asyncio.Runner() as runner:
        (url,) = runner.run(judge.start())
        words = [
            "--config=configs/quickstart.py", f"--workdir={tmp_path / 'run'}", "--config.steps=20",
            "--config.eval.every=20", "--config.engine.name=vllm", f"--config.engine.vllm.python={PYTHON}",
            f"--config.engine.vllm.flags={flags}", "--config.engine.vllm.start_timeout=1800.0",
            "--config.attributing.judge=llm", f"--config.llm.url={url}/v1", "--config.llm.model=policy",
            "--config.llm.step_judge.max_tokens=32", "--config.llm.deadline=300", "--config.llm.shown=400",
        ]  # fmt: skip
        try:
            assert run.main(["run.py", *words]) == 0, capsys.readouterr().err
        finally:
            runner.run(judge.stop())
    first, *steps, last = Workdir(tmp_path / "run").metrics()
    assert first["eval/avg@8"] < 0.4 and last["eval/avg@8"] > first["eval/avg@8"] + 0.25
    assert last["step"] == 20 and all(line["llm/step_judge/calls"] > 0 for line in steps)
    assert max(line["mismatch/fresh"] for line in [*steps, last]) < 1e-4
