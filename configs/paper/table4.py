"""Table 4: experience in the prompt against experience learned. 14B, dev, avg@4 and best@4.

    python -m experiments.paper table4
    python run.py --config=configs/paper/table4.py:14b,appworld,navigating --mode=plan

`base` and `icl` train nothing; `icl` shows every rollout the experience of a pool that the base
policy made. The trained rows are evaluated without experience. `unselected` clips guided rollouts
like the others.

Doubtful: only two of the five AppWorld scores can be scores on the 57 dev tasks, while all five can
be scores on test-normal. Not stated: the training tasks. The zero-shot row differs from figure 13a,
and navigating gains far more here than in table 1; so these runs probably trained on original
tasks. The rows *_synthetic train on synthetic ones; they have no published numbers. In AppWorld
`grpo` is the run `original` of table 2. Expected: 11 runs of 80 steps, about 1,430 GPU-hours of
A100 (arithmetic, not measured).
"""

from ml_collections import ConfigDict

from configs.paper import cells

NUMBERS = {  # AppWorld avg@4, best@4, BFCL avg@4, best@4
    "14b,base": (17.3, 37.4, 33.0, 50.6),
    "14b,grpo": (51.5, 69.8, 62.8, 73.0),
    "14b,unselected": (53.1, 63.8, 60.3, 73.2),
    "14b,navigating": (64.7, 85.9, 65.3, 73.9),
}
ROWS = {
    "base": "base",
    "grpo": {"appworld": "original", "bfcl": "grpo80"},
    "unselected": "unselected80",
    "navigating": "nav80",
}
SYNTHETIC = {
    "grpo_synthetic": "q80",
    "unselected_synthetic": "qn_unselected80",
    "navigating_synthetic": "qn80",
}
ICL = {"appworld": (20.2, 41.6), "bfcl": (41.5, 61.9)}
CELLS = cells.both(NUMBERS, ROWS, splits=cells.DEV, k=4)
CELLS |= {
    f"14b,{world},icl": cells.cell(
        f"14b,{world},icl", {"avg@4": avg, "best@4": best}, splits=cells.DEV, k=4, experience=1.0
    )
    for world, (avg, best) in ICL.items()
}
CELLS |= {
    f"14b,{world},{row}": cells.cell(f"14b,{world},{run}", {}, splits=cells.DEV, k=4)
    for world in ICL
    for row, run in SYNTHETIC.items()
}
ORDERS = ["icl > base", "grpo > icl", "navigating > grpo", "navigating > unselected"]


def get_config(arg: str | None = None) -> ConfigDict:
    return cells.config(CELLS, arg, __file__)
