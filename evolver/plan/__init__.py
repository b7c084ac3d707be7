"""The planner: the work and needs of a run (`--mode=plan`), on this machine or another
(`--target=h100:8`)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from envs import make
from evolver.config import plugs
from evolver.config.checks import flat
from evolver.config.derived import weight_dtype
from evolver.config.paths import model_folder, resolve
from evolver.files.workdir import read_tasks
from evolver.llm.prompts import prompt
from evolver.llm.roles import prompts_of


class PlanError(ValueError):
    """A config that cannot be planned, or not for the target; the message is for the user."""


def plan(config: Any, workdir: str | Path, target: str = "") -> str:
    """Return the plan as text: the resolved config and plugs, prompts of language models, the
    amount of work, sizes, and calls of language models.

    With a target, it also says what memory and time the programs need there. Raises PlanError.
    """
    from evolver.plan import calls
    from evolver.plan.report import section

    originals, held_out, unknown = task_counts(config)
    try:
        called = [
            f"{key} = {plugs.resolved(key, name, args)}{'' if in_use(config, key) else ', off'}"
            for key, name, args in plugs.in_config(config)
        ]
        bill = calls.lines(config, originals, held_out)
    except (OSError, ValueError) as error:  # of a plug that cannot be loaded, or of the price list
        raise PlanError(str(error)) from error
    facts = [*work(config, originals, held_out, unknown), *sizes(config)]
    width = max(len(name) for name, _ in facts)
    sections = [
        section("config", *(f"{name} = {value!r}" for name, value in sorted(flat(config).items()))),
        section("plugs", *called),
        *(
            section(f"prompt {text.version}, {text.path}", *text.lines())
            for text in map(prompt, prompts_of(config))
        ),
        section(f"plan for {workdir}", *(f"{name.ljust(width)}  {value}" for name, value in facts)),
        section(*bill),
    ]
    if target:
        sections.append(on_target(config, target, held_out=held_out)[1])
    return "\n\n".join(filter(None, sections))


def in_use(config: Any, key: str) -> bool:
    """Return True unless the plug belongs to a mechanism that is switched off."""
    owner = key.partition(".")[0]
    return config[owner].get("enabled", True)


def on_target(
    config: Any, target: str, *, compiling: bool = True, held_out: int = 0
) -> tuple[dict[str, Any], str]:
    """Return (record, text) of the config on a target: see `estimate.estimate`, `report.render`.
    held_out: number of tasks of an evaluation, 0 = unknown. Raises PlanError, also for engines that
    the target cannot run."""
    from evolver.plan import advice, estimate, host, placement, report, targets
    from models.mesh import MeshError

    wanted = targets.parse(target)
    config, notes = estimate.adapted(config, wanted)
    if impossible := placement.impossible(config, wanted):
        raise PlanError("\n".join(f"--target={target}: {why}" for why in impossible))
    case = estimate.Case(config, model_shape(config), wanted)
    try:
        estimate.check_mesh(case)
    except MeshError as error:
        raise PlanError(f"--target={target}: {error}") from error
    record = estimate.estimate(
        case, estimate.compile_case(case) if compiling else {}, held_out=held_out
    )
    return record, report.render(
        record, wanted, notes, advice.advise(case, record), host.lines(case)
    )


def work(config: Any, originals: int, held_out: int, unknown: str = "") -> list[tuple[str, str]]:
    """Return (name, value) lines on rollouts, evaluations and updates.

    originals, held_out: number of original and of held-out tasks. unknown: why these are not known.
    """
    from evolver.plan.analytic import checkpoints
    from evolver.plan.calls import first_tasks

    c = config
    rollouts = c.rollout.tasks * c.rollout.group
    tokens = min(c.rollout.max_turns * c.rollout.max_tokens, c.rollout.context)
    mechanisms = [name for name in ("questioning", "navigating", "attributing") if c[name].enabled]
    facts = [
        ("mechanisms", ", ".join(mechanisms) or "none"),
        (
            "training tasks",
            unknown or f"{originals} original, {c.env.tasks or f'split {c.env.split}'}",
        ),
        (
            "steps",
            f"{c.steps:,} of {c.rollout.tasks} tasks x {c.rollout.group} = {rollouts:,} rollouts",
        ),
        (
            "rollouts",
            f"{c.steps * rollouts:,} of at most {c.rollout.max_turns} turns and {c.rollout.context:,} tokens",
        ),
        ("tokens generated", f"at most {c.steps * rollouts * tokens:,}"),
        ("updates", f"{c.steps * c.learner.updates * c.learner.epochs:,}"),
        ("evaluation", evaluation(c, held_out)),
        ("checkpoints", f"{checkpoints(c)}, {c.checkpoint.keep} kept and the best"),
    ]
    if c.rollout.refill:
        facts.append(
            ("refills", f"at most {c.rollout.refill} rounds a step, for groups without signal")
        )
    if c.navigating.enabled and not c.navigating.pool and c.navigating.rollouts:
        tasks = first_tasks(c, originals)
        facts.append(
            (
                "first pool",
                f"{'all' if tasks is None else tasks} tasks x {c.navigating.rollouts} rollouts",
            )
        )
    if c.questioning.enabled and not c.questioning.tasks:
        facts.append(("exploration", f"until {c.questioning.budget:,} tasks are found"))
    return facts


def evaluation(config: Any, held_out: int) -> str:
    """Return the number of evaluations and of their episodes, in words. held_out: tasks of the
    split, 0 = unknown."""
    from evolver.plan.analytic import evaluations, held_out_episodes

    c, rounds = config.eval, evaluations(config)
    if not rounds:
        return "none"
    tasks = min(c.tasks or held_out, held_out)
    amount = (
        f"{held_out_episodes(config, tasks):,} episodes"
        if tasks
        else f"{c.rollouts + c.greedy} episodes each"
    )
    return f"{rounds} times {tasks or 'all'} tasks of {c.split}, {amount}"


def task_counts(config: Any) -> tuple[int, int, str]:
    """Return (original tasks, held-out tasks, ""); (0, 0, why) if the world can only be made
    elsewhere.

    Held-out tasks that are never evaluated count as 0.
    """
    c = config
    try:
        world = make(c.env.name, **c.env.args.to_dict())
        original = len(
            read_tasks(resolve(c.env.tasks)) if c.env.tasks else world.tasks(c.env.split)
        )
        held_out = len(world.tasks(c.eval.split)) if c.eval.every else 0
        world.close()
    except Exception as error:  # an adapter may raise anything; the user reads the message
        if c.env.mode == "inprocess":
            raise
        return 0, 0, f"known where {c.env.name} runs; here: {error}"
    return original, held_out, ""


def sizes(config: Any) -> list[tuple[str, str]]:
    """Return (name, value) lines on parameters, training state, checkpoint and KV cache. Raises
    PlanError."""
    from evolver.plan import estimate
    from evolver.plan.analytic import BYTES, kv_bytes

    shape = model_shape(config)
    counts = estimate.sizes(estimate.Case(config, shape))
    adapters = (
        f", and {counts['trained']:,} of adapters, which alone are trained"
        if config.lora.rank
        else ""
    )
    # The jax engine holds as many sequences as it has slots; what a vLLM server holds depends on
    # its device.
    slots, context = (
        config.engine.slots if config.engine.name == "jax" else 1,
        config.rollout.context,
    )
    cache = kv_bytes(shape, config.engine.cache_dtype) * slots * context
    return [
        ("parameters", f"{counts['parameters']:,}{adapters}"),
        ("training state", training_state(config, counts["parameters"], counts["trained"])),
        ("checkpoint", size(counts["checkpoint"])),
        ("engine weights", size(counts["parameters"] * BYTES[weight_dtype(config)])),
        ("KV cache", f"{size(cache)} for {slots} x {context:,} tokens"),
    ]


def training_state(config: Any, parameters: int, trained: int) -> str:
    """Return what the learner keeps between updates, and where: "8.32 MB (float32 weights, two
    float32 moments)".

    trained: number of entries of the adapters, or of the weights if there are none.
    """
    from evolver.plan.analytic import BYTES

    c, rank, master = config, config.lora.rank, config.optim.master
    dtype = c.model.dtype if rank else master
    device, host = [(f"{dtype} weights", parameters * BYTES[dtype])], []
    if rank:
        device.append((f"{master} adapters", trained * BYTES[master]))
    (host if c.optim.offload else device).append(("two float32 moments", 8 * trained))
    if c.loss.kl_coef and not rank:  # with adapters, the unchanged weights are the reference policy
        place = host if c.loss.reference == "host" else device
        place.append((f"{master} reference policy", parameters * BYTES[master]))
    texts = [
        f"{size(sum(bytes for _, bytes in parts))}{where} ({', '.join(words for words, _ in parts)})"
        for parts, where in ((device, ""), (host, " in host memory"))
        if parts
    ]
    return ", and ".join(texts)


def model_shape(config: Any) -> Any:
    """Return the `models.qwen.Config` of the checkpoint or of the preset. Raises PlanError."""
    from models import hf, qwen

    if not config.model.path:
        return qwen.PRESETS[config.model.preset]
    try:
        return hf.config_of(model_folder(config.model.path))
    except hf.ModelError as error:
        raise PlanError(f"config.model.path={config.model.path}: {error}") from error


def size(count: float) -> str:
    """Return bytes as text: 1234567 as "1.23 MB"."""
    for unit in ("B", "KB", "MB", "GB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} TB"
