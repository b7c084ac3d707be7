"""The faults: of the environment, the judge, the engine, the process, texts and the clock. Those of
the disk are in tests/faults/disks.py.

Each is a function that gets a `Stage` and plays runs on it. It says how the run has to end; what
holds after every run is checked by the stage.
"""

import asyncio
import itertools
import json
import os
import random
import shutil
import signal
import sys
import time

from envs.source import serving
from evolver import grading
from rl.contexts.causal import Causal
from rl.engines import EngineFault
from rl.engines.jax.engine import JaxEngine
from tests.evolver.chat_server import Answer, ChatServer, refused
from tests.evolver.test_llm_run import LABELLED, script
from tests.evolver.test_loop import ALL as MECHANISMS
from tests.faults import disks  # noqa: F401 (enters its faults into the table)
from tests.faults.registry import (
    ASYNC,
    BOTH,
    LONG,
    SAVED,
    SYNC,
    TABLE,
    WORKERS,
    failing,
    fault,
    replacing,
)
from tests.faults.stage import ROLLOUTS, STEPS, Broken, children, orphans
from tests.faults.surroundings import SURROUNDINGS

__all__ = ["TABLE"]
TRAVEL = "env.name=travel rollout.context=256 learner.row=256"
SHORT_TIMEOUT = "env.timeout=4"


def breaking(fault, at="step", share=3):
    """Return the words of a config whose world has that fault."""
    return (
        f"env.name=tests.faults.worlds:Breaking env.args.fault={fault} env.args.at={at}"
        f" env.args.share={share}"
    )


# --- environment ----------------------------------------------------------------------------------

ENV_TIMEOUT = "stop/env_timeout"


def _world(name, broken, *words, at="step", count="stop/env_error", modes=BOTH, kind="environment"):
    """Enter a fault of some episodes, which the run completes and counts."""

    @fault(kind, modes, name)
    def play(stage):
        stage.run(*words, breaking(broken, at)).counted(count)


_world("an exception in reset", "raise", at="reset", count="rollout/restarts", modes=SYNC)
_world("an exception in step", "raise")
_world("an exception in evaluate", "raise", at="evaluate", modes=SYNC)
_world("StopIteration", "stop_iteration")
_world("StopIteration in a worker", "stop_iteration", WORKERS, modes=ASYNC)
_world("GeneratorExit", "generator_exit")
_world("CancelledError", "cancelled")
_world("sys.exit in this process", "sys_exit")
_world("MemoryError", "memory", modes=SYNC)
_world("endless recursion", "recursion", modes=ASYNC)
_world("a late answer", "late", "env.timeout=0.9", count=ENV_TIMEOUT)
_world("a NaN score", "nan", at="evaluate", modes=SYNC)
_world("a score of 400 digits", "digits", at="evaluate")
_world("a text as score", "text_score", at="evaluate", modes=ASYNC)
_world("a NaN reward", "reward", modes=SYNC)
_world("a dict instead of a result", "wrong_type", modes=ASYNC)
_world("a set in info", "set")
_world("an object in info of a worker", "not_json", WORKERS, modes=SYNC)
_world("a worker that exits", "exit", WORKERS)
_world("a worker that crashes", "segfault", WORKERS, modes=ASYNC)
_world("a worker that hangs", "hang", WORKERS, SHORT_TIMEOUT, count=ENV_TIMEOUT)
_world("a worker that stops", "stop", WORKERS, SHORT_TIMEOUT, count=ENV_TIMEOUT, modes=SYNC)
_world("a worker that floods its pipe", "flood", WORKERS, "env.timeout=20", modes=ASYNC)
_world("a worker with a child", "child", WORKERS, SHORT_TIMEOUT, count=ENV_TIMEOUT, modes=SYNC)
_world("a worker that eats memory", "grow", WORKERS, "env.memory_mb=700", modes=SYNC)


@fault("environment")
def episodes_without_an_end(stage):
    # With less room the context would be full before the last turn.
    words = "env.name=tests.faults.worlds:Endless rollout.context=320 learner.row=320"
    stage.run(words).counted("stop/max_turns")


@fault("environment")
def a_fault_in_every_episode(stage):
    every = breaking("raise", share=1)
    stage.run(every, code=3, said="the environment failed in every rollout")


@fault("environment", SYNC)
def a_world_that_does_not_start(stage):
    stage.run(WORKERS, breaking("exit", "start"), code=1, said="exit code 3")


@fault("environment", SYNC)
def a_service_that_dies(stage):
    with serving("tests.tiny:Parity") as url:
        stage.own = {pid for pid, _ in orphans()}
        run = stage.started(f"env.mode=http env.url={url} env.timeout=5")
        for pid in stage.own:
            os.kill(pid, signal.SIGKILL)
        stage.end(run, code=3, said="the environment failed in every rollout")
    stage.own = set()


# --- judge ----------------------------------------------------------------------------------------


def _judged(stage, answers, *words, **ends):
    """Play a run whose turns are labelled by a server that answers so."""

    def serve():
        server = ChatServer(answers, context=32_768).__enter__()
        return [f"llm.url={server.url}"]

    asked = "llm.model=tiny llm.attempts=1 llm.failures=10000"
    return stage.run(*LABELLED, asked, *words, inside=serve, **ends)


def _useless(name, answer, kind, *words, modes=BOTH):
    """Enter a judge whose every answer is useless: the run completes, and each one is counted."""

    @fault("judge", modes, name)
    def play(stage):
        counts = (f"llm/step_judge/failures/{kind}", "attributing/unanswered")
        _judged(stage, answer, *words).counted(*counts)


MANY_DIGITS = '{"steps": [{"step": 1' + "0" * 400 + "}]}"
DEEP = "[" * 500 + "]" * 500
_useless("empty answers", "", "empty", modes=SYNC)
_useless("prose", "All of them were good.", "unreadable")
_useless("JSON that is cut", '{"steps": [{"step": 1, "lab', "cut", modes=ASYNC)
_useless("a number of 400 digits", MANY_DIGITS, "unreadable", modes=SYNC)
_useless("500 deep lists", f'{{"steps": {DEEP}}}', "unreadable", modes=ASYNC)
_useless("HTTP 500", refused(500, "boom"), "http_500")
_useless("a body that is cut", Answer({"choices": []}, cut=5), "connection", modes=SYNC)
_useless("a body of junk", Answer(b"\x00\xff{{"), "bad_json", modes=ASYNC)
_useless("a stall", Answer({}, stall=900.0), "timeout", "llm.deadline=0.2", modes=SYNC)


@fault("judge", SYNC)
def a_wrong_key(stage):
    _judged(stage, refused(401, "Incorrect API key"), code=3, said="Incorrect API key")


@fault("judge")
def a_server_that_dies(stage):
    def dying(body, n):
        return script(body, n) if n < 9 else refused(500, "dead")

    _judged(stage, dying, "llm.failures=3", code=3, said="questions in a row failed")
    _judged(stage, script, "llm.failures=3")


@fault("judge", SYNC)
def a_budget_without_usage(stage):
    def silent(body, n):
        record = json.loads(script(body, n).body)
        del record["usage"]
        return Answer(record)

    budget = "config.llm.budget_tokens"
    _judged(stage, silent, f"--{budget}=20000", code=3, said=budget)


@fault("judge", ASYNC)
def too_many_requests(stage):
    def busy(body, n):
        return refused(429, "slow down", retry_after="0.05") if n % 2 else script(body, n)

    _judged(stage, busy, "llm.attempts=9").counted("llm/step_judge/failures/http_429")


# --- engine ---------------------------------------------------------------------------------------


LOST = "the device is lost"
failing("engine", "an engine that breaks", JaxEngine, "generate", 40, EngineFault(LOST), LOST)


@fault("engine")
def an_engine_slower_than_the_deadline(stage):
    def make(generate):
        count = itertools.count(1)

        async def slow(*args, **kwargs):
            if next(count) % 5 == 0:
                await asyncio.sleep(3600)
            return await generate(*args, **kwargs)

        return slow

    inside = replacing(JaxEngine, "generate", make)
    stage.run("rollout.timeout=15", inside=inside).counted("ledger/cancelled")


@fault("engine")
def log_probabilities_that_are_nan(stage):
    def make(generate):
        async def nan(*args, **kwargs):
            completion = await generate(*args, **kwargs)
            completion.logprobs = [float("nan")] * len(completion.logprobs)
            return completion

        return nan

    stage.run(inside=replacing(JaxEngine, "generate", make)).counted("skipped")


@fault("engine", SYNC)
def weights_that_do_not_arrive(stage):
    async def forgetful(engine, params, version):
        engine.version = version

    inside = replacing(JaxEngine, "load", lambda load: forgetful)
    stage.run(inside=inside, said="ALARM").counted("alarm/weights")


@fault("engine", SYNC)
def a_gradient_that_is_not_finite(stage):
    def make(assign):
        def infinite(config, estimator, trajectories, step):
            assign(config, estimator, trajectories, step)
            for trajectory in trajectories:
                for turn in trajectory.turns:
                    turn.advantage = float("inf")

        return infinite

    stage.run(inside=replacing(grading, "assign", make)).counted("skipped")


# --- process --------------------------------------------------------------------------------------


def _signalled(name, number, after="step 1/", said=SAVED, modes=BOTH):
    """Enter a signal that ends a run at its next safe point."""

    @fault("process", modes, name)
    def play(stage):
        run = stage.started(LONG, after=after)
        run.signal(number)
        stage.end(run, code=130, said=said)
        stage.resumes_for_a_step()


for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
    _signalled(number.name, number)
_signalled("SIGTERM before the first step", signal.SIGTERM, "steps of", "", SYNC)


@fault("process")
def a_second_interrupt(stage):
    run = stage.started(LONG)
    for _ in range(2):
        run.signal(signal.SIGINT)
        time.sleep(0.05)
    stage.end(run, code=130, killed=True)
    stage.resumes_for_a_step()


@fault("process")
def killed_at_random_moments(stage):
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
        stage.kill(run)
        stage.note = f"{number + 1} kills"
    stage.resumes(same=True)


@fault("process", SYNC)
def killed_with_every_mechanism(stage):
    """Its tasks, experience and policy are those of a run that was not killed, byte for byte."""
    stage.run(*MECHANISMS, steps=2)
    stage.straight = stage.workdir.rename(stage.folder / "whole")
    stage.kill(stage.started(*MECHANISMS))
    stage.resumes(*MECHANISMS, same=True, steps=2)


@fault("process")
def stopped_for_seconds(stage):
    run = stage.started()
    run.signal(signal.SIGSTOP)
    time.sleep(stage.pause)
    stage.paused = stage.pause
    run.signal(signal.SIGCONT)
    stage.end(run).same_as_straight()


@fault("process", SYNC)
def two_runs_in_one_workdir(stage):
    run, second = stage.started(LONG), stage.start()
    if second.wait(stage.limit) != 1 or "is in use by" not in second.said:
        raise Broken(f"the second run ended with {second.code}: {second.said[-300:]}")
    run.signal(signal.SIGTERM)
    stage.end(run, code=130, said=SAVED)


@fault("process", SYNC)
def workers_that_are_killed(stage):
    run = stage.started(WORKERS)
    for pid in children(run.pid):
        os.kill(pid, signal.SIGKILL)
    stage.end(run)


@fault("process", SYNC)
def workers_that_are_replaced(stage):
    run, seen = stage.start(WORKERS, "env.recycle=2"), set()
    while not run.ended():
        seen |= set(children(run.pid))
        time.sleep(0.01)
    stage.end(run)
    if len(seen) < 8:  # two workers and a helper or two of Python, if nothing is replaced
        raise Broken(f"{len(seen)} processes were started for {STEPS * ROLLOUTS} episodes")


_BEFORE: list[object] = []


def reopen(name):
    """Give this process a new stream on a number that is a pipe now: the one before believes that
    it can seek, and is kept because its end would close the number."""
    before = getattr(sys, name)
    _BEFORE.append(before)
    setattr(sys, name, os.fdopen(before.fileno(), "w", buffering=1, closefd=False))


@fault("process", SYNC)
def an_output_that_is_closed(stage):
    """As in `python run.py | head -1`."""

    def inside():
        reader, writer = os.pipe()
        os.close(reader)
        os.dup2(writer, 1)
        reopen("stdout")

    stage.run(inside=inside, code=1, said="nobody reads the output").resumes(same=True)


@fault("process", SYNC)
def an_interrupt_that_ends_the_reader_too(stage):
    """As Ctrl-C does to `python run.py 2>&1 | tee log`. The last step is saved, whenever the next
    save was due."""
    reader, writer = os.pipe()

    def inside():
        os.close(reader)
        os.dup2(writer, 1), os.dup2(writer, 2), os.close(writer)
        reopen("stdout"), reopen("stderr")

    run = stage.start(LONG, "checkpoint.every=200", inside=inside)
    os.close(writer)
    with open(reader, errors="replace") as output:
        while "step 1/" not in (line := output.readline()):
            if not line:
                raise Broken("the run ended before its first step")
    run.signal(signal.SIGINT)
    stage.end(run, code=130)
    saved, done = stage.saved(), len(stage.metrics()) - 1
    if saved < done:
        raise Broken(f"{done} steps are done, and the last checkpoint is of step {saved}")
    stage.resumes(f"--config.steps={done + 1}", steps=None)


# --- surroundings ---------------------------------------------------------------------------------


def _surrounded(name, inside, modes, ends):
    @fault("surroundings", modes, name)
    def play(stage):
        stage.run(inside=inside, **ends)


for entry in SURROUNDINGS:
    _surrounded(*entry)


# --- text -----------------------------------------------------------------------------------------


_world("990 deep arguments in info", "deep", kind="text")
_world("None as text", "none_text", modes=ASYNC, kind="text")
for name, broken, modes in (  # texts that break nothing
    ("a lone surrogate", "surrogate", BOTH),
    ("control tokens in an observation", "control", BOTH),
    ("an observation of 2 MB", "long", BOTH),
    ("no message", "nothing", SYNC),
):
    _world(name, broken, count="ledger/rollouts", modes=modes, kind="text")


@fault("text", SYNC)
def marks_of_a_transcript(stage):
    """A world that writes the marks of the judge's transcript."""
    _judged(stage, script, breaking("marks", share=1)).counted("llm/step_judge/calls")


def _spoken(name, text, modes=BOTH):
    """Enter a policy whose every turn reads so."""

    @fault("text", modes, name)
    def play(stage):
        stage.run(TRAVEL, inside=replacing(Causal, "action", lambda action: lambda *_: text))


NESTED = "[" * 990 + "]" * 990
CALL = '<tool_call>\n{"name": "flights", "arguments": {"to": %s}}\n</tool_call>'
_spoken("990 deep arguments", CALL % NESTED)
_spoken("20000 empty calls", "<tool_call></tool_call>" * 20_000, SYNC)
_spoken("half a surrogate pair in a turn", "\ud800<tool_call>{\udfff", ASYNC)


# --- clock ----------------------------------------------------------------------------------------


def _clock(name, function, change, modes=BOTH):
    """Enter a clock that shows `change` of the true time and of the number of readings."""

    def make(true):
        readings = itertools.count(1)
        return lambda: change(true(), next(readings))

    @fault("clock", modes, name)
    def play(stage):
        stage.run(inside=replacing(time, function, make)).same_as_straight()


_clock("a day forward", "time", lambda t, n: t + 86_400 * (n > 20))
_clock("a day back", "time", lambda t, n: t - 86_400 * (n > 20))
_clock("standing still", "time", lambda t, n: 1.7e9, SYNC)
_clock("before 1970", "time", lambda t, n: -5.0, ASYNC)
_clock(
    "an hour forward while nothing is waited for",
    "monotonic",
    lambda t, n: t + 3600 * (n > 3),
    SYNC,
)
