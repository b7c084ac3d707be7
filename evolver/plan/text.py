"""Lines, tables, sizes and durations of a plan."""

from collections.abc import Sequence

from tabulate import tabulate


def section(*lines: str) -> str:
    """Return a heading with indented lines below it."""
    return "\n  ".join(lines)


def table(*rows: Sequence[str]) -> list[str]:
    """Return rows as lines; the first column is left-aligned, the others are right-aligned."""
    align = ["left"] + ["right"] * (len(rows[0]) - 1)
    text = tabulate(rows, tablefmt="plain", colalign=align, disable_numparse=True)
    return [line.rstrip() for line in text.splitlines()]


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
