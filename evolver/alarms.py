"""Alarms: signs in the metrics of a run that it goes wrong although nothing fails.

Each compares figures of the last steps with a threshold of this file. One that is raised is told
once, is a metric of its step, `alarm/<name>`, and has a line in the summary. docs/metrics.md says
how often they are wrong.
"""

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from envs.toolcalls import parse
from evolver.metrics import Metrics, mean
from rl.trajectory import Trajectory, Turn

WINDOW = 3  # steps that a figure is averaged over, at the beginning of a run and at its present
JUDGED = 24  # rollouts that the world scored too before their judge is doubted
AGREED = 0.7  # least agreement of a judge with the world
SUCCESSES = 10  # before they are doubted
CALLLESS = 0.3  # most successes without a call
RISE = 0.05  # of training success that counts as one
FALL = 0.05  # of held-out success that counts as one, if it is more than half of its interval
ENTROPY = 0.1  # least share of the entropy of the first steps, while less than half succeeds
LENGTH = 0.25  # least share of the tokens of the first steps
BALANCE = -0.25  # least mean advantage, in standard deviations
REPEATED = 0.25  # most rollouts that repeat themselves
SAME_TURNS = 3  # equal turns in a row that are a repetition
BLOCKS = 4  # equal ones at the end of a turn that are a loop
PERIOD = 32  # most tokens of a block
LEAST = 24  # tokens of all blocks

History = Sequence[Metrics]  # the metrics of the steps so far, oldest first


@dataclass(frozen=True)
class Alarm:
    """The words of an alarm, and its condition: `raised` is a function of the history."""

    says: str
    remedy: str
    raised: Callable[[History], bool]


def raised(history: History) -> list[str]:
    """Return the names of the alarms that the last step raises."""
    return [name for name, alarm in ALARMS.items() if alarm.raised(history)]


def told(name: str, history: History) -> str:
    """Return what the user is told of an alarm."""
    alarm = ALARMS[name]
    remedy = signal_remedy(history[-1]) if name == "no_signal" else alarm.remedy
    return f"ALARM: {alarm.says}. {remedy} (alarm/{name}, docs/metrics.md)"


def figures(trajectories: Sequence[Trajectory]) -> Metrics:
    """Return the figures of a step's rollouts that only alarms need: the agreement of judges with
    the world, the successes without a call, and the rollouts that repeat themselves."""
    played = [t for t in trajectories if not t.broken]
    checked = [t.reached for t in played if "verified" in t.reached.components]
    metrics = Metrics()
    if checked:
        agreed = [e.success == bool(e.components["verified"]) for e in checked]
        metrics["questioning/judge/agreed_rate"] = mean(agreed)
        metrics["questioning/judge/compared"] = len(agreed)
    successes = [t for t in played if t.tools and t.success]
    if successes:
        callless = [not any(map(_calls, t.turns)) for t in successes]
        metrics["alarm/no_call/share"] = mean(callless)
    if played:
        metrics["alarm/repetition/share"] = mean(repeats(t) for t in played)
    return metrics


def _calls(turn: Turn) -> bool:
    """Return True if a turn calls a tool, by what the world says or, if it says nothing, by its
    text."""
    return bool(turn.info["calls"] if "calls" in turn.info else parse(turn.action).calls)


def repeats(trajectory: Trajectory) -> bool:
    """Return True if a rollout says the same in several turns in a row, with the same answer, or
    ends a turn in a loop. A step to the right may be right three times."""
    turns = [(turn.completion.tokens, turn.observation) for turn in trajectory.turns]
    for start in range(len(turns) - SAME_TURNS + 1):
        if all(turn == turns[start] for turn in turns[start : start + SAME_TURNS]):
            return True
    return any(loops(tokens) for tokens, _ in turns)


def loops(tokens: Sequence[int]) -> bool:
    """Return True if tokens end in equal blocks."""
    for period in range(1, PERIOD + 1):
        blocks = max(BLOCKS, math.ceil(LEAST / period))
        end = list(tokens[-period * blocks :])
        if len(end) == period * blocks and end[period:] == end[:-period]:
            return True
    return False


def foreseen(
    tools: int, prompt: int, bare: int, *, shown: bool, learned: bool, context: int, max_tokens: int
) -> list[str]:
    """Return what makes rollouts fail, as far as the first prompt shows it.

    Args:
      tools: number of tools of the world.
      prompt, bare: tokens of the prompt, and of one without tools.
      shown: True if the prompt is to list the tools.
      learned: True if the policy's card says that it was trained in this world.
      context, max_tokens: tokens of an episode and of a turn.
    """
    found = []
    if context - prompt < max_tokens:
        found.append(
            f"the first prompt has {prompt:,} tokens, {prompt - bare:,} of them for {tools} tools,"
            f" and config.rollout.context={context} leaves {max(0, context - prompt)} for the"
            " episode: raise config.rollout.context and config.learner.row"
        )
    if tools and not shown and not learned:
        found.append(
            f"the prompt does not show the world's {tools} tools (config.template.show_tools=False)"
            " and the policy's card does not say that it was trained in this world: set"
            " config.template.show_tools=True, or let it imitate solutions there first"
            " (python -m experiments.imitation)"
        )
    if tools and shown and prompt == bare:
        found.append(
            f"the template does not write the world's {tools} tools into the prompt, so that the"
            " policy cannot know them: take a checkpoint whose chat template does, or another"
            " config.template.name"
        )
    return found


# --- the conditions -------------------------------------------------------------------------------


def values(history: History, name: str) -> list[float]:
    """Return the values that a metric has had, oldest first; None and what is not finite left
    out."""
    found = [line.get(name) for line in history]
    return [float(value) for value in found if value is not None and math.isfinite(value)]


def first_and_last(history: History, name: str) -> tuple[float, float] | None:
    """Return the means of a metric over the first and over the last steps, None before there are
    enough of both."""
    found = values(history, name)
    if len(found) < 2 * WINDOW:
        return None
    return mean(found[:WINDOW]), mean(found[-WINDOW:])


def judge_differs(history: History) -> bool:
    """Return True if a judge and the world's own evaluation differ too often."""
    names = "questioning/judge/agreed_rate", "questioning/judge/compared"
    found = [(line.get(names[0]), line.get(names[1])) for line in history]
    recent = [(rate, count) for rate, count in found if rate is not None and count][-WINDOW:]
    compared = sum(count for _, count in recent)
    return compared >= JUDGED and sum(rate * count for rate, count in recent) < AGREED * compared


def held_out_falls(history: History) -> bool:
    """Return True if training success has risen and held-out success has fallen below its best."""
    training = first_and_last(history, "rollout/success")
    names = [name for name in history[-1] if re.fullmatch(r"eval/avg@\d+", name)]
    if training is None or not names or training[1] - training[0] < RISE:
        return False
    name = names[0]
    last = history[-1]
    half = (last[f"{name}/high"] - last[f"{name}/low"]) / 2
    return max(values(history, name)) - last[name] > max(FALL, half)


def success_without_a_call(history: History) -> bool:
    """Return True if too many successes made no call, in a world with tools."""
    recent = [line for line in history if line.get("alarm/no_call/share") is not None][-WINDOW:]
    counts = [line["rollout/count"] * line["rollout/success"] for line in recent]
    callless = sum(line["alarm/no_call/share"] * n for line, n in zip(recent, counts))
    return sum(counts) >= SUCCESSES and callless > CALLLESS * sum(counts)


def entropy_collapses(history: History) -> bool:
    """Return True if the policy has hardly any entropy left although it often fails."""
    entropy = first_and_last(history, "entropy")
    success = first_and_last(history, "rollout/success")
    if entropy is None or success is None:
        return False
    return entropy[1] < ENTROPY * entropy[0] and success[1] < 0.5


def length_collapses(history: History) -> bool:
    """Return True if rollouts have become much shorter."""
    lines = [line for line in history if line.get("rollout/count")]
    lengths = [{"length": line["rollout/tokens"] / line["rollout/count"]} for line in lines]
    found = first_and_last(lengths, "length")
    return found is not None and found[1] < LENGTH * found[0]


def repetition(history: History) -> bool:
    """Return True if too many rollouts repeat themselves."""
    return mean(values(history, "alarm/repetition/share")[-WINDOW:]) > REPEATED


def unlearns(history: History) -> bool:
    """Return True if updates lower what was sampled far more than they raise it."""
    found = values(history, "advantage/mean")[-WINDOW:]
    return len(found) == WINDOW and mean(found) < BALANCE


def no_signal(history: History) -> bool:
    """Return True if all rollouts of the last step that ended by themselves scored as the others of
    their group."""
    last = history[-1]
    return not last.get("ledger/trained", 1) and bool(last["ledger/no_signal"])


def signal_remedy(last: Metrics) -> str:
    """Return what to do about a step in which no group had a signal."""
    count = last["rollout/count"]
    if last["rollout/success"] == 1:
        return "All succeed: the tasks are too easy, take harder ones."
    if last["stop/context_full"] > count / 2:
        return "Most ran out of their context: raise config.rollout.context and learner.row."
    if last["stop/length"] > count / 2:
        return "Most were cut at the end of a turn: raise config.rollout.max_tokens."
    if last["rollout/parse_errors"] > 0.5:
        return (
            "Most calls cannot be read: the policy does not know their format. Take one that does,"
            " or let it imitate solutions first (python -m experiments.imitation)."
        )
    if last["stop/max_turns"] > count / 2:
        return "Most had no turn left: raise config.rollout.max_turns."
    return (
        "None succeeds: take easier tasks or a world with partial scores, invent tasks"
        " (config.questioning.enabled=True), or start from a policy that can do some of them."
        " docs/reading.md goes through the causes."
    )


ALARMS = {
    "no_signal": Alarm(
        "all rollouts of a task score alike, in every group of this step, and nothing trains",
        "",
        no_signal,
    ),
    "judge": Alarm(
        "the judge of synthetic tasks differs from the world's own evaluation in more than"
        f" {1 - AGREED:.0%} of the rollouts that both score",
        "Read some of them (the view's page Judge), or use config.questioning.judge.name=verifier.",
        judge_differs,
    ),
    "held_out": Alarm(
        "success in training has risen while success on held-out tasks has fallen",
        "The policy learns something that does not carry over, or exploits its judge: read"
        " successes of both kinds in the view.",
        held_out_falls,
    ),
    "no_call": Alarm(
        f"more than {CALLLESS:.0%} of the successes are reached without a call",
        "Their tasks can be guessed: read some, and drop such tasks.",
        success_without_a_call,
    ),
    "entropy": Alarm(
        f"the entropy is below {ENTROPY:.0%} of that of the first steps, and most rollouts fail",
        "The policy has stopped trying: lower config.optim.lr, or set config.loss.entropy_coef.",
        entropy_collapses,
    ),
    "length": Alarm(
        f"rollouts are shorter than {LENGTH:.0%} of those of the first steps",
        "Read some: the policy may have learned to give up early.",
        length_collapses,
    ),
    "balance": Alarm(
        f"the mean advantage of a token is below {BALANCE}: updates lower what was sampled more"
        " than they raise it, and the policy may unlearn what it can",
        "Rollouts that fail are longer than those that succeed:"
        " config.loss.aggregate=seq-mean-token-mean gives each rollout the same weight.",
        unlearns,
    ),
    "repetition": Alarm(
        f"more than {REPEATED:.0%} of the rollouts repeat themselves",
        "Read some; a lower config.optim.lr or a higher temperature may help.",
        repetition,
    ),
}
