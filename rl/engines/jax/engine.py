"""The JAX engine: continuous batching over a KV cache that sessions keep between turns.

The scheduler is one asyncio task that runs while there are requests. Each round admits waiting
requests, prefills the prompt tokens that are not cached, and decodes one block of tokens for every
running request. No decision depends on a clock: the same requests in the same order give
bit-identical results.
"""

import asyncio
import math
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from models import qwen
from rl.engines import EngineFault, Guide, RequestFault, check_request
from rl.engines.jax import kv_cache
from rl.engines.jax.runner import MAX_STOP_TOKENS, Request, Requests, Runner, Shapes, Stream, Work
from rl.engines.jax.slots import Slots, common_prefix
from rl.trajectory import Completion, Sampling

PATIENCE = 4  # rounds for which an idle session is protected from eviction
# a prompt waits one round for another's prefill if it can reuse at least this many tokens
SHARE_TOKENS = 16


class JaxEngine:
    """An `Engine` (rl/engines/__init__.py) on one device of this process.

    shape, params: of models/qwen.py, sharded in any way; the engine keeps a copy in `dtype` on each
        of its `devices`.
    slots: sessions whose keys and values are held; when none is free, the session idle for longest
        is evicted, and its prompt is prefilled again on its next turn.
    context: most tokens of a session, prompts and generations together.
    decode_block: tokens decoded per row before the scheduler admits requests; a block ends early
        once the fraction `leave` of its rows has finished, so that their next turns can join.
    prefill: most prompt tokens per row of one prefill call.
    dtype: of the computation. weight_dtype: of the matrices, None = dtype; a product with a matrix
        of another dtype rounds its other factor to it. Matrices coarser than the computation are
        rounded stochastically, by a key that follows from the version (rl/rounding.py).
    devices: each holds all weights and its share of the slots; () = the first device. A session
        stays on its device.
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
        devices: Sequence[jax.Device] = (),
        threaded: bool = False,
    ):
        self.shape, self.slots, self.context, self.version = shape, slots, context, 0
        self._dtype, self._weight_dtype = dtype, weight_dtype or dtype
        self._devices = devices or jax.devices()[:1]
        shapes = Shapes(
            shape, slots=slots, context=context, prefill=prefill, dtype=self._weight_dtype,
            cpu=self._devices[0].platform == "cpu", devices=len(self._devices),
        )  # fmt: skip
        self._slots = Slots(slots, context, shapes.banks)
        self._runner = Runner(
            shape, self._slots, shapes, block=decode_block, leave=leave,
            cache_dtype=cache_dtype or dtype, devices=self._devices,
        )  # fmt: skip
        self._runner.weights = self._own(params, self.version)
        self._executor = ThreadPoolExecutor(1) if threaded else None
        self._waiting: Requests = []
        self._running: dict[int, Request] = {}  # by slot
        self._in_flight: dict[str, Request] = {}  # by session
        self._swap: tuple[Any, int, asyncio.Future[None]] | None = None
        self._task: asyncio.Task[None] | None = None
        self._round = 0

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
        stream: Stream | None = None,
        guide: Guide | None = None,
    ) -> Completion:
        """Sample (see `Engine.generate`); call `stream` with the tokens and log-probabilities of
        each decoded block.

        guide: allows some tokens only. Such a request is decoded token by token, apart from those
        without a guide. Raises RequestFault if the guide or the stream raises anything.
        """
        self.check(prompt_ids, sampling)
        if (last := self._in_flight.get(session)) and not last.future.done():
            raise ValueError(f"session {session!r} already has a request in flight")
        future: asyncio.Future[Completion] = asyncio.get_running_loop().create_future()
        prompt = np.asarray(prompt_ids, np.int32)
        request = Request(session, prompt, sampling, future, stream, guide)
        self._in_flight[session] = request
        self._waiting.append(request)
        self._runner.count(requests=1)
        self._wake()
        try:
            return await future
        finally:
            if future.cancelled():
                self._runner.count(cancelled=1)
            if self._in_flight.get(session) is request:
                del self._in_flight[session]

    async def release(self, session: str) -> None:
        if request := self._in_flight.get(session):
            request.future.cancel()
        self._slots.of_session.pop(session, None)

    async def load(self, params: Any, version: int) -> None:
        """Swap the weights. Running requests finish with the old weights; waiting requests get the
        new ones."""
        weights = self._own(params, version)
        while self._swap is not None:
            await asyncio.wait([self._swap[2]])
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._swap = (weights, version, done)
        self._wake()
        await done

    async def sleep(self) -> None:
        """Do nothing: weights and cache are in the pool of the learner's memory."""

    def clear_cache(self) -> None:
        """Drop all KV of an idle engine, so that later samples do not depend on earlier requests in
        any bit."""
        self._drop_cancelled()
        if self._requests:
            raise RuntimeError("clear_cache() needs an idle engine; requests are in flight")
        self._slots.clear()

    def stats(self) -> dict[str, float]:
        """Return counters since the start.

        Among them: tokens generated, prefilled, reused (from the session's own KV) and shared (from
        another's); `compiles`, the number of distinct shapes; `occupancy`, the fraction of decoded
        rows that carried a request.
        """
        counters = self._runner.counters
        return counters | {
            "occupancy": counters["decoded_tokens"] / max(1, counters["decode_row_steps"]),
            "sessions": len(self._slots.of_session),
            "compiles": len(self._runner.compiled),
            "version": self.version,
        }

    def servers(self) -> list[dict[str, Any]]:
        """Return the name and the state of this engine, and the requests that it has and that
        wait."""
        running, waiting = len(self._running), len(self._waiting)
        return [{"name": "this process", "state": "up", "running": running, "waiting": waiting}]

    async def close(self) -> None:
        """Stop. Pending requests fail with EngineFault."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
        if self._executor is not None:
            self._executor.shutdown()
        self._runner.close()

    # --- scheduling -------------------------------------------------------------------------------

    def _wake(self) -> None:
        if self._task is None or self._task.done():
            self._task = asyncio.get_running_loop().create_task(self._serve(), name="jax-engine")

    async def _serve(self) -> None:
        try:
            while self._requests or self._swap:
                await self._settle()
                self._round += 1
                self._drop_cancelled()
                self._apply_swap()
                while wave := self._admit():
                    await self._run(self._runner.prefill, wave)
                if self._running:
                    await self._run(self._runner.decode, list(self._running.values()))
        except BaseException as error:
            self._fail(str(error) or type(error).__name__)
            if not isinstance(error, Exception):
                raise

    async def _settle(self) -> None:
        """Let ready coroutines run, so that turns that ended together are continued together."""
        quiet = 0
        while quiet < 3:
            before = len(self._waiting)
            await asyncio.sleep(0)
            quiet = quiet + 1 if len(self._waiting) == before else 0

    async def _run(self, work: Work, requests: Requests) -> None:
        """Run device calls for these requests and accept their tokens."""
        run = partial(self._runner.in_banks, work, requests)
        if self._executor is None:
            results = run()
        else:
            results = await asyncio.get_running_loop().run_in_executor(self._executor, run)
        for result in results:
            self._accept(*result)

    def _accept(self, request: Request, tokens: list[int], logprobs: list[float]) -> None:
        if not all(map(math.isfinite, logprobs)):
            raise FloatingPointError(
                f"the weights of version {self.version} give logits that are not finite"
            )
        request.take(tokens, logprobs)
        self._runner.count(generated_tokens=len(tokens))
        if request.budget > 0 and not request.fault:
            return
        del self._running[request.slot]
        self._slots.used[request.slot] = self._round
        if request.future.done():
            return
        if request.fault:
            request.future.set_exception(RequestFault(request.fault))
        else:
            stop = "stop" if request.stopped else "length"
            request.future.set_result(
                Completion(request.tokens, request.logprobs, stop, self.version)
            )

    def _fail(self, reason: str) -> None:
        """End everything that is pending with a fault."""
        pending: list[asyncio.Future[Any]] = [request.future for request in self._requests]
        if self._swap is not None:
            pending.append(self._swap[2])
        for future in pending:
            if not future.done():
                future.set_exception(EngineFault(f"the JAX engine failed: {reason}"))
        self._waiting, self._running, self._swap = [], {}, None
        self._runner.drop_caches()  # a failed call may have consumed its donated cache
        self._slots.clear()

    @property
    def _requests(self) -> Requests:
        return [*self._waiting, *self._running.values()]

    def _drop_cancelled(self) -> None:
        self._waiting = [r for r in self._waiting if not r.future.done()]
        self._running = {slot: r for slot, r in self._running.items() if not r.future.done()}

    def _apply_swap(self) -> None:
        if self._swap is None or self._running:
            return
        self._runner.weights, self.version, done = self._swap
        self._swap = None
        self._runner.count(loads=1)
        self._slots.filled[:] = 0  # KV of the old weights is recomputed on a session's next turn
        if not done.done():
            done.set_result(None)

    def _own(self, params: Any, version: int) -> list[Any]:
        """Return a copy of the weights on each device in decoding layout; the learner may then
        donate its own arrays."""
        expected = jax.tree.map(lambda w: w.shape, qwen.weights(self.shape))
        given = jax.tree.map(lambda a: a.shape, params)
        if given != expected:
            raise ValueError("the weights do not match the engine's model: names or shapes differ")
        copies = (jax.device_put(params, device) for device in self._devices)
        dtypes = self._dtype, self._weight_dtype
        return [_decoding_copy(self.shape, copy, *dtypes, version) for copy in copies]

    # --- admission --------------------------------------------------------------------------------

    def _admit(self) -> Requests:
        """Assign slots to waiting requests, in order, and return those to prefill now.

        A prompt that shares a longer prefix with another prompt of this wave than with the cache
        waits for the next wave, which follows at once: the rollouts of a group prefill their common
        prompt once.
        """
        wave: Requests = []
        if self._swap is not None:
            return wave
        # source slot -> positions that must not change until they are copied
        pinned: dict[int, int] = {}
        for request in self._waiting:
            slot = self._slots.of_session.get(request.session)
            source, start = self._slots.longest_prefix(request.prompt, slot)
            if slot is None:
                reusable = start + SHARE_TOKENS
                if any(common_prefix(r.prompt, request.prompt) >= reusable for r in wave):
                    continue
                near = source if start >= SHARE_TOKENS else None
                # Sessions used in the last rounds are not evicted, because their next turn is
                # likely to come soon, unless no request is running.
                recent = self._round - PATIENCE if self._running else self._round
                slot = self._slots.free({*self._running, *pinned}, near, recent)
                if slot is None:
                    continue
                bank = self._slots.bank(slot)
                if bank != self._slots.bank(source):
                    source, start = self._slots.longest_prefix(request.prompt, bank=bank)
            kept = start if source == slot else 0
            if pinned.get(slot, 0) > kept:
                continue
            request.slot, request.source, request.start = slot, source, start
            self._running[slot] = request
            self._runner.count(evictions=self._slots.own(request.session, slot))
            self._slots.filled[slot] = kept
            self._runner.count(**{"reused_tokens" if source == slot else "shared_tokens": start})
            pinned[source] = max(pinned.get(source, 0), start)
            wave.append(request)
        self._waiting = [r for r in self._waiting if r.slot < 0]
        return wave


@partial(jax.jit, static_argnums=(0, 2, 3))
def _decoding_copy(
    config: qwen.Config, params: Any, dtype: Any, weight_dtype: Any, version: int
) -> Any:
    # A learner that computes in bfloat16 rounds the same weights to the nearest, and the engine has
    # to agree with it.
    key = None if weight_dtype == dtype else jax.random.fold_in(jax.random.key(0), version)
    return jax.tree.map(jnp.copy, kv_cache.for_decoding(config, params, dtype, weight_dtype, key))
