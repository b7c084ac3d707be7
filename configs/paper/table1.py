"""Table 1: what each mechanism adds. AppWorld test-normal and BFCL val, avg@8 and best@8.

    python -m experiments.paper table1
    python run.py --config=configs/paper/table1.py:14b,appworld,all --mode=plan

Trained on synthetic tasks only.

Confirmed: the splits; best@8 is the bootstrap, not pass@8. Not stated in the paper: the evaluation
temperature, alpha of these runs (0.1 here, as in its ablation; the reference's script has 0.2, see
controls.py), the seed (one per cell). Expected: 16 runs of 100 steps, about 1,850 GPU-hours of A100
(arithmetic, not measured).
"""

from configs.paper import cells

ORDERS = ["q > base", "qn > q", "qa > q", "all > qn", "all > qa"]
get_config = cells.config_of("table1")
