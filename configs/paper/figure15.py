"""Figure 15: the learning curves behind table 6. 14B, AppWorld dev and BFCL val, avg@8 over 100
steps.

    python -m experiments.paper figure15
    python run.py --config=configs/paper/figure15.py:14b,appworld,attributing --mode=plan

The published numbers are the areas under the curves, which table 6 has; no point of a curve is
stated. Inferred, as there: the evaluations every 10 steps. Not stated: how the area is computed.
Expected: nothing beyond table 1.
"""

from configs.paper import cells

ORDERS = ["attributing > baseline"]
get_config = cells.config_of("figure15")
