"""The loss of WebRL (Qi et al., "WebRL: Training LLM Web Agents via Self-Evolving Online Curriculum
Reinforcement Learning", arXiv 2411.02337), for `evolver.recipes.webrl`."""

import jax.numpy as jnp
from jax import Array

from rl.bounds import Positive
from rl.losses.terms import Stats, Tokens, segment_sum


def webrl(tokens: Tokens, *, beta: Positive = 1.0) -> tuple[Array, Stats]:
    """Return (beta log(pi / pi_ref) - A)^2 of each turn (the KL-constrained update), spread evenly
    over its tokens.

    pi / pi_ref is the ratio of whole turns: the product over the tokens of each generation. The
    reference is the policy of the last phase (`loss.renew_reference`).
    """
    on_RT = tokens.mask_RT
    starts_RT = on_RT & ~jnp.pad(on_RT, ((0, 0), (1, 0)))[:, :-1]
    turns_RT = jnp.where(on_RT, jnp.cumsum(starts_RT, axis=1), 0)
    ratio_RT = jnp.where(on_RT, tokens.logp_RT - tokens.channels["ref_logp"], 0.0)
    length_RT = jnp.maximum(segment_sum(on_RT.astype(jnp.float32), turns_RT), 1)
    gap_RT = beta * segment_sum(ratio_RT, turns_RT) - tokens.advantage_RT
    return gap_RT**2 / length_RT, {"webrl/gap": (jnp.abs(gap_RT), on_RT)}


webrl.needs_reference = True  # type: ignore[attr-defined]
