"""The language-model roles that a config needs, the checks of their settings, and the client that
serves them.

A plug that asks language models declares this in its attribute `roles`, a tuple of names from
ROLES.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import math
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from envs.packages import how_to_install
from envs.values import json_value
from evolver.config import plugs
from evolver.llm.client import INITIAL, PLAYED, Chat, Limits, Role, url_problem
from evolver.llm.store import Ledger
from models.files import loads

ROLES = ("explorer", "writer", "judge", "step_judge", "summariser", "reranker", "embedder")
SAMPLING = frozenset(
    {"temperature", "top_p", "max_tokens", "model"}
)  # fields of a request with keys of their own
RESERVED = SAMPLING | {
    "messages",
    "input",
    "seed",
    "n",
    "stream",
    "stream_options",
    "response_format",
}
# Keys that may change when a run resumes: addresses, speed and limits, but nothing that changes an
# answer.
RESUMABLE = tuple(
    f"llm.{key}"
    for key in ("url", "key", "cache", "concurrency", "requests", "tokens_per", "deadline", "attempts", "failures",
                "prices", "budget", *(f"{role}.{key}" for role in ROLES for key in ("url", "key")))
)  # fmt: skip


def roles_of(config: Any) -> tuple[str, ...]:
    """Return the roles that the plugs in use declare, in the order of ROLES."""
    needed = {role for _, target in _in_use(config) for role in getattr(target, "roles", ())}
    return tuple(role for role in ROLES if role in needed)


def prompts_of(config: Any) -> tuple[str, ...]:
    """Return the names of the prompts that the plugs in use declare in their attribute
    `prompts`."""
    return tuple(
        dict.fromkeys(
            name for _, target in _in_use(config) for name in getattr(target, "prompts", ())
        )
    )


def _in_use(config: Any) -> Iterator[tuple[str, Callable[..., Any]]]:
    """Yield (key, target) of the plugs in use that may ask language models. Plugs that cannot be
    loaded are skipped: the config check reports them."""
    q = config.questioning
    for key, name, _ in plugs.in_config(config):
        mechanism = key.partition(".")[0]
        used = mechanism == key or config[mechanism].enabled
        if key == "questioning.explorer":
            used = used and (not q.tasks or q.every)
        if used and plugs.KINDS[key].given in ("Opening", "Parts"):
            with contextlib.suppress(plugs.PlugError):
                yield key, plugs.load(key, name)


def problems(config: Any, mode: str, resolve: Callable[[str], Path]) -> Iterator[str]:
    """Yield what is wrong with `config.llm`, without asking any server. A plan is not checked: it
    is made for another machine."""
    config = for_evaluation(config) if mode == "eval" else config
    for key, target in _in_use(config):
        declared = getattr(target, "roles", ())
        if set(declared) - set(ROLES):
            yield (
                f"config.{key}: a plug that asks language models declares its roles as an attribute, such as"
                f' roles = ("judge",), with names from {", ".join(ROLES)}; it declares {tuple(declared)}'
            )
    if not roles_of(config) or mode == "plan":
        return
    for package in ("httpx", "jsonschema", *["llguidance"] * bool(played(config))):
        if importlib.util.find_spec(package) is None:
            yield f"config.llm needs {package}: {how_to_install('llm')}"
            return
    roles = settings(config)
    for url in sorted({role.url for role in roles.values()}):
        names = ", ".join(name for name, role in roles.items() if role.url == url)
        if not url:
            yield (
                f"config.llm.url is empty and {names} needs it: the url of an OpenAI-compatible server, with its /v1,"
                " or policy"
            )
        elif url in PLAYED:
            yield from _problems_of_played(
                config, {name: role for name, role in roles.items() if role.url == url}
            )
        elif problem := url_problem(url):
            shown = "the url" if "@" in url else repr(url)
            also = f", nor one of {', '.join(PLAYED)}" if problem.startswith("is not") else ""
            yield f"config.llm.url ({names}): {shown} {problem}{also}"
    for name, role in roles.items():
        if not role.model:
            yield f"config.llm.{name}.model and config.llm.model are empty: name a model that its server serves"
        try:
            extra = json_value(loads(role.extra), "a value") if role.extra else {}
            if not isinstance(extra, dict):
                raise ValueError("it is not an object")
            if reserved := sorted(RESERVED & extra.keys()):
                keys = [f"config.llm.{name}.{key}" for key in reserved if key in SAMPLING]
                hint = f"use {', '.join(keys)}" if keys else "these fields are set by the client"
                yield f"config.llm.{name}.extra may not replace {', '.join(reserved)}: {hint}"
        except ValueError as error:
            yield f'config.llm.{name}.extra must be a JSON object such as {{"top_k": 100}}; {error}'
    c = config.llm
    if c.cache not in ("", "off") and os.path.isfile(os.path.expanduser(c.cache)):
        yield f"config.llm.cache={c.cache} is a file; it must be a directory, which is made if necessary"
    longest = max(role.max_tokens for role in roles.values())
    if 0 < c.budget_tokens <= longest:
        yield (
            f"config.llm.budget_tokens={c.budget_tokens} is less than one answer may take (max_tokens={longest}): no"
            " question could be asked"
        )
    try:
        prices = read_prices(resolve(c.prices)) if c.prices else {}
    except (OSError, ValueError) as error:
        yield f"config.llm.prices={c.prices} must be a JSON file {{model: [prompt, completion]}}: {error}"
        return
    unpriced = sorted(
        {role.model for role in roles.values() if role.model and not role.played} - set(prices)
    )
    if c.budget_money and unpriced:
        yield f"config.llm.budget_money cannot be enforced: config.llm.prices has no price of {', '.join(unpriced)}"


def _problems_of_played(config: Any, roles: dict[str, Role]) -> Iterator[str]:
    """Yield what is wrong with roles that the policy plays, all with the same url."""
    if roles.get("embedder"):
        yield "config.llm.embedder.url: the policy makes no embeddings; give the url of a server that does"
    names = ", ".join(roles)
    if any(role.url == INITIAL for role in roles.values()) and config.engine.name != "jax":
        yield (
            f"config.llm.url={INITIAL} ({names}) needs config.engine.name=jax; with {config.engine.name}, serve the"
            " initial weights with a server of their own and give its url"
        )
    for name, role in roles.items():
        if role.extra and not re.fullmatch(r'\s*\{\s*"top_k"\s*:\s*\d+\s*\}\s*', role.extra):
            yield f'config.llm.{name}.extra={role.extra}: the policy knows top_k only: {{"top_k": 100}}'


def settings(config: Any) -> dict[str, Role]:
    """Return the settings of each role that the config needs; url, model and key default to those
    of `config.llm`. A role that the policy plays has the url as its model and no key."""
    c, roles = config.llm, {}
    for name in roles_of(config):
        shared = {key: c[name][key] or c[key] for key in ("url", "model", "key")}
        if shared["url"] in PLAYED:
            shared |= {"model": shared["url"], "key": ""}
        roles[name] = Role(**(c[name].to_dict() | shared))
    return roles


def played(config: Any) -> set[str]:
    """Return the urls, of PLAYED, whose roles the policy plays in a run of this config."""
    return {role.url for role in settings(config).values() if role.played}


def read_prices(path: Path) -> dict[str, tuple[float, float]]:
    """Return {model: money per million (prompt tokens, completion tokens)}. Raises OSError and
    ValueError."""
    table = loads(Path(path).read_bytes())
    if not isinstance(table, dict):
        raise ValueError("a price table is a JSON object {model: [prompt, completion]}")
    for model, pair in table.items():
        numbers = isinstance(pair, list) and len(pair) == 2 and all(_is_price(x) for x in pair)
        if not numbers:
            raise ValueError(
                f"the price of {model} must be [per million prompt tokens, per million completion tokens]"
            )
    return {model: (float(pair[0]), float(pair[1])) for model, pair in table.items()}


def _is_price(x: Any) -> bool:
    return isinstance(x, int | float) and not isinstance(x, bool) and 0 <= x < math.inf


def make_chat(
    config: Any,
    workdir: Path,
    resolve: Callable[[str], Path],
    *,
    check: Callable[[], None],
    loop: Any = None,
) -> Chat | None:
    """Return the client of all roles that the config needs, None if it needs none. No server is
    asked yet.

    loop: the event loop of the engines, which the client uses if the policy plays a role.
    """
    c, roles = config.llm, settings(config)
    if not roles:
        return None
    limits = Limits(
        **{field.name: c[field.name] for field in dataclasses.fields(Limits) if field.name in c}
    )
    cache = {"": workdir / "llm_cache", "off": None}.get(c.cache, os.path.expanduser(c.cache))
    prices = read_prices(resolve(c.prices)) if c.prices else {}
    ledger, loop = Ledger(workdir / "llm.jsonl"), loop if played(config) else None
    return Chat(
        roles, limits=limits, prices=prices, cache=cache, ledger=ledger, check=check, loop=loop
    )


def for_evaluation(config: Any) -> Any:
    """Return the config without the training tasks and the mechanisms that an evaluation does not
    use, so that it needs none of their servers."""
    config = config.copy_and_resolve_references()
    config.env.split = config.env.tasks = ""
    config.questioning.enabled = config.attributing.enabled = False
    config.navigating.enabled = config.navigating.enabled and config.eval.experience > 0
    return config
