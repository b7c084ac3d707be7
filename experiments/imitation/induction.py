"""Random weights in which induction heads are laid out already.

An induction head (Olsson et al. 2022, "In-context Learning and Induction Heads") finds an earlier
occurrence of the current token and copies what followed it. Everything that an agent copies begins
so: names, ids and arguments. It takes two layers that are worth nothing without one another, so a
small model finds it late or never; from these weights it has it after a hundred updates on lists of
pairs. Laying structure out in initial weights is "mimetic initialisation" (Trockman and Kolter
2023).
"""

from typing import Any

import jax.numpy as jnp
import numpy as np

from models import qwen

BIAS = 7.0  # of queries and keys that look for a position
POSITIONAL = 4  # pairs of coordinates with the highest frequencies, which tell positions apart
EARLIER = 0.06  # size of what the first layer writes, relative to the embedding of a token
MATCH = 2.0  # scale of the queries and keys that compare tokens
COPIED = 0.1  # size of what is copied, relative to the embedding
OTHERS = 0.1  # factor of all other weights that write to the residual stream
CONTENT = 0.05  # factor of queries and keys in heads that look for a position


def with_induction(shape: qwen.Config, params: Any, seed: int) -> Any:
    """Return the parameters of `qwen.init` with two kinds of heads laid out. The shape needs biases
    of queries and keys.

    Head h of the first layer attends to the token h + 1 positions back. One head of each group in
    every later layer attends to the tokens that followed earlier occurrences of the current one.
    """
    draw = np.random.default_rng(seed)
    size, group = shape.head_dim, shape.heads // shape.kv_heads
    attention = {name: np.array(value) for name, value in params["layers"]["attention"].items()}
    q, k, v, o = (attention[name] for name in "qkvo")
    o *= OTHERS
    embedding = float(np.sqrt((np.asarray(params["embed"]) ** 2).sum(1).mean()))

    def subspace() -> np.ndarray:
        """Return an orthonormal basis of a random subspace, (d_model, head_dim)."""
        return np.linalg.qr(draw.standard_normal((shape.d_model, shape.d_model)))[0][:, :size]

    half = size // 2
    frequencies = shape.rope_theta ** (-np.arange(half) / half)
    used = BIAS * (np.arange(half) < POSITIONAL)
    k[0] *= CONTENT
    q[0] *= CONTENT
    attention["k_bias"][0, :, :half] = used
    for g in range(shape.kv_heads):
        v[0][:, g] = subspace()
    for h in range(shape.heads):
        angle = -(h + 1) * frequencies  # rotary positions turn it by the position of the query
        attention["q_bias"][0, h] = np.concatenate([used * np.cos(angle), used * np.sin(angle)])
        o[0][h] = EARLIER * embedding * subspace().T
    read, written = v[0][:, 0], o[0][0] / (EARLIER * embedding)  # by the head that looks one back
    for layer in range(1, shape.layers):
        for g in range(shape.kv_heads):
            copied = subspace()
            q[layer][:, g * group], k[layer][:, g] = MATCH * read, MATCH * written.T
            v[layer][:, g], o[layer][g * group] = copied, COPIED * embedding * copied.T
    mlp = params["layers"]["mlp"]
    layers = params["layers"] | {
        "attention": {name: jnp.asarray(value) for name, value in attention.items()},
        "mlp": mlp | {"down": mlp["down"] * OTHERS},
    }
    return params | {"layers": layers}
