"""The JAX engine: samples and log-probabilities match the model, independent of the rest of the
batch."""

import asyncio
import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from envs.world import Evaluation, Observation, StepResult, Task, World
from models import qwen
from models.tokenizer import train_bpe
from rl.contexts import Limits
from rl.engines import ContextFull, EngineFault
from rl.engines.jax import decoding
from rl.engines.jax.engine import JaxEngine
from rl.rollout import Actor, Job, Worlds, rollouts
from rl.trajectory import Sampling

CONFIG = qwen.Config(vocab=96, d_model=32, layers=2, heads=4, kv_heads=2, head_dim=8, d_ff=64)
CONTEXT = 128
COUNTS = (
    "requests",
    "evictions",
    "generated_tokens",
    "reused_tokens",
    "shared_tokens",
    "prefill_tokens",
    "decode_steps",
)


@functools.cache
def params(seed=0):
    return qwen.init(CONFIG, seed)


def make(slots=4, params=params, **options):
    # Prompt pieces of 16 give one shape each for prefill and decode; compilation dominates the time
    # of these tests.
    options = {"context": CONTEXT, "decode_block": 8, "prefill": 16} | options
    return JaxEngine(CONFIG, params(), slots=slots, **options)


@jax.jit
def all_logp(weights, tokens, temperature):
    n = tokens.shape[0]
    h = qwen.hidden(
        CONFIG, weights, tokens[None], jnp.arange(n)[None], jnp.ones((1, n), jnp.int32)
    )[0]
    return jax.nn.log_softmax(h @ qwen.unembed(CONFIG, weights) / temperature)


def teacher_forced(prompt, completion, temperature, weights=None):
    """Return (log-probabilities of the completion's tokens, the most probable token at each
    position)."""
    ids = [*prompt, *completion]
    padded = np.pad(
        np.array(ids, np.int32), (0, CONTEXT - len(ids))
    )  # the model is causal, so padding behind has no effect
    logp = np.asarray(all_logp(weights or params(), padded, temperature or 1.0))[
        len(prompt) - 1 : len(ids) - 1
    ]
    return logp[np.arange(len(completion)), completion], logp.argmax(-1)


def prompt_of(*key, n=20):
    return np.random.default_rng(key).integers(0, CONFIG.vocab, n).tolist()


async def episode(
    engine,
    name,
    *,
    turns=3,
    temperature=1.0,
    observation=5,
    max_tokens=11,
    key=None,
    seed=None,
    **sampling,
):
    """Play a session of several turns; return [(prompt, completion)]."""
    key = name if key is None else key
    ids, history = prompt_of(key, n=10 + key % 7), []
    for turn in range(turns):
        request = Sampling(
            max_tokens=max_tokens - key % 3,
            temperature=temperature,
            seed=100 * (key if seed is None else seed) + turn,
            **sampling,
        )
        completion = await engine.generate(ids, request, session=str(name))
        history.append((ids, completion))
        ids = ids + completion.tokens + prompt_of(key, turn, n=observation)
    return history


def play(engine, *episodes):
    async def main():
        return await asyncio.gather(*(episode(engine, **e) for e in episodes))

    return asyncio.run(main())


def ask(engine, prompt, session="s", **sampling):
    return asyncio.run(
        engine.generate(prompt, Sampling(**{"max_tokens": 8} | sampling), session=session)
    )


def same(a, b, atol=1e-5):
    assert [c.tokens for _, c in a] == [c.tokens for _, c in b]
    for (_, x), (_, y) in zip(a, b):
        np.testing.assert_allclose(x.logprobs, y.logprobs, atol=atol)


# --- samples --------------------------------------------------------------------------------------


def test_logprobs_equal_teacher_forcing_over_turns_and_greedy_is_argmax():
    engine = make()
    kinds = [1.0, 0.0, 0.7, 1.3]
    for history, t in zip(
        play(engine, *({"name": i, "temperature": t} for i, t in enumerate(kinds))), kinds
    ):
        for prompt, completion in history:
            logp, best = teacher_forced(prompt, completion.tokens, t)
            np.testing.assert_allclose(completion.logprobs, logp, atol=1e-5)
            assert t > 0 or completion.tokens == best.tolist()
    assert engine.stats()["reused_tokens"] > 0, "later turns prefill only what is new"


def test_decoding_in_place_as_on_an_accelerator_gives_the_same_samples():
    episodes = [{"name": i} for i in range(6)]
    expected = play(make(slots=8, context=256), *episodes)
    engine = make(slots=8, context=256)
    shapes = engine._runner.shapes
    shapes.in_place, shapes.copied, shapes.decoded = True, [2], [2, 8]
    for one, other in zip(play(engine, *episodes), expected):
        same(one, other)
    compiled = engine._runner.compiled
    shapes = {(window, shape[0]) for name, window, shape, *_ in compiled if name == "decode"}
    assert {8} <= {rows for _, rows in shapes} <= {2, 8} and min(shapes)[0] < 256


def test_a_large_model_decodes_all_rows_in_one_call(monkeypatch):
    episodes = [{"name": i} for i in range(6)]
    expected = play(make(slots=40), *episodes)
    monkeypatch.setattr("rl.engines.jax.runner.SMALL", 0)
    engine = make(slots=40)
    for one, other in zip(play(engine, *episodes), expected):
        same(one, other)
    play(engine, *({"name": i, "turns": 1} for i in range(100, 140)))
    rows = {shape[2][0] for shape in engine._runner.compiled if shape[0] == "decode"}
    assert 40 in rows and rows <= {4, 10, 40}


def test_matrices_may_be_coarser_than_the_computation():
    rounded = jax.tree.map(
        lambda a: a.astype(jnp.bfloat16).astype(jnp.float32) if a.ndim > 2 else a, params()
    )
    rounded["embed"] = rounded["embed"].astype(jnp.bfloat16).astype(jnp.float32)
    engine = make(params=lambda: rounded, weight_dtype=jnp.bfloat16)
    assert {str(a.dtype) for a in jax.tree.leaves(engine._runner.weights) if a.ndim > 1} == {
        "bfloat16"
    }
    assert {str(a.dtype) for a in jax.tree.leaves(engine._runner.weights) if a.ndim == 1} == {
        "float32"
    }
    for prompt, completion in play(engine, {"name": 3, "temperature": 1.0})[0]:
        logp, _ = teacher_forced(prompt, completion.tokens, 1.0, rounded)
        np.testing.assert_allclose(completion.logprobs, logp, atol=0.02)
        assert np.abs(completion.logprobs - logp).max() > 1e-6, (
            "the products' other factors are rounded too"
        )


def test_an_untied_model_with_normalised_queries():
    config = qwen.Config(**vars(CONFIG) | {"tied": False, "qk_norm": True, "qkv_bias": False})
    weights = qwen.init(config, 1)
    engine = JaxEngine(config, weights, slots=2, context=64, decode_block=8, prefill=16)
    prompt = prompt_of(3)
    completion = ask(engine, prompt, temperature=0.0)
    ids = np.array([prompt + completion.tokens])
    h = jax.jit(qwen.hidden, static_argnums=0)(
        config, weights, ids, np.arange(28)[None], np.ones_like(ids)
    )[0]
    logp = jax.nn.log_softmax(h @ qwen.unembed(config, weights))[19:27]
    assert completion.tokens == logp.argmax(-1).tolist()
    np.testing.assert_allclose(completion.logprobs, logp.max(-1), atol=1e-5)


def test_a_turn_on_cached_tokens_equals_a_fresh_prefill():
    kept = play(make(), {"name": 1})[0]
    fresh = make()
    again = [
        (p, ask(fresh, p, f"new {i}", max_tokens=10, seed=100 + i)) for i, (p, _) in enumerate(kept)
    ]
    same(kept, again)


def test_a_sample_does_not_depend_on_the_rest_of_the_batch():
    alone = play(make(), {"name": 5})[0]
    for engine in (make(), make(threaded=True), make(slots=2), make(leave=1.0), make(slots=40)):
        crowd = play(
            engine, *({"name": i, "turns": 1 + i % 3} for i in (3, 4)), {"name": 5}, {"name": 6}
        )
        same(alone, crowd[2])


def test_a_diverging_prompt_reuses_the_common_prefix():
    engine = make()
    prompt = prompt_of(0, n=30)
    ask(engine, prompt)
    before = engine.stats()
    other = prompt[:21] + [(prompt[21] + 1) % CONFIG.vocab] + prompt[22:]
    completion = ask(engine, other)
    assert engine.stats()["reused_tokens"] - before["reused_tokens"] == 21
    np.testing.assert_allclose(
        completion.logprobs, teacher_forced(other, completion.tokens, 1.0)[0], atol=1e-5
    )
    assert ask(engine, prompt).tokens == ask(make(), prompt).tokens


def test_prompts_longer_than_a_prefill_piece():
    prompt = prompt_of(1, n=100)
    for size in (16, 64):
        completion = ask(make(prefill=size), prompt)
        np.testing.assert_allclose(
            completion.logprobs, teacher_forced(prompt, completion.tokens, 1.0)[0], atol=1e-5
        )


def test_stop_tokens_end_a_generation_and_are_part_of_it():
    free = ask(make(), prompt_of(2), max_tokens=30, seed=3)
    assert free.stop == "length" and len(free.tokens) == 30
    stop = free.tokens[17]
    cut = ask(make(), prompt_of(2), max_tokens=30, seed=3, stop_tokens=(95, stop))
    first = min(free.tokens.index(t) for t in (95, stop) if t in free.tokens)
    assert (cut.stop, cut.tokens) == ("stop", free.tokens[: first + 1])
    at_once = ask(make(), prompt_of(2), max_tokens=30, seed=3, stop_tokens=(free.tokens[0],))
    assert (at_once.stop, at_once.tokens) == ("stop", free.tokens[:1])
    last = ask(make(), prompt_of(2), max_tokens=first + 1, seed=3, stop_tokens=(95, stop))
    assert last.stop == "stop", "a stop token in the last place is a stop"


def test_a_seed_determines_the_sample():
    a, b, c = (
        ask(make(), prompt_of(4), seed=s, max_tokens=20).tokens for s in (2**62 + 1, 2**62 + 1, 1)
    )
    assert a == b != c, "all 63 bits of the seed count"


# --- sampling -------------------------------------------------------------------------------------


def draw(n, seed=0, temperature=1.0, top_p=1.0, top_k=0):
    seeds = np.stack([np.arange(n), np.full(n, seed)], 1).astype(np.uint32)
    full = lambda x, dtype: np.full(n, x, dtype)
    return decoding.Draw(
        full(temperature, np.float32),
        full(top_p, np.float32),
        full(top_k, np.int32),
        seeds,
        full(0, np.int32),
    )


sample = jax.jit(decoding.sample, static_argnames="truncate")


@pytest.mark.parametrize("vocab", [5, 37, 300])
@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_frequencies_follow_the_distribution(vocab, temperature):
    n = 20_000
    logits = np.random.default_rng(0).normal(size=vocab).astype(np.float32) * 2
    token, logp = sample(np.tile(logits, (n, 1)), draw(n, temperature=temperature), truncate=False)
    want = np.asarray(jax.nn.log_softmax(logits / temperature))
    np.testing.assert_allclose(logp, want[token], atol=1e-5)
    counts = np.bincount(token, minlength=vocab)
    p = np.exp(want)
    assert np.all(np.abs(counts - n * p) < 5 * np.sqrt(n * p * (1 - p)) + 3)


def supported(logits, top_p, top_k):
    """Return the tokens kept by top-k followed by top-p, computed from their definitions."""
    order = np.argsort(-logits, kind="stable")
    order = order[: top_k or None]
    p = np.exp(logits[order].astype(np.float64))
    p /= p.sum()
    return set(order[np.concatenate([[0.0], np.cumsum(p)[:-1]]) < top_p].tolist())


@pytest.mark.parametrize(
    "top_p,top_k", [(0.5, 0), (0.9, 0), (1.0, 3), (0.8, 6), (1e-6, 0), (1.0, 1), (1.0, 999)]
)
def test_top_p_and_top_k_keep_exactly_their_support(top_p, top_k):
    n, logits = 4000, np.random.default_rng(1).normal(size=23).astype(np.float32)
    token, logp = sample(np.tile(logits, (n, 1)), draw(n, top_p=top_p, top_k=top_k), truncate=True)
    assert set(np.asarray(token).tolist()) == supported(logits, top_p, top_k)
    np.testing.assert_allclose(
        logp, jax.nn.log_softmax(logits)[token], atol=1e-5, err_msg="not renormalised"
    )


@given(
    st.integers(1, 70),
    st.integers(0, 2**31),
    st.sampled_from([0.01, 0.3, 1.0]),
    st.integers(0, 5),
    st.booleans(),
)
@settings(max_examples=25, deadline=None)
def test_tokens_of_probability_zero_are_never_sampled(possible, seed, top_p, top_k, truncate):
    """Most logits are -inf, where the cumulative sums are flat; rounding must never select such a
    token."""
    rng = np.random.default_rng(seed)
    logits = np.full((8, 70), -np.inf, np.float32)
    for row in logits:
        row[rng.choice(70, possible, replace=False)] = rng.normal(size=possible) * 10
    token, logp = sample(logits, draw(8, seed, top_p=top_p, top_k=top_k), truncate=truncate)
    assert np.all(np.isfinite(logp)) and np.all(np.isfinite(logits[np.arange(8), token]))


def test_top_k_of_one_is_greedy_in_a_batch_with_other_settings():
    engine = make()
    greedy, narrow, free = play(
        engine,
        {"name": 1, "key": 1, "temperature": 0.0},
        {"name": 2, "key": 1, "top_k": 1},
        {"name": 3, "key": 1},
    )
    assert (
        [c.tokens for _, c in greedy]
        == [c.tokens for _, c in narrow]
        != [c.tokens for _, c in free]
    )
    same(free, play(make(), {"name": 3, "key": 1})[0])


# --- sessions and slots ---------------------------------------------------------------------------


def test_more_sessions_than_slots():
    engine = make(slots=2)
    for history, alone in zip(play(engine, *({"name": i} for i in range(5))), range(5)):
        same(history, play(make(), {"name": alone})[0])
    stats = engine.stats()
    assert stats["evictions"] >= 3 and stats["sessions"] == 2
    assert stats["reused_tokens"] > 100, (
        "sessions in mid-episode are not thrown out for waiting ones"
    )


def test_a_released_or_evicted_session_is_recomputed():
    engine = make(slots=2)
    first = ask(engine, prompt_of(1), "a")
    ask(engine, prompt_of(2), "b")
    ask(engine, prompt_of(3), "c")
    assert ask(engine, prompt_of(1), "a").tokens == first.tokens
    asyncio.run(engine.release("a"))
    asyncio.run(engine.release("never seen"))
    assert (
        "a" not in engine._slots.of_session
        and ask(engine, prompt_of(1), "a").tokens == first.tokens
    )


def test_a_group_prefills_its_common_prompt_once():
    engine, common = make(), prompt_of(9, n=60)

    async def main():
        prompts = [common + prompt_of(i, n=3) for i in range(4)]
        requests = [
            engine.generate(p, Sampling(6, seed=i), session=str(i)) for i, p in enumerate(prompts)
        ]
        return list(zip(prompts, await asyncio.gather(*requests)))

    for prompt, completion in asyncio.run(main()):
        np.testing.assert_allclose(
            completion.logprobs, teacher_forced(prompt, completion.tokens, 1.0)[0], atol=1e-5
        )
    stats = engine.stats()
    assert stats["shared_tokens"] == 3 * 60 and stats["prefill_tokens"] == 63 + 3 * 3
    ask(engine, common + [1, 2], "later")
    assert engine.stats()["prefill_tokens"] == stats["prefill_tokens"] + 2, (
        "idle sessions lend their prefix too"
    )


@pytest.mark.parametrize("slots", [3, 8, 40])
def test_groups_with_prefixes_copied_from_another_slot(slots):
    """The engine must record copied prefixes as content of the slot. Otherwise it would prefill
    every turn again or, if the prompt equals earlier content of the slot, continue from the KV of
    other tokens."""
    engine = make(slots=slots)
    waves = [[{"name": 10 * key + i, "key": key, "seed": 10 * key + i} for key in keys for i in range(4)]
             for keys in ((1, 2), (3, 4), (2, 1))]  # fmt: skip
    for wave in waves:
        before = engine.stats()["prefill_tokens"]
        histories = play(engine, *wave)
        for prompt, completion in (turn for history in histories for turn in history):
            logp, _ = teacher_forced(prompt, completion.tokens, 1.0)
            np.testing.assert_allclose(completion.logprobs, logp, atol=1e-5)
        # A later turn only prefills its observation and the last token sampled before it.
        later = sum(
            len(p) - len(q) - len(c.tokens) + 1
            for h in histories
            for (q, c), (p, _) in itertools.pairwise(h)
        )
        first = sum(len(h[0][0]) for h in histories)
        assert slots < len(wave) or engine.stats()["prefill_tokens"] - before <= later + first


@pytest.mark.parametrize("slots, sessions", [(2, 6), (35, 45)])
def test_two_runs_are_bit_identical(slots, sessions):
    """Covers one bank of slots and several banks in parallel."""

    def run():
        engine = make(slots=slots)
        played = play(engine, *({"name": i, "turns": 2 + i % 3} for i in range(sessions)))
        return [[(p, vars(c)) for p, c in h] for h in played], engine.stats()

    (a, stats_a), (b, stats_b) = run(), run()
    assert a == b and {k: stats_a[k] for k in COUNTS} == {k: stats_b[k] for k in COUNTS}


def test_invalid_requests_are_rejected_and_do_not_affect_others():
    engine = make()
    for prompt, sampling, error, text in [
        ([], {}, ValueError, "empty"),
        ([1], {"max_tokens": 0}, ValueError, "max_tokens"),
        ([96], {}, ValueError, "vocabulary"),
        ([-1], {}, ValueError, "vocabulary"),
        ([1], {"stop_tokens": tuple(range(9))}, ValueError, "stop tokens"),
        ([1], {"stop_tokens": (10**12,)}, ValueError, "a stop token is outside of the vocabulary"),
        (
            [1],
            {"temperature": 1e-30},
            ValueError,
            "temperature is 1e-30; it must be 0, or 1e-05 to 100000",
        ),
        ([1], {"temperature": float("nan")}, ValueError, "temperature is nan"),
        ([1] * 125, {}, ContextFull, "125 prompt tokens and 8 to generate"),
    ]:
        with pytest.raises(error, match=text):
            ask(engine, prompt, **sampling)

    async def twice():
        a = asyncio.create_task(engine.generate([1, 2], Sampling(8), session="s"))
        await asyncio.sleep(0)
        with pytest.raises(ValueError, match="in flight"):
            await engine.generate([1, 2], Sampling(8), session="s")
        return await a

    assert len(asyncio.run(twice()).tokens) == 8
    assert len(ask(engine, [1] * 120).tokens) == 8, "exactly full"
    assert ask(engine, [1], top_k=10**12).tokens == ask(engine, [1]).tokens, (
        "more than there are is all"
    )


# --- weights --------------------------------------------------------------------------------------


def test_new_weights_are_used_without_compilation():
    engine = make()
    old = ask(engine, prompt_of(1), temperature=0.0)
    compiled = (decoding.prefill._cache_size(), decoding.decode._cache_size())
    asyncio.run(engine.load(params(1), 7))
    new = ask(engine, prompt_of(1) + old.tokens + [5], temperature=0.0)
    assert (old.version, new.version) == (0, 7)
    prompt = prompt_of(1) + old.tokens + [5]
    logp, best = teacher_forced(prompt, new.tokens, 0.0, params(1))
    assert new.tokens == best.tolist()
    np.testing.assert_allclose(
        new.logprobs, logp, atol=1e-5, err_msg="KV of the old weights was used"
    )
    assert (decoding.prefill._cache_size(), decoding.decode._cache_size()) == compiled
    assert engine.stats()["loads"] == 1 and engine.stats()["version"] == 7


def test_the_learner_may_donate_its_arrays():
    mine = jax.tree.map(jnp.copy, params())
    engine = make(params=lambda: mine)
    jax.tree.map(lambda a: a.delete(), mine)
    want = ask(make(), prompt_of(1)).tokens
    assert ask(engine, prompt_of(1)).tokens == want
    mine = jax.tree.map(jnp.copy, params())
    asyncio.run(engine.load(mine, 1))
    jax.tree.map(lambda a: a.delete(), mine)
    assert ask(engine, prompt_of(1)).tokens == want


def test_running_requests_finish_on_old_weights_and_waiting_ones_get_the_new():
    engine = make()

    async def main():
        running = asyncio.create_task(
            engine.generate(prompt_of(1), Sampling(40, seed=1), session="a")
        )
        await asyncio.sleep(0)
        for _ in range(6):
            await asyncio.sleep(0)
        load = asyncio.create_task(engine.load(params(1), 1))
        await asyncio.sleep(0)
        late = asyncio.create_task(engine.generate(prompt_of(2), Sampling(5, seed=1), session="b"))
        return await asyncio.gather(running, load, late)

    running, _, late = asyncio.run(main())
    assert (running.version, late.version) == (0, 1)
    np.testing.assert_allclose(
        running.logprobs, teacher_forced(prompt_of(1), running.tokens, 1.0)[0], atol=1e-5
    )
    np.testing.assert_allclose(
        late.logprobs, teacher_forced(prompt_of(2), late.tokens, 1.0, params(1))[0], atol=1e-5
    )


def test_weights_of_another_model_are_rejected():
    engine = make()
    other = qwen.init(qwen.Config(**vars(CONFIG) | {"d_ff": 32}), 0)
    with pytest.raises(ValueError, match="do not match the engine's model"):
        asyncio.run(engine.load(other, 1))
    assert ask(engine, prompt_of(1)).version == 0


# --- faults ---------------------------------------------------------------------------------------


def test_a_cancelled_request_frees_its_slot_and_does_not_affect_others():
    engine = make(slots=2)

    async def main():
        a = asyncio.create_task(engine.generate(prompt_of(1), Sampling(90), session="a"))
        waiting = asyncio.create_task(engine.generate(prompt_of(2), Sampling(90), session="b"))
        for _ in range(10):
            await asyncio.sleep(0)
        assert not a.done()
        a.cancel()
        waiting.cancel()
        await asyncio.gather(a, waiting, return_exceptions=True)
        assert a.cancelled() and waiting.cancelled()
        return await engine.generate(prompt_of(3), Sampling(8), session="c")

    assert asyncio.run(main()).tokens == ask(make(), prompt_of(3)).tokens
    assert engine.stats()["cancelled"] == 2


def test_releasing_a_session_ends_its_request():
    engine = make()

    async def main():
        task = asyncio.create_task(engine.generate(prompt_of(1), Sampling(90), session="a"))
        for _ in range(10):
            await asyncio.sleep(0)
        await engine.release("a")
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())
    assert ask(engine, prompt_of(1), "a").tokens == ask(make(), prompt_of(1)).tokens


@pytest.mark.parametrize("call, slots", [("prefill", 2), ("decode", 2), ("prefill", 40)])
def test_a_fault_fails_all_pending_requests_with_its_reason(monkeypatch, call, slots):
    engine = make(slots=slots)
    want = ask(engine, prompt_of(3)).tokens

    def broken(weights, cache, *args, **kwargs):
        jax.tree.map(lambda a: a.delete(), cache)
        raise RuntimeError("RESOURCE_EXHAUSTED: out of memory")

    async def main():
        tasks = [engine.generate(prompt_of(i), Sampling(8), session=str(i)) for i in range(4)]
        return await asyncio.gather(*tasks, return_exceptions=True)

    with monkeypatch.context() as patch:
        patch.setattr(decoding, call, broken)
        results = asyncio.run(asyncio.wait_for(main(), 60))
    assert [type(r) for r in results] == [EngineFault] * 4 and "out of memory" in str(results[0])
    assert ask(engine, prompt_of(3)).tokens == want, "and the engine goes on when the cause is gone"


def test_weights_that_are_not_finite_are_a_fault():
    engine = make()
    asyncio.run(engine.load(jax.tree.map(lambda a: a * jnp.nan, params()), 3))
    with pytest.raises(EngineFault, match=r"version 3 .* not finite"):
        ask(engine, prompt_of(1))


def test_closing_fails_pending_requests():
    engine = make()

    async def main():
        task = asyncio.create_task(engine.generate(prompt_of(1), Sampling(90), session="a"))
        for _ in range(6):
            await asyncio.sleep(0)
        await engine.close()
        with pytest.raises(EngineFault):
            await task

    asyncio.run(main())


# --- with rollouts --------------------------------------------------------------------------------


class Echo(World):
    """Answers with the start of each action; ends after three."""

    name = "echo"

    def reset(self, task, seed=0):
        self.turns = 0
        return Observation(
            [{"role": "system", "content": "s"}, {"role": "user", "content": task.query}]
        )

    def step(self, action):
        self.turns += 1
        return StepResult([{"role": "tool", "content": action[:4]}], terminated=self.turns == 3)

    def evaluate(self):
        return Evaluation(self.turns / 3, self.turns == 3)


def test_rollouts_are_bit_identical_and_reuse_their_sessions():
    tokenizer = train_bpe(["echo"], 290)
    config = qwen.Config(**vars(CONFIG) | {"vocab": tokenizer.vocab_size})
    weights = qwen.init(config, 0)

    def run():
        engine = JaxEngine(config, weights, slots=4, context=256, decode_block=8, prefill=16)
        jobs = [
            Job(Task(str(g), "echo", "ab" * g), i, 10 * g + i, Sampling(6))
            for g in range(3)
            for i in range(2)
        ]
        limits = Limits(4, 512, context=256, max_observation=1024, timeout=600.0, env_timeout=60.0)
        actor = Actor(engine, tokenizer, limits, cut_turn="continue")
        done = asyncio.run(rollouts(jobs, actor, Worlds(Echo), concurrency=4))
        return [dataclasses.asdict(t) for t in done], engine.stats()

    (a, stats), (b, _) = run(), run()
    assert a == b and [len(t["turns"]) for t in a] == [3] * 6
    assert stats["sessions"] == 0, "episodes release their sessions"
    prompts = sum(len(turn["prompt"]) for t in a for turn in t["turns"])
    assert stats["prefill_tokens"] + stats["reused_tokens"] + stats["shared_tokens"] == prompts
    assert stats["prefill_tokens"] < 0.7 * prompts
    assert len({tuple(t["turns"][0]["completion"]["tokens"]) for t in a}) > 1
