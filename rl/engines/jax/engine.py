"""The JAX engine: continuous batching over a KV cache that sessions keep between turns.

The scheduler is one asyncio task that runs while there are requests. Each round admits waiting
requests, prefills the prompt tokens that are not cached, and decodes one block of tokens for every
running request. No decision depends on a
clock: the same requests in the same order give bit-identical results.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from models import qwen
from rl.engines import EngineFault, Guide, check_request
from rl.engines.jax import decoding
from rl.trajectory import Completion, Sampling

MAX_STOP_TOKENS = 8
PREFILL_BATCH = 2048  # most tokens of one prefill call, padding included
PREFILL_SCORES = (
    2**20
)  # most attention scores of one prefill call on a CPU; more would not fit into its caches
DECODE_ROWS = 16  # most rows of one decode call of a small model on a CPU, for the same reason
# groups of slots that run in parallel on a CPU; constant: the number of cores must not change
# results
BANKS = 2
SMALL = 2**25  # most bytes of weights that stay in a CPU's caches between two steps
# of a large model, or on an accelerator, all rows decode in place if more than slots / FEW of them
# run
FEW = 4
PATIENCE = 4  # rounds for which an idle session is protected from eviction
SHARE_TOKENS = (
    16  # a prompt waits one round for another's prefill if it can reuse at least this many tokens
)


@dataclass(eq=False)
class _Request:
    session: str
    prompt: np.ndarray  # (tokens,) int32
    sampling: Sampling
    future: asyncio.Future[Completion]
    stream: Callable[[list[int], list[float]], None] | None = None
    guide: Guide | None = None
    slot: int = -1
    source: int = -1  # the slot that already holds `start` tokens of the prompt
    start: int = 0  # prompt tokens that are cached
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)

    @property
    def stopped(self) -> bool:
        return bool(self.tokens) and self.tokens[-1] in self.sampling.stop_tokens

    @property
    def length(self) -> int:
        """The number of tokens so far, prompt included."""
        return len(self.prompt) + len(self.tokens)

    @property
    def budget(self) -> int:
        return 0 if self.stopped else self.sampling.max_tokens - len(self.tokens)


class JaxEngine:
    """An `Engine` (rl/engines/__init__.py) on one device of this process.

    shape, params: of models/qwen.py, sharded in any way; the engine keeps a copy in `dtype` on
    `device`.
    slots: sessions whose keys and values are held; when none is free, the session idle for longest
        is evicted, and its prompt is prefilled again on its next turn.
    context: most tokens of a session, prompts and generations together.
    decode_block: tokens decoded per row before the scheduler admits requests; a block ends early
        once the fraction `leave` of its rows has finished, so that their next turns can join.
    prefill: most prompt tokens per row of one prefill call.
    dtype: of the computation. weight_dtype: of the matrices, None = dtype; a product with a matrix
        of another dtype rounds its other factor to it. Matrices coarser than the computation are
        rounded stochastically, by a key that follows from the version (models/rounding.py).
    threaded: run device calls in a thread, so that other coroutines run meanwhile. Samples still
        follow from each request's seed, but the composition of batches, and so the last bits,
        depend on timing.
    """

    def __init__(
        self,
        shape: qwen.Config,
        params: Any,
        *,
        slots: int = 64,
        context: int = 1024,
        decode_block: int = 32,
        leave: float = 0.25,
        prefill: int = 256,
        dtype: Any = jnp.float32,
        weight_dtype: Any = None,
        cache_dtype: Any = None,
        device: jax.Device | None = None,
        threaded: bool = False,
    ):
        self.shape, self.slots, self.context, self.version = shape, slots, context, 0
        self._block, self._leave = decode_block, leave
        self._dtype, self._weight_dtype, self._cache_dtype = (
            dtype,
            weight_dtype or dtype,
            cache_dtype or dtype,
        )
        self._device = device or jax.devices()[0]
        # All shapes of device calls. There are few, because each one is compiled.
        cpu = self._device.platform == "cpu"
        self._windows = sorted(
            {*_powers(128, context), *(w for w in _powers(192, context) if w < context)}
        )
        # A small model on a CPU decodes a copy of a few rows' keys and values, which stays in the
        # processor's caches. The weights of a large one are read from memory at each step, so that
        # a step serves all rows, in place and in one bank, or a copy of few. The numbers of copied
        # rows are far apart there, because XLA takes long to compile many layers.
        large = qwen.parameter_count(shape) * jnp.dtype(self._weight_dtype).itemsize > SMALL
        self._in_place = not cpu or large
        few = max(1, slots // FEW) if self._in_place else min(slots, DECODE_ROWS)
        self._copied = _powers(4, few, by=4 if cpu and large else 2)
        self._batches = sorted({*self._copied, slots}) if self._in_place else self._copied
        self._sizes = _powers(16, min(prefill, context))
        self._scores = PREFILL_SCORES if cpu else 2**40
        # Each bank of slots has its own cache, so that threads can work on banks in parallel.
        self._banks = BANKS if cpu and not large and slots >= BANKS * DECODE_ROWS else 1
        self._bank_slots = -(-slots // self._banks)
        self._threads = ThreadPoolExecutor(self._banks - 1) if self._banks > 1 else None
        self._counting = threading.Lock()
        self._executor = ThreadPoolExecutor(1) if threaded else None
        self._weights = self._own(params, self.version)
        self._stats: Counter[str] = Counter()
        self._shapes: set[tuple] = set()  # static shapes that have been compiled
        self._waiting: list[_Request] = []
        self._running: dict[int, _Request] = {}  # by slot
        self._swap: tuple[Any, int, asyncio.Future[None]] | None = None
        self._task: asyncio.Task[None] | None = None
        self._round = 0
        self._caches: list[qwen.Cache | None] = [None] * self._banks  # allocated on first use
        self._forget_all()

    def check(self, prompt_ids: list[int], sampling: Sampling) -> None:
        """Raise what `generate` raises for this request: ContextFull, or ValueError if it is
        invalid."""
        check_request(prompt_ids, sampling, vocab=self.shape.vocab, context=self.context)
        if len(sampling.stop_tokens) > MAX_STOP_TOKENS:
            raise ValueError(
                f"{len(sampling.stop_tokens)} stop tokens; at most {MAX_STOP_TOKENS} are supported"
            )

    # --- the protocol -----------------------------------------------------------------------------

    async def generate(
        self,
        prompt_ids: list[int],
        sampling: Sampling,
        *,
        session: str,
        stream: Callable[[list[int], list[float]], None] | None = None,
        guide: Guide | None = None,
    ) -> Completion:
        """Sample (see `Engine.generate`); call `stream` with the tokens and log-probabilities of
        each decoded block.

        guide: allows some tokens only. Such a request is decoded token by token, apart from those
        without a guide.
        """
        self.check(prompt_ids, sampling)
        if any(
            r.session == session and not r.future.done()
            for r in [*self._waiting, *self._running.values()]
        ):
            raise ValueError(f"session {session!r} already has a request in flight")
        future = asyncio.get_running_loop().create_future()
        request = _Request(
            session, np.asarray(prompt_ids, np.int32), sampling, future, stream, guide
        )
        self._waiting.append(request)
        self._stats["requests"] += 1
        self._wake()
        try:
            return await future
        finally:
            if future.cancelled():
                self._stats["cancelled"] += 1

    async def release(self, session: str) -> None:
        for request in [*self._waiting, *self._running.values()]:
            if request.session == session:
                request.future.cancel()
        slot = self._slot_of.pop(session, None)
        if slot is not None:
            self._owner[slot] = None  # the KV stays as a shareable prefix until the slot is reused

    async def load(self, params: Any, version: int) -> None:
        """Swap the weights. Running requests finish with the old weights; waiting requests get the
        new ones."""
        weights = self._own(params, version)
        while self._swap is not None:
            await asyncio.wait([self._swap[2]])
        self._swap = (weights, version, asyncio.get_running_loop().create_future())
        done = self._swap[2]
        self._wake()
        await done

    def clear_cache(self) -> None:
        """Drop all KV of an idle engine, so that later samples do not depend on earlier requests in
        any bit."""
        self._drop_cancelled()
        if self._running or self._waiting:
            raise RuntimeError("clear_cache() needs an idle engine; requests are in flight")
        self._forget_all()

    def stats(self) -> dict[str, float]:
        """Return counters since the start.

        Among them: tokens generated, prefilled, reused (from the session's own KV) and shared (from
        another's); `compiles`, the number of distinct shapes; `occupancy`, the fraction of decoded
        rows that carried a request.
        """
        stats = {name: self._stats[name] for name in _COUNTERS}
        stats["occupancy"] = stats["decoded_tokens"] / max(1, stats["decode_row_steps"])
        stats["sessions"] = len(self._slot_of)
        return stats | {"compiles": len(self._shapes), "version": self.version}

    async def close(self) -> None:
        """Stop. Pending requests fail with EngineFault."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
        for pool in (self._executor, self._threads):
            if pool is not None:
                pool.shutdown()

    # --- scheduling -------------------------------------------------------------------------------

    def _wake(self) -> None:
        if self._task is None or self._task.done():
            self._task = asyncio.get_running_loop().create_task(self._serve(), name="jax-engine")

    async def _serve(self) -> None:
        try:
            while self._waiting or self._running or self._swap:
                await self._settle()
                self._round += 1
                self._drop_cancelled()
                self._apply_swap()
                while wave := self._admit():
                    await self._prefill(wave)
                if self._running:
                    await self._decode()
        except BaseException as error:
            self._fail(error)
            if not isinstance(error, Exception):
                raise

    async def _settle(self) -> None:
        """Let ready coroutines run, so that turns that ended together are continued together."""
        quiet = 0
        while quiet < 3:
            before = len(self._waiting)
            await asyncio.sleep(0)
            quiet = quiet + 1 if len(self._waiting) == before else 0

    def _fail(self, error: BaseException) -> None:
        reason = str(error) or type(error).__name__
        for request in [*self._waiting, *self._running.values()]:
            if not request.future.done():
                request.future.set_exception(EngineFault(f"the JAX engine failed: {reason}"))
        if self._swap is not None and not self._swap[2].done():
            self._swap[2].set_exception(EngineFault(f"the JAX engine failed: {reason}"))
        self._waiting, self._running, self._swap = [], {}, None
        self._caches = [None] * self._banks  # a failed call may have consumed its donated cache
        self._forget_all()

    def _forget_all(self) -> None:
        self._slot_of: dict[str, int] = {}
        self._owner: list[str | None] = [None] * self.slots
        self._ids = np.full(
            (self.slots, self.context), -1, np.int32
        )  # tokens whose KV each slot holds
        self._filled = np.zeros(self.slots, np.int32)  # number of valid tokens in each slot
        self._used = np.zeros(self.slots, np.int64)  # round in which each slot was last used

    def _drop_cancelled(self) -> None:
        self._waiting = [r for r in self._waiting if not r.future.done()]
        self._running = {slot: r for slot, r in self._running.items() if not r.future.done()}

    def _apply_swap(self) -> None:
        if self._swap is None or self._running:
            return
        self._weights, self.version, done = self._swap
        self._swap = None
        self._stats["loads"] += 1
        self._filled[:] = 0  # KV of the old weights is recomputed on a session's next turn
        if not done.done():
            done.set_result(None)

    def _own(self, params: Any, version: int) -> Any:
        """Return a copy of the weights in decoding layout; the learner may then donate its own
        arrays."""
        expected = jax.tree.map(lambda w: w.shape, qwen.weights(self.shape), is_leaf=qwen.is_weight)
        given = jax.tree.map(lambda a: a.shape, params)
        if given != expected:
            raise ValueError("the weights do not match the engine's model: names or shapes differ")
        params = jax.device_put(params, self._device)
        return _decoding_copy(self.shape, params, self._dtype, self._weight_dtype, version)

    # --- admission --------------------------------------------------------------------------------

    def _admit(self) -> list[_Request]:
        """Assign slots to waiting requests, in order, and return those to prefill now.

        A prompt that shares a longer prefix with another prompt of this wave than with the cache
        waits for the next
        wave, which follows at once: the rollouts of a group prefill their common prompt once.
        """
        wave: list[_Request] = []
        if self._swap is not None:
            return wave
        pinned: dict[
            int, int
        ] = {}  # source slot -> positions that must not change until they are copied
        for request in self._waiting:
            own = self._slot_of.get(request.session)
            bank = None if own is None else self._bank(own)
            source, start = self._longest_prefix(request.prompt, own, bank)
            if own is None and any(
                _common(r.prompt, request.prompt) - start >= SHARE_TOKENS for r in wave
            ):
                continue
            slot = (
                self._free_slot(pinned, source if start >= SHARE_TOKENS else None)
                if own is None
                else own
            )
            if slot is not None and self._bank(slot) != self._bank(source):
                source, start = self._longest_prefix(request.prompt, own, self._bank(slot))
            kept = start if source == slot else 0
            if slot is None or pinned.get(slot, 0) > kept:
                continue
            self._assign(request, slot, source, start)
            self._filled[slot] = kept
            pinned[source] = max(pinned.get(source, 0), start)
            wave.append(request)
        self._waiting = [r for r in self._waiting if r.slot < 0]
        return wave

    def _longest_prefix(
        self, prompt: np.ndarray, own: int | None, bank: int | None
    ) -> tuple[int, int]:
        """Return (slot, tokens) of the longest cached prefix of the prompt, within `bank` unless it
        is None.

        The last prompt token is never taken from the cache: its logits are needed.
        """
        limit = len(prompt) - 1
        if own is not None:
            start = _common(self._ids[own, : self._filled[own]], prompt[:limit])
            if 0 < start == self._filled[own]:  # the usual case: the turn extends its session
                return own, start
        differs = self._ids[:, :limit] != prompt[:limit]
        lengths = (
            np.where(differs.any(1), differs.argmax(1), limit)
            if limit
            else np.zeros(self.slots, int)
        )
        lengths = np.minimum(lengths, self._filled)
        if bank is not None:
            lengths[np.arange(self.slots) // self._bank_slots != bank] = -1
        best = int(lengths.argmax())
        if own is not None and lengths[own] >= lengths[best]:
            best = own
        return best, int(lengths[best])

    def _free_slot(self, pinned: dict[int, int], near: int | None) -> int | None:
        """Return the least recently used slot without a session, else that of the session idle for
        longest, else None.

        The bank of slot `near`, which holds a prefix, is preferred, then the bank with the fewest
        sessions. Sessions used in the last PATIENCE rounds are not evicted, because their next turn
        is likely to come soon, unless no request is running.
        """
        recent = self._round - PATIENCE if self._running else self._round
        idle = [s for s in range(self.slots) if s not in self._running and s not in pinned]
        idle = [s for s in idle if self._owner[s] is None or self._used[s] <= recent]
        sessions = Counter(self._bank(slot) for slot in self._slot_of.values())

        def order(slot: int) -> tuple:
            bank = self._bank(slot)
            far = near is not None and bank != self._bank(near)
            return self._owner[slot] is not None, far, sessions[bank], self._used[slot], slot

        return min(idle, key=order, default=None)

    def _assign(self, request: _Request, slot: int, source: int, start: int) -> None:
        evicted = self._owner[slot]
        if evicted != request.session:
            if evicted is not None:
                del self._slot_of[evicted]
                self._stats["evictions"] += 1
            self._owner[slot] = request.session
            self._slot_of[request.session] = slot
        self._running[slot] = request
        request.slot, request.source, request.start = slot, source, start
        self._stats["reused_tokens" if source == slot else "shared_tokens"] += start

    # --- device calls -----------------------------------------------------------------------------

    async def _prefill(self, wave: list[_Request]) -> None:
        for request, token, logp in await self._in_banks(self._prefill_bank, wave):
            self._accept(request, [token], [logp])

    async def _decode(self) -> None:
        for request, tokens, logprobs in await self._in_banks(
            self._decode_bank, self._running.values()
        ):
            self._accept(request, tokens, logprobs)

    async def _in_banks(self, work: Callable, requests: Iterable[_Request]) -> list[tuple]:
        """Run work(bank, its requests) on all banks in parallel; return the concatenated results in
        bank order."""
        parts = [
            (bank, [r for r in requests if self._bank(r.slot) == bank])
            for bank in range(self._banks)
        ]
        parts = [(bank, part) for bank, part in parts if part]

        def run() -> list[tuple]:
            others = [self._threads.submit(work, *part) for part in parts[1:]]
            try:
                results = [work(*parts[0])]
            finally:
                wait(others)  # no thread may still use a cache, even after a fault
            return [
                item for result in results + [other.result() for other in others] for item in result
            ]

        if self._executor is None:
            return run()
        return await asyncio.get_running_loop().run_in_executor(self._executor, run)

    def _prefill_bank(self, bank: int, left: list[_Request]) -> list[tuple[_Request, int, float]]:
        """Prefill the uncached part of each prompt in pieces and sample the first token of each
        request."""
        self._copy_prefixes(bank, [r for r in left if r.source != r.slot and r.start])
        done = []
        while left:
            size = max(self._piece_of(r) for r in left)
            fitting = sorted((r for r in left if self._piece_of(r) == size), key=lambda r: r.start)
            window = self._window(
                min(fitting[-1].start + size, self.context)
            )  # padding may exceed the context
            # The smallest batch shape that holds all of them, unless a third of its rows would be
            # idle.
            shapes = self._rows(size, window)
            rows = next((n for n in reversed(shapes) if 3 * len(fitting) > 2 * n), shapes[0])
            batch = fitting[:rows]
            window = self._window(min(batch[-1].start + size, self.context))
            tokens_B, logp_B = self._prefill_call(bank, batch, rows, size, window)
            for request, token, logp in zip(batch, tokens_B.tolist(), logp_B.tolist()):
                end = min(request.start + size, len(request.prompt))
                self._ids[request.slot, request.start : end] = request.prompt[request.start : end]
                self._filled[request.slot] = request.start = end
                if end == len(request.prompt):
                    done.append((request, token, logp))
            left = [r for r in left if r.start < len(r.prompt)]
        return done

    def _copy_prefixes(self, bank: int, requests: list[_Request]) -> None:
        """Copy the first `start` cached tokens of each request's source slot to its own slot."""
        most = self._copied[-1]
        for batch in (requests[first : first + most] for first in range(0, len(requests), most)):
            rows = next(rows for rows in self._copied if rows >= len(batch))
            self._copy(bank, batch, rows, self._window(max(r.start for r in batch)))
            for request in batch:
                self._ids[request.slot, : request.start] = request.prompt[: request.start]
                self._filled[request.slot] = request.start

    def _copy(self, bank: int, batch: list[_Request], rows: int, window: int) -> None:
        first = bank * self._bank_slots
        source, slot = np.zeros(rows, np.int32), np.full(rows, self._bank_slots, np.int32)
        source[: len(batch)] = [r.source - first for r in batch]
        slot[: len(batch)] = [r.slot - first for r in batch]
        self._shapes.add(("copy", window, rows))
        self._caches[bank] = decoding.copy(self._kv(bank), source, slot, window=window)

    def _piece_of(self, request: _Request) -> int:
        """Return the size of the next prompt piece: the rest rounded up to a shape, at most a
        quarter of it padding."""
        rest = len(request.prompt) - request.start
        return next((n for n in reversed(self._sizes) if 4 * rest > 3 * n), self._sizes[0])

    def _rows(self, size: int, window: int) -> list[int]:
        """Return the possible numbers of rows of a prefill call, ascending."""
        most = min(
            PREFILL_BATCH // size,
            self._scores // (size * window * self.shape.heads),
            self._bank_slots,
        )
        return _powers(min(4, self._bank_slots), max(most, min(4, self._bank_slots)))

    def _prefill_call(
        self, bank: int, batch: list[_Request], rows: int, size: int, window: int
    ) -> tuple[np.ndarray, np.ndarray]:
        slot, first = np.full(rows, self._bank_slots, np.int32), bank * self._bank_slots
        tokens, start, count = (
            np.zeros((rows, size), np.int32),
            np.zeros(rows, np.int32),
            np.zeros(rows, np.int32),
        )
        for row, request in enumerate(batch):
            piece = request.prompt[request.start : request.start + size]
            slot[row], start[row], count[row] = request.slot - first, request.start, len(piece)
            tokens[row, : len(piece)] = piece
        arrays = (
            slot,
            tokens,
            start,
            count,
            _draw(batch, rows),
            self._allowed(batch, rows, range(len(batch))),
        )
        options = self._options("prefill", batch, window, (rows, size))
        began = time.perf_counter()
        token_B, logp_B, self._caches[bank] = decoding.prefill(
            self._weights, self._kv(bank), *arrays, **options
        )
        token_B, logp_B = np.asarray(token_B), np.asarray(logp_B)
        new = int(count.sum())
        self._count(
            prefill_seconds=time.perf_counter() - began, prefill_calls=1, prefill_tokens=new,
            prefill_padding=rows * size - new,
        )  # fmt: skip
        return token_B, logp_B

    def _decode_bank(
        self, bank: int, running: list[_Request]
    ) -> list[tuple[_Request, list[int], list[float]]]:
        """Decode one block for each request; requests of similar length share a call."""
        running, most, done = (
            sorted(running, key=lambda r: (r.length, r.slot)),
            self._batches[-1],
            [],
        )
        kinds = [[r for r in running if (r.guide is None) == free] for free in (True, False)]
        for batch in (
            kind[first : first + most] for kind in kinds for first in range(0, len(kind), most)
        ):
            rows, block = (
                next(rows for rows in self._batches if rows >= len(batch)),
                self._block_of(batch),
            )
            last = max(r.length + min(block, r.budget) for r in batch)
            result = self._decode_call(bank, batch, rows, self._window(last - 1))
            for request, tokens, logprobs in zip(batch, *result):
                # The last sampled token is not in the cache yet; the next call writes it.
                end = request.length
                self._ids[request.slot, end - 1] = request.tokens[-1]
                self._ids[request.slot, end : end + len(tokens) - 1] = tokens[:-1]
                self._filled[request.slot] = end + len(tokens) - 1
                done.append((request, tokens, logprobs))
        return done

    def _decode_call(
        self, bank: int, batch: list[_Request], rows: int, window: int
    ) -> tuple[list[list[int]], list[list[float]]]:
        slot, token = np.full(rows, self._bank_slots, np.int32), np.zeros(rows, np.int32)
        first = bank * self._bank_slots
        position, budget = np.zeros(rows, np.int32), np.zeros(rows, np.int32)
        stop = np.full((rows, MAX_STOP_TOKENS), -1, np.int32)
        places = [r.slot - first for r in batch] if rows == self._bank_slots else range(len(batch))
        for row, request in zip(places, batch):
            slot[row], token[row], budget[row] = (
                request.slot - first,
                request.tokens[-1],
                request.budget,
            )
            position[row] = request.length - 1
            stop[row, : len(request.sampling.stop_tokens)] = request.sampling.stop_tokens
        lines = decoding.Rows(slot, token, position, budget, stop, _draw(batch, rows, places))
        leave = np.int32(max(1, int(self._leave * len(batch))))
        block, allowed = self._block_of(batch), self._allowed(batch, rows, places)
        options = self._options("decode", batch, window, (rows, block)) | {"block": block}
        options["in_place"] = self._in_place and rows == self._bank_slots
        began = time.perf_counter()
        result = decoding.decode(self._weights, self._kv(bank), lines, leave, allowed, **options)
        tokens_NB, logp_NB, steps, self._caches[bank] = result
        tokens_NB, logp_NB, steps = np.asarray(tokens_NB), np.asarray(logp_NB), int(steps)
        counts = (tokens_NB >= 0).sum(0)
        self._count(
            decode_seconds=time.perf_counter() - began, decode_calls=1, decode_steps=steps,
            decode_row_steps=steps * rows, decoded_tokens=int(counts.sum()),
        )  # fmt: skip
        tokens = [tokens_NB[: counts[row], row].tolist() for row in places]
        return tokens, [logp_NB[: counts[row], row].tolist() for row in places]

    def _accept(self, request: _Request, tokens: list[int], logprobs: list[float]) -> None:
        if not np.all(np.isfinite(logprobs)):
            raise FloatingPointError(
                f"the weights of version {self.version} give logits that are not finite"
            )
        request.tokens += tokens
        request.logprobs += logprobs
        for token in tokens if request.guide else ():
            request.guide.accept(token)
        if request.stream is not None and not request.future.done():
            request.stream(tokens, logprobs)
        self._stats["generated_tokens"] += len(tokens)
        if request.budget > 0:
            return
        del self._running[request.slot]
        self._used[request.slot] = self._round
        if not request.future.done():
            stop = "stop" if request.stopped else "length"
            request.future.set_result(
                Completion(request.tokens, request.logprobs, stop, self.version)
            )

    def _count(self, **more: float) -> None:
        with self._counting:
            self._stats.update(more)

    def _kv(self, bank: int) -> qwen.Cache:
        if self._caches[bank] is None:
            cache = qwen.init_cache(self.shape, self._bank_slots, self.context, self._cache_dtype)
            self._caches[bank] = jax.device_put(cache, self._device)
        return self._caches[bank]

    def _block_of(self, batch: list[_Request]) -> int:
        """Return the tokens to decode in one call: one, if what may follow it depends on it."""
        return 1 if batch[0].guide else self._block

    def _allowed(
        self, batch: list[_Request], rows: int, places: Iterable[int]
    ) -> np.ndarray | None:
        """Return allowed_BV, None if no request has a guide."""
        if not any(request.guide for request in batch):
            return None
        allowed_BV = np.ones((rows, self.shape.vocab), bool)
        for row, request in zip(places, batch):
            if request.guide:
                allowed_BV[row] = request.guide.allowed()
        return allowed_BV

    def _bank(self, slot: int) -> int:
        return slot // self._bank_slots

    def _window(self, tokens: int) -> int:
        return next(window for window in self._windows if window >= tokens)

    def _options(
        self, name: str, batch: list[_Request], window: int, shape: tuple[int, ...]
    ) -> dict[str, Any]:
        """Return the static arguments of a device call. Each new combination with a shape causes a
        compilation."""
        truncate = any(r.sampling.top_p < 1 or r.sampling.top_k > 0 for r in batch)
        self._shapes.add((name, window, shape, truncate, any(r.guide for r in batch)))
        return {"config": self.shape, "window": window, "truncate": truncate}


_COUNTERS = (
    *(
        "requests",
        "cancelled",
        "evictions",
        "loads",
        "generated_tokens",
        "reused_tokens",
        "shared_tokens",
    ),
    *("prefill_calls", "prefill_tokens", "prefill_padding", "prefill_seconds"),
    *("decode_calls", "decode_steps", "decode_row_steps", "decoded_tokens", "decode_seconds"),
)


@partial(jax.jit, static_argnums=(0, 2, 3))
def _decoding_copy(
    config: qwen.Config, params: Any, dtype: Any, weight_dtype: Any, version: int
) -> Any:
    # A learner that computes in bfloat16 rounds the same weights to the nearest, and the engine has
    # to agree with it.
    key = None if weight_dtype == dtype else jax.random.fold_in(jax.random.key(0), version)
    return jax.tree.map(jnp.copy, qwen.for_decoding(config, params, dtype, weight_dtype, key))


def _common(a: np.ndarray, b: np.ndarray) -> int:
    """Return the length of the longest common prefix."""
    n = min(len(a), len(b))
    differs = a[:n] != b[:n]
    return int(differs.argmax()) if differs.any() else n


def _draw(batch: list[_Request], rows: int, places: Any = None) -> decoding.Draw:
    temperature, top_p, top_k = (
        np.ones(rows, np.float32),
        np.ones(rows, np.float32),
        np.zeros(rows, np.int32),
    )
    seed, index = np.zeros((rows, 2), np.uint32), np.zeros(rows, np.int32)
    for row, request in zip(range(rows) if places is None else places, batch):
        s = request.sampling
        temperature[row], top_p[row] = s.temperature, s.top_p
        top_k[row] = min(s.top_k, np.iinfo(np.int32).max)  # a client may ask for any number
        seed[row] = (s.seed >> 32) & 0xFFFFFFFF, s.seed & 0xFFFFFFFF
        index[row] = len(request.tokens)
    return decoding.Draw(temperature, top_p, top_k, seed, index)


def _powers(start: int, end: int, by: int = 2) -> list[int]:
    """Return [start, by * start, by**2 * start, ...] below `end`, followed by `end`."""
    sizes = []
    while start < end:
        sizes.append(start)
        start *= by
    return [*sizes, end]
