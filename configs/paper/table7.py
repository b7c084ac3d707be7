"""Table 7: context templates. Qwen3-14B in AppWorld test-normal; TGC and SGC, any of 4 and any of 8
rollouts.

    python -m experiments.paper table7
    python run.py --config=configs/paper/table7.py:reasoning,trained --mode=plan

TGC@k is the share of tasks, SGC@k the share of scenarios of three tasks, that at least one of k
rollouts solves. Both
come from one evaluation of 8: @4 is the mean over all choices of 4.

Confirmed: all numbers are counts of 168 tasks and 56 scenarios. Not stated: whether the policy was
trained, on what, the size of the window, the length at which the policy manages its context, and
the budget of thinking. The published numbers stand beside both `trained` (100 steps on original
tasks) and `base`. Expected: 4 runs of 100 steps, about 580 GPU-hours of A100 (arithmetic, not
measured).
"""

from ml_collections import ConfigDict

from configs.paper import cells

NUMBERS = {  # TGC@4, TGC@8, SGC@4, SGC@8
    "causal": (43.5, 50.6, 26.8, 37.5),
    "reasoning": (66.1, 69.0, 50.0, 57.1),
    "sliding": (56.0, 60.1, 39.3, 41.1),
    "self_managing": (61.3, 72.0, 50.0, 60.7),
}
CELLS = {
    f"{template},{policy}": cells.cell(
        f"qwen3-14b,appworld,{template if policy == 'trained' else 'base'}",
        dict(zip(("tgc@4", "tgc@8", "sgc@4", "sgc@8"), numbers)),
        template=template,
    )
    for policy in ("base", "trained")
    for template, numbers in NUMBERS.items()
}
ORDERS = ["reasoning > causal", "sliding > causal", "self_managing > causal"]


def get_config(arg: str | None = None) -> ConfigDict:
    return cells.config(CELLS, arg, __file__)
