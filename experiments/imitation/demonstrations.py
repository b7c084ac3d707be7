"""Scripted demonstrations, made by worker processes, and the checks of their config keys. Imports
no jax."""

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
from models.tokenizer import QWEN_TOKENS
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


def known() -> list[str]:
    """Return the names of the environments that have demonstrations."""
    return sorted(path.parent.name for path in Path(envs.__file__).parent.glob("*/demos.py"))


def module(env: str) -> Any:
    """Return the module `envs.<env>.demos`.

    Its `demonstrate(rng, *, care, hint, **arguments of the world)` returns an episode: {"messages",
    "success", "hinted"}, and "tools" if the prompt lists them. `TOKENS` are strings that episodes
    copy; `ORIGIN` is a sentence on the demonstrated tasks, for the model card.
    """
    return importlib.import_module(f"envs.{env}.demos")


def make(env: str, n: int, seed: int, explored: str = "", **kwargs: Any) -> list[dict[str, Any]]:
    """Return `n` demonstrated episodes, made by two worker processes. They depend on `seed` only.

    They are those of `module(env)`; with a file of `explored` tasks every other one shows a
    solution of these, and all do if the environment has no demonstrations of its own.
    """
    seeds = [seed_of(seed, "demonstration", i) for i in range(n)]
    shown = [bool(explored) and (i % 2 == 1 or env not in known()) for i in range(n)]
    with ProcessPoolExecutor(2, mp_context=get_context("spawn")) as workers:
        return list(workers.map(_Demonstrate(env, explored, kwargs), seeds, shown, chunksize=200))


@dataclasses.dataclass
class _Demonstrate:
    """A call that can be pickled."""

    env: str
    explored: str
    kwargs: dict[str, Any]

    def __call__(self, seed: int, explored: bool = False) -> dict[str, Any]:
        rng = random.Random(seed)
        if not explored:
            return module(self.env).demonstrate(rng, **self.kwargs)
        from experiments.imitation.explored import demonstrate

        kwargs = {name: value for name, value in self.kwargs.items() if name != "hint"}
        return demonstrate(rng, self.explored, self.env, **kwargs)


def texts_of(episode: dict[str, Any]) -> list[str]:
    """Return the texts for training the tokenizer: the messages, and the tools as the chat template
    writes them."""
    tools = [json.dumps(tool, ensure_ascii=False) for tool in episode.get("tools", ())]
    return tools + [message["content"] for message in episode["messages"]]


def extra_tokens(env: str) -> tuple[str, ...]:
    """Return the strings that become single tokens, in addition to bytes and Qwen's own tokens."""
    return (*TEMPLATE_TOKENS, *(module(env).TOKENS if env in known() else ()))


def origin(env: str, explored: str) -> str:
    """Return sentences on the demonstrated tasks, for the model card."""
    own = [module(env).ORIGIN] if env in known() else []
    return " ".join(
        [
            *own,
            *["The explorer's solutions of its own tasks are demonstrated, too."] * bool(explored),
        ]
    )


def problems(config: Any) -> Iterator[str]:
    """Yield why the environment cannot be demonstrated, or that the vocabulary is too small."""
    name, args, explored = config.env.name, config.env.args.to_dict(), config.explored
    if name not in known() and not explored:
        yield (
            f"config.env.name={name} has no demonstrations to imitate; {', '.join(known())} have, "
            "and any world whose tasks were explored (config.explored)"
        )
        return
    show = _Demonstrate(name, explored, {"care": config.care, "hint": config.hint, **args})
    for shown in [False] * (name in known()) + [True] * bool(explored):
        try:  # one episode in this process: what fails in it would fail in a worker
            show(0, shown)
        except (
            Exception
        ) as error:  # an environment may raise anything, and its message is for the user
            yield (
                f"config.env.name={name} cannot be demonstrated with config.env.args={args}, "
                f"care={config.care}, hint={config.hint}{f' and explored={explored}' * shown}: "
                f"{error}"
            )
            return
    least = 256 + len(QWEN_TOKENS) + len(extra_tokens(name))
    if not config.model.path and config.vocab < least:
        yield (
            f"config.vocab={config.vocab} is too small: "
            f"bytes and fixed tokens of {name} take {least}"
        )
