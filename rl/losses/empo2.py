"""The loss of EMPO2 (Liu et al., "Exploratory Memory-Augmented LLM Agent via Hybrid On- and
Off-Policy Optimization", arXiv 2602.23008): guided rollouts train the policy without experience,
except for tokens that it would hardly write.

The paper reports 128.6% more than GRPO in ScienceWorld and 11.3% more in WebShop, together with the
reward `novelty`. The ratio of a guided token is taken against the policy that saw the experience,
which sampled it; where the policy without experience gives it nearly no probability, the gradient
of its logarithm is large, and training becomes unstable.

    config.loss.name = "empo2"
    config.loss.guided_prompt = "guided"
    config.reward.name = "novelty"
"""

import jax
import jax.numpy as jnp
from jax import Array

from rl.bounds import Fraction, NotNegative
from rl.losses.ppo import ppo
from rl.losses.terms import Stats, Tokens


def empo2(
    tokens: Tokens,
    *,
    least: Fraction = 0.05,
    clip_low: Fraction = 0.2,
    clip_high: NotNegative = 0.2,
) -> tuple[Array, Stats]:
    """Return max(-A r, -A clip(r, 1 - clip_low, 1 + clip_high)), as PPO does, without the guided
    tokens to which the policy that is trained gives a probability below `least`."""
    probability_RT = jnp.exp(jax.lax.stop_gradient(tokens.logp_RT))
    masked_RT = tokens.guided_RT & tokens.mask_RT & (probability_RT < least)
    kept = tokens._replace(advantage_RT=jnp.where(masked_RT, 0.0, tokens.advantage_RT))
    loss_RT, stats = ppo(
        kept, clip_low=clip_low, clip_high=clip_high, clip_high_guided=clip_high, dual_clip=0.0
    )
    masked = (masked_RT.astype(jnp.float32), tokens.guided_RT & tokens.mask_RT)
    return loss_RT, {**stats, "empo2/masked": masked}
