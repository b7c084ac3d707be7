"""What would stop a large run on its first day is said in its plan, and at start-up before anything
is loaded."""

import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import jax
import pytest

import run
from evolver import plan
from evolver.config.derived import xla_flags
from evolver.plan import advice, estimate, preflight, report, targets
from evolver.plan.targets import GIB
from tests.evolver.test_plan import case_of, flagship

TARGET = "a100-80g:8"
# learner and servers in turns, each with most of a GPU
TURNS = ("engine.vllm.sleep=True", "engine.vllm.flags=--gpu-memory-utilization 0.6")


def lacks(case, tmp_path, *, devices=8):
    return list(preflight.host_shortages(case, tmp_path, devices))


@pytest.fixture
def roomy(monkeypatch):
    """A machine with plenty of everything; returns what a test may change."""
    have = SimpleNamespace(disk=1e15, shared=1e15, memory=1e15)
    usage = lambda path: SimpleNamespace(free=have.shared if str(path) == "/dev/shm" else have.disk)
    monkeypatch.setattr("shutil.disk_usage", usage)
    monkeypatch.setattr(preflight, "free_memory", lambda: have.memory)
    monkeypatch.setenv(preflight.POOL, "200")
    monkeypatch.setenv(preflight.SHARE, "0.7")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return have


@pytest.fixture
def gpus(roomy, monkeypatch):
    """Such a machine with NVIDIA GPUs, and nothing said about them."""
    monkeypatch.setenv("JAX_PLATFORMS", "cuda,cpu")
    monkeypatch.setattr(Path, "exists", lambda path: str(path) == "/dev/nvidiactl")
    for name in (preflight.SHARE, preflight.ALLOCATOR, preflight.FLAGS):
        monkeypatch.setenv(name, "")  # so that what the test sets does not stay
        monkeypatch.delenv(name)


@pytest.fixture(scope="module")
def case():
    return flagship()


# --- variables of XLA -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "lacking"),
    [
        ((), "in pinned host memory, and XLA's pool holds 64 GiB"),
        (TURNS, f"{preflight.ALLOCATOR}=default keeps what it once had"),
    ],
)
def test_a_run_gets_the_variables_that_its_plan_wants(
    gpus, monkeypatch, tmp_path, capsys, changes, lacking
):
    monkeypatch.delenv(preflight.POOL)
    case = flagship(*changes)
    assert lacking in lacks(case, tmp_path)[-1]
    run.set_variables(case.config)
    assert lacks(case, tmp_path) == []
    text = plan.plan(case.config, str(tmp_path), TARGET)
    for line in capsys.readouterr().out.splitlines():  # what the plan says to export
        assert f"export {line.split()[0]}" in text


def test_a_sleeping_server_keeps_what_adapters_do_not_bring_on_the_host():
    values = ("lora.rank=32", "engine.vllm.transfer=lora")
    asleep, awake = (flagship(*values, f"engine.vllm.sleep={on}") for on in (True, False))
    ram = [preflight.needs(case, 8)["ram"] for case in (asleep, awake)]
    assert ram[0] - ram[1] == asleep.sizes["sync"]
    copied = 2 * asleep.engine.weights / asleep.target.chip.bus
    assert estimate.sleep_seconds(asleep) == estimate.SLEEP + copied
    assert estimate.sleep_seconds(awake) == 0.0


@pytest.mark.parametrize(("platforms", "gpu"), [("cpu", True), ("cuda", False)])
def test_without_a_gpu_no_variable_is_set(case, roomy, monkeypatch, platforms, gpu):
    monkeypatch.delenv(preflight.SHARE)
    monkeypatch.setenv("JAX_PLATFORMS", platforms)
    monkeypatch.setattr(Path, "exists", lambda path: gpu)
    run.set_variables(case.config)
    assert preflight.SHARE not in os.environ


def test_a_variable_that_the_user_has_set_stays(case, gpus, monkeypatch, capsys):
    monkeypatch.setenv(preflight.SHARE, "0.7")
    monkeypatch.setenv(preflight.FLAGS, "--xla_gpu_enable_latency_hiding_scheduler=false")
    run.set_variables(case.config)
    assert os.environ[preflight.SHARE] == "0.7" and capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("remat", "given", "then"),
    [
        ("dots", "", "--xla_disable_hlo_passes=rematerialization"),
        ("attention", "--a", "--a --xla_disable_hlo_passes=rematerialization"),
        ("dots", "--xla_disable_hlo_passes=b", "--xla_disable_hlo_passes=b"),
        ("full", "--a", "--a"),
    ],
)
def test_xla_recomputes_nothing_that_remat_keeps(case, gpus, monkeypatch, remat, given, then):
    monkeypatch.setenv("XLA_FLAGS", given)
    case = advice.changed(case, {"model.remat": remat, "mesh.fsdp": 1})
    run.set_variables(case.config)
    assert os.environ["XLA_FLAGS"] == then
    said = [line.partition("export ")[2] for line in preflight.lines(case)]
    flag = "XLA_FLAGS=--xla_disable_hlo_passes=rematerialization"
    assert (flag in said) == (remat != "full")


@pytest.mark.parametrize(
    ("fsdp", "given", "then"),
    [
        (1, "--a", "--a"),
        (8, "--a", "--a --xla_gpu_enable_latency_hiding_scheduler=true"),
        (8, *["--xla_gpu_enable_latency_hiding_scheduler=false"] * 2),
    ],
)
def test_several_devices_compute_while_they_send(case, fsdp, given, then):
    config = advice.changed(case, {"model.remat": "full", "mesh.fsdp": fsdp}).config
    assert xla_flags(config, given) == then


def test_the_newer_name_of_xlas_share_counts(case, gpus, monkeypatch, tmp_path):
    monkeypatch.setenv("XLA_CLIENT_MEM_FRACTION", "0.9")
    run.set_variables(case.config)
    assert preflight.SHARE not in os.environ, "jax refuses both together"
    assert "XLA takes 90% of each GPU" in "\n".join(lacks(case, tmp_path))


@pytest.mark.parametrize("program", ["run.py", "/usr/bin/evolver", "pytest"])
def test_where_jax_was_used_before_the_program_is_executed_again(case, gpus, monkeypatch, program):
    jax.devices()
    executed = []
    monkeypatch.setattr(sys, "argv", [program, "--config=x"])
    monkeypatch.setattr(sys, "orig_argv", ["python", "-u", program, "--config=x"])
    monkeypatch.setattr(os, "execv", lambda *words: executed.append((words, {**os.environ})))
    for _ in range(2):
        run.set_variables(case.config)
    if program == "pytest":  # it has work of its own
        assert not executed
    else:
        (((python, words), environment),) = executed
        assert words == [python, "-u", program, "--config=x"]
        assert environment[preflight.SHARE] == "0.72"


def test_jax_has_not_looked_for_devices_yet():
    code = (
        "from configs import appworld_14b; from evolver.plan.preflight import variables;"
        " from jax._src import xla_bridge; variables(appworld_14b.get_config());"
        " assert not xla_bridge._backends"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


# --- at the start ---------------------------------------------------------------------------------


def test_a_pool_of_pinned_memory_that_is_too_small_is_told(case, roomy, monkeypatch, tmp_path):
    monkeypatch.delenv(preflight.POOL)
    (problem,) = lacks(case, tmp_path)
    assert "keep 165 GiB in pinned host memory, and XLA's pool holds 64 GiB" in problem
    value = int(re.search(rf"export {preflight.POOL}=(\d+)", problem)[1])
    assert 165 < value < 200
    tpu = replace(case, target=targets.parse("v5p:8"))
    assert lacks(tpu, tmp_path) == [] == lacks(case, tmp_path, devices=2)
    monkeypatch.setenv(preflight.POOL, str(value))
    assert lacks(case, tmp_path) == []


def test_shares_of_a_gpu_that_are_more_than_all_of_it_are_told(case, roomy, monkeypatch, tmp_path):
    monkeypatch.setenv(preflight.SHARE, "0.9")
    (problem,) = lacks(case, tmp_path)
    assert f"XLA takes 90% of each GPU ({preflight.SHARE}) and vLLM 25% of the same" in problem
    share = re.search(rf"export {preflight.SHARE}=([\d.]+)", problem)[1]
    monkeypatch.setenv(preflight.SHARE, share)
    assert lacks(case, tmp_path) == []


def test_servers_on_other_gpus_may_take_all_of_them(roomy, monkeypatch, tmp_path):
    case = flagship("engine.vllm.devices=('4,5,6,7',)", "engine.vllm.flags=")
    assert "vLLM 90%" in lacks(case, tmp_path)[0]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3")
    assert lacks(case, tmp_path) == []


def test_too_little_shared_memory_is_told(case, roomy, tmp_path):
    roomy.shared = 64e6
    (problem,) = lacks(case, tmp_path)
    left = "config.engine.vllm.shared=/dev/shm has 0.06 GiB left, and the weights take 27.51 GiB"
    assert left in problem and "--shm-size=29g" in problem
    assert lacks(flagship("engine.vllm.transfer=nccl"), tmp_path) == []


def test_too_little_memory_of_the_host_is_told(case, roomy, tmp_path):
    roomy.memory = 128 * GIB
    (problem,) = lacks(case, tmp_path)
    assert "keeps 193 GiB in host memory, and 128 GiB are free" in problem


def test_too_little_room_for_checkpoints_is_told(case, roomy, tmp_path):
    roomy.disk = 300e9
    (problem,) = lacks(case, tmp_path / "not" / "yet")
    assert "has room for 300 GB, and checkpoints take up to 739 GB" in problem
    (tmp_path / "checkpoints/1").mkdir(parents=True)
    with open(tmp_path / "checkpoints/1/state", "wb") as file:
        file.truncate(500 * 10**9)  # what a resumed run has written already is not needed again
    assert lacks(case, tmp_path) == []


def test_free_memory_is_known_on_linux():
    assert preflight.free_memory() > 1e8


# --- in the plan ----------------------------------------------------------------------------------


def test_a_plan_says_what_a_host_needs(case):
    text = report.render(replace(case, held_out=57))
    for words in (
        "export XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB=182", "export XLA_PYTHON_CLIENT_MEM_FRACTION=0.72",
        "27.5 GiB in /dev/shm (Docker: --shm-size=29g)", "739 GB in the workdir, for 4 checkpoints",
        "tokens and tokens/s are those of all devices together", "165 GiB of all hosts together",
    ):  # fmt: skip
        assert words in text, words
    parts = r"\(100 steps .* h, offload .* min, weight sync .* min, evaluation .*\)"
    assert re.search(rf"the run: .* h {parts}", text)


def test_the_time_of_a_run_counts_what_is_around_its_steps(case):
    spent = estimate.overheads(case)
    assert spent["offload"] > 100 * sum(case.on_host.values()) / case.target.chip.bus
    sync = case.sizes["sync"] / estimate.SYNC["shm"]
    assert spent["weight sync"] == pytest.approx(100 * sync)
    once, twice = (estimate.overheads(replace(case, held_out=tasks)) for tasks in (57, 114))
    assert once["evaluation"] == pytest.approx(twice["evaluation"] / 2)
    kept = flagship("optim.offload=False", "loss.reference=device", "eval.every=0")
    spent = estimate.overheads(kept)
    assert spent["offload"] == spent["evaluation"] == 0
    often = flagship("checkpoint.every=1", "rollout.tasks=1", "learner.updates=1")
    assert estimate.overheads(often)["checkpoints"] > 100, "each takes longer than a step"


def test_a_weight_update_takes_what_was_measured_or_the_hardware_allows(case):
    sent, rate = estimate.weight_sync(case)
    assert sent == pytest.approx(29.5e9, rel=0.01) and 0.7e9 <= rate <= 2.6e9, "as measured"
    one, eight = (case_of("appworld_14b", f"h100:{n}", "engine.name=jax") for n in (1, 8))
    assert estimate.weight_sync(one)[1] == 3.35e12 / 2, "a copy"
    assert estimate.weight_sync(eight)[1] == 450e9, "what other devices hold, over a link"


@pytest.mark.parametrize(
    "name,target,override,words",
    [
        (
            "bfcl_7b",
            "v5p:8",
            "engine.name=vllm",
            "starts servers on CUDA devices, which v5p:8 has not",
        ),
        (
            "appworld_14b",
            "h100:64",
            "engine.vllm.urls=('http://node:8000',)",
            "urls has 1 servers, and h100:64 needs 8 processes",
        ),
        (
            "appworld_14b",
            "h100:64",
            f"engine.vllm.devices={('0,1,2,3,4,5,6,7',) * 2}",
            "2 vLLM servers of 8 devices need 16, and a host of h100:64 has 8",
        ),
        ("bfcl_7b_lora", "v5p:4", "model.attention=cudnn", "cudnn does not run on v5p"),
        ("bfcl_7b_lora", "h100:8", "model.attention=splash", "splash does not run on h100"),
    ],
)
def test_engines_that_cannot_be_are_refused(name, target, override, words):
    with pytest.raises(plan.PlanError, match=words):
        case_of(name, target, override)


def test_a_model_that_no_device_holds_trains_beside_servers_elsewhere(capsys):
    urls = [f"http://gpu-{number}:8000" for number in range(16)]
    words = [
        "--config=configs/appworld_14b.py", "--mode=plan", "--target=v5p:64",
        "--config.model.preset=72b", "--config.mesh.fsdp=16", "--config.mesh.sequence=4",
        "--config.learner.micro=16", "--config.engine.vllm.devices=()", f"--config.engine.vllm.urls={urls}",
    ]  # fmt: skip
    assert run.main(["run.py", *words]) == 0
    out = capsys.readouterr().out
    assert "16 vLLM x 1 devices, elsewhere; their memory is not of this target" in out
    assert "too much" not in out and out.rstrip().endswith("verdict\n  fits")


def test_a_plan_that_is_refused_is_one_message(capsys):
    words = ["--config=configs/bfcl_7b.py", "--mode=plan", "--target=h200:1"]
    assert run.main(["run.py", *words]) == 2
    out, err = capsys.readouterr()
    assert err.startswith("--target=h200:1: 2 vLLM servers of 4 devices need 8") and not out
