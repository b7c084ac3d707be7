"""Imitation: the negative log-likelihood of the tokens that train, whatever their advantage."""

import jax

from rl.losses.terms import Stats, Tokens


def nll(tokens: Tokens) -> tuple[jax.Array, Stats]:
    """Return -log pi."""
    return -tokens.logp_RT, {}
