"""What a config would do, before it does it: `--mode=plan`, on another machine with `--target=h100:8`."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from envs import make
from evolver.books import read_tasks
from evolver.config import flat
from evolver.llm_config import roles_of
from evolver.paths import model_folder, resolve


class PlanError(ValueError):
    """A config that cannot be planned for, or not on the target; the message is for the user."""


def plan(config: Any, workdir: str | Path, target: str = "") -> str:
    """The resolved config, the amount of work and the sizes of things, as text; with a target, what its programs need
    and how long they take there. Raises PlanError."""
    if config.imitation.demonstrations and target:
        raise PlanError(f"--target={target}: imitation runs on one device of this machine; leave --target out")
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
    if c.imitation.demonstrations:
        from evolver.plan import imitation

        return imitation.work(c)
    original, held_out, unknown = task_counts(c)
    rollouts = c.rollout.tasks * c.rollout.group
    mechanisms = [name for name in ("questioning", "navigating", "attributing") if c[name].enabled]
    facts = [
        ("mechanisms", ", ".join(mechanisms) or "none"),
        ("training tasks", unknown or f"{original} original, {c.env.tasks or f'split {c.env.split}'}"),
        ("steps", f"{c.steps:,} of {c.rollout.tasks} tasks x {c.rollout.group} = {rollouts:,} rollouts"),
        ("rollouts", f"{c.steps * rollouts:,} of at most {c.rollout.max_steps} turns and {c.rollout.context:,} tokens"),
        ("tokens generated", f"at most {c.steps * rollouts * tokens_of_an_episode(c):,}"),
        ("updates", f"{c.steps * c.learner.updates * c.learner.epochs:,}"),
        ("evaluation", evaluation(c, held_out)),
        ("checkpoints", f"{math.ceil(c.steps / c.checkpoint.every)}, {c.checkpoint.keep} kept and the best"),
    ]
    if c.rollout.refill:
        facts.append(("refills", f"at most {c.rollout.refill} rounds a step of other tasks, where groups lack signal"))
    if c.navigating.enabled and not c.navigating.pool and c.navigating.rollouts:
        facts.append(("first pool", f"{c.navigating.tasks} tasks x {c.navigating.rollouts} rollouts"))
    if c.questioning.enabled and not c.questioning.tasks:
        facts.append(("exploration", f"until {c.questioning.budget:,} tasks, walks of {walk(c)} steps"))
    calls = chat_calls(c)
    return facts + ([("language models", ", ".join(calls))] if calls else [])


def evaluation(config: Any, held_out: int) -> str:
    """How often, and how many episodes; `held_out`: tasks of the split, 0 = unknown."""
    c, steps = config.eval, config.steps
    if not c.every:
        return "none"
    rounds, each = 1 + steps // c.every + bool(steps % c.every), c.rollouts + c.greedy
    tasks = min(c.tasks or held_out, held_out)
    amount = f"{rounds * tasks * each:,} episodes" if tasks else f"{each} episodes each"
    return f"{rounds} times {tasks or 'all'} tasks of {c.split}, {amount}"


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
    """(original tasks, held-out tasks, "") as the world counts them; (0, 0, why) for one that runs elsewhere only.
    Held-out tasks that nothing evaluates count as 0."""
    c = config
    try:
        world = make(c.env.name, **c.env.args.to_dict())
        original = len(read_tasks(resolve(c.env.tasks)) if c.env.tasks else world.tasks(c.env.split))
        held_out = len(world.tasks(c.eval.split)) if c.eval.every else 0
        world.close()
    except Exception as error:  # whatever an adapter raises is what the user has to read
        if c.env.mode == "inprocess":
            raise
        return 0, 0, f"known where {c.env.name} runs; here: {error}"
    return original, held_out, ""


def walk(config: Any) -> int:
    """Steps of one walk of the exploration."""
    return config.questioning.breadth + config.questioning.depth


def tokens_of_an_episode(config: Any) -> int:
    """The most that one episode can generate."""
    return min(config.rollout.max_steps * config.rollout.max_tokens, config.rollout.context)


def sizes(config: Any) -> list[tuple[str, str]]:
    """Parameters, one copy of the training state, checkpoint and KV cache. Raises PlanError."""
    from evolver.plan import estimate, imitation
    from evolver.plan.analytic import BYTES, kv_bytes

    if config.imitation.demonstrations:
        return imitation.sizes(config)
    shape = model_shape(config)
    counts = estimate.sizes(estimate.Case(config, shape))
    adapters = f", and {counts['trained']:,} of adapters, which alone train" if config.lora.rank else ""
    # The jax engine holds as many sequences as it has slots; a vLLM server as many as its share of a device takes.
    slots, context = config.engine.slots if config.engine.name == "jax" else 1, config.rollout.context
    cache = kv_bytes(shape, config.engine.cache_dtype) * slots * context
    return [
        ("parameters", f"{counts['parameters']:,}{adapters}"),
        ("training state", training_state(config, counts["parameters"], counts["trained"])),
        ("checkpoint", size(counts["checkpoint"])),
        ("engine weights", size(counts["parameters"] * BYTES[config.model.dtype])),
        ("KV cache", f"{size(cache)} for {slots} x {context:,} tokens"),
    ]


def training_state(config: Any, parameters: int, trained: int) -> str:
    """What the learner keeps between updates and where: "8.32 MB (float32 weights, two float32 moments)". `trained`:
    entries of the adapters, or again of the weights."""
    from evolver.plan.analytic import BYTES

    c, rank, master = config, config.lora.rank, config.optim.master
    kept = c.model.dtype if rank else master
    device, host = [(f"{kept} weights", parameters * BYTES[kept])], []
    if rank:
        device.append((f"{master} adapters", trained * BYTES[master]))
    (host if c.optim.offload else device).append(("two float32 moments", 8 * trained))
    if c.loss.kl and not rank:  # adapters leave the weights as they were: those are the reference
        away = c.loss.reference == "host"
        (host if away else device).append((f"{master} reference policy", parameters * BYTES[master]))
    texts = [
        f"{size(sum(bytes for _, bytes in parts))}{where} ({', '.join(words for words, _ in parts)})"
        for parts, where in ((device, ""), (host, " in the host's memory"))
        if parts
    ]
    return ", and ".join(texts)


def model_shape(config: Any) -> Any:
    """The `models.qwen.Config` of a checkpoint's config.json or of a preset. Raises PlanError."""
    from models import hf, qwen

    if not config.model.path:
        return qwen.PRESETS[config.model.preset]
    try:
        return hf.config_of(model_folder(config.model.path))
    except hf.ModelError as error:
        raise PlanError(f"config.model.path={config.model.path}: {error}") from error


def size(count: float) -> str:
    """1234567 -> "1.2 MB"."""
    for unit in ("B", "KB", "MB", "GB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} TB"
