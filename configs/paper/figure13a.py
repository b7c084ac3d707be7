"""Figure 13a: experience in the prompt of a policy that is not trained. 14B, AppWorld dev and BFCL
val.

    python -m experiments.paper figure13a
    python run.py --config=configs/paper/figure13a.py:14b,appworld,with --mode=plan

The gains are printed in the figure: +4.97 and +5.77 avg@4, +6.51 and +6.93 best@4 in AppWorld and
BFCL. The heights were read off it. Table 4 has other scores for the same rows (+2.9 and +8.5
avg@4). Expected: evaluations and a pool each.
"""

from ml_collections import ConfigDict

from configs.paper import cells

NUMBERS = {  # avg@4, best@4
    "14b,appworld,without": (15.35, 25.17),
    "14b,appworld,with": (20.32, 31.68),
    "14b,bfcl,without": (32.83, 52.20),
    "14b,bfcl,with": (38.60, 59.13),
}
CELLS = {}
for name, (avg, best) in NUMBERS.items():
    prefix, _, what = name.rpartition(",")
    run = f"{prefix},{'icl' if what == 'with' else 'base'}"
    CELLS[name] = cells.cell(
        run, {"avg@4": avg, "best@4": best}, splits=cells.DEV, k=4, experience=float(what == "with")
    )
ORDERS = ["with > without"]


def get_config(arg: str | None = None) -> ConfigDict:
    return cells.config(CELLS, arg, __file__)
