"""The training runs behind the paper's tables, each once: `SIZE,WORLD,ROW`, or
`SIZE,WORLD,ROW,tiny` on a CPU.

    python run.py --config=configs/paper/runs.py:14b,appworld,qa \\
        --config.model.path=/dir/of/Qwen2.5-14B-Instruct
    python run.py --config=configs/paper/runs.py:14b,appworld,qa,tiny

A row is a row of configs/appworld_14b.py and what it changes there. Cells of different tables that
name one row are the same run. The row `base` trains nothing: it is the policy before training, for
`--mode=eval`; `icl` shows that policy the experience of a pool.

`tiny` plays a row with small policies (configs/paper/policies.py): `travel` stands for AppWorld,
short conversations of BFCL with few tools for BFCL, three layers for 14B and two for 7B. Steps and
numbers of tasks shrink, plugs that ask a language model are replaced by those that need none. It
shows that a row works; its scores are no scores of the paper.
"""

from typing import Any

from ml_collections import ConfigDict

from configs import appworld_7b, appworld_14b, bfcl_7b, bfcl_14b, bfcl_tiny, quickstart
from configs.keys import change

FULL = {
    "7b": {"appworld": appworld_7b, "bfcl": bfcl_7b},
    "14b": {"appworld": appworld_14b, "bfcl": bfcl_14b},
}
FULL |= {"qwen3-14b": FULL["14b"]}
WORLDS = ("appworld", "bfcl")
TINY_STEPS = 0.2  # of the steps of a full run
TINY_TASKS = 0.5  # of the synthetic tasks
# With one distractor instead of ten, exploring finds nine tasks: few tools show what a call has
# changed.
BFCL = bfcl_tiny.WORLD | {"tools": "oracle+10"}

# row -> (row of configs/appworld_14b.py, {key: value that it changes})
ROWS: dict[str, tuple[str, dict[str, Any]]] = {
    "base": ("original", {}),
    "thinking": ("original", {"template.name": "reasoning_augmented", "template.args.hint": False}),
    "icl": ("n", {"eval.experience": 1.0}),
    # Tables 1 and 2. On original tasks the reference makes 40 passes: 80 steps in AppWorld, 120 in
    # BFCL.
    "original": ("original", {"steps": {"appworld": 80, "bfcl": 120}}),
    "q": ("q", {}),
    "hybrid": ("hybrid", {}),
    "qn": ("qn", {}),
    "qa": ("qa", {}),
    "all": ("all", {}),
    # Figure 12: numbers of tasks, and judges of the outcome.
    "q100": ("q", {"questioning.budget": 100, "questioning.capacity": 100}),
    "q200": ("q", {"questioning.budget": 200, "questioning.capacity": 200}),
    "naive": ("q", {"questioning.judge.name": "naive"}),
    "principle": ("q", {"questioning.judge.name": "principle"}),
    # Table 4, figures 13 and 14: 80 steps. The clip bound 0.28 is that of unguided rollouts.
    "grpo80": ("original", {"steps": 80}),  # in AppWorld that is `original`
    "nav80": ("n", {"steps": 80}),
    "unselected80": ("n", {"steps": 80, "loss.args.clip_high_guided": 0.28}),
    "q80": ("q", {"steps": 80}),
    "qn80": ("qn", {"steps": 80}),
    "qn_unselected80": ("qn", {"steps": 80, "loss.args.clip_high_guided": 0.28}),
    "eta25": ("n", {"steps": 80, "navigating.share": 0.25}),
    "eta75": ("n", {"steps": 80, "navigating.share": 0.75}),
    "eta100": ("n", {"steps": 80, "navigating.share": 1.0}),
    "clip40": ("n", {"steps": 80, "loss.args.clip_high_guided": 0.4}),
    "clip80": ("n", {"steps": 80, "loss.args.clip_high_guided": 0.8}),
    "clip100": ("n", {"steps": 80, "loss.args.clip_high_guided": 1.0}),
    # Table 5 and figure 16.
    "no_outcome": ("qa", {"advantage.args.outcome_at": "none"}),
    "alpha005": ("qa", {"advantage.args.alpha": 0.05}),
    "alpha020": ("qa", {"advantage.args.alpha": 0.2}),
    "alpha030": ("qa", {"advantage.args.alpha": 0.3}),
    # Table 7: context templates, on original tasks.
    "causal": ("original", {"steps": 100}),
    "reasoning": ("original", {"steps": 100, "template.name": "reasoning_augmented"}),
    "sliding": ("original", {"steps": 100, "template.name": "sliding_window"}),
    "self_managing": ("original", {"steps": 100, "template.name": "self_managing"}),
    # Controls, which decide how the tables are to be read (configs/paper/controls.py).
    "all_alpha020": ("all", {"advantage.args.alpha": 0.2}),
    "clip_low20": ("q", {"loss.args.clip_low": 0.2}),
    "norm_step": ("qa", {"advantage.args.norm": "step"}),
    "norm_reference": ("qa", {"advantage.args.norm": "reference"}),
    "top3": ("qn", {"navigating.top_k": 3}),
    "guided_ratio": ("qn", {"loss.guided_prompt": "guided"}),
    "writer_qwen3": ("q", {"llm.writer.model": "qwen3-235b-a22b-instruct-2507"}),
    # Beyond the paper.
    "hybrid_all": ("hybrid_all", {}),
    "loop": ("original", {"steps": 80, "advantage.name": "loop", "loss.kl_coef": 0.0}),
    "learnable": (
        "q",
        {"questioning.learnable": True, "questioning.every": 20, "questioning.refresh": 100},
    ),
    "cispo": ("qn", {"loss.name": "cispo"}),
    "alpha_cosine": ("qa", {"advantage.args.alpha": 0.3, "advantage.args.alpha_steps": 100}),
    "length_normalised": ("qa", {"advantage.args.length_normalise": True}),
}


def get_config(arg: str | None = None) -> ConfigDict:
    size, world, row, *scale = (arg or "14b,appworld,all").split(",")
    if size not in FULL or world not in WORLDS or row not in ROWS or scale not in ([], ["tiny"]):
        raise ValueError(
            f"runs.py:{arg}: give SIZE,WORLD,ROW or SIZE,WORLD,ROW,tiny, with a size of"
            f" {', '.join(FULL)}, a world of"
            f" {', '.join(WORLDS)} and a row of {', '.join(ROWS)}"
        )
    kind, changes = ROWS[row]
    config = tiny(size, world, kind) if scale else FULL[size][world].get_config(kind)
    if size == "qwen3-14b" and not scale:
        config.model.preset = "qwen3-14b"
        config.template.thinking = thinking(row)
    values = {k: v[world] if isinstance(v, dict) else v for k, v in changes.items()}
    return change(config, {k: shrunk(k, v) if scale else v for k, v in values.items()})


def thinking(row: str) -> str:
    """Return Qwen3's thinking switch of a row: "on" where its context template has thoughts."""
    return "on" if ROWS[row][1].get("template.name") == "reasoning_augmented" else "off"


# --- on a CPU -------------------------------------------------------------------------------------

TINY = {
    "steps": round(100 * TINY_STEPS),
    "eval.every": 4,
    "eval.temperature": 0.9,
    "eval.temperatures": (),  # a quarter of the time of a run
    "checkpoint.every": 10,
    "questioning.share": 1.0,
    "questioning.budget": round(500 * TINY_TASKS),
    "questioning.capacity": round(500 * TINY_TASKS),
    "questioning.learnable": False,
}
TINY_BFCL = {
    "optim.schedule": "cosine",
    "navigating.top_k": 1,
    "env.args": BFCL,
    "rollout.context": 896,
    "learner.row": 896,
}
JUDGES = {
    "naive": "experiments.paper.judges:Ended",
    "principle": "experiments.paper.judges:Orderly",
}


def shrunk(key: str, value: Any) -> Any:
    """Return what a value of a full run becomes on a CPU."""
    if key in ("steps", "questioning.every", "advantage.args.alpha_steps"):
        return max(1, round(value * TINY_STEPS))
    if key in ("questioning.budget", "questioning.capacity", "questioning.refresh"):
        return round(value * TINY_TASKS)
    return JUDGES.get(value, value) if key == "questioning.judge.name" else value


def tiny_policy(size: str, world: str) -> str:
    """Return the directory of the policy before training (configs/paper/policies.py)."""
    name = {"appworld": "travel_base", "bfcl": "bfcl_base"}[world]
    return f"configs/assets/{name}{'_small' if size == '7b' else ''}"


def tiny(size: str, world: str, kind: str) -> ConfigDict:
    """Return the tiny config of a row of configs/appworld_14b.py."""
    config = quickstart.get_config("grpo")
    if world == "bfcl":
        config = change(bfcl_tiny.get_config(), TINY_BFCL)
    change(config, TINY)
    config.model.path = tiny_policy(size, world)
    config.eval.tasks = 24 if world == "appworld" else 0
    return appworld_14b.with_row(config, kind, share=0.85)
