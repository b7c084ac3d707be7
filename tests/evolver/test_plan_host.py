"""What would stop a large run on its first day is said in its plan, and at start-up before anything
is loaded."""

import re
from types import SimpleNamespace

import pytest

import run
from evolver import plan
from evolver.build import RunError, check_memory
from evolver.plan import estimate, host, placement, preflight, targets
from evolver.plan.targets import GIB
from tests.evolver.test_plan import case_of, config_of


def lacks(case, tmp_path, *, platform="gpu", devices=8) -> list[str]:
    return list(host.problems(case, tmp_path, platform=platform, devices=devices))


@pytest.fixture
def roomy(monkeypatch):
    """A machine with plenty of everything; returns what a test may change."""
    have = SimpleNamespace(disk=1e15, shared=1e15, memory=1e15)
    usage = lambda path: SimpleNamespace(free=have.shared if str(path) == "/dev/shm" else have.disk)
    monkeypatch.setattr("shutil.disk_usage", usage)
    monkeypatch.setattr(host, "free_memory", lambda: have.memory)
    monkeypatch.setenv(host.POOL[0], "200")
    monkeypatch.setenv(host.FRACTION[0], "0.7")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return have


class TestStart:
    def test_a_machine_with_everything_lacks_nothing(self, roomy, tmp_path):
        assert lacks(case_of("appworld_14b", "a100-80g:8"), tmp_path) == []

    def test_the_pool_of_pinned_memory(self, roomy, monkeypatch, tmp_path):
        case = case_of("appworld_14b", "a100-80g:8")
        monkeypatch.delenv(host.POOL[0])
        (problem,) = lacks(case, tmp_path)
        assert "keep 165 GiB in pinned host memory, and XLA's pool holds 64 GiB" in problem
        value = int(re.search(rf"export {host.POOL[0]}=(\d+)", problem)[1])
        assert 165 < value < 200
        monkeypatch.setenv(host.POOL[0], str(value))
        assert lacks(case, tmp_path) == []
        assert lacks(case, tmp_path, platform="tpu") == [] == lacks(case, tmp_path, devices=2)

    def test_the_shares_of_a_gpu(self, roomy, monkeypatch, tmp_path):
        case = case_of("appworld_14b", "a100-80g:8")
        monkeypatch.setenv(host.FRACTION[0], "0.9")
        (problem,) = lacks(case, tmp_path)
        assert (
            "XLA takes 90% of each GPU (XLA_PYTHON_CLIENT_MEM_FRACTION) and vLLM 25% of the same ones"
            in problem
        )
        monkeypatch.setenv(
            host.FRACTION[0], re.search(rf"export {host.FRACTION[0]}=([\d.]+)", problem)[1]
        )
        assert lacks(case, tmp_path) == []

    def test_servers_on_other_gpus_may_take_all_of_them(self, roomy, monkeypatch, tmp_path):
        values = {"engine__vllm__devices": ("4,5,6,7",), "engine__vllm__flags": ""}
        case = case_of("appworld_14b", "a100-80g:8", **values)
        assert "vLLM 90%" in lacks(case, tmp_path)[0]
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3")
        assert lacks(case, tmp_path) == []

    def test_shared_memory(self, roomy, tmp_path):
        roomy.shared = 64e6
        (problem,) = lacks(case_of("appworld_14b", "a100-80g:8"), tmp_path)
        assert (
            "config.engine.vllm.shared=/dev/shm has 0.06 GiB left, and the weights take 27.51 GiB"
            in problem
        )
        assert "--shm-size=29g" in problem
        case = case_of("appworld_14b", "a100-80g:8", engine__vllm__transfer="nccl")
        assert lacks(case, tmp_path) == []

    def test_host_memory(self, roomy, tmp_path):
        roomy.memory = 128 * GIB
        (problem,) = lacks(case_of("appworld_14b", "a100-80g:8"), tmp_path)
        assert "keeps 193 GiB in host memory, and 128 GiB are free" in problem

    def test_disk_for_checkpoints(self, roomy, tmp_path):
        roomy.disk = 300e9
        case = case_of("appworld_14b", "a100-80g:8")
        (problem,) = lacks(case, tmp_path / "not" / "yet")
        assert "has room for 300 GB, and checkpoints take up to 739 GB" in problem
        (tmp_path / "checkpoints/1").mkdir(parents=True)
        with open(tmp_path / "checkpoints/1/state", "wb") as file:
            file.truncate(500 * 10**9)  # what a resumed run has written already is not needed again
        assert lacks(case, tmp_path) == []

    def test_a_run_says_all_of_it_at_once_and_loads_nothing(self, monkeypatch, tmp_path):
        monkeypatch.setattr(preflight, "limit_of", lambda device: 16e6)
        monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=1000))
        with pytest.raises(RunError) as error:
            check_memory(config_of("quickstart"), tmp_path)
        assert "too little memory" in str(error.value) and "checkpoints take up to" in str(
            error.value
        )

    def test_free_memory_is_known_on_linux(self):
        assert host.free_memory() > 1e8


class TestPlan:
    def test_it_says_what_a_host_needs(self):
        _, text = plan.on_target(
            config_of("appworld_14b"), "a100-80g:8", compiling=False, held_out=57
        )
        for words in (
            "export XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB=182", "export XLA_PYTHON_CLIENT_MEM_FRACTION=0.72",
            "27.5 GiB in /dev/shm (Docker: --shm-size=29g)", "739 GB in the workdir, for 4 checkpoints",
            "tokens and tokens/s are those of all devices together", "165 GiB of all hosts together",
        ):  # fmt: skip
            assert words in text, words
        assert re.search(
            r"the run: .* h \(100 steps .* h, offload .* min, weight sync .* min, evaluation .*\)",
            text,
        )

    def test_the_time_of_a_run_counts_what_is_around_its_steps(self):
        case = case_of("appworld_14b", "a100-80g:8")
        spent = estimate.estimate(case, {}, held_out=57)["overheads_s"]
        host_bytes = estimate.state_bytes(case)["host"]
        assert spent["offload"] > 100 * host_bytes / case.target.chip.bus
        assert spent["weight sync"] == pytest.approx(
            100 * estimate.sizes(case)["sync"] / estimate.SYNC["shm"]
        )
        assert spent["evaluation"] == pytest.approx(
            estimate.estimate(case, {}, held_out=114)["overheads_s"]["evaluation"] / 2
        )
        (sent, rate), jax = estimate.weight_sync(case), {"engine__name": "jax"}
        assert sent == pytest.approx(29.5e9, rel=0.01) and 0.7e9 <= rate <= 2.6e9, "as measured"
        alone, among = (
            estimate.weight_sync(case_of("appworld_14b", f"h100:{n}", **jax))[1] for n in (1, 8)
        )
        assert alone == 3.35e12 / 2 and among == 450e9, (
            "a copy, and what the other devices hold over a link"
        )
        kept = {"optim__offload": False, "loss__reference": "device", "eval__every": 0}
        spent = estimate.estimate(case_of("appworld_14b", "a100-80g:8", **kept), {}, held_out=57)[
            "overheads_s"
        ]
        assert spent["offload"] == spent["evaluation"] == 0
        often = case_of(
            "appworld_14b", "a100-80g:8", checkpoint__every=1, rollout__tasks=1, learner__updates=1
        )
        spent = estimate.estimate(often, {})["overheads_s"]
        assert spent["checkpoints"] > 100, "each takes longer than a step"

    @pytest.mark.parametrize(
        "name,target,values,words",
        [
            ("bfcl_7b", "h200:1", {}, "2 vLLM servers of 4 devices need 8, and h200:1 has 1"),
            ("bfcl_7b", "v5p:8", {}, "starts servers on CUDA devices, which v5p:8 has not"),
            ("appworld_14b", "h100:64", {}, "vllm supports one process, and h100:64 needs 8"),
            (
                "appworld_7b",
                "v5p:4",
                {"engine__name": "jax", "model__attention": "cudnn"},
                "cudnn does not run on v5p",
            ),
            (
                "appworld_7b",
                "h100:8",
                {"engine__name": "jax", "model__attention": "splash"},
                "splash does not run on",
            ),
        ],
    )
    def test_engines_that_cannot_be_are_refused(self, name, target, values, words):
        with pytest.raises(plan.PlanError, match=words):
            plan.on_target(config_of(name, **values), target, compiling=False)

    def test_servers_elsewhere_need_no_devices_here(self):
        config = config_of("bfcl_7b", engine__vllm__urls=("http://10.0.0.1:8000",))
        assert not placement.impossible(config, targets.parse("h200:1"))

    def test_a_plan_that_is_refused_is_one_message(self, capsys):
        assert (
            run.main(["run.py", "--config=configs/bfcl_7b.py", "--mode=plan", "--target=h200:1"])
            == 2
        )
        out, err = capsys.readouterr()
        assert err.startswith("--target=h200:1: 2 vLLM servers of 4 devices need 8") and not out
