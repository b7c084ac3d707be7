"""Figure 1: AgentEvolver against larger models that are not trained. avg@8 on AppWorld test-normal
and BFCL val.

    python -m experiments.paper figure1 --models 32b=URL,NAME,TOKENIZER ...
    python run.py --config=configs/paper/figure1.py:qwen3-32b,appworld --mode=plan

The models that are only evaluated answer from a server that already runs, `--models
SIZE=URL,NAME,TOKENIZER`; only their tokenizer is loaded here. The last two are the runs `all` of
table 1.

The numbers were read off the figure (within about one point), except AgentEvolver's, which are
printed. Not stated: the thinking switch of Qwen3; both `qwen3-*` and `qwen3-*-thinking` are cells,
in Qwen3's own chat template.
Expected: evaluations only.
"""

from ml_collections import ConfigDict

from configs.paper import cells

NUMBERS = {  # AppWorld, BFCL
    "7b": (1.7, 29.3),
    "14b": (18.1, 40.8),
    "32b": (39.7, 49.5),
    "qwen3-8b": (17.8, 32.6),
    "qwen3-14b": (25.2, 45.5),
    "qwen3-32b": (35.5, 42.0),
    "qwen3-30b-a3b": (12.1, 19.4),
    "qwen3-235b-a22b": (32.2, 61.1),
}
TRAINED = {"agentevolver-7b": ("7b", 32.4, 57.9), "agentevolver-14b": ("14b", 48.7, 66.5)}
CELLS = {}
for name, scores in NUMBERS.items():
    for world, score in zip(("appworld", "bfcl"), scores):
        for thinking in ("", "-thinking") if name.startswith("qwen3") else ("",):
            size = name if name in ("7b", "14b", "qwen3-14b") else "14b"
            run = f"{size},{world},{'thinking' if thinking else 'base'}"
            CELLS[f"{name}{thinking},{world}"] = cells.cell(run, {"avg@8": score}, model=name)
for name, (size, *trained) in TRAINED.items():
    for world, score in zip(("appworld", "bfcl"), trained):
        CELLS[f"{name},{world}"] = cells.cell(f"{size},{world},all", {"avg@8": score})
ORDERS: list[str] = []


def get_config(arg: str | None = None) -> ConfigDict:
    return cells.config(CELLS, arg, __file__)
