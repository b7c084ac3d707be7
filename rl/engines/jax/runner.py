"""The device's side of the JAX engine: it gathers requests into calls of few shapes."""

import asyncio
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import KW_ONLY, dataclass, field
from functools import partial
from itertools import groupby
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from models import qwen
from rl.engines import Guide
from rl.engines.jax import decoding, kv_cache
from rl.engines.jax.slots import Slots
from rl.trajectory import Completion, Sampling

MAX_STOP_TOKENS = 8
PREFILL_BATCH = 2048  # most tokens of one prefill call, padding included
# most attention scores of one prefill call of a small model on a CPU; more would not fit into its
# caches
PREFILL_SCORES = 2**20
LARGE_SCORES = 2**26  # the same of a large model, which only bounds memory: 256 MiB
DECODE_ROWS = 16  # most rows of one decode call of a small model on a CPU, for the same reason
# groups of slots that run in parallel on a CPU; constant: the number of cores must not change
# results
BANKS = 2
SMALL = 2**25  # most bytes of weights that stay in a CPU's caches between two steps
# of a large model, or on an accelerator, all rows decode together if more than slots / FEW of them
# run
FEW = 4
COUNTERS = (
    "requests", "cancelled", "evictions", "loads", "generated_tokens", "reused_tokens",
    "shared_tokens", "prefill_calls", "prefill_tokens", "prefill_padding", "prefill_seconds",
    "decode_calls", "decode_steps", "decode_row_steps", "decoded_tokens", "decode_seconds",
)  # fmt: skip

Stream = Callable[[list[int], list[float]], None]
Column = Callable[..., np.ndarray]


@dataclass(eq=False)
class Request:
    """One generation, and how far it is."""

    session: str
    prompt: np.ndarray  # (tokens,) int32
    sampling: Sampling
    future: asyncio.Future[Completion]
    stream: Stream | None
    guide: Guide | None
    slot: int = -1
    source: int = -1  # the slot that already holds `start` tokens of the prompt
    start: int = 0  # prompt tokens that are cached
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    fault: str = ""  # of its guide or its stream: it ends this request alone

    def allowed(self, vocab: int) -> np.ndarray:
        """Return a mask over the vocabulary: the tokens that may come next, at least one."""
        if self.guide is not None and not self.fault:
            try:
                allowed = np.broadcast_to(self.guide.allowed(), vocab)
                if allowed.any():
                    return allowed
                self.fault = "its guide allows no token"
            except Exception as error:
                self.fault = _reason(error)
        return np.ones(vocab, bool)

    def take(self, tokens: list[int], logprobs: list[float]) -> None:
        """Note the next tokens, and tell them to the guide and the stream."""
        self.tokens += tokens
        self.logprobs += logprobs
        if self.fault:
            return
        try:
            if self.guide is not None:
                for token in tokens:
                    self.guide.accept(token)
            if self.stream is not None and not self.future.done():
                self.stream(tokens, logprobs)
        except Exception as error:
            self.fault = _reason(error)

    @property
    def stopped(self) -> bool:
        return bool(self.tokens) and self.tokens[-1] in self.sampling.stop_tokens

    @property
    def length(self) -> int:
        """The number of tokens so far, prompt included."""
        return len(self.prompt) + len(self.tokens)

    @property
    def rest(self) -> int:
        """The prompt tokens that are not cached."""
        return len(self.prompt) - self.start

    @property
    def budget(self) -> int:
        """The tokens that it may still generate."""
        return 0 if self.stopped else self.sampling.max_tokens - len(self.tokens)


Requests = list[Request]
Result = tuple[Request, list[int], list[float]]  # new tokens of a request, and their logprobs
Work = Callable[[int, Requests], list[Result]]  # on a bank: `prefill` or `decode` of a Runner


class Shapes:
    """The shapes of all device calls. There are few, because each one is compiled.

    windows: positions of the cache that a call reads. pieces: prompt tokens of a row of a prefill
    call. copied, decoded: rows of calls that copy prefixes or decode. in_place: calls that decode
    all slots of a bank work on the cache itself. banks: each has its own cache, so that threads can
    work on banks in parallel; several devices have one each.
    """

    def __init__(
        self, config: qwen.Config, *, slots: int, context: int, prefill: int, dtype: Any, cpu: bool,
        devices: int,
    ):  # fmt: skip
        # A small model on a CPU decodes a copy of a few rows' keys and values, which stays in the
        # processor's caches. The weights of a large one are read from memory at each step, so that
        # a step serves all rows, in one bank, or few. The numbers of few rows are far apart there,
        # because XLA takes long to compile many layers. Even all rows decode a copy on a CPU, as a
        # step in place would copy the window of each layer.
        large = qwen.parameter_count(config) * jnp.dtype(dtype).itemsize > SMALL
        self.in_place, together = not cpu, not cpu or large
        own = BANKS if not together and slots >= BANKS * DECODE_ROWS else 1
        self.banks = devices if devices > 1 else own
        size = -(-slots // self.banks)
        few = max(1, size // FEW) if together else min(size, DECODE_ROWS)
        self.copied = _powers(4, few, by=4 if cpu and large else 2)
        self.decoded = sorted({*self.copied, size}) if together else self.copied
        # An accelerator computes padding faster than it compiles another shape: with the shapes of
        # a CPU, compilation took two minutes of the first evaluation on an H100.
        self._padded, by = not cpu, 2 if cpu else 4
        between = _powers(192, context) if cpu else []
        self.windows = sorted({*_powers(128, context), *between})
        self.pieces = _powers(16, min(prefill, context), by=by)
        self._by, self._context, self._bank_size = by, context, size
        most = 2**40 if not cpu else LARGE_SCORES if large else PREFILL_SCORES
        self._scores = most // config.heads

    def window(self, tokens: int) -> int:
        """Return the window of a call that reads this many positions; padding may exceed the
        context."""
        return _at_least(min(tokens, self._context), self.windows)

    def piece(self, request: Request) -> int:
        """Return the size of the next prompt piece: the rest rounded up to a shape, on a CPU with
        at most a quarter of it padding."""
        if self._padded:
            return _at_least(min(request.rest, self.pieces[-1]), self.pieces)
        fitting = (size for size in reversed(self.pieces) if 4 * request.rest > 3 * size)
        return next(fitting, self.pieces[0])

    def prefill_rows(self, count: int, size: int, window: int) -> int:
        """Return the smallest number of rows that holds `count` pieces, on a CPU unless a third of
        them would be idle."""
        least = min(4, self._bank_size)
        most = min(PREFILL_BATCH // size, self._scores // (size * window), self._bank_size)
        rows = _powers(least, max(most, least), by=self._by)
        if self._padded:
            return _at_least(min(count, rows[-1]), rows)
        return next((n for n in reversed(rows) if 3 * count > 2 * n), rows[0])


@dataclass(eq=False)
class Runner:
    """Prefills and decodes requests, on one device or with a bank of slots on each of several.

    weights: on each device, in the layout of `kv_cache.for_decoding`. block, leave: see
    `JaxEngine`. counters: of the calls so far. compiled: the static arguments and shapes that have
    been compiled.
    """

    config: qwen.Config
    slots: Slots
    shapes: Shapes
    _: KW_ONLY
    block: int
    leave: float
    cache_dtype: Any
    devices: Sequence[jax.Device]

    def __post_init__(self) -> None:
        self.weights: list[Any] = []
        self.compiled: set[tuple[Any, ...]] = set()
        self.counters: dict[str, float] = dict.fromkeys(COUNTERS, 0)
        self._counting = threading.Lock()
        self._threads = ThreadPoolExecutor(self.shapes.banks)
        self.drop_caches()

    def drop_caches(self) -> None:
        """Free the memory of the KV caches; they are allocated at their first use."""
        self._caches: list[Any] = [None] * self.shapes.banks

    def count(self, **more: float) -> None:
        """Add to the counters."""
        with self._counting:
            for name, value in more.items():
                self.counters[name] += value

    def close(self) -> None:
        """End the threads."""
        self._threads.shutdown()

    def in_banks(self, work: Work, requests: Requests) -> list[Result]:
        """Run work(bank, its requests) on all banks in parallel; return the results in bank
        order."""

        def bank(request: Request) -> int:
            return self.slots.bank(request.slot)

        here, *others = [(n, list(part)) for n, part in groupby(sorted(requests, key=bank), bank)]
        futures = [self._threads.submit(work, *part) for part in others]
        try:
            results = work(*here)
        finally:
            wait(futures)  # no thread may still use a cache, even after a fault
        for future in futures:
            results += future.result()
        return results

    # --- prefill ----------------------------------------------------------------------------------

    def prefill(self, bank: int, left: Requests) -> list[Result]:
        """Prefill the uncached part of each prompt and sample the first token of each request."""
        self._copy_prefixes(bank, [r for r in left if r.source != r.slot and r.start])
        done = []
        while left:
            size = max(self.shapes.piece(r) for r in left)
            fitting = sorted(
                (r for r in left if self.shapes.piece(r) == size), key=lambda r: r.start
            )
            window = self.shapes.window(fitting[-1].start + size)
            rows = self.shapes.prefill_rows(len(fitting), size, window)
            batch = fitting[:rows]
            tokens, logprobs = self._prefill_call(bank, batch, rows, size)
            for request, token, logprob in zip(batch, tokens, logprobs):
                piece = request.prompt[request.start : request.start + size]
                self.slots.write(request.slot, request.start, piece)
                request.start += len(piece)
                if not request.rest:
                    done.append((request, [token], [logprob]))
            left = [r for r in left if r.rest]
        return done

    def _copy_prefixes(self, bank: int, requests: Requests) -> None:
        """Copy the first `start` cached tokens of each request's source slot to its own slot."""
        size = self.slots.bank_size
        for batch in _chunks(requests, self.shapes.copied[-1]):
            rows = _at_least(len(batch), self.shapes.copied)
            window = self.shapes.window(max(r.start for r in batch))
            column = partial(_column, rows, range(len(batch)))
            source = column([r.source % size for r in batch])
            slot = column([r.slot % size for r in batch], fill=size)
            self.compiled.add(("copy", window, rows))
            self._caches[bank] = decoding.copy(self._cache(bank), source, slot, window=window)
            for request in batch:
                self.slots.write(request.slot, 0, request.prompt[: request.start])

    def _prefill_call(
        self, bank: int, batch: Requests, rows: int, size: int
    ) -> tuple[list[int], list[float]]:
        """Prefill one piece of each prompt; return the token and log-probability sampled after
        it."""
        column = partial(_column, rows, range(len(batch)))
        bank_size = self.slots.bank_size
        tokens = np.zeros((rows, size), np.int32)
        for row, request in zip(tokens, batch):
            row[: request.rest] = request.prompt[request.start : request.start + size]
        count = column([min(size, r.rest) for r in batch])
        token_B, logp_B = self._call(
            "prefill", bank, batch, batch[-1].start + size, (rows, size),
            column([r.slot % bank_size for r in batch], fill=bank_size), tokens,
            column([r.start for r in batch]), count, self._draw(batch, column),
        )  # fmt: skip
        new = int(count.sum())
        self.count(prefill_tokens=new, prefill_padding=rows * size - new)
        return token_B.tolist(), logp_B.tolist()

    # --- decoding ---------------------------------------------------------------------------------

    def decode(self, bank: int, running: Requests) -> list[Result]:
        """Decode one block for each request; requests of similar length share a call."""
        running = sorted(running, key=lambda r: (r.length, r.slot))
        done = []
        for kind in ([r for r in running if not r.guide], [r for r in running if r.guide]):
            for batch in _chunks(kind, self.shapes.decoded[-1]):
                done += self._decode_call(bank, batch)
        return done

    def _decode_call(self, bank: int, batch: Requests) -> list[Result]:
        """Decode one block of tokens, one if what may follow a token depends on it."""
        size = self.slots.bank_size
        block = 1 if batch[0].guide else self.block
        rows = _at_least(len(batch), self.shapes.decoded)
        slots = [r.slot % size for r in batch]
        places = slots if rows == size else list(range(len(batch)))
        column = partial(_column, rows, places)
        padded = [(*r.sampling.stop_tokens, *[-1] * MAX_STOP_TOKENS) for r in batch]
        lines = decoding.Rows(
            slot=column(slots, fill=size),
            token=column([r.tokens[-1] for r in batch]),
            position=column([r.length - 1 for r in batch]),
            budget=column([r.budget for r in batch]),
            stop=column([stops[:MAX_STOP_TOKENS] for stops in padded], fill=-1),
            draw=self._draw(batch, column),
        )
        leave = np.int32(max(1, int(self.leave * len(batch))))
        last = max(r.length + min(block, r.budget) for r in batch)
        tokens_NB, logp_NB, steps = self._call(
            "decode", bank, batch, last - 1, (rows, block), lines, leave, block=block,
            in_place=self.shapes.in_place and rows == size,
        )  # fmt: skip
        count_B = (tokens_NB >= 0).sum(0)
        self.count(
            decode_steps=int(steps), decode_row_steps=int(steps) * rows,
            decoded_tokens=int(count_B.sum()),
        )  # fmt: skip
        results = []
        for request, row in zip(batch, places):
            tokens = tokens_NB[: count_B[row], row].tolist()
            # The last sampled token is not in the cache yet; the next call writes it.
            self.slots.write(request.slot, request.length - 1, [request.tokens[-1], *tokens[:-1]])
            results.append((request, tokens, logp_NB[: len(tokens), row].tolist()))
        return results

    # --- arguments --------------------------------------------------------------------------------

    def _cache(self, bank: int) -> kv_cache.Cache:
        size, context = self.slots.bank_size, self.slots.context
        if self._caches[bank] is None:
            # a transposed cache is for CPUs, and so is decoding a copy of it
            cache = kv_cache.init_cache(
                self.config, size, context, self.cache_dtype, transposed=not self.shapes.in_place
            )
            self._caches[bank] = jax.device_put(cache, self.devices[bank % len(self.devices)])
        return self._caches[bank]

    def _draw(self, batch: Requests, column: Column) -> decoding.Draw:
        settings, vocab = [r.sampling for r in batch], self.config.vocab
        most = np.iinfo(np.int32).max  # a client may ask for any number
        allowed = None
        if any(r.guide for r in batch):
            allowed = column([r.allowed(vocab) for r in batch], dtype=bool, fill=True)
        return decoding.Draw(
            temperature=column([s.temperature for s in settings], dtype=np.float32, fill=1),
            top_p=column([s.top_p for s in settings], dtype=np.float32, fill=1),
            top_k=column([min(s.top_k, most) for s in settings]),
            seed=column([divmod(s.seed % 2**64, 2**32) for s in settings], dtype=np.uint32),
            token_index=column([len(r.tokens) for r in batch]),
            allowed=allowed,
        )

    def _call(
        self,
        name: str,
        bank: int,
        batch: Requests,
        positions: int,
        shape: tuple[int, int],
        *arguments: Any,
        **static: Any,
    ) -> list[np.ndarray]:
        """Run a program on the first `positions` of a bank's cache; return its results.

        Each new combination of static arguments and shape causes a compilation.
        """
        window = self.shapes.window(positions)
        truncate = any(r.sampling.top_p < 1 or r.sampling.top_k > 0 for r in batch)
        self.compiled.add((name, window, shape, truncate, any(r.guide for r in batch)))
        static |= {"config": self.config, "window": window, "truncate": truncate}
        dtypes = self.weights[0]["norm"].dtype, self.cache_dtype
        static["fused"] = kv_cache.fuses(self.config, self.devices[0].platform, *dtypes)
        program = decoding.prefill if name == "prefill" else decoding.decode
        began = time.perf_counter()
        *results, self._caches[bank] = program(
            self.weights[bank % len(self.devices)], self._cache(bank), *arguments, **static
        )
        results = [np.asarray(result) for result in results]
        self.count(**{f"{name}_seconds": time.perf_counter() - began, f"{name}_calls": 1})
        return results


def _reason(error: Exception) -> str:
    return str(error) or type(error).__name__


def _column(
    rows: int, places: Sequence[int], values: Sequence[Any], *, dtype: Any = np.int32, fill: Any = 0
) -> np.ndarray:
    """Return an array with the values at their places among `rows`, and `fill` elsewhere."""
    array = np.full((rows, *np.shape(values[0])), fill, dtype)
    array[places] = values
    return array


def _chunks(requests: Requests, size: int) -> Iterator[Requests]:
    for first in range(0, len(requests), size):
        yield requests[first : first + size]


def _at_least(count: int, sizes: list[int]) -> int:
    return next(size for size in sizes if size >= count)


def _powers(start: int, end: int, by: int = 2) -> list[int]:
    """Return [start, by * start, by**2 * start, ...] below `end`, followed by `end`."""
    sizes = []
    while start < end:
        sizes.append(start)
        start *= by
    return [*sizes, end]
