"""configs/appworld_14b.py at a size that two cores can play.

    make rehearsal
    experiments/launch/here.sh 2 4 --config=configs/rehearsal.py
    experiments/launch/here.sh 2 4 --config=configs/appworld_14b.py:rehearsal    # the same

Two learner processes of four simulated devices each, and beside each a vLLM server, a judge and a
service of AppWorld with our own data. Three parts differ in more than size: the worlds are behind a
service, and because no model of this size can do it, the built-in explorer invents the tasks, which
a language model words, and the policy embeds.
"""

from ml_collections import ConfigDict

from configs import appworld_14b


def get_config() -> ConfigDict:
    config = appworld_14b.get_config()
    config.model.path = "configs/assets/reader"
    config.model.dtype = "float32"  # a CPU has no bfloat16
    config.engine.slots = 8
    config.engine.vllm.python = ".bench/vllm/bin/python"
    config.engine.vllm.devices = ()
    config.engine.vllm.flags = (
        "--enforce-eager --block-size 32 --gpu-memory-utilization 0.1"
        " --max-num-batched-tokens 32768"  # on a CPU vLLM dies where it has to cut a prompt
    )
    config.engine.vllm.start_timeout = 1800.0
    config.env.args.data = "mini"
    config.env.mode, config.env.url = "http", "served"
    config.env.workers = config.rollout.concurrency = 4
    config.env.timeout = 600.0

    config.steps = 2
    config.rollout.tasks = config.rollout.group = 4
    config.rollout.max_turns = 3
    config.rollout.max_tokens = 64
    config.rollout.context = config.learner.row = 3072
    config.template.max_observation = 128
    config.learner.updates = 1
    config.eval.every = 2
    config.eval.tasks = 4
    config.eval.rollouts = 1

    config.questioning.explorer.name = "curiosity"
    config.questioning.explorer.args.update(breadth=12, depth=24, rehearsals=0)
    config.questioning.words.name = "model"
    config.questioning.budget = config.questioning.capacity = 4
    config.navigating.embedder.name = "policy"
    config.navigating.tasks = 2
    config.llm.url = "served"
    config.llm.serve.path = ".cache/smollm2-135m-instruct"
    config.llm.serve.context = 4096
    config.llm.serve.flags = "--no-warm-up"
    config.llm.concurrency = 4
    config.llm.deadline = 1800.0
    config.llm.shown = 200
    for role in ("explorer", "writer", "judge", "step_judge", "summariser", "reranker"):
        config.llm[role].update(model="", extra="", max_tokens=96)
    return config
