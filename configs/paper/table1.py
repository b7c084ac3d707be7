"""Table 1: what each mechanism adds. AppWorld test-normal and BFCL val, avg@8 and best@8.

    python -m experiments.paper table1
    python run.py --config=configs/paper/table1.py:14b,appworld,all --mode=plan

Trained on synthetic tasks only. The published numbers are in NUMBERS, in the order of the header
there.

Confirmed: the splits; best@8 is the bootstrap, not pass@8. Not stated in the paper: the evaluation
temperature, alpha of these runs (0.1 here, as in its ablation; the reference's script has 0.2, see
controls.py), the seed (one per cell). Expected: 16 runs of 100 steps, about 1,850 GPU-hours of A100
(arithmetic, not measured).
"""

from ml_collections import ConfigDict

from configs.paper import cells

NUMBERS = {  # AppWorld avg@8, best@8, BFCL avg@8, best@8
    "7b,base": (1.8, 5.6, 29.8, 42.4),
    "7b,q": (23.2, 40.3, 49.0, 60.6),
    "7b,qn": (26.3, 43.1, 53.3, 61.0),
    "7b,qa": (25.7, 43.7, 56.8, 65.3),
    "7b,all": (32.4, 51.2, 57.9, 69.0),
    "14b,base": (18.0, 31.4, 41.6, 54.1),
    "14b,q": (44.3, 65.5, 60.3, 72.1),
    "14b,qn": (45.4, 65.3, 62.8, 74.5),
    "14b,qa": (47.8, 65.6, 64.9, 76.3),
    "14b,all": (48.7, 69.4, 66.5, 76.7),
}
CELLS = cells.both(NUMBERS, {row: row for row in ("base", "q", "qn", "qa", "all")})
ORDERS = ["q > base", "qn > q", "qa > q", "all > qn", "all > qa"]


def get_config(arg: str | None = None) -> ConfigDict:
    return cells.config(CELLS, arg, __file__)
