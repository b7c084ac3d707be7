"""Checks of a server: its configuration before training starts, and its weights after every
update."""

import asyncio
from collections.abc import Iterable

import numpy as np

from models import hf
from rl.engines import ContextFull, EngineFault
from rl.engines.vllm.client import COMPLETIONS, GENERATE, Server, ServerBusy, ServerGone
from rl.trajectory import Sampling

# seconds between attempts at the first request; a server that has just started may refuse for a
# moment
DELAYS = (1, 2, 4, 8)


async def problems_of(
    server: Server, *, vocab: int, context: int, needs: Iterable[str], temperature: float
) -> list[str]:
    """Return one sentence per problem, [] if the server can be used. Stores the server's paths in
    `server.paths`.

    vocab: the policy's. context: tokens per session. needs: paths that weight updates use.
    temperature: the sampling temperature, at which the server must report log-probabilities.
    """
    where = server.url
    try:
        described = await _first_answer(server)
        models = (await server.ask("GET", "/v1/models", timeout=30.0)).get("data", [])
    except ServerGone as error:
        return [
            f"{where}: nothing answers there ({error}); is the address right and the server up?"
        ]
    except (ServerBusy, ValueError, AttributeError) as error:
        message = str(error)
        if "401" in message or "403" in message:
            return [
                f"{where} rejects the key: set config.engine.vllm.key to the environment variable"
                " that holds it"
            ]
        return [f"{where} is not an OpenAI-compatible server: {message}"]
    server.paths = set(described.get("paths", {})) or {COMPLETIONS}
    if not server.paths & {GENERATE, COMPLETIONS}:
        has = hf.some(sorted(server.paths), 6)
        return [f"{where} has neither {GENERATE} nor {COMPLETIONS}; it has {has}"]
    served = next((model for model in models if model.get("id") == server.model), None)
    if served is None:
        names = ", ".join(repr(model.get("id")) for model in models) or "nothing"
        return [f"{where} serves {names}, not {server.model!r}: set config.engine.vllm.model"]
    problems = []
    limit = served.get("max_model_len")
    if limit is not None and limit < context:
        problems.append(
            f"{where} has a context of {limit} tokens; config.rollout.context needs {context}"
        )
    if missing := hf.some(sorted(set(needs) - server.paths), 6):
        problems.append(
            f"{where} accepts no weights, it lacks {missing}: start it with VLLM_SERVER_DEV_MODE=1"
            " (vLLM 0.32 or newer)"
        )
    return problems + await _sampling_problems(server, vocab, temperature)


async def _first_answer(server: Server) -> dict:
    for delay in DELAYS:
        try:
            return await server.ask("GET", "/openapi.json", timeout=30.0)
        except ServerBusy:
            await asyncio.sleep(delay)
    return await server.ask("GET", "/openapi.json", timeout=30.0)


async def _sampling_problems(server: Server, vocab: int, temperature: float) -> list[str]:
    """Check token ids, vocabulary and the temperature of log-probabilities by sampling a few
    tokens."""
    where, prompt = server.url, [vocab // 2, vocab - 1]
    try:
        await server.generate(prompt, Sampling(1, temperature=1.0), timeout=120.0)
    except (EngineFault, ContextFull) as error:
        if "vocabulary" in str(error):
            return [
                f"{where} has a smaller vocabulary than the policy's {vocab} tokens: it serves"
                " another model"
            ]
        return [str(error)]
    except (ServerGone, ServerBusy) as error:
        return [f"{where} does not sample: {error}"]
    try:
        await server.generate([vocab // 2, vocab], Sampling(1, temperature=1.0), timeout=120.0)
        return [
            f"{where} has a larger vocabulary than the policy's {vocab} tokens: it serves another"
            " model"
        ]
    except (EngineFault, ContextFull, ServerGone, ServerBusy):
        pass  # as it should: the token is outside of the policy's vocabulary
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


def compare(
    new_T: np.ndarray,
    old_T: np.ndarray | None,
    served_T: np.ndarray,
    *,
    tolerance: float,
    noise: float,
) -> tuple[float, float, str]:
    """Compare scores of one fixed prompt: return (mean |served - new|, mean |new - old|, problem or
    "").

    It is a problem if the first is above `tolerance`. If old and new weights differ by less than
    the tolerance, but by more than the `noise` between exact copies, it is a problem if the server
    is closer to the old ones.
    """
    gap = float(np.mean(np.abs(served_T - new_T)))
    shift = 0.0 if old_T is None else float(np.mean(np.abs(new_T - old_T)))
    behind = float("inf") if old_T is None else float(np.mean(np.abs(served_T - old_T)))
    if not gap <= tolerance:
        held = ": it still has the old weights" if behind <= tolerance else ""
        return gap, shift, (
            f"it does not answer with the weights it was given{held} (on a fixed prompt it differs"
            " from the learner by"
            f" {gap:.2g} nats per token; rounding explains at most {tolerance:g})"
        )  # fmt: skip
    if shift > 4 * noise and behind < gap:
        return gap, shift, (
            f"it still answers with the weights before the update (it differs from the old ones by"
            f" {behind:.2g} nats"
            f" per token, from the new ones by {gap:.2g})"
        )  # fmt: skip
    return gap, shift, ""
