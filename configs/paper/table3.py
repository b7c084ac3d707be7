"""Table 3: tasks of one world, scores in the other. AppWorld test-normal and BFCL val, avg@8 and
best@8.

    python -m experiments.paper table3
    python run.py --config=configs/paper/table3.py:14b,appworld,bfcl --mode=plan

A cell is SIZE,TRAINED IN,EVALUATED IN. It trains nothing of its own: the runs are those of
+Questioning in table 1,
and half of the cells repeat its scores. Expected: nothing beyond table 1 but evaluations.
"""

from ml_collections import ConfigDict

from configs.paper import cells

NUMBERS = {  # trained in: AppWorld avg@8, best@8, BFCL avg@8, best@8
    "7b,appworld": (23.2, 40.3, 36.1, 45.0),
    "7b,bfcl": (1.2, 4.2, 49.0, 60.6),
    "14b,appworld": (44.3, 65.5, 56.0, 68.9),
    "14b,bfcl": (22.9, 40.8, 60.3, 72.1),
}
CELLS = {
    f"{name},{world}": cells.cell(
        f"{name},q", {"avg@8": numbers[i], "best@8": numbers[i + 1]}, world=world
    )
    for name, numbers in NUMBERS.items()
    for i, world in ((0, "appworld"), (2, "bfcl"))
}
ORDERS: list[str] = []


def get_config(arg: str | None = None) -> ConfigDict:
    return cells.config(CELLS, arg, __file__)
