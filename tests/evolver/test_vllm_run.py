"""The whole program with rollouts on real vLLM servers. `make test-services` installs vLLM and runs
this."""

import asyncio
import os
import signal
import subprocess
import time

import pytest

from evolver.files.workdir import Workdir
from rl.engines.vllm.servers import OwnServers
from tests.evolver.runs import go
from tests.evolver.test_hosts import finish, start
from tests.rl.vllm_setup import FLAGS, PYTHON, ROOT

pytestmark = [
    pytest.mark.services,
    pytest.mark.skipif(not PYTHON.exists(), reason="no vLLM: `make test-services` installs it"),
]


QUICKSTART = ROOT / "configs/quickstart.py"
HALF = f"{FLAGS} --gpu-memory-utilization 0.3"  # of a device that another server needs, too
EVALUATED = "eval.tasks=8 eval.rollouts=2"


def vllm(flags=FLAGS):
    """Return the words of a run whose rollouts are made by vLLM with these flags."""
    return (
        f"engine.name=vllm engine.vllm.python={PYTHON} engine.vllm.start_timeout=1800.0",
        f"--config.engine.vllm.flags={flags}",
    )


def short(depth):
    return f"steps=3 eval.every=3 rollout.async_depth={depth}"


@pytest.mark.parametrize("depth", [0, 1])
def test_the_quickstart_trains_on_what_vllm_samples(tmp_path, depth, capsys):
    words = [*vllm(), EVALUATED, short(depth)]
    assert go(f"{QUICKSTART}:grpo", tmp_path / "run", *words) == 0, capsys.readouterr().err
    lines = Workdir(tmp_path / "run").metrics()
    assert [line["step"] for line in lines] == [0, 1, 2, 3]
    # A step whose rollouts were all begun and ended before the last update has no tokens of the
    # present weights.
    fresh = [line["mismatch/fresh"] for line in lines[1:] if not depth or "mismatch/fresh" in line]
    assert fresh and max(fresh) < 1e-4
    for line in lines[1:]:
        assert line["rollout/count"] == 128
        assert line["stop/cancelled"] == line["alarm/weights"] == 0
        assert line["engine/gap"] < 1e-4 < line["engine/shift"]
        assert line["engine/version"] == line["step"] and line["staleness/max"] <= depth
        assert line["engine/cached_tokens"] > 0.5 * line["engine/prompt_tokens"]
        assert line["rollout/success"] > 0.02
    assert "eval/avg@2" in lines[-1]


def processes(folder, *words):
    """Start two processes of one run, with a server each."""
    given = (*vllm(HALF), EVALUATED, "mesh.fsdp=2", *words)
    return start(folder, f"{QUICKSTART}:grpo", 2, "run", *given)


def children(pid, words):
    """Return the processes that a process has started with some words in their command lines."""
    found = subprocess.run(["pgrep", "-P", str(pid), "-f", words], capture_output=True, text=True)
    return [int(line) for line in found.stdout.split()]


@pytest.mark.parametrize("depth", [0, 1])
def test_two_processes_train_on_what_their_servers_sample(tmp_path, depth):
    ends = finish(processes(tmp_path, short(depth)))
    assert [code for code, _, _ in ends] == [0, 0], "".join(err[-3000:] for _, _, err in ends)
    lines = Workdir(tmp_path / "run").metrics()
    assert [line["step"] for line in lines] == [0, 1, 2, 3]
    for line in lines[1:]:
        assert line["rollout/count"] == 128 and line["stop/cancelled"] == 0
        assert line["engine/replicas"] == 2 and line["engine/version"] == line["step"]
        assert line["engine/gap"] < 1e-4 < line["engine/shift"]
        assert line["staleness/max"] <= depth and line["rollout/success"] > 0.02
        if depth == 0:
            assert line["mismatch/fresh"] < 1e-4
    for name in ("engine", "engine_1"):
        assert (tmp_path / "run" / name / "vllm-0.log").exists(), "each process has a server"


def test_a_server_that_is_lost_for_good_ends_both_processes_with_everything_saved(tmp_path):
    both = processes(tmp_path, "steps=50 eval.every=0 engine.vllm.restarts=0")
    ends = time.monotonic() + 1800
    while time.monotonic() < ends and len(Workdir(tmp_path / "run").metrics()) < 3:
        time.sleep(0.5)
    (launcher,) = children(both[1].pid, "launch.py")
    for server in children(launcher, "vllm.entrypoints"):
        os.killpg(server, signal.SIGKILL)
    for code, _, err in finish(both):
        assert code == 1 and "no server is left" in err, err[-3000:]
        assert " of 50 is saved. The same command resumes from there." in err


def test_a_quickstart_learns_on_vllm_with_a_judge_on_vllm(tmp_path, capsys):
    """All mechanisms, as many rollouts a step as the quickstart, a quarter of its steps, in which
    it makes most of its
    gain. The judge is the base policy, which cannot judge: the server holds it to the form of an
    answer."""
    judge = OwnServers(
        python=str(PYTHON), checkpoint=ROOT / "configs/assets/travel_base", logs=tmp_path / "judge",
        backend="", context=4096, dtype="float32", slots=32, flags=HALF, start_timeout=1800.0,
    )  # fmt: skip
    with asyncio.Runner() as runner:
        (url,) = runner.run(judge.start())
        words = [
            *vllm(HALF),
            "steps=20 eval.every=20 attributing.judge=llm llm.shown=400 llm.deadline=300",
            f"llm.url={url}/v1 llm.model=policy llm.step_judge.max_tokens=32",
        ]
        try:
            assert go(QUICKSTART, tmp_path / "run", *words) == 0, capsys.readouterr().err
        finally:
            runner.run(judge.stop())
    first, *steps, last = Workdir(tmp_path / "run").metrics()
    assert first["eval/avg@8"] < 0.4 and last["eval/avg@8"] > first["eval/avg@8"] + 0.25
    assert last["step"] == 20 and all(line["llm/step_judge/calls"] > 0 for line in steps)
    assert max(line["mismatch/fresh"] for line in [*steps, last]) < 1e-4
