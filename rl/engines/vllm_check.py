"""What is wrong with a server, found out before anything is trained; and whether it has the weights it claims."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

import numpy as np

from rl.engines import ContextFull, EngineFault
from rl.engines.vllm_wire import COMPLETIONS, GENERATE, Server, ServerBusy, ServerGone
from rl.trajectory import Sampling

ATTEMPTS = 5  # of the first question; a server that was just started may refuse for a moment


async def problems_of(
    server: Server, *, vocab: int, length: int, needs: Iterable[str], temperature: float
) -> list[str]:
    """Sentences, one per thing that does not fit; [] for a server that can be used. Learns which paths it has.

    vocab, length: what the policy and the config need. needs: paths that new weights take. temperature:
    that of training, for which log-probabilities must be reported.
    """
    where = server.url
    try:
        described = await _first_answer(server)
        models = (await server.ask("GET", "/v1/models", timeout=30.0)).get("data", [])
    except ServerGone as error:
        return [f"{where}: nothing answers there ({error}); is the address right and the server up?"]
    except (ServerBusy, ValueError, AttributeError) as error:
        words = str(error)
        if "401" in words or "403" in words:
            return [f"{where} refuses the key: config.engine.vllm.key names the environment variable that holds it"]
        return [f"{where} is no OpenAI-compatible server: {words}"]
    server.paths = set(described.get("paths", {})) or {COMPLETIONS}
    if not server.paths & {GENERATE, COMPLETIONS}:
        return [f"{where} has neither {GENERATE} nor {COMPLETIONS}; it has {_some(server.paths)}"]
    mine = next((model for model in models if model.get("id") == server.model), None)
    if mine is None:
        names = ", ".join(repr(model.get("id")) for model in models) or "nothing"
        return [f"{where} serves {names}, not {server.model!r}: set config.engine.vllm.model"]
    found = []
    room = mine.get("max_model_len")
    if room is not None and room < length:
        found.append(f"{where} has a context of {room} tokens, config.rollout.context asks for {length}")
    if lacking := _some(path for path in needs if path not in server.paths):
        found.append(
            f"{where} takes no weights, it lacks {lacking}: start it with VLLM_SERVER_DEV_MODE=1 (vLLM 0.32 or newer)"
        )
    return found + await _sampling_problems(server, vocab, temperature)


async def _first_answer(server: Server) -> dict:
    for attempt in range(ATTEMPTS):
        try:
            return await server.ask("GET", "/openapi.json", timeout=30.0)
        except ServerBusy:
            if attempt == ATTEMPTS - 1:
                raise
            await asyncio.sleep(2**attempt)
    raise AssertionError


async def _sampling_problems(server: Server, vocab: int, temperature: float) -> list[str]:
    """Sample a little: token ids, log-probabilities at the right temperature, the right vocabulary."""
    where, prompt = server.url, [vocab // 2, vocab - 1]
    try:
        await server.generate(prompt, Sampling(1, temperature=1.0), timeout=120.0)
    except (EngineFault, ContextFull) as error:
        if "vocabulary" in str(error):
            return [f"{where} has a smaller vocabulary than the policy's {vocab} tokens: it serves another model"]
        return [str(error)]
    except (ServerGone, ServerBusy) as error:
        return [f"{where} does not sample: {error}"]
    try:
        await server.generate([vocab // 2, vocab], Sampling(1, temperature=1.0), timeout=120.0)
        return [f"{where} has a larger vocabulary than the policy's {vocab} tokens: it serves another model"]
    except (EngineFault, ContextFull, ServerGone, ServerBusy):
        pass  # it refuses a token that the policy does not have either
    if temperature in (0.0, 1.0):
        return []
    warm = await server.generate(prompt, Sampling(1, temperature=2.0, seed=3), timeout=120.0)
    raw = await server.score([*prompt, *warm.tokens])
    if abs(warm.logprobs[0] - raw[-1]) < 1e-4:
        return [
            f"{where} reports log-probabilities before the temperature of {temperature:g}:"
            " start it with --logprobs-mode processed_logprobs"
        ]
    return []


def _some(names: Iterable[str]) -> str:
    names = sorted(names)
    return ", ".join(names[:6]) + (f" and {len(names) - 6} more" if len(names) > 6 else "")


def proof(
    new_T: np.ndarray, old_T: np.ndarray | None, served_T: np.ndarray, *, tolerance: float, noise: float
) -> tuple[float, float, str]:
    """(gap, shift, what is wrong or ""): mean |served - new|, mean |new - old|, of scores of one fixed prompt.

    Wrong is a gap above `tolerance`. Between two versions that differ by less than that, but by more than the
    `noise` of exact copies, wrong is a server that is nearer to the old one.
    """
    gap = float(np.mean(np.abs(served_T - new_T)))
    shift = 0.0 if old_T is None else float(np.mean(np.abs(new_T - old_T)))
    behind = float("inf") if old_T is None else float(np.mean(np.abs(served_T - old_T)))
    if not gap <= tolerance:
        held = ": it still has the old ones" if behind <= tolerance else ""
        return gap, shift, (
            f"it does not answer with the weights it was given{held} (a fixed prompt scores {gap:.2g} nats per token"
            f" away from the learner; at most {tolerance:g} is rounding)"
        )  # fmt: skip
    if shift > 4 * noise and behind < gap:
        return gap, shift, (
            f"it still answers with the weights before the update ({behind:.2g} nats per token from those, {gap:.2g}"
            " from the new)"
        )  # fmt: skip
    return gap, shift, ""
