"""SmolLM2-135M-Instruct after a short imitation of a travel agent: where
`configs/pretrained.py:calls` starts.

    make pretrained
    python -m experiments.imitation --config=configs/pretrained_base.py

writes runs/pretrained_base/policy. The demonstrations have no slips: what this policy does wrong,
it has not learned. It solves 29.7% of training tasks of two calls at temperature 1, and 40.6%
greedily (docs/results.md).
"""

from configs import imitation
from configs.keys import variant

SETTINGS = {
    "model.path": ".cache/smollm2-135m-instruct",
    "steps": 22,
    "demonstrations": 1000,
    "careful": 1.0,
    "hint": 0.0,
    "rows": 8,
    "row": 512,
    "micro": 2,
    "lr": 1e-4,
    "warmup": 5,
}
get_config = variant(imitation, SETTINGS)
