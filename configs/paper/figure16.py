"""Figure 16: the weight alpha of the labels. 14B, AppWorld dev, avg@8 after 20 and after 100 steps.

    python -m experiments.paper figure16
    python run.py --config=configs/paper/figure16.py:0.3 --mode=plan

0 and 0.1 are the runs +Questioning and +Questioning&Attributing of table 1. From the text: after 20
steps 0.3 has 45 and the baseline 28; at the end 0.1 and 0.2 have about 59, 0.05 is close to that,
the baseline has 55 and 0.3 has 43. Inferred: the setting, as in table 5. Expected: 3 runs of 100
steps beyond table 1, about 470 GPU-hours of A100 (arithmetic, not measured).
"""

from configs.paper import cells

ORDERS = ["0.1 > 0", "0.2 > 0", "0 > 0.3"]
get_config = cells.config_of("figure16")
