"""Comparisons of several programs: one process per measurement, one after the other, and a table at
the end."""

from __future__ import annotations

import json
import statistics
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]

# {name: (interpreter, as a path from the repository's root; program; settings to try, of which the
# fastest counts)}
Contenders = dict[str, tuple[str, list[str], list[list[str]]]]
Result = dict[str, Any]  # name, tokens_per_second, seconds, first_seconds ...


def contend(
    contenders: Contenders, who: str, arguments: Sequence[str], say: Callable[[str], None] = print
) -> Result | None:
    """Return the result of the fastest setting; None if the contender is not installed or every
    setting failed.

    The last line that a measurement prints must be a JSON object.
    """
    python, program, settings = contenders[who]
    if not (ROOT / python).exists():
        return None
    best = None
    for setting in settings:
        process = subprocess.run(
            [python, *program, *arguments, *setting], cwd=ROOT, capture_output=True, text=True
        )
        if process.returncode:
            say(f"{who} {' '.join(setting)} failed:\n{process.stderr[-800:]}")
            continue
        result = json.loads(process.stdout.splitlines()[-1])
        middle = statistics.median(result["seconds"])
        peak = f", peak {result['peak_gb']:.1f} GB" if "peak_gb" in result else ""
        say(
            f"{result['name']}: {result['tokens_per_second']:,.0f} tokens/s, "
            f"round {min(result['seconds']):.2f} s (median {middle:.2f}), "
            f"first {result['first_seconds']:.1f} s{peak}"
        )
        if best is None or result["tokens_per_second"] > best["tokens_per_second"]:
            best = result
    return best


def table(contenders: Contenders, what: str, results: dict[str, dict[str, Result | None]]) -> str:
    """Return a table of tokens/s by workload, with the speed of the first contender (ours) relative
    to each peer."""
    lines = [f"{what:<18}" + "".join(f"{who:>18}" for who in contenders)]
    first = next(iter(contenders))
    for name, row in results.items():
        ours, cells = row[first], []
        for who in contenders:
            if (result := row[who]) is None:
                cells.append(
                    "not installed" if not (ROOT / contenders[who][0]).exists() else "failed"
                )
                continue
            speed = result["tokens_per_second"]
            ratio = f" ({ours['tokens_per_second'] / speed:.2f}x)" if ours and who != first else ""
            cells.append(f"{speed:,.0f}{ratio}")
        lines.append(f"{name:<18}" + "".join(f"{cell:>18}" for cell in cells))
    return "\n".join([*lines, "(in brackets: our speed divided by the peer's)"])
