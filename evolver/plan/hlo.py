"""Count the collectives of a compiled program in its HLO text, with the trip counts of the loops
around them."""

from __future__ import annotations

import math
import re
from collections import defaultdict

KINDS = ("all-gather", "reduce-scatter", "all-reduce", "all-to-all", "collective-permute")
BITS = {
    "pred": 8,
    "bf16": 16,
    "token": 0,
}  # the width of others is in their name: f32, s8, f8e4m3fn

_HEADER = re.compile(r"^(?:ENTRY )?%?([\w.\-]+) \(.*\{$")
_ARRAY = re.compile(r"\b([a-z][a-z0-9]*)\[([\d,]*)\]")
_COLLECTIVE = re.compile(rf"^\s+(?:ROOT )?%?[\w.\-]+ = (.*?) ({'|'.join(KINDS)})(-start)?\(")
_CALLED = re.compile(
    r"\b(body|condition|calls|to_apply|true_computation|false_computation)=%?([\w.\-]+)"
)


def collectives(text: str, *, trips: float = 1.0) -> dict[str, tuple[float, float]]:
    """Return {kind: (executions, bytes that each device sends)} of a program's collectives over
    several devices.

    Bytes are those of ring algorithms. trips: assumed trip count of loops whose count is data.
    """
    computations = _computations(text)
    times = _multiplicities(computations, trips)
    sums: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
    for name, lines in computations.items():
        for line in lines:
            match = _COLLECTIVE.match(line)
            if match and times[name] and (devices := _group_size(line)) > 1:
                sums[match[2]][0] += times[name]
                sums[match[2]][1] += times[name] * _wire(
                    match[1], match[2], bool(match[3]), devices
                )
    return {kind: (sums[kind][0], sums[kind][1]) for kind in KINDS if kind in sums}


def _computations(text: str) -> dict[str, list[str]]:
    """Return the instructions of each computation; those of the entry are also under ""."""
    computations: dict[str, list[str]] = {}
    lines: list[str] = []
    for line in text.splitlines():
        header = _HEADER.match(line)
        if header:
            lines = computations[header[1]] = []
            if line.startswith("ENTRY"):
                computations[""] = lines
        elif line.startswith(" "):
            lines.append(line)
    return computations


def _multiplicities(computations: dict[str, list[str]], trips: float) -> dict[str, float]:
    """Return how often each computation runs. Every branch of a conditional counts as taken."""
    times: dict[str, float] = defaultdict(float)
    entry = next(
        (name for name, lines in computations.items() if name and lines is computations.get("")),
        None,
    )

    def run(name: str, count: float) -> None:
        times[name] += count
        for line in computations.get(name, ()):
            called = [other for _, other in _CALLED.findall(line)]
            branches = re.search(r"branch_computations=\{([^}]*)\}", line)
            if branches:
                called += [other.strip().lstrip("%") for other in branches[1].split(",")]
            loop = _trip_count(line, computations) if " while(" in line else 1
            for other in called:
                run(other, count * (trips if loop is None else loop))

    if entry is not None:
        run(entry, 1.0)
    return times


def _trip_count(line: str, computations: dict[str, list[str]]) -> int | None:
    """Return the trip count of a `while` from its metadata or its condition; None if the count is
    data."""
    known = re.search(r'"known_trip_count":\{"n":"(\d+)"', line)
    if known:
        return int(known[1])
    condition = re.search(r"condition=%?([\w.\-]+)", line)
    lines = computations.get(condition[1], []) if condition else []
    root = next((other for other in lines if "ROOT" in other and "direction=LT" in other), "")
    for other in lines:
        constant = re.match(r"\s+%?([\w.\-]+) = s32\[\]\S* constant\((\d+)\)", other)
        if constant and re.search(rf"%?{re.escape(constant[1])}\b", root):
            return int(constant[2])
    return None


def _group_size(line: str) -> int:
    """Return the number of devices in a group of an instruction."""
    axes = re.search(r"replica_groups=mesh\[([^\]]*)\]\s*\{([^}]*)\}", line)
    if axes:
        sizes = dict(re.findall(r"'([^']+)'=(\d+)", axes[1]))
        return math.prod(
            int(sizes.get(name.partition(":")[0], 1)) for name in re.findall(r"'([^']+)'", axes[2])
        )
    iota = re.search(r"replica_groups=\[\d+,(\d+)\]<=", line)
    if iota:
        return int(iota[1])
    groups = re.search(r"replica_groups=\{\{([\d,]*)\}", line)
    if groups:
        return groups[1].count(",") + 1
    return 2 if "source_target_pairs=" in line else 1


def _bytes(text: str) -> float:
    """Return the bytes of all arrays named in the text."""
    total = 0.0
    for kind, shape in _ARRAY.findall(text):
        digits = re.search(r"\d+", kind)
        bits = BITS[kind] if kind in BITS else int(digits[0]) if digits else 0
        total += math.prod(int(n) for n in shape.split(",") if n) * bits / 8
    return total


def _wire(result: str, kind: str, start: bool, devices: int) -> float:
    """Return the bytes that one device sends. `-start` instructions name both operands and
    results."""
    text = re.sub(r"\{[^{}]*\}", "", result)  # layouts
    whole = _bytes(text)
    if kind == "all-reduce":
        return 2 * whole * (devices - 1) / devices
    if kind == "collective-permute":
        return whole / 2 if start else whole
    if kind == "all-to-all":
        return (whole / 2 if start else whole) * (devices - 1) / devices
    if start:  # both the shard and the whole array are named
        whole = whole * devices / (devices + 1)
    elif kind == "reduce-scatter":
        whole *= devices
    return whole * (devices - 1) / devices
