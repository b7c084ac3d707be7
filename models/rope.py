"""Scaling of the rotary position embedding for contexts beyond those trained on: YaRN, and that of
Llama 3."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

ORIGINAL = "original_max_position_embeddings"  # positions trained on
LARGEST = 1e9  # of any parameter: beyond it float32 has no frequencies left


class Yarn(NamedTuple):
    """YaRN (arXiv 2309.00071), as Qwen2.5's long-context recipe uses it.

    Dimensions that turn more than `beta_fast` times within the positions trained on keep their
    frequency, those that turn less than `beta_slow` times get it divided by `factor`, and those
    between are interpolated. Cosines and sines are multiplied by `attention_factor`, so that scores
    are by its square. `truncate` rounds the bounds of the interpolated dimensions to whole numbers.
    """

    factor: float
    original_max_position_embeddings: int
    attention_factor: float
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True

    def factors(self, head_dim: int, theta: float) -> list[float]:
        """Return the factor on the frequency of each of the head_dim / 2 pairs of dimensions."""
        positions, both = self.original_max_position_embeddings, (self.beta_fast, self.beta_slow)
        # the (fractional) dimensions that turn so many times within the positions trained on
        low, high = (
            head_dim * math.log(positions / (turns * 2 * math.pi)) / (2 * math.log(theta))
            for turns in both
        )
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, head_dim - 1)
        scaled_h = [
            min(max((pair - low) / max(high - low, 1e-3), 0.0), 1.0)
            for pair in range(head_dim // 2)
        ]
        return [1 - scaled + scaled / self.factor for scaled in scaled_h]


class Llama3(NamedTuple):
    """Llama 3's scaling: wavelengths beyond the positions trained on, divided by `low_freq_factor`,
    are stretched by `factor`, those below the positions divided by `high_freq_factor` stay, and
    those between are interpolated."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int

    @property
    def attention_factor(self) -> float:
        """As in `Yarn`."""
        return 1.0

    def factors(self, head_dim: int, theta: float) -> list[float]:
        """As in `Yarn`."""
        turns_h = [
            self.original_max_position_embeddings * theta ** (-2 * pair / head_dim) / (2 * math.pi)
            for pair in range(head_dim // 2)
        ]
        low, high = self.low_freq_factor, self.high_freq_factor
        kept_h = [min(max((turns - low) / (high - low), 0.0), 1.0) for turns in turns_h]
        return [kept + (1 - kept) / self.factor for kept in kept_h]


def scaling_of(rope: Mapping[str, Any], positions: int) -> Yarn | Llama3 | None:
    """Return the scaling that a config.json describes, with its `rope_type`. positions:
    max_position_embeddings. Raises ValueError."""
    kind = rope["rope_type"]
    if kind not in ("default", "yarn", "llama3"):
        raise ValueError(
            f"rope type {kind!r} is not supported, only 'default', 'yarn' and 'llama3'"
        )
    if kind == "default":
        return None
    return _yarn_of(rope, positions) if kind == "yarn" else _llama3_of(rope)


def _yarn_of(rope: Mapping[str, Any], positions: int) -> Yarn:
    given = _numbers(
        "yarn", rope, "factor", ORIGINAL, "attention_factor",
        "beta_fast", "beta_slow", "mscale", "mscale_all_dim",
    )  # fmt: skip
    factor, whole = given.get("factor", 0.0), rope.get("truncate", True)
    if factor < 1 or not isinstance(whole, bool):
        raise ValueError(
            f"rope type 'yarn' needs a factor of at least 1, and truncate true or false; got"
            f" {dict(rope)}"
        )

    def scale(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0

    both = "mscale" in given and "mscale_all_dim" in given
    attention = scale(given["mscale"]) / scale(given["mscale_all_dim"]) if both else scale(1.0)
    scaling = Yarn(
        factor,
        int(given.get(ORIGINAL, positions)),
        given.get("attention_factor", attention),
        given.get("beta_fast", 32.0),
        given.get("beta_slow", 1.0),
        whole,
    )
    if scaling.beta_slow >= scaling.beta_fast:
        raise ValueError(
            f"beta_slow={scaling.beta_slow} is not below beta_fast={scaling.beta_fast}"
        )
    return scaling


def _llama3_of(rope: Mapping[str, Any]) -> Llama3:
    given = _numbers("llama3", rope, *Llama3._fields)
    if missing := [key for key in Llama3._fields if key not in given]:
        raise ValueError(f"rope type 'llama3' needs {', '.join(missing)}")
    factor, low, high, original = (given[key] for key in Llama3._fields)
    if low >= high:
        raise ValueError(f"low_freq_factor={low} is not below high_freq_factor={high}")
    return Llama3(factor, low, high, int(original))


def _numbers(kind: str, rope: Mapping[str, Any], *names: str) -> dict[str, float]:
    """Return those of the parameters that are given. Raises ValueError for one that is no positive
    number, and for trained positions that are not whole."""
    given, wrong = {}, []
    for name in names:
        if (value := rope.get(name)) is None:
            continue
        real = type(value) in (int, float)  # bool is neither
        if not (real and 0 < value < LARGEST) or (name == ORIGINAL and value != int(value)):
            wrong.append(f"{name}={value!r}")
        else:
            given[name] = float(value)
    if wrong:
        raise ValueError(f"rope type {kind!r} needs positive numbers, not {', '.join(wrong)}")
    return given


def record_of(scaling: Yarn | Llama3) -> dict[str, Any]:
    """Return the object of a config.json from which `scaling_of` reads the same scaling."""
    return {"rope_type": type(scaling).__name__.lower()} | scaling._asdict()
