"""What an imitation config would do: updates on demonstrations, and nothing else."""

from __future__ import annotations

from typing import Any


def work(config: Any) -> list[tuple[str, str]]:
    """Demonstrations, updates and tokens."""
    c, part = config, config.imitation
    batch = part.rows * c.learner.row
    return [
        (
            "demonstrations",
            f"{part.demonstrations:,} without slips and {part.demonstrations:,} careless ones of envs/{c.env.name},"
            f" {part.hint:.0%} with a hint",
        ),
        ("updates", f"{c.steps:,}, one a step, of {part.rows} rows x {c.learner.row:,} tokens = {batch:,}"),
        ("tokens", f"at most {c.steps * batch:,}, of which the agent's own train"),
        ("evaluation", "none"),
        ("checkpoints", "none, the policy is written at the end"),
    ]


def sizes(config: Any) -> list[tuple[str, str]]:
    """Parameters, training state and the policy's file, with as large a vocabulary as the config allows."""
    from evolver import imitate
    from evolver.plan import size
    from models import qwen
    from rl import learner

    shape = imitate.shape_of(config, config.imitation.vocab)
    state = learner.state_shapes(shape, imitate.make_optimizer(config), None)
    parameters, held = qwen.parameter_count(shape), learner.bytes_per_device(state)["device"]
    return [
        ("parameters", f"{parameters:,} with {shape.vocab:,} tokens, the most there can be"),
        ("training state", f"{size(held)} (weights, one moment of the layers' matrices, two of the others, float32)"),
        ("policy", f"{size(4 * parameters)} (float32)"),
    ]
