"""Figure 13b: the share eta of guided rollouts. 14B, AppWorld dev, avg@4.

    python -m experiments.paper figure13b
    python run.py --config=configs/paper/figure13b.py:trained,0.5 --mode=plan

`inference,ETA` evaluates the base policy with experience in that share of its rollouts (the bars of
the figure). `trained,ETA` are runs of 80 steps, evaluated without experience (its curves, which
have no printed values: a larger eta learns faster at first and ends lower, and 0.5 ends best). eta
0 and 0.5 are the runs grpo and navigating of table 4.

The bars were read off the figure. Inferred: the values of eta, and AppWorld dev. Not stated: the
training tasks;
original ones here. Expected: 3 runs of 80 steps beyond table 4, about 380 GPU-hours of A100
(arithmetic, not measured).
"""

from ml_collections import ConfigDict

from configs.paper import cells

BARS = {"0": 16.23, "0.25": 16.45, "0.5": 19.30, "0.75": 20.18, "1": 23.25}
CURVES = {"0": "original", "0.25": "eta25", "0.5": "nav80", "0.75": "eta75", "1": "eta100"}
CELLS = {
    f"inference,{eta}": cells.cell(
        f"14b,appworld,{'base' if eta == '0' else 'icl'}", {"avg@4": score}, splits=cells.DEV, k=4,
        experience=float(eta),
    )
    for eta, score in BARS.items()
}  # fmt: skip
CELLS |= {
    f"trained,{eta}": cells.cell(f"14b,appworld,{row}", {}, splits=cells.DEV, k=4)
    for eta, row in CURVES.items()
}
ORDERS = ["trained,0.5 > trained,0", "trained,0.5 > trained,1", "inference,1 > inference,0"]


def get_config(arg: str | None = None) -> ConfigDict:
    return cells.config(CELLS, arg, __file__)
