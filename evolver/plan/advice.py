"""Which values would make a plan fit: the smallest set of changes that does, by arithmetic."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from evolver.config import flat
from evolver.plan import analytic, estimate, targets
from evolver.plan.estimate import Case

GIB = targets.GIB


def knobs(case: Case) -> Iterator[tuple[str, dict[str, Any]]]:
    """(words, {key: value}) of the changes to try, those that cost least first; none changes what is learnt, except for
    the last two."""
    c, known = case.config, flat(case.config)
    options = [
        ("", "engine.cache_dtype", "bfloat16"),
        ("", "model.dtype", "bfloat16"),
        ("", "model.remat", "full"),
        ("", "learner.micro", case.split.rows),
    ]
    if c.loss.kl and not case.rank:
        options.append(("", "loss.reference", "host"))
    if not case.rank:
        options.append(("", "optim.offload", True))
    if case.engine.shared and "engine.vllm.urls" in known:
        options.append((" and its servers on other devices (config.engine.vllm.urls)", "engine.name", "vllm"))
    if not case.rank:
        options.append(("", "optim.master", "bfloat16"))
        options.append((", adapters instead of all weights", "lora.rank", 32))
    for words, key, value in options:
        if key in known and known[key] != value:
            also = {"engine.vllm.urls": ("elsewhere",)} if key == "engine.name" else {}
            yield f"--config.{key}={value}{words}", {key: value, **also}


def changed(case: Case, values: dict[str, Any]) -> Case:
    """The case with other values."""
    config = case.config.copy_and_resolve_references()
    config.update_from_flattened_dict(values)
    return replace(case, config=config)


def peak(case: Case) -> float:
    """Bytes of the fullest device in its worst phase, by arithmetic alone, with a cache for one episode at least."""
    table = estimate.memory(case, {})
    return max(sum(row.values()) for row in table.values())


def predict(case: Case, values: dict[str, Any], record: dict[str, Any]) -> float:
    """The peak after a change: what the plan found, moved by what arithmetic says the change does."""
    found = max(sum(row.values()) for row in record["memory"].values())
    return found + peak(changed(case, values)) - peak(case)


def advise(case: Case, record: dict[str, Any]) -> list[str]:
    """Lines for the verdict; [] if there is nothing to say."""
    limit = record["limit"]
    if record["fits"]:
        return _slots(case, record)
    slots = _fewer_slots(case, record)
    options = [*slots, *knobs(case)]
    for size in (1, 2, 3):
        for chosen in itertools.combinations(options, size):
            values = {key: value for _, change in chosen for key, value in change.items()}
            expected = predict(case, values, record)
            if expected <= limit:
                words = " ".join(text for text, _ in chosen)
                return [f"would fit, at about {expected / GIB:.0f} of {limit / GIB:.0f} GiB, with {words}"]
    return [_more_devices(case, record)]


def _fewer_slots(case: Case, record: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    """As many sequences as fit, where that is some and fewer than asked for."""
    slots = record["sequences"]
    if case.config.engine.name != "jax" or not 1 <= slots < case.config.engine.slots:
        return []
    return [(f"--config.engine.slots={slots}", {"engine.slots": slots})]


def _slots(case: Case, record: dict[str, Any]) -> list[str]:
    slots, asked = record["sequences"], case.config.engine.slots
    if case.config.engine.name == "jax" and slots > asked < case.config.rollout.concurrency:
        most = min(slots, case.config.rollout.concurrency)
        return [f"there is room for more episodes at a time: --config.engine.slots={most}"]
    return []


def _more_devices(case: Case, record: dict[str, Any]) -> str:
    """The last resort: what is needed in all, and the first target of these chips that has it."""
    least = {"engine.slots": 1, **{key: value for _, change in knobs(case) for key, value in change.items()}}
    for other_run in ("lora.rank", "engine.name", "engine.vllm.urls"):
        least.pop(other_run, None)
    for count in (2, 4, 8, 16, 32, 64):
        if count > case.target.count:
            target = replace(case.target, count=count)
            config, _ = estimate.adapted(changed(case, least).config, target)
            if peak(Case(config, case.shape, target)) <= record["limit"]:
                return f"no value of the config makes it fit here; {count} devices would do"
    weights = analytic.BYTES[case.config.model.dtype] * record["sizes"]["parameters"]
    short = math.ceil(weights / record["limit"])
    return (
        f"no value of the config makes it fit: the engine alone needs {weights / GIB:.0f} GiB for its weights"
        f" ({short} such devices), or let vLLM servers generate"
    )
