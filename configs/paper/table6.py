"""Table 6: how soon attributing learns. 14B, AppWorld dev and BFCL val, over 100 steps.

    python -m experiments.paper table6
    python run.py --config=configs/paper/table6.py:14b,appworld,attributing --mode=plan

Steps@.9 is the first evaluated step with 90% of the baseline's best avg@8, and AUC the mean height
of the curve, in percent. Both follow from the evaluations every 10 steps of two runs of table 1.

Inferred: the horizon of 100 steps and the evaluations every 10 (all values are multiples of 10).
Not stated: how AUC is computed; the mean height has the right magnitude. Expected: nothing beyond
table 1.
"""

from configs.paper import cells

ORDERS = ["attributing > baseline"]
get_config = cells.config_of("table6")
