"""Figure 14: the clip bound of guided rollouts. 14B, AppWorld dev, avg@8 early (20 steps) and late
(80 steps).

    python -m experiments.paper figure14
    python run.py --config=configs/paper/figure14.py:0.8 --mode=plan

Runs of 80 steps with eta 0.5. 0.6 is the run navigating of table 4, and 0.28 its run unselected.
Five values near step 20 can be read off the figure: 45.2, 44.0, 41.0, 40.8, 39.3; which series they
belong to is unconfirmed, and here they follow the natural order from 1.0 down. Late, 0.6 is best.
Expected: 3 runs of 80 steps beyond table 4, about 380 GPU-hours of A100 (arithmetic, not measured).
"""

from configs.paper import cells

ORDERS = ["0.6 > 0.28", "0.6 > 1"]
get_config = cells.config_of("figure14")
