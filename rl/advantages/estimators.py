"""The estimators that a config can name: the functions of arrays in this room, called with fields
of the batch."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import numpy as np

from rl.advantages import attribution, outcome
from rl.advantages.batch import Batch, Estimator


def of_arrays(
    function: Callable[..., np.ndarray], *fields: str, needs_labels: bool = False
) -> Estimator:
    """Return the estimator that calls `function` with these fields of the batch, in order.

    Its keyword-only parameters are those of `function`.
    """

    @functools.wraps(function)
    def estimator(batch: Batch, **args: Any) -> np.ndarray:
        return function(*(getattr(batch, field) for field in fields), **args)

    parameters = inspect.signature(function).parameters.values()
    batch = inspect.Parameter("batch", inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=Batch)
    args = (p for p in parameters if p.kind is p.KEYWORD_ONLY)
    estimator.__signature__ = inspect.Signature([batch, *args])  # type: ignore[attr-defined]
    estimator.needs_labels = needs_labels  # type: ignore[attr-defined]
    return estimator


grpo = of_arrays(outcome.grpo, "outcome_N", "group_N")
rloo = of_arrays(outcome.rloo, "outcome_N", "group_N")
dr_grpo = of_arrays(outcome.dr_grpo, "outcome_N", "group_N")
loop = of_arrays(outcome.loop, "outcome_N", "group_N")
adca = of_arrays(
    attribution.adca, "outcome_N", "group_N", "label_NK", "turns_N", "step", needs_labels=True
)
