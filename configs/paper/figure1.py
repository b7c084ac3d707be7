"""Figure 1: AgentEvolver against larger models that are not trained. avg@8 on AppWorld test-normal
and BFCL val.

    python -m experiments.paper figure1 --models 32b=URL,NAME,TOKENIZER ...
    python run.py --config=configs/paper/figure1.py:qwen3-32b,appworld --mode=plan

The models that are only evaluated answer from a server that already runs, `--models
SIZE=URL,NAME,TOKENIZER`; only their tokenizer is loaded here. The last two are the runs `all` of
table 1.

The numbers were read off the figure (within about one point), except AgentEvolver's, which are
printed. Not stated: the thinking switch of Qwen3; both `qwen3-*` and `qwen3-*-thinking` are cells,
in Qwen3's own chat template. Expected: evaluations only.
"""

from configs.paper import cells

ORDERS: list[str] = []
get_config = cells.config_of("figure1")
