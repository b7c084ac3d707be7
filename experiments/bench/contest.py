"""One measurement after the other, each in a process of its own, and one table in the end."""

from __future__ import annotations

import json
import statistics
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]

# Who, under which Python (a path from the repository's root), and the settings to try; the fastest counts.
Contenders = dict[str, tuple[str, list[str], list[list[str]]]]
Result = dict[str, Any]  # name, tokens_per_second, seconds, first_seconds ...


def contend(
    contenders: Contenders, who: str, arguments: Sequence[str], say: Callable[[str], None] = print
) -> Result | None:
    """The result of the fastest setting, None where the contender is not installed or every setting failed.

    A measurement prints a JSON object as its last line.
    """
    python, program, settings = contenders[who]
    if not (ROOT / python).exists():
        return None
    best = None
    for setting in settings:
        done = subprocess.run([python, *program, *arguments, *setting], cwd=ROOT, capture_output=True, text=True)
        if done.returncode:
            say(f"{who} {' '.join(setting)} failed:\n{done.stderr[-800:]}")
            continue
        result = json.loads(done.stdout.splitlines()[-1])
        middle = statistics.median(result["seconds"])
        say(f"{result['name']}: {result['tokens_per_second']:,.0f} tokens/s, round {min(result['seconds']):.2f} s"
            f" (median {middle:.2f}), first {result['first_seconds']:.1f} s")  # fmt: skip
        if best is None or result["tokens_per_second"] > best["tokens_per_second"]:
            best = result
    return best


def table(contenders: Contenders, what: str, results: dict[str, dict[str, Result | None]]) -> str:
    """Tokens/s by workload, and how many times a peer's ours, the first contender's, is."""
    lines = [f"{what:<18}" + "".join(f"{who:>18}" for who in contenders)]
    first = next(iter(contenders))
    for name, row in results.items():
        ours, cells = row[first], []
        for who in contenders:
            if (result := row[who]) is None:
                cells.append("not installed" if not (ROOT / contenders[who][0]).exists() else "failed")
                continue
            speed = result["tokens_per_second"]
            ratio = f" ({ours['tokens_per_second'] / speed:.2f}x)" if ours and who != first else ""
            cells.append(f"{speed:,.0f}{ratio}")
        lines.append(f"{name:<18}" + "".join(f"{cell:>18}" for cell in cells))
    return "\n".join([*lines, "(in brackets: how many times as fast ours is)"])
