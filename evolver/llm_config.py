"""Which chat roles a config needs, what is wrong with them, and the client that serves them."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ROLES = ("explorer", "writer", "judge", "step_judge", "summariser", "reranker", "embedder")
# What may differ when a run goes on: where and how fast, never who answers what.
RESUMABLE = tuple(
    f"llm.{key}"
    for key in ("url", "key", "cache", "concurrency", "requests", "tokens_per", "deadline", "attempts", "failures",
                "prices", "budget", *(f"{role}.{key}" for role in ROLES for key in ("url", "key")))
)  # fmt: skip


def roles_of(config: Any) -> tuple[str, ...]:
    """The roles that this config gives work to."""
    q, n, a = config.questioning, config.navigating, config.attributing
    explores = q.enabled and q.explorer == "llm" and (not q.tasks or q.every)
    needed = {
        "explorer": explores,
        "writer": explores,
        "judge": q.enabled and q.judge != "verifier",
        "step_judge": a.enabled and a.judge == "llm",
        "summariser": n.enabled and n.extractor == "llm",
        "reranker": n.enabled and n.refine != "none",
        "embedder": n.enabled and n.embedder == "endpoint",
    }
    return tuple(role for role in ROLES if needed[role])


def problems(config: Any, mode: str, resolve: Callable[[str], Path]) -> Iterator[str]:
    """What can be wrong with `config.llm` before any server is asked; a plan is made for another machine."""
    c, needed = config.llm, roles_of(for_evaluation(config) if mode == "eval" else config)
    if not needed or mode == "plan":
        return
    if importlib.util.find_spec("httpx") is None:
        yield "config.llm needs httpx: pip install -r requirements/llm.txt"
        return
    from evolver.llm import url_problem

    urls = {role: c[role].url or c.url for role in needed}
    for url in sorted(set(urls.values())):
        who = ", ".join(role for role in needed if urls[role] == url)
        if not url:
            yield f"config.llm.url is empty and {who} needs it: the url of an OpenAI-compatible server, with its /v1"
        elif problem := url_problem(url):
            yield f"config.llm.url ({who}): {'the url' if '@' in url else repr(url)} {problem}"
    for role in needed:
        if not (c[role].model or c.model):
            yield f"config.llm.{role}.model and config.llm.model are empty: name a model that its server serves"
        try:
            if c[role].extra and not isinstance(json.loads(c[role].extra), dict):
                raise ValueError("it is no object")
        except ValueError as error:
            yield f'config.llm.{role}.extra must be a JSON object such as {{"top_k": 100}}; {error}'
    try:
        prices = read_prices(resolve(c.prices)) if c.prices else {}
    except (OSError, ValueError) as error:
        yield f"config.llm.prices={c.prices}: {error}"
        return
    unpriced = sorted({model for role in needed if (model := c[role].model or c.model) and model not in prices})
    if c.budget_money and unpriced:
        yield f"config.llm.budget_money cannot be held: config.llm.prices has no price of {', '.join(unpriced)}"


def read_prices(path: Path) -> dict[str, tuple[float, float]]:
    """{model: (money per million prompt tokens, per million completion tokens)}. Raises OSError, ValueError."""
    table = json.loads(Path(path).read_text(encoding="utf-8"))
    if not isinstance(table, dict):
        raise ValueError("a price table is a JSON object {model: [prompt, completion]}")
    for model, pair in table.items():
        numbers = isinstance(pair, list) and len(pair) == 2 and all(isinstance(x, int | float) and x >= 0 for x in pair)
        if not numbers:
            raise ValueError(f"the price of {model} is [per million prompt tokens, per million completion tokens]")
    return {model: (float(pair[0]), float(pair[1])) for model, pair in table.items()}


def make_chat(config: Any, workdir: Path, resolve: Callable[[str], Path], *, check: Callable[[], None]) -> Any:
    """The client of every role that the config needs, None if it needs none. Asks no server yet."""
    c, needed = config.llm, roles_of(config)
    if not needed:
        return None
    from evolver.llm import Chat, Limits, Role
    from evolver.llm_store import Ledger

    roles = {
        name: Role(
            url=c[name].url or c.url, model=c[name].model or c.model, key=c[name].key or c.key,
            temperature=c[name].temperature, top_p=c[name].top_p, max_tokens=c[name].max_tokens, extra=c[name].extra,
        )
        for name in needed
    }  # fmt: skip
    limits = Limits(
        concurrency=c.concurrency, requests_per_minute=c.requests_per_minute, tokens_per_minute=c.tokens_per_minute,
        deadline=c.deadline, attempts=c.attempts, failures=c.failures, budget_money=c.budget_money,
        budget_tokens=c.budget_tokens,
    )  # fmt: skip
    cache = {"": workdir / "llm_cache", "off": None}.get(c.cache, c.cache)
    prices = read_prices(resolve(c.prices)) if c.prices else {}
    ledger = Ledger(workdir / "llm.jsonl")
    return Chat(roles, limits=limits, prices=prices, cache=cache, ledger=ledger, check=check)


def for_evaluation(config: Any) -> Any:
    """The config without the parts that an evaluation does not use, so that it needs none of their servers."""
    config = config.copy_and_resolve_references()
    config.questioning.enabled = config.attributing.enabled = False
    config.navigating.enabled = config.navigating.enabled and config.eval.experience
    return config
