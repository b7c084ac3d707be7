"""The policy as a language model: questions answered by an engine of this run."""

import hashlib
import itertools
import json
from dataclasses import InitVar, dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from envs.world import Evaluation, Task
from evolver.llm.questions import Call, ChatError, Record, Said
from models import chat
from models.tokenizer import Tokenizer
from rl.checkpoint import places
from rl.engines import ContextFull, Engine
from rl.engines.grammar import Grammars
from rl.seeds import seed_of
from rl.trajectory import Completion, Sampling, StopReason, Trajectory, Turn


@dataclass(eq=False)
class PolicyResponder:
    """Answers questions with an engine.

    `weights`, a part of the cache's key, names the engine's weights by their content. The number of
    the last update would not do, because runs that share a cache give one number to different
    weights.

    context: most tokens of prompt and answer together. params: the weights that the engine has now.
    grammars: make the engine's guides; None = answers are not held to schemas. temperature: that of
    the learner's log-probabilities. All but `expect` runs on the engine's event loop.
    """

    engine: Engine
    tokenizer: Tokenizer
    context: int
    params: InitVar[Any]
    grammars: Grammars | None = None
    temperature: float = 1.0

    def __post_init__(self, params: Any) -> None:
        self._sessions = itertools.count()
        self._weights: dict[int, str] = {}  # by version
        self.expect(params, self.engine.version)

    def expect(self, params: Any, version: int) -> None:
        """Note the weights that the engine is about to load."""
        self._weights[version] = fingerprint(params)

    @property
    def weights(self) -> str:
        """The name of the weights that the engine has now."""
        return self._weights[self.engine.version]

    async def answer(self, call: Call) -> Record:
        """Return the record of the answer to a question. It is cut where the context ends.

        The answer is held to the schema, if there are grammars and the call asks for it. The
        question seeds the sampling, so that the same weights answer it alike. The log-probabilities
        are left out where they are not the policy's own: of an answer that was held, and at another
        temperature than the learner's. Raises ChatError and EngineFault.
        """
        session = f"chat/{next(self._sessions)}"
        held = {}
        try:
            ids = chat.opening(self.tokenizer, call.body["messages"])
            if self.grammars and call.schema is not None and call.held:
                held["guide"] = self.grammars.guide(call.schema)
            body = call.body
            room = self.context - len(ids)
            if room < 1:
                limit = f"of {self.context} (config.llm.context) none is left for an answer"
                raise ContextFull(f"the question has {len(ids)} tokens, and {limit}")
            sampling = Sampling(
                max_tokens=min(body["max_tokens"], room),
                temperature=body["temperature"],
                top_p=body["top_p"] or 1e-9,
                top_k=body.get("top_k", 0),
                stop_tokens=self.tokenizer.stops,
                seed=seed_of(json.dumps(body | {"model": ""}, sort_keys=True)),
            )
            completion = await self.engine.generate(ids, sampling, session=session, **held)
        except ContextFull as error:
            raise ChatError("context", str(error)) from None
        except (chat.ChatError, ValueError) as error:
            raise ChatError("request", str(error)) from None
        finally:
            await self.engine.release(session)
        own = not held and (sampling.temperature or 1.0) == self.temperature
        return {
            "text": self.tokenizer.decode(completion.text_tokens),
            "finish": completion.stop,
            "prompt_tokens": len(ids),
            "completion_tokens": len(completion.tokens),
            "tokens": completion.tokens,
            "logprobs": [float(value) for value in completion.logprobs if own],
            "version": completion.version,
        }


def trajectory_of(said: Said, tokenizer: Tokenizer) -> Trajectory:
    """Return an answer of the policy as a rollout of one turn, so that it can train: the task is
    the question, and the policy's tokens are those that were sampled."""
    question = said.question
    reply = said.reply
    messages = list(question.messages)
    completion = Completion(reply.tokens, reply.logprobs, reply.finish, reply.version)
    name = hashlib.sha256(said.key.encode()).hexdigest()[:16]
    task = Task(f"{question.role}/{name}", question.role, messages[-1]["content"])
    turn = Turn(chat.opening(tokenizer, messages), completion, reply.text, [])
    stop = StopReason.LENGTH if reply.finish == "length" else StopReason.DONE
    score = float(said.usable)
    return Trajectory(task, 0, 0, messages, [turn], stop, Evaluation(score, said.usable))


def fingerprint(params: Any) -> str:
    """Return a text that differs if any weight does. It is computed where the weights are, in one
    pass."""
    sums = list(map(int, jax.device_get(_sums(jax.tree.leaves(params)))))
    return hashlib.sha256(repr(sums).encode()).hexdigest()[:16]


@jax.jit
def _sums(leaves: list[jax.Array]) -> list[jax.Array]:
    """Return for each array the sum, modulo 2**32, of hashes of its entries and their places.

    Hashes, because in a sum of products the sign bits of two entries would cancel.
    """

    def total(x: jax.Array) -> jax.Array:
        bits = jax.lax.bitcast_convert_type(x, f"uint{8 * x.dtype.itemsize}").astype(jnp.uint32)
        return jnp.sum(_mixed(bits ^ _mixed(places(x.shape))), dtype=jnp.uint32)

    return [total(x) for x in leaves]


def _mixed(x: jax.Array) -> jax.Array:
    """Return 32-bit integers as MurmurHash3 mixes them at its end."""
    x = (x ^ (x >> 16)) * np.uint32(0x85EBCA6B)
    x = (x ^ (x >> 13)) * np.uint32(0xC2B2AE35)
    return x ^ (x >> 16)
