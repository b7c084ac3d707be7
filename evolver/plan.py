"""What a config would do, before it does it: `--mode=plan`."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from envs import make
from evolver.config import flat, resolve


def plan(config: Any, workdir: str | Path) -> str:
    """The resolved config, the amount of work and the sizes of things, as text. Compiles nothing."""
    values = "\n".join(f"  {name} = {value!r}" for name, value in sorted(flat(config).items()))
    facts = [*work(config), *sizes(config)]
    width = max(len(name) for name, _ in facts)
    rows = "\n".join(f"  {name.ljust(width)}  {value}" for name, value in facts)
    return f"config\n{values}\n\nplan for {workdir}\n{rows}"


def work(config: Any) -> list[tuple[str, str]]:
    """How many rollouts, evaluations and updates."""
    c, world = config, make(config.env.name, **config.env.args.to_dict())
    held_out = len(world.tasks(c.eval.split))
    tasks = min(c.eval.tasks or held_out, held_out)
    rounds = 0 if not c.eval.every else 1 + c.steps // c.eval.every + bool(c.steps % c.eval.every)
    rollouts, episodes = c.rollout.tasks * c.rollout.group, tasks * (c.eval.rollouts + c.eval.greedy)
    mechanisms = [name for name in ("questioning", "navigating", "attributing") if c[name].enabled]
    facts = [
        ("mechanisms", ", ".join(mechanisms) or "none"),
        ("training tasks", f"{len(world.tasks(c.env.split))} original, split {c.env.split}"),
        ("steps", f"{c.steps:,} of {c.rollout.tasks} tasks x {c.rollout.group} = {rollouts:,} rollouts"),
        ("rollouts", f"{c.steps * rollouts:,} of at most {c.rollout.max_steps} turns and {c.rollout.context:,} tokens"),
        ("tokens generated", f"at most {c.steps * rollouts * tokens_of_an_episode(c):,}"),
        ("updates", f"{c.steps * c.learner.updates * c.learner.epochs:,}"),
        ("evaluation", f"{rounds} times {tasks} tasks of {c.eval.split}, {rounds * episodes:,} episodes"),
        ("checkpoints", f"{math.ceil(c.steps / c.checkpoint.every)}, {c.checkpoint.keep} kept and the best"),
    ]
    if c.navigating.enabled and not c.navigating.pool and c.navigating.rollouts:
        facts.append(("first pool", f"{c.navigating.tasks} tasks x {c.navigating.rollouts} rollouts"))
    if c.questioning.enabled and not c.questioning.tasks:
        facts.append(
            ("exploration", f"{c.questioning.budget:,} environment calls, at most {c.questioning.max_tasks} tasks")
        )
    world.close()
    return facts


def tokens_of_an_episode(config: Any) -> int:
    """The most that one episode can generate."""
    return min(config.rollout.max_steps * config.rollout.max_tokens, config.rollout.context)


def sizes(config: Any) -> list[tuple[str, str]]:
    """Parameters, training state, checkpoint and KV cache."""
    from models import qwen

    shape = model_shape(config)
    parameters = qwen.parameter_count(shape)
    copies = 3 + bool(config.loss.kl)
    held = "weights, two moments" + (", reference policy" if config.loss.kl else "")
    half = {"bfloat16": 2, "float32": 4}
    engine = parameters * half[config.model.dtype]
    position = 2 * shape.layers * shape.kv_heads * shape.head_dim * half[config.engine.cache_dtype]
    slots, context = config.engine.slots, config.rollout.context
    return [
        ("parameters", f"{parameters:,}"),
        ("training state", f"{size(4 * parameters * copies)} ({held}, float32)"),
        ("checkpoint", size(12 * parameters)),
        ("engine weights", size(engine)),
        ("KV cache", f"{size(position * slots * context)} for {slots} sequences of {context:,} tokens"),
    ]


def model_shape(config: Any) -> Any:
    """The `models.qwen.Config` of a checkpoint's config.json or of a preset."""
    from models import hf, qwen

    if not config.model.path:
        return qwen.PRESETS[config.model.preset]
    return hf.read_config(json.loads((resolve(config.model.path) / "config.json").read_text(encoding="utf-8")))


def size(count: float) -> str:
    """1234567 -> "1.2 MB"."""
    for unit in ("B", "KB", "MB", "GB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} TB"
