"""Write a policy that has imitated demonstrations: a small model with a tokenizer of its own, or a
pretrained one."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import re
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from evolver.config import plugs
from evolver.config.paths import model_folder
from evolver.files.workdir import Workdir
from evolver.imitating import samples_of, train
from experiments.imitation import demonstrations
from experiments.imitation.induction import with_induction
from models import hf, qwen
from models.tokenizer import Tokenizer, train_bpe
from rl.checkpoint import Checkpoints
from rl.seeds import seed_of

WORD = re.compile(r"[^\W\d_]+")
WORDS_FROM = 50_000  # texts that a tokenizer of words is trained on


def imitate(config: Any, workdir: str | Path, command: str) -> None:
    """Train a policy on demonstrations and write it to WORKDIR/policy; its model card names
    `command`.

    config: as configs/imitation.py describes. Interrupted, it goes on from WORKDIR/checkpoints.
    Raises NothingFits, Diverged, and CheckpointError if no checkpoint there can be read.
    """
    c, started = config, time.monotonic()
    careful = demonstrated(c, 1.0)
    careless = demonstrated(c, c.care) if c.careful < 1 else careful
    unhinted = [episode for episode in careless if not episode["hinted"]]
    success = float(np.mean([episode["success"] for episode in unhinted or careless]))
    hints = "without a hint" if unhinted else "with a hint"
    seconds = time.monotonic() - started
    print(
        f"{c.demonstrations} demonstrations{' twice' * (c.careful < 1)} in {seconds:.0f} s; "
        f"the last ones {hints} succeed in {success:.1%}",
        flush=True,
    )
    if c.model.path:
        folder = model_folder(c.model.path, weights=True)
        tokenizer, (shape, params) = Tokenizer.load(folder), hf.load(folder)
    else:
        texts: Iterator[str] = itertools.chain.from_iterable(map(demonstrations.texts_of, careless))
        if c.words:
            pieces = (WORD.findall(text) for text in itertools.islice(texts, WORDS_FROM))
            texts = itertools.chain.from_iterable(pieces)
        tokenizer = train_bpe(texts, c.vocab, demonstrations.extra_tokens(c.env.name))
        shape = dataclasses.replace(qwen.PRESETS[c.model.preset], vocab=tokenizer.vocab_size)
        params = qwen.init(shape, seed_of(c.seed, "init") % 2**31)
        if c.induction:
            params = with_induction(shape, params, seed_of(c.seed, "induction"))
    template = plugs.plug("template", c.template.name, c.template.args.to_dict())
    careful_samples = samples_of(careful, tokenizer, c.row, template)
    careless_samples = careful_samples
    if careless is not careful:
        careless_samples = samples_of(careless, tokenizer, c.row, template)
    Workdir(workdir).claim(c.to_dict(), c.seed, "imitation")
    folder = Path(workdir) / "checkpoints"
    with contextlib.closing(Checkpoints(folder, keep=1)) as checkpoints:
        params = train(c, shape, params, careful_samples, careless_samples, checkpoints)
    policy = Path(workdir) / "policy"
    text = card(
        c,
        shape,
        command,
        f"{len(careless_samples):,} careless ones, which succeed in {success:.0%} {hints}",
    )
    hf.save(policy, shape, params, tokenizer=tokenizer, card=text)
    shutil.rmtree(folder)
    print(f"{qwen.parameter_count(shape):,} parameters written to {policy}")


def demonstrated(config: Any, care: float) -> list[dict[str, Any]]:
    """Return the demonstrations of an agent that takes this care."""
    c, args = config, config.env.args.to_dict()
    return demonstrations.make(
        c.env.name, c.demonstrations, c.seed, c.explored, care=care, hint=c.hint, **args
    )


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
