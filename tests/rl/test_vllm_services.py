"""The engine against real vLLM servers on the CPU. `make test-services` installs vLLM and runs
these."""

import asyncio
import contextlib
import dataclasses
import itertools
import os
import signal
import subprocess

import numpy as np
import pytest

from rl.engines import EngineFault
from rl.engines.jax.engine import JaxEngine
from rl.engines.vllm.engine import PAUSE, WeightsNotLoaded
from rl.trajectory import Sampling
from tests.rl import vllm_setup as setup

pytestmark = [
    pytest.mark.services,
    pytest.mark.skipif(
        not setup.PYTHON.exists(), reason="no vLLM: `make test-services` installs it"
    ),
]


@pytest.fixture(scope="module")
def runner():
    with asyncio.Runner() as runner:
        yield runner


@pytest.fixture(scope="module", params=["tied", "untied"])
def served(request, tmp_path_factory, runner):
    """(shape, first parameters, engine of two replicas)."""
    folder = tmp_path_factory.mktemp(request.param)
    shape, params = setup.checkpoint(folder, tied=request.param == "tied")
    engine = setup.make_engine(folder, shape, replicas=2, temperature=0.7)
    runner.run(engine.start())
    yield shape, params, engine
    runner.run(engine.close())


@pytest.fixture
def loaded(served, runner):
    """(shape, first parameters, engine that has them again, as its next version)."""
    load(runner, served[2], served[1])
    return served


def load(runner, engine, params):
    runner.run(engine.load(params, engine.version + 1))


PROMPTS = [list(range(10 * i, 10 * i + 30 + i)) for i in range(6)]


async def all_of(engine, sampling, prompts=PROMPTS, name=""):
    return await asyncio.gather(
        *(engine.generate(p, sampling, session=f"{name}{i}") for i, p in enumerate(prompts))
    )


def assert_of_policy(shape, params, prompts, completions, temperature=1.0):
    for prompt, completion in zip(prompts, completions):
        scores = setup.learner_score(shape, params, prompt + completion.tokens, temperature)
        np.testing.assert_allclose(completion.logprobs, scores[len(prompt) - 1 :], atol=1e-4)


@pytest.mark.parametrize("temperature", [0.0, 1.0, 0.7])
def test_greedy_tokens_and_log_probabilities_are_those_of_the_jax_engine(
    loaded, runner, temperature
):
    shape, params, engine = loaded
    sampling = Sampling(max_tokens=40, temperature=temperature, seed=5)
    found = runner.run(all_of(engine, sampling))
    if temperature == 0:
        ours = JaxEngine(shape, params, slots=8, context=setup.CONTEXT)
        expected = runner.run(all_of(ours, sampling))
        assert [c.tokens for c in found] == [c.tokens for c in expected]
        np.testing.assert_allclose(
            [c.logprobs for c in found], [c.logprobs for c in expected], atol=1e-4
        )
    assert_of_policy(shape, params, PROMPTS, found, temperature or 1.0)
    for completion in found:
        assert (completion.version, completion.stop) == (engine.version, "length")
        assert len(completion.tokens) == 40


def test_one_seed_gives_one_sample_on_every_replica_and_stop_tokens_end_it(loaded, runner):
    engine, sampling = loaded[2], Sampling(max_tokens=30, seed=2**62 + 1)
    first, second = runner.run(all_of(engine, sampling, [PROMPTS[0], PROMPTS[0]]))
    assert first.tokens == second.tokens
    stop = first.tokens[7]
    sampling = dataclasses.replace(sampling, stop_tokens=(stop,))
    (cut,) = runner.run(all_of(engine, sampling, PROMPTS[:1]))
    assert cut.stop == "stop" and cut.tokens == first.tokens[: first.tokens.index(stop) + 1]


def test_an_update_changes_the_answers_and_their_version(loaded, runner):
    shape, params, engine = loaded
    greedy = Sampling(max_tokens=20, temperature=0.0)
    before = runner.run(all_of(engine, greedy))
    other = setup.random_params(shape, seed=1)
    load(runner, engine, other)
    after = runner.run(all_of(engine, greedy))
    assert {c.version for c in after} == {engine.version}
    assert [c.tokens for c in before] != [c.tokens for c in after]
    assert_of_policy(shape, other, PROMPTS, after)
    load(runner, engine, params)
    again = runner.run(all_of(engine, greedy))
    assert [c.tokens for c in before] == [c.tokens for c in again]
    assert engine.stats()["gap"] < 1e-5 < engine.stats()["shift"]


def test_servers_sleep_and_wake_with_new_weights_or_for_a_request(loaded, runner, monkeypatch):
    """On a CPU vLLM frees nothing, but stops and goes on as it does on a GPU."""
    shape, _, engine = loaded
    monkeypatch.setattr(engine, "_sleeps", True)
    greedy, other = Sampling(max_tokens=20, temperature=0.0), setup.random_params(shape, seed=5)

    async def sleep():
        await engine.sleep()
        for replica in engine._replicas:
            answer = await replica.server.ask("GET", "/is_sleeping", timeout=30.0)
            assert answer == {"is_sleeping": True}

    runner.run(sleep())
    load(runner, engine, other)
    after = runner.run(all_of(engine, greedy))
    assert {c.version for c in after} == {engine.version}
    assert_of_policy(shape, other, PROMPTS, after)
    runner.run(sleep())
    again = runner.run(all_of(engine, greedy))
    assert [c.tokens for c in after] == [c.tokens for c in again]
    assert engine.stats()["gap"] < 1e-5 and engine.stats()["replicas"] == 2


def test_a_server_that_keeps_its_old_weights_is_detected(loaded, runner, monkeypatch):
    shape, _, engine = loaded

    async def nothing(posts):
        return [None for _ in posts]

    monkeypatch.setattr(engine.transfer, "send", nothing)
    with pytest.raises(WeightsNotLoaded, match="still has the old weights"):
        load(runner, engine, setup.random_params(shape, seed=2))


@pytest.mark.parametrize("in_flight", ["finish", "cut", "keep"])
def test_requests_in_flight_finish_or_are_continued(loaded, runner, in_flight, monkeypatch):
    shape, params, engine = loaded
    monkeypatch.setattr(engine, "_in_flight", PAUSE[in_flight])
    old, other, updated = engine.version, setup.random_params(shape, seed=3), asyncio.Event()

    async def keep_asking(prompt, session):
        """Send requests one after the other until the update is over, so that some are in flight
        when it begins."""
        found = []
        while not updated.is_set():
            sampling = Sampling(max_tokens=200, seed=len(found))
            found.append((prompt, await engine.generate(prompt, sampling, session=session)))
        return found

    async def scenario():
        asking = [
            asyncio.create_task(keep_asking(prompt, f"{i}")) for i, prompt in enumerate(PROMPTS * 2)
        ]
        while not any(replica.running for replica in engine._replicas):
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.3)
        await engine.load(other, old + 1)
        updated.set()
        return list(itertools.chain.from_iterable(await asyncio.gather(*asking)))

    cuts = engine.stats()["cut"]
    answers = runner.run(scenario())
    assert {len(c.tokens) for _, c in answers} == {len(c.logprobs) for _, c in answers} == {200}
    assert old in {c.version for _, c in answers} <= {old, old + 1}
    assert (engine.stats()["cut"] > cuts) == (in_flight == "cut")
    for prompt, completion in answers:
        ids = prompt + completion.tokens
        scores = np.array([setup.learner_score(shape, p, ids)[-200:] for p in (params, other)])
        gaps = np.abs(completion.logprobs - scores)  # to the old version and to the new one
        of_its_version = gaps[completion.version - old]
        if in_flight == "finish":  # all tokens are from the version that the completion names
            assert of_its_version.max() < 1e-4
        elif in_flight == "cut":  # each is from one of the two versions, the first from the older
            assert gaps.min(axis=0).max() < 1e-4 and of_its_version[0] < 1e-4


def test_a_session_finds_its_history_in_the_prefix_cache(loaded, runner):
    engine = loaded[2]

    async def episode(session):
        prompt = list(range(100, 164))
        for turn in range(4):
            completion = await engine.generate(
                prompt, Sampling(max_tokens=16, seed=turn), session=session
            )
            prompt = prompt + completion.tokens + [7] * 16
        await engine.release(session)

    before = engine.stats()
    runner.run(episode("kept"))
    after = engine.stats()
    cached = after["cached_tokens"] - before["cached_tokens"]
    # Prompts have 64, 96, 128 and 160 tokens; all but the first find whole blocks of 32 of earlier
    # tokens.
    assert cached / (after["prompt_tokens"] - before["prompt_tokens"]) > 0.5


def group_of(launcher: int) -> int:
    """Return the process group of the server that a launcher watches."""
    return int(subprocess.check_output(["ps", "-o", "pid=", "--ppid", str(launcher)]).split()[0])


def test_kill_9_of_a_replica_loses_nothing_and_it_is_readmitted_with_the_current_weights(
    served, runner
):
    shape, _, engine = served
    newest = setup.random_params(shape, seed=4)
    load(runner, engine, newest)
    before = engine.stats()

    async def scenario():
        prompts = [PROMPTS[i % 6] for i in range(96)]
        group = group_of(engine._servers._children[0]._process.pid)
        running = asyncio.create_task(all_of(engine, Sampling(max_tokens=200, seed=9), prompts))
        await asyncio.sleep(0.1)
        os.killpg(group, signal.SIGKILL)
        completions = await running
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(1800):
                while engine.stats()["readmitted"] == before["readmitted"]:
                    await asyncio.sleep(0.5)
        fresh = await all_of(engine, Sampling(max_tokens=5), PROMPTS, "fresh ")
        return prompts, completions, fresh

    prompts, completions, fresh = runner.run(scenario())
    after = engine.stats()
    version = engine.version
    assert [(len(c.tokens), c.version) for c in completions] == [(200, version)] * 96
    assert_of_policy(shape, newest, prompts, completions)
    assert after["moved"] > before["moved"] and after["replicas"] == 2
    assert after["readmitted"] == before["readmitted"] + 1
    assert {c.version for c in fresh} == {version}
    # The other replica keeps its sessions; the readmitted one takes new sessions until it has as
    # many.
    assert engine._of_session["fresh 0"] is engine._replicas[0]


def test_a_server_that_cannot_start_reports_the_reason_at_once(tmp_path, runner):
    setup.checkpoint(tmp_path, tied=True)
    config = tmp_path / "config.json"
    config.write_text(config.read_text().replace("Qwen2For", "Nothing2For"))
    engine = setup.make_engine(tmp_path, setup.SHAPE)
    reason = r"vLLM ended while starting: .*Nothing2For.*\n.*vllm-0.log"
    with pytest.raises(EngineFault, match=reason):
        runner.run(engine.start())
