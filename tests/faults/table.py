"""The faults: of the environment, the judge, the engine, the disk, the process, texts and the
clock.

Each is a function that gets a `Stage` and plays runs on it. It says how the run has to end; what
holds after every run is checked by the stage.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import random
import resource
import shutil
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from envs.source import serving
from tests.evolver.chat_server import Answer, ChatServer, refused, said
from tests.evolver.test_llm_run import LABELLED, script
from tests.evolver.test_loop import ALL as MECHANISMS
from tests.faults.stage import ROLLOUTS, STEPS, Broken, Stage, orphans
from tests.faults.surroundings import SURROUNDINGS

KINDS = ("environment", "judge", "engine", "disk", "process", "surroundings", "text", "clock")
BOTH = ("sync", "async")
WORKERS = ("--config.env.mode=worker", "--config.env.workers=2")
SAVED = "The same command resumes from there."


@dataclass(frozen=True)
class Fault:
    kind: str
    name: str
    play: Callable[[Stage], Any]
    modes: tuple[str, ...] = BOTH


TABLE: list[Fault] = []


def fault(kind: str, modes: tuple[str, ...] = BOTH) -> Callable:
    """Enter a function into the table, under its name."""

    def enter(play: Callable[[Stage], Any]) -> Callable[[Stage], Any]:
        TABLE.append(Fault(kind, play.__name__.strip("_").replace("_", " "), play, modes))
        return play

    return enter


def breaking(fault: str, at: str = "step", **args: Any) -> tuple[str, ...]:
    """Return the words of a config whose world has that fault."""
    args = {"fault": fault, "at": at} | args
    words = (f"--config.env.args.{name}={value}" for name, value in args.items())
    return ("--config.env.name=tests.faults.worlds:Breaking", *words)


def failing(
    step: int, function: Callable[..., Any], error: Callable[[], BaseException]
) -> Callable[..., Any]:
    """Return the function, which raises from its `step`-th call on."""
    calls = [0]

    def call(*args: Any, **kwargs: Any) -> Any:
        calls[0] += 1
        if calls[0] >= step:
            raise error()
        return function(*args, **kwargs)

    return call


# --- environment ----------------------------------------------------------------------------------


def _world(
    name: str,
    words: tuple[str, ...],
    count: str,
    modes: tuple[str, ...] = BOTH,
    kind: str = "environment",
):
    """Enter a fault of some episodes, which the run completes and counts."""

    def play(stage: Stage) -> None:
        stage.run(*words).counted(count)

    TABLE.append(Fault(kind, name, play, modes))


ENV_ERROR, ENV_TIMEOUT = "stop/env_error", "stop/env_timeout"
_world("an exception in reset", breaking("raise", "reset"), "rollout/restarts", ("sync",))
_world("an exception in step", breaking("raise", "step"), ENV_ERROR)
_world("an exception in evaluate", breaking("raise", "evaluate"), ENV_ERROR, ("sync",))
_world("StopIteration", breaking("stop_iteration"), ENV_ERROR)
_world("StopIteration in a worker", (*WORKERS, *breaking("stop_iteration")), ENV_ERROR, ("async",))
_world("GeneratorExit", breaking("generator_exit"), ENV_ERROR)
_world("CancelledError", breaking("cancelled"), ENV_ERROR)
_world("sys.exit in this process", breaking("sys_exit"), ENV_ERROR)
_world("MemoryError", breaking("memory"), ENV_ERROR, ("sync",))
_world("endless recursion", breaking("recursion"), ENV_ERROR, ("async",))
_world("a late answer", (*breaking("late"), "--config.env.timeout=0.9"), ENV_TIMEOUT)
_world("a NaN score", breaking("nan", "evaluate"), ENV_ERROR, ("sync",))
_world("a score of 400 digits", breaking("digits", "evaluate"), ENV_ERROR)
_world("a text as score", breaking("text_score", "evaluate"), ENV_ERROR, ("async",))
_world("a NaN reward", breaking("reward"), ENV_ERROR, ("sync",))
_world("a dict instead of a result", breaking("wrong_type"), ENV_ERROR, ("async",))
_world("a set in info", breaking("set"), ENV_ERROR)
_world("an object in info of a worker", (*WORKERS, *breaking("not_json")), ENV_ERROR, ("sync",))
_world("a worker that exits", (*WORKERS, *breaking("exit")), ENV_ERROR)
_world("a worker that crashes", (*WORKERS, *breaking("segfault")), ENV_ERROR, ("async",))
_world("a worker that hangs", (*WORKERS, *breaking("hang"), "--config.env.timeout=4"), ENV_TIMEOUT)
_world(
    "a worker that stops",
    (*WORKERS, *breaking("stop"), "--config.env.timeout=4"),
    ENV_TIMEOUT,
    ("sync",),
)
_world(
    "a worker that floods its pipe",
    (*WORKERS, *breaking("flood"), "--config.env.timeout=20"),
    ENV_ERROR,
    ("async",),
)
_world(
    "a worker with a child",
    (*WORKERS, *breaking("child"), "--config.env.timeout=4"),
    ENV_TIMEOUT,
    ("sync",),
)
_world(
    "a worker that eats memory",
    (*WORKERS, *breaking("grow"), "--config.env.memory_mb=700"),
    ENV_ERROR,
    ("sync",),
)


@fault("environment")
def episodes_without_an_end(stage: Stage) -> None:
    room = (
        "--config.rollout.context=320",
        "--config.learner.row=320",
    )  # or it would be full before the last turn
    stage.run("--config.env.name=tests.faults.worlds:Endless", *room).counted("stop/max_turns")


@fault("environment")
def a_fault_in_every_episode(stage: Stage) -> None:
    stage.run(*breaking("raise", share=1), code=3, said="the environment failed in every rollout")


@fault("environment", ("sync",))
def a_world_that_does_not_start(stage: Stage) -> None:
    stage.run(*WORKERS, *breaking("exit", "start"), code=1, said="exit code 3")


@fault("environment", ("sync",))
def a_service_that_dies(stage: Stage) -> None:
    with serving("tests.tiny:Parity") as url:
        stage.own = {pid for pid, _ in orphans()}
        run = stage.start(
            "--config.env.mode=http", f"--config.env.url={url}", "--config.env.timeout=5"
        )
        run.until("step 1/")
        for pid in stage.own:
            os.kill(pid, signal.SIGKILL)
        stage.end(run, code=3, said="the environment failed in every rollout")
    stage.own = set()


# --- judge ----------------------------------------------------------------------------------------


def _judged(
    stage: Stage, answers: Callable[[dict, int], Answer], *words: str, **ends: Any
) -> Stage:
    """Play a run whose turns are labelled by a server that answers so."""

    def serve() -> list[str]:
        server = ChatServer(answers, context=32_768).__enter__()
        return [f"--config.llm.url={server.url}"]

    asked = ("--config.llm.model=tiny", "--config.llm.attempts=1", "--config.llm.failures=10000")
    return stage.run(*LABELLED, *asked, *words, inside=serve, **ends)


def _useless(
    name: str, answer: Callable[[], Answer], kind: str, *words: str, modes: tuple[str, ...] = BOTH
) -> None:
    """Enter a judge whose every answer is useless: the run completes, and each one is counted."""

    def play(stage: Stage) -> None:
        ended = _judged(stage, lambda body, n: answer(), *words)
        ended.counted(f"llm/step_judge/failures/{kind}", "attributing/unanswered")

    TABLE.append(Fault("judge", name, play, modes))


_useless("empty answers", lambda: said(""), "empty", modes=("sync",))
_useless("prose", lambda: said("All of them were good."), "unreadable")
_useless("JSON that is cut", lambda: said('{"steps": [{"step": 1, "lab'), "cut", modes=("async",))
_useless(
    "a number of 400 digits",
    lambda: said('{"steps": [{"step": 1' + "0" * 400 + "}]}"),
    "unreadable",
    modes=("sync",),
)
_useless(
    "500 deep lists",
    lambda: said('{"steps": ' + "[" * 500 + "]" * 500 + "}"),
    "unreadable",
    modes=("async",),
)
_useless("HTTP 500", lambda: refused(500, "boom"), "http_500")
_useless(
    "a body that is cut", lambda: Answer({"choices": []}, cut=5), "connection", modes=("sync",)
)
_useless("a body of junk", lambda: Answer(b"\x00\xff{{"), "bad_json", modes=("async",))
_useless(
    "a stall",
    lambda: Answer({}, stall=900.0),
    "timeout",
    "--config.llm.deadline=0.2",
    modes=("sync",),
)


@fault("judge", ("sync",))
def a_wrong_key(stage: Stage) -> None:
    _judged(
        stage, lambda body, n: refused(401, "Incorrect API key"), code=3, said="Incorrect API key"
    )


@fault("judge")
def a_server_that_dies(stage: Stage) -> None:
    def dying(body: dict, n: int) -> Answer:
        return script(body, n) if n < 9 else refused(500, "dead")

    _judged(stage, dying, "--config.llm.failures=3", code=3, said="questions in a row failed")
    _judged(stage, script, "--config.llm.failures=3")


@fault("judge", ("sync",))
def a_budget_without_usage(stage: Stage) -> None:
    def silent(body: dict, n: int) -> Answer:
        record = json.loads(script(body, n).body)
        return Answer({name: value for name, value in record.items() if name != "usage"})

    _judged(
        stage, silent, "--config.llm.budget_tokens=20000", code=3, said="config.llm.budget_tokens"
    )


@fault("judge", ("async",))
def too_many_requests(stage: Stage) -> None:
    def busy(body: dict, n: int) -> Answer:
        return refused(429, "slow down", retry_after="0.05") if n % 2 else script(body, n)

    _judged(stage, busy, "--config.llm.attempts=9").counted("llm/step_judge/failures/http_429")


# --- engine ---------------------------------------------------------------------------------------


@fault("engine")
def an_engine_that_breaks(stage: Stage) -> None:
    def inside() -> None:
        from rl.engines import EngineFault
        from rl.engines.jax.engine import JaxEngine

        JaxEngine.generate = failing(
            40, JaxEngine.generate, lambda: EngineFault("the device is lost")
        )

    stage.run(inside=inside, code=1, said="the device is lost").resumes(same=True)


@fault("engine")
def an_engine_slower_than_the_deadline(stage: Stage) -> None:
    def inside() -> None:
        import asyncio

        from rl.engines.jax.engine import JaxEngine

        generate, calls = JaxEngine.generate, [0]

        async def slow(self: Any, *args: Any, **kwargs: Any) -> Any:
            calls[0] += 1
            if calls[0] % 5 == 0:
                await asyncio.sleep(3600)
            return await generate(self, *args, **kwargs)

        JaxEngine.generate = slow

    stage.run("--config.rollout.timeout=15", inside=inside).counted("ledger/cancelled")


@fault("engine")
def log_probabilities_that_are_nan(stage: Stage) -> None:
    def inside() -> None:
        from rl.engines.jax.engine import JaxEngine

        generate = JaxEngine.generate

        async def nan(self: Any, *args: Any, **kwargs: Any) -> Any:
            completion = await generate(self, *args, **kwargs)
            completion.logprobs = [float("nan")] * len(completion.logprobs)
            return completion

        JaxEngine.generate = nan

    stage.run(inside=inside).counted("skipped")


@fault("engine", ("sync",))
def weights_that_do_not_arrive(stage: Stage) -> None:
    def inside() -> None:
        from rl.engines.jax.engine import JaxEngine

        async def forgetful(engine: Any, params: Any, version: int) -> None:
            engine.version = version

        JaxEngine.load = forgetful

    stage.run(inside=inside, said="ALARM").counted("alarm/weights")


@fault("engine", ("sync",))
def a_gradient_that_is_not_finite(stage: Stage) -> None:
    def inside() -> None:
        from evolver import grading

        assign = grading.assign

        def infinite(config: Any, estimator: Any, trajectories: Any, step: int) -> None:
            assign(config, estimator, trajectories, step)
            for trajectory in trajectories:
                for turn in trajectory.turns:
                    turn.advantage = float("inf")

        grading.assign = infinite

    stage.run(inside=inside).counted("skipped")


# --- disk -----------------------------------------------------------------------------------------


def full(*_: Any) -> OSError:
    return OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@fault("disk")
def a_full_disk(stage: Stage) -> None:
    """Someone else fills the file system of the run, and makes room again. A save that fails says
    so, too."""
    if not stage.mount("50m"):
        return stage.skip("mounting is not permitted")
    run, ballast = stage.start(), stage.workdir / "ballast"
    run.until("step 1/")
    with contextlib.suppress(OSError), open(ballast, "wb", buffering=0) as file:
        while True:
            file.write(bytes(4096))
    stage.end(run, code=1, said="No space left", once=False)
    ballast.unlink()
    stage.resumes(same=True)


@fault("disk", ("sync",))
def a_disk_that_is_too_small(stage: Stage) -> None:
    if not stage.mount("600k"):
        return stage.skip("mounting is not permitted")
    stage.run(code=1, said="choose another disk")


@fault("disk")
def no_room_for_trajectories(stage: Stage) -> None:
    def inside() -> None:
        from evolver.files import rollout_files

        rollout_files.write_atomically = failing(3, rollout_files.write_atomically, full)

    stage.run(inside=inside, code=1, said="No space left").resumes(same=True)


@fault("disk")
def no_room_for_metrics(stage: Stage) -> None:
    def inside() -> None:
        from evolver.files.workdir import Workdir

        Workdir.log_metrics = failing(3, Workdir.log_metrics, full)

    stage.run(inside=inside, code=1, said="No space left").resumes(same=True)


@fault("disk")
def no_room_for_checkpoints(stage: Stage) -> None:
    """The last one cannot be written, so that the run fails at its end."""

    def inside() -> None:
        from rl.checkpoint import Checkpoints

        Checkpoints._check_room = failing(3, Checkpoints._check_room, full)

    stage.run(inside=inside, code=1, said="the last checkpoint is of step 1").resumes(same=True)


@fault("disk", ("sync",))
def a_flush_that_fails(stage: Stage) -> None:
    def inside() -> None:
        os.fsync = failing(12, os.fsync, lambda: OSError(errno.EIO, os.strerror(errno.EIO)))

    stage.run(inside=inside, code=1, said="Input/output error").resumes(same=True)


@fault("disk", ("async",))
def a_disk_that_becomes_read_only(stage: Stage) -> None:
    """As the kernel makes it after an error; nobody else can, because the run holds its lock
    open."""

    def inside() -> None:
        os.replace = failing(9, os.replace, lambda: OSError(errno.EROFS, os.strerror(errno.EROFS)))

    stage.run(inside=inside, code=1, said="Read-only file system").resumes()


@fault("disk", ("sync",))
def a_read_only_workdir(stage: Stage) -> None:
    if not stage.mount("1m"):
        return stage.skip("mounting is not permitted")
    stage.remount(read_only=True)
    stage.run(code=2, said="cannot be written")


@fault("disk", ("async",))
def a_workdir_that_is_deleted(stage: Stage) -> None:
    run = stage.start("--config.steps=200")
    run.until("step 1/")
    shutil.rmtree(stage.workdir, ignore_errors=True)
    stage.end(run, code=1, said="was deleted or moved away")


@fault("disk")
def a_flipped_bit_in_the_newest_checkpoint(stage: Stage) -> None:
    stage.run("--config.steps=2", steps=2)
    newest = max((stage.workdir / "checkpoints").glob("[0-9]*"), key=lambda path: int(path.name))
    path = max(
        (path for path in newest.rglob("*") if path.is_file()), key=lambda path: path.stat().st_size
    )
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    stage.resumes(same=True)


@fault("disk", ("sync",))
def no_sound_checkpoint(stage: Stage) -> None:
    stage.run("--config.steps=2", steps=2)
    for path in (stage.workdir / "checkpoints").rglob("manifest/*"):
        path.write_bytes(b"")
    stage.run(code=1, said="can be read")


@fault("disk", ("sync",))
def a_last_line_that_is_cut(stage: Stage) -> None:
    stage.run("--config.steps=2", steps=2)
    path = stage.workdir / "metrics.jsonl"
    path.write_bytes(path.read_bytes() + b'{"step": 3, "rol')
    stage.resumes(same=True)


@fault("disk", ("sync",))
def too_many_open_files(stage: Stage) -> None:
    """Each save that fails says so, too."""
    run = stage.start(*WORKERS)
    run.until("step 1/")
    resource.prlimit(run.pid, resource.RLIMIT_NOFILE, (10, 10))  # those that are open stay so
    stage.end(run, code=1, said="Too many open files", once=False)
    stage.resumes(*WORKERS)


def _damaged(name: str, damage: Callable[[Any], Any], code: int, said: str) -> None:
    """Enter a workdir of two steps that somebody has changed, which its run refuses to go on in."""

    def play(stage: Stage) -> None:
        stage.run("--config.steps=2", steps=2)
        damage(stage.workdir)
        stage.run(code=code, said=said, books=False)

    TABLE.append(Fault("disk", name, play, ("sync",)))


def _deep(workdir: Any) -> None:
    (workdir / "config.json").write_text("[" * 100_000)


def _piped(name: str) -> Callable[[Any], None]:
    """Return a function that puts a pipe, whose end never comes, in the place of a file."""

    def pipe(workdir: Any) -> None:
        (workdir / name).unlink()
        os.mkfifo(workdir / name)

    return pipe


def _renamed(workdir: Any) -> None:
    (workdir / "checkpoints/2").rename(workdir / "checkpoints/9")


def _copied(workdir: Any) -> None:
    shutil.copytree(workdir / "checkpoints/1", workdir / "checkpoints/3")


_damaged("a config that is nested too deeply", _deep, 2, "it is nested too deeply")
_damaged("a config that is a pipe", _piped("config.json"), 2, "is not a regular file")
_damaged("metrics that are a pipe", _piped("metrics.jsonl"), 2, "is not a regular file")
_damaged("a renamed checkpoint", _renamed, 1, "holds the checkpoint of step 2")
_damaged("a copied checkpoint", _copied, 1, "holds the checkpoint of step 1")


@fault("disk", ("sync",))
def two_tasks_of_one_id(stage: Stage) -> None:
    path = stage.folder / "tasks.jsonl"
    line = json.dumps({"id": "a", "env": "parity", "query": "Write 1."})
    path.write_text(f"{line}\n{line}\n")
    stage.run(f"--config.env.tasks={path}", code=2, said="tasks.jsonl")


# --- process --------------------------------------------------------------------------------------


def _signalled(name: str, number: int, after: str, modes: tuple[str, ...] = BOTH) -> None:
    """Enter a signal that ends a run at its next safe point."""

    def play(stage: Stage) -> None:
        run = stage.start("--config.steps=200")
        run.until(after)
        run.signal(number)
        stage.end(run, code=130, said=SAVED if after.startswith("step") else "")
        stage.resumes(f"--config.steps={max(STEPS, len(stage.metrics()))}", steps=None)

    TABLE.append(Fault("process", name, play, modes))


for _number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
    _signalled(_number.name, _number, "step 1/")
_signalled("SIGTERM before the first step", signal.SIGTERM, "steps of", ("sync",))


@fault("process")
def a_second_interrupt(stage: Stage) -> None:
    run = stage.start("--config.steps=200")
    run.until("step 1/")
    for _ in range(2):
        run.signal(signal.SIGINT)
        time.sleep(0.05)
    stage.end(run, code=130, killed=True)
    stage.resumes(f"--config.steps={max(STEPS, len(stage.metrics()))}", steps=None)


@fault("process")
def killed_at_random_moments(stage: Stage) -> None:
    """Moments are drawn in processor time, so that they fall everywhere on a busy machine, too."""
    rng = random.Random(stage.mode)
    for number in range(stage.kills):
        run, moment = stage.start(), rng.uniform(0.2, 5.0)
        while not run.ended() and run.cpu() < moment:
            time.sleep(0.005)
        if run.ended():  # it had only the last steps to do
            stage.same_as_straight()
            shutil.rmtree(stage.workdir)
            continue
        run.signal(signal.SIGKILL)
        run.wait(stage.limit)
        stage.left_nothing(killed=True)
        stage.note = f"{number + 1} kills"
    stage.resumes(same=True)


@fault("process", ("sync",))
def killed_with_every_mechanism(stage: Stage) -> None:
    """Its tasks, experience and policy are those of a run that was not killed, byte for byte."""
    stage.run(*MECHANISMS, steps=2)
    stage.straight = stage.workdir.rename(stage.folder / "whole")
    run = stage.start(*MECHANISMS)
    run.until("step 1/")
    run.signal(signal.SIGKILL)
    run.wait(stage.limit)
    stage.left_nothing(killed=True)
    stage.resumes(*MECHANISMS, same=True, steps=2)


@fault("process")
def stopped_for_seconds(stage: Stage) -> None:
    run = stage.start()
    run.until("step 1/")
    run.signal(signal.SIGSTOP)
    time.sleep(stage.pause)
    stage.paused = stage.pause
    run.signal(signal.SIGCONT)
    stage.end(run).same_as_straight()


@fault("process", ("sync",))
def two_runs_in_one_workdir(stage: Stage) -> None:
    run = stage.start("--config.steps=200")
    run.until("step 1/")
    second = stage.start()
    if second.wait(stage.limit) != 1 or "is in use by" not in second.said:
        raise Broken(f"the second run ended with {second.code}: {second.said[-300:]}")
    run.signal(signal.SIGTERM)
    stage.end(run, code=130, said=SAVED)


@fault("process", ("sync",))
def workers_that_are_killed(stage: Stage) -> None:
    run = stage.start(*WORKERS)
    run.until("step 1/")
    for pid in run.children():
        os.kill(pid, signal.SIGKILL)
    stage.end(run)


@fault("process", ("sync",))
def workers_that_are_replaced(stage: Stage) -> None:
    run, seen = stage.start(*WORKERS, "--config.env.recycle=2"), set()
    while not run.ended():
        seen |= set(run.children())
        time.sleep(0.01)
    stage.end(run)
    if len(seen) < 8:  # two workers and a helper or two of Python, if nothing is replaced
        raise Broken(f"{len(seen)} processes were started for {STEPS * ROLLOUTS} episodes")


_BEFORE: list[object] = []


def reopen(name: str) -> None:
    """Give this process a new stream on a number that is a pipe now: the one before believes that
    it can seek, and is kept because its end would close the number."""
    before = getattr(sys, name)
    _BEFORE.append(before)
    setattr(sys, name, os.fdopen(before.fileno(), "w", buffering=1, closefd=False))


@fault("process", ("sync",))
def an_output_that_is_closed(stage: Stage) -> None:
    """As in `python run.py | head -1`."""

    def inside() -> None:
        reader, writer = os.pipe()
        os.close(reader)
        os.dup2(writer, 1)
        reopen("stdout")

    stage.run(inside=inside, code=1, said="nobody reads the output").resumes(same=True)


@fault("process", ("sync",))
def an_interrupt_that_ends_the_reader_too(stage: Stage) -> None:
    """As Ctrl-C does to `python run.py 2>&1 | tee log`. The last step is saved, whenever the next
    save was due."""
    reader, writer = os.pipe()

    def inside() -> None:
        os.close(reader)
        os.dup2(writer, 1), os.dup2(writer, 2), os.close(writer)
        reopen("stdout"), reopen("stderr")

    run = stage.start("--config.steps=200", "--config.checkpoint.every=200", inside=inside)
    os.close(writer)
    with open(reader, errors="replace") as output:
        while "step 1/" not in (line := output.readline()):
            if not line:
                raise Broken("the run ended before its first step")
    run.signal(signal.SIGINT)
    stage.end(run, code=130)
    saved, done = (
        max(int(path.name) for path in (stage.workdir / "checkpoints").glob("[0-9]*")),
        len(stage.metrics()) - 1,
    )
    if saved < done:
        raise Broken(f"{done} steps are done, and the last checkpoint is of step {saved}")
    stage.resumes(f"--config.steps={done + 1}", steps=None)


# --- surroundings ---------------------------------------------------------------------------------


def _surrounded(
    name: str, inside: Callable[[], Any], modes: tuple[str, ...], ends: dict[str, Any]
) -> None:
    def play(stage: Stage) -> None:
        stage.run(inside=inside, **ends)

    TABLE.append(Fault("surroundings", name, play, modes))


for _entry in SURROUNDINGS:
    _surrounded(*_entry)


# --- text -----------------------------------------------------------------------------------------


_world("a lone surrogate", breaking("surrogate"), "ledger/rollouts", kind="text")
_world("control tokens in an observation", breaking("control"), "ledger/rollouts", kind="text")
_world("an observation of 2 MB", breaking("long"), "ledger/rollouts", kind="text")
_world("990 deep arguments in info", breaking("deep"), ENV_ERROR, kind="text")
_world("no message", breaking("nothing"), "ledger/rollouts", ("sync",), kind="text")
_world("None as text", breaking("none_text"), ENV_ERROR, ("async",), kind="text")


@fault("text", ("sync",))
def marks_of_a_transcript(stage: Stage) -> None:
    """A world that writes the marks of the judge's transcript."""
    _judged(stage, script, *breaking("marks", share=1)).counted("llm/step_judge/calls")


def _spoken(name: str, text: str, modes: tuple[str, ...] = BOTH) -> None:
    """Enter a policy whose every turn reads so."""

    def play(stage: Stage) -> None:
        def inside() -> None:
            from rl.contexts.causal import Causal

            Causal.action = lambda template, _: text

        words = (
            "--config.env.name=travel",
            "--config.rollout.context=256",
            "--config.learner.row=256",
        )
        stage.run(*words, inside=inside)

    TABLE.append(Fault("text", name, play, modes))


_spoken(
    "990 deep arguments",
    '<tool_call>\n{"name": "flights", "arguments": {"to": '
    + "[" * 990
    + "]" * 990
    + "}}\n</tool_call>",
)
_spoken("20000 empty calls", "<tool_call></tool_call>" * 20_000, ("sync",))
_spoken("half a surrogate pair in a turn", "\ud800<tool_call>{\udfff", ("async",))


# --- clock ----------------------------------------------------------------------------------------


def _clock(
    name: str,
    module_function: str,
    change: Callable[[float, int], float],
    modes: tuple[str, ...] = BOTH,
) -> None:
    """Enter a clock that shows `change` of the true time and of the number of readings."""

    def play(stage: Stage) -> None:
        def inside() -> None:
            true, readings = getattr(time, module_function), [0]

            def shown() -> float:
                readings[0] += 1
                return change(true(), readings[0])

            setattr(time, module_function, shown)

        stage.run(inside=inside).same_as_straight()

    TABLE.append(Fault("clock", name, play, modes))


_clock("a day forward", "time", lambda t, n: t + 86_400 * (n > 20))
_clock("a day back", "time", lambda t, n: t - 86_400 * (n > 20))
_clock("standing still", "time", lambda t, n: 1.7e9, ("sync",))
_clock("before 1970", "time", lambda t, n: -5.0, ("async",))
_clock(
    "an hour forward while nothing is waited for",
    "monotonic",
    lambda t, n: t + 3600 * (n > 3),
    ("sync",),
)
