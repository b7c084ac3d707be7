"""Figure 12b: judges of the outcome of synthetic tasks. 14B, AppWorld test-normal, avg@8.

    python -m experiments.paper figure12b
    python run.py --config=configs/paper/figure12b.py:naive --mode=plan

Printed in the figure: 22.5, 33.1, 44.3. Inferred: the setting, as in figure 12a. The reference has
no code of the naive judge; its prompt here is our own. Expected: 2 runs of 100 steps beyond table
1, about 310 GPU-hours of A100 (arithmetic, not measured).
"""

from configs.paper import cells

ORDERS = ["principle > naive", "reference > principle"]
get_config = cells.config_of("figure12b")
