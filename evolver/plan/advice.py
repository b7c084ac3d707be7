"""Find the smallest set of config changes that would make a plan fit, by arithmetic."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from evolver.config.checks import flat
from evolver.plan import analytic, estimate
from evolver.plan.estimate import Case
from evolver.plan.targets import GIB

Change = tuple[str, dict[str, Any]]  # (the flags in words, {key: value})


def changes(case: Case) -> Iterator[Change]:
    """Yield the changes to try, the cheapest first. All but the last two leave the result unchanged
    up to rounding."""
    c, values = case.config, flat(case.config)
    options: list[tuple[str, str, Any]] = [
        ("", "engine.cache_dtype", "bfloat16"),
        ("", "model.dtype", "bfloat16"),
        ("", "model.remat", "full"),
        ("", "learner.micro", case.split.rows),
    ]
    if c.loss.kl_coef and not case.rank:
        options.append(("", "loss.reference", "host"))
    if not case.rank:
        options.append(("", "optim.offload", True))
    if case.engine.shared and case.target.count <= case.target.chip.host:
        options.append(
            (" and its servers on other devices (config.engine.vllm.urls)", "engine.name", "vllm")
        )
    if not case.rank:
        options.append(("", "optim.master", "bfloat16"))
        options.append((", adapters instead of all weights", "lora.rank", 32))
    for words, key, value in options:
        if values[key] != value:
            more = {"engine.vllm.urls": ("elsewhere",)} if key == "engine.name" else {}
            yield f"--config.{key}={value}{words}", {key: value, **more}


def changed(case: Case, values: dict[str, Any]) -> Case:
    """Return the case with other values of its config."""
    config = case.config.copy_and_resolve_references()
    config.update_from_flattened_dict(values)
    return replace(case, config=config)


def peak(case: Case) -> float:
    """Return the bytes of the fullest device in its worst phase, by arithmetic alone."""
    return max(sum(row.values()) for row in estimate.memory(case, {}).values())


def advise(case: Case, record: dict[str, Any]) -> list[str]:
    """Return lines of advice for the verdict on a record of `estimate.estimate`; [] if there is
    none."""
    limit, slots = record["limit"], record["sequences"]
    asked, concurrency = case.config.engine.slots, case.config.rollout.concurrency
    on_jax = case.config.engine.name == "jax"
    if record["fits"]:
        if on_jax and slots > asked < concurrency:
            return [
                f"there is room for more episodes at a time: --config.engine.slots={min(slots, concurrency)}"
            ]
        return []
    fewer = (
        [(f"--config.engine.slots={slots}", {"engine.slots": slots})]
        if on_jax and 1 <= slots < asked
        else []
    )
    options: list[Change] = [*fewer, *changes(case)]
    found = max(sum(row.values()) for row in record["memory"].values())
    before = peak(case)
    for number in (1, 2, 3):
        for chosen in itertools.combinations(options, number):
            values = {key: value for _, change in chosen for key, value in change.items()}
            expected = (
                found + peak(changed(case, values)) - before
            )  # the record may hold compiled figures
            if expected <= limit:
                words = " ".join(text for text, _ in chosen)
                return [
                    f"would fit, at about {expected / GIB:.0f} of {limit / GIB:.0f} GiB, with {words}"
                ]
    return [_more_devices(case, record)]


def _more_devices(case: Case, record: dict[str, Any]) -> str:
    """Return how many devices of this kind would hold the run, with all changes except adapters and
    other servers."""
    least = {"engine.slots": 1} | {
        key: value for _, change in changes(case) for key, value in change.items()
    }
    for other_run in ("lora.rank", "engine.name", "engine.vllm.urls"):
        least.pop(other_run, None)
    for count in (2, 4, 8, 16, 32, 64):
        if count > case.target.count:
            target = replace(case.target, count=count)
            config, _ = estimate.adapted(changed(case, least).config, target)
            if peak(Case(config, case.shape, target)) <= record["limit"]:
                return f"no change of the config makes it fit on this target; {count} devices would be enough"
    weights = analytic.BYTES[case.config.model.dtype] * record["sizes"]["parameters"]
    place = (
        ""
        if case.target.count <= case.target.chip.host
        else f" on at most {case.target.chip.host} devices"
    )
    return (
        f"no change of the config makes it fit: the engine alone needs {weights / GIB:.0f} GiB for its weights, the"
        f" memory of {math.ceil(weights / record['limit'])} such devices; let vLLM servers generate{place}"
    )
