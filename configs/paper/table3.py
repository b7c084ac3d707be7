"""Table 3: tasks of one world, scores in the other. AppWorld test-normal and BFCL val, avg@8 and
best@8.

    python -m experiments.paper table3
    python run.py --config=configs/paper/table3.py:14b,appworld,bfcl --mode=plan

A cell is SIZE,TRAINED IN,EVALUATED IN. It trains nothing of its own: the runs are those of
+Questioning in table 1, and half of the cells repeat its scores. Expected: nothing beyond table 1
but evaluations.
"""

from configs.paper import cells

ORDERS: list[str] = []
get_config = cells.config_of("table3")
