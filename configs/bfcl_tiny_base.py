"""The policy that configs/bfcl_tiny.py starts from. It imitates careless solutions of short BFCL
conversations.

    python -m experiments.imitation --config=configs/bfcl_tiny_base.py

writes runs/bfcl_tiny_base/policy. Expected on the 12 held-out conversations, in percent: avg@8
22.9, greedy 83.3.
Time: 6 minutes on two cores.
"""

from configs import bfcl_tiny, imitation
from configs.keys import variant

SETTINGS = {
    "steps": 300,
    "env.name": "bfcl",
    "env.args": bfcl_tiny.WORLD,
    "demonstrations": 3000,
    "care": 0.35,
    "hint": 0.0,
    "vocab": 2000,
    "model.preset": "tiny",
    "rows": 16,
    "row": 640,
    "micro": 16,
}
get_config = variant(imitation, SETTINGS)
