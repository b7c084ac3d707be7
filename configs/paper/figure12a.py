"""Figure 12a: the number of synthetic tasks. 14B, AppWorld test-normal, avg@8.

    python -m experiments.paper figure12a
    python run.py --config=configs/paper/figure12a.py:100 --mode=plan

Printed in the figure: 40.3, 42.7, 44.3. Inferred: model and benchmark, because 44.3 is the score of
+Questioning in table 1, which is the cell with 500 tasks. Expected: 2 runs of 100 steps beyond
table 1, about 310 GPU-hours of A100 (arithmetic, not measured).
"""

from configs.paper import cells

ORDERS = ["200 > 100", "500 > 200"]
get_config = cells.config_of("figure12a")
