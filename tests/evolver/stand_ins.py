"""What stands in for a run, and for the tokens of a mini-batch, where a test needs only a few of their
parts."""

from types import SimpleNamespace

import jax.numpy as jnp

from configs import base
from evolver.parts import Parts
from evolver.sampling import Epochs
from rl import losses
from tests.evolver.explorers import pool_of
from tests.evolver.toy import Library, task

DUNE = task("Lend Dune.", lent=["B11"])  # an original task of the library


def outcomes(batch):
    """Take the outcome of each rollout as its reward, or as its advantage."""
    return batch.outcome_N


def run_with(pool=None, **parts):
    """Return a run in the library with no more parts than recipes use."""
    return SimpleNamespace(
        config=base.get_config(), tasks=SimpleNamespace(pool=pool), navigating=None,
        sampler=Epochs(Parts()), reward=outcomes, estimator=outcomes, make_world=Library, **parts,
    )  # fmt: skip


def pool_from(*seeds):
    """Return a small pool without tasks, which filters no repetition of words."""
    return pool_of(seeds=seeds, overlap=1.0, capacity=9)


def tokens_of(logp_RT, old_RT=0.0, advantage_RT=1.0, *, guided_RT=False, mask_RT=True, **channels):
    """Return the tokens of rows that hold one sample each. A number stands for all of them."""
    logp_RT = jnp.array(logp_RT)
    old_RT, advantage_RT, guided_RT, mask_RT = (
        jnp.broadcast_to(jnp.array(x), logp_RT.shape)
        for x in (old_RT, advantage_RT, guided_RT, mask_RT)
    )
    segments_RT = jnp.ones(logp_RT.shape, jnp.int32)
    return losses.Tokens(logp_RT, old_RT, advantage_RT, guided_RT, segments_RT, mask_RT, channels)
