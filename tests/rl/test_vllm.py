"""The vLLM engine over real HTTP, against servers without a model: routing, faults, weights, start-up."""

import asyncio
import dataclasses
import sys

import numpy as np
import pytest

from models import hf, qwen
from rl.engines import ContextFull, EngineFault
from rl.engines.transfer import UPDATE, SharedMemory, TransferError, buckets_of
from rl.engines.vllm import Patience, VllmEngine, WeightsNotLoaded
from rl.engines.vllm_check import proof
from rl.engines.vllm_servers import OwnServers, Servers, ServerStartError, first_error
from rl.engines.vllm_wire import COMPLETIONS, GENERATE
from rl.trajectory import Sampling
from tests.rl.fake_vllm import LENGTH, VOCAB, Fake, logp_of, token_of
from tests.rl.vllm_setup import random_params

SHAPE = qwen.Config(VOCAB, 8, 1, 1, 1, 8, 16)
QUICK = Patience(busy=4, delay=0.01, longest=0.05, beat=0.1, silence=3, alone=60.0)


def weights(value: float) -> qwen.Params:
    params = random_params(SHAPE)
    return params | {"norm": np.full_like(params["norm"], value)}


def score(params, ids):
    return np.array([logp_of(token, i, float(params["norm"][0])) for i, token in enumerate(ids) if i])


class Stand:
    """Fake servers and an engine on them."""

    def __init__(
        self,
        tmp_path,
        servers=2,
        *,
        transfer=True,
        temperature=1.0,
        in_flight="finish",
        key="",
        patience=QUICK,
        **knobs,
    ):
        self.fakes = [Fake(**knobs) for _ in range(servers)]
        self.lines: list[str] = []
        folder = SharedMemory(SHAPE, dtype="float32", folder=tmp_path, bucket_bytes=2048) if transfer else None
        self.engine = VllmEngine(
            Servers([fake.url for fake in self.fakes], model="policy", key=key), vocab=VOCAB, length=LENGTH,
            transfer=folder, score=score, patience=patience, say=self.lines.append, temperature=temperature,
            in_flight=in_flight,
        )  # fmt: skip

    def run(self, scenario):
        """Start, load version 0, play, close."""

        async def all_of_it():
            try:
                await self.engine.start()
                await self.engine.load(weights(0.0), 0)
                return await scenario(self.engine)
            finally:
                await self.engine.close()

        try:
            return asyncio.run(all_of_it())
        finally:
            for fake in self.fakes:
                fake.silent = False
                fake.die()


def ask(engine, number, *, tokens=6, session=None, **sampling):
    return engine.generate(
        [number % VOCAB, 3], Sampling(tokens, seed=number, **sampling), session=session or str(number)
    )


def expected(number, tokens=6):
    return [token_of(number, 2 + i) for i in range(tokens)]


@pytest.mark.parametrize("paths", [(GENERATE, *UPDATE), (COMPLETIONS, *UPDATE)])
def test_what_was_sampled_comes_back_with_its_log_probabilities_and_version(tmp_path, paths):
    async def scenario(engine):
        await engine.load(weights(0.5), 7)
        return await asyncio.gather(*(ask(engine, i) for i in range(20)))

    completions = Stand(tmp_path, paths=paths).run(scenario)
    for i, completion in enumerate(completions):
        assert completion.tokens == expected(i) and completion.stop == "length" and completion.version == 7
        assert completion.logprobs == [logp_of(t, 2 + k, 0.5) for k, t in enumerate(completion.tokens)]


def test_a_session_stays_with_its_replica_and_new_ones_are_spread(tmp_path):
    async def scenario(engine):
        for turn in range(3):
            await asyncio.gather(*(ask(engine, i + turn, session=f"s{i}") for i in range(10)))
        for i in range(5):
            await engine.release(f"s{i}")
        assert sum(replica.sessions for replica in engine._replicas) == 5

    stand = Stand(tmp_path)
    stand.run(scenario)
    per_replica = [sum(path == GENERATE for path in fake.asked) for fake in stand.fakes]
    assert abs(per_replica[0] - per_replica[1]) == 0


def test_stop_tokens_end_a_sample_and_are_part_of_it(tmp_path):
    stop = expected(1)[3]
    completion = Stand(tmp_path, 1).run(lambda engine: ask(engine, 1, stop_tokens=(stop,)))
    assert completion.stop == "stop" and completion.tokens == expected(1)[:4]


def test_a_dead_replica_is_taken_out_and_its_requests_move(tmp_path):
    async def scenario(engine):
        for fake in stand.fakes:
            fake.seconds = 0.5
        running = asyncio.gather(*(ask(engine, i) for i in range(12)))
        await asyncio.sleep(0.2)
        await asyncio.to_thread(stand.fakes[0].die)
        return await running

    stand = Stand(tmp_path)
    completions = stand.run(scenario)
    assert [c.tokens for c in completions] == [expected(i) for i in range(12)]
    stats = stand.engine.stats()
    assert stats["moved"] == 6 and stats["lost"] == 1
    assert any("replica 0 is out" in line for line in stand.lines)


def test_a_hanging_replica_is_found_out_and_comes_back_with_the_present_weights(tmp_path):
    async def scenario(engine):
        stand.fakes[0].silent = True
        completions = await asyncio.gather(*(ask(engine, i) for i in range(8)))
        assert engine.stats()["replicas"] == 1
        await engine.load(weights(0.25), 1)  # while it is away
        stand.fakes[0].silent = False
        async with asyncio.timeout(20):
            while engine.stats()["replicas"] < 2:
                await asyncio.sleep(0.05)
        return completions, await asyncio.gather(*(ask(engine, i) for i in range(8, 12)))

    stand = Stand(tmp_path)
    before, after = stand.run(scenario)
    assert [c.tokens for c in before] == [expected(i) for i in range(8)]
    assert {c.version for c in after} == {1} and stand.engine.stats()["readmitted"] == 1
    assert stand.fakes[0].weight == stand.fakes[1].weight == 0.25


def test_without_any_server_the_run_ends_and_says_why(tmp_path):
    async def scenario(engine):
        await asyncio.to_thread(stand.fakes[0].die)
        with pytest.raises(EngineFault, match=r"no server is left: http.*Connect"):
            await ask(engine, 1)

    stand = Stand(tmp_path, 1, patience=dataclasses.replace(QUICK, alone=0.5))
    stand.run(scenario)


@pytest.mark.parametrize("statuses,survives", [([429, 503, 500], True), ([429] * 9, False)])
def test_refusals_are_waited_out_and_counted_within_bounds(tmp_path, statuses, survives):
    async def scenario(engine):
        stand.fakes[0].refuse = list(statuses)
        if survives:
            assert (await ask(engine, 1)).tokens == expected(1)
        else:
            with pytest.raises(EngineFault, match="given up after 5 refusals"):
                await ask(engine, 1)
        assert engine.stats()["refused"] == min(len(statuses), 5)

    stand = Stand(tmp_path, 1)
    stand.run(scenario)


def test_a_restarted_server_with_weights_that_nobody_gave_it_is_not_believed(tmp_path):
    async def scenario(engine):
        stand.fakes[0].version, stand.fakes[0].weight = "default", 9.0
        completion = await ask(engine, 1)
        assert engine.stats()["unknown_weights"] == 1
        return completion

    stand = Stand(tmp_path, 1)
    completion = stand.run(scenario)  # it was given them again
    assert completion.version == 0 and completion.logprobs[0] == logp_of(expected(1)[0], 2, 0.0)


def test_requests_that_an_update_cuts_are_continued_by_the_new_weights(tmp_path):
    async def scenario(engine):
        stand.fakes[0].seconds = 60.0
        before = len(stand.fakes[0].prompts)
        running = asyncio.gather(*(ask(engine, i, tokens=20) for i in range(4)))
        async with asyncio.timeout(20):
            while len(stand.fakes[0].prompts) < before + 4:
                await asyncio.sleep(0.02)
        stand.fakes[0].seconds = 0.0
        await engine.load(weights(1.0), 1)
        return await running

    stand = Stand(tmp_path, 1, in_flight="cut")
    completions = stand.run(scenario)
    for i, completion in enumerate(completions):
        assert completion.version == 0 and len(completion.tokens) == len(completion.logprobs) == 20
        assert completion.tokens[:10] == expected(i, 10) and stand.engine.stats()["cut"] == 4
        new = [logp_of(t, 12 + k, 1.0) for k, t in enumerate(completion.tokens[10:])]
        assert completion.logprobs[10:] == new


def test_a_server_that_does_not_use_its_new_weights_is_found_out_within_the_update(tmp_path):
    async def scenario(engine):
        for fake in stand.fakes:
            fake.deaf = True
        with pytest.raises(WeightsNotLoaded, match="it still has the old ones"):
            await engine.load(weights(0.5), 1)

    stand = Stand(tmp_path)
    stand.run(scenario)


def test_cancelled_requests_leave_nothing_behind(tmp_path):
    async def scenario(engine):
        stand.fakes[0].seconds = 0.4
        task = asyncio.create_task(ask(engine, 1))
        await asyncio.sleep(0.1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert not engine._replicas[0].running
        return await ask(engine, 2, session="1")

    stand = Stand(tmp_path, 1)
    assert stand.run(scenario).tokens == expected(2)


def test_requests_that_make_no_sense_are_refused_before_they_are_sent(tmp_path):
    async def scenario(engine):
        with pytest.raises(ContextFull):
            await ask(engine, 1, tokens=LENGTH)
        for prompt, tokens in ([], 5), ([VOCAB], 5), ([1], 0):
            with pytest.raises(ValueError):
                await engine.generate(prompt, Sampling(tokens), session="s")

    Stand(tmp_path, 1).run(scenario)


# --- start-up --------------------------------------------------------------------------------------------------------

BAD = {
    "a wrong model name": ({"model": "other"}, "serves 'other', not 'policy'"),
    "a small context": ({"length": 64}, "has a context of 64 tokens, config.rollout.context asks for 128"),
    "no weight transfer": ({"paths": (GENERATE, "/pause")}, "takes no weights, it lacks /finish_weight_update"),
    "no token ids": ({"strip": ("token_ids",)}, "without token ids or log-probabilities"),
    "no log-probabilities": (
        {"strip": ("logprobs",), "paths": (COMPLETIONS, *UPDATE)},
        "without token ids or log-prob",
    ),
    "a smaller vocabulary": ({"vocab": 40}, "has a smaller vocabulary than the policy's 50"),
    "a larger vocabulary": ({"vocab": 60}, "has a larger vocabulary than the policy's 50"),
    "another temperature": ({"raw": True}, "start it with --logprobs-mode processed_logprobs"),
    "a wrong key": ({"secret": "right"}, "refuses the key"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_server_that_will_not_do_is_named_at_start_up(tmp_path, name):
    knobs, words = BAD[name]
    with pytest.raises(EngineFault, match="the servers cannot be used") as error:
        Stand(tmp_path, 1, temperature=0.7, key="not-the-key", **knobs).run(None)
    assert words in str(error.value) and "not-the-key" not in str(error.value)


def test_every_bad_server_is_in_one_message(tmp_path):
    stand = Stand(tmp_path, 2)
    stand.fakes[0].model, stand.fakes[1].length = "other", 64
    with pytest.raises(EngineFault) as error:
        stand.run(None)
    assert "'other'" in str(error.value) and "64 tokens" in str(error.value)


def test_an_address_without_a_server_is_named():
    engine = VllmEngine(
        Servers(["http://127.0.0.1:9/v1"], model="policy"), vocab=VOCAB, length=LENGTH, transfer=None, score=score
    )

    async def start():
        try:
            await engine.start()
        finally:
            await engine.close()

    with pytest.raises(EngineFault, match=r"http://127.0.0.1:9: nothing answers there"):
        asyncio.run(start())


def test_servers_that_keep_their_weights_are_proven_to_be_those_of_the_policy(tmp_path):
    stand = Stand(tmp_path, 1, transfer=False, paths=(COMPLETIONS,))
    assert stand.run(lambda engine: ask(engine, 3)).tokens == expected(3)
    stand = Stand(tmp_path, 1, transfer=False, paths=(COMPLETIONS,), weight=0.5)
    with pytest.raises(WeightsNotLoaded, match="does not answer with the weights"):
        stand.run(lambda engine: ask(engine, 3))


def test_a_server_that_dies_while_starting_is_reported_with_its_first_error(tmp_path):
    crash = "import sys; print('INFO fine'); print('ValueError: no such device 7', file=sys.stderr); sys.exit(3)"
    (tmp_path / "vllm").mkdir()
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} -c "{crash}"\n')
    python.chmod(0o755)
    servers = OwnServers(
        python=str(python), checkpoint=tmp_path, logs=tmp_path / "logs", length=64, dtype="float32", sequences=4
    )
    with pytest.raises(
        ServerStartError, match=r"ended while starting: ValueError: no such device 7\n  log: .*vllm-0.log"
    ):
        asyncio.run(servers.start())
    python.write_text(python.read_text().replace("device 7", "device 8"))
    with pytest.raises(ServerStartError, match="no such device 8"):  # not the older one in the same log
        asyncio.run(servers.start())


def test_the_first_error_of_a_log_is_the_end_of_its_first_traceback():
    log = (
        "INFO 11-20 all well\n(Worker pid=7) ERROR 11-20 19:43:51 [core.py:12] Traceback (most recent call last):\n"
        '(Worker pid=7) ERROR 11-20 19:43:51 [core.py:12]   File "x.py", line 3\n'
        "(Worker pid=7) ERROR 11-20 19:43:51 [core.py:12] RuntimeError: head_dim=16 is not supported\n"
        "RuntimeError: Engine core initialization failed\n"
    )
    assert first_error(log) == "RuntimeError: head_dim=16 is not supported"
    assert first_error("just this\n") == "just this" and first_error("") == "its log is empty"


# --- weights ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("tied", [True, False])
def test_staged_buckets_hold_the_checkpoint(tmp_path, dtype, tied):
    shape = qwen.Config(VOCAB, 8, 2, 2, 1, 4, 16, tied=tied)
    params = random_params(shape)
    transfer = SharedMemory(shape, dtype=dtype, folder=tmp_path, bucket_bytes=1000)
    for _ in range(2):  # again, into the same files
        held = transfer.stage(params)
        found = {}
        for body in transfer.updates():
            info = body["update_info"]
            raw = np.fromfile(info["path"], np.uint8)
            assert len(raw) == info["size"]
            for name, kind, size, offset in zip(info["names"], info["dtypes"], info["shapes"], info["offsets"]):
                bits = np.uint16 if kind == "bfloat16" else np.uint32
                found[name] = (
                    raw[offset:].view(np.uint8)[: int(np.prod(size)) * bits().itemsize].view(bits).reshape(size)
                )
        assert held >= sum(array.nbytes for array in found.values())
        expected_ = dict(hf.to_hf(shape, params))
        assert list(found) == list(expected_)
        for name, array in expected_.items():
            bits = np.asarray(array, dtype=hf.DTYPES["BF16" if dtype == "bfloat16" else "F32"])
            np.testing.assert_array_equal(found[name], np.ascontiguousarray(bits).view(found[name].dtype), name)
        params = {name: value for name, value in random_params(shape, seed=1).items()}
    assert list(tmp_path.iterdir())
    transfer.close()
    assert not list(tmp_path.iterdir())


def test_buckets_are_as_large_as_allowed_and_no_larger():
    for limit in (1, 500, 2000, 10**9):
        buckets = buckets_of(SHAPE, "float32", limit)
        names = [slot.name for bucket in buckets for slot in bucket.slots]
        assert names == [name for name, _ in hf.shapes(SHAPE)]
        assert all(bucket.size <= limit or len(bucket.slots) == 1 for bucket in buckets)
        assert all(slot.offset % 64 == 0 for bucket in buckets for slot in bucket.slots)
    assert len(buckets) == 1


def test_a_folder_without_room_is_named(tmp_path):
    with pytest.raises(TransferError, match="nowhere cannot hold the weights"):
        SharedMemory(SHAPE, dtype="float32", folder=tmp_path / "nowhere")


def test_a_proof_knows_old_weights_from_new_ones():
    new, old = np.array([-1.0, -2.0, -3.0]), np.array([-1.01, -2.01, -3.01])
    keep = dict(tolerance=1e-3, noise=1e-6)
    assert proof(new, old, new + 1e-5, **keep)[2] == ""
    assert "still has the old ones" in proof(new, old, old, **keep)[2]
    assert "does not answer" in proof(new, None, old, **keep)[2]
    # An update smaller than the tolerance: the server has to be nearer to the new weights.
    near = new + 1e-4
    assert "before the update" in proof(near, new, new, **keep)[2]
    assert proof(near, new, near, **keep)[2] == ""
    # Smaller than rounding: nothing can be told, so nothing is claimed.
    assert proof(near, new, new, tolerance=1e-3, noise=1e-4)[2] == ""
    assert proof(new, old, np.full(3, np.nan), **keep)[2] != ""
