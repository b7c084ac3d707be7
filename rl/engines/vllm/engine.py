"""The vLLM engine: sessions pinned to replicas, recovery from replicas that die, and verified
weight updates.

A session stays with its replica, whose prefix cache holds the session's history; a new session goes
to the replica with the fewest sessions. A replica that fails requests or health checks is removed
and its requests move to others. It is readmitted once it answers again and has been verified to
hold the current weights.
"""

import asyncio
import dataclasses
import itertools
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from rl.engines import EngineFault, check_request
from rl.engines.vllm.check import compare, problems_of
from rl.engines.vllm.client import Json, Part, Server, ServerBusy, ServerGone
from rl.engines.vllm.servers import Servers, ServerStartError
from rl.engines.vllm.transfer import SLEEP, WAKE, Transfer, TransferError
from rl.seeds import seed_of
from rl.trajectory import Completion, Sampling

PROBE_TOKENS = 48  # length of the fixed prompt that verifies weights
ADMISSIONS = 3  # attempts to readmit a replica before it is given up
# config.engine.in_flight -> vLLM's pause mode
PAUSE = {"finish": "wait", "cut": "abort", "keep": "keep"}
# errors of one server; the others continue
FAULTS = (ServerGone, ServerBusy, ValueError, TransferError)
REMOVED_FOR = (*FAULTS, EngineFault)


# counters, and "gap" and "shift" of the last verification
COUNTERS = (
    "requests", "tokens", "prompt_tokens", "cached_tokens", "moved", "cut", "refused",
    "unknown_weights", "lost", "readmitted", "loads", "bytes", "stage_seconds", "update_seconds",
    "sleep_seconds", "gap", "shift",
)  # fmt: skip


@dataclass(frozen=True)
class Patience:
    """Limits on retries and waiting times; times are in seconds."""

    refusals: int = 8  # answers 429 or 5xx to one request before it fails
    delay: float = 0.5  # before the first retry; doubles with each retry, up to `max_delay`
    max_delay: float = 15.0
    check_every: float = 5.0  # time between two health checks of a replica, and the timeout of each
    failed_checks: int = 4  # consecutive failed checks after which a replica counts as dead
    no_replica: float = 900.0  # time without any replica, after which requests fail


class WeightsNotLoaded(EngineFault):
    """A server accepted the new weights but answers with others."""


@dataclass(eq=False)
class _Replica:
    number: int
    server: Server
    up: bool = False
    waits: bool = False  # down but healthy; readmitted with the next update
    asleep: bool = False  # without keys and values, and perhaps without weights
    why: str = ""  # reason for being down
    admissions: int = ADMISSIONS  # attempts left
    running: set[asyncio.Future[Any]] = field(default_factory=set)
    health: asyncio.Task[None] | None = None  # its health checks


class VllmEngine:
    """An `Engine` (rl/engines/__init__.py) on vLLM servers, or on any servers with the same
    endpoints.

    servers: started by the run or already running (`rl/engines/vllm/servers.py`).
    vocab: of the policy; every server must have the same. unused: its last rows, which are never
        sampled.
    context: most tokens of a session; no server may have less.
    transfer: sends weights (`rl/engines/vllm/transfer.py`); None for servers whose weights never
        change.
    score: (params, ids) -> log p(ids[i] | ids[:i]) for i >= 1 at temperature 1, by the learner;
        verifies updates.
    in_flight: effect of an update on running requests: "finish" them first with the old weights,
        "cut" them and continue with the new weights, or "keep" them running on the old KV cache.
    tolerance: largest mean difference of log-probabilities between learner and server.
    sleeps: False if `sleep` does nothing, because the servers share no device with the learner.
    """

    def __init__(
        self,
        servers: Servers,
        *,
        vocab: int,
        unused: int = 0,
        context: int,
        transfer: Transfer | None,
        score: Callable[[Any, list[int]], np.ndarray],
        in_flight: str = "finish",
        tolerance: float = 1e-3,
        temperature: float = 1.0,
        sleeps: bool = False,
        patience: Patience = Patience(),
        say: Callable[[str], None] = lambda text: None,
    ):
        self.version, self.context, self.vocab, self._unused = 0, context, vocab, unused
        self._servers, self.transfer, self._score = servers, transfer, score
        self._in_flight, self._tolerance = PAUSE[in_flight], tolerance
        self._temperature, self._patience, self._say = temperature, patience, say
        self._sleeps, self._asleep = sleeps, False  # asleep: from `sleep` to the next update
        self._replicas: list[_Replica] = []
        self._of_session: dict[str, _Replica] = {}
        self._stats: dict[str, float] = dict.fromkeys(COUNTERS, 0.0)
        self._lock = asyncio.Lock()  # held during an update or an admission
        # A fixed random prompt over the whole vocabulary: its score depends on every weight.
        length = min(PROBE_TOKENS, context - 1)
        self._probe = np.random.default_rng(7).integers(0, vocab, length).tolist()
        # scores of the probe by the current and the last version, None where there is none yet
        self._scores: tuple[Any, Any] = (None, None)
        self._noise = float("inf")  # smallest gap between learner and server seen so far

    # --- start and end ----------------------------------------------------------------------------

    async def start(self) -> None:
        """Start the servers if they are ours, and check all of them. Raises EngineFault with all
        problems."""
        try:
            urls = await self._servers.start()
        except ServerStartError as error:
            raise EngineFault(str(error)) from None
        self._replicas = [_Replica(n, self._servers.client(url)) for n, url in enumerate(urls)]
        needs = self.transfer.needs if self.transfer else ()
        check = partial(
            problems_of, vocab=self.vocab, context=self.context, temperature=self._temperature,
            needs=(*needs, SLEEP, WAKE) if self._sleeps else needs,
        )  # fmt: skip
        found = await asyncio.gather(*(check(replica.server) for replica in self._replicas))
        if problems := dict.fromkeys(itertools.chain.from_iterable(found)):
            raise EngineFault("\n  ".join(["the servers cannot be used:", *problems]))
        for replica in self._replicas:
            replica.up = True
            replica.server.never = range(self.vocab - self._unused, self.vocab)
        if self.transfer is not None:
            try:
                await self.transfer.connect([r.server for r in self._replicas])
            except FAULTS as error:
                raise EngineFault(f"weights cannot be sent: {error}") from None

    async def close(self) -> None:
        """Stop everything that was started here. Pending requests fail with EngineFault."""
        checks = [replica.health for replica in self._replicas if replica.health is not None]
        for check in checks:
            check.cancel()
        await asyncio.gather(*checks, return_exceptions=True)
        for replica in self._replicas:
            self._cut_off(replica, "the engine was closed")
            await replica.server.close()
        await self._servers.stop()
        if self.transfer is not None:
            self.transfer.close()

    # --- the protocol -----------------------------------------------------------------------------

    async def generate(
        self,
        prompt_ids: list[int],
        sampling: Sampling,
        *,
        session: str,
        guide: Json | None = None,
    ) -> Completion:
        """Sample (see `Engine.generate`). guide: a JSON schema, to which the server holds the
        answer. Raises RequestFault if it refuses the schema."""
        check_request(prompt_ids, sampling, vocab=self.vocab, context=self.context)
        for replica in self._replicas:
            if replica.health is None or replica.health.done():
                replica.health = asyncio.create_task(self._check_health(replica))
        self._stats["requests"] += 1
        tokens: list[int] = []
        logprobs: list[float] = []
        versions: list[int] = []
        refusals = 0
        while True:
            if self._asleep:
                await self._wake()
            rest = _rest(sampling, len(tokens))
            replica = await self._replica_of(session)
            before = self.version
            try:
                part = await self._ask(replica, prompt_ids + tokens, rest, guide)
            except (ServerGone, ServerBusy) as error:
                if isinstance(error, ServerGone) and await self._is_gone(replica):
                    self._remove(replica, str(error))
                    self._stats["moved"] += 1
                else:
                    refusals += 1
                    await self._back_off(error, refusals)
                continue
            version = part.version
            if version is None or (version == -1 and self.transfer is None):
                version = before
            if version == -1:
                url = replica.server.url
                self._remove(replica, f"{url} answers with weights that this run did not send")
                self._stats["unknown_weights"] += 1
                continue
            tokens += part.tokens
            logprobs += part.logprobs
            if part.tokens:
                versions.append(version)
            self._stats["prompt_tokens"] += len(prompt_ids)
            self._stats["cached_tokens"] += part.cached
            if part.stop == "abort" and len(tokens) < sampling.max_tokens:
                self._stats["cut"] += 1
                if guide is not None:  # a server begins to follow the schema at its first token
                    tokens, logprobs, versions = [], [], []
                continue
            self._stats["tokens"] += len(tokens)
            stop = "length" if part.stop == "abort" else part.stop
            return Completion(tokens, logprobs, stop, min(versions, default=before))

    async def release(self, session: str) -> None:
        self._of_session.pop(session, None)

    async def sleep(self) -> None:
        """Let every server finish its requests and free its memory, until the next update. One that
        does not is removed and ends, because the learner needs its memory; it is started again
        after the update."""
        transfer = self.transfer
        if not self._sleeps or transfer is None:
            return

        async def fall_asleep(replica: _Replica) -> None:
            how = {"level": transfer.level, "mode": "wait"}
            await replica.server.post(SLEEP, params=how)
            replica.asleep = True

        async with self._lock:
            began, self._asleep = time.monotonic(), True  # from here on none is started
            await self._on_all(self._up, fall_asleep)
            awake = [replica for replica in self._replicas if not replica.up]
            await asyncio.gather(*(self._servers.end(replica.number) for replica in awake))
            self._stats["sleep_seconds"] += time.monotonic() - began

    async def _wake(self) -> None:
        """Wake the servers with the weights that they had, for a request that comes before the
        update."""
        async with self._lock:
            if self._asleep:  # else another request has woken them meanwhile
                await self._update(self._up, self.version)
                self._asleep = False

    async def load(self, params: Any, version: int) -> None:
        """Send these weights to every replica, asleep or awake, and verify them; remove replicas
        that fail.

        Raises WeightsNotLoaded if a replica keeps its old weights, and EngineFault if no replica is
        left.
        """
        async with self._lock:
            began = time.monotonic()
            # The learner waits for this call, so nothing donates its arrays; rollouts continue.
            scores = np.asarray(await asyncio.to_thread(self._score, params, self._probe))
            self._scores = scores, self._scores[0]
            if self.transfer is None:
                await self._on_all(self._up, self._verify)
                self.version = version
                return
            try:
                self._stats["bytes"] += await asyncio.to_thread(self.transfer.stage, params)
                self._stats["stage_seconds"] += time.monotonic() - began
                began = time.monotonic()
                done = await self._update([r for r in self._replicas if r.up or r.waits], version)
            except TransferError as error:
                raise EngineFault(str(error)) from error
            self._asleep = False
            for replica in done:
                self._stats["readmitted"] += not replica.up
                replica.up, replica.waits, replica.why = True, False, ""
                self._servers.renew(replica.number)
            self.version = version
            self._stats["loads"] += 1
            self._stats["update_seconds"] += time.monotonic() - began
            if not done and not self._may_recover:
                raise EngineFault(
                    f"no server accepted the weights of version {version}: {self._reasons}"
                )

    def clear_cache(self) -> None:
        """Forget all sessions. The servers' prefix caches stay, because they are of the current
        weights."""
        self._of_session.clear()

    def stats(self) -> dict[str, float]:
        """Return counters since the start and the current state.

        Counters: requests, tokens, prompt_tokens and how many of them were cached_tokens; requests
        moved, cut and refused; answers with unknown_weights; replicas lost and readmitted; loads,
        bytes staged, seconds of staging, updating and falling asleep. State: running replicas,
        version of the weights, and of the last verification the gap between learner and server and
        the shift of the learner's own scores by the update.
        """
        return self._stats | {"replicas": len(self._up), "version": self.version}

    def servers(self) -> list[dict[str, Any]]:
        """Return the name and the state of each replica, and the requests that it has."""
        return [
            {"name": r.server.url, "state": "up" if r.up else r.why, "running": len(r.running)}
            for r in self._replicas
        ]

    @property
    def urls(self) -> list[str]:
        """The URLs of the servers, by replica number."""
        return [replica.server.url for replica in self._replicas]

    # --- requests ---------------------------------------------------------------------------------

    async def _ask(
        self, replica: _Replica, prompt: list[int], sampling: Sampling, schema: Json | None
    ) -> Part:
        """Send one request; it fails with ServerGone when its replica is removed."""
        request = asyncio.ensure_future(replica.server.generate(prompt, sampling, schema=schema))
        replica.running.add(request)
        try:
            return await request
        except asyncio.CancelledError:
            if replica.up or (task := asyncio.current_task()) is None or task.cancelling():
                raise
            raise ServerGone(replica.why) from None
        finally:
            replica.running.discard(request)

    async def _is_gone(self, replica: _Replica) -> bool:
        """Return True if a replica does not answer: a connection may break on a healthy server."""
        return not (replica.up and await replica.server.healthy(self._patience.check_every))

    async def _back_off(self, error: ServerGone | ServerBusy, refusals: int) -> None:
        """Wait until a request that was refused so often may be sent again. Raises EngineFault for
        one that fails."""
        patience = self._patience
        self._stats["refused"] += 1
        if refusals > patience.refusals:
            message = f"the request failed after {refusals} refusals: {error}"
            raise EngineFault(message) from None
        delay = min(patience.max_delay, patience.delay * 2 ** (refusals - 1))
        await asyncio.sleep(max(error.after, delay))

    async def _replica_of(self, session: str) -> _Replica:
        """Return the session's replica, or the one with the fewest sessions; wait while no replica
        is up."""
        replica = self._of_session.get(session)
        if replica is not None and replica.up:
            return replica
        self._of_session.pop(session, None)
        ends = time.monotonic() + self._patience.no_replica
        while not self._up:
            if time.monotonic() > ends or not self._may_recover:
                raise EngineFault(f"no server is left: {self._reasons}")
            await asyncio.sleep(min(0.2, self._patience.check_every))
        sessions = Counter(self._of_session.values())
        replica = min(self._up, key=lambda r: (sessions[r], r.number))
        self._of_session[session] = replica
        return replica

    def _remove(self, replica: _Replica, why: str) -> None:
        """Send a replica no requests until it is readmitted; those that it has move to others."""
        if replica.up:
            self._stats["lost"] += 1
            self._say(f"engine: replica {replica.number} removed: {why}")
        self._cut_off(replica, why)

    def _cut_off(self, replica: _Replica, why: str) -> None:
        replica.up, replica.why = False, why
        for request in list(replica.running):
            request.cancel()

    @property
    def _up(self) -> list[_Replica]:
        return [replica for replica in self._replicas if replica.up]

    @property
    def _may_recover(self) -> bool:
        """True if a replica that is down may come back before the next update."""
        if self.transfer is not None and not self.transfer.replays:
            return False
        return any(
            r.admissions
            and (self._servers.restartable(r.number) or not self._servers.ended(r.number))
            for r in self._replicas
        )

    @property
    def _reasons(self) -> str:
        return "; ".join(replica.why for replica in self._replicas if not replica.up)

    # --- health -----------------------------------------------------------------------------------

    async def _check_health(self, replica: _Replica) -> None:
        """Remove, restart and readmit one replica according to its health checks, until
        cancelled."""
        failed = 0
        while True:
            await asyncio.sleep(self._patience.check_every)
            if await replica.server.healthy(self._patience.check_every):
                failed = 0
                if not replica.up and replica.admissions:
                    await self._admit(replica)
                continue
            failed += 1
            if replica.up and failed >= self._patience.failed_checks:
                self._remove(replica, f"{replica.server.url} did not answer {failed} health checks")
            hangs = failed >= 3 * self._patience.failed_checks
            if (
                not replica.up
                and not self._asleep  # the learner has the memory that it would take
                and self._servers.restartable(replica.number)
                and (hangs or self._servers.ended(replica.number))
            ):
                replica.asleep = False
                try:
                    await self._servers.restart(replica.number)
                except ServerStartError as error:
                    replica.why = str(error)
                    self._say(f"engine: replica {replica.number}: {error}")

    async def _admit(self, replica: _Replica) -> None:
        """Readmit a replica that answers again: send the current weights and verify them."""
        if self.transfer is not None and not self.transfer.replays:
            replica.waits = True
            return
        async with self._lock:
            if self._asleep:
                return
            try:
                if self.transfer is not None:
                    await self.transfer.connect([replica.server])
                admitted = await self._update([replica], self.version)
            except REMOVED_FOR as error:
                admitted, replica.why = [], str(error)
            if admitted:
                replica.up, replica.why, replica.admissions = True, "", ADMISSIONS
                self._stats["readmitted"] += 1
                self._say(
                    f"engine: replica {replica.number} readmitted with version {self.version}"
                )
            else:
                replica.admissions -= 1

    # --- weights ----------------------------------------------------------------------------------

    async def _update(self, replicas: Sequence[_Replica], version: int) -> list[_Replica]:
        """Wake those that sleep and send the staged weights; return the replicas that verifiably
        have them and remove the others."""
        transfer = self.transfer
        if transfer is None:
            return await self._on_all(replicas, self._verify)

        async def open_for_update(replica: _Replica) -> None:
            if replica.asleep:  # which implies the pause
                await replica.server.post(WAKE, params={"tags": "weights"})
            else:
                await replica.server.post("/pause", params={"mode": self._in_flight})
            await transfer.begin(replica.server)

        async def finish(replica: _Replica) -> None:
            await transfer.finish(replica.server, version)
            if (
                replica.asleep
            ):  # the buffers of the update are gone: now there is room for the cache
                await replica.server.post(WAKE, params={"tags": "kv_cache"})
                replica.asleep = False
            await replica.server.post("/reset_prefix_cache")  # keys and values of the old weights
            await replica.server.post("/resume")

        replicas = await self._on_all(replicas, open_for_update)
        faults = await transfer.send([replica.server for replica in replicas])
        replicas = self._without_faults(replicas, faults)
        return await self._on_all(await self._on_all(replicas, finish), self._verify)

    async def _on_all(
        self, replicas: Sequence[_Replica], action: Callable[[_Replica], Awaitable[None]]
    ) -> list[_Replica]:
        """Run `action` on all replicas in parallel; return those that succeeded. Raises
        WeightsNotLoaded."""
        faults = await asyncio.gather(*map(action, replicas), return_exceptions=True)
        return self._without_faults(replicas, faults)

    def _without_faults(
        self, replicas: Sequence[_Replica], faults: Sequence[BaseException | None]
    ) -> list[_Replica]:
        """Return the replicas without a fault, and remove the others. Raises WeightsNotLoaded, and
        what is no fault of a server."""
        for replica, fault in zip(replicas, faults):
            if fault is None:
                continue
            if isinstance(fault, WeightsNotLoaded) or not isinstance(fault, REMOVED_FOR):
                raise fault
            self._remove(replica, str(fault))
        return [replica for replica, fault in zip(replicas, faults) if fault is None]

    async def _verify(self, replica: _Replica) -> None:
        served = np.asarray(await replica.server.score(self._probe))
        gap, shift, problem = compare(
            *self._scores, served, tolerance=self._tolerance, noise=self._noise
        )
        self._stats |= {"gap": gap, "shift": shift}
        self._noise = min(self._noise, gap)
        if problem:
            raise WeightsNotLoaded(f"{replica.server.url}: {problem}")


def _rest(sampling: Sampling, done: int) -> Sampling:
    """Return how to continue after the tokens that an update has cut, with other random numbers."""
    if not done:
        return sampling
    left, seed = sampling.max_tokens - done, seed_of(sampling.seed, done)
    return dataclasses.replace(sampling, max_tokens=left, seed=seed)
