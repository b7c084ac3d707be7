"""What a config would do, before it does it: `--mode=plan`, on another machine with `--target=h100:8`."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from envs import make
from evolver.config import flat
from evolver.llm_config import roles_of
from evolver.paths import model_folder


class PlanError(Exception):
    """A config that cannot be put onto the target; the message is for the user."""


def plan(config: Any, workdir: str | Path, target: str = "") -> str:
    """The resolved config, the amount of work and the sizes of things, as text; with a target, what its programs need
    and how long they take there. Raises PlanError."""
    values = "\n".join(f"  {name} = {value!r}" for name, value in sorted(flat(config).items()))
    facts = [*work(config), *sizes(config)]
    width = max(len(name) for name, _ in facts)
    rows = "\n".join(f"  {name.ljust(width)}  {value}" for name, value in facts)
    head = f"config\n{values}\n\nplan for {workdir}\n{rows}"
    return f"{head}\n\n{on_target(config, target)[1]}" if target else head


def on_target(config: Any, target: str, *, compiling: bool = True) -> tuple[dict[str, Any], str]:
    """(record, text) of the config on a target: `estimate.estimate`, and all of it in words."""
    from evolver.plan import advice, compilers, estimate, report, targets
    from models.mesh import MeshError

    wanted = targets.parse(target)
    config, notes = estimate.adapted(config, wanted)
    case = estimate.Case(config, model_shape(config), wanted)
    try:
        estimate.check_mesh(case)
    except MeshError as error:
        raise PlanError(f"--target={target}: {error}") from error
    phases = [name for name in estimate.PHASES if config.engine.name == "jax" or name in ("update", "logp")]
    record, found = estimate.estimate(case, {}), {}
    if compiling:
        found = compilers.compile_programs(
            config.to_dict(), wanted, phases=phases, micro_batches=case.micro_batches,
            slots=max(1, min(config.engine.slots, record["sequences"])), say=compilers.tell,
        )  # fmt: skip
        record = estimate.estimate(case, found)
    return record, report.render(record, wanted, notes, advice.advise(case, record))


def work(config: Any) -> list[tuple[str, str]]:
    """How many rollouts, evaluations and updates."""
    c = config
    original, held_out, unknown = task_counts(c)
    tasks = min(c.eval.tasks or held_out, held_out)
    rounds = 0 if not c.eval.every else 1 + c.steps // c.eval.every + bool(c.steps % c.eval.every)
    rollouts, each = c.rollout.tasks * c.rollout.group, c.eval.rollouts + c.eval.greedy
    amount = f"{rounds * tasks * each:,} episodes" if tasks else f"{each} episodes each"
    mechanisms = [name for name in ("questioning", "navigating", "attributing") if c[name].enabled]
    facts = [
        ("mechanisms", ", ".join(mechanisms) or "none"),
        ("training tasks", unknown or f"{original} original, split {c.env.split}"),
        ("steps", f"{c.steps:,} of {c.rollout.tasks} tasks x {c.rollout.group} = {rollouts:,} rollouts"),
        ("rollouts", f"{c.steps * rollouts:,} of at most {c.rollout.max_steps} turns and {c.rollout.context:,} tokens"),
        ("tokens generated", f"at most {c.steps * rollouts * tokens_of_an_episode(c):,}"),
        ("updates", f"{c.steps * c.learner.updates * c.learner.epochs:,}"),
        ("evaluation", f"{rounds} times {tasks or 'all'} tasks of {c.eval.split}, {amount}"),
        ("checkpoints", f"{math.ceil(c.steps / c.checkpoint.every)}, {c.checkpoint.keep} kept and the best"),
    ]
    if c.navigating.enabled and not c.navigating.pool and c.navigating.rollouts:
        facts.append(("first pool", f"{c.navigating.tasks} tasks x {c.navigating.rollouts} rollouts"))
    if c.questioning.enabled and not c.questioning.tasks:
        facts.append(("exploration", f"until {c.questioning.budget:,} tasks, walks of {walk(c)} steps"))
    calls = chat_calls(c)
    return facts + ([("language models", ", ".join(calls))] if calls else [])


def chat_calls(config: Any) -> list[str]:
    """How many questions each chat role gets in training, at most: "step_judge 25,600 (qwen-max)"."""
    c, rollouts = config, config.steps * config.rollout.tasks * config.rollout.group
    first = c.navigating.tasks * c.navigating.rollouts if c.navigating.enabled and not c.navigating.pool else 0
    walks = c.questioning.budget // 3 + 1  # of three tasks each, if none is turned down
    rounds = 1 + (c.steps // c.navigating.every if c.navigating.every else 0)
    counts = {
        "explorer": walks * walk(c),
        "writer": walks,
        "judge": round(c.questioning.share * rollouts) + first,
        "step_judge": rollouts + first,
        "summariser": 3 * c.navigating.tasks * rounds,
        "reranker": c.steps * c.rollout.tasks,
        "embedder": c.steps * c.rollout.tasks,
    }
    return [f"{role} {counts[role]:,} ({c.llm[role].model or c.llm.model or '?'})" for role in roles_of(c)]


def task_counts(config: Any) -> tuple[int, int, str]:
    """(original tasks, held-out tasks, "") as the world counts them; (0, 0, why) for one that runs elsewhere only."""
    try:
        world = make(config.env.name, **config.env.args.to_dict())
        counts = len(world.tasks(config.env.split)), len(world.tasks(config.eval.split))
        world.close()
    except Exception as error:  # whatever an adapter raises is what the user has to read
        if config.env.mode == "inprocess":
            raise
        return 0, 0, f"known where {config.env.name} runs; here: {error}"
    return *counts, ""


def walk(config: Any) -> int:
    """Steps of one walk of the exploration."""
    return config.questioning.breadth + config.questioning.depth


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
    # The jax engine holds as many sequences as it has slots; a vLLM server as many as its share of a device takes.
    slots, context = config.engine.slots if config.engine.name == "jax" else 1, config.rollout.context
    return [
        ("parameters", f"{parameters:,}"),
        ("training state", f"{size(4 * parameters * copies)} ({held}, float32)"),
        ("checkpoint", size(12 * parameters)),
        ("engine weights", size(engine)),
        ("KV cache", f"{size(position * slots * context)} for {slots} x {context:,} tokens"),
    ]


def model_shape(config: Any) -> Any:
    """The `models.qwen.Config` of a checkpoint's config.json or of a preset."""
    from models import hf, qwen

    if not config.model.path:
        return qwen.PRESETS[config.model.preset]
    return hf.config_of(model_folder(config.model.path))


def size(count: float) -> str:
    """1234567 -> "1.2 MB"."""
    for unit in ("B", "KB", "MB", "GB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} TB"
