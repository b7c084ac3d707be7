"""Keys of the first layout of the configs and what replaced them; setting an old key reports its
new name."""

RENAMED = {
    "template.tools": "template.show_tools",
    "rollout.max_steps": "rollout.max_turns",
    "questioning.explorer": "questioning.explorer.name",
    "questioning.judge": "questioning.judge.name",
    "questioning.breadth": "questioning.explorer.args.breadth",
    "questioning.depth": "questioning.explorer.args.depth",
    "navigating.extractor": "navigating.extractor.name",
    "navigating.valid": "navigating.extractor.args.valid",
    "navigating.wording": "navigating.extractor.args.render and navigating.extractor.args.when (module:attribute)",
    "navigating.embedder": "navigating.embedder.name",
    "navigating.refine": "navigating.refine.name",
    "attributing.judge": "attributing.judge.name",
    "attributing.skip_flat": "attributing.judge.args.skip_flat",
    "attributing.max_replayed": "attributing.judge.args.max_replayed",
    "advantage.std": "advantage.args.std",
    "advantage.drop_below": "advantage.args.drop_below",
    "advantage.alpha": "advantage.args.alpha",
    "advantage.alpha_min": "advantage.args.alpha_min",
    "advantage.alpha_steps": "advantage.args.alpha_steps",
    "advantage.scheme": "advantage.args.scheme",
    "advantage.norm": "advantage.args.norm",
    "advantage.outcome_at": "advantage.args.outcome_at",
    "advantage.length_normalise": "advantage.args.length_normalise",
    "loss.clip_low": "loss.args.clip_low",
    "loss.clip_high": "loss.args.clip_high",
    "loss.clip_high_guided": "loss.args.clip_high_guided",
    "loss.dual_clip": "loss.args.dual_clip",
    "loss.kl": "loss.kl_coef",
    "loss.entropy": "loss.entropy_coef",
    **dict.fromkeys(
        (
            f"imitation.{key}"
            for key in (
                "demonstrations",
                "care",
                "careful",
                "muon_lr",
                "hint",
                "rows",
                "vocab",
                "final_lr",
            )
        ),
        "a config of `python -m experiments.imitation` (configs/base_policy.py)",
    ),
}
