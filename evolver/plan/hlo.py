"""Collectives of a compiled program, read from its HLO text, with the trip counts of the loops around them."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from dataclasses import dataclass

KINDS = ("all-gather", "reduce-scatter", "all-reduce", "all-to-all", "collective-permute")
BITS = {"pred": 8, "bf16": 16, "token": 0}  # others carry their width in their name: f32, s8, f8e4m3fn

_HEADER = re.compile(r"^(?:ENTRY )?%?([\w.\-]+) \(.*\{$")
_ARRAY = re.compile(r"\b([a-z][a-z0-9]*)\[([\d,]*)\]")
_COLLECTIVE = re.compile(rf"^\s+(?:ROOT )?%?[\w.\-]+ = (.*?) ({'|'.join(KINDS)})(-start)?\(")
_CALLED = re.compile(r"\b(body|condition|calls|to_apply|true_computation|false_computation)=%?([\w.\-]+)")


@dataclass(frozen=True)
class Collective:
    """`count` executions of one instruction over `devices` devices; `wire`: bytes each device sends in all of them,
    with ring algorithms."""

    kind: str
    count: float
    devices: int
    wire: float


def collectives(text: str, *, trips: float = 1.0) -> list[Collective]:
    """Every collective of the program with more than one device. `trips`: of loops whose count is data."""
    computations = _computations(text)
    times = _multiplicities(computations, trips)
    found = []
    for name, lines in computations.items():
        for line in lines:
            match = _COLLECTIVE.match(line)
            if match and times[name]:
                devices = _group_size(line)
                if devices > 1:
                    wire = _wire(match[1], match[2], bool(match[3]), devices)
                    found.append(Collective(match[2], times[name], devices, times[name] * wire))
    return found


def totals(found: list[Collective]) -> dict[str, tuple[float, float]]:
    """{kind: (executions, bytes that each device sends)}."""
    sums: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
    for item in found:
        sums[item.kind][0] += item.count
        sums[item.kind][1] += item.wire
    return {kind: (sums[kind][0], sums[kind][1]) for kind in KINDS if kind in sums}


def _computations(text: str) -> dict[str, list[str]]:
    """The instructions of each computation; the entry's stand under "" too."""
    found: dict[str, list[str]] = {}
    lines: list[str] = []
    for line in text.splitlines():
        header = _HEADER.match(line)
        if header:
            lines = found[header[1]] = []
            if line.startswith("ENTRY"):
                found[""] = lines
        elif line.startswith(" "):
            lines.append(line)
    return found


def _multiplicities(computations: dict[str, list[str]], trips: float) -> dict[str, float]:
    """How often each computation runs; of a conditional's branches each counts as taken."""
    times: dict[str, float] = defaultdict(float)
    entry = next((name for name, lines in computations.items() if name and lines is computations.get("")), None)

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
    """Of a `while`: what the compiler says, or the constant that its condition compares with; None where it is data."""
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
    """Devices that take part together."""
    axes = re.search(r"replica_groups=mesh\[([^\]]*)\]\s*\{([^}]*)\}", line)
    if axes:
        sizes = dict(re.findall(r"'([^']+)'=(\d+)", axes[1]))
        return math.prod(int(sizes.get(name.partition(":")[0], 1)) for name in re.findall(r"'([^']+)'", axes[2]))
    iota = re.search(r"replica_groups=\[\d+,(\d+)\]<=", line)
    if iota:
        return int(iota[1])
    groups = re.search(r"replica_groups=\{\{([\d,]*)\}", line)
    if groups:
        return groups[1].count(",") + 1
    return 2 if "source_target_pairs=" in line else 1


def _bytes(text: str) -> float:
    """Of all arrays named in the text."""
    total = 0.0
    for kind, shape in _ARRAY.findall(text):
        digits = re.search(r"\d+", kind)
        bits = BITS[kind] if kind in BITS else int(digits[0]) if digits else 0
        total += math.prod(int(n) for n in shape.split(",") if n) * bits / 8
    return total


def _wire(result: str, kind: str, start: bool, devices: int) -> float:
    """Bytes one device sends. `-start` instructions name operands and results; the larger side is the whole array."""
    text = re.sub(r"\{[^{}]*\}", "", result)  # layouts
    whole = _bytes(text)
    if kind == "all-reduce":
        return 2 * whole * (devices - 1) / devices
    if kind == "collective-permute":
        return whole / 2 if start else whole
    if kind == "all-to-all":
        return (whole / 2 if start else whole) * (devices - 1) / devices
    if start:  # the shard and the whole array
        whole = whole * devices / (devices + 1)
    elif kind == "reduce-scatter":
        whole *= devices
    return whole * (devices - 1) / devices
