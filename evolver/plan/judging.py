"""Calls to language models other than the policy, and what they cost."""

from __future__ import annotations

import json
from typing import Any

from evolver.paths import resolve
from evolver.plan.placement import read

ANSWER = 500  # tokens of one, on average
ROLES = {  # what a call is for: the role of config.llm that answers, and the key that says whether it is asked
    "outcomes of synthetic tasks": ("judge", "questioning.judge", ("naive", "principle", "reference")),
    "labels of steps": ("step_judge", "attributing.judge", ("llm",)),
    "experience": ("summariser", "navigating.extractor", ("llm",)),
    "retrieved experience": ("reranker", "navigating.refine", ("rerank", "rewrite")),
    "exploration": ("explorer", "questioning.explorer", ("llm",)),
}


def bill(config: Any, episode: float) -> dict[str, Any]:
    """{"calls": {what: number in a run}, "possible": those that a language model could be asked, "read", "written":
    tokens, "cost": money or None}. `episode`: tokens of one, on average: what a judge reads.

    The embedded mechanisms grade by replay and by verifiers, and extract by contrast: no calls.
    """
    possible = _amounts(config)
    asked = {what: n for what, n in possible.items() if read(config, ROLES[what][1], "") in ROLES[what][2]}
    counted = asked or possible
    tokens = sum(counted.values()) * episode
    return {
        "calls": asked,
        "possible": possible,
        "read": tokens,
        "written": sum(counted.values()) * ANSWER,
        "cost": _cost(config, asked, episode),
    }


def _amounts(config: Any) -> dict[str, int]:
    """Calls of a run, by what for; one for each trajectory, experience or retrieval, one for each step of a walk."""
    c, amounts = config, {}
    trajectories = c.steps * c.rollout.tasks * c.rollout.group
    if c.questioning.enabled:
        amounts["outcomes of synthetic tasks"] = round(c.questioning.share * trajectories)
        if not c.questioning.tasks:
            amounts["exploration"] = c.questioning.budget * (c.questioning.breadth + c.questioning.depth)
    if c.attributing.enabled:
        amounts["labels of steps"] = trajectories
    if c.navigating.enabled:
        amounts["retrieved experience"] = round(c.navigating.share * trajectories)
        amounts["experience"] = c.navigating.tasks * c.navigating.rollouts
        if c.navigating.every:
            amounts["experience"] += trajectories // c.navigating.every
    return amounts


def _cost(config: Any, asked: dict[str, int], episode: float) -> float | None:
    """By config.llm.prices, {model: [per million tokens read, per million written]}; None without prices."""
    path = config.llm.prices
    if not path or not asked:
        return None
    prices = json.loads(resolve(path).read_text(encoding="utf-8"))
    total = 0.0
    for what, count in asked.items():
        model = config.llm[ROLES[what][0]].model or config.llm.model
        paid = prices.get(model, (0.0, 0.0))
        total += count * (episode * paid[0] + ANSWER * paid[1]) / 1e6
    return total
