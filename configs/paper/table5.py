"""Table 5: what the two rewards of attributing contribute. AppWorld dev and BFCL val, avg@8 and
best@8.

    python -m experiments.paper table5
    python run.py --config=configs/paper/table5.py:14b,appworld,no_outcome --mode=plan

`attributing` and `no_labels` are the runs +Questioning&Attributing and +Questioning of table 1,
evaluated on dev; only `no_outcome` trains anew. alpha is 0.1.

Confirmed: all AppWorld avg@8 can be scores on the 57 dev tasks, and the BFCL scores repeat table 1.
Contradictory in the paper: how labels are standardised (by trajectory in section 5.2, as here; by
step in section 7.1.3, see controls.py). Expected: 4 runs of 100 steps beyond table 1, about 460
GPU-hours of A100 (arithmetic, not measured).
"""

from configs.paper import cells

ORDERS = ["attributing > no_labels", "attributing > no_outcome", "no_outcome > base"]
get_config = cells.config_of("table5")
