"""Scripted demonstrations, and the checks of their config keys. Imports no jax."""

import importlib
import json
import random
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import envs
from envs.values import Json
from experiments.imitation.bpe import QWEN_TOKENS
from rl.seeds import seed_of

# Fixed text of turns. As single tokens, these strings halve the length of an episode.
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


NONE = types.SimpleNamespace(TOKENS=(), ORIGIN="")


def known() -> list[str]:
    """Return the names of the environments that have demonstrations."""
    return sorted(path.parent.name for path in Path(envs.__file__).parent.glob("*/demos.py"))


def module(env: str) -> Any:
    """Return the module `envs.<env>.demos`, NONE for a world without demonstrations.

    Its `demonstrate(rng, *, care, hint, **arguments of the world)` returns an episode: {"messages",
    "success", "hinted"}, and "tools" if the prompt lists them. `TOKENS` are strings that episodes
    copy; `ORIGIN` is a sentence on the demonstrated tasks, for the model card.
    """
    return importlib.import_module(f"envs.{env}.demos") if env in known() else NONE


def demonstrate(config: Any, care: float, seed: int, explored: bool) -> Json:
    """Return the episode of a seed by an agent that takes this care: one of the world's own
    demonstrations, or a solution of an explored task."""
    c, rng = config, random.Random(seed)
    args = c.env.args.to_dict()
    if not explored:
        return module(c.env.name).demonstrate(rng, care=care, hint=c.hint, **args)
    from experiments.imitation import explored as solutions

    return solutions.demonstrate(rng, c.explored, c.env.name, care=care, **args)


def planned(config: Any) -> list[tuple[int, bool]]:
    """Return (seed, explored) of each demonstration of a config. Every other one is of an explored
    task if there are any, and all if the environment has no demonstrations of its own."""
    c, own = config, config.env.name in known()
    return [
        (seed_of(c.seed, "demonstration", i), bool(c.explored) and (i % 2 == 1 or not own))
        for i in range(c.demonstrations)
    ]


def texts_of(episode: Json) -> list[str]:
    """Return the texts for training the tokenizer: the messages, and the tools as the chat template
    writes them."""
    tools = [json.dumps(tool, ensure_ascii=False) for tool in episode.get("tools", ())]
    return tools + [message["content"] for message in episode["messages"]]


def extra_tokens(env: str) -> tuple[str, ...]:
    """Return the strings that become single tokens, in addition to bytes and Qwen's own tokens."""
    return (*TEMPLATE_TOKENS, *module(env).TOKENS)


def origin(env: str, explored: str) -> str:
    """Return sentences on the demonstrated tasks, for the model card."""
    own = "The explorer's solutions of its own tasks are demonstrated, too." if explored else ""
    return " ".join(filter(None, (module(env).ORIGIN, own)))


def problems(config: Any) -> Iterator[str]:
    """Yield why the environment cannot be demonstrated, or that the vocabulary is too small."""
    name, args, explored = config.env.name, config.env.args.to_dict(), config.explored
    if name not in known() and not explored:
        yield (
            f"config.env.name={name} has no demonstrations to imitate; {', '.join(known())} have, "
            "and any world whose tasks were explored (config.explored)"
        )
        return
    for theirs in [False] * (name in known()) + [True] * bool(explored):
        try:  # one episode in this process: what fails in it would fail in a worker
            demonstrate(config, config.care, 0, theirs)
        except Exception as error:  # an environment may raise anything, which the user should see
            yield (
                f"config.env.name={name} cannot be demonstrated with config.env.args={args}, "
                f"care={config.care}, hint={config.hint}{f' and explored={explored}' * theirs}: "
                f"{error}"
            )
            return
    least = 256 + len(QWEN_TOKENS) + len(extra_tokens(name))
    if not config.model.path and config.vocab < least:
        yield (
            f"config.vocab={config.vocab} is too small: "
            f"bytes and fixed tokens of {name} take {least}"
        )
