"""A workdir survives faults: two runs at once, damaged and missing files, power failures, a
terminal that closes."""

import errno
import io
import json
import os
import pty
import re
import shutil
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest

import run
from evolver.config import cli
from evolver.files.progress import Progress
from evolver.files.report import main as report
from evolver.files.workdir import Workdir, WorkdirInUse
from evolver.processes.interrupt import Stop, tell
from models.files import BrokenFile, write_atomically, write_json
from rl.evaluation import Scores
from tests.evolver import runs

ROOT = Path(__file__).parents[2]
CPU = os.environ | {"JAX_PLATFORMS": "cpu"}
HOLD = """
import sys, time
from evolver.files.workdir import Workdir
with Workdir(sys.argv[1]).locked():
    print("held", flush=True)
    time.sleep(600)
"""

IN_TERMINAL = """
import fcntl, os, sys, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)  # the end of this terminal is then the end of this session
os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
"""


# A signal arrives while the main thread has the lock of the console, and another one that of the display.
DRAWN = """
import os, pty, signal, threading, time
from evolver.files.progress import Progress
from evolver.processes.interrupt import Stop

main, terminal = pty.openpty()
threading.Thread(target=lambda: [os.read(main, 4096) for _ in iter(int, 1)], daemon=True).start()
with open(terminal, "w") as stream, Stop() as stop:
    progress, write = Progress(2, stream=stream), stream.write
    progress.phase("rollouts", 0, 1)

    def interrupted(text):
        if "step 1/2" in text and not stop.asked and threading.current_thread() is threading.main_thread():
            threading.Thread(target=progress.live.refresh, daemon=True).start()
            time.sleep(1)
            os.kill(os.getpid(), signal.SIGTERM)
        return write(text)

    stream.write = interrupted
    progress.step(1, {})
    progress.close()
    os.write(1, b"asked" if stop.asked else b"not asked")
    os._exit(0)
"""


@pytest.fixture(scope="module")
def finished(tiny, tmp_path_factory):
    """The workdir of a run of two steps."""
    workdir = tmp_path_factory.mktemp("runs") / "finished"
    assert run.main(command(tiny, workdir)) == 0
    return workdir


@pytest.fixture
def workdir(finished, tmp_path):
    return shutil.copytree(finished, tmp_path / "run")


def command(tiny, workdir, *words):
    return runs.command(tiny, workdir, "--config.steps=2", *words)


@pytest.fixture
def holder(tmp_path):
    """A process that has locked the workdir at `tmp_path`."""
    words = [sys.executable, "-c", HOLD, tmp_path]
    with subprocess.Popen(words, cwd=ROOT, stdout=subprocess.PIPE, text=True, env=CPU) as process:
        assert process.stdout.readline() == "held\n"
        yield process
        process.kill()


# --- the lock -------------------------------------------------------------------------------------


def test_a_second_run_is_refused_in_one_message(tiny, tmp_path, holder, capsys):
    assert run.main(command(tiny, tmp_path)) == 1
    message = rf"--workdir={tmp_path} is in use by process {holder.pid} on .*: wait .*"
    assert re.fullmatch(message, capsys.readouterr().err.strip())
    assert [path.name for path in tmp_path.iterdir()] == ["lock"]


def test_the_lock_of_a_dead_process_is_taken_over(tmp_path, holder):
    holder.kill()
    holder.wait()
    assert f"process {holder.pid}" in (tmp_path / "lock").read_text()
    with Workdir(tmp_path).locked():
        assert f"process {os.getpid()}" in (tmp_path / "lock").read_text()
        with pytest.raises(WorkdirInUse), Workdir(tmp_path).locked():
            pass
    assert not (tmp_path / "lock").exists()


def test_the_other_hosts_of_a_run_need_no_lock(tmp_path):
    with Workdir(tmp_path).locked(), Workdir(tmp_path, writes=False).locked():
        pass


def test_a_workdir_that_is_deleted_or_moved_is_not_made_again(tmp_path):
    for remove in (shutil.rmtree, lambda path: path.rename(tmp_path / "moved")):
        workdir = Workdir(tmp_path / "run")
        with workdir.locked():
            workdir.log_metrics(0, {})
            remove(workdir.path)
            with pytest.raises(FileNotFoundError, match="run was deleted or moved away"):
                workdir.log_metrics(1, {})
            with pytest.raises(FileNotFoundError, match="run was deleted or moved away"):
                workdir.log_trajectories(1, [])
        assert not workdir.path.exists()
    assert (tmp_path / "moved" / "metrics.jsonl").exists()


def test_a_workdir_that_is_deleted_during_a_write_is_one_message(
    tiny, tmp_path, capsys, monkeypatch
):
    def deleted(self, *tasks_and_card):
        shutil.rmtree(self.path)
        raise FileNotFoundError(2, "No such file or directory", "tasks.jsonl.1a2b3c4d.tmp")

    monkeypatch.setattr(Workdir, "log_tasks", deleted)
    assert run.main(command(tiny, tmp_path / "run", "--config.eval.every=0")) == 1
    err = capsys.readouterr().err
    assert err.endswith("run was deleted or moved away while this run wrote to it\n")
    assert "1a2b3c4d" not in err


def test_a_run_leaves_no_lock(finished):
    assert not (finished / "lock").exists()


def test_files_and_their_folder_are_flushed_before_a_write_returns(tmp_path, monkeypatch):
    kinds = []
    monkeypatch.setattr(os, "fsync", lambda fd: kinds.append(stat.S_IFMT(os.fstat(fd).st_mode)))
    write_atomically(tmp_path / "a.json", "{}")
    assert kinds == [stat.S_IFREG, stat.S_IFDIR]


@pytest.fixture
def refused(tiny, capsys):
    """Return the message of a run in a workdir that must not start."""

    def said(workdir, *words):
        assert run.main(command(tiny, workdir, *words)) == 2
        err = capsys.readouterr().err
        assert "1 problem; nothing was started" in err and "Traceback" not in err
        return err

    return said


# --- files ----------------------------------------------------------------------------------------


def test_metrics_without_checkpoints_are_never_erased(workdir, refused):
    before = (workdir / "metrics.jsonl").read_bytes()
    shutil.rmtree(workdir / "checkpoints")
    assert "holds the metrics of 2 steps, but" in refused(workdir)
    (workdir / "checkpoints").mkdir()
    assert "has no checkpoint" in refused(workdir)
    assert (workdir / "metrics.jsonl").read_bytes() == before


def test_a_run_that_died_before_its_first_checkpoint_starts_over(tiny, tmp_path):
    workdir = tmp_path / "run"
    config = cli.parse(command(tiny, workdir)).config
    Workdir(workdir).claim(config.to_dict())
    Workdir(workdir).log_metrics(0, {})
    (workdir / "checkpoints").mkdir()
    assert run.main(command(tiny, workdir)) == 0


@pytest.mark.parametrize(
    "line,words",
    [
        ("{}", "this one has None"), ('{"step": "three"}', "'three'"), ('{"step": 1.5}', "1.5"), ("[1]", "object"),
        ('{"step": -1}', "-1"), ('{"step": 1, "loss": "low"}', "loss is not a number"), ("\x00", "line 2"),
    ],
)  # fmt: skip
def test_a_damaged_line_of_metrics_is_one_message(workdir, refused, capsys, line, words):
    first, *rest = (workdir / "metrics.jsonl").read_text().splitlines()
    (workdir / "metrics.jsonl").write_text("\n".join([first, line, *rest]) + "\n")
    with pytest.raises(BrokenFile, match="line 2"):
        Workdir(workdir).metrics()
    err = refused(workdir)
    assert "metrics.jsonl, line 2" in err and words in err
    assert report([str(workdir)]) == 1 and "line 2" in capsys.readouterr().err


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", "{}", '{"tasks": 3}', "[" * 9999, '{"tasks": ["a"], "difficulty_N": [1]}'],
)
def test_a_damaged_evaluation_is_left_out_of_the_report(workdir, caplog, text):
    (workdir / "eval/step_000002.json").write_text(text)
    assert list(Workdir(workdir).scores()) == [0]
    assert "step_000002.json is damaged" in caplog.text
    assert report([str(workdir)]) == 0


@pytest.mark.parametrize("text", ["{", "[" * 100_000, "\x00"])
def test_a_damaged_config_is_one_message(workdir, refused, text):
    (workdir / "config.json").write_text(text)
    assert "config.json there is damaged" in refused(workdir)


@pytest.mark.parametrize("name", ["config.json", "metrics.jsonl"])
def test_a_pipe_is_no_file_of_a_run_and_is_not_waited_for(workdir, refused, name):
    (workdir / name).unlink()
    os.mkfifo(workdir / name)
    said = refused(workdir)
    assert f"{workdir / name} is not a regular file" in said and "that line" not in said


def test_scores_of_another_shape_are_damaged(tmp_path):
    workdir = Workdir(tmp_path)
    workdir.log_scores(1, Scores(["a", "b"], [1, 1], [[1.0], [0.0]], [[1], [0]], [1, 0]))
    record = json.loads((tmp_path / "eval/step_000001.json").read_text())
    assert list(workdir.scores()) == [1]
    changes = {"difficulty_N": [1], "greedy_N": [1], "score_NR": [[1.0]]}
    for name, value in (changes | {"success_NR": [["x"], [1]]}).items():
        write_json(tmp_path / "eval/step_000001.json", record | {name: value})
        assert not workdir.scores(), name


# --- steps ----------------------------------------------------------------------------------------


@pytest.mark.slow
def test_more_steps_of_a_schedule_go_on_and_say_what_happens(tiny, tmp_path, capsys):
    words = command(tiny, tmp_path / "run", "--config.optim.schedule=cosine")
    assert run.main(words) == 0
    assert run.main([*words, "--config.steps=3"]) == 0
    told = "config.steps was 2 so far: from here on the learning rate follows its cosine"
    assert told in capsys.readouterr().out
    assert [line["step"] for line in Workdir(tmp_path / "run").metrics()] == [0, 1, 2, 3]


def test_fewer_steps_than_are_done_are_refused(workdir, refused):
    assert "config.steps=1 is less than the 2 steps" in refused(workdir, "--config.steps=1")


# --- paths ----------------------------------------------------------------------------------------


def test_a_home_directory_is_expanded(tiny, monkeypatch):
    monkeypatch.setenv("HOME", "/some/home")
    assert cli.parse(command(tiny, "~/runs/a")).workdir == "/some/home/runs/a"


@pytest.mark.parametrize("url", ["gs://bucket/run", "s3://bucket/run"])
def test_remote_storage_is_refused(refused, url, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert f"{url} is not a directory of this machine" in refused(url)
    assert not list(tmp_path.iterdir())


# --- the end of a terminal ------------------------------------------------------------------------


def test_a_hang_up_ends_a_run_like_sigterm_but_only_once():
    before = signal.getsignal(signal.SIGHUP)
    with Stop() as stop:
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGHUP)  # does not end it at once
        assert stop.asked
    assert signal.getsignal(signal.SIGHUP) is before


def test_nohup_is_respected():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with Stop() as stop:
            os.kill(os.getpid(), signal.SIGHUP)
            assert not stop.asked
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_message_that_nobody_reads_is_dropped(monkeypatch):
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "w") as stream:
        monkeypatch.setattr(sys, "stderr", stream)
        tell("stopping")
        tell("stopped")


def test_a_signal_that_comes_while_something_is_printed_is_handled(monkeypatch):
    class Busy:
        def write(self, text):
            raise RuntimeError("reentrant call inside <_io.BufferedWriter name='<stderr>'>")

    monkeypatch.setattr(sys, "stderr", Busy())
    with Stop() as stop:
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop.asked


def test_a_write_that_fails_before_the_signal_is_handled_ends_nothing():
    main, terminal = pty.openpty()
    with open(terminal, "w") as stream:
        progress = Progress(2, stream=stream)
        os.close(main)
        with pytest.raises(OSError, match="Input/output"):
            os.write(terminal, b"step")
        for step in (1, 2):
            progress.step(step, {})
        progress.close()


def test_a_signal_while_the_display_is_drawn_hangs_nothing():
    ended = subprocess.run(
        [sys.executable, "-c", DRAWN], cwd=ROOT, env=CPU, capture_output=True, timeout=120
    )
    assert ended.stdout == b"asked", ended.stderr


def test_a_failing_disk_is_no_terminal(tmp_path):
    class Failing(io.TextIOWrapper):
        def write(self, text):
            raise OSError(errno.EIO, "Input/output error")

    with Failing(open(tmp_path / "log", "wb")) as stream:
        with pytest.raises(OSError, match="Input/output"):
            Progress(1, stream=stream).step(1, {})


def test_a_run_whose_terminal_closes_saves_and_can_go_on(tiny, tmp_path):
    main, terminal = pty.openpty()
    workdir = tmp_path / "run"
    words = [sys.executable, "-c", IN_TERMINAL]
    words += command(tiny, workdir, "--config.steps=500")
    process = subprocess.Popen(
        words, cwd=ROOT, env=CPU, start_new_session=True,
        stdin=terminal, stdout=terminal, stderr=terminal,
    )  # fmt: skip
    os.close(terminal)
    seen = b""
    until = time.monotonic() + 240
    while b"step 2/500" not in seen and time.monotonic() < until:
        seen += os.read(main, 4096)
    os.close(main)
    assert process.wait(60) == 130
    done = Workdir(workdir).metrics()[-1]["step"]
    assert run.main(command(tiny, workdir, f"--config.steps={done + 1}")) == 0
    assert Workdir(workdir).metrics()[-1]["step"] == done + 1
