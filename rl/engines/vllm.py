"""Rollouts on vLLM servers: sessions that stay with a replica, replicas that may die, weights that are proven.

A request goes to the replica that its session had before, so that the server's prefix cache holds its history; a new
session goes to the replica with the fewest. A replica that fails a request or a health check is taken out, its
requests move to others, and it is admitted again once it answers and has the present weights.
"""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from rl.engines import ContextFull, EngineFault
from rl.engines.transfer import Transfer, TransferError
from rl.engines.vllm_check import problems_of, proof
from rl.engines.vllm_servers import Servers, ServerStartError
from rl.engines.vllm_wire import Part, Server, ServerBusy, ServerGone
from rl.seeds import seed_of
from rl.trajectory import Completion, Sampling

PROOF_TOKENS = 48
CHANCES = 3  # readmissions in a row that may fail
PAUSE = {"finish": "wait", "cut": "abort", "keep": "keep"}  # what happens to requests in flight -> vLLM's word for it
FAULTS = (ServerGone, ServerBusy, ValueError, TransferError)  # of one server; others may go on


@dataclass(frozen=True)
class Patience:
    """How long the engine puts up with what, in one place. Seconds."""

    busy: int = 8  # answers of 429 and 5xx to one request before it is given up
    delay: float = 0.5  # before the second attempt; doubles with each, up to `longest`
    longest: float = 15.0
    beat: float = 5.0  # between two health checks of a replica
    silence: int = 4  # checks without an answer after which a replica counts as dead
    alone: float = 900.0  # without any replica before the run is given up


class WeightsNotLoaded(EngineFault):
    """A server says that it has the new weights and answers with others."""


@dataclass(eq=False)
class _Replica:
    number: int
    server: Server
    up: bool = False
    waits: bool = False  # down and healthy, for the next update
    why: str = ""  # it is down
    chances: int = CHANCES
    sessions: int = 0
    running: set[asyncio.Future[Any]] = field(default_factory=set)


class VllmEngine:
    """An `Engine` (rl/engines/__init__.py) made of vLLM servers, or of any server with the same endpoints.

    servers: those to use, started by the run or already running (`rl/engines/vllm_servers.py`).
    vocab, length: of the policy, and the tokens of a session; every server must offer as much.
    transfer: how weights get there (`rl/engines/transfer.py`); None for servers whose weights never change.
    score: (params, ids) -> log p(ids[i] | ids[:i]) for i >= 1 at temperature 1, by the learner: what proves a sync.
    in_flight: what a weight update does to requests: "finish" with the old weights first, "cut" and continued with the
        new ones, "keep": go on where they stand, with the KV of the old ones.
    tolerance: mean difference of log-probabilities that learner and server may have.
    """

    def __init__(
        self,
        servers: Servers,
        *,
        vocab: int,
        length: int,
        transfer: Transfer | None,
        score: Callable[[Any, list[int]], np.ndarray],
        in_flight: str = "finish",
        tolerance: float = 1e-3,
        temperature: float = 1.0,
        patience: Patience = Patience(),
        say: Callable[[str], None] = lambda text: None,
    ):
        self.version, self.length, self.vocab = 0, length, vocab
        self._servers, self.transfer, self._score = servers, transfer, score
        self._in_flight, self._tolerance, self._temperature = PAUSE[in_flight], tolerance, temperature
        self._patience, self._say = patience, say
        self._replicas: list[_Replica] = []
        self._of_session: dict[str, _Replica] = {}
        self._stats: Counter[str] = Counter()
        self._seconds = {"stage": 0.0, "update": 0.0}
        self._keeper: asyncio.Task[None] | None = None
        self._lock = asyncio.Lock()  # one update, or one admission, at a time
        self._probe = _probe_ids(vocab, min(PROOF_TOKENS, length - 1))
        self._proof: tuple[np.ndarray, np.ndarray | None] | None = None  # learner's scores: present, previous version
        self._noise = float("inf")  # smallest gap between learner and server that a proof has found
        self._gap = self._moved = 0.0  # of the last proof

    # --- start and end --------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Start or find the servers, and check all of them. Raises EngineFault with everything that is wrong."""
        try:
            urls = await self._servers.start()
        except ServerStartError as error:
            raise EngineFault(str(error)) from None
        self._replicas = [_Replica(n, self._servers.client(url)) for n, url in enumerate(urls)]
        needs = self.transfer.needs if self.transfer else ()
        wanted = {"vocab": self.vocab, "length": self.length, "needs": needs, "temperature": self._temperature}
        checks = [problems_of(replica.server, **wanted) for replica in self._replicas]
        problems = [problem for found in await asyncio.gather(*checks) for problem in found]
        if problems:
            raise EngineFault("the servers cannot be used:\n" + "\n".join(f"  {p}" for p in dict.fromkeys(problems)))
        for replica in self._replicas:
            replica.up = True
        if self.transfer is not None:
            try:
                await self.transfer.connect([r.server for r in self._replicas])
            except FAULTS as error:
                raise EngineFault(f"weights cannot be sent: {error}") from None

    async def close(self) -> None:
        """Stop what was started; whoever still waits gets EngineFault."""
        if self._keeper is not None:
            self._keeper.cancel()
            await asyncio.wait([self._keeper])
        for replica in self._replicas:
            self._cut_off(replica, "the engine was closed")
            await replica.server.close()
        await self._servers.stop()
        if self.transfer is not None:
            self.transfer.close()

    # --- the protocol ---------------------------------------------------------------------------------------------

    async def generate(self, prompt_ids: list[int], sampling: Sampling, *, session: str) -> Completion:
        self._check(prompt_ids, sampling)
        self._watch()
        self._stats["requests"] += 1
        tokens: list[int] = []
        logprobs: list[float] = []
        versions: list[int] = []
        refusals = 0
        while True:
            rest = sampling
            if tokens:  # cut by an update: go on behind what there is, with other random numbers
                rest = dataclasses.replace(
                    sampling, max_tokens=sampling.max_tokens - len(tokens), seed=seed_of(sampling.seed, len(tokens))
                )
            replica = await self._replica_of(session)
            before = self.version
            try:
                part = await self._ask(replica, prompt_ids + tokens, rest)
            except (ServerGone, ServerBusy) as error:
                if isinstance(error, ServerGone) and not await self._lives(replica):
                    self._take_out(replica, str(error))
                    self._stats["moved"] += 1
                    continue
                refusals += 1
                self._stats["refused"] += 1
                if refusals > self._patience.busy:
                    raise EngineFault(f"given up after {refusals} refusals: {error}") from None
                await asyncio.sleep(max(getattr(error, "after", 0.0), self._delay(refusals)))
                continue
            if part.version == -1 and self.transfer is None:
                part.version = before
            if part.version == -1:
                self._take_out(replica, f"{replica.server.url} answers with weights that nobody gave it")
                self._stats["unknown_weights"] += 1
                continue
            tokens += part.tokens
            logprobs += part.logprobs
            if part.tokens:
                versions.append(before if part.version is None else part.version)
            self._stats["prompt_tokens"] += len(prompt_ids)
            self._stats["cached_tokens"] += part.cached
            if part.stop == "abort" and len(tokens) < sampling.max_tokens:
                self._stats["cut"] += 1
                continue
            self._stats["tokens"] += len(tokens)
            stop = "length" if part.stop == "abort" else part.stop
            return Completion(tokens, logprobs, stop, min(versions, default=before))

    async def release(self, session: str) -> None:
        replica = self._of_session.pop(session, None)
        if replica is not None:
            replica.sessions -= 1

    async def load(self, params: Any, version: int) -> None:
        """Give every replica these weights and prove that it has them; one that fails is taken out.

        Raises WeightsNotLoaded, and EngineFault when no replica is left.
        """
        async with self._lock:
            began = time.monotonic()
            # The learner waits meanwhile, so nothing consumes its arrays; rollouts go on.
            scores = np.asarray(await asyncio.to_thread(self._score, params, self._probe))
            self._proof = (scores, self._proof[0] if self._proof else None)
            if self.transfer is None:
                await self._each(self._up, self._prove)
                self.version = version
                return
            self._stats["bytes"] += await asyncio.to_thread(self.transfer.stage, params)
            self._seconds["stage"] += time.monotonic() - began
            began = time.monotonic()
            try:
                done = await self._update([r for r in self._replicas if r.up or r.waits], version)
            except TransferError as error:
                raise EngineFault(str(error)) from error
            for replica in done:
                self._stats["readmitted"] += not replica.up
                replica.up, replica.waits, replica.why = True, False, ""
            self.version = version
            self._stats["loads"] += 1
            self._seconds["update"] += time.monotonic() - began
            if not done and not self._hopeful:
                raise EngineFault(f"no server took the weights of version {version}: {self._reasons}")

    def forget(self) -> None:
        """Sessions start anew. What the servers' prefix caches hold stays: it is of the present weights."""
        self._of_session.clear()
        for replica in self._replicas:
            replica.sessions = 0

    def stats(self) -> dict[str, float]:
        """Counters since the start: requests, tokens, prompt_tokens, cached_tokens of them; requests moved, cut and
        refused; answers of unknown_weights; losses and readmissions; loads, bytes staged, seconds of staging and
        updating. As it stands: replicas up, version of the weights; of the last proof the gap between learner and
        server, and the shift of the learner's own scores by the update."""
        names = ("requests", "tokens", "prompt_tokens", "cached_tokens", "moved", "cut", "refused", "unknown_weights",
                 "lost", "readmitted", "loads", "bytes")  # fmt: skip
        stats = {name: float(self._stats[name]) for name in names}
        stats |= {f"{name}_seconds": value for name, value in self._seconds.items()}
        return stats | {"gap": self._gap, "shift": self._moved} | {"replicas": len(self._up), "version": self.version}

    @property
    def urls(self) -> list[str]:
        """Addresses of the servers, in their order."""
        return [replica.server.url for replica in self._replicas]

    # --- requests -------------------------------------------------------------------------------------------------

    def _check(self, prompt_ids: list[int], sampling: Sampling) -> None:
        if not prompt_ids:
            raise ValueError("an empty prompt")
        if sampling.max_tokens < 1:
            raise ValueError(f"max_tokens is {sampling.max_tokens}; it must be at least 1")
        if min(prompt_ids) < 0 or max(prompt_ids) >= self.vocab:
            raise ValueError(f"a prompt token lies outside of the vocabulary 0..{self.vocab - 1}")
        if len(prompt_ids) + sampling.max_tokens > self.length:
            raise ContextFull(
                f"{len(prompt_ids)} prompt tokens and {sampling.max_tokens} to generate exceed {self.length}"
            )

    async def _ask(self, replica: _Replica, prompt: list[int], sampling: Sampling) -> Part:
        """One request, abandoned when its replica is taken out."""
        request = asyncio.ensure_future(replica.server.generate(prompt, sampling))
        replica.running.add(request)
        try:
            return await request
        except asyncio.CancelledError:
            if replica.up or (task := asyncio.current_task()) is None or task.cancelling():
                raise
            raise ServerGone(replica.why) from None
        finally:
            replica.running.discard(request)
            if not request.done():
                request.cancel()

    async def _replica_of(self, session: str) -> _Replica:
        """The session's own replica, or the one with the fewest sessions; waits while there is none."""
        replica = self._of_session.get(session)
        if replica is not None and replica.up:
            return replica
        await self.release(session)
        ends = time.monotonic() + self._patience.alone
        while not self._up:
            if time.monotonic() > ends or not self._hopeful:
                raise EngineFault(f"no server is left: {self._reasons}")
            await asyncio.sleep(min(0.2, self._patience.beat))
        replica = min(self._up, key=lambda r: (r.sessions, r.number))
        replica.sessions += 1
        self._of_session[session] = replica
        return replica

    async def _lives(self, replica: _Replica) -> bool:
        """Whether a request that failed was alone in that: a connection may break although the server is well."""
        return replica.up and await replica.server.healthy(self._patience.beat)

    def _take_out(self, replica: _Replica, why: str) -> None:
        if not replica.up:
            return
        self._stats["lost"] += 1
        self._say(f"engine: replica {replica.number} is out: {why}")
        self._cut_off(replica, why)

    def _cut_off(self, replica: _Replica, why: str) -> None:
        replica.up, replica.why = False, why
        for request in list(replica.running):
            request.cancel()

    @property
    def _up(self) -> list[_Replica]:
        return [replica for replica in self._replicas if replica.up]

    @property
    def _hopeful(self) -> bool:
        """Whether a replica that is out may come back before the next update."""
        if self.transfer is not None and not self.transfer.replays:
            return False
        return any(
            r.chances and (self._servers.restartable or not self._servers.ended(r.number)) for r in self._replicas
        )

    @property
    def _reasons(self) -> str:
        return "; ".join(replica.why for replica in self._replicas if not replica.up)

    def _delay(self, attempt: int) -> float:
        return min(self._patience.longest, self._patience.delay * 2 ** (attempt - 1))

    # --- health ---------------------------------------------------------------------------------------------------

    def _watch(self) -> None:
        if self._keeper is None or self._keeper.done():
            self._keeper = asyncio.get_running_loop().create_task(self._keep(), name="vllm-health")

    async def _keep(self) -> None:
        """Look after every replica, for as long as the engine is used."""
        await asyncio.gather(*(self._look_after(replica) for replica in self._replicas))

    async def _look_after(self, replica: _Replica) -> None:
        silent = 0
        while True:
            await asyncio.sleep(self._patience.beat)
            if await replica.server.healthy(self._patience.beat):
                silent = 0
                if not replica.up and replica.chances:
                    await self._admit(replica)
                continue
            silent += 1
            if replica.up and silent >= self._patience.silence:
                self._take_out(replica, f"{replica.server.url} did not answer {silent} health checks")
            hangs = silent >= 3 * self._patience.silence
            if not replica.up and self._servers.restartable and (hangs or self._servers.ended(replica.number)):
                try:
                    await self._servers.restart(replica.number)
                except ServerStartError as error:
                    replica.why = str(error)
                    self._say(f"engine: replica {replica.number}: {error}")

    async def _admit(self, replica: _Replica) -> None:
        """A replica is back: give it the present weights, prove them, and let it work."""
        if self.transfer is not None and not self.transfer.replays:
            replica.waits = True
            return
        async with self._lock:
            try:
                if self.transfer is not None:
                    await self.transfer.connect([replica.server])
                admitted = await self._update([replica], self.version)
            except (*FAULTS, WeightsNotLoaded) as error:
                admitted, replica.why = [], str(error)
            if admitted:
                replica.up, replica.why, replica.chances = True, "", CHANCES
                self._stats["readmitted"] += 1
                self._say(f"engine: replica {replica.number} is back, with version {self.version}")
            else:
                replica.chances -= 1

    # --- weights --------------------------------------------------------------------------------------------------

    async def _update(self, replicas: Sequence[_Replica], version: int) -> list[_Replica]:
        """Bring replicas to the staged weights; returns those that proved to have them, the others are out."""
        if self.transfer is not None:
            replicas = await self._each(replicas, self._open)
            faults = await self.transfer.send([replica.server for replica in replicas])
            for replica, fault in zip(replicas, faults):
                if fault is not None:
                    self._fail(replica, fault)
            replicas = [replica for replica, fault in zip(replicas, faults) if fault is None]
            replicas = await self._each(replicas, lambda replica: self._finish(replica, version))
        return await self._each(replicas, self._prove)

    async def _each(self, replicas: Sequence[_Replica], action: Callable[[_Replica], Any]) -> list[_Replica]:
        """Do it to all at once; returns those that came through. WeightsNotLoaded is not caught."""
        results = await asyncio.gather(*(action(replica) for replica in replicas), return_exceptions=True)
        for replica, result in zip(replicas, results):
            if isinstance(result, FAULTS):
                self._fail(replica, result)
            elif isinstance(result, BaseException):
                raise result
        return [replica for replica, result in zip(replicas, results) if result is None]

    async def _open(self, replica: _Replica) -> None:
        await replica.server.post("/pause", params={"mode": self._in_flight})
        if self.transfer.whole:
            await replica.server.post("/start_weight_update")

    async def _finish(self, replica: _Replica, version: int) -> None:
        if self.transfer.whole:
            await replica.server.post("/finish_weight_update", {"weight_version": str(version)})
        else:
            await replica.server.post("/update_weight_version", {"new_version": str(version)})
        await replica.server.post("/reset_prefix_cache")  # keys and values of the old weights
        await replica.server.post("/resume")

    async def _prove(self, replica: _Replica) -> None:
        new, old = self._proof
        served = np.asarray(await replica.server.score(self._probe))
        gap, moved, wrong = proof(new, old, served, tolerance=self._tolerance, noise=self._noise)
        self._gap, self._moved, self._noise = gap, moved, min(self._noise, gap)
        if wrong:
            raise WeightsNotLoaded(f"{replica.server.url}: {wrong}")

    def _fail(self, replica: _Replica, fault: BaseException) -> None:
        self._take_out(replica, str(fault))
        replica.why = str(fault)


def _probe_ids(vocab: int, length: int) -> list[int]:
    """Tokens all over the vocabulary: what a random prompt is worth depends on every weight."""
    return np.random.default_rng(7).integers(0, vocab, length).tolist()
