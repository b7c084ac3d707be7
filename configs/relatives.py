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
| coevolve | 2604.15840 | new tasks are looked for where rollouts are weak |
| evolutionary | 2506.13131 | tasks of the best of many kinds have children |
| dual_role | 2505.03335 | the policy also proposes tasks, by acting, and trains on that |
| multi_agent | 2510.23595 | and judges both, which it trains on, too |
| empo2 | 2602.23008 | experience guides, new states are rewarded, unlikely tokens are masked |

docs/results.md has what they are worth in short runs. A run takes about as long as the
quickstart's, one of `multi_agent` several times as long.
"""

from ml_collections import ConfigDict

from configs import quickstart
from configs.keys import use

NAMES = (
    "grpo", "reinforce_pp", "gigpo", "turn_rloo", "dapo", "sirius", "webrl", "tree", "critic",
    "actor_critic", "coevolve", "evolutionary", "dual_role", "multi_agent", "empo2",
)  # fmt: skip


def get_config(arg: str | None = None) -> ConfigDict:
    arg = "grpo" if arg is None else arg
    if arg not in NAMES:
        raise ValueError(f"relatives.py:{arg}: choose one of {', '.join(NAMES)}")
    config = quickstart.get_config("qn" if arg == "empo2" else "q")
    if arg in ("gigpo", "turn_rloo"):
        config.advantage.name = arg
    elif arg == "dapo":
        config.loss.args.clip_low, config.loss.args.clip_high = 0.2, 0.28
        config.loss.args.dual_clip = 0.0
        config.rollout.refill = 4
        use(config.reward, "overlong", longest=320, soft=80)
        config.learner.drop_truncated = True
    elif arg == "empo2":
        config.loss.name, config.loss.guided_prompt = "empo2", "guided"
        config.reward.name = "novelty"
    elif arg == "actor_critic":
        config.recipe.name, config.loss.name = "critic", arg
    elif arg != "grpo":
        config.recipe.name = arg
    if arg in ("reinforce_pp", "critic", "actor_critic"):
        # A group has a signal whatever its outcomes are.
        config.learner.drop = ("cancelled", "env_error", "stale", "overlong")
    elif arg == "sirius":
        config.loss.name = "nll"
    elif arg == "webrl":
        config.loss.name = "webrl"
        config.loss.renew_reference = config.recipe.args.every = 8
        config.learner.max_staleness = 10**6
    elif arg == "coevolve":
        config.questioning.every, config.questioning.refresh = 8, 32
    elif arg == "multi_agent":
        use(config.questioning.judge, "naive", analysis=40)
        config.recipe.args.analysis = 40
        config.llm.url, config.llm.context, config.llm.shown = "policy", 2048, 200
        config.llm.judge.temperature, config.llm.judge.max_tokens = 1.0, 96
        config.learner.row, config.learner.micro = 2048, 2
    elif arg == "tree":
        config.rollout.group, config.recipe.args.branches = 4, 1
    return config
