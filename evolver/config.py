"""What is wrong with a configuration, all of it, in words, before anything is compiled.

Every check appends sentences to one list, so that a user mends a config once and not key by key. Nothing here imports
jax, unless the mesh asks for more than one device or a checkpoint is out of the ordinary.
"""

from __future__ import annotations

import difflib
import importlib.util
import json
import math
import re
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from evolver import demonstrations, engine_config, llm_config
from evolver.books import Workdir, plain, read_tasks
from evolver.paths import model_folder, resolve

CHOICES = {
    "env.mode": ("inprocess", "worker", "http"),
    "model.preset": (
        "tiny",
        "mini",
        "0.5b",
        "1.5b",
        "3b",
        "7b",
        "14b",
        "32b",
        "72b",
        "qwen3-0.6b",
        "qwen3-1.7b",
        "qwen3-4b",
        "qwen3-8b",
        "qwen3-14b",
        "qwen3-32b",
    ),
    "model.remat": ("none", "full", "attention", "dots"),
    "model.attention": ("auto", "blockwise", "cudnn", "pallas", "splash", "ring"),
    "model.dtype": ("float32", "bfloat16"),
    "template.parse_error": ("continue", "end"),
    "template.cut_turn": ("end", "continue"),
    "engine.name": ("jax", "vllm"),
    "engine.in_flight": ("finish", "cut", "keep"),
    "engine.vllm.transfer": ("shm", "nccl", "lora", "none"),
    "engine.cache_dtype": ("float32", "bfloat16"),
    "questioning.explorer": ("curiosity", "llm"),
    "questioning.judge": ("verifier", "naive", "principle", "reference"),
    "navigating.extractor": ("contrast", "llm"),
    "navigating.embedder": ("ngrams", "endpoint"),
    "navigating.refine": ("none", "rerank", "rewrite"),
    "navigating.wording": ("plain", "travel"),
    "attributing.judge": ("replay", "llm"),
    "advantage.name": ("grpo", "rloo", "dr_grpo", "loop", "adca"),
    "advantage.std": ("sample", "population"),
    "advantage.scheme": ("decouple", "allocation"),
    "advantage.norm": ("trajectory", "step", "reference"),
    "advantage.outcome_at": ("last_step", "all_steps", "none"),
    "loss.name": ("ppo", "gspo", "cispo"),
    "loss.aggregate": ("token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"),
    "loss.kl_estimator": ("k1", "k2", "k3"),
    "loss.reference": ("device", "host"),
    "loss.importance_level": ("token", "sequence"),
    "loss.old_logp": ("recomputed", "sampled"),
    "loss.guided_prompt": ("stripped", "guided"),
    "optim.schedule": ("constant", "cosine", "linear"),
    "optim.master": ("float32", "bfloat16"),
    "lora.targets": ("q", "k", "v", "o", "gate", "up", "down"),  # any of these
    "learner.drop": ("env_error", "cancelled", "parse_error", "stale", "overlong", "no_signal"),  # any of these
    "log.wandb": ("off", "offline", "online"),
}
# fmt: off
AT_LEAST_ONE = (
    "steps", "env.workers", "template.max_observation", "rollout.tasks", "rollout.group", "rollout.max_steps",
    "rollout.max_tokens", "rollout.context", "rollout.concurrency", "engine.slots", "engine.decode_block",
    "engine.prefill", "questioning.capacity", "questioning.breadth", "questioning.depth", "navigating.tasks",
    "navigating.top_k", "learner.updates", "learner.epochs", "learner.row", "learner.micro", "learner.widths",
    "learner.chunk", "eval.rollouts", "checkpoint.every", "checkpoint.keep", "mesh.data", "mesh.fsdp", "mesh.tensor",
    "mesh.sequence", "imitation.rows",
    "engine.vllm.replicas", "engine.vllm.bucket", "llm.concurrency", "llm.attempts", "llm.failures", "llm.shown",
    *(f"llm.{role}.max_tokens" for role in llm_config.ROLES),
)
POSITIVE = (
    "hosts.deadline", "env.timeout", "rollout.timeout", "optim.lr", "optim.eps", "loss.clip_high",
    "loss.clip_high_guided", "llm.deadline", "engine.vllm.start_timeout", "imitation.muon_lr",
)
FRACTIONS = (
    "rollout.top_p", "questioning.share", "questioning.overlap", "navigating.share", "navigating.min_similarity",
    "loss.clip_low", "loss.importance_low", "navigating.valid", "engine.leave", "imitation.care",
    "imitation.careful", "imitation.hint", "imitation.final_lr",
    *(f"llm.{role}.top_p" for role in llm_config.ROLES),
)
# What promises something that imitation does not do, with the value that promises nothing.
NOT_FOR_IMITATION = {
    "env.mode": "inprocess", "env.tasks": "", "model.path": "", "model.tokenizer": "", "model.remat": "none",
    "model.attention": "auto", "questioning.enabled": False, "navigating.enabled": False, "attributing.enabled": False,
    "optim.master": "float32", "optim.offload": False, "lora.rank": 0, "learner.widths": 1, "log.wandb": "off",
    "log.tensorboard": False, "mesh.data": 1, "mesh.fsdp": 1, "mesh.tensor": 1, "mesh.sequence": 1, "hosts.count": 1,
}
# fmt: on
FREE = ("env.args",)  # what lies below is the world's own business

# May differ when a run goes on: what is written and how fast, never what is learnt.
RESUMABLE = (
    "log.", "checkpoint.", "rollout.timeout", "env.timeout", "env.url", "env.python", "env.workers",
    "hosts.", "mesh.", "sharding.", "model.remat", "model.attention", "optim.offload", "loss.reference",
)  # fmt: skip
RESUMABLE += llm_config.RESUMABLE
RESUMABLE += ("engine.vllm.", "engine.in_flight")


def flat(config: Any, prefix: str = "") -> dict[str, Any]:
    """{"rollout.tasks": 32, ...} of a ConfigDict or a dict of dicts."""
    found: dict[str, Any] = {}
    for key in config:
        name, value = f"{prefix}{key}", config[key]
        if name in FREE:
            found[name] = plain(value.to_dict() if hasattr(value, "to_dict") else value)
        elif hasattr(value, "items"):
            found |= flat(value, f"{name}.")
        else:
            found[name] = value
    return found


def suggestion(name: str, known: list[str]) -> str:
    """ " Did you mean x?" for a misspelt key, looking at the whole path first and then at its last part; else ""."""
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.75)
    if not near:
        last = {key.rpartition(".")[2]: key for key in known}
        near = [last[k] for k in difflib.get_close_matches(name.rpartition(".")[2], last, n=1, cutoff=0.75)]
    return f" Did you mean {near[0]}?" if near else ""


def shape_problems(config: Any, schema: Any) -> Iterator[str]:
    """Keys that do not exist, are missing, or have another type than in `configs/base.py`."""
    ours, known = flat(config), flat(schema)
    for name in ours:
        if name not in known:
            yield f"config.{name}: there is no such key.{suggestion(name, list(known))}"
    missing = [name for name in known if name not in ours]
    if missing:
        names = ", ".join(missing[:3]) + (f" and {len(missing) - 3} more" if len(missing) > 3 else "")
        yield f"the config lacks {names}; a variant starts from configs/base.py, which has every key"
    for name, default in known.items():
        if name in missing:
            continue
        if type(ours[name]) is not type(default) and not (type(default) is float and type(ours[name]) is int):
            expected, value = type(default).__name__, ours[name]
            yield f"config.{name} must be of type {expected}; it is {value!r} ({type(value).__name__})"


def value_problems(config: Any) -> Iterator[str]:
    """Single values outside what they can mean."""
    value = flat(config)
    for name, choices in CHOICES.items():
        for chosen in value[name] if isinstance(value[name], tuple) else (value[name],):
            if chosen not in choices:
                yield f"config.{name} is {chosen!r}; choose one of {', '.join(choices)}{near(chosen, choices)}"
    for name, number in value.items():
        if isinstance(number, int | float) and not isinstance(number, bool):
            if name in ("optim.b1", "optim.b2"):
                holds, words = 0 <= number < 1, "at least 0 and below 1"
            elif name in FRACTIONS:
                holds, words = 0 <= number <= 1, "between 0 and 1"
            elif name in AT_LEAST_ONE:
                holds, words = number >= 1, "at least 1"
            else:
                holds, words = number > 0 or (number == 0 and name not in POSITIVE), "0 or more"
            if not holds or not math.isfinite(number):
                words = "greater than 0" if name in POSITIVE else words
                yield f"config.{name} must be {words}; it is {number}"


def near(value: Any, choices: tuple[str, ...]) -> str:
    """For a misspelt choice: " (did you mean x?)"."""
    found = difflib.get_close_matches(str(value), choices, n=1, cutoff=0.6)
    return f" (did you mean {found[0]}?)" if found else ""


def contradictions(config: Any, mode: str) -> Iterator[str]:
    """Values that are fine alone and not together."""
    c = config
    if imitates(c, mode):
        yield from imitation_contradictions(c)
        return
    if c.advantage.name == "adca" and not c.attributing.enabled:
        yield "config.advantage.name=adca needs step labels: set config.attributing.enabled=True"
    if c.attributing.enabled and c.advantage.name != "adca":
        yield f"config.attributing.enabled makes labels, config.advantage.name={c.advantage.name} ignores them"
    if c.questioning.enabled and round(c.questioning.share * c.rollout.tasks) == 0:
        yield (
            "config.questioning is enabled, but round(share * tasks) ="
            f" round({c.questioning.share} * {c.rollout.tasks}) puts no synthetic task into a step"
        )
    for name in ("capacity", "budget"):
        needed, there = round(c.questioning.share * c.rollout.tasks), c.questioning[name]
        if c.questioning.enabled and there < needed and not (name == "budget" and c.questioning.tasks):
            yield f"config.questioning.{name}={there} is less than the {needed} synthetic tasks of a step"
    if c.questioning.every and not c.questioning.refresh:
        yield "config.questioning.every is set, but config.questioning.refresh=0 makes no task then"
    if (c.env.mode == "http") != bool(c.env.url):
        yield "config.env.mode=http and config.env.url belong together: set both or neither"
    if c.questioning.tasks and not c.questioning.enabled:
        yield "config.questioning.tasks is given, but config.questioning.enabled is False"
    if c.navigating.enabled and round(c.navigating.share * c.rollout.group) == 0:
        yield (
            f"config.navigating is enabled, but round(share * group) = round({c.navigating.share} * {c.rollout.group})"
            " guides no rollout: raise config.navigating.share or config.rollout.group"
        )
    if c.navigating.pool and not c.navigating.enabled:
        yield "config.navigating.pool is given, but config.navigating.enabled is False"
    if c.navigating.enabled and not c.navigating.pool and c.navigating.rollouts == 0 and c.navigating.every == 0:
        yield "config.navigating never fills its pool: set config.navigating.pool, rollouts or every"
    if c.eval.experience and not c.navigating.enabled:
        yield "config.eval.experience needs config.navigating.enabled=True"
    if c.eval.experience and mode == "eval" and not c.navigating.pool:
        yield "config.eval.experience has none in --mode=eval: set config.navigating.pool to the experience/ of a run"
    if (c.attributing.enabled and c.attributing.judge == "replay") and (
        c.questioning.enabled and c.questioning.judge != "verifier"
    ):
        yield (
            f"config.attributing.judge=replay has to reproduce an outcome, and config.questioning.judge="
            f"{c.questioning.judge} gives synthetic tasks another than the world's: set attributing.judge=llm or"
            " questioning.judge=verifier"
        )
    if 0 < c.loss.dual_clip <= 1:
        yield f"config.loss.dual_clip={c.loss.dual_clip} must be above 1, or 0 for none"
    if c.mesh.sequence > 1 and c.model.attention not in ("auto", "ring"):
        yield (
            f"config.model.attention={c.model.attention} needs whole rows, and config.mesh.sequence={c.mesh.sequence}"
            " cuts them: take ring"
        )
    if c.model.attention in ("cudnn", "pallas") and c.model.dtype != "bfloat16":
        yield f"config.model.attention={c.model.attention} needs config.model.dtype=bfloat16"
    if c.lora.rank and not c.lora.targets:
        yield f"config.lora.rank={c.lora.rank} adapts nothing: config.lora.targets is empty"
    if c.rollout.max_tokens >= c.rollout.context:
        yield (
            f"config.rollout.max_tokens={c.rollout.max_tokens} leaves no room for a prompt in"
            f" config.rollout.context={c.rollout.context}"
        )
    if c.loss.clip_high_guided < c.loss.clip_high:
        yield "config.loss.clip_high_guided is below config.loss.clip_high: guided rollouts would be clipped more"
    yield from hosts_contradictions(c.hosts)
    if c.hosts.count != 1 and (c.engine.name != "jax" or c.rollout.async_depth):
        yield "config.hosts.count other than 1 needs config.engine.name=jax and config.rollout.async_depth=0"
    if c.loss.importance_high and c.loss.importance_high <= max(c.loss.importance_low, 1.0):
        yield (
            f"config.loss.importance_low={c.loss.importance_low} and importance_high={c.loss.importance_high} leave out"
            " weights of 1, those of an engine that agrees with the learner"
        )
    if (c.loss.importance_low or c.loss.importance_high) and not c.loss.importance_cap:
        yield "config.loss.importance_low and importance_high need config.loss.importance_cap above 0"
    if mode == "train":
        yield from training_contradictions(c)


def hosts_contradictions(c: Any) -> Iterator[str]:
    """Who the processes of a run are."""
    if c.count > 1 and not re.fullmatch(r"\S+:\d+", c.coordinator):
        yield (
            f"config.hosts.count={c.count} needs config.hosts.coordinator=host:port of process 0; it is"
            f" {c.coordinator!r}"
        )
    if c.count and c.index >= c.count:
        yield f"config.hosts.index={c.index}: processes are counted from 0 to config.hosts.count - 1 = {c.count - 1}"


def training_contradictions(c: Any) -> Iterator[str]:
    """Those that matter only to training."""
    if c.rollout.group == 1 and c.advantage.name != "adca":
        yield f"config.rollout.group=1 has nothing to compare: {c.advantage.name} needs at least 2 rollouts of a task"
    if c.rollout.temperature == 0:
        yield "config.rollout.temperature=0 makes the rollouts of a group equal, so nothing could be learnt from them"
    if c.rollout.async_depth and c.hosts.count != 1:
        yield "config.rollout.async_depth needs one process: set config.hosts.count=1"
    if c.rollout.async_depth and c.rollout.refill:
        yield "config.rollout.refill waits for a step's rollouts: set config.rollout.async_depth=0"
    if c.rollout.async_depth > c.learner.max_staleness:
        yield (
            f"config.rollout.async_depth={c.rollout.async_depth} makes rollouts that are older than"
            f" config.learner.max_staleness={c.learner.max_staleness} allows: raise that"
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


def imitates(config: Any, mode: str) -> bool:
    """Whether demonstrations are imitated; other modes than training and its plan use the policy as any other."""
    return bool(config.imitation.demonstrations) and mode in ("train", "plan")


def imitation_contradictions(c: Any) -> Iterator[str]:
    """Those of imitation, which has neither tasks nor rollouts: `evolver.demonstrations` makes its data."""
    value = flat(c)
    asked = [f"config.{name}={value[name]}" for name, nothing in NOT_FOR_IMITATION.items() if value[name] != nothing]
    if asked:
        yield (
            f"config.imitation.demonstrations={c.imitation.demonstrations} makes weights and tokenizer from scratch, by"
            f" this process, on one device; it does not use {', '.join(asked)}: leave out one or the other"
        )
    if c.optim.warmup >= c.steps:
        yield (
            f"config.optim.warmup={c.optim.warmup} updates is longer than the whole run: imitation makes one update a"
            f" step, config.steps={c.steps}"
        )
    yield from demonstrations.problems(c)


def ordinary(record: dict[str, Any]) -> bool:
    """Whether a config.json says nothing that `models.hf` could refuse; it is asked about all others only, because it
    imports jax."""
    needed = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")
    sizes = [record.get(key) for key in (*needed, "num_key_value_heads")]
    rope = record.get("rope_parameters") or {}
    if not isinstance(rope, dict):
        return False
    return (
        record.get("model_type") in ("qwen2", "qwen3")
        and all(isinstance(size, int) and size > 0 for size in sizes)
        and record["num_attention_heads"] % record["num_key_value_heads"] == 0
        and record.get("hidden_act") == "silu"
        and rope.keys() <= {"rope_theta", "rope_type"}
        and rope.get("rope_type", "default") == "default"
        and set(record.get("layer_types") or ()) <= {"full_attention"}
        and not any(record.get(key) for key in ("rope_scaling", "use_sliding_window", "quantization_config"))
        and not record.get("attention_bias")
    )


def model_problems(config: Any, mode: str) -> Iterator[str]:
    """A checkpoint that could not be loaded, a tokenizer that could not be used with it. A plan needs neither."""
    if imitates(config, mode):
        return  # weights and tokenizer are made
    path, vocab, ends = config.model.path, 0, set()
    if path:
        try:
            folder = model_folder(path)
        except ValueError as error:
            yield f"config.model.path={path}: {error}"
            return
        if not folder.is_dir():
            yield f"config.model.path={path}: there is no such directory"
            return
        if folder == resolve(path) and not any(folder.glob("*.safetensors")):
            held = ", ".join(sorted(p.name for p in folder.iterdir())[:6]) or "nothing"
            yield f"config.model.path={path} has no *.safetensors file (Hugging Face format); it holds {held}"
        try:
            record = json.loads((folder / "config.json").read_text(encoding="utf-8"))
            if not isinstance(record, dict):
                raise ValueError("it is no object")
            vocab = record["vocab_size"] if isinstance(record.get("vocab_size"), int) else 0
            ends = record.get("eos_token_id")
            ends = {ends} if isinstance(ends, int) else set(ends or ())
            if not ordinary(record):
                from models import hf

                hf.read_config(record)
        except FileNotFoundError:
            yield f"config.model.path={path} has no config.json"
        except (ArithmeticError, AttributeError, TypeError, ValueError) as error:
            yield f"config.model.path={path}: config.json cannot be used ({type(error).__name__}: {error})"
    if not path and not config.model.tokenizer:
        if mode == "plan":
            return
        yield "config.model.path is empty, so the weights are random; config.model.tokenizer must then name a tokenizer"
        return
    from models.tokenizer import Tokenizer, TokenizerError

    try:
        tokenizer = Tokenizer.load(model_folder(config.model.tokenizer or path))
        if vocab and tokenizer.vocab_size > vocab:
            yield (
                f"the tokenizer of {config.model.tokenizer or path} has {tokenizer.vocab_size} tokens, the model of"
                f" {path} only {vocab}: they do not belong together"
            )
        elif ends and not ends & {tokenizer.im_end, tokenizer.endoftext}:
            yield (
                f"the tokenizer of {config.model.tokenizer or path} ends turns with token {tokenizer.im_end} or"
                f" {tokenizer.endoftext}, the model of {path} with {', '.join(map(str, sorted(ends)))}: they do not"
                " belong together"
            )
    except TokenizerError as error:
        yield f"config.model.{'tokenizer' if config.model.tokenizer else 'path'}: {error}"


def world_problems(config: Any, mode: str) -> Iterator[str]:
    """A world that does not exist, splits without tasks, too few of them, task files with broken lines."""
    counts = {}
    for name in ("env.tasks", "questioning.tasks"):
        path = flat(config)[name]
        if path:
            try:
                counts[name] = len(read_tasks(resolve(path)))
                if not counts[name]:
                    yield f"config.{name}={path} holds no task"
            except FileNotFoundError:
                yield f"config.{name}={path}: there is no such file"
            except (OSError, ValueError) as error:
                yield f"config.{name}: {error}"
    if config.env.mode == "inprocess":  # starting workers or asking a service is no part of a check
        from envs import make

        try:
            world = make(config.env.name, **config.env.args.to_dict())
        except Exception as error:  # whatever an adapter raises is what the user has to read
            yield f"config.env.name={config.env.name}: {error}"
            return
        splits = {} if config.env.tasks else {"env.split": config.env.split}
        splits |= {"eval.split": config.eval.split} if mode == "eval" or config.eval.every else {}
        for name, split in splits.items():
            try:
                counts[name] = len(world.tasks(split))
                if not counts[name]:
                    yield f"config.{name}={split}: {config.env.name} has no tasks there"
            except Exception as error:
                yield f"config.{name}={split}: {error}"
        world.close()
    name = "env.tasks" if config.env.tasks else "env.split"
    if 0 < counts.get(name, 0) < originals_needed(config, mode):
        yield (
            f"config.rollout.tasks={config.rollout.tasks} needs {originals_needed(config, mode)} different original"
            f" tasks for a step; config.{name}={flat(config)[name]} of {config.env.name} has {counts[name]}"
        )


def originals_needed(config: Any, mode: str = "train") -> int:
    """Tasks of the world's own that a step takes."""
    if mode not in ("train", "plan") or config.imitation.demonstrations:
        return 0
    synthetic = round(config.questioning.share * config.rollout.tasks) if config.questioning.enabled else 0
    return config.rollout.tasks - synthetic


def install_problems(config: Any, mode: str) -> Iterator[str]:
    """Packages and devices that the config asks for and this machine lacks; a plan is made for another machine."""
    if mode == "plan":
        return
    wanted = {"wandb": config.log.wandb != "off", "tensorboardX": config.log.tensorboard}
    for package, needed in wanted.items():
        if needed and importlib.util.find_spec(package) is None:
            yield f"config.log asks for {package}, which is not installed: pip install {package}"
    for name in ("navigating.pool", "env.python"):
        path = flat(config)[name]
        if path and not (resolve(path).exists() or (name == "env.python" and shutil.which(path))):
            yield f"config.{name}={path}: there is no such {'directory' if name == 'navigating.pool' else 'program'}"
    kernel = {"cudnn": ("gpu",), "pallas": ("gpu",), "splash": ("tpu",)}.get(config.model.attention)
    if kernel:
        import jax

        if jax.default_backend() not in kernel:
            yield (
                f"config.model.attention={config.model.attention} is for a {kernel[0].upper()}, and jax sees a"
                f" {jax.default_backend().upper()}: 'auto' takes what fits the device"
            )
    devices = math.prod(config.mesh[axis] for axis in config.mesh)
    if devices > 1 and config.hosts.count == 1:
        import jax

        if devices > jax.device_count():
            axes = " * ".join(f"{axis}={config.mesh[axis]}" for axis in config.mesh)
            yield f"config.mesh needs {axes} = {devices} devices; jax sees {jax.device_count()}"


def mesh_problems(config: Any) -> Iterator[str]:
    """A mesh that does not divide the model, rules that make no sense, rows that cannot be cut."""
    if math.prod(config.mesh[axis] for axis in config.mesh) == 1:
        return
    if config.learner.widths > 1 and config.mesh.sequence > 1:
        yield (
            f"config.learner.widths={config.learner.widths} cuts rows to their tokens, which"
            f" config.mesh.sequence={config.mesh.sequence} spreads over devices: set one of them to 1"
        )
    if config.learner.row % config.mesh.sequence:
        yield (
            f"config.learner.row={config.learner.row} tokens cannot be cut into"
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
        return  # of the model; said elsewhere


def workdir_problems(config: Any, workdir: str | Path, mode: str) -> Iterator[str]:
    """A workdir that cannot be written, or that belongs to something else."""
    path = Path(workdir)
    parent = path.absolute()
    try:
        parent = next(p for p in (parent, *parent.parents) if p.exists())
        if not parent.is_dir():
            yield f"--workdir={workdir}: {parent} is a file, not a directory"
            return
        tempfile.TemporaryFile(dir=parent).close()  # its permissions do not tell: root has them all
    except OSError as error:
        yield f"--workdir={workdir}: {parent} cannot be written ({error.strerror})"
        return
    if mode == "plan" or not path.is_dir():
        return
    try:
        before = Workdir(path).config()
    except ValueError as error:
        yield f"--workdir={workdir}: config.json there is damaged ({error}); use another --workdir"
        return
    if mode in ("explore", "pool") and before is not None:
        lost = {"explore": "tasks.jsonl", "pool": "experience/"}[mode]
        yield f"--workdir={workdir} holds a run, whose {lost} --mode={mode} would replace; choose a new directory"
    if mode != "train":
        return
    if before is None:
        made = ("llm.jsonl", "llm_cache", "engine")  # answers and a server's log may be there before the run
        if any(p.name not in made for p in path.iterdir()):
            yield f"--workdir={workdir} is not empty and holds no run; choose a new directory"
        return
    changes = differences(before["config"], config)
    if changes:
        lines = "".join(f"\n       {line}" for line in changes)
        yield (
            f"--workdir={workdir} holds a run of another config:{lines}\n"
            f"     go on with its own config, or start this one elsewhere: --workdir={path}-2"
        )


def differences(before: dict[str, Any], config: Any) -> list[str]:
    """What keeps a run from going on: "key: then -> now" of each value that a resumed run may not change."""
    then, now = flat(before), plain(flat(config))
    allowed = RESUMABLE + (("steps",) if then.get("optim.schedule") == "constant" else ())
    return [
        f"{name}: {then.get(name, '(absent)')!r} then, {now.get(name, '(absent)')!r} now"
        for name in sorted(then.keys() | now.keys())
        if then.get(name, "(absent)") != now.get(name, "(absent)") and not name.startswith(allowed)
    ]


def mended(config: Any, schema: Any) -> Any:
    """The schema with every value of `config` that fits it, so that one bad key does not hide what else is wrong."""
    known, types = flat(schema), {name: type(value) for name, value in flat(schema).items()}
    result = schema.copy_and_resolve_references()
    for name, value in flat(config).items():
        if name in FREE:
            result.env.args.update(value)
        elif name in known and type(value) in (types[name], *([int] if types[name] is float else [])):
            result.update_from_flattened_dict({name: value})
    return result


def problems(config: Any, schema: Any, workdir: str | Path, mode: str) -> list[str]:
    """Everything that is wrong with running `config` in `workdir`; [] when nothing is."""
    found = list(shape_problems(config, schema))
    config = mended(config, schema)
    found += value_problems(config)
    found += contradictions(config, mode)
    found += model_problems(config, mode)
    if not imitates(config, mode):  # which has no tasks, asks no server and runs on one device
        found += world_problems(config, mode)
        found += llm_config.problems(config, mode, resolve)
        found += engine_config.problems(config, mode)
        found += install_problems(config, mode)
        found += mesh_problems(config)
    found += workdir_problems(config, workdir, mode)
    return found
