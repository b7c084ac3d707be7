"""The paper's main experiment: Qwen2.5-14B-Instruct in AppWorld, on 8 devices of 80 GB.

    python run.py --config=configs/appworld_14b.py --mode=plan
    python run.py --config=configs/appworld_14b.py --config.model.path=/dir/of/Qwen2.5-14B-Instruct
    python run.py --config=configs/appworld_14b.py --config.model.path=runs/appworld_14b/policy \
        --config.eval.split=test_normal --mode=eval

vLLM generates on the same devices, with a quarter of their memory; the run sets XLA's share of it.
The optimizer's moments and the reference policy are kept in host memory. The planner estimates that
it fits (docs/plans/appworld_14b.txt).

It needs `make flagship`, AppWorld's own data (docs/environments.md), and language models for the
roles: those of the paper by config.llm.url and .key, or one that the run serves itself
(docs/language_models.md). The expected scores are those of the paper's tables 1 and 2, which nobody
has reproduced here: test_normal, avg@8 / best@8 (bootstrap), in percent. They are 18.0 / 31.4
before training, then

| argument | tasks | navigating | attributing | avg@8 | best@8 |
|---|---|---|---|---|---|
| original | original | | | 46.1 | 61.5 |
| q | synthetic | | | 44.3 | 65.5 |
| hybrid | both | | | 48.4 | 68.1 |
| qn | synthetic | yes | | 45.4 | 65.3 |
| qa | synthetic | | yes | 47.8 | 65.6 |
| all (no argument) | synthetic | yes | yes | 48.7 | 69.4 |
| n | original | yes | | | |
| hybrid_all | both | yes | yes | | |

configs/paper/ has every cell of its tables and figures.

Time: not measured. A run has 25,600 training episodes of up to 30 turns, and 5,643 evaluation
episodes. Navigating adds 2,000 for the experience pool: four of each of the 500 synthetic tasks."""

from ml_collections import ConfigDict

from configs import base
from configs.keys import change, use

ROWS = {
    "original": (),
    "q": ("questioning",),
    "hybrid": ("questioning",),
    "qn": ("questioning", "navigating"),
    "qa": ("questioning", "attributing"),
    "all": ("questioning", "navigating", "attributing"),
    "n": ("navigating",),
    "hybrid_all": ("questioning", "navigating", "attributing"),
}
SETTINGS = {
    "model.preset": "14b",
    "model.dtype": "bfloat16",
    "model.remat": "full",
    "mesh.fsdp": 8,
    "learner.micro": 8,  # one row per device
    "learner.most_segments": 6,  # so that attention computes nothing between episodes
    "optim.offload": True,
    "loss.reference": "host",
    "engine.name": "vllm",
    "engine.cache_dtype": "bfloat16",
    "engine.slots": 64,
    "engine.vllm.python": ".venv-vllm/bin/python",
    "engine.vllm.devices": ("0,1,2,3,4,5,6,7",),
    "engine.vllm.flags": "--gpu-memory-utilization 0.25",
    "env.name": "appworld",
    "env.args.data": "official",
    "env.mode": "worker",
    "env.python": ".venv-appworld/bin/python",
    "env.workers": 64,
    # one episode per worker, each of which takes 0.3 GB of host memory
    "rollout.concurrency": 64,
    "template.show_tools": False,  # actions are Python code
    # the paper's models; config.llm.url and .key name their server
    "questioning.explorer.name": "llm",
    "questioning.judge.name": "reference",
    "questioning.share": 1.0,  # the paper trains on synthetic tasks only
    "attributing.judge.name": "llm",
    "navigating.extractor.name": "llm",
    "navigating.refine.name": "rewrite",
    "navigating.embedder.name": "endpoint",
    "navigating.tasks": 0,  # experience from every training task (equation 13)
    "navigating.min_similarity": 0.0,  # the nearest top_k, however near (equation 14)
    "llm.explorer.model": "qwen-plus",
    "llm.explorer.extra": '{"top_k": 100}',
    "llm.writer.model": "qwen-plus",
    "llm.judge.model": "qwen3-235b-a22b-instruct-2507",
    "llm.step_judge.model": "qwen-max",
    "llm.summariser.model": "qwen-max",
    "llm.reranker.model": "qwen-max",
    "llm.embedder.model": "text-embedding-v4",
}


def get_config(arg: str | None = None) -> ConfigDict:
    arg = "all" if arg is None else arg
    if arg == "rehearsal":
        from configs.rehearsal import get_config as rehearsal  # which begins with this config

        return rehearsal()
    if arg not in ROWS:
        raise ValueError(f"argument {arg}: choose one of {', '.join(ROWS)}, rehearsal")
    # the defaults of base.py are the paper's hyper-parameters
    config = change(base.get_config(), SETTINGS)
    return with_row(config, arg, share=500 / 590)  # all of both sets, equally likely


def with_row(config: ConfigDict, row: str, share: float) -> ConfigDict:
    """Switch on the mechanisms of a row and return the config. share: of synthetic tasks, where the
    row has both kinds."""
    for mechanism in ROWS[row]:
        config[mechanism].enabled = True
    if row.startswith("hybrid"):
        config.questioning.share = share
        config.advantage.synthetic = 0.5
    if "attributing" in ROWS[row]:
        # equation 18, which has no bound; the default is the reference's
        use(config.advantage, "adca", norm="trajectory")
    return config
