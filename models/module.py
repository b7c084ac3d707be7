"""The model as a Flax NNX module, for code that is written against Flax: its optimizers, transforms
and libraries.

    model = Qwen.load("checkpoint")             # a directory in Hugging Face's format
    logits_RTV = model(tokens_RT)
    hf.save("elsewhere", model.config, model.params)

The training loop does not use it: it jits functions of plain arrays, so that no call has to flatten
a module.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from models import hf, qwen
from models.logp import logits


class Qwen(nnx.Module):
    """A Config and a tree of parameters. Creating one inside `jit` costs nothing."""

    def __init__(self, config: qwen.Config, params: qwen.Params):
        self.config = config
        self.embed = nnx.Param(params["embed"])
        self.layers = nnx.Dict({name: nnx.Param(array) for name, array in params["layers"].items()})
        self.norm = nnx.Param(params["norm"])
        if not config.tied:
            self.unembed = nnx.Param(params["unembed"])

    @classmethod
    def load(cls, path: str | Path, **options: Any) -> Qwen:
        """Load a checkpoint; `options` and errors are those of `hf.load`."""
        return cls(*hf.load(path, **options))

    @property
    def params(self) -> qwen.Params:
        """The plain dict that the functions of models/qwen.py take."""
        return nnx.to_pure_dict(nnx.state(self, nnx.Param))

    def __call__(
        self,
        tokens_RT: jax.Array,
        positions_RT: jax.Array | None = None,
        segments_RT: jax.Array | None = None,
        **options: Any,
    ) -> jax.Array:
        """Return logits_RTV in float32. Without positions and segments, each row is one sequence
        without padding.

        `options` are those of `qwen.hidden`. All logits exist at once; `token_logp` avoids
        that for long rows.
        """
        if positions_RT is None:
            positions_RT = jnp.broadcast_to(jnp.arange(tokens_RT.shape[1]), tokens_RT.shape)
        if segments_RT is None:
            segments_RT = jnp.ones_like(tokens_RT)
        params = self.params
        h_RTD = qwen.hidden(self.config, params, tokens_RT, positions_RT, segments_RT, **options)
        return logits(h_RTD, qwen.unembed(self.config, params), unused=self.config.unused)
