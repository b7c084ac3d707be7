"""The faults of the disk, and of the files of a workdir."""

import contextlib
import errno
import os
import resource
import shutil

from evolver.files import rollout_files
from evolver.files.workdir import Workdir
from rl.checkpoint import Checkpoints
from tests.faults.registry import ASYNC, LONG, SYNC, WORKERS, failing, fault


def os_error(number):
    return OSError(number, os.strerror(number))


FULL, NO_SPACE = os_error(errno.ENOSPC), "No space left"
FAILED, READ_ONLY = os_error(errno.EIO), os_error(errno.EROFS)
failing("disk", "no room for trajectories", rollout_files, "write_atomically", 3, FULL, NO_SPACE)
failing("disk", "no room for metrics", Workdir, "log_metrics", 3, FULL, NO_SPACE)
# The last one cannot be written, so that the run fails at its end.
failing(
    "disk", "no room for checkpoints", Checkpoints, "_check_room", 3, FULL,
    "the last checkpoint is of step 1",
)  # fmt: skip
failing("disk", "a flush that fails", os, "fsync", 12, FAILED, "Input/output error", SYNC)
# As the kernel makes it after an error; nobody else can, because the run holds its lock open.
failing(
    "disk", "a disk that becomes read only", os, "replace", 9, READ_ONLY, "Read-only file system",
    ASYNC,
)  # fmt: skip


@fault("disk")
def a_full_disk(stage):
    """Someone else fills the file system of the run, and makes room again. A save that fails says
    so, too."""
    if not stage.mount("50m"):
        return stage.skip("mounting is not permitted")
    run, ballast = stage.start(), stage.workdir / "ballast"
    run.until("step 1/")
    with contextlib.suppress(OSError), open(ballast, "wb", buffering=0) as file:
        while True:
            file.write(bytes(4096))
    stage.end(run, code=1, said=NO_SPACE, once=False)
    ballast.unlink()
    stage.resumes(same=True)


@fault("disk", SYNC)
def a_disk_that_is_too_small(stage):
    if not stage.mount("600k"):
        return stage.skip("mounting is not permitted")
    stage.run(code=1, said="choose another disk")


@fault("disk", SYNC)
def a_read_only_workdir(stage):
    if not stage.mount("1m"):
        return stage.skip("mounting is not permitted")
    stage.forbid_writing()
    stage.run(code=2, said="cannot be written")


@fault("disk", ASYNC)
def a_workdir_that_is_deleted(stage):
    run = stage.started(LONG)
    shutil.rmtree(stage.workdir, ignore_errors=True)
    stage.end(run, code=1, said="was deleted or moved away")


@fault("disk")
def a_flipped_bit_in_the_newest_checkpoint(stage):
    stage.run("steps=2", steps=2)
    newest = stage.workdir / f"checkpoints/{stage.saved()}"
    files = [path for path in newest.rglob("*") if path.is_file()]
    path = max(files, key=lambda path: path.stat().st_size)
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    stage.resumes(same=True)


@fault("disk", SYNC)
def no_sound_checkpoint(stage):
    stage.run("steps=2", steps=2)
    for path in (stage.workdir / "checkpoints").rglob("manifest/*"):
        path.write_bytes(b"")
    stage.run(code=1, said="can be read")


@fault("disk", SYNC)
def a_last_line_that_is_cut(stage):
    stage.run("steps=2", steps=2)
    with open(stage.workdir / "metrics.jsonl", "ab") as file:
        file.write(b'{"step": 3, "rol')
    stage.resumes(same=True)


@fault("disk", SYNC)
def too_many_open_files(stage):
    """Each save that fails says so, too."""
    run = stage.started(WORKERS)
    resource.prlimit(run.pid, resource.RLIMIT_NOFILE, (10, 10))  # those that are open stay so
    stage.end(run, code=1, said="Too many open files", once=False)
    stage.resumes(WORKERS)


def _damaged(name, damage, code, said):
    """Enter a workdir of two steps that somebody has changed, which its run refuses to go on in."""

    @fault("disk", SYNC, name)
    def play(stage):
        stage.run("steps=2", steps=2)
        damage(stage.workdir)
        stage.run(code=code, said=said, books=False)


def _deep(workdir):
    (workdir / "config.json").write_text("[" * 100_000)


def _piped(name):
    """Return a function that puts a pipe, whose end never comes, in the place of a file."""

    def pipe(workdir):
        (workdir / name).unlink()
        os.mkfifo(workdir / name)

    return pipe


def _renamed(workdir):
    (workdir / "checkpoints/2").rename(workdir / "checkpoints/9")


def _copied(workdir):
    shutil.copytree(workdir / "checkpoints/1", workdir / "checkpoints/3")


_damaged("a config that is nested too deeply", _deep, 2, "it is nested too deeply")
_damaged("a config that is a pipe", _piped("config.json"), 2, "is not a regular file")
_damaged("metrics that are a pipe", _piped("metrics.jsonl"), 2, "is not a regular file")
_damaged("a renamed checkpoint", _renamed, 1, "holds the checkpoint of step 2")
_damaged("a copied checkpoint", _copied, 1, "holds the checkpoint of step 1")


@fault("disk", SYNC)
def two_tasks_of_one_id(stage):
    path = stage.folder / "tasks.jsonl"
    path.write_text('{"id": "a", "env": "parity", "query": "Write 1."}\n' * 2)
    stage.run(f"env.tasks={path}", code=2, said="tasks.jsonl")
