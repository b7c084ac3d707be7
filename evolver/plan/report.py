"""The plan as text and tables."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from evolver.plan import estimate
from evolver.plan.targets import GIB, Target


def render(
    plan: dict[str, Any],
    target: Target,
    notes: Sequence[str],
    advice: Sequence[str],
    needs: Sequence[str] = (),
) -> str:
    """Return a record of `estimate.estimate` as text, one section after the other. needs: see
    `host.lines`."""
    chip = target.chip
    sections = [
        [
            f"target {target.name}: {target.count} x {chip.name}, {chip.usable / GIB:.1f} GiB usable of"
            f" {chip.memory / GIB:.1f} each, mesh {mesh_text(plan['mesh'])}",
            f"source of the figures: {source_text(plan)}",
            f"engine: {plan['engine']}",
            *notes,
        ],
        ["memory of the fullest device, GiB", *memory_table(plan)],
        *(
            [["collectives of one update and one pass of log-probabilities", *links(plan)]]
            if links(plan)
            else []
        ),
        [
            f"one step: {plan['assumed']}",
            *time_table(plan),
            f"expected: {duration(plan['step_s'])} a step without environments and judges",
            *run_time(plan),
        ],
        ["sizes", *sizes(plan)],
        *([["each host needs", *needs]] if needs else []),
        ["verdict", *verdict(plan, advice)],
    ]
    return "\n\n".join(section(*lines) for lines in sections)


def section(*lines: str) -> str:
    """Return a heading with indented lines below it."""
    return "\n  ".join(lines)


def mesh_text(mesh: dict[str, int]) -> str:
    """Return a mesh in words: "fsdp=8 tensor=2"."""
    return " ".join(f"{axis}={size}" for axis, size in mesh.items() if size > 1) or "of one device"


def source_text(plan: dict[str, Any]) -> str:
    """Return where the figures come from."""
    if plan["compiled"]:
        names = ", ".join(plan["compiled"])
        return f"{plan['compiler']} for memory and collectives of {names}; arithmetic for the rest"
    return f"arithmetic only, no program was compiled ({plan['compiler']})"


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Return a header and rows as lines; the first column is left-aligned, the others are
    right-aligned."""
    widths = [max(len(row[i]) for row in [head, *rows]) for i in range(len(head))]
    return [
        "  ".join(
            cell.ljust(w) if i == 0 else cell.rjust(w)
            for i, (cell, w) in enumerate(zip(row, widths))
        ).rstrip()
        for row in [head, *rows]
    ]


def memory_table(plan: dict[str, Any]) -> list[str]:
    """Return the memory by phase and kind, with a mark where it is above the limit."""
    rows = []
    for phase, kinds in plan["memory"].items():
        total = sum(kinds.values())
        over = "" if total <= plan["limit"] else "  too much"
        cells = [f"{kinds[kind] / GIB:.1f}" if kinds[kind] else "." for kind in estimate.KINDS]
        rows.append([phase, *cells, f"{total / GIB:.1f}", f"{plan['limit'] / GIB:.1f}{over}"])
    lines = table(["", *estimate.KINDS, "total", "of"], rows)
    sources = [f"{phase} {source}" for phase, source in plan["sources"].items()]
    lines.append(f"temporaries (activations, buffers): {', '.join(sources)}")
    if plan["host"]:
        lines.append(f"in host memory: {plan['host'] / GIB:.0f} GiB of all hosts together")
    return lines


def links(plan: dict[str, Any]) -> list[str]:
    """Return how often each collective runs, and what one device sends."""
    lines = []
    for phase, record in plan["compiled"].items():
        for kind, (count, sent) in record["collectives"].items():
            if sent >= 1e6:
                lines.append(
                    [phase, kind, f"{count:,.0f} times", f"{sent / 1e9:,.1f} GB sent by a device"]
                )
    return table(lines[0], lines[1:]) if lines else []


def time_table(plan: dict[str, Any]) -> list[str]:
    """Return a table of each phase: the work of a device, its bottleneck, and the best and the
    expected time."""
    rows = [
        [
            name, f"{p['tokens']:,.0f}", f"{p['flops'] / 1e15:,.2f}", f"{p['bytes'] / 1e12:,.2f}",
            f"{p['wire'] / 1e9:,.0f}", p["bound"], f"{p['roofline_s']:,.1f}", f"{p['expected_s']:,.1f}",
            f"{p['tokens_per_s']:,.0f}",
        ]
        for name, p in plan["phases"].items()
    ]  # fmt: skip
    head = [
        "",
        "tokens",
        "PFLOP",
        "TB moved",
        "GB sent",
        "bound by",
        "roofline s",
        "expected s",
        "tokens/s",
    ]
    return [
        *table(head, rows),
        "tokens and tokens/s are those of all devices together, the other columns those of one",
    ]


def run_time(plan: dict[str, Any]) -> list[str]:
    """Return the time of the whole run: its steps, and what comes on top of them."""
    parts = {f"{plan['steps']:,} steps": plan["step_s"] * plan["steps"], **plan["overheads_s"]}
    counted = ", ".join(
        f"{name} {duration(seconds)}" for name, seconds in parts.items() if seconds >= 1
    )
    unknown = (
        ""
        if plan["evaluated"]
        else "; evaluation is not counted, because the number of tasks is not known here"
    )
    return [f"the run: {duration(sum(parts.values()))} ({counted}{unknown})"]


def sizes(plan: dict[str, Any]) -> list[str]:
    """Return the sizes of weights, caches and files."""
    s = plan["sizes"]
    return table(
        ["parameters", f"{s['parameters']:,}", f"{s['trained']:,} trained"],
        [
            [
                "checkpoint",
                f"{s['checkpoint'] / 1e9:.1f} GB",
                f"{s['checkpoint'] / estimate.DISK:.0f} s at 1 GB/s",
            ],
            ["weight sync", f"{plan['sync'][0] / 1e9:.1f} GB", sync_text(*plan["sync"])],
            ["exported policy", f"{s['policy'] / 1e9:.1f} GB", ""],
            ["KV cache", f"{plan['kv_token']:,} B a token", kv_text(plan)],
        ],
    )


def sync_text(sent: float, rate: float) -> str:
    """Return how long a weight sync takes."""
    seconds, speed = sent / rate, rate / 1e9
    return f"{f'{seconds:.2f} s' if seconds < 10 else duration(seconds)} at {speed:,.{0 if speed >= 10 else 1}f} GB/s"


def kv_text(plan: dict[str, Any]) -> str:
    """Return how many episodes the cache can hold."""
    asked = f"; engine.slots asks for {plan['slots']:,}" if plan["slots"] else ""
    return f"{plan['sequences']:,} episodes of {plan['context']:,} tokens fit{asked}"


def verdict(plan: dict[str, Any], advice: Sequence[str]) -> list[str]:
    """Return the verdict: it fits, or what would make it fit."""
    refused = [
        f"the compiler refuses {name}: {text.splitlines()[0][:200]}"
        for name, text in plan["refused"].items()
    ]
    if plan["fits"]:
        return ["fits", *advice]
    words = "does not fit"
    if not refused and plan["learner"] <= plan["limit"]:
        sizes = f"{plan['learner'] / GIB:.1f} of {plan['limit'] / GIB:.1f} GiB"
        words = f"does not fit with the engine on the same device; the learner alone fits ({sizes})"
    return [*refused, words, *advice]


def duration(seconds: float) -> str:
    """Return seconds as "95 s", "12 min" or "3.4 h"."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
