"""configs/appworld_14b.py at a size that two cores can play.

    make rehearsal
    experiments/launch/here.sh 2 4 --config=configs/rehearsal.py
    experiments/launch/here.sh 2 4 --config=configs/appworld_14b.py:rehearsal    # the same

Two learner processes of four simulated devices each, and beside each a vLLM server, a judge and a
service of AppWorld with our own data. Four parts differ in more than size: the worlds are behind a
service, vLLM sleeps during updates, and because no model of this size can do it, the built-in
explorer invents the tasks, which a language model words, and the policy embeds.
"""

from ml_collections import ConfigDict

from configs import appworld_14b
from configs.keys import change

SETTINGS = {
    "model.path": "configs/assets/reader",
    "model.dtype": "float32",  # a CPU has no bfloat16
    "engine.slots": 8,
    "engine.vllm.python": ".bench/vllm/bin/python",
    "engine.vllm.devices": (),
    "engine.vllm.sleep": True,
    "engine.vllm.flags": (
        "--enforce-eager --block-size 32 --gpu-memory-utilization 0.1"
        " --max-num-batched-tokens 32768"  # on a CPU vLLM dies where it has to cut a prompt
    ),
    "engine.vllm.start_timeout": 1800.0,
    "env.args.data": "mini",
    "env.mode": "http",
    "env.url": "served",
    "env.workers": 4,
    "env.timeout": 600.0,
    "steps": 2,
    "rollout.concurrency": 4,
    "rollout.tasks": 4,
    "rollout.group": 4,
    "rollout.max_turns": 3,
    "rollout.max_tokens": 64,
    "rollout.context": 3072,
    "learner.row": 3072,
    "template.max_observation": 128,
    "learner.updates": 1,
    "eval.every": 2,
    "eval.tasks": 4,
    "eval.rollouts": 1,
    "questioning.explorer.name": "curiosity",
    "questioning.explorer.args": {"breadth": 12, "depth": 24, "rehearsals": 0},
    "questioning.words.name": "model",
    "questioning.budget": 4,
    "questioning.capacity": 4,
    "navigating.embedder.name": "policy",
    "navigating.tasks": 2,
    "llm.url": "served",
    "llm.serve.path": ".cache/smollm2-135m-instruct",
    "llm.serve.context": 4096,
    "llm.serve.flags": "--no-warm-up",
    "llm.concurrency": 4,
    "llm.deadline": 1800.0,
    "llm.shown": 200,
}


def get_config() -> ConfigDict:
    config = change(appworld_14b.get_config(), SETTINGS)
    for role in ("explorer", "writer", "judge", "step_judge", "summariser", "reranker"):
        config.llm[role].update(model="", extra="", max_tokens=96)
    return config
