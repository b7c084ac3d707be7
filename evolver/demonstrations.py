"""Scripted demonstrations for imitation: who makes them, and what can be wrong with asking for them. Imports no jax."""

from __future__ import annotations

import dataclasses
import importlib
import json
import random
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import envs
from rl.seeds import seed_of

# Text between which a turn's words stand. As single tokens they halve an episode, for a policy that knows one format.
TEMPLATE_TOKENS = (
    '\n{"name": "',
    '", "arguments": {"',
    '": "',
    '", "',
    '"}}\n',
    "user\n<tool_response>\n",
    "\n</tool_response>",
    "assistant\n",
    "user\n",
    "system\n",
)


def known() -> list[str]:
    """The environments that have demonstrations."""
    return sorted(path.parent.name for path in Path(envs.__file__).parent.glob("*/demos.py"))


def module(env: str) -> Any:
    """`envs.<env>.demos`: `demonstrate(rng, *, care, hint, **arguments of the world)` gives an episode, {"messages",
    "success", "hinted"} and "tools" where the prompt lists them; TOKENS are what its episodes copy."""
    return importlib.import_module(f"envs.{env}.demos")


def make(env: str, n: int, seed: int, **kwargs: Any) -> list[dict[str, Any]]:
    """`n` demonstrated episodes of `module(env)`, by two worker processes; the same seed gives the same ones."""
    seeds = [seed_of(seed, "demonstration", i) for i in range(n)]
    with ProcessPoolExecutor(2, mp_context=get_context("spawn")) as workers:
        return list(workers.map(_Demonstrate(env, kwargs), seeds, chunksize=200))


@dataclasses.dataclass
class _Demonstrate:
    """A picklable call."""

    env: str
    kwargs: dict[str, Any]

    def __call__(self, seed: int) -> dict[str, Any]:
        return module(self.env).demonstrate(random.Random(seed), **self.kwargs)


def texts_of(episode: dict[str, Any]) -> list[str]:
    """What the tokenizer is trained on: the messages, and the tools as the chat template writes them."""
    tools = [json.dumps(tool, ensure_ascii=False) for tool in episode.get("tools", ())]
    return tools + [message["content"] for message in episode["messages"]]


def extra_tokens(env: str) -> tuple[str, ...]:
    """What the tokenizer holds as single tokens, beside bytes and Qwen's own."""
    return (*TEMPLATE_TOKENS, *module(env).TOKENS)


def problems(config: Any) -> Iterator[str]:
    """An environment without demonstrations, values that it cannot demonstrate with, a vocabulary without room."""
    from models.tokenizer import QWEN_TOKENS

    name, part, args = config.env.name, config.imitation, config.env.args.to_dict()
    if name not in known():
        yield f"config.env.name={name} has no demonstrations to imitate; {' and '.join(known())} have"
        return
    try:  # one of them, here: what fails in it would fail in a worker
        module(name).demonstrate(random.Random(0), care=part.care, hint=part.hint, **args)
    except Exception as error:  # whatever an environment raises is what the user has to read
        yield (
            f"config.env.name={name} cannot be demonstrated with config.env.args={args}, imitation.care={part.care}"
            f" and imitation.hint={part.hint}: {error}"
        )
    least = 256 + len(QWEN_TOKENS) + len(extra_tokens(name))
    if part.vocab < least:
        yield f"config.imitation.vocab={part.vocab} has no room: bytes and fixed tokens of {name} take {least}"
