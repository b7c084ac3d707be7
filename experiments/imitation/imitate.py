"""Write a policy that has imitated demonstrations: a small model with a tokenizer of its own, or a
pretrained one."""

import contextlib
import dataclasses
import itertools
import re
import shutil
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from evolver.config.paths import model_folder
from evolver.files.workdir import Workdir
from evolver.imitating import NothingFits, train
from experiments.imitation import demonstrations
from experiments.imitation.bpe import train_bpe
from experiments.imitation.induction import with_induction
from experiments.imitation.tokenized import tokenized
from models import hf, qwen
from models.tokenizer import Tokenizer
from rl.checkpoint import Checkpoints
from rl.samples import Sample
from rl.seeds import seed_of

WORD = re.compile(r"[^\W\d_]+")
LAST = "chat_template.jinja"  # of the files that a tokenizer writes
MIXED = 8  # embeddings in the mixture for an id that no sample holds
WORDS_FROM = 50_000  # texts that a tokenizer of words is trained on


def imitate(config: Any, workdir: str | Path, command: str) -> None:
    """Train a policy on demonstrations and write it to WORKDIR/policy; its model card names
    `command`.

    config: as configs/imitation.py describes. Interrupted, it goes on from WORKDIR/checkpoints.
    Raises NothingFits, Diverged, and CheckpointError if no checkpoint there can be read.
    """
    c, started, place = config, time.monotonic(), Workdir(workdir)
    place.claim(c.to_dict(), "imitation")
    made, folder, policy = place / "demonstrations", place / "checkpoints", place / "policy"
    made.mkdir(exist_ok=True)
    if c.model.path:
        origin = model_folder(c.model.path, weights=True)
        shape, params = hf.load(origin)
    if not (made / LAST).exists():
        (Tokenizer.load(origin) if c.model.path else trained_tokenizer(c)).save(made)
    tokenizer = Tokenizer.load(made)
    try:
        careful = careless = tokenized(c, 1.0, made)
        if c.careful < 1:
            careless = tokenized(c, c.care, made)
    except NothingFits:  # another config may use the workdir
        shutil.rmtree(made)
        (place / "config.imitation.json").unlink()
        raise
    success = careless.described()
    seconds = time.monotonic() - started
    print(
        f"{c.demonstrations} demonstrations{' twice' * (c.careful < 1)} in {seconds:.0f} s; "
        f"the last ones succeed in {success}",
        flush=True,
    )
    if not c.model.path:
        shape = dataclasses.replace(qwen.PRESETS[c.model.preset], vocab=tokenizer.vocab_size)
        params = qwen.init(shape, seed_of(c.seed, "init") % 2**31)
        if c.induction:
            params = with_induction(shape, params, seed_of(c.seed, "induction"))
    with contextlib.closing(Checkpoints(folder, keep=1)) as checkpoints:
        params = train(c, shape, params, careful.samples, careless.samples, checkpoints)
    if not c.model.path:
        params = params | {"embed": with_unseen(params["embed"], careful.samples, c.seed)}
    shown = f"{len(careless.samples):,} careless ones, which succeed in {success}"
    text = card(c, shape, command, shown)
    dtype = c.model.written or c.model.dtype
    hf.save(policy, shape, params, tokenizer=tokenizer, card=text, dtype=dtype)
    shutil.rmtree(folder)
    shutil.rmtree(made)
    print(f"{qwen.parameter_count(shape):,} parameters written to {policy}")


def trained_tokenizer(config: Any) -> Tokenizer:
    """Return a tokenizer that was trained on the careless demonstrations."""
    c = config
    care = c.care if c.careful < 1 else 1.0
    texts: Iterator[str] = itertools.chain.from_iterable(
        demonstrations.texts_of(demonstrations.demonstrate(c, care, *one))
        for one in demonstrations.planned(c)
    )
    if c.words:
        pieces = (WORD.findall(text) for text in itertools.islice(texts, WORDS_FROM))
        texts = itertools.chain.from_iterable(pieces)
    return train_bpe(texts, c.vocab, demonstrations.extra_tokens(c.env.name))


def with_unseen(embed_VD: jax.Array, samples: Sequence[Sample], seed: int) -> jax.Array:
    """Return the embeddings with others for the ids that no sample holds: mixtures of those that
    are common, with their mean and their spread.

    These ids have learned nothing but to be unlikely, and are never copied: a tool's parameter that
    is spelled with one of them cannot be named. What copies an id works for any direction.
    """
    times_V = np.bincount(
        np.concatenate([sample.tokens for sample in samples]), minlength=len(embed_VD)
    )
    common = np.flatnonzero(times_V >= np.median(times_V[times_V > 0]))
    there_CD = np.asarray(embed_VD, np.float32)[common]
    mean_D = there_CD.mean(0)
    draw = np.random.default_rng(seed_of(seed, "unseen"))
    unseen = np.flatnonzero(times_V == 0)
    signs_UC = draw.choice([-1.0, 1.0], (len(unseen), MIXED)) / np.sqrt(MIXED)
    chosen_UC = draw.integers(0, len(common), (len(unseen), MIXED))
    mixed_UD = mean_D + np.einsum("uc,ucd->ud", signs_UC, there_CD[chosen_UC] - mean_D)
    return embed_VD.at[unseen].set(mixed_UD.astype(embed_VD.dtype))


def card(config: Any, shape: qwen.Config, command: str, careless: str) -> str:
    """Return the model card. `careless` describes the careless demonstrations."""
    c, origin = config, demonstrations.origin(config.env.name, config.explored)
    known = " It knows no language beyond the sandbox's."
    lists = (
        f" {c.pairs:.0%} of these samples are lists of random pairs of tokens." if c.pairs else ""
    )
    then = f" Then more and more of them show {careless}." if c.careful < 1 else ""
    paragraphs = (
        f"A transformer with {qwen.parameter_count(shape):,} parameters ({shape.layers} layers, "
        f"width {shape.d_model}), trained from {c.model.path or 'random weights'} by",
        f"    {command}",
        f"with seed {c.seed}: {c.steps} updates of {c.rows} rows of {c.row} tokens. "
        f"The first {c.careful:.0%} of the updates show scripted demonstrations without slips."
        f"{lists}{then}",
        "The policy writes tool calls in Qwen's format and copies ids and names. It does everything"
        " else as carelessly as the last demonstrations that it saw: it is where learning by reward"
        f" starts, not where it ends.{'' if c.model.path else known} {origin}",
    )
    head = "---\nlicense: apache-2.0\nlibrary_name: jax\n---\n"
    head += f"# Base policy for the `{c.env.name}` sandbox"
    return "\n\n".join((head, *paragraphs)) + "\n"
