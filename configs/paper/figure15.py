"""Figure 15: the learning curves behind table 6. 14B, AppWorld dev and BFCL val, avg@8 over 100
steps.

    python -m experiments.paper figure15
    python run.py --config=configs/paper/figure15.py:14b,appworld,attributing --mode=plan

The published numbers are the areas under the curves, which table 6 has; no point of a curve is
stated. Inferred, as
there: the evaluations every 10 steps. Not stated: how the area is computed. Expected: nothing
beyond table 1.
"""

from ml_collections import ConfigDict

from configs.paper import cells, table6

CELLS = {
    name: cell._replace(published={"auc": cell.published["auc"]})
    for name, cell in table6.CELLS.items()
}
ORDERS = table6.ORDERS


def get_config(arg: str | None = None) -> ConfigDict:
    return cells.config(CELLS, arg, __file__)
