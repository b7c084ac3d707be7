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

from configs.paper import cells

ORDERS = ["icl > base", "grpo > icl", "navigating > grpo", "navigating > unselected"]
get_config = cells.config_of("table4")
