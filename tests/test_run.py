"""What the command says to bad input: every problem, in one message, with exit code 2 and no
traceback."""

import io
import resource
import subprocess
import sys
from pathlib import Path

import pytest

import command
import run
from configs import base
from evolver import loop
from evolver.config import cli, derived
from evolver.config.checks.workdir import workdir_problems
from evolver.files.progress import Progress
from evolver.files.workdir import Workdir
from evolver.processes.interrupt import Interrupted, tell
from evolver.processes.streams import open_streams, surroundings_problems
from tests.evolver.runs import flags
from tests.tiny import config_file

ROOT = Path(__file__).parents[1]


def parsed(path, *words: str):
    """Return the config of a command without mistakes."""
    command = cli.parse(["run.py", f"--config={path}", *flags(*words)])
    assert not command.problems
    return command.config


@pytest.fixture
def call(capsys, tiny):
    """Return the exit code and the output of a command with the tiny config, or another one."""

    def called(*words: str, mode: str = "plan", config=tiny) -> tuple[int, str, str]:
        code = run.main(["run.py", f"--config={config}", *words, f"--mode={mode}"])
        out, err = capsys.readouterr()
        assert "Traceback" not in err
        return code, out, err

    return called


@pytest.fixture
def refused(call):
    """Return what a command says that is not started."""

    def problems(*words: str, **given) -> str:
        code, _, err = call(*words, **given)
        assert code == 2
        return err

    return problems


@pytest.mark.parametrize(
    "overrides,words",
    [
        ("rollout.temprature=1", "did you mean rollout.temperature?"),
        ("modle.path=x", "did you mean model.path?"),
        ("rollout.qqqq=1", "config.rollout has async_depth, concurrency, context, group"),
        ("qqqq.wwww=1", "config has advantage, attributing, checkpoint"),
        (
            "rollout.args.x=1",
            "config.rollout.args: there is no such key; these take arguments: advantage,",
        ),
        ("steps=many", "must be of type int; 'many' is not"),
        ("rollout=3", "config.rollout is a group of keys"),
        ("rollout.group=1", "at least 2 rollouts"),
        ("rollout.temperature=-1", "must be 0 or at least 0.01"),
        ("optim.lr=0", "must be above 0"),
        ("optim.lr=nan", "must be finite"),
        (
            "advantage.name=adca",
            "or an estimator without labels, such as config.advantage.name=grpo",
        ),
        ("learner.updates=99", "99 mini-batches cannot be made of"),
        ("rollout.max_tokens=999999", "leaves no room for a prompt"),
        ("eval.experience=0.5", "needs config.navigating.enabled"),
        ("model.path=no/such", "no/such"),
        ("env.name=travle", "travle"),
        ("eval.split=validation", "validation"),
        ("env.tasks=no.jsonl", "there is no such file"),
        ("mesh.data=64", "64 devices"),
        ("rollout.tasks=99", "needs 99 different original tasks"),
        ("questioning.every=2", "makes no tasks"),
        ("env.url=http://localhost:1", "belong together"),
        ("optim.b1=1", "b1 must be below 1"),
        ("loss.args.dual_clip=0.5", "must be above 1, or 0"),
        ("model.attention=cudnn", "needs config.model.dtype=bfloat16"),
        ("model.attention=cudnn_packed", "needs config.learner.most_segments"),
        ("engine.devices=9", "engine.devices=9, but config.mesh has 1"),
        ("model.attention=splash", "needs a TPU, but jax sees a CPU"),
        ("env.python=/no/python", "there is no such program"),
        ("env.args.colour=3", "unexpected keyword argument 'colour'"),
        (
            "questioning.enabled=True questioning.capacity=1",
            "less than the 2 synthetic tasks of a step",
        ),
        ("navigating.enabled=True navigating.pool=/no/such", "there is no such directory"),
        ("rollout.refill=1 rollout.async_depth=1", "set config.rollout.async_depth=0"),
        ("lora.rank=2 lora.targets=()", "config.lora.targets is empty"),
        ("mesh.sequence=2 model.attention=blockwise", "set config.model.attention=ring"),
        (
            "questioning.enabled=True questioning.judge.name=naive attributing.enabled=True"
            " advantage.name=adca",
            "set attributing.judge.name=llm or questioning.judge.name=verifier",
        ),
    ],
)
def test_each_mistake_is_named(refused, overrides, words):
    err = refused(*flags(overrides), mode="train")
    assert words in err and "nothing was started" in err


def test_an_evaluation_with_experience_needs_a_pool(refused):
    words = flags("navigating.enabled=True eval.experience=1")
    assert "needs a pool in --mode=eval" in refused(*words, mode="eval")


def test_a_switch_is_turned_on_by_its_name_and_off_by_no(tiny):
    words = ["--config.rollout.must_end", "--noconfig.log.tensorboard"]
    config = parsed(tiny, *words)
    assert config.rollout.must_end is True and config.log.tensorboard is False
    assert cli.parse(["run.py", f"--config={tiny}", *words, "--noconfig.steps"]).problems


def test_a_plan_for_a_target_without_its_compiler_is_arithmetic(call, monkeypatch):
    monkeypatch.setenv("EVOLVER_PLAN_PYTHON", "/nowhere/python")
    code, out, err = call("--target=h100:8")
    assert code == 0 and not err and "arithmetic only" in out and "make plan-gpu" in out


@pytest.mark.parametrize(
    "words,mode,said",
    [
        (["--target=h1000:8"], "plan", "did you mean h100?"),
        (["--target=h100:8"], "train", "is for --mode=plan"),
        (["--target=h100:8", "--config.mesh.tensor=8"], "plan", "does not divide"),
    ],
)
def test_targets_that_cannot_be_planned_for(refused, words, mode, said):
    assert said in refused(*words, mode=mode)


def test_arguments_of_a_world_are_taken_as_its_own_or_refused_by_it(call):
    code, out, err = call(*flags("env.name=travel env.args.n_dev=10"))
    assert code == 0 and not err and "'n_dev': 10" in out


def test_a_task_file_with_fewer_tasks_than_a_step_takes(refused, tmp_path):
    path = tmp_path / "tasks.jsonl"
    path.write_text('{"id": "a", "env": "parity", "query": "q"}\n')
    err = refused(f"--config.env.tasks={path}", mode="train")
    assert "needs 3 different original tasks" in err and "has 1" in err


def test_all_mistakes_are_said_at_once(refused):
    overrides = "rollout.temprature=1 steps=x rollout.group=0 model.path=no/such env.tasks=no.jsonl"
    err = refused(*flags(overrides), mode="train")
    assert "5 problems" in err
    for words in ("temperature?", "must be of type int", "at least 1", "no/such", "no.jsonl"):
        assert words in err


@pytest.mark.parametrize(
    "text,words",
    [
        ("def get_config(:\n", "line 1"),
        (
            "from ml_collections import ConfigDict\ndef get_config():\n    return ConfigDict({'steps': 1})\n",
            "the config lacks",
        ),
        ("import nonsuch\n", "nonsuch"),
    ],
)
def test_a_config_file_that_cannot_be_used(refused, tmp_path, text, words):
    path = tmp_path / "mine.py"
    path.write_text(text)
    assert words in refused(config=path)


def test_flags_themselves(call, refused):
    assert "--config is missing" in refused(config="")
    none = refused("--config", "configs/bse.py", config="")
    assert "--config=configs/bse.py: there is no such file (did you mean configs/base.py?" in none
    assert call("--help")[0] == 0
    assert "trian" in refused(mode="trian")
    err = refused("stray", mode="train")
    assert "stray: not a flag" in err and "nothing was started" in err
    assert "choose one of grpo" in refused(config="configs/quickstart.py:grop")


def edit(path: Path, old: str, new: str) -> None:
    path.write_text(path.read_text().replace(old, new))


@pytest.mark.parametrize(
    "damage,words",
    [
        (lambda p: [f.unlink() for f in p.glob("*.safetensors")], "no *.safetensors file"),
        (lambda p: (p / "config.json").unlink(), "no config.json"),
        (lambda p: (p / "config.json").write_text("{"), "config.json is not JSON"),
        (lambda p: (p / "tokenizer.json").unlink(), "tokenizer.json"),
        (lambda p: edit(p / "tokenizer.json", "<|im_end|>", "<|i|>"), "<|im_end|>"),
        (lambda p: (p / "tokenizer.json").write_bytes(b"\xff\x00"), "tokenizer.json is not UTF-8 text"),
        (lambda p: edit(p / "config.json", '"vocab_size": ', '"vocab_size": 1, "was": '), "do not belong together"),
    ],
)  # fmt: skip
def test_a_checkpoint_that_cannot_be_used(refused, checkpoint, tmp_path, damage, words):
    damage(checkpoint)
    assert words in refused(config=config_file(tmp_path, checkpoint))


def test_a_broken_task_file_is_named_with_its_line(refused, tmp_path):
    path = tmp_path / "tasks.jsonl"
    path.write_text('{"id": "a", "env": "travel", "query": "q"}\n\n{"id": \n')
    assert "tasks.jsonl, line 3" in refused(f"--config.env.tasks={path}")


def test_workdirs_that_cannot_be_used(call, tmp_path):
    def said(workdir, mode="plan"):
        return call(f"--workdir={workdir}", mode=mode)[2]

    (tmp_path / "file").write_text("")
    assert "is a file" in said(tmp_path / "file/run")
    assert "cannot be written" in said(tmp_path / ("x" * 300))
    assert "cannot be written" in said("/proc/run")
    assert not said(tmp_path / "new/run") and not (tmp_path / "new").exists()
    other = tmp_path / "other"
    other.mkdir()
    for name, text in (("thesis.tex", ""), ("config.json", '{"model_type": "qwen2"}')):
        (other / name).write_text(text)
        assert "holds no run" in said(other, "train")
    assert (other / "thesis.tex").exists()


def test_a_run_is_not_replaced_by_what_another_mode_finds(call, tmp_path):
    Workdir(tmp_path).claim({})
    for mode, lost in (("explore", "tasks.jsonl"), ("pool", "experience/")):
        err = call(f"--workdir={tmp_path}", mode=mode)[2]
        assert f"holds a run, whose {lost} --mode={mode} would replace" in err


def of_another_run(before, config, workdir) -> list[str]:
    """Return what is wrong with a config in the workdir of a run with an earlier one."""
    Workdir(workdir).claim(before)
    return list(workdir_problems(config, workdir, "train", base.Config))


def test_a_workdir_of_another_config_lists_the_differences(tmp_path, tiny):
    before = parsed(tiny).to_dict()
    config = parsed(tiny, "optim.lr=0.5 seed=9")
    (problem,) = of_another_run(before, config, tmp_path / "run")
    for words in ("optim.lr: ", "0.5 now", "seed: 0 then, 9 now", "run-2"):
        assert words in problem
    assert "rollout.group" not in problem
    # What does not change what is learnt may change, and a run of constant learning rate may go on
    # for longer.
    harmless = parsed(tiny, "steps=99 log.trajectories=0 checkpoint.keep=9")
    assert not of_another_run(before, harmless, tmp_path / "other")


@pytest.mark.parametrize("words", [[], ["rollout.must_end=True"]])
def test_a_key_that_is_newer_than_the_run_had_its_default(tmp_path, tiny, words):
    before = parsed(tiny).to_dict()
    del before["rollout"]["must_end"]
    found = of_another_run(before, parsed(tiny, *words), tmp_path / "run")
    assert len(found) == len(words)
    assert all("rollout.must_end: False then, True now" in problem for problem in found)


def test_validation_starts_no_device(tiny):
    code = (
        f"import sys, run; run.main(['run.py', '--config={tiny}', '--config.steps=x']); "
        "from jax._src import xla_bridge; assert not xla_bridge.backends_are_initialized()"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr


# --- the surroundings -----------------------------------------------------------------------------


def test_a_locale_without_utf8_gets_a_question_mark_for_what_it_lacks(monkeypatch):
    for name in ("stdout", "stderr"):
        monkeypatch.setattr(sys, name, io.TextIOWrapper(io.BytesIO(), encoding="ascii"))
    open_streams()
    Progress(3).say("step 1/3 · \ud800 é")
    tell("é")
    sys.stdout.flush()
    assert sys.stdout.buffer.getvalue() == b"step 1/3 ? ? ?\n"
    assert sys.stderr.buffer.getvalue() == b"?\n"


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_the_number_of_a_closed_stream_goes_to_no_file(closed, tmp_path):
    code = (
        "import sys; from evolver.processes.streams import open_streams; open_streams();"
        f" file = open('{tmp_path}/file', 'w'); print('x'); print('y', file=sys.stderr);"
        " sys.stdin.read(); sys.stdout.flush(); sys.exit(file.fileno() < 3)"
    )
    words = ["sh", "-c", f'exec "$0" -c "$1" {closed}', sys.executable, code]
    assert subprocess.run(words, cwd=ROOT, input="", text=True, timeout=60).returncode == 0
    assert (tmp_path / "file").read_text() == ""


@pytest.mark.parametrize("module", ["run", "command"])
def test_an_output_that_nobody_reads_ends_no_help_in_a_traceback(module):
    """As in `run.py --help | head -1`."""
    code = f"import sys, {module} as m; print('.', flush=True); sys.stdin.read(); sys.exit(m.main(sys.argv))"
    words = ["run.py", "--help"] if module == "run" else ["--help"]
    words = [sys.executable, "-c", code.replace("sys.argv", repr(words))]
    pipes = {name: subprocess.PIPE for name in ("stdin", "stdout", "stderr")}
    with subprocess.Popen(words, cwd=ROOT, text=True, **pipes) as process:
        process.stdout.readline()
        process.stdout.close()
        process.stdin.close()
        assert process.wait(60) == 0 and process.stderr.read() == ""


def test_a_working_directory_that_is_gone_is_one_message(
    refused, tiny, tmp_path, monkeypatch, capsys
):
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    said = "the working directory does not exist any more"
    assert said in refused()
    assert command.main(["plan", f"--config={tiny}"]) == 2
    assert said in capsys.readouterr().err


def test_too_little_address_space_is_one_message(refused, monkeypatch):
    monkeypatch.setattr(resource, "getrlimit", lambda _: (2**30, 2**30))
    err = refused()
    assert "limits the address space to 1.0 GiB" in err and "ulimit -v" in err
    monkeypatch.setattr(resource, "getrlimit", lambda _: (resource.RLIM_INFINITY,) * 2)
    assert surroundings_problems() == []


@pytest.mark.parametrize("name", ["r\udcff", "\udce4/run", "a\udc80b/c/d"])
def test_a_workdir_that_is_not_utf8_is_one_message(name, refused, tmp_path):
    err = refused(f"--workdir={tmp_path}/{name}", mode="train")
    assert "is not UTF-8" in err and err.count("--workdir") == 1


@pytest.mark.parametrize(
    "steps,warmup,used", [(1, 5, 1), (2, 4, 2), (3, 5, 5), (1, 1, 1), (1, 0, 0)]
)
def test_a_warm_up_that_is_not_shorter_than_the_run_is_shortened(steps, warmup, used, call, tiny):
    words = f"steps={steps} optim.warmup={warmup}"
    code, out, _ = call(*flags(words, "optim.schedule=cosine"))
    assert code == 0 and (f", of which {used} warm up" in out) == (used < warmup)
    config = parsed(tiny, words)
    assert derived.warmup(config) == used < max(1, derived.updates(config))


def test_the_help_of_a_word_names_that_word(call, capsys):
    assert command.main(["eval", "--help"]) == 0
    out = capsys.readouterr().out
    assert "usage: evolver eval --config=FILE" in out and "run.py" not in out
    assert out.startswith("Evaluate config.model.path")
    assert call("--help")[1].count("python run.py --config") > 2


@pytest.mark.parametrize(
    "backend, variable, kept",
    [("cpu", "", False), ("gpu", "", True), ("gpu", "/elsewhere", False)],
)
def test_only_an_accelerators_programs_stay_on_disk(monkeypatch, tmp_path, backend, variable, kept):
    import jax

    changes = {}
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", variable)
    monkeypatch.setattr(jax, "default_backend", lambda: backend)
    monkeypatch.setattr(jax.config, "update", changes.__setitem__)
    run.keep_programs()
    folder = str(tmp_path / "evolver" / "jax")
    assert changes == ({"jax_compilation_cache_dir": folder} if kept else {})


def test_a_run_that_is_interrupted_while_it_starts_says_so(call, monkeypatch, tmp_path):
    def interrupted(*_):
        raise Interrupted

    monkeypatch.setattr(loop, "train", interrupted)
    code, _, err = call(f"--workdir={tmp_path / 'run'}", mode="train")
    assert (code, err.strip()) == (130, "interrupted")
