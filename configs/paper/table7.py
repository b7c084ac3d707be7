"""Table 7: context templates. Qwen3-14B in AppWorld test-normal; TGC and SGC, any of 4 and any of 8
rollouts.

    python -m experiments.paper table7
    python run.py --config=configs/paper/table7.py:reasoning,trained --mode=plan

TGC@k is the share of tasks, SGC@k the share of scenarios of three tasks, that at least one of k
rollouts solves. Both come from one evaluation of 8: @4 is the mean over all choices of 4.

Confirmed: all numbers are counts of 168 tasks and 56 scenarios. Not stated: whether the policy was
trained, on what, the size of the window, the length at which the policy manages its context, and
the budget of thinking. The published numbers stand beside both `trained` (100 steps on original
tasks) and `base`. Expected: 4 runs of 100 steps, about 580 GPU-hours of A100 (arithmetic, not
measured).
"""

from configs.paper import cells

ORDERS = ["reasoning > causal", "sliding > causal", "self_managing > causal"]
get_config = cells.config_of("table7")
