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


def get_config(arg: str | None = None) -> ConfigDict:
    arg = "all" if arg is None else arg
    if arg == "rehearsal":
        from configs.rehearsal import get_config as rehearsal  # which begins with this config

        return rehearsal()
    if arg not in ROWS:
        raise ValueError(f"argument {arg}: choose one of {', '.join(ROWS)}, rehearsal")
    config = base.get_config()  # its defaults are the paper's hyper-parameters
    config.model.preset = "14b"
    config.model.dtype = "bfloat16"
    config.model.remat = "full"
    config.mesh.fsdp = 8
    config.learner.micro = 8  # one row per device
    config.learner.most_segments = 6  # so that attention computes nothing between episodes
    config.optim.offload = True
    config.loss.reference = "host"
    config.engine.name = "vllm"
    config.engine.cache_dtype = "bfloat16"
    config.engine.slots = 64
    config.engine.vllm.python = ".venv-vllm/bin/python"
    config.engine.vllm.devices = ("0,1,2,3,4,5,6,7",)
    config.engine.vllm.flags = "--gpu-memory-utilization 0.25"

    config.env.name = "appworld"
    config.env.args.data = "official"
    config.env.mode = "worker"
    config.env.python = ".venv-appworld/bin/python"
    config.env.workers = 64
    config.rollout.concurrency = (
        64  # one episode per worker, each of which takes 0.3 GB of host memory
    )
    config.template.show_tools = False  # actions are Python code

    for mechanism in ROWS[arg]:
        config[mechanism].enabled = True
    config.questioning.explorer.name = (
        "llm"  # the paper's models; config.llm.url and .key name their server
    )
    config.questioning.judge.name = "reference"
    config.attributing.judge.name = "llm"
    config.navigating.extractor.name = "llm"
    config.navigating.refine.name = "rewrite"
    config.navigating.embedder.name = "endpoint"
    config.navigating.tasks = 0  # experience from every training task (equation 13)
    config.navigating.min_similarity = 0.0  # the nearest top_k, however near (equation 14)
    config.llm.explorer.model = config.llm.writer.model = "qwen-plus"
    config.llm.explorer.extra = '{"top_k": 100}'
    config.llm.judge.model = "qwen3-235b-a22b-instruct-2507"
    config.llm.step_judge.model = config.llm.summariser.model = config.llm.reranker.model = (
        "qwen-max"
    )
    config.llm.embedder.model = "text-embedding-v4"
    config.questioning.share = 1.0  # the paper trains on synthetic tasks only
    if arg.startswith("hybrid"):
        config.questioning.share = 500 / 590  # all of both sets, equally likely
        config.advantage.synthetic = 0.5
    if "attributing" in ROWS[arg]:
        config.advantage.name = "adca"
        config.advantage.args.norm = (
            "trajectory"  # equation 18, which has no bound; the default is the reference's
        )
    return config
