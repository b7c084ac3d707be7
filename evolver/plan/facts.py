"""The work and the sizes of a run, as {name: text}."""

import math
from typing import Any

from envs import make
from evolver.config.checks.world import evaluated, held_out_tasks
from evolver.config.derived import mechanisms_of, updates, warmup, weight_dtype
from evolver.config.paths import model_folder, resolve
from evolver.files.workdir import read_tasks
from evolver.llm.roles import engine_context
from evolver.plan import case
from evolver.plan.amounts import (
    checkpoints,
    evaluated_episodes,
    evaluated_tasks,
    evaluations,
    first_tasks,
)
from evolver.plan.analytic import BYTES, kv_bytes
from evolver.plan.text import size
from models import hf_config, qwen
from models.tokenizer import Tokenizer, TokenizerError
from rl import calls


def task_counts(config: Any) -> tuple[int, int, str]:
    """Return (original tasks, held-out tasks, ""); (0, 0, why) if the world can only be made
    elsewhere.

    Held-out tasks that are never evaluated count as 0.
    """
    env = config.env
    try:
        world = make(env.name, **env.args.to_dict())
        original = read_tasks(resolve(env.tasks)) if env.tasks else world.tasks(env.split)
        held_out = held_out_tasks(world, config.eval.split) if config.eval.every else []
        held_out = evaluated(held_out, config.eval)
        world.close()
    except Exception as error:  # an adapter may raise anything; the user reads the message
        if env.mode == "inprocess":
            raise
        return 0, 0, f"known where {env.name} runs; here: {error}"
    return len(original), len(held_out), ""


def work(config: Any, originals: int, held_out: int, unknown: str = "") -> dict[str, str]:
    """Return the facts on rollouts, evaluations and updates.

    originals, held_out: number of original and of held-out tasks. unknown: why these are not known.
    """
    r = config.rollout
    a_step = r.tasks * r.group
    rollouts = config.steps * a_step
    tokens = min(r.max_turns * r.max_tokens, r.context)
    source = config.env.tasks or f"split {config.env.split}"
    shorter = f", of which {warmup(config)} warm up" if warmup(config) < config.optim.warmup else ""
    found = {
        "mechanisms": ", ".join(mechanisms_of(config)) or "none",
        "training tasks": unknown or f"{originals} original, {source}",
        "steps": f"{config.steps:,} of {r.tasks} tasks x {r.group} = {a_step:,} rollouts",
        "rollouts": f"{rollouts:,} of at most {r.max_turns} turns and {r.context:,} tokens",
        "tokens generated": f"at most {rollouts * tokens:,}",
        "updates": f"{updates(config):,}{shorter}",
        "evaluation": evaluation(config, held_out),
        "checkpoints": f"{checkpoints(config)}, {config.checkpoint.keep} kept and the best",
    }
    if r.refill:
        found["refills"] = f"at most {r.refill} rounds a step, for groups without signal"
    if first := first_tasks(config, originals):
        count = "all" if math.isinf(first) else first
        found["first pool"] = f"{count} tasks x {config.navigating.rollouts} rollouts"
    if config.questioning.enabled and not config.questioning.tasks:
        found["exploration"] = f"until {config.questioning.budget:,} tasks are found"
    return found


def evaluation(config: Any, held_out: int) -> str:
    """Return the number of evaluations and of their episodes, in words."""
    c = config.eval
    rounds = evaluations(config)
    tasks = evaluated_tasks(config, held_out)
    if not rounds:
        return "none"
    amount = f"{c.rollouts + c.greedy} episodes each"
    if tasks:
        amount = f"{evaluated_episodes(config, held_out):,} episodes"
    return f"{rounds} times {tasks or 'all'} tasks of {c.split}, {amount}"


def sizes(config: Any) -> dict[str, str]:
    """Return the facts on parameters, training state, checkpoint and KV cache. Raises PlanError."""
    shape = case.model_shape(config)
    counts = case.sizes(config, shape)
    weights = BYTES[weight_dtype(config)]
    parameters = f"{counts['parameters']:,}"
    if config.lora.rank:
        parameters += f", and {counts['trained']:,} of adapters, which alone are trained"
    # The jax engine holds as many sequences as it has slots; what a vLLM server holds depends on
    # its device.
    slots = config.engine.slots if config.engine.name == "jax" else 1
    context = engine_context(config)
    cache = kv_bytes(shape, config.engine.cache_dtype) * slots * context
    return {
        "parameters": parameters,
        "training state": training_state(config, shape),
        "checkpoint": size(counts["checkpoint"]),
        "engine weights": size(counts["parameters"] * weights),
        "KV cache": f"{size(cache)} for {slots} x {context:,} tokens",
    } | vocabulary(config)


def vocabulary(config: Any) -> dict[str, str]:
    """Return what of the vocabulary can be sampled and what ends a turn, {} without a checkpoint or
    a tokenizer. Raises PlanError."""
    c = config.template
    path = config.model.path
    name = config.model.tokenizer or config.model.path
    if not name:
        return {}
    try:
        tokenizer = Tokenizer.load(model_folder(name), c.render, c.calls)
        named = hf_config.end_tokens(model_folder(path)) if path else {}
    except (TokenizerError, hf_config.ModelError) as error:
        return {"vocabulary": f"unknown: {error}"}
    ids = f"{tokenizer.vocab_size:,} ids"
    if unused := case.model_shape(config).vocab - tokenizer.vocab_size:
        ids += f"; the other {unused:,} rows of the model are never sampled"
    own = {token: tokenizer.decode([token]) for token in tokenizer.stops}
    ends = ", ".join(f"{text} ({token})" for token, text in own.items())
    for file, tokens in named.items():
        if others := ", ".join(map(str, sorted(tokens - own.keys()))):
            ends += f"; {others} of {file} does not end one"
    template = f"{tokenizer.rendering}; {calls.said_of(tokenizer)}"
    template += "" if tokenizer.template.lists_tools else "; lists no tools"
    return {"vocabulary": ids, "chat template": template, "ends of turns": ends}


def training_state(config: Any, shape: qwen.Config) -> str:
    """Return what the learner keeps between updates, and where: "8.32 MB (float32 weights, two
    float32 moments)"."""
    texts = []
    for on_host, place in ((False, ""), (True, " in host memory")):
        parts = [part for part in case.kept(config, shape) if part.on_host == on_host]
        total = sum(part.size * case.entries(part.weights) for part in parts)
        if parts:
            texts.append(f"{size(total)}{place} ({', '.join(part.words for part in parts)})")
    return ", and ".join(texts)
