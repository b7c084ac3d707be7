"""Count the collectives of a compiled program in its HLO text, with the trip counts of the loops
around them, and the kernels of a loop."""

import math
import re

KINDS = ("all-gather", "reduce-scatter", "all-reduce", "all-to-all", "collective-permute")
# instructions that a GPU runs as a kernel of its own
KERNELS = ("fusion", "custom-call", "dot", "copy", "reduce", "sort", "scatter", "gather")

_NAME = r"%?([\w.\-]+)"
_COMPUTATION = re.compile(rf"^(ENTRY )?{_NAME} \(.*\{{\n((?: .*\n)*)", re.MULTILINE)
_COLLECTIVE = re.compile(rf"^\s+(?:ROOT )?%?[\w.\-]+ = (.*?) ({'|'.join(KINDS)})(-start)?\(")
_CALLED = re.compile(
    rf"\b(?:body|condition|calls|to_apply|true_computation|false_computation)={_NAME}"
)
_INSTRUCTION = re.compile(rf"^\s+(?:ROOT )?{_NAME} = (\(.*?\)|\S+) ([\w\-]+)\((.*)$")
_ARRAY = re.compile(r"\b(pred|[a-z]+(\d+)\w*)\[([\d,]*)\]")  # the width is in the name of a type


def collectives(text: str, *, trips: float = 1.0) -> dict[str, tuple[float, float]]:
    """Return {kind: (executions, bytes that each device sends)} of a program's collectives over
    several devices.

    Bytes are those of ring algorithms. trips: assumed trip count of loops whose count is data.
    """
    found = _COMPUTATION.findall(text)
    bodies = {name: body for _, name, body in found}
    sums = dict.fromkeys(KINDS, (0.0, 0.0))

    def run(name: str, count: float) -> None:
        for line in bodies.get(name, "").splitlines():
            match = _COLLECTIVE.match(line)
            if match and (devices := _group_size(line)) > 1:
                result, kind, start = match.groups()
                executions, sent = sums[kind]
                wire = _wire(result, kind, bool(start), devices)
                sums[kind] = executions + count, sent + count * wire
            loop = _trip_count(line, bodies) if " while(" in line else 1
            for other in _called(line):
                run(other, count * (trips if loop is None else loop))

    for entry, name, _ in found:
        if entry:
            run(name, 1.0)
    return {kind: total for kind, total in sums.items() if total[0]}


def loop(text: str) -> dict[str, float]:
    """Return {"kernels", "bytes"} of a turn of a GPU program's longest loop: the instructions that
    run on the device, and what they read and write.

    An elementwise fusion reads at most one element of an operand for each of its results, as a
    gather does. A scatter is in place: it reads the new elements and writes them.
    """
    bodies = {name: body.splitlines() for _, name, body in _COMPUTATION.findall(text)}
    looped = re.findall(rf" while\(.* body={_NAME}", text)
    body: list[str] = max((bodies[name] for name in looped), key=len, default=[])
    found = [match.groups() for line in body if (match := _INSTRUCTION.match(line))]
    results = {name: result for name, result, *_ in found}
    kernels = 0
    moved = 0.0
    for name, result, kind, rest in found:
        if kind not in KERNELS:
            continue
        operands, _, attributes = rest.partition(")")
        read = [results.get(name, "") for name in re.findall(r"%([\w.\-]+)", operands)]
        kernels += 1
        if "scatter" in name:
            moved += 2 * sum(_bytes(array) for array in read if array != result)
        elif "kind=kLoop" in attributes:
            share = [min(1, _elements(result) / max(1, _elements(array))) for array in read]
            moved += _bytes(result) + sum(_bytes(array) * s for array, s in zip(read, share))
        else:
            moved += _bytes(result) + sum(map(_bytes, read))
    return {"kernels": kernels, "bytes": moved}


def _called(line: str) -> list[str]:
    """Return the computations that an instruction calls; every branch counts as taken."""
    branches = re.search(r"branch_computations=\{([^}]*)\}", line)
    return _CALLED.findall(line) + re.findall(_NAME, branches[1] if branches else "")


def _trip_count(line: str, bodies: dict[str, str]) -> int | None:
    """Return the trip count of a `while` from its metadata or its condition; None if the count is
    data."""
    if known := re.search(r'"known_trip_count":\{"n":"(\d+)"', line):
        return int(known[1])
    condition = re.search(rf"condition={_NAME}", line)
    body = bodies.get(condition[1], "") if condition else ""
    compared = re.search(r"ROOT .*direction=LT.*", body)
    for name, value in re.findall(rf"{_NAME} = s32\[\]\S* constant\((\d+)\)", body):
        if compared and re.search(rf"%?{re.escape(name)}\b", compared[0]):
            return int(value)
    return None


def _group_size(line: str) -> int:
    """Return the number of devices in a group of an instruction."""
    if axes := re.search(r"replica_groups=mesh\[([^\]]*)\]\s*\{([^}]*)\}", line):
        sizes = dict(re.findall(r"'([^']+)'=(\d+)", axes[1]))
        names = re.findall(r"'([^':]+)[^']*'", axes[2])
        return math.prod(int(sizes.get(name, 1)) for name in names)
    if iota := re.search(r"replica_groups=\[\d+,(\d+)\]<=", line):
        return int(iota[1])
    if groups := re.search(r"replica_groups=\{\{([\d,]*)\}", line):
        return groups[1].count(",") + 1
    return 2 if "source_target_pairs=" in line else 1


def _arrays(result: str) -> list[tuple[int, float]]:
    """Return (elements, bytes) of each array of a result."""
    arrays = []
    for _, bits, shape in _ARRAY.findall(re.sub(r"\{[^{}]*\}", "", result)):  # without layouts
        elements = math.prod(int(n) for n in shape.split(",") if n)
        arrays.append((elements, elements * int(bits or 8) / 8))
    return arrays


def _elements(result: str) -> int:
    return max((elements for elements, _ in _arrays(result)), default=0)


def _bytes(result: str) -> float:
    return sum(size for _, size in _arrays(result))


def _wire(result: str, kind: str, start: bool, devices: int) -> float:
    """Return the bytes that one device sends. `-start` instructions name both operands and
    results."""
    whole = _bytes(result)
    others = (devices - 1) / devices
    if kind == "all-reduce":
        return 2 * whole * others
    if kind in ("collective-permute", "all-to-all"):
        sent = whole / 2 if start else whole
        return sent if kind == "collective-permute" else sent * others
    if start:  # both the shard and the whole array are named
        return whole * devices / (devices + 1) * others
    return whole * others * (devices if kind == "reduce-scatter" else 1)
