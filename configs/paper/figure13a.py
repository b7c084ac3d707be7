"""Figure 13a: experience in the prompt of a policy that is not trained. 14B, AppWorld dev and BFCL
val.

    python -m experiments.paper figure13a
    python run.py --config=configs/paper/figure13a.py:14b,appworld,with --mode=plan

The gains are printed in the figure: +4.97 and +5.77 avg@4, +6.51 and +6.93 best@4 in AppWorld and
BFCL. The heights were read off it. Table 4 has other scores for the same rows (+2.9 and +8.5
avg@4). Expected: evaluations and a pool each.
"""

from configs.paper import cells

ORDERS = ["with > without"]
get_config = cells.config_of("figure13a")
