"""The language-model roles that a config needs, the checks of their settings, and the client that
serves them.

A plug that asks language models declares this in its attribute `roles`, a tuple of names from
ROLES.
"""

import asyncio
import contextlib
import math
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from envs.packages import how_to_install, is_missing
from envs.values import json_value
from evolver.config import plugs
from evolver.config.keys import arguments
from evolver.config.paths import resolve
from evolver.files import formats
from evolver.llm.client import Chat, Limits
from evolver.llm.prompts import Prompt, prompt
from evolver.llm.questions import INITIAL_POLICY, POLICY_URLS, SERVED, Role, url_problem
from evolver.llm.store import Cache, Ledger
from evolver.processes import hosts
from models import hub
from models.files import loads

ROLES = ("explorer", "writer", "judge", "step_judge", "summariser", "reranker", "embedder")
SAMPLING = {"temperature", "top_p", "max_tokens", "model"}  # fields of a request with keys
RESERVED = SAMPLING | {
    "messages", "input", "seed", "n", "stream", "stream_options", "response_format",
}  # fmt: skip
# Keys that may change when a run resumes: addresses, speed and limits, but nothing that changes an
# answer.
RESUMABLE = (
    "llm.url", "llm.key", "llm.cache", "llm.concurrency", "llm.requests", "llm.tokens_per",
    "llm.deadline", "llm.attempts", "llm.failures", "llm.prices", "llm.budget",
    *(f"llm.serve.{key}" for key in ("python", "devices", "flags", "start_timeout", "restarts")),
    *(f"llm.{role}.url" for role in ROLES), *(f"llm.{role}.key" for role in ROLES),
)  # fmt: skip


def roles_of(config: Any) -> tuple[str, ...]:
    """Return the roles that the plugs in use declare, in the order of ROLES."""
    needed = _declared(config, "roles")
    return tuple(role for role in ROLES if role in needed)


def prompts_of(config: Any) -> tuple[str, ...]:
    """Return the names of the prompts that the plugs in use declare in their attribute
    `prompts`."""
    return tuple(_declared(config, "prompts"))


def _declared(config: Any, attribute: str) -> dict[str, None]:
    names: dict[str, None] = {}
    for _, target in _in_use(config):
        names |= dict.fromkeys(getattr(target, attribute, ()))
    return names


def _in_use(config: Any) -> Iterator[tuple[str, Callable[..., Any]]]:
    """Yield (key, target) of the plugs in use that may ask language models. Plugs that cannot be
    loaded are skipped: the config check reports them."""
    q = config.questioning
    for key, name, _ in plugs.in_config(config):
        mechanism = key.partition(".")[0]
        used = config[mechanism].get("enabled", True)
        if key == "questioning.explorer":
            used = used and (not q.tasks or q.every)
        if used and plugs.kind_of(key).given in ("Opening", "Parts"):
            with contextlib.suppress(plugs.PlugError):
                yield key, plugs.load(key, name)


def llm_problems(config: Any, mode: str) -> Iterator[str]:
    """Yield what is wrong with `config.llm`, without asking any server. A plan is not checked: it
    is made for another machine."""
    if mode == "eval":
        config = for_evaluation(config)
    for key, target in _in_use(config):
        declared = tuple(getattr(target, "roles", ()))
        if not set(ROLES).issuperset(declared):
            yield (
                f"config.{key}: a plug that asks language models declares its roles as an "
                f'attribute, such as roles = ("judge",), with names from {", ".join(ROLES)}; '
                f"it declares {declared}"
            )
    roles = role_settings(config)
    if not roles or mode == "plan":
        return
    packages = ["httpx", "jsonschema"]
    if policy_urls(config):
        packages.append("llguidance")
    for package in packages:
        if is_missing(package):
            yield f"config.llm needs {package}: {how_to_install('llm')}"
            return
    by_url: dict[str, list[str]] = {}
    by_key: dict[str, list[str]] = {}
    for name, role in roles.items():
        by_url.setdefault(role.url, []).append(name)
        by_key.setdefault(role.key, []).append(name)
        yield from _role_problems(f"config.llm.{name}", role)
    for url, names in sorted(by_url.items()):
        yield from _url_problems(config, url, ", ".join(names))
    for key, names in sorted(by_key.items()):
        if key and not os.environ.get(key, "").strip():
            yield (
                f"config.llm.key={key} ({', '.join(names)}): the environment variable {key} is not"
                f" set; export {key}=... with the server's key"
            )
    c = config.llm
    if c.serve.path and SERVED not in by_url:
        yield f"config.llm.serve.path={c.serve.path} has no role: set config.llm.url=served"
    if c.cache not in ("", "off") and os.path.isfile(os.path.expanduser(c.cache)):
        yield (
            f"config.llm.cache={c.cache} is a file; it must be a directory, which is made if "
            "necessary"
        )
    yield from _budget_problems(c, roles)


def _budget_problems(c: Any, roles: dict[str, Role]) -> Iterator[str]:
    """Yield what is wrong with the budget and the prices of `config.llm`."""
    longest = max(role.max_tokens for role in roles.values())
    if 0 < c.budget_tokens <= longest:
        yield (
            f"config.llm.budget_tokens={c.budget_tokens} is less than one answer may take "
            f"(max_tokens={longest}): no question could be asked"
        )
    try:
        prices = read_prices(c.prices)
    except (OSError, ValueError) as error:
        form = "{model: [prompt, completion]}"
        yield f"config.llm.prices={c.prices} must be a JSON file {form}: {error}"
        return
    priced = {role.model for role in roles.values() if not role.is_policy}
    unpriced = ", ".join(sorted(filter(None, priced - prices.keys())))
    if c.budget_money and unpriced:
        yield (
            "config.llm.budget_money cannot be enforced: config.llm.prices has no price of "
            f"{unpriced}"
        )
    bought = ", ".join(paid(roles, prices))
    if bought and not (c.budget_money or c.budget_tokens):
        yield (
            f"{bought} may cost money (a key, or a price in config.llm.prices), and nothing says"
            " how much may be spent: set config.llm.budget_money or config.llm.budget_tokens, or"
            " config.llm.budget_tokens=-1 for no limit; --mode=plan says what to expect"
        )


def paid(roles: Mapping[str, Role], prices: Mapping[str, tuple[float, float]]) -> list[str]:
    """Return the names of the roles whose answers may cost money: they need a key, or their model
    has a price."""
    return [name for name, role in roles.items() if role.key or any(prices.get(role.model, ()))]


def _url_problems(config: Any, url: str, names: str) -> Iterator[str]:
    """Yield what is wrong with the url of some roles."""
    if not url:
        yield (
            f"config.llm.url is empty and {names} needs it: the url of an OpenAI-compatible "
            "server, with its /v1, policy, or served"
        )
    elif url == SERVED:
        yield from _serve_problems(config.llm.serve, names)
    elif url not in POLICY_URLS:
        if problem := url_problem(url):
            text = "the url" if "@" in url else repr(url)  # it may hold a password
            if problem.startswith("is not"):
                problem += f", nor one of {', '.join((*POLICY_URLS, SERVED))}"
            yield f"config.llm.url ({names}): {text} {problem}"
    elif url == INITIAL_POLICY and config.engine.name != "jax":
        yield (
            f"config.llm.url={url} ({names}) needs config.engine.name=jax; with "
            f"{config.engine.name}, serve the initial weights with a server of their own and give "
            "its url"
        )


def _serve_problems(serve: Any, names: str) -> Iterator[str]:
    """Yield what is wrong with the model that the run is to serve for some roles."""
    folder = resolve(serve.path)
    on_hub = hub.is_id(serve.path) and not folder.exists()
    if not serve.path:
        yield f"config.llm.url=served ({names}) needs config.llm.serve.path: a checkpoint"
    elif not on_hub and not (folder / "config.json").is_file():
        yield f"config.llm.serve.path={serve.path} is no checkpoint: it has no config.json"
    if serve.python and shutil.which(serve.python) is None:
        yield f"config.llm.serve.python={serve.python} is not an executable"
    if "embedder" in names.split(", ") and not serve.python:
        yield (
            "config.llm.embedder.url=served: this project's server makes no embeddings; set"
            " config.llm.serve.python, or give the url of a server that does"
        )


def _role_problems(key: str, role: Role) -> Iterator[str]:
    """Yield what is wrong with a role, whose settings are at this key, apart from its url."""
    if not role.model:
        yield f"{key}.model and config.llm.model are empty: name a model that its server serves"
    if role.is_policy:
        if key.endswith("embedder"):
            yield f"{key}.url: the policy makes no embeddings; give the url of a server that does"
        if role.extra and not re.fullmatch(r'\s*\{\s*"top_k"\s*:\s*\d+\s*\}\s*', role.extra):
            yield f'{key}.extra={role.extra}: the policy knows top_k only: {{"top_k": 100}}'
    try:
        extra = json_value(loads(role.extra or "{}"), "a value")
        if not isinstance(extra, dict):
            raise ValueError("it is not an object")
    except ValueError as error:
        yield f'{key}.extra must be a JSON object such as {{"top_k": 100}}; {error}'
        return
    if reserved := sorted(RESERVED & extra.keys()):
        keys = ", ".join(f"{key}.{name}" for name in reserved if name in SAMPLING)
        hint = f"use {keys}" if keys else "these fields are set by the client"
        yield f"{key}.extra may not replace {', '.join(reserved)}: {hint}"


def role_settings(config: Any) -> dict[str, Role]:
    """Return the settings of each role that the config needs; url, model and key default to those
    of `config.llm`. A role that the policy answers for has the url as its model and no key."""
    c = config.llm
    roles = {}
    for name in roles_of(config):
        settings = c[name].to_dict()
        for key in ("url", "model", "key"):
            settings[key] = settings[key] or c[key]
        if settings["url"] in POLICY_URLS:
            settings |= {"model": settings["url"], "key": ""}
        if settings["url"] == SERVED:
            settings |= {"model": c.serve.path, "key": ""}
        roles[name] = Role(**settings)
    return roles


def policy_urls(config: Any) -> set[str]:
    """Return the urls, of POLICY_URLS, whose roles the policy answers for in a run of this
    config."""
    return {role.url for role in role_settings(config).values() if role.is_policy}


def question_context(config: Any) -> int:
    """Return the most tokens of a question to the policy and its answer."""
    return config.llm.context or config.rollout.context


def engine_context(config: Any) -> int:
    """Return the most tokens of a sequence of the engine: of an episode, or of a question."""
    asked = question_context(config) if policy_urls(config) else 0
    return max(config.rollout.context, asked)


def policy_prompts(config: Any) -> Iterator[tuple[str, Prompt]]:
    """Yield (role, prompt) of the questions that plugs ask the policy only."""
    settings = role_settings(config)
    for _, target in _in_use(config):
        roles = getattr(target, "roles", ())
        if roles and all(role in settings and settings[role].is_policy for role in roles):
            yield from ((roles[0], prompt(name)) for name in getattr(target, "prompts", ()))


def read_prices(path: str) -> dict[str, tuple[float, float]]:
    """Return {model: money per million (prompt tokens, completion tokens)} of `llm.prices`; {} of
    "". Raises OSError and ValueError."""
    if not path:
        return {}
    data = resolve(path).read_bytes()
    loads(data)  # refuses what pydantic would take or explain worse: a key twice, a deep nesting
    return formats.valid(formats.PRICES, data)


def make_chat(
    config: Any,
    workdir: Path,
    *,
    check: Callable[[], None],
    served: str,
    loop: asyncio.AbstractEventLoop,
) -> Chat | None:
    """Return the client of all roles that the config needs, None if it needs none. No server is
    asked yet.

    served: the address of the model that the run serves. loop: the event loop of the engines, which
    the client uses if the policy answers for a role.
    """
    c = config.llm
    roles = role_settings(config)
    if not roles:
        return None
    own = [name for name, role in roles.items() if role.url in (*POLICY_URLS, SERVED)]
    for name, role in roles.items():
        if role.url == SERVED:
            roles[name] = replace(role, url=served)
    limits = Limits(**arguments(Limits, c))
    limits = replace(limits, budget_tokens=max(0, limits.budget_tokens))  # -1 = no limit
    cache = {"": workdir / "llm_cache", "off": None}.get(c.cache, os.path.expanduser(c.cache))
    ledger = Ledger(workdir / "llm.jsonl")
    chat = Chat(
        roles,
        limits=divided(limits, ledger, hosts.count()),
        prices=read_prices(c.prices),
        cache=Cache(cache) if cache else None,
        ledger=ledger,
        check=check,
        loop=loop if policy_urls(config) else None,
    )
    if not hosts.alone():
        chat.spread_roles(own)
    return chat


def divided(limits: Limits, ledger: Ledger, processes: int) -> Limits:
    """Return the limits of one of several processes: its part of the rates, and of what is left of
    the budget. ledger: of what the run had spent before this start."""
    if processes == 1:
        return limits

    def part(limit: float, spent: float = 0.0) -> float:
        return spent + max(0.0, limit - spent) / processes if limit else limit

    return replace(
        limits,
        requests_per_minute=math.ceil(part(limits.requests_per_minute)),
        tokens_per_minute=math.ceil(part(limits.tokens_per_minute)),
        budget_money=part(limits.budget_money, ledger.money),
        # Rounded down, a small budget would become 0, which is no limit.
        budget_tokens=math.ceil(part(limits.budget_tokens, ledger.tokens)),
    )


def for_evaluation(config: Any) -> Any:
    """Return the config without the training tasks and the mechanisms that an evaluation does not
    use, so that it needs none of their servers."""
    config = config.copy_and_resolve_references()
    config.env.split = config.env.tasks = ""
    config.questioning.enabled = config.attributing.enabled = False
    config.navigating.enabled = config.navigating.enabled and config.eval.experience > 0
    return config
