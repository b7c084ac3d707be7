"""Relatives of the paper's algorithm, each one file, in the quickstart's world with invented tasks.

    python run.py --config=configs/relatives.py:gigpo

| argument | paper | what it is |
|---|---|---|
| grpo | 2402.03300 | the base: self-questioning, the other mechanisms off |
| reinforce_pp | 2501.03262 | advantages normalised over a step, a KL in tokens' rewards |
| gigpo | 2505.10978 | turns are compared with turns in the same state |
| turn_rloo | 2402.14740 | leave-one-out baselines, one for each turn |
| dapo | 2503.14476 | a higher upper clip, groups without signal replaced, long rollouts fined |
| sirius | 2502.04780 | imitation of successes and of repaired failures |
| webrl | 2411.02337 | tasks of failures, a KL to the last phase, successes replayed |
| tree | 2509.21240 | rollouts that branch |
| critic | 1506.02438 | PPO: turns are compared with what a critic expected of their states |
| actor_critic | 1707.06347 | the same, and the critic's loss changes the layers that it shares |
| separate_critic | 1707.06347 | as `critic`, which is a network of its own here |
| coevolve | 2604.15840 | new tasks are looked for where rollouts are weak |
| evolutionary | 2506.13131 | tasks of the best of many kinds have children |
| dual_role | 2505.03335 | the policy also proposes tasks, by acting, and trains on that |
| multi_agent | 2510.23595 | and judges both, which it trains on, too |
| empo2 | 2602.23008 | experience guides, new states are rewarded, unlikely tokens are masked |

docs/results.md has what they are worth in short runs. A run takes about as long as the
quickstart's, one of `multi_agent` several times as long.
"""

from typing import Any

from ml_collections import ConfigDict

from configs import quickstart
from configs.keys import change

# A group has a signal whatever its outcomes are.
KEEP_ALL = {"learner.drop": ("cancelled", "env_error", "stale", "overlong")}
# {argument: the keys that it changes in the quickstart's config}
CHANGES: dict[str, dict[str, Any]] = {
    "grpo": {},
    "reinforce_pp": {"recipe.name": "reinforce_pp", **KEEP_ALL},
    "gigpo": {"advantage.name": "gigpo"},
    "turn_rloo": {"advantage.name": "turn_rloo"},
    "dapo": {
        "loss.args.clip_low": 0.2,
        "loss.args.clip_high": 0.28,
        "loss.args.dual_clip": 0.0,
        "rollout.refill": 4,
        "reward.name": "overlong",
        "reward.args": {"longest": 320, "soft": 80},
        "learner.drop_truncated": True,
    },
    "sirius": {"recipe.name": "sirius", "loss.name": "nll"},
    "webrl": {
        "recipe.name": "webrl",
        "recipe.args.every": 8,
        "loss.name": "webrl",
        "loss.renew_reference": 8,
        "learner.max_staleness": 10**6,
    },
    "tree": {"recipe.name": "tree", "recipe.args.branches": 1, "rollout.group": 4},
    "critic": {"recipe.name": "critic", **KEEP_ALL},
    "actor_critic": {"recipe.name": "critic", "loss.name": "actor_critic", **KEEP_ALL},
    "separate_critic": {"recipe.name": "separate_critic", **KEEP_ALL},
    "coevolve": {
        "recipe.name": "coevolve",
        "questioning.every": 8,
        "questioning.refresh": 32,
    },
    "evolutionary": {"recipe.name": "evolutionary"},
    "dual_role": {"recipe.name": "dual_role"},
    "multi_agent": {
        "recipe.name": "multi_agent",
        "recipe.args.analysis": 8,
        "questioning.judge.name": "naive",
        "questioning.judge.args.analysis": 8,
        "llm.url": "policy",
        "llm.context": 2048,
        "llm.shown": 200,
        "llm.judge.temperature": 1.0,
        "llm.judge.max_tokens": 96,
        "learner.row": 2048,
        "learner.micro": 2,
    },
    "empo2": {"loss.name": "empo2", "loss.guided_prompt": "guided", "reward.name": "novelty"},
}


def get_config(arg: str | None = None) -> ConfigDict:
    arg = "grpo" if arg is None else arg
    if arg not in CHANGES:
        raise ValueError(f"relatives.py:{arg}: choose one of {', '.join(CHANGES)}")
    return change(quickstart.get_config("qn" if arg == "empo2" else "q"), CHANGES[arg])
