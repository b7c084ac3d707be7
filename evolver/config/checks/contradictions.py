"""Settings that are sound one by one, and conflict."""

import math
import re
from collections.abc import Iterator
from functools import partial

from ml_collections import ConfigDict

from envs.remote import Connections
from evolver.config import plugs
from evolver.config.derived import mesh_devices, needs_reference, replaces_outcome, synthetic_tasks
from evolver.llm.questions import CURRENT_POLICY, SERVED

TRAINING = ("train", "plan")  # a plan is of a training run, and refuses what that would refuse


def contradictions(config: ConfigDict, mode: str, *, plugged: bool) -> Iterator[str]:
    """Yield settings that are individually valid but conflict. plugged: True if all plugs can be
    loaded."""
    if plugged:
        yield from plug_contradictions(config)
    yield from mechanism_contradictions(config, mode)
    yield from machine_contradictions(config)
    yield from token_contradictions(config, mode)
    if mode in TRAINING:
        yield from training_contradictions(config)
    if plugged and mode in (*TRAINING, "evolve"):
        yield from recipe_contradictions(config)


def plug_contradictions(c: ConfigDict) -> Iterator[str]:
    """Yield conflicts between plugs, such as an estimator that needs labels while nothing makes
    them, and between arguments of one plug."""
    needs_labels = plugs.trait(c, "advantage", "needs_labels", None)
    if needs_labels and not c.attributing.enabled:
        yield (
            f"config.advantage.name={c.advantage.name} needs labels of turns: set"
            " config.attributing.enabled=True, or an estimator without labels, such as"
            " config.advantage.name=grpo"
        )
    if needs_labels is False and c.attributing.enabled:
        yield (
            "config.attributing.enabled makes labels, but"
            f" config.advantage.name={c.advantage.name} ignores them: set"
            " config.advantage.name=adca, or config.attributing.enabled=False"
        )
    reproduces = plugs.trait(c, "attributing.judge", "reproduces_outcome")
    judged = c.questioning.enabled and replaces_outcome(c)
    if c.attributing.enabled and reproduces and judged:
        yield (
            f"config.attributing.judge.name={c.attributing.judge.name} has to reproduce an outcome,"
            f" but config.questioning.judge.name={c.questioning.judge.name} replaces the world's"
            " outcome: set attributing.judge.name=llm or questioning.judge.name=verifier"
        )
    # A plug of the user may lack these arguments.
    values = {plug[0]: plugs.values(*plug) for plug in plugs.in_config(c)}
    weight = values["advantage"]
    clip = values["loss"]
    calls = values["questioning.explorer"]
    if weight.get("alpha_min", 0) > weight.get("alpha", math.inf):
        yield (
            f"config.advantage.args.alpha_min={weight['alpha_min']} is above"
            f" alpha={weight['alpha']}, from which the weight of labels falls"
        )
    if clip.get("clip_high_guided", math.inf) < clip.get("clip_high", 0.0):
        yield (
            "config.loss.args.clip_high_guided is below clip_high: guided rollouts would be clipped"
            " more than others"
        )
    if 0 < (clip.get("dual_clip") or 0) <= 1:
        yield f"config.loss.args.dual_clip={clip['dual_clip']} must be above 1, or 0 for none"
    if c.loss.renew_reference and not needs_reference(c):
        yield (
            f"config.loss.renew_reference={c.loss.renew_reference} renews a reference that nothing"
            " is compared with: set config.loss.kl_coef above 0, or renew_reference=0"
        )
    if calls.get("least", 0) > calls.get("most", math.inf):
        yield (
            f"config.questioning.explorer.args.least={calls['least']} calls of a task are above"
            f" most={calls['most']}"
        )


def mechanism_contradictions(c: ConfigDict, mode: str) -> Iterator[str]:
    """Yield conflicts of self-questioning, of self-navigating, and of evaluation with them."""
    q = c.questioning
    n = c.navigating
    e = c.eval
    synthetic = synthetic_tasks(c)
    if q.enabled and synthetic == 0:
        yield (
            "config.questioning is enabled, but round(share * tasks) ="
            f" round({q.share} * {c.rollout.tasks}) puts no synthetic task into a step"
        )
    for name in ("capacity",) if q.tasks else ("capacity", "budget"):
        if q[name] < synthetic:
            yield (
                f"config.questioning.{name}={q[name]} is less than the {synthetic} synthetic tasks"
                " of a step"
            )
    if q.every and not q.refresh:
        yield "config.questioning.every is set, but config.questioning.refresh=0 makes no tasks"
    if q.tasks and not q.enabled:
        yield "config.questioning.tasks is given, but config.questioning.enabled is False"
    if n.enabled and round(n.share * c.rollout.group) == 0:
        yield (
            "config.navigating is enabled, but round(share * group) ="
            f" round({n.share} * {c.rollout.group}) guides no rollout: raise"
            " config.navigating.share or config.rollout.group"
        )
    if n.pool and not n.enabled:
        yield "config.navigating.pool is given, but config.navigating.enabled is False"
    if n.enabled and not (n.pool or n.rollouts or n.every or (n.solutions and q.enabled)):
        yield (
            "config.navigating never fills its pool: set config.navigating.pool, rollouts,"
            " solutions or every"
        )
    if e.experience and not n.enabled:
        yield "config.eval.experience needs config.navigating.enabled=True"
    if e.experience and mode == "eval" and not n.pool:
        yield (
            "config.eval.experience needs a pool in --mode=eval: set config.navigating.pool to a"
            " run's experience/"
        )
    if mode == "eval" and e.seeds > 1 and e.temperature == 0:
        yield (
            f"config.eval.seeds={e.seeds} would repeat equal rollouts, because"
            " config.eval.temperature=0"
        )


def machine_contradictions(c: ConfigDict) -> Iterator[str]:
    """Yield conflicts of services, of kernels and of the processes of a run."""
    if (c.env.mode == "http") != bool(c.env.url):
        yield "config.env.mode=http and config.env.url belong together: set both or neither"
    elif c.env.url not in ("", SERVED):
        try:
            Connections(c.env.url)
        except ValueError as error:
            yield (
                f"config.env.url={c.env.url} is not the url of a service, such as"
                f" http://127.0.0.1:8080 or {SERVED} ({error})"
            )
    kernel = c.model.attention
    if c.mesh.sequence > 1 and kernel not in ("auto", "ring"):
        yield (
            f"config.model.attention={kernel} needs whole rows, but"
            f" config.mesh.sequence={c.mesh.sequence} splits them: set config.model.attention=ring"
        )
    if kernel.startswith("cudnn") and c.model.dtype != "bfloat16":
        yield f"config.model.attention={kernel} needs config.model.dtype=bfloat16"
    if c.learner.share_prompts and kernel in ("cudnn_apart", "cudnn_packed", "splash"):
        yield (
            "config.learner.share_prompts=True needs a mask that"
            f" config.model.attention={kernel} does not have: choose blockwise or cudnn"
        )
    elif kernel in ("cudnn_apart", "cudnn_packed") and not c.learner.most_segments:
        yield (
            f"config.model.attention={kernel} needs config.learner.most_segments, the most"
            " samples of a row, such as 8"
        )
    if c.engine.devices > (devices := mesh_devices(c)):
        yield f"config.engine.devices={c.engine.devices}, but config.mesh has {devices}"
    if c.learner.share_prompts and c.learner.most_segments:
        yield (
            f"config.learner.most_segments={c.learner.most_segments} is for samples that do not"
            " share a prompt: set it to 0, or config.learner.share_prompts to False"
        )
    if c.lora.rank and not c.lora.targets:
        yield f"config.lora.rank={c.lora.rank} adapts nothing: config.lora.targets is empty"
    yield from host_contradictions(c)


def host_contradictions(c: ConfigDict) -> Iterator[str]:
    """Yield conflicts of the processes of a run."""
    hosts = c.hosts
    urls = c.engine.vllm.urls
    count = hosts.count
    if 0 < len(urls) < count:
        yield (
            f"config.engine.vllm.urls has {len(urls)} servers for config.hosts.count={count}"
            " processes, and each asks servers of its own"
        )
    if c.rollout.async_depth and c.rollout.tasks < count:
        yield (
            f"config.rollout.tasks={c.rollout.tasks} gives some of config.hosts.count={count}"
            " processes no group to play: with config.rollout.async_depth each plays whole groups"
        )
    port = re.fullmatch(r"\S+:(\d{1,5})", hosts.coordinator)
    if count > 1 and not (port and 0 < int(port[1]) < 2**16):
        yield (
            f"config.hosts.count={count} needs config.hosts.coordinator=host:port of process"
            f" 0; it is {hosts.coordinator!r}"
        )
    if 0 < count <= hosts.index:
        yield (
            f"config.hosts.index={hosts.index}: processes are numbered from 0 to"
            f" config.hosts.count - 1 = {count - 1}"
        )


def token_contradictions(c: ConfigDict, mode: str) -> Iterator[str]:
    """Yield conflicts of lengths, and of the importance weights of tokens."""
    turn = f"config.rollout.max_tokens={c.rollout.max_tokens}"
    if mode in TRAINING and c.learner.row <= c.rollout.max_tokens:
        yield (
            f"config.learner.row={c.learner.row} tokens cannot hold a turn of {turn}: such rollouts"
            " would be dropped as overlong"
        )
    if c.rollout.max_tokens >= c.rollout.context:
        yield f"{turn} leaves no room for a prompt in config.rollout.context={c.rollout.context}"
    low = c.loss.importance_low
    high = c.loss.importance_high
    if high and high <= max(low, 1.0):
        yield (
            f"config.loss.importance_low={low} and importance_high={high} exclude a weight of 1,"
            " which is that of an engine that agrees with the learner"
        )
    if (low or high) and not c.loss.importance_cap:
        yield (
            "config.loss.importance_low and importance_high need config.loss.importance_cap above 0"
        )


def recipe_contradictions(c: ConfigDict) -> Iterator[str]:
    """Yield conflicts with a recipe that demonstrates, or that works on invented tasks."""
    recipe = partial(plugs.trait, c, "recipe")
    if recipe("refreshes") and not (c.questioning.enabled and c.questioning.every):
        yield (
            f"config.recipe.name={c.recipe.name} refreshes invented tasks: set"
            " config.questioning.enabled=True and config.questioning.every above 0"
        )
    if recipe("needs_tasks") and not c.questioning.enabled:
        yield (
            f"config.recipe.name={c.recipe.name} makes new tasks of invented ones: set"
            " config.questioning.enabled=True"
        )
    if recipe("in_step") and c.rollout.async_depth:
        yield (
            f"config.recipe.name={c.recipe.name} makes the tasks of a step within it: set"
            " config.rollout.async_depth=0"
        )
    if plugs.trait(c, "loss", "needs_values") and not recipe("gives_values"):
        yield (
            f"config.loss.name={c.loss.name} needs the values of a critic: set"
            " config.recipe.name=critic"
        )
    for role in recipe("trained_roles", ()):
        if (c.llm[role].url or c.llm.url) != CURRENT_POLICY:
            yield (
                f"config.recipe.name={c.recipe.name} trains the {role}: set"
                f" config.llm.{role}.url={CURRENT_POLICY}"
            )
    if not recipe("demonstrates"):
        return
    if c.loss.guided_prompt != "stripped":
        yield (
            f"config.recipe.name={c.recipe.name} trains on demonstrations, which no prompt sampled:"
            " set config.loss.guided_prompt=stripped"
        )
    if not c.questioning.enabled:
        yield (
            f"config.recipe.name={c.recipe.name} trains on solutions of invented tasks: set"
            " config.questioning.enabled=True"
        )


def training_contradictions(c: ConfigDict) -> Iterator[str]:
    """Yield conflicts that matter only to training."""
    rollout = c.rollout
    learner = c.learner
    if rollout.group == 1 and not c.attributing.enabled:
        yield (
            f"config.rollout.group=1 has nothing to compare: {c.advantage.name} needs at least 2"
            " rollouts of a task"
        )
    if rollout.temperature == 0:
        yield (
            "config.rollout.temperature=0 makes all rollouts of a group equal, so nothing can be"
            " learned from them"
        )
    if rollout.async_depth and rollout.refill:
        yield "config.rollout.refill waits for all rollouts: set config.rollout.async_depth=0"
    if rollout.async_depth > learner.max_staleness:
        yield (
            f"config.rollout.async_depth={rollout.async_depth} makes rollouts that are older than"
            f" config.learner.max_staleness={learner.max_staleness} allows: raise max_staleness"
        )
    if learner.updates > rollout.tasks:
        yield (
            f"config.learner.updates={learner.updates} mini-batches cannot be made of"
            f" {rollout.tasks} tasks"
        )
    spread = c.mesh.data * c.mesh.fsdp
    if learner.micro % spread:
        yield (
            f"config.learner.micro={learner.micro} rows cannot be spread over mesh.data *"
            f" mesh.fsdp = {spread} devices: make it a multiple"
        )
