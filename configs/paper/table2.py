"""Table 2: where the training tasks come from. AppWorld test-normal and BFCL val, avg@8 and best@8.

    python -m experiments.paper table2
    python run.py --config=configs/paper/table2.py:14b,appworld,hybrid --mode=plan

`original` is GRPO on the benchmark's tasks with its own reward; `synthetic` is the row +Questioning
of table 1; `hybrid` has both, and synthetic advantages count half. No run has navigating or
attributing.

Confirmed: `synthetic` repeats table 1. Inferred: 40 passes over the original tasks, which are 80
steps in AppWorld
and 120 in BFCL. Not stated: the share of synthetic tasks in `hybrid`; here every task of both sets
is equally likely (0.85 in AppWorld, 0.83 in BFCL). Expected: 4 runs of 80 or 120 steps and 4 of 100
beyond table 1, about 920 GPU-hours of A100 (arithmetic, not measured).
"""

from ml_collections import ConfigDict

from configs.paper import cells

NUMBERS = {  # AppWorld avg@8, best@8, BFCL avg@8, best@8
    "7b,base": (1.8, 5.6, 29.8, 42.4),
    "7b,original": (16.1, 25.5, 58.8, 74.0),
    "7b,synthetic": (23.2, 40.3, 49.0, 60.6),
    "7b,hybrid": (21.8, 36.3, 65.3, 75.6),
    "14b,base": (18.0, 31.4, 41.6, 54.1),
    "14b,original": (46.1, 61.5, 68.6, 74.3),
    "14b,synthetic": (44.3, 65.5, 60.3, 72.1),
    "14b,hybrid": (48.4, 68.1, 73.0, 81.1),
}
CELLS = cells.both(
    NUMBERS, {"base": "base", "original": "original", "synthetic": "q", "hybrid": "hybrid"}
)
ORDERS = ["original > base", "synthetic > base", "hybrid > original", "hybrid > synthetic"]


def get_config(arg: str | None = None) -> ConfigDict:
    return cells.config(CELLS, arg, __file__)
