"""Lines, tables, sizes and durations of a plan."""

from __future__ import annotations

from collections.abc import Sequence


def section(*lines: str) -> str:
    """Return a heading with indented lines below it."""
    return "\n  ".join(lines)


def table(*rows: Sequence[str]) -> list[str]:
    """Return rows as lines; the first column is left-aligned, the others are right-aligned."""
    widths = [max(map(len, column)) for column in zip(*rows)]
    lines = []
    for first, *others in rows:
        cells = [cell.rjust(width) for cell, width in zip(others, widths[1:])]
        lines.append("  ".join([first.ljust(widths[0]), *cells]).rstrip())
    return lines


def size(count: float) -> str:
    """Return bytes as text: 1234567 as "1.23 MB"."""
    for unit in ("B", "KB", "MB", "GB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} TB"


def duration(seconds: float) -> str:
    """Return seconds as "95 s", "12 min" or "3.4 h"."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
