"""The JAX engine: samples and log-probabilities match the model, independent of the rest of the
batch."""

import asyncio
import dataclasses
import functools
import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from models import qwen
from rl.engines import ContextFull, EngineFault, RequestFault
from rl.engines.jax import decoding, runner
from rl.engines.jax import engine as engine_module
from rl.engines.jax.engine import JaxEngine
from rl.trajectory import Sampling

CONFIG = qwen.Config(vocab=96, d_model=32, layers=2, heads=4, kv_heads=2, head_dim=8, d_ff=64)
CONTEXT = 128


@functools.cache
def params(seed=0):
    return qwen.init(CONFIG, seed)


def make(config=CONFIG, weights=None, **options):
    # Prompt pieces of 16 give one shape each for prefill and decode; compilation dominates the time
    # of these tests.
    options = {"slots": 4, "context": CONTEXT, "decode_block": 8, "prefill": 16} | options
    return JaxEngine(config, params() if weights is None else weights, **options)


@functools.partial(jax.jit, static_argnums=0)
def all_logp(config, weights, tokens, temperature):
    places = jnp.arange(len(tokens))[None]
    h = qwen.merge(config, weights).hidden(tokens[None], places, jnp.ones_like(places))[0]
    return jax.nn.log_softmax(h @ qwen.unembed(config, weights) / temperature)


def teacher_forced(prompt, tokens, temperature=1.0, weights=None, config=CONFIG):
    """Return the log-probabilities (tokens, vocab) of the model at the places of `tokens`."""
    ids = [*prompt, *tokens]
    # The model is causal, so padding behind has no effect.
    padded = np.pad(np.array(ids, np.int32), (0, CONTEXT - len(ids)))
    logp = np.asarray(all_logp(config, weights or params(), padded, temperature or 1.0))
    return logp[len(prompt) - 1 : len(ids) - 1]


def assert_of_model(prompt, completion, temperature=1.0, weights=None, config=CONFIG, atol=1e-5):
    """Assert that the model gives these log-probabilities, and greedy tokens at temperature 0."""
    logp = teacher_forced(prompt, completion.tokens, temperature, weights, config)
    own = logp[np.arange(len(completion.tokens)), completion.tokens]
    np.testing.assert_allclose(completion.logprobs, own, atol=atol)
    assert temperature > 0 or completion.tokens == logp.argmax(-1).tolist()


def prompt_of(*key, n=20):
    return np.random.default_rng(key).integers(0, CONFIG.vocab, n).tolist()


async def episode(engine, name, *, turns=3, key=None, seed=None, **sampling):
    """Play a session of several turns; return [(prompt, completion)]."""
    key = name if key is None else key
    seed = key if seed is None else seed
    ids, history = prompt_of(key, n=10 + key % 7), []
    for turn in range(turns):
        request = Sampling(11 - key % 3, seed=100 * seed + turn, **sampling)
        completion = await engine.generate(ids, request, session=str(name))
        history.append((ids, completion))
        ids = ids + completion.tokens + prompt_of(key, turn, n=5)
    return history


def together(*coroutines, **options):
    """Run coroutines side by side, which must end; return their results."""

    async def main():
        return await asyncio.wait_for(asyncio.gather(*coroutines, **options), 600)

    return asyncio.run(main())


def play(engine, *episodes):
    """Play episodes side by side, each given by its name or by the options of `episode`."""
    options = [e if isinstance(e, dict) else {"name": e} for e in episodes]
    return together(*(episode(engine, **o) for o in options))


@functools.cache
def alone(name, key=None):
    """Return the turns of an episode that has an engine for itself."""
    return play(make(), {"name": name, "key": key})[0]


def request(engine, prompt, session="s", max_tokens=8, **sampling):
    return engine.generate(prompt, Sampling(max_tokens, **sampling), session=session)


def ask(*request_, **options):
    return asyncio.run(request(*request_, **options))


@functools.cache
def fresh_tokens(key):
    """Return what a fresh engine says to `prompt_of(key)`."""
    return ask(make(), prompt_of(key)).tokens


async def begun(engine, key=1, session="a"):
    """Return the task of a long request that the engine has begun to answer."""
    task = asyncio.create_task(request(engine, prompt_of(key), session, 90))
    for _ in range(10):
        await asyncio.sleep(0)
    assert not task.done()
    return task


def same(a, b, atol=1e-5):
    assert [c.tokens for _, c in a] == [c.tokens for _, c in b]
    for (_, x), (_, y) in zip(a, b):
        np.testing.assert_allclose(x.logprobs, y.logprobs, atol=atol)


# --- samples --------------------------------------------------------------------------------------


def test_rows_without_a_token_are_never_sampled_and_the_others_share_their_probability():
    """The 32 rows behind the tokenizer's ids are by far the most probable ones."""
    config = dataclasses.replace(CONFIG, unused=32)
    weights = params() | {"embed": params()["embed"].at[64:].mul(20.0)}
    prompt = [token % 64 for token in prompt_of(1)]
    engine = make(config, weights)
    for temperature in (0.0, 1.0):
        completion = ask(engine, prompt, temperature=temperature, max_tokens=20)
        assert max(completion.tokens) < 64
        logp = teacher_forced(prompt, completion.tokens, weights=weights)[:, :64]
        logp = logp - np.logaddexp.reduce(logp.astype(np.float64), axis=-1, keepdims=True)
        own = logp[np.arange(20), completion.tokens]
        np.testing.assert_allclose(completion.logprobs, own, atol=1e-4)


def test_logprobs_equal_teacher_forcing_over_turns_and_greedy_is_argmax():
    engine = make()
    kinds = [1.0, 0.0, 0.7, 1.3]
    histories = play(engine, *({"name": i, "temperature": t} for i, t in enumerate(kinds)))
    for history, temperature in zip(histories, kinds):
        for prompt, completion in history:
            assert_of_model(prompt, completion, temperature)
    assert engine.stats()["reused_tokens"] > 0, "later turns prefill only what is new"


def assert_as_alone(engine, names):
    for history, name in zip(play(engine, *names), names):
        same(history, alone(name))


def decode_shapes(engine):
    """{(window, rows)} of the compiled calls of decode."""
    compiled = engine._runner.compiled
    return {(window, shape[0]) for name, window, shape, *_ in compiled if name == "decode"}


def test_a_large_model_decodes_all_rows_in_one_call(monkeypatch):
    monkeypatch.setattr("rl.engines.jax.runner.SMALL", 0)
    engine = make(slots=40)
    assert_as_alone(engine, range(6))
    play(engine, *({"name": i, "turns": 1} for i in range(100, 140)))
    rows = {rows for _, rows in decode_shapes(engine)}
    assert 40 in rows and rows <= {4, 10, 40}


def test_matrices_may_be_coarser_than_the_computation():
    def coarse(a):
        return a.astype(jnp.bfloat16).astype(jnp.float32)

    rounded = jax.tree.map(lambda a: coarse(a) if a.ndim > 2 else a, params())
    rounded["embed"] = coarse(rounded["embed"])
    engine = make(weights=rounded, weight_dtype=jnp.bfloat16)
    held = {(a.ndim > 1, str(a.dtype)) for a in jax.tree.leaves(engine._runner.weights)}
    assert held == {(True, "bfloat16"), (False, "float32")}
    for prompt, completion in play(engine, 3)[0]:
        assert_of_model(prompt, completion, weights=rounded, atol=0.02)
        with pytest.raises(AssertionError):  # the products' other factors are rounded too
            assert_of_model(prompt, completion, weights=rounded, atol=1e-6)


def test_an_untied_model_with_normalised_queries():
    config = dataclasses.replace(CONFIG, tied=False, qk_norm=True, qkv_bias=False)
    weights = qwen.init(config, 1)
    completion = ask(make(config, weights), prompt_of(3), temperature=0.0)
    assert_of_model(prompt_of(3), completion, 0.0, weights, config)


@pytest.mark.parametrize(
    "options", [{}, {"threaded": True}, {"slots": 2}, {"leave": 1.0}, {"slots": 40}], ids=str
)
def test_a_sample_does_not_depend_on_the_rest_of_the_batch(options):
    others = ({"name": i, "turns": 1 + i % 3} for i in (3, 4))
    same(alone(5), play(make(**options), *others, 5, 6)[2])


def test_a_diverging_prompt_reuses_the_common_prefix():
    engine = make()
    prompt = prompt_of(0, n=30)
    ask(engine, prompt)
    before = engine.stats()
    other = prompt[:21] + [(prompt[21] + 1) % CONFIG.vocab] + prompt[22:]
    completion = ask(engine, other)
    assert engine.stats()["reused_tokens"] - before["reused_tokens"] == 21
    assert_of_model(other, completion)
    assert ask(engine, prompt).tokens == ask(make(), prompt).tokens


@pytest.mark.parametrize("size", [16, 64])
def test_prompts_longer_than_a_prefill_piece(size):
    prompt = prompt_of(1, n=100)
    assert_of_model(prompt, ask(make(prefill=size), prompt))


def test_stop_tokens_end_a_generation_and_are_part_of_it():
    def stopped(*stop_tokens, most=30):
        return ask(make(), prompt_of(2), max_tokens=most, seed=3, stop_tokens=stop_tokens)

    free = stopped()
    assert free.stop == "length" and len(free.tokens) == 30
    stop = free.tokens[17]
    count = 1 + min(free.tokens.index(t) for t in (95, stop) if t in free.tokens)
    at_once, cut, last = stopped(free.tokens[0]), stopped(95, stop), stopped(95, stop, most=count)
    for completion, tokens in (at_once, 1), (cut, count), (last, count):
        assert (completion.stop, completion.tokens) == ("stop", free.tokens[:tokens])


def test_a_seed_determines_the_sample():
    seeds = (2**62 + 1, 2**62 + 1, 1)
    a, b, c = (ask(make(), prompt_of(4), seed=seed, max_tokens=20).tokens for seed in seeds)
    assert a == b != c, "all 63 bits of the seed count"


# --- sampling -------------------------------------------------------------------------------------


def draw(n, seed=0, temperature=1.0, top_p=1.0, top_k=0):
    full = functools.partial(np.full, n)
    seeds = np.stack([np.arange(n), full(seed)], 1).astype(np.uint32)
    fractions = full(temperature, np.float32), full(top_p, np.float32)
    return decoding.Draw(*fractions, full(top_k, np.int32), seeds, full(0, np.int32))


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
    order = np.argsort(-logits, kind="stable")[: top_k or None]
    p = np.exp(logits[order].astype(np.float64))
    p /= p.sum()
    return set(order[np.cumsum(p) - p < top_p].tolist())


@pytest.mark.parametrize(
    "top_p,top_k", [(0.5, 0), (0.9, 0), (1.0, 3), (0.8, 6), (1e-6, 0), (1.0, 1), (1.0, 999)]
)
def test_top_p_and_top_k_keep_exactly_their_support(top_p, top_k):
    n, logits = 4000, np.random.default_rng(1).normal(size=23).astype(np.float32)
    token, logp = sample(np.tile(logits, (n, 1)), draw(n, top_p=top_p, top_k=top_k), truncate=True)
    assert set(np.asarray(token).tolist()) == supported(logits, top_p, top_k)
    whole = jax.nn.log_softmax(logits)[token]
    np.testing.assert_allclose(logp, whole, atol=1e-5, err_msg="not renormalised")


def test_a_row_that_uses_no_top_p_keeps_every_token_beside_one_that_does():
    """Sums of 152,000 terms reach their total before the end."""
    logits = np.tile(masked(0, 151_936, 1)[0], (2, 1))
    settings = draw(2)._replace(top_p=np.float32([1.0, 0.9]))
    whole, part = decoding._cut(logits - logits.max(), settings)
    assert whole == (logits - logits.max()).min() < part


@pytest.mark.parametrize("decimals", [0, 6])
def test_tokens_tied_at_the_cut_are_kept_and_nothing_is_sorted(decimals):
    """Rows of one batch have settings of their own. A sort is slower than a small model."""
    rng, rows = np.random.default_rng(0), 64
    z = np.round(3 * rng.normal(size=(rows, 97)), decimals).astype(np.float32)
    z -= z.max(axis=1, keepdims=True)
    top_p, top_k = rng.choice([1, 0.9, 0.5, 1e-6], rows), rng.choice([0, 1, 3, 20, 500], rows)
    settings = draw(rows)._replace(top_p=top_p.astype(np.float32), top_k=top_k.astype(np.int32))
    cut = np.asarray(jax.jit(decoding._cut)(z, settings))
    want = [z[i][list(supported(z[i], top_p[i], top_k[i]))].min() for i in range(rows)]
    np.testing.assert_array_equal(cut, want)
    assert "sort" not in str(jax.make_jaxpr(decoding._cut)(z, settings))


@given(
    st.integers(1, 70), st.integers(0, 2**31), st.sampled_from([0.01, 0.3, 1.0]), st.integers(0, 5),
    st.booleans(),
)  # fmt: skip
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


def masked(seed, vocab, count):
    """Return the logits of a vocabulary and a mask that allows `count` of its tokens."""
    rng = np.random.default_rng(seed)
    logits, allowed = 3 * rng.normal(size=vocab).astype(np.float32), np.zeros(vocab, bool)
    allowed[rng.choice(vocab, count, replace=False)] = True
    return logits, allowed


@functools.partial(jax.jit, static_argnames="repeats")
def sample_at(logits, allowed, u, repeats=1):
    """Return the tokens, and their log-probabilities, of one row at each of the uniforms u."""

    def one(u):
        rows = lambda row: jnp.tile(row, (repeats, 1))
        settings = draw(repeats)._replace(allowed=rows(allowed))
        return decoding.sample(rows(logits), settings, truncate=False, u_B=jnp.full(repeats, u))

    return jax.vmap(one)(u)


@pytest.mark.parametrize("repeats", [1, 4, 16])
def test_a_forbidden_token_of_a_large_vocabulary_is_never_sampled(repeats):
    """Parallel sums grow at forbidden tokens: at the first of these uniforms one was returned."""
    logits, allowed = masked(39, 151_936, 1000)
    u = np.append(1794048 + np.arange(-1, 2), [0, 1, 2**23 - 1, 2**23]) / np.float32(2**23)
    token, logp = sample_at(logits, allowed, u, repeats)
    assert allowed[token].all() and np.isfinite(logp).all()


@given(st.integers(2, 300), st.integers(0, 2**31), st.floats(0, 1.25, width=32))
@settings(max_examples=50, deadline=None)
def test_sums_of_any_rounding_never_choose_a_weight_of_zero(count, seed, target):
    rng = np.random.default_rng(seed)
    p = np.where(rng.random(300) < 0.3, 0, rng.random(300)).astype(np.float32)
    p[count:] = 0
    p[rng.integers(count)] = 1e-6
    sums = np.cumsum(p / p.sum()) + rng.normal(size=300) * 1e-3  # neither flat nor increasing
    index, _ = decoding._invert(p[None], sums[None].astype(np.float32), np.float32([target]))
    assert p[index[0]] > 0


def test_frequencies_follow_the_distribution_over_152_000_tokens():
    """Pearson's statistic over tokens that are expected often, and the others together."""
    n, (logits, allowed) = 50_000, masked(0, 151_936, 1000)
    allowed[:3000] = True
    token, logp = sample_at(logits, allowed, np.random.default_rng(1).random(n, np.float32))
    z = np.where(allowed, logits, -np.inf).astype(np.float64)
    p = np.exp(z - z.max()) / np.exp(z - z.max()).sum()
    np.testing.assert_allclose(logp[:, 0], np.log(p[token[:, 0]]), atol=1e-4)
    counts, often = np.bincount(token[:, 0], minlength=len(p)), n * p > 10
    pairs = [*zip(counts[often], n * p[often]), (counts[~often].sum(), n * p[~often].sum())]
    statistic = sum((seen - expected) ** 2 / expected for seen, expected in pairs)
    freedom = len(pairs) - 1
    assert abs(statistic - freedom) < 4 * np.sqrt(2 * freedom)


def test_top_k_of_one_is_greedy_in_a_batch_with_other_settings():
    settings = {"temperature": 0.0}, {"top_k": 1}, {}
    histories = play(make(), *({"name": i, "key": 1} | s for i, s in enumerate(settings)))
    greedy, narrow, free = ([c.tokens for _, c in history] for history in histories)
    assert greedy == narrow != free
    same(histories[2], alone(2, key=1))


# --- sessions and slots ---------------------------------------------------------------------------


def test_more_sessions_than_slots():
    engine = make(slots=2)
    assert_as_alone(engine, range(5))
    stats = engine.stats()
    assert stats["evictions"] >= 3 and stats["sessions"] == 2
    assert stats["reused_tokens"] > 100, "running episodes are not thrown out for waiting ones"


def test_a_released_or_evicted_session_is_recomputed():
    engine = make(slots=2)
    for key, session in (1, "a"), (2, "b"), (3, "c"), (1, "a"):
        assert ask(engine, prompt_of(key), session).tokens == fresh_tokens(key)
    for session in ("a", "never seen"):
        asyncio.run(engine.release(session))
    assert engine.stats()["sessions"] == 1
    assert ask(engine, prompt_of(1), "a").tokens == fresh_tokens(1)


def test_a_group_prefills_its_common_prompt_once():
    engine, common = make(), prompt_of(9, n=60)
    prompts = [common + prompt_of(i, n=3) for i in range(4)]

    found = together(*(request(engine, p, str(i), seed=i) for i, p in enumerate(prompts)))
    for prompt, completion in zip(prompts, found):
        assert_of_model(prompt, completion)
    stats = engine.stats()
    assert stats["shared_tokens"] == 3 * 60 and stats["prefill_tokens"] == 63 + 3 * 3
    ask(engine, common + [1, 2], "later")
    later = engine.stats()["prefill_tokens"] - stats["prefill_tokens"]
    assert later == 2, "idle sessions lend their prefix too"


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
            assert_of_model(prompt, completion)
        # A later turn only prefills its observation and the last token sampled before it.
        once = sum(len(h[-1][0]) - sum(len(c.tokens) - 1 for _, c in h[:-1]) for h in histories)
        assert slots < len(wave) or engine.stats()["prefill_tokens"] - before <= once


@pytest.mark.parametrize("slots, sessions", [(2, 6), (35, 45)])
def test_two_runs_are_bit_identical(slots, sessions):
    """Covers one bank of slots and several banks in parallel. Each token of a prompt is prefilled or
    was there already."""

    def run():
        engine = make(slots=slots)
        played = play(engine, *({"name": i, "turns": 2 + i % 3} for i in range(sessions)))
        counts = {name: n for name, n in engine.stats().items() if "seconds" not in name}
        return played, counts

    (played, counts), again = run(), run()
    assert (played, counts) == again
    prompts = sum(len(prompt) for history in played for prompt, _ in history)
    had = ("prefill_tokens", "reused_tokens", "shared_tokens")
    assert sum(counts[name] for name in had) == prompts


def test_requests_at_the_limits_are_served():
    engine = make()
    assert len(ask(engine, [1] * 120).tokens) == 8, "exactly full"
    every = ask(engine, [1], top_k=10**12)
    assert every.tokens == ask(engine, [1]).tokens, "more than there are is all"


@pytest.mark.parametrize(
    "prompt, sampling, error, text",
    [
        ([], {}, ValueError, "empty"),
        ([1], {"max_tokens": 0}, ValueError, "max_tokens"),
        ([96], {}, ValueError, "vocabulary"),
        ([-1], {}, ValueError, "vocabulary"),
        ([1], {"stop_tokens": tuple(range(9))}, ValueError, "stop tokens"),
        ([1], {"stop_tokens": (10**12,)}, ValueError, "a stop token is outside of the vocabulary"),
        ([1], {"temperature": 1e-30}, ValueError, "is 1e-30; it must be 0, or 1e-05 to 100000"),
        ([1], {"temperature": float("nan")}, ValueError, "temperature is nan"),
        ([1], {"temperature": 1e39}, ValueError, r"temperature is 1e\+39"),
        ([1], {"top_p": float("nan")}, ValueError, "top_p is nan"),
        ([1], {"top_p": 10**400}, ValueError, "top_p is 1000"),
        ([1], {"top_k": -(10**30)}, ValueError, "top_k is -1000"),
        ([1], {"seed": float("nan")}, ValueError, "seed is nan; it must be a whole number"),
        ([1] * 125, {}, ContextFull, "125 prompt tokens and 8 to generate"),
        ([1, 2], {"session": "a"}, ValueError, "session 'a' already has a request in flight"),
    ],
)
def test_an_invalid_request_is_rejected_and_does_not_affect_others(prompt, sampling, error, text):
    engine = make()

    async def main():
        running = await begun(engine)
        with pytest.raises(error, match=text):
            await request(engine, prompt, **sampling)
        return await running

    assert len(asyncio.run(main()).tokens) == 90


# --- weights --------------------------------------------------------------------------------------


def test_new_weights_are_used_without_compilation():
    engine = make()
    old = ask(engine, prompt_of(1), temperature=0.0)
    compiled = (decoding.prefill._cache_size(), decoding.decode._cache_size())
    asyncio.run(engine.load(params(1), 7))
    prompt = prompt_of(1) + old.tokens + [5]
    new = ask(engine, prompt, temperature=0.0)
    assert (old.version, new.version) == (0, 7)
    assert_of_model(prompt, new, 0.0, params(1))  # so no KV of the old weights was used
    assert (decoding.prefill._cache_size(), decoding.decode._cache_size()) == compiled
    assert engine.stats()["loads"] == 1 and engine.stats()["version"] == 7


def test_the_learner_may_donate_its_arrays():
    first, second = (jax.tree.map(jnp.copy, params()) for _ in range(2))
    engine = make(weights=first)
    jax.tree.map(lambda a: a.delete(), first)
    assert ask(engine, prompt_of(1)).tokens == fresh_tokens(1)
    asyncio.run(engine.load(second, 1))
    jax.tree.map(lambda a: a.delete(), second)
    assert ask(engine, prompt_of(1)).tokens == fresh_tokens(1)


def test_running_requests_finish_on_old_weights_and_waiting_ones_get_the_new():
    engine = make()

    async def main():
        running = await begun(engine)
        load = asyncio.create_task(engine.load(params(1), 1))
        await asyncio.sleep(0)
        late = request(engine, prompt_of(2), "b")
        return await asyncio.gather(running, load, late)

    running, _, late = asyncio.run(main())
    assert (running.version, late.version) == (0, 1)
    assert_of_model(prompt_of(1), running)
    assert_of_model(prompt_of(2), late, weights=params(1))


def test_weights_of_another_model_are_rejected():
    engine = make()
    other = qwen.init(dataclasses.replace(CONFIG, d_ff=32), 0)
    with pytest.raises(ValueError, match="do not match the engine's model"):
        asyncio.run(engine.load(other, 1))
    assert ask(engine, prompt_of(1)).version == 0


# --- faults ---------------------------------------------------------------------------------------


def test_a_cancelled_request_frees_its_slot_and_does_not_affect_others():
    engine = make(slots=2)

    async def main():
        tasks = [await begun(engine, key, session) for key, session in ((1, "a"), (2, "b"))]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert all(task.cancelled() for task in tasks)
        return await request(engine, prompt_of(3))

    assert asyncio.run(main()).tokens == fresh_tokens(3)
    assert engine.stats()["cancelled"] == 2


@pytest.mark.parametrize(
    "end, error", [("release", asyncio.CancelledError), ("close", EngineFault)]
)
def test_releasing_a_session_or_closing_the_engine_ends_its_request(end, error):
    engine = make()

    async def main():
        task = await begun(engine)
        await (engine.release("a") if end == "release" else engine.close())
        with pytest.raises(error):
            await task

    asyncio.run(main())
    if end == "release":
        assert ask(engine, prompt_of(1), "a").tokens == fresh_tokens(1)


@pytest.mark.parametrize("call, slots", [("prefill", 2), ("decode", 2), ("prefill", 40)])
def test_a_fault_fails_all_pending_requests_with_its_reason(monkeypatch, call, slots):
    engine = make(slots=slots)
    assert ask(engine, prompt_of(3)).tokens == fresh_tokens(3)

    def broken(weights, cache, *args, **kwargs):
        jax.tree.map(lambda a: a.delete(), cache)
        raise RuntimeError("RESOURCE_EXHAUSTED: out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(decoding, call, broken)
        requests = (request(engine, prompt_of(i), str(i)) for i in range(4))
        results = together(*requests, return_exceptions=True)
    assert [type(r) for r in results] == [EngineFault] * 4 and "out of memory" in str(results[0])
    again = ask(engine, prompt_of(3)).tokens
    assert again == fresh_tokens(3), "the engine goes on when the cause is gone"


class FaultyGuide:
    """A guide that allows everything, until one of its methods fails."""

    def __init__(self, method, result, after):
        self.method, self.result, self.left = method, result, after

    def fail(self, method, otherwise=None):
        if self.left > 0 or method != self.method:
            return otherwise
        if isinstance(self.result, Exception):
            raise self.result
        return self.result

    def allowed(self):
        return self.fail("allowed", np.ones(CONFIG.vocab, bool))

    def accept(self, token):
        self.fail("accept")
        self.left -= 1

    def stream(self, tokens, logprobs):
        self.fail("stream")


@pytest.mark.parametrize("after", [0, 3])
@pytest.mark.parametrize(
    "method, result, reason",
    [
        ("allowed", KeyError("state 7"), "state 7"),
        ("accept", ValueError("token does not fit"), "token does not fit"),
        ("allowed", np.zeros(CONFIG.vocab, bool), "its guide allows no token"),
        ("allowed", np.ones(5, bool), "broadcast"),
        ("stream", RuntimeError("gone"), "gone"),
    ],
)
def test_a_fault_of_one_request_is_the_fault_of_that_request_alone(method, result, after, reason):
    engine, guide = make(), FaultyGuide(method, result, after)
    others = [request(engine, prompt_of(i), str(i)) for i in range(3)]
    faulty = engine.generate(
        prompt_of(9), Sampling(20), session="f", guide=guide, stream=guide.stream
    )
    first, fault, *others = together(others[0], faulty, *others[1:], return_exceptions=True)
    assert type(fault) is RequestFault and reason in str(fault)
    assert [c.tokens for c in (first, *others)] == [fresh_tokens(i) for i in range(3)]
    assert ask(engine, prompt_of(9), "f").tokens == fresh_tokens(9), "its session can go on"


def test_weights_that_are_not_finite_are_a_fault():
    engine = make()
    asyncio.run(engine.load(jax.tree.map(lambda a: a * jnp.nan, params()), 3))
    with pytest.raises(EngineFault, match=r"version 3 .* not finite"):
        ask(engine, prompt_of(1))


# --- shapes and devices ---------------------------------------------------------------------------


def test_the_shapes_of_an_accelerator_give_the_same_tokens_with_fewer_programs(monkeypatch):
    def compiled():
        engine = make(slots=16, prefill=64)
        assert_as_alone(engine, range(12))
        return engine.stats()["compiles"]

    many = compiled()
    as_on_gpu = lambda *shape, **options: runner.Shapes(*shape, **options | {"cpu": False})
    monkeypatch.setattr(engine_module, "Shapes", as_on_gpu)
    assert compiled() < many


def on_four_devices():
    """Play on four devices and on one. Runs in a process of its own."""
    devices, episodes = jax.devices(), [*range(9)]
    assert len(devices) == 4
    one, four = make(slots=8), make(slots=8, devices=devices)
    for version in (0, 1):
        for engine in (one, four):
            asyncio.run(engine.load(params(version), version))
        for turns, others in zip(play(four, *episodes), play(one, *episodes)):
            same(turns, others)
    held = [cache["k"][0].devices() for cache in four._runner._caches]
    assert held == [{device} for device in devices], held
    assert four.stats()["generated_tokens"] == one.stats()["generated_tokens"]


def test_several_devices_sample_what_one_does():
    flags = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=4"
    code = "from tests.rl import test_engine as t; t.on_four_devices()"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=Path(__file__).parents[2], capture_output=True, text=True,
        env=os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}, timeout=600,
    )  # fmt: skip
    assert not done.returncode, done.stderr
