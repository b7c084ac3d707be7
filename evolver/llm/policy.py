"""The policy as a language model: questions answered by an engine of this run."""

from __future__ import annotations

import hashlib
import itertools
import json
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from evolver.llm.store import ChatError
from models import chat
from rl.engines import ContextFull, Engine
from rl.engines.grammar import Grammars
from rl.seeds import seed_of
from rl.trajectory import Sampling

if TYPE_CHECKING:
    from models.tokenizer import Tokenizer


class Player:
    """Answers questions with an engine.

    `weights`, a part of the cache's key, names the engine's weights by their content. The number of
    the last update would not do, because runs that share a cache give one number to different
    weights.

    context: most tokens of prompt and answer together. params: the weights that the engine has now.
    grammars: None = the engine cannot hold an answer to a schema. All but `expect` runs on the
    engine's event loop.
    """

    def __init__(
        self,
        engine: Engine,
        tokenizer: Tokenizer,
        context: int,
        params: Any,
        *,
        grammars: Grammars | None = None,
    ):
        self.engine, self.tokenizer, self.context, self._grammars = (
            engine,
            tokenizer,
            context,
            grammars,
        )
        self._weights: dict[int, str] = {}  # by version
        self._sessions = itertools.count()
        self.expect(params, engine.version)

    def expect(self, params: Any, version: int) -> None:
        """Note the weights that the engine is about to load."""
        self._weights[version] = fingerprint(params)

    @property
    def weights(self) -> str:
        return self._weights[self.engine.version]

    async def answer(
        self, body: dict[str, Any], schema: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """Return the record of the answer to the body of a chat completion. An answer is cut where
        the context ends.

        schema: of the JSON text that the answer is held to, if there are grammars. The question
        seeds the sampling, so that the same weights answer it alike. Raises ChatError and
        EngineFault.
        """
        session = f"chat/{next(self._sessions)}"
        try:
            ids = chat.opening(self.tokenizer, body["messages"])
            held = (
                {"guide": self._grammars.guide(schema)}
                if self._grammars and schema is not None
                else {}
            )
            completion = await self.engine.generate(
                ids, self._sampling(body, len(ids)), session=session, **held
            )
        except (ContextFull, chat.ChatError, ValueError) as error:
            raise ChatError(
                "context" if isinstance(error, ContextFull) else "request", str(error)
            ) from None
        finally:
            await self.engine.release(session)
        tokens = completion.tokens[:-1] if completion.stop == "stop" else completion.tokens
        counts = {"prompt_tokens": len(ids), "completion_tokens": len(completion.tokens)}
        return {"text": self.tokenizer.decode(tokens), "finish": completion.stop, **counts}

    def _sampling(self, body: dict[str, Any], prompt: int) -> Sampling:
        room, limit = self.context - prompt, f"config.rollout.context={self.context}"
        if room < 1:
            raise ContextFull(
                f"the question has {prompt} tokens, and {limit} leaves no room for an answer"
            )
        return Sampling(
            max_tokens=min(body["max_tokens"], room),
            temperature=body["temperature"],
            top_p=body["top_p"] or 1e-9,
            top_k=body.get("top_k", 0),
            stop_tokens=(self.tokenizer.im_end, self.tokenizer.endoftext),
            seed=seed_of(json.dumps(body | {"model": ""}, sort_keys=True)),
        )


def fingerprint(params: Any) -> str:
    """Return a text that differs if any weight does. It is computed where the weights are, in one
    pass."""
    sums = [int(x) for x in jax.device_get(_sums(jax.tree.leaves(params)))]
    return hashlib.sha256(repr(sums).encode()).hexdigest()[:16]


@jax.jit
def _sums(leaves: list[jax.Array]) -> list[jax.Array]:
    """Return for each array the sum, modulo 2**32, of hashes of its entries and their places.

    Hashes, because in a sum of products the sign bits of two entries would cancel.
    """

    def total(x: jax.Array) -> jax.Array:
        bits = jax.lax.bitcast_convert_type(x, f"uint{8 * x.dtype.itemsize}").astype(jnp.uint32)
        place = jnp.zeros(x.shape, jnp.uint32)
        for axis in range(x.ndim):
            place = place * np.uint32(x.shape[axis]) + jax.lax.broadcasted_iota(
                jnp.uint32, x.shape, axis
            )
        return jnp.sum(_mixed(bits ^ _mixed(place)), dtype=jnp.uint32)

    return [total(x) for x in leaves]


def _mixed(x: jax.Array) -> jax.Array:
    """Return 32-bit integers as MurmurHash3 mixes them at its end."""
    x = (x ^ (x >> 16)) * np.uint32(0x85EBCA6B)
    x = (x ^ (x >> 13)) * np.uint32(0xC2B2AE35)
    return x ^ (x >> 16)
