"""Figure 14: the clip bound of guided rollouts. 14B, AppWorld dev, avg@8 early (20 steps) and late
(80 steps).

    python -m experiments.paper figure14
    python run.py --config=configs/paper/figure14.py:0.8 --mode=plan

Runs of 80 steps with eta 0.5. 0.6 is the run navigating of table 4, and 0.28 its run unselected.
Five values near
step 20 can be read off the figure: 45.2, 44.0, 41.0, 40.8, 39.3; which series they belong to is
unconfirmed, and here
they follow the natural order from 1.0 down. Late, 0.6 is best. Expected: 3 runs of 80 steps beyond
table 4, about 380 GPU-hours of A100 (arithmetic, not measured).
"""

from ml_collections import ConfigDict

from configs.paper import cells

NUMBERS = {
    "0.28": ("unselected80", 39.3),
    "0.4": ("clip40", 40.8),
    "0.6": ("nav80", 41.0),
    "0.8": ("clip80", 44.0),
    "1": ("clip100", 45.2),
}
CELLS = {
    name: cells.cell(f"14b,appworld,{row}", {"early": score}, splits=cells.DEV)
    for name, (row, score) in NUMBERS.items()
}
ORDERS = ["0.6 > 0.28", "0.6 > 1"]


def get_config(arg: str | None = None) -> ConfigDict:
    return cells.config(CELLS, arg, __file__)
