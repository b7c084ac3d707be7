"""Figure 13b: the share eta of guided rollouts. 14B, AppWorld dev, avg@4.

    python -m experiments.paper figure13b
    python run.py --config=configs/paper/figure13b.py:trained,0.5 --mode=plan

`inference,ETA` evaluates the base policy with experience in that share of its rollouts (the bars of
the figure). `trained,ETA` are runs of 80 steps, evaluated without experience (its curves, which
have no printed values: a larger eta learns faster at first and ends lower, and 0.5 ends best). eta
0 and 0.5 are the runs grpo and navigating of table 4.

The bars were read off the figure. Inferred: the values of eta, and AppWorld dev. Not stated: the
training tasks; original ones here. Expected: 3 runs of 80 steps beyond table 4, about 380 GPU-hours
of A100 (arithmetic, not measured).
"""

from configs.paper import cells

ORDERS = ["trained,0.5 > trained,0", "trained,0.5 > trained,1", "inference,1 > inference,0"]
get_config = cells.config_of("figure13b")
