"""Table 6: how soon attributing learns. 14B, AppWorld dev and BFCL val, over 100 steps.

    python -m experiments.paper table6
    python run.py --config=configs/paper/table6.py:14b,appworld,attributing --mode=plan

Steps@.9 is the first evaluated step with 90% of the baseline's best avg@8, and AUC the mean height
of the curve, in percent. Both follow from the evaluations every 10 steps of two runs of table 1.

Inferred: the horizon of 100 steps and the evaluations every 10 (all values are multiples of 10).
Not stated: how AUC is computed; the mean height has the right magnitude. Expected: nothing beyond
table 1.
"""

from ml_collections import ConfigDict

from configs.paper import cells

NUMBERS = {  # Steps@.9, AUC
    "14b,appworld,baseline": (90, 41.03),
    "14b,appworld,attributing": (40, 46.26),
    "14b,bfcl,baseline": (60, 55.78),
    "14b,bfcl,attributing": (20, 61.02),
}
ROWS = {"baseline": "q", "attributing": "qa"}
BASELINE = "baseline"  # the row whose best score sets the goal
CELLS = {}
for name, (steps, auc) in NUMBERS.items():
    prefix, _, row = name.rpartition(",")
    CELLS[name] = cells.cell(
        f"{prefix},{ROWS[row]}", {"steps@.9": steps, "auc": auc}, splits=cells.DEV
    )
ORDERS = ["attributing > baseline"]


def get_config(arg: str | None = None) -> ConfigDict:
    return cells.config(CELLS, arg, __file__)
