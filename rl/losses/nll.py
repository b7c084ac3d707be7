"""Imitation: the negative log-likelihood of the tokens that train, whatever their advantage."""

from __future__ import annotations

import jax

from rl.losses.terms import Stats, Tokens


def nll(tokens: Tokens) -> tuple[jax.Array, Stats]:
    """Return -log pi."""
    return -tokens.logp_RT, {}
