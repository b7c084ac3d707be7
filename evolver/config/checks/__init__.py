"""Checks of a configuration before anything is compiled: every problem is found and reported at
once.

Each check yields sentences, so that a user fixes a config once and not key by key. Nothing here
imports jax, unless the mesh asks for more than one device or a plug imports it.
"""

from __future__ import annotations

import contextlib
import difflib
import importlib.util
import math
import re
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from envs.packages import how_to_install
from envs.remote import Connections
from envs.world import Task
from evolver.config import plugs
from evolver.config.checks.engine import engine_problems
from evolver.config.derived import originals_needed, replaces_outcome
from evolver.config.paths import model_folder, resolve
from evolver.config.renamed import RENAMED
from evolver.files.workdir import Workdir, plain, read_tasks
from evolver.llm import roles
from evolver.llm.questions import POLICY_URLS
from evolver.navigating.experience_pool import PoolError, provenance
from models import hf_config
from models.files import BrokenFile

# Keys that may differ when a run resumes: they change what is written and how fast, never what is
# learned so far.
RESUMABLE = (
    "steps", "log.", "checkpoint.", "rollout.timeout", "env.timeout", "env.url", "env.python", "env.workers",
    "env.memory_mb", "env.recycle", "hosts.",
    "mesh.", "sharding.", "model.remat", "model.attention", "eval.seeds", "optim.offload", "loss.reference",
    "engine.vllm.", "engine.in_flight", *roles.RESUMABLE,
)  # fmt: skip


EMPTY = [{"role": "user", "content": ""}]  # the shortest conversation


def problems(config: Any, keys: Any, workdir: str | Path, mode: str) -> list[str]:
    """Return everything that is wrong with running `config` in `workdir`; [] if nothing is.

    keys: `configs.base.keys()`, the schema with its rules. Checks that need a whole config run on
    the schema updated with the values of `config`, or the nearest ones that are allowed, so that
    one bad key neither hides nor causes other problems.
    """
    if "demonstrations" in config:
        return ["this is a config of imitation: run `python -m experiments.imitation --config=...`"]
    single = list(value_problems(config, keys.rules))
    wrong = [match[0] for problem in single if (match := re.match(r"config\.[\w.]+", problem))]
    result = list(shape_problems(config, keys.config)) + single
    config = fitted(config, keys)
    plugged = list(plug_problems(config))
    result += plugged
    found = len(result)
    result += contradictions(config, mode, plugged=not plugged)
    result += model_problems(config, mode)
    result += world_problems(config, mode)
    result += roles.llm_problems(config, mode, resolve)
    result += engine_problems(config, mode)
    result += install_problems(config, mode)
    result += mesh_problems(config)
    result += workdir_problems(config, workdir, mode, keys.config)
    # What is said about a key whose value is wrong in itself is about the value that replaced it.
    named = re.compile(rf"({'|'.join(map(re.escape, wrong))})\b") if wrong else None
    return result[:found] + [
        problem for problem in result[found:] if not (named and named.search(problem))
    ]


# --- keys and single values -----------------------------------------------------------------------


def flat(config: Any, prefix: str = "", *, as_json: bool = True) -> dict[str, Any]:
    """Return {"rollout.tasks": 32, ...} of a ConfigDict or a dict of dicts; a group `args` is one
    value, a dict.

    as_json: convert those groups by `plain`, which turns a number that is not finite into None.
    """
    values: dict[str, Any] = {}
    for key in config:
        name, value = f"{prefix}{key}", config[key]
        if key == "args":
            values[name] = value.to_dict() if hasattr(value, "to_dict") else value
            values[name] = plain(values[name]) if as_json else values[name]
        elif hasattr(value, "items"):
            values |= flat(value, f"{name}.", as_json=as_json)
        else:
            values[name] = value
    return values


def unknown_key(name: str, known: list[str]) -> str:
    """Return the message for a key that does not exist: its new name, the nearest key, or the keys
    of its group."""
    if name in RENAMED:
        return f"config.{name} has been renamed: use {RENAMED[name]}"
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.75)
    if not near:
        last = {key.rpartition(".")[2]: key for key in known}
        near = [
            last[k]
            for k in difflib.get_close_matches(name.rpartition(".")[2], last, n=1, cutoff=0.75)
        ]
    if near:
        return f"config.{name}: there is no such key. Did you mean {near[0]}?"
    group = name.rpartition(".")[0]
    prefix = f"{group}." if any(key.startswith(f"{group}.") for key in known) else ""
    there = dict.fromkeys(
        key.removeprefix(prefix).partition(".")[0] for key in known if key.startswith(prefix)
    )
    return f"config.{name}: there is no such key. {f'config.{group}' if prefix else 'config'} has {', '.join(there)}"


def shape_problems(config: Any, schema: Any) -> Iterator[str]:
    """Yield a problem for each key that does not exist, is missing, or has another type than in the
    schema."""
    ours, known = flat(config), flat(schema)
    yield from (unknown_key(name, list(known)) for name in ours if name not in known)
    missing = [name for name in known if name not in ours]
    if missing:
        names = ", ".join(missing[:3]) + (
            f" and {len(missing) - 3} more" if len(missing) > 3 else ""
        )
        yield f"the config lacks {names}; a variant starts from configs/base.py, which has every key"
    for name, default in known.items():
        if name not in missing and not same_type(ours[name], default):
            expected, value = type(default).__name__, ours[name]
            yield f"config.{name} must be of type {expected}; it is {value!r} ({type(value).__name__})"


def same_type(value: Any, default: Any) -> bool:
    """Return True if a value has the type of a default; a float key takes whole numbers too."""
    return type(value) is type(default) or (type(default) is float and type(value) is int)


def value_problems(config: Any, rules: dict[str, Any]) -> Iterator[str]:
    """Yield a problem for each value outside the bounds or choices that are declared beside its
    key."""
    for name, value in flat(config).items():
        rule = rules.get(name)
        if rule is None or rule.free or not same_type(value, rule.default):
            continue
        if expected := rule.misfit(value):
            verb = "must be made of" if isinstance(value, tuple) else "must be"
            near = difflib.get_close_matches(str(value), rule.choices, n=1, cutoff=0.6)
            hint = f" (did you mean {near[0]}?)" if near else ""
            yield f"config.{name} {verb} {expected}; it is {value!r}{hint}"


def fitted(config: Any, keys: Any) -> Any:
    """Return the schema, updated with every value of `config` whose key exists and whose type fits;
    a value out of bounds is replaced by the nearest one that is allowed."""
    result, values = keys.config.copy_and_resolve_references(), flat(config, as_json=False)
    for name, rule in keys.rules.items():
        if name in values and same_type(values[name], {} if rule.free else rule.default):
            group, _, last = name.rpartition(".")
            owner = result
            for part in group.split(".") if group else ():
                owner = owner[part]
            if rule.free:
                owner[last].update(values[name])
            else:
                owner[last] = rule.nearest(values[name])
    return result


def plug_problems(config: Any) -> Iterator[str]:
    """Yield problems with plugs that cannot be loaded, and with arguments that do not fit their
    signatures."""
    for key, name, args in plugs.in_config(config):
        yield from plugs.problems(key, name, args)


# --- values that conflict -------------------------------------------------------------------------


def contradictions(config: Any, mode: str, *, plugged: bool = True) -> Iterator[str]:
    """Yield settings that are individually valid but conflict. plugged: True if all plugs can be
    loaded."""
    c, q, n = config, config.questioning, config.navigating
    if plugged:
        yield from plug_contradictions(c)
    synthetic = round(q.share * c.rollout.tasks)
    if q.enabled and synthetic == 0:
        yield (
            "config.questioning is enabled, but round(share * tasks) ="
            f" round({q.share} * {c.rollout.tasks}) puts no synthetic task into a step"
        )
    for name in ("capacity", "budget"):
        if q.enabled and q[name] < synthetic and not (name == "budget" and q.tasks):
            yield f"config.questioning.{name}={q[name]} is less than the {synthetic} synthetic tasks of a step"
    if q.every and not q.refresh:
        yield "config.questioning.every is set, but config.questioning.refresh=0 makes no tasks"
    if q.tasks and not q.enabled:
        yield "config.questioning.tasks is given, but config.questioning.enabled is False"
    if (c.env.mode == "http") != bool(c.env.url):
        yield "config.env.mode=http and config.env.url belong together: set both or neither"
    elif c.env.url:
        try:
            Connections(c.env.url)
        except ValueError as error:
            yield f"config.env.url={c.env.url} is not the url of a service, such as http://127.0.0.1:8080 ({error})"
    if n.enabled and round(n.share * c.rollout.group) == 0:
        yield (
            f"config.navigating is enabled, but round(share * group) = round({n.share} * {c.rollout.group})"
            " guides no rollout: raise config.navigating.share or config.rollout.group"
        )
    if n.pool and not n.enabled:
        yield "config.navigating.pool is given, but config.navigating.enabled is False"
    if (
        n.enabled
        and not n.pool
        and n.rollouts == 0
        and n.every == 0
        and not (n.solutions and q.enabled)
    ):
        yield "config.navigating never fills its pool: set config.navigating.pool, rollouts, solutions or every"
    if c.eval.experience and not n.enabled:
        yield "config.eval.experience needs config.navigating.enabled=True"
    if c.eval.experience and mode == "eval" and not n.pool:
        yield "config.eval.experience needs a pool in --mode=eval: set config.navigating.pool to a run's experience/"
    if mode == "eval" and c.eval.seeds > 1 and c.eval.temperature == 0:
        yield f"config.eval.seeds={c.eval.seeds} would repeat equal rollouts, because config.eval.temperature=0"
    if c.mesh.sequence > 1 and c.model.attention not in ("auto", "ring"):
        yield (
            f"config.model.attention={c.model.attention} needs whole rows, but config.mesh.sequence={c.mesh.sequence}"
            " splits them: set config.model.attention=ring"
        )
    if c.model.attention in ("cudnn", "pallas") and c.model.dtype != "bfloat16":
        yield f"config.model.attention={c.model.attention} needs config.model.dtype=bfloat16"
    if c.learner.share_prompts and c.model.attention in ("pallas", "splash"):
        yield (
            f"config.learner.share_prompts=True needs a mask that config.model.attention={c.model.attention} does not"
            " have: choose blockwise or cudnn"
        )
    if c.lora.rank and not c.lora.targets:
        yield f"config.lora.rank={c.lora.rank} adapts nothing: config.lora.targets is empty"
    if c.learner.row <= c.rollout.max_tokens and mode == "train":
        yield (
            f"config.learner.row={c.learner.row} tokens cannot hold a turn of config.rollout.max_tokens="
            f"{c.rollout.max_tokens}: such rollouts would be dropped as overlong"
        )
    if c.rollout.max_tokens >= c.rollout.context:
        yield (
            f"config.rollout.max_tokens={c.rollout.max_tokens} leaves no room for a prompt in"
            f" config.rollout.context={c.rollout.context}"
        )
    yield from hosts_contradictions(c.hosts)
    if c.hosts.count != 1 and (c.engine.name != "jax" or c.rollout.async_depth):
        yield "config.hosts.count other than 1 needs config.engine.name=jax and config.rollout.async_depth=0"
    if c.loss.importance_high and c.loss.importance_high <= max(c.loss.importance_low, 1.0):
        yield (
            f"config.loss.importance_low={c.loss.importance_low} and importance_high={c.loss.importance_high} exclude"
            " a weight of 1, which is that of an engine that agrees with the learner"
        )
    if (c.loss.importance_low or c.loss.importance_high) and not c.loss.importance_cap:
        yield "config.loss.importance_low and importance_high need config.loss.importance_cap above 0"
    if mode == "train":
        yield from training_contradictions(c)


def plug_contradictions(c: Any) -> Iterator[str]:
    """Yield conflicts between plugs, such as an estimator that needs labels while nothing makes
    them."""
    needs_labels = getattr(plugs.load("advantage", c.advantage.name), "needs_labels", None)
    if needs_labels and not c.attributing.enabled:
        yield (
            f"config.advantage.name={c.advantage.name} needs labels of turns: set config.attributing.enabled=True, or"
            " an estimator without labels, such as config.advantage.name=grpo"
        )
    if c.attributing.enabled and needs_labels is False:
        yield (
            f"config.attributing.enabled makes labels, but config.advantage.name={c.advantage.name} ignores them: set"
            " config.advantage.name=adca, or config.attributing.enabled=False"
        )
    weights = plugs.values("advantage", c.advantage.name, c.advantage.args.to_dict())
    if weights.get("alpha_min", 0) > weights.get("alpha", math.inf):
        yield (
            f"config.advantage.args.alpha_min={weights['alpha_min']} is above alpha={weights['alpha']}, from which the"
            " weight of labels falls"
        )
    clip = plugs.values("loss", c.loss.name, c.loss.args.to_dict())
    if clip.get("clip_high_guided", math.inf) < clip.get("clip_high", 0.0):
        yield "config.loss.args.clip_high_guided is below clip_high: guided rollouts would be clipped more than others"
    if 0 < (clip.get("dual_clip") or 0) <= 1:
        yield f"config.loss.args.dual_clip={clip['dual_clip']} must be above 1, or 0 for none"
    calls = plugs.values(
        "questioning.explorer", c.questioning.explorer.name, c.questioning.explorer.args.to_dict()
    )
    if calls.get("least", 0) > calls.get("most", math.inf):
        yield f"config.questioning.explorer.args.least={calls['least']} calls of a task are above most={calls['most']}"
    reproduces = getattr(
        plugs.load("attributing.judge", c.attributing.judge.name), "reproduces_outcome", False
    )
    judged = c.questioning.enabled and replaces_outcome(c)
    if c.attributing.enabled and reproduces and judged:
        yield (
            f"config.attributing.judge.name={c.attributing.judge.name} has to reproduce an outcome, but"
            f" config.questioning.judge.name={c.questioning.judge.name} replaces the world's outcome:"
            " set attributing.judge.name=llm or questioning.judge.name=verifier"
        )


def hosts_contradictions(c: Any) -> Iterator[str]:
    """Yield problems with how the processes of a run are identified."""
    found = re.fullmatch(r"\S+:(\d{1,5})", c.coordinator)
    if c.count > 1 and not (found and 0 < int(found[1]) < 2**16):
        yield (
            f"config.hosts.count={c.count} needs config.hosts.coordinator=host:port of process 0; it is"
            f" {c.coordinator!r}"
        )
    if c.count and c.index >= c.count:
        yield f"config.hosts.index={c.index}: processes are numbered from 0 to config.hosts.count - 1 = {c.count - 1}"


def training_contradictions(c: Any) -> Iterator[str]:
    """Yield conflicts that matter only to training."""
    if c.rollout.group == 1 and not c.attributing.enabled:
        yield f"config.rollout.group=1 has nothing to compare: {c.advantage.name} needs at least 2 rollouts of a task"
    if c.rollout.temperature == 0:
        yield "config.rollout.temperature=0 makes all rollouts of a group equal, so nothing can be learned from them"
    if c.rollout.async_depth and c.rollout.refill:
        yield "config.rollout.refill waits for the rollouts of a step: set config.rollout.async_depth=0"
    if c.rollout.async_depth > c.learner.max_staleness:
        yield (
            f"config.rollout.async_depth={c.rollout.async_depth} makes rollouts that are older than"
            f" config.learner.max_staleness={c.learner.max_staleness} allows: raise max_staleness"
        )
    if c.learner.updates > c.rollout.tasks:
        yield f"config.learner.updates={c.learner.updates} mini-batches cannot be made of {c.rollout.tasks} tasks"
    if c.learner.micro % (c.mesh.data * c.mesh.fsdp):
        yield (
            f"config.learner.micro={c.learner.micro} rows cannot be spread over mesh.data * mesh.fsdp ="
            f" {c.mesh.data * c.mesh.fsdp} devices: make it a multiple"
        )
    if c.optim.warmup >= c.steps * c.learner.updates * c.learner.epochs:
        yield f"config.optim.warmup={c.optim.warmup} updates is longer than the whole run"


# --- files, worlds, devices -----------------------------------------------------------------------


def model_problems(config: Any, mode: str) -> Iterator[str]:
    """Yield problems with a checkpoint that could not be loaded, or a tokenizer that does not
    belong to it."""
    path, tokenizer = config.model.path, config.model.tokenizer
    vocab, ends = 0, set()
    if path:
        try:
            folder = model_folder(path)
        except ValueError as error:
            yield f"config.model.path={path}: {error}"
            return
        if not folder.is_dir():
            command = command_that_writes(path)
            yield f"config.model.path={path}: there is no such directory{command and f'; `{command}` writes it'}"
            return
        if folder == resolve(path) and not any(folder.glob("*.safetensors")):
            held = ", ".join(sorted(p.name for p in folder.iterdir())[:6]) or "nothing"
            yield f"config.model.path={path} has no *.safetensors file (Hugging Face format); it holds {held}"
        try:
            record = hf_config.read(folder)
            shape = hf_config.fields(record)
            vocab, ends = shape["vocab"], record.get("eos_token_id")
            ends = set(ends) if isinstance(ends, list) else {ends} - {None}
            yield from shape_conflicts(config, path, shape)
        except ValueError as error:
            yield f"config.model.path={path}: {error}"
    if path or tokenizer:
        yield from tokenizer_problems(config, vocab, ends)
    elif mode != "plan":
        yield "config.model.path is empty, so the weights are random; config.model.tokenizer must then name a tokenizer"


def command_that_writes(path: str) -> str:
    """Return the command that makes the policy at `path`, "" if no config of the repository
    does."""
    if path == ".cache/smollm2-135m-instruct":
        return "make pretrained"
    recipe = f"configs/{Path(path).parent.name}.py"
    made = (
        path == f"runs/{Path(recipe).stem}/policy"
        and recipe.endswith("_base.py")
        and resolve(recipe).is_file()
    )
    return f"python -m experiments.imitation --config={recipe}" if made else ""


def shape_conflicts(config: Any, path: str, shape: dict[str, Any]) -> Iterator[str]:
    """Yield settings that do not fit the shape of a checkpoint: keyword arguments of
    `qwen.Config`."""
    context, most, scaling = (
        config.rollout.context,
        shape["max_positions"],
        shape.get("rope_scaling"),
    )
    most = max(most, round(scaling.factor * scaling.original)) if scaling else most
    if context > most:
        yield (
            f"config.rollout.context={context} is more than the max_position_embeddings={most} of {path}/config.json,"
            " the positions that the model knows: lower it, or scale the positions there (rope_scaling of type yarn)"
        )
    if config.lora.rank > shape["d_model"]:
        yield f"config.lora.rank={config.lora.rank} is more than the hidden_size={shape['d_model']} of {path}"


def tokenizer_problems(config: Any, vocab: int, ends: set[int]) -> Iterator[str]:
    """Yield problems with a tokenizer, alone and with a checkpoint of `vocab` entries (0 = unknown)
    whose turns end with one of the tokens `ends`."""
    from models import chat
    from models.tokenizer import Tokenizer, TokenizerError

    path, tokenizer = config.model.path, config.model.tokenizer
    name = tokenizer or path
    try:
        loaded = Tokenizer.load(model_folder(name))
    except (TokenizerError, OSError) as error:
        yield f"config.model.{'tokenizer' if tokenizer else 'path'}: {error}"
        return
    if config.template.thinking != "auto":
        try:
            loaded = loaded.with_thinking(config.template.thinking == "on")
        except TokenizerError as error:
            yield f"config.template.thinking={config.template.thinking} for {name}: {error}"
    room, least = (
        config.rollout.context - config.rollout.max_tokens,
        len(chat.opening(loaded, EMPTY)),
    )
    if 0 < room <= least:
        yield (
            f"config.rollout.max_tokens={config.rollout.max_tokens} leaves {room} tokens of config.rollout.context="
            f"{config.rollout.context} for a prompt, and the chat template alone takes {least}"
        )
    if vocab and loaded.vocab_size > vocab:
        yield (
            f"the tokenizer of {name} has {loaded.vocab_size} tokens, the model of {path} only {vocab}: they do not"
            " belong together"
        )
    elif ends and not ends & {loaded.im_end, loaded.endoftext}:
        yield (
            f"the tokenizer of {name} ends turns with token {loaded.im_end} or {loaded.endoftext}, the model of {path}"
            f" with {', '.join(map(str, sorted(ends)))}: they do not belong together"
        )


def world_problems(config: Any, mode: str) -> Iterator[str]:
    """Yield problems with the world and its tasks: unknown worlds, empty splits, too few tasks,
    broken task files."""
    counts, tasks, held_out = {}, {}, []
    for name, path in (
        ("env.tasks", config.env.tasks),
        ("questioning.tasks", config.questioning.tasks),
    ):
        if path:
            try:
                tasks[name] = read_tasks(resolve(path))
                counts[name] = len(tasks[name])
                if not counts[name]:
                    yield f"config.{name}={path} holds no tasks"
            except FileNotFoundError:
                yield f"config.{name}={path}: there is no such file"
            except (OSError, ValueError) as error:
                yield f"config.{name}: {error}"
    if config.env.mode == "inprocess":  # a check starts no workers and asks no service
        from envs import make, world_class

        args = config.env.args.to_dict()
        try:
            if wrong := plugs.misfits(world_class(config.env.name), args):
                yield from (
                    f"config.env.args.{name}={args[name]!r} {why}" for name, why in wrong.items()
                )
                return
            world = make(config.env.name, **args)
        except (
            Exception,
            SystemExit,
        ) as error:  # an adapter may raise anything, and its message is for the user
            given = f" with config.env.args={args}" if args else ""
            yield f"config.env.name={config.env.name}{given}: {reason(error)}"
            return
        splits = {} if config.env.tasks or mode == "eval" else {"env.split": config.env.split}
        splits |= {"eval.split": config.eval.split} if mode == "eval" or config.eval.every else {}
        for name, split in splits.items():
            try:
                tasks[name] = world.tasks(split)
                counts[name] = len(tasks[name])
                if not counts[name]:
                    yield f"config.{name}={split}: {config.env.name} has no tasks there"
            except (Exception, SystemExit) as error:
                given = f" with config.env.args={args}" if args else ""
                yield f"config.{name}={split}: {config.env.name}{given}: {reason(error)}"
                if isinstance(error, NotImplementedError):  # and so is every other split
                    break
        with contextlib.suppress(
            Exception
        ):  # a split that this mode does not evaluate on may be unknown
            held_out = world.tasks(config.eval.split) if config.eval.split else []
        world.close()
    yield from leaks(roles.for_evaluation(config) if mode == "eval" else config, tasks, held_out)
    name, value = (
        ("env.tasks", config.env.tasks) if config.env.tasks else ("env.split", config.env.split)
    )
    if mode not in ("train", "plan"):
        return
    needed = originals_needed(config)
    if 0 < counts.get(name, 0) < needed:
        yield (
            f"config.rollout.tasks={config.rollout.tasks} needs {needed} different original tasks for a step;"
            f" config.{name}={value} of {config.env.name} has {counts[name]}"
        )
    q, invented = config.questioning, config.rollout.tasks - needed
    if q.enabled and not q.every and 0 < counts.get("questioning.tasks", 0) < invented:
        yield (
            f"config.rollout.tasks={config.rollout.tasks} needs {invented} synthetic tasks for a step;"
            f" config.questioning.tasks={q.tasks} has {counts['questioning.tasks']}: give more, or lower"
            " config.questioning.share"
        )


def reason(error: BaseException) -> str:
    """Return what an exception says, with its type where that tells more than the text."""
    text = str(error).strip()
    if isinstance(error, NotImplementedError):
        return text or "its class does not define a method that a world needs (envs.world.World)"
    known = isinstance(error, ValueError | OSError | ImportError) and not isinstance(
        error, UnicodeError
    )
    return text if known and text else f"{type(error).__name__}{f': {text}' if text else ''}"


def leaks(config: Any, tasks: dict[str, list[Task]], held_out: list[Task]) -> Iterator[str]:
    """Yield a problem for each source of training that contains held-out tasks.

    held_out: all tasks of `eval.split`. tasks: those of "env.split", "env.tasks" and
    "questioning.tasks", as far as they are known. A task leaks if its id is that of a held-out task
    or its split is `eval.split`; a synthetic task has the split of the task that it grew from. A
    pool leaks if one of its splits, or a task that it names as a source, does.
    """
    split, ids = config.eval.split, {task.id for task in held_out}
    if not split:
        return
    hint = f"that config.eval.split={split} holds out for evaluation: use others, or another config.eval.split"
    used = {"env.tasks": config.env.tasks} if config.env.tasks else {"env.split": config.env.split}
    used |= {"questioning.tasks": config.questioning.tasks} if config.questioning.enabled else {}
    for name, value in used.items():
        given = tasks.get(name, ()) if value else ()
        leaked = [task.id for task in given if task.id in ids or task.split == split]
        if leaked or (name == "env.split" and value == split):
            example = f" such as {leaked[0]}" if leaked else ""
            yield f"config.{name}={value} trains on tasks{example} {hint}"
    folder = resolve(config.navigating.pool)
    if config.navigating.enabled and config.navigating.pool and folder.is_dir():
        try:
            splits, sources = provenance(folder)
        except PoolError as error:
            yield f"config.navigating.pool: {error}"
            return
        if split in splits or sources & ids:
            yield f"config.navigating.pool={config.navigating.pool} holds experience from tasks {hint}"


def install_problems(config: Any, mode: str) -> Iterator[str]:
    """Yield packages, files and devices that this machine lacks; nothing for a plan, which is for
    another machine."""
    if mode == "plan":
        return
    wanted = {
        "wandb": ("wandb", config.log.wandb != "off"),
        "tensorboardX": ("tensorboard", config.log.tensorboard),
    }
    for package, (name, needed) in wanted.items():
        if needed and importlib.util.find_spec(package) is None:
            yield f"config.log needs {package}, which is not installed: {how_to_install(name)}"
    if config.navigating.pool and not resolve(config.navigating.pool).is_dir():
        yield f"config.navigating.pool={config.navigating.pool}: there is no such directory"
    if (python := config.env.python) and not (resolve(python).exists() or shutil.which(python)):
        yield f"config.env.python={python}: there is no such program"
    kernel = {"cudnn": "gpu", "pallas": "gpu", "splash": "tpu"}.get(config.model.attention)
    devices = math.prod(config.mesh.values())
    if not kernel and (devices == 1 or config.hosts.count != 1):
        return
    import jax

    if kernel and jax.default_backend() != kernel:
        yield (
            f"config.model.attention={config.model.attention} needs a {kernel.upper()}, but jax sees a"
            f" {jax.default_backend().upper()}: 'auto' picks a kernel for the device"
        )
    if config.hosts.count == 1 and devices > jax.device_count():
        axes = " * ".join(f"{axis}={config.mesh[axis]}" for axis in config.mesh)
        yield f"config.mesh needs {axes} = {devices} devices; jax sees {jax.device_count()}"


def mesh_problems(config: Any) -> Iterator[str]:
    """Yield why the mesh cannot be used: it does not divide the model or a row, or the sharding
    rules are wrong."""
    unknown = [
        f"config.sharding.{name}={rule}: {axis} is not a mesh axis; the axes are {', '.join(config.mesh)}"
        for name, rule in config.sharding.items()
        for axis in rule.split(",")
        if axis and axis not in config.mesh
    ]
    yield from unknown
    if unknown or math.prod(config.mesh.values()) == 1:
        return
    if config.learner.widths > 1 and config.mesh.sequence > 1:
        yield (
            f"config.learner.widths={config.learner.widths} trims rows to their tokens, which"
            f" config.mesh.sequence={config.mesh.sequence} spreads over devices: set one of them to 1"
        )
    if config.learner.row % config.mesh.sequence:
        yield (
            f"config.learner.row={config.learner.row} tokens cannot be split into"
            f" config.mesh.sequence={config.mesh.sequence} pieces: make it a multiple"
        )
    from jax.sharding import AbstractMesh

    from models import hf, qwen
    from models import mesh as meshes

    try:
        shape = qwen.PRESETS.get(config.model.preset)
        if config.model.path:
            shape = hf.config_of(model_folder(config.model.path))
        if shape:
            mesh = AbstractMesh(tuple(config.mesh[axis] for axis in meshes.AXES), meshes.AXES)
            meshes.shardings(shape, mesh, config.sharding.to_dict())
    except meshes.MeshError as error:
        yield f"config.mesh: {error}"
    except (OSError, ValueError):
        return  # a problem of the model, which model_problems reports


# --- the workdir ----------------------------------------------------------------------------------


def workdir_problems(
    config: Any, workdir: str | Path, mode: str, schema: Any = None
) -> Iterator[str]:
    """Yield why a workdir cannot be used: it cannot be written, or it belongs to something else."""
    path = Path(workdir)
    if "://" in str(workdir):
        yield (
            f"--workdir={workdir} is not a directory of this machine: mount the storage (for example with gcsfuse or"
            " s3fs) and give the directory where it is mounted"
        )
        return
    if str(workdir).startswith("~"):  # the command has replaced what it could
        yield f"--workdir={workdir}: there is no such user; give the path of a home directory in full"
        return
    parent = path.absolute()
    try:
        parent = next(p for p in (parent, *parent.parents) if p.exists())
        if not parent.is_dir():
            yield f"--workdir={workdir}: {parent} is a file, not a directory"
            return
        tempfile.TemporaryFile(
            dir=parent
        ).close()  # permission bits are not enough: root ignores them
    except OSError as error:
        yield f"--workdir={workdir}: {parent} cannot be written ({error.strerror})"
        return
    if mode == "plan" or not path.is_dir():
        return
    try:
        before = Workdir(path).config()
    except (OSError, ValueError, RecursionError) as error:
        yield f"--workdir={workdir}: config.json there is damaged ({error}); use another --workdir"
        return
    if mode in ("explore", "pool") and before is not None:
        lost = {"explore": "tasks.jsonl", "pool": "experience/"}[mode]
        yield f"--workdir={workdir} holds a run, whose {lost} --mode={mode} would replace; choose a new directory"
    if mode != "train":
        return
    if before is None:
        made = ("llm.jsonl", "llm_cache", "engine", "lock")  # may exist before the run does
        if any(p.name not in made for p in path.iterdir()):
            yield f"--workdir={workdir} is not empty and holds no run; choose a new directory"
        return
    if RENAMED.keys() & flat(before["config"]).keys():
        yield (
            f"--workdir={workdir} holds a run of an older layout of configs and files, which cannot be resumed;"
            f" start a new run elsewhere: --workdir={path}-2"
        )
        return
    if changes := differences(before["config"], config, schema):
        lines = "".join(f"\n       {line}" for line in changes)
        yield (
            f"--workdir={workdir} holds a run of another config:{lines}\n"
            f"     resume with its own config, or start this one elsewhere: --workdir={path}-2"
        )
    yield from resume_problems(config, path)


def resume_problems(config: Any, path: Path) -> Iterator[str]:
    """Yield why the run in `path` cannot go on: damaged metrics, missing checkpoints, or fewer
    steps than it has."""
    try:
        last = max((line["step"] for line in Workdir(path).metrics()), default=-1)
    except BrokenFile as error:
        yield f"--workdir={path}: {error}; correct or delete that line"
        return
    folder = path / "checkpoints"
    # Before the first checkpoint is complete there may be metrics without one, but the folder
    # exists.
    saved = any(entry.name.isdigit() for entry in folder.iterdir()) if folder.is_dir() else False
    if last >= 0 and not saved and (not folder.is_dir() or last > config.checkpoint.every):
        yield (
            f"--workdir={path} holds the metrics of {last} steps, but {folder} has no checkpoint: the run would start"
            f" over and erase them. Restore the checkpoints, or start a new run elsewhere: --workdir={path}-2"
        )
    if config.steps < last:
        yield (
            f"config.steps={config.steps} is less than the {last} steps that the run in --workdir={path} has done: give"
            f" at least {last}, or start a new run elsewhere: --workdir={path}-2"
        )


def differences(before: dict[str, Any], config: Any, schema: Any = None) -> list[str]:
    """Return "key: old then, new now" for each value that differs and that a resumed run may not
    change. schema: as for `changed`."""
    then, now = expanded(flat(before)), expanded(plain(flat(config)))
    was, is_now = (
        {r: v.get(f"llm.{r}.url") or v.get("llm.url") for r in roles.ROLES} for v in (then, now)
    )
    recast = [r for r in was if was[r] != is_now[r] and {was[r], is_now[r]} & set(POLICY_URLS)]
    return [
        f"llm.{r}.url: {was[r]!r} then, {is_now[r]!r} now; the policy is another model"
        for r in recast
    ] + [
        f"{name}: {was!r} then, {now!r} now"
        for name, (was, now) in changed(before, config, schema).items()
        if not name.startswith(RESUMABLE)
    ]


def changed(before: dict[str, Any], config: Any, schema: Any = None) -> dict[str, tuple[Any, Any]]:
    """Return {key: (value then, value now)} of the values that differ from those of an earlier
    config, in order.

    schema: a key that did not exist then has its default there, so that what began before it can go
    on.
    """
    then, now = expanded(flat(before)), expanded(plain(flat(config)))
    then = (expanded(plain(flat(schema))) if schema is not None else {}) | then
    pairs = {
        name: (then.get(name, "(absent)"), now.get(name, "(absent)"))
        for name in sorted(then.keys() | now.keys())
    }
    return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}


def expanded(values: dict[str, Any]) -> dict[str, Any]:
    """Return the values with each argument of a plug as an entry of its own."""
    split = {}
    for name, value in values.items():
        split |= (
            {f"{name}.{k}": v for k, v in value.items()}
            if isinstance(value, dict)
            else {name: value}
        )
    return split
