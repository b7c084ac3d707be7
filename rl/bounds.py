"""Bounds of numbers, written into signatures: `def ppo(tokens, *, clip_low: Fraction = 0.28)`.

Configs write the same bounds beside their keys (configs/base.py).
"""

from typing import Annotated

from annotated_types import Ge, Gt, Interval

Fraction = Annotated[float, Interval(ge=0, le=1)]
Positive = Annotated[float, Gt(0)]
NotNegative = Annotated[float, Ge(0)]
Weight = Annotated[float, Interval(ge=0, le=1000)]
Count = Annotated[int, Ge(1)]
CountOrZero = Annotated[int, Ge(0)]
