"""The engine against real vLLM servers on the CPU. `make test-services` installs vLLM and runs
these."""

import asyncio
import contextlib
import os
import signal
import subprocess

import numpy as np
import pytest

from rl.engines.jax.engine import JaxEngine
from rl.engines.vllm.engine import WeightsNotLoaded
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
    """(shape, first parameters, engine of two replicas that hold them as version 0)."""
    folder = tmp_path_factory.mktemp(request.param)
    shape, params = setup.checkpoint(folder, tied=request.param == "tied")
    engine = setup.make_engine(folder, shape, replicas=2, temperature=0.7)
    runner.run(engine.start())
    runner.run(engine.load(params, 0))
    yield shape, params, engine
    runner.run(engine.close())


PROMPTS = [list(range(10 * i, 10 * i + 30 + i)) for i in range(6)]


async def all_of(engine, sampling, prompts=PROMPTS, name=""):
    return await asyncio.gather(
        *(engine.generate(p, sampling, session=f"{name}{i}") for i, p in enumerate(prompts))
    )


@pytest.mark.parametrize("temperature", [0.0, 1.0, 0.7])
def test_greedy_tokens_and_log_probabilities_are_those_of_the_jax_engine(
    served, runner, temperature
):
    shape, params, engine = served
    runner.run(engine.load(params, 10))
    sampling = Sampling(max_tokens=40, temperature=temperature, seed=5)
    found = runner.run(all_of(engine, sampling))
    if temperature == 0:
        ours = JaxEngine(shape, params, slots=8, context=setup.CONTEXT)
        expected = runner.run(all_of(ours, sampling))
        assert [c.tokens for c in found] == [c.tokens for c in expected]
        np.testing.assert_allclose(
            [c.logprobs for c in found], [c.logprobs for c in expected], atol=1e-4
        )
    for prompt, completion in zip(PROMPTS, found):
        scores = setup.learner_score(shape, params, prompt + completion.tokens, temperature or 1.0)
        np.testing.assert_allclose(completion.logprobs, scores[len(prompt) - 1 :], atol=1e-4)
        assert (
            completion.version == 10
            and len(completion.tokens) == 40
            and completion.stop == "length"
        )


def test_one_seed_gives_one_sample_on_every_replica_and_stop_tokens_end_it(served, runner):
    _, params, engine = served
    runner.run(engine.load(params, 20))
    sampling = Sampling(max_tokens=30, seed=2**62 + 1)
    first, second = runner.run(all_of(engine, sampling, [PROMPTS[0], PROMPTS[0]]))
    assert first.tokens == second.tokens
    stop = first.tokens[7]
    (cut,) = runner.run(
        all_of(engine, Sampling(30, seed=2**62 + 1, stop_tokens=(stop,)), [PROMPTS[0]])
    )
    assert cut.stop == "stop" and cut.tokens == first.tokens[: first.tokens.index(stop) + 1]


def test_an_update_changes_the_answers_and_their_version(served, runner):
    shape, params, engine = served
    greedy = Sampling(max_tokens=20, temperature=0.0)
    runner.run(engine.load(params, 30))
    before = runner.run(all_of(engine, greedy))
    other = setup.random_params(shape, seed=1)
    runner.run(engine.load(other, 31))
    after = runner.run(all_of(engine, greedy))
    assert {c.version for c in after} == {31}
    assert [c.tokens for c in before] != [c.tokens for c in after]
    for prompt, completion in zip(PROMPTS, after):
        scores = setup.learner_score(shape, other, prompt + completion.tokens)
        np.testing.assert_allclose(completion.logprobs, scores[len(prompt) - 1 :], atol=1e-4)
    runner.run(engine.load(params, 32))
    again = runner.run(all_of(engine, greedy))
    assert [c.tokens for c in before] == [c.tokens for c in again]
    assert engine.stats()["gap"] < 1e-5 < engine.stats()["shift"]


def test_a_server_that_keeps_its_old_weights_is_detected(served, runner, monkeypatch):
    shape, params, engine = served
    runner.run(engine.load(params, 40))

    async def nothing(posts):
        return [None for _ in posts]

    monkeypatch.setattr(engine.transfer, "send", nothing)
    with pytest.raises(WeightsNotLoaded, match="still has the old weights"):
        runner.run(engine.load(setup.random_params(shape, seed=2), 41))
    monkeypatch.undo()
    runner.run(engine.load(params, 42))


@pytest.mark.parametrize("in_flight", ["finish", "cut", "keep"])
def test_requests_in_flight_finish_or_are_continued(served, runner, in_flight):
    shape, params, engine = served
    runner.run(engine.load(params, 50))
    engine._in_flight = {"finish": "wait", "cut": "abort", "keep": "keep"}[in_flight]
    other = setup.random_params(shape, seed=3)

    loaded = asyncio.Event()

    async def keep_asking(prompt, session):
        """Send requests one after the other until the update is over, so that some are in flight
        when it begins."""
        found = []
        while not loaded.is_set():
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
        await engine.load(other, 51)
        loaded.set()
        return [pair for found in await asyncio.gather(*asking) for pair in found]

    cuts = engine.stats()["cut"]
    answers = runner.run(scenario())
    engine._in_flight = "wait"
    completions = [completion for _, completion in answers]
    assert all(len(c.tokens) == len(c.logprobs) == 200 for c in completions)
    assert 50 in {c.version for c in completions} <= {50, 51}
    assert (engine.stats()["cut"] > cuts) == (in_flight == "cut")
    for prompt, completion in answers:
        gap_of = {
            version: np.abs(
                completion.logprobs
                - setup.learner_score(shape, p, prompt + completion.tokens)[-200:]
            )
            for version, p in ((50, params), (51, other))
        }
        if in_flight == "finish":  # all tokens are from the version that the completion names
            assert gap_of[completion.version].max() < 1e-4
        elif (
            in_flight == "cut"
        ):  # every token is from one of the two versions, the first from the older
            assert (
                np.minimum(gap_of[50], gap_of[51]).max() < 1e-4
                and gap_of[completion.version][0] < 1e-4
            )
    runner.run(engine.load(params, 52))


def test_a_session_finds_its_history_in_the_prefix_cache(served, runner):
    _, params, engine = served
    runner.run(engine.load(params, 60))

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
    out = subprocess.run(
        ["ps", "-o", "pid=", "--ppid", str(launcher)], capture_output=True, text=True, check=True
    )
    return int(out.stdout.split()[0])


def test_kill_9_of_a_replica_loses_nothing_and_it_is_readmitted_with_the_current_weights(
    served, runner
):
    shape, _, engine = served
    newest = setup.random_params(shape, seed=4)
    runner.run(engine.load(newest, 70))
    before = engine.stats()

    async def scenario():
        prompts = [PROMPTS[i % 6] for i in range(96)]
        group = group_of(engine._servers._processes[0].pid)
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
    assert len(completions) == 96 and all(
        len(c.tokens) == 200 and c.version == 70 for c in completions
    )
    for prompt, completion in zip(prompts, completions):
        scores = setup.learner_score(shape, newest, prompt + completion.tokens)
        np.testing.assert_allclose(completion.logprobs, scores[len(prompt) - 1 :], atol=1e-4)
    assert after["moved"] > before["moved"] and after["replicas"] == 2
    assert after["readmitted"] == before["readmitted"] + 1
    assert {c.version for c in fresh} == {70}
    # The other replica keeps its sessions; the readmitted one takes new sessions until it has as
    # many.
    assert engine._of_session["fresh 0"] is engine._replicas[0]


def test_a_server_that_cannot_start_reports_the_reason_at_once(tmp_path, runner):
    setup.checkpoint(tmp_path, tied=True)
    (tmp_path / "config.json").write_text(
        (tmp_path / "config.json").read_text().replace("Qwen2For", "Nothing2For")
    )
    from rl.engines import EngineFault

    engine = setup.make_engine(tmp_path, setup.SHAPE)
    with pytest.raises(
        EngineFault, match=r"vLLM ended while starting: .*Nothing2For.*\n.*vllm-0.log"
    ):
        runner.run(engine.start())
