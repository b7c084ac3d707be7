"""Table 2: where the training tasks come from. AppWorld test-normal and BFCL val, avg@8 and best@8.

    python -m experiments.paper table2
    python run.py --config=configs/paper/table2.py:14b,appworld,hybrid --mode=plan

`original` is GRPO on the benchmark's tasks with its own reward; `synthetic` is the row +Questioning
of table 1; `hybrid` has both, and synthetic advantages count half. No run has navigating or
attributing.

Confirmed: `synthetic` repeats table 1. Inferred: 40 passes over the original tasks, which are 80
steps in AppWorld and 120 in BFCL. Not stated: the share of synthetic tasks in `hybrid`; here every
task of both sets is equally likely (0.85 in AppWorld, 0.83 in BFCL). Expected: 4 runs of 80 or 120
steps and 4 of 100 beyond table 1, about 920 GPU-hours of A100 (arithmetic, not measured).
"""

from configs.paper import cells

ORDERS = ["original > base", "synthetic > base", "hybrid > original", "hybrid > synthetic"]
get_config = cells.config_of("table2")
