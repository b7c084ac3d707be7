"""The estimators that a config can name: the functions of arrays in this room, called with fields
of the batch."""

import dataclasses
import functools
import inspect
from collections.abc import Callable
from typing import Any

import numpy as np

from rl.advantages import attribution, outcome
from rl.advantages.batch import Batch, Estimator, estimate, unbound


class OfArrays:
    """An estimator that calls a function of arrays with fields of the batch.

    Its arguments are the keyword-only parameters of the function.
    """

    def __init__(self, function: Callable[..., np.ndarray], *fields: str):
        functools.update_wrapper(self, function)
        self.function, self.fields, self.needs_labels = function, fields, "label_NK" in fields
        parameters = inspect.signature(function, eval_str=True).parameters.values()
        batch = inspect.Parameter("batch", inspect.Parameter.POSITIONAL_ONLY, annotation=Batch)
        args = [p for p in parameters if p.kind is p.KEYWORD_ONLY]
        self.__signature__ = inspect.Signature([batch, *args])

    def __call__(self, batch: Batch, **args: Any) -> np.ndarray:
        return self.function(*(getattr(batch, field) for field in self.fields), **args)


grpo = OfArrays(outcome.grpo, "outcome_N", "group_N")
rloo = OfArrays(outcome.rloo, "outcome_N", "group_N")
dr_grpo = OfArrays(outcome.dr_grpo, "outcome_N", "group_N")
loop = OfArrays(outcome.loop, "outcome_N", "group_N")
adca = OfArrays(attribution.adca, "outcome_N", "group_N", "label_NK", "turns_N", "step")


def tells_apart(estimator: Estimator, batch: Batch) -> bool:
    """Return True if the rollouts of a batch differ in their scores, or their turns in what else
    the estimator may read. One that is none of this module may read everything.

    A world may give the score as the reward of the last turn: that says no more than the score.
    """
    reward_NK = batch.reward_NK.copy()
    for n, trajectory in enumerate(batch.trajectories):
        last = max(0, len(trajectory.turns) - 1)
        if reward_NK[n, last] == trajectory.outcome:
            reward_NK[n, last] = 0.0
    per_turn = {"label_NK": batch.label_NK, "reward_NK": reward_NK}
    function = unbound(estimator)
    read = function.fields if isinstance(function, OfArrays) else per_turn
    compared = [x_NK[batch.on_NK] for field, x_NK in per_turn.items() if field in read]
    return any(x.size and np.ptp(x) > 1e-6 for x in (batch.outcome_N, *compared))


def of_outcomes(estimator: Estimator, batch: Batch) -> np.ndarray | None:
    """Return advantage_NK, (N, K) float64, as if no turn had a label: the part of the advantage
    that outcomes give. None for an estimator that reads no labels, or that is none of this module:
    it may do something else when it is called again."""
    function = unbound(estimator)
    if not (isinstance(function, OfArrays) and function.needs_labels):
        return None
    return estimate(estimator, dataclasses.replace(batch, label_NK=np.zeros_like(batch.label_NK)))
