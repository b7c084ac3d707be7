"""The vLLM engine over real HTTP, against servers without a model: routing, faults, weights,
start-up."""

import asyncio
import dataclasses
import itertools
import math
import signal
import subprocess
import sys
import threading
from functools import partial
from pathlib import Path

import httpx
import numpy as np
import pytest

from models import hf, qwen
from rl.engines import ContextFull, EngineFault, RequestFault
from rl.engines.child import PLUGIN, first_error
from rl.engines.vllm.check import compare
from rl.engines.vllm.client import COMPLETIONS, GENERATE, Schemas, Server, ServerBusy
from rl.engines.vllm.engine import Patience, VllmEngine, WeightsNotLoaded
from rl.engines.vllm.servers import OwnServers, Servers, ServerStartError
from rl.engines.vllm.transfer import MIB, UPDATE, SharedMemory, TransferError
from rl.trajectory import Completion, Sampling
from tests.envs.test_process import wait_until
from tests.rl.fake_vllm import CONTEXT, VOCAB, Fake, logp_of, token_of
from tests.rl.vllm_setup import DTYPES, assert_holds, random_params

SHAPE = qwen.Config(VOCAB, 8, 1, 1, 1, 8, 16)
QUICK = Patience(
    refusals=4, delay=0.01, max_delay=0.05, check_every=0.1, failed_checks=3, no_replica=60.0
)


def weights(value: float) -> qwen.Params:
    params = random_params(SHAPE)
    return params | {"norm": np.full_like(params["norm"], value)}


def score(params, ids):
    return np.array(
        [logp_of(token, i, float(params["norm"][0])) for i, token in enumerate(ids) if i]
    )


class Cluster:
    """Fake servers and an engine on them."""

    def __init__(self, tmp_path, servers=2, *, transfer=True, key="", engine=None, **knobs):
        """engine: options of the engine. knobs: of the servers."""
        self.fakes = [Fake(**knobs) for _ in range(servers)]
        self.fake = self.fakes[0]
        self.lines: list[str] = []
        memory = partial(SharedMemory, SHAPE, dtype="float32", folder=tmp_path, bucket=2048 / MIB)
        self.engine = VllmEngine(
            Servers([fake.url for fake in self.fakes], model="policy", key=key), vocab=VOCAB, context=CONTEXT,
            transfer=memory() if transfer else None, score=score, say=self.lines.append,
            **{"patience": QUICK} | (engine or {}),
        )  # fmt: skip

    def run(self, scenario):
        """Start, load version 0, play, close."""

        async def everything():
            try:
                await self.engine.start()
                await self.engine.load(weights(0.0), 0)
                return await scenario(self.engine)
            finally:
                await self.engine.close()

        try:
            return asyncio.run(everything())
        finally:
            for fake in self.fakes:
                fake.silent = False
                fake.die()


async def until(happened):
    """Wait until a function returns True."""
    async with asyncio.timeout(20):
        while not happened():
            await asyncio.sleep(0.02)


def ask(engine, number, *, tokens=6, session=None, guide=None, **sampling):
    sampling = Sampling(tokens, seed=number, **sampling)
    prompt = [number % VOCAB, 3]
    return engine.generate(prompt, sampling, session=session or str(number), guide=guide)


def ask_all(engine, numbers, **options):
    return asyncio.gather(*(ask(engine, number, **options) for number in numbers))


def expected(number, tokens=6):
    return [token_of(number, 2 + i) for i in range(tokens)]


either_endpoint = pytest.mark.parametrize(
    "paths", [(GENERATE, *UPDATE), (COMPLETIONS, *UPDATE)], ids=["generate", "completions"]
)


@pytest.mark.parametrize("unused, bias", [(0, None), (2, {"48": -100.0, "49": -100.0})])
@either_endpoint
def test_rows_without_a_token_are_kept_from_every_answer(tmp_path, paths, unused, bias):
    cluster = Cluster(tmp_path, servers=1, paths=paths, engine={"unused": unused})
    cluster.run(lambda engine: ask(engine, 1))
    assert cluster.fake.options[-1].get("logit_bias") == bias


@either_endpoint
def test_completions_carry_tokens_log_probabilities_and_version(tmp_path, paths):
    async def scenario(engine):
        await engine.load(weights(0.5), 7)
        return await ask_all(engine, range(20))

    cluster = Cluster(tmp_path, paths=paths)
    completions = cluster.run(scenario)
    neutral = {"min_p": 0, "repetition_penalty": 1, "presence_penalty": 0, "frequency_penalty": 0}
    for options in cluster.fake.options:  # generation_config.json may have others
        assert neutral.items() <= options.items()
    for i, completion in enumerate(completions):
        logprobs = [logp_of(token, place, 0.5) for place, token in enumerate(expected(i), 2)]
        assert completion == Completion(expected(i), logprobs, "length", 7)


@either_endpoint
def test_servers_hold_answers_to_schemas_and_refuse_one_alone(tmp_path, paths):
    schema = {"type": "object"}
    cluster = Cluster(tmp_path, servers=1, paths=paths)

    async def scenario(engine):
        free, held, faulty = await asyncio.gather(
            ask(engine, 1),
            ask(engine, 2, guide=Schemas().guide(schema)),
            ask(engine, 3, guide={"type": "robot"}),
            return_exceptions=True,
        )
        assert (free.tokens, held.tokens) == (expected(1), expected(2))
        assert type(faulty) is RequestFault and "robot" in str(faulty)

    cluster.run(scenario)
    asked = {options["seed"]: options for options in cluster.fake.options}
    free, held = asked[1], asked[2]
    added = {"structured_outputs": {"json": schema}}
    if COMPLETIONS in paths:
        form = {"name": "answer", "schema": schema}
        added = {"response_format": {"type": "json_schema", "json_schema": form}}
    assert added.items() <= held.items() and not added.keys() & free.keys()
    assert free["ignore_eos"] and not held["ignore_eos"]


def test_sessions_stay_with_their_replica_and_new_ones_are_balanced(tmp_path):
    async def scenario(engine):
        for turn in range(3):
            await asyncio.gather(*(ask(engine, i + turn, session=f"s{i}") for i in range(10)))
        for i in range(5):
            await engine.release(f"s{i}")
        assert len(engine._of_session) == 5

    cluster = Cluster(tmp_path)
    cluster.run(scenario)
    per_replica = [sum(path == GENERATE for path in fake.asked) for fake in cluster.fakes]
    assert per_replica[0] == per_replica[1]


def test_stop_tokens_end_a_sample_and_are_part_of_it(tmp_path):
    stop = expected(1)[3]
    completion = Cluster(tmp_path, 1).run(lambda engine: ask(engine, 1, stop_tokens=(stop,)))
    assert completion.stop == "stop" and completion.tokens == expected(1)[:4]


def test_a_dead_replica_is_removed_and_its_requests_move(tmp_path):
    async def scenario(engine):
        for fake in cluster.fakes:
            fake.seconds = 0.5
        running = ask_all(engine, range(12))
        await asyncio.sleep(0.2)
        await asyncio.to_thread(cluster.fake.die)
        return await running

    cluster = Cluster(tmp_path)
    completions = cluster.run(scenario)
    assert [c.tokens for c in completions] == [expected(i) for i in range(12)]
    stats = cluster.engine.stats()
    assert stats["moved"] == 6 and stats["lost"] == 1
    assert any("replica 0 removed" in line for line in cluster.lines)


def test_a_hanging_replica_is_removed_and_readmitted_with_the_current_weights(tmp_path):
    async def scenario(engine):
        cluster.fake.silent = True
        completions = await ask_all(engine, range(8))
        assert engine.stats()["replicas"] == 1
        await engine.load(weights(0.25), 1)  # while the replica is away
        cluster.fake.silent = False
        await until(lambda: engine.stats()["replicas"] == 2)
        return completions, await ask_all(engine, range(8, 12))

    cluster = Cluster(tmp_path)
    before, after = cluster.run(scenario)
    assert [c.tokens for c in before] == [expected(i) for i in range(8)]
    assert {c.version for c in after} == {1} and cluster.engine.stats()["readmitted"] == 1
    assert cluster.fake.weight == cluster.fakes[1].weight == 0.25


def test_a_replica_that_cannot_score_is_removed_alone_and_health_checks_do_not_multiply(tmp_path):
    async def scenario(engine):
        cluster.fake.model = "another"
        await engine.load(weights(0.25), 1)
        assert engine.stats()["replicas"] == 1
        completions = await ask_all(engine, range(8))
        tasks = [task.get_coro().__qualname__ for task in asyncio.all_tasks()]
        assert sum(name.endswith("_check_health") for name in tasks) == 2
        return completions

    cluster = Cluster(tmp_path)
    completions = cluster.run(scenario)
    assert [(c.tokens, c.version) for c in completions] == [(expected(i), 1) for i in range(8)]
    asked = len(cluster.fakes[1].asked)
    threading.Event().wait(0.3)
    assert len(cluster.fakes[1].asked) == asked  # nothing goes on after `close`


def test_without_any_server_requests_fail_with_the_reason(tmp_path):
    async def scenario(engine):
        await asyncio.to_thread(cluster.fake.die)
        with pytest.raises(EngineFault, match=r"no server is left: http.*Connect"):
            await ask(engine, 1)

    patience = dataclasses.replace(QUICK, no_replica=0.5)
    cluster = Cluster(tmp_path, 1, engine={"patience": patience})
    cluster.run(scenario)


@pytest.mark.parametrize("status, error", [(200, ServerBusy), (503, ServerBusy), (400, ValueError)])
@pytest.mark.parametrize("body", [b"[" * 100_000, b"\xff{", b""])
def test_an_answer_that_is_no_json_is_that_of_a_busy_server_or_a_refusal(status, error, body):
    async def ask():
        answer = httpx.MockTransport(lambda _: httpx.Response(status, content=body))
        async with httpx.AsyncClient(base_url="http://server", transport=answer) as server.http:
            return await server.ask("GET", "/health", timeout=5)

    server = Server("http://server", "policy")

    if status == 200 and not body:
        assert asyncio.run(ask()) == {}
    else:
        with pytest.raises(error):
            asyncio.run(ask())


@pytest.mark.parametrize("statuses,survives", [([429, 503, 500], True), ([429] * 9, False)])
def test_refused_requests_are_retried_a_limited_number_of_times(tmp_path, statuses, survives):
    async def scenario(engine):
        cluster.fake.refuse = list(statuses)
        if survives:
            assert (await ask(engine, 1)).tokens == expected(1)
        else:
            with pytest.raises(EngineFault, match="failed after 5 refusals"):
                await ask(engine, 1)
        assert engine.stats()["refused"] == min(len(statuses), 5)

    cluster = Cluster(tmp_path, 1)
    cluster.run(scenario)


def test_answers_of_a_restarted_server_with_unknown_weights_are_discarded(tmp_path):
    async def scenario(engine):
        cluster.fake.version, cluster.fake.weight = "default", 9.0
        return await ask(engine, 1)

    cluster = Cluster(tmp_path, 1)
    completion = cluster.run(scenario)  # after the weights were sent again
    assert cluster.engine.stats()["unknown_weights"] == 1
    assert completion.version == 0 and completion.logprobs[0] == logp_of(expected(1)[0], 2, 0.0)


@pytest.mark.parametrize("guide", [None, {"type": "object"}])
def test_requests_cut_by_an_update_continue_with_the_new_weights(tmp_path, guide):
    """One that is held to a schema begins again."""

    async def scenario(engine):
        cluster.fake.seconds = 60.0
        before = len(cluster.fake.prompts)
        running = ask_all(engine, range(4), tokens=20, guide=guide)
        await until(lambda: len(cluster.fake.prompts) == before + 4)
        cluster.fake.seconds = 0.0
        await engine.load(weights(1.0), 1)
        return await running

    cluster = Cluster(tmp_path, 1, engine={"in_flight": "cut"})
    completions = cluster.run(scenario)
    assert cluster.engine.stats()["cut"] == 4
    for i, completion in enumerate(completions):
        assert len(completion.tokens) == len(completion.logprobs) == 20
        assert completion.version == (1 if guide else 0)
        assert completion.tokens[:10] == expected(i, 10)
        assert not guide or completion.tokens == expected(i, 20)
        new = [logp_of(t, 12 + k, 1.0) for k, t in enumerate(completion.tokens[10:])]
        assert completion.logprobs[10:] == new


def test_a_server_that_ignores_new_weights_is_detected_during_the_update(tmp_path):
    async def scenario(engine):
        for fake in cluster.fakes:
            fake.deaf = True
        with pytest.raises(WeightsNotLoaded, match="it still has the old weights"):
            await engine.load(weights(0.5), 1)

    cluster = Cluster(tmp_path)
    cluster.run(scenario)


def test_cancelled_requests_leave_nothing_behind(tmp_path):
    async def scenario(engine):
        cluster.fake.seconds = 0.4
        task = asyncio.create_task(ask(engine, 1))
        await asyncio.sleep(0.1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert not engine._replicas[0].running
        return await ask(engine, 2, session="1")

    cluster = Cluster(tmp_path, 1)
    assert cluster.run(scenario).tokens == expected(2)


def test_invalid_requests_are_rejected_before_they_are_sent(tmp_path):
    async def scenario(engine):
        with pytest.raises(ContextFull):
            await ask(engine, 1, tokens=CONTEXT)
        for prompt, tokens in ([], 5), ([VOCAB], 5), ([1], 0):
            with pytest.raises(ValueError):
                await engine.generate(prompt, Sampling(tokens), session="s")

    Cluster(tmp_path, 1).run(scenario)


# --- start-up -------------------------------------------------------------------------------------

BAD = {
    "a wrong model name": ({"model": "other"}, "serves 'other', not 'policy'"),
    "a small context": (
        {"context": 64},
        "has a context of 64 tokens; config.rollout.context needs 128",
    ),
    "no weight transfer": (
        {"paths": (GENERATE, "/pause")},
        "accepts no weights, it lacks /finish_weight_update",
    ),
    "no token ids": ({"strip": ("token_ids",)}, "without token ids or log-probabilities"),
    "no log-probabilities": (
        {"strip": ("logprobs",), "paths": (COMPLETIONS, *UPDATE)},
        "without token ids or log-prob",
    ),
    "a smaller vocabulary": ({"vocab": 40}, "has a smaller vocabulary than the policy's 50"),
    "a larger vocabulary": ({"vocab": 60}, "has a larger vocabulary than the policy's 50"),
    "another temperature": ({"raw": True}, "start it with --logprobs-mode processed_logprobs"),
    "a wrong key": ({"secret": "right"}, "rejects the key"),
}


@pytest.mark.parametrize("name", BAD)
def test_an_unsuitable_server_is_reported_at_start_up(tmp_path, name):
    knobs, words = BAD[name]
    with pytest.raises(EngineFault, match="the servers cannot be used") as error:
        Cluster(tmp_path, 1, engine={"temperature": 0.7}, key="not-the-key", **knobs).run(None)
    assert words in str(error.value) and "not-the-key" not in str(error.value)


def test_all_unsuitable_servers_are_in_one_message(tmp_path):
    cluster = Cluster(tmp_path, 2)
    cluster.fake.model, cluster.fakes[1].context = "other", 64
    with pytest.raises(EngineFault) as error:
        cluster.run(None)
    assert "'other'" in str(error.value) and "64 tokens" in str(error.value)


def test_a_url_without_a_server_is_reported(tmp_path):
    cluster = Cluster(tmp_path, 1, transfer=False)
    cluster.engine._servers = Servers(["http://127.0.0.1:9/v1"], model="policy")
    with pytest.raises(EngineFault, match=r"http://127.0.0.1:9: nothing answers there"):
        cluster.run(None)


def test_servers_with_fixed_weights_are_verified_to_hold_the_policy(tmp_path):
    cluster = Cluster(tmp_path, 1, transfer=False, paths=(COMPLETIONS,))
    assert cluster.run(lambda engine: ask(engine, 3)).tokens == expected(3)
    cluster = Cluster(tmp_path, 1, transfer=False, paths=(COMPLETIONS,), weight=0.5)
    with pytest.raises(WeightsNotLoaded, match="does not answer with the weights"):
        cluster.run(lambda engine: ask(engine, 3))


def test_a_server_that_dies_while_starting_is_reported_with_its_first_error(tmp_path):
    python = tmp_path / "python"
    python.touch(0o755)
    servers = OwnServers(
        python=str(python), checkpoint=tmp_path, logs=tmp_path / "logs", context=64, dtype="float32", slots=4,
    )  # fmt: skip
    for device in (7, 8):  # the second error is not the older one in the same log
        error = f"ValueError: no such device {device}"
        python.write_text(f"#!/bin/sh\necho INFO fine\necho '{error}' >&2\nexit 3\n")
        with pytest.raises(
            ServerStartError, match=f"ended while starting: {error}\n  log: .*vllm-0.log"
        ):
            asyncio.run(servers.start())


def test_the_first_error_of_a_log_is_the_last_line_of_its_first_traceback():
    log = (
        "INFO 11-20 all well\n(Worker pid=7) ERROR 11-20 19:43:51 [core.py:12] Traceback (most recent call last):\n"
        '(Worker pid=7) ERROR 11-20 19:43:51 [core.py:12]   File "x.py", line 3\n'
        "(Worker pid=7) ERROR 11-20 19:43:51 [core.py:12] RuntimeError: head_dim=16 is not supported\n"
        "RuntimeError: Engine core initialization failed\n"
    )
    assert first_error(log) == "RuntimeError: head_dim=16 is not supported"
    assert first_error("just this\n") == "just this" and first_error("") == "its log is empty"


# --- weights --------------------------------------------------------------------------------------


def staged(transfer: SharedMemory, dtype: str) -> dict[str, np.ndarray]:
    """Return the tensors that a server reads from the files, as the update's requests say."""
    found = {}
    for body in transfer.updates():
        info = body["update_info"]
        raw = Path(info["path"]).read_bytes()
        assert len(raw) == info["size"] and set(info["dtypes"]) == {dtype}
        rows = zip(info["names"], info["shapes"], info["offsets"], info["transposed"], strict=True)
        for name, shape, offset, transposed in rows:
            held = np.ndarray(shape[::-1] if transposed else shape, DTYPES[dtype], raw, offset)
            found[name] = held.T if transposed else held
    return found


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("tied", [True, False])
def test_staged_buckets_hold_the_checkpoint(tmp_path, dtype, tied):
    shape = qwen.Config(VOCAB, 8, 2, 2, 1, 4, 16, tied=tied)
    params = random_params(shape)
    transfer = SharedMemory(shape, dtype=dtype, folder=tmp_path, bucket=1000 / MIB)
    for _ in range(2):  # the second time into the same files
        held = transfer.stage(params)
        found = staged(transfer, dtype)
        assert held == sum(array.nbytes for array in found.values())
        assert_holds(found, shape, params, dtype)
        params = random_params(shape, seed=1)
    assert list(tmp_path.iterdir())
    transfer.close()
    assert not list(tmp_path.iterdir())


def test_buckets_respect_their_size_limit():
    for limit in (1, 500, 2000, 10**9):
        buckets = hf.buckets_of(SHAPE, "float32", limit)
        tensors = itertools.chain.from_iterable(zip(b.names, b.shapes) for b in buckets)
        assert [*tensors] == [*hf.shapes(SHAPE).items()]
        for bucket in buckets:
            assert bucket.size <= limit or len(bucket.names) == 1
            sizes = [4 * math.prod(shape) for shape in bucket.shapes]
            assert [*bucket.offsets, bucket.size] == [0, *itertools.accumulate(sizes)]
    assert len(buckets) == 1


def test_a_folder_that_cannot_hold_the_weights_is_reported(tmp_path):
    with pytest.raises(TransferError, match="nowhere cannot hold the weights"):
        SharedMemory(SHAPE, dtype="float32", folder=tmp_path / "nowhere")


def test_the_comparison_distinguishes_old_weights_from_new_ones():
    new, old = np.array([-1.0, -2.0, -3.0]), np.array([-1.01, -2.01, -3.01])
    problem = lambda *scores, noise=1e-6: compare(*scores, tolerance=1e-3, noise=noise)[2]
    assert problem(new, old, new + 1e-5) == ""
    assert "still has the old weights" in problem(new, old, old)
    assert "does not answer" in problem(new, None, old)
    # If the update is smaller than the tolerance, the server must be closer to the new weights.
    near = new + 1e-4
    assert "before the update" in problem(near, new, new)
    assert problem(near, new, near) == ""
    # If the update is smaller than rounding, the two cannot be distinguished, so there is no
    # problem.
    assert problem(near, new, new, noise=1e-4) == ""
    assert problem(new, old, np.full(3, np.nan)) != ""


def launched(make: str) -> tuple[subprocess.Popen[str], str]:
    """Launch a stand-in of a server; return the launcher and the text that `make` gives there."""
    code = f"""
import os, time
from multiprocessing.shared_memory import SharedMemory
memory = SharedMemory(create=True, size=64)
print({make}, flush=True)
time.sleep(600)
"""
    command = [sys.executable, str(PLUGIN / "launch.py"), sys.executable, "-c", code]
    launcher = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    return launcher, launcher.stdout.readline().strip()


def test_a_server_that_ends_leaves_no_shared_memory():
    launcher, name = launched("memory.name")
    memory = Path("/dev/shm", name.lstrip("/"))
    assert memory.exists()
    launcher.stdin.close()
    launcher.wait(30)
    assert not memory.exists()


def test_a_server_ends_when_its_launcher_is_killed():
    launcher, pid = launched("os.getpid()")
    server = Path("/proc", pid, "cmdline")
    launcher.kill()
    launcher.wait(30)
    assert wait_until(lambda: not server.exists() or not server.read_bytes(), 30)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_server_that_hangs_ends_although_its_launcher_is_told_to_end(number):
    """`timeout`, `kill -- -PID` and schedulers tell the whole process group."""
    deaf = "__import__('signal').signal(15, __import__('signal').SIG_IGN)"
    launcher, pid = launched(f"({deaf}, os.getpid())[1]")
    launcher.send_signal(number)
    with pytest.raises(subprocess.TimeoutExpired):
        launcher.wait(0.5)
    launcher.stdin.close()
    launcher.wait(60)
    assert not Path("/proc", pid).exists()
