"""Figure 16: the weight alpha of the labels. 14B, AppWorld dev, avg@8 after 20 and after 100 steps.

    python -m experiments.paper figure16
    python run.py --config=configs/paper/figure16.py:0.3 --mode=plan

0 and 0.1 are the runs +Questioning and +Questioning&Attributing of table 1. From the text: after 20
steps 0.3 has 45 and the baseline 28; at the end 0.1 and 0.2 have about 59, 0.05 is close to that,
the baseline has 55 and 0.3 has 43.
Inferred: the setting, as in table 5. Expected: 3 runs of 100 steps beyond table 1, about 470
GPU-hours of A100 (arithmetic, not measured).
"""

from ml_collections import ConfigDict

from configs.paper import cells

NUMBERS = {
    "0": ("q", {"early": 28, "avg@8": 55}),
    "0.05": ("alpha005", {"avg@8": 59}),
    "0.1": ("qa", {"avg@8": 59}),
    "0.2": ("alpha020", {"avg@8": 59}),
    "0.3": ("alpha030", {"early": 45, "avg@8": 43}),
}
CELLS = {
    name: cells.cell(f"14b,appworld,{row}", published, splits=cells.DEV)
    for name, (row, published) in NUMBERS.items()
}
ORDERS = ["0.1 > 0", "0.2 > 0", "0 > 0.3"]


def get_config(arg: str | None = None) -> ConfigDict:
    return cells.config(CELLS, arg, __file__)
