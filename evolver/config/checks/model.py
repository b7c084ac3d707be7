"""Checks of the policy's checkpoint and tokenizer."""

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from ml_collections import ConfigDict

from evolver.config.paths import model_folder, resolve
from evolver.llm.roles import engine_context, policy_prompts, question_context
from models import hf_config

EMPTY = [{"role": "user", "content": ""}]  # the shortest conversation


def model_problems(config: ConfigDict, mode: str) -> Iterator[str]:
    """Yield problems with a checkpoint that could not be loaded, or a tokenizer that does not
    belong to it."""
    path = config.model.path
    vocab = 0
    ends = {}
    if path:
        try:
            folder = model_folder(path)
            if not folder.is_dir():
                made = command_that_writes(path)
                raise FileNotFoundError(
                    f"there is no such directory{made and f'; `{made}` writes it'}"
                )
        except (FileNotFoundError, ValueError) as error:
            yield f"config.model.path={path}: {error}"
            return
        local = folder == resolve(path)
        weights = any(folder.glob("*.safetensors"))
        if local and not weights:
            held = ", ".join(sorted(p.name for p in folder.iterdir())[:6]) or "nothing"
            yield (
                f"config.model.path={path} has no *.safetensors file (Hugging Face format); it"
                f" holds {held}"
            )
        try:
            shape = hf_config.fields(hf_config.read(folder))
            yield from shape_conflicts(config, shape)
            vocab = shape["vocab"]
            ends = hf_config.end_tokens(folder)
            if local and weights:
                yield from weight_problems(folder)
        except ValueError as error:
            yield f"config.model.path={path}: {error}"
    if path or config.model.tokenizer:
        yield from tokenizer_problems(config, vocab, ends)
    elif mode != "plan":
        yield (
            "config.model.path is empty, so the weights are random; config.model.tokenizer must"
            " then name a tokenizer"
        )


def weight_problems(folder: Path) -> Iterator[str]:
    """Yield why the weights in a directory are not those of its config.json, read from the headers
    of the files."""
    from models import hf

    try:
        with ExitStack() as stack:
            hf.checked(folder, hf.config_of(folder), stack)
    except hf_config.ModelError as error:
        yield f"config.model.path: {error}"


def command_that_writes(path: str) -> str:
    """Return the command that makes the policy at `path`, "" if no config of the repository
    does."""
    if path == ".cache/smollm2-135m-instruct":
        return "make pretrained"
    name = Path(path).parent.name
    recipe = f"configs/{name}.py"
    made = path == f"runs/{name}/policy" and name.endswith("_base") and resolve(recipe).is_file()
    return f"python -m experiments.imitation --config={recipe}" if made else ""


def shape_conflicts(config: ConfigDict, shape: dict[str, Any]) -> Iterator[str]:
    """Yield settings that do not fit the shape of a checkpoint: keyword arguments of
    `qwen.Config`."""
    path = config.model.path
    rank = config.lora.rank
    context = engine_context(config)
    key = "rollout" if context == config.rollout.context else "llm"
    most = shape["max_positions"]
    scaling = shape.get("rope_scaling")
    if scaling:
        most = max(most, round(scaling.factor * scaling.original_max_position_embeddings))
    if context > most:
        yield (
            f"config.{key}.context={context} is more than the max_position_embeddings={most} of"
            f" {path}/config.json, the positions that the model knows: lower it, or scale the"
            " positions there (rope_scaling of type yarn)"
        )
    if rank > shape["d_model"]:
        yield f"config.lora.rank={rank} is more than the hidden_size={shape['d_model']} of {path}"


def question_problems(config: ConfigDict, tokenizer: Any) -> Iterator[str]:
    """Yield questions that the policy can never answer, because what they say without the attempts
    that they are about does not fit its context."""
    from models import chat

    context = question_context(config)
    for role, text in policy_prompts(config):
        tokens = len(chat.opening(tokenizer, text.empty()))
        if tokens >= context:
            own = "llm" if config.llm.context else "rollout"
            yield (
                f"config.llm.{role}: the policy cannot answer {text.path}, which has {tokens}"
                f" tokens alone, within config.{own}.context={context}: set config.llm.context to"
                f" what the questions need, about {tokens + config.rollout.context}"
            )


def tokenizer_problems(config: ConfigDict, vocab: int, ends: dict[str, set[int]]) -> Iterator[str]:
    """Yield problems with a tokenizer, alone and with a checkpoint of `vocab` entries (0 = unknown)
    whose files say that turns end with the tokens `ends`, see `hf_config.end_tokens`."""
    from models import chat
    from models.tokenizer import Tokenizer, TokenizerError
    from rl import calls

    path = config.model.path
    rollout = config.rollout
    thinking = config.template.thinking
    name = config.model.tokenizer or path
    try:
        loaded = Tokenizer.load(model_folder(name), config.template.render, config.template.calls)
    except (TokenizerError, OSError) as error:
        yield f"config.model.{'tokenizer' if config.model.tokenizer else 'path'}: {error}"
        return
    try:
        calls.format_of(loaded)
    except calls.UnknownFormat as error:
        yield f"config.template.calls={config.template.calls}: {error}"
    if thinking != "auto":
        try:
            loaded = loaded.with_thinking(thinking == "on")
        except TokenizerError as error:
            yield f"config.template.thinking={thinking} for {name}: {error}"
    yield from question_problems(config, loaded)
    left = rollout.context - rollout.max_tokens
    least = len(chat.opening(loaded, EMPTY))
    if 0 < left <= least:
        yield (
            f"config.rollout.max_tokens={rollout.max_tokens} leaves {left} tokens of"
            f" config.rollout.context={rollout.context} for a prompt, and the chat template alone"
            f" takes {least}"
        )
    if vocab and loaded.vocab_size > vocab:
        yield (
            f"the tokenizer of {name} has {loaded.vocab_size} tokens, the model of {path} only"
            f" {vocab}: they do not belong together"
        )
    for file, listed in ends.items():
        if not listed & set(loaded.stops):
            own, theirs = (" or ".join(map(str, sorted(ids))) for ids in (loaded.stops, listed))
            yield (
                f"the tokenizer of {name} ends turns with token {own}, {file} of {path} with"
                f" {theirs}: they do not belong together"
            )
