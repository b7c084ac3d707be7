"""The conformance suite: every environment passes it in every mode, and it finds each violation."""

import contextlib
import itertools
import json
import re
import shlex
import subprocess
import sys

import pytest

from envs import check, conformance
from envs.process import ROOT
from envs.source import MODES, Source, serving
from envs.world import Evaluation, Observation, StepResult
from tests.envs import broken
from tests.envs.faulty import Coder, Counter, Twins
from tests.envs.playing import assert_conforms

COUNTER = "tests.envs.faulty:Counter"
CATEGORIES = ["multi_turn_base", "multi_turn_miss_func", "multi_turn_long_context"]
ORACLE = {"category": "multi_turn_miss_param", "tools": "oracle+2", "malformed": "error"}
ENVIRONMENTS = {
    "counter": (COUNTER, {}),
    "travel": ("travel", {}),
    "bfcl": ("bfcl", {"category": CATEGORIES}),
    "bfcl-oracle": ("bfcl", ORACLE),
}


# Worker and service carry the other worlds in the default run.
SLOW_HERE = {("bfcl-oracle", "worker"), ("bfcl-oracle", "http")}


PAIRS = [
    pytest.param(*pair, marks=[pytest.mark.slow] * (pair in SLOW_HERE))
    for pair in itertools.product(ENVIRONMENTS, MODES)
]


@pytest.mark.parametrize("name, mode", PAIRS)
def test_every_environment_conforms_in_every_mode(name, mode):
    env, kwargs = ENVIRONMENTS[name]
    if env == "bfcl":
        pytest.importorskip("bfcl_eval", reason="pip install --no-deps -r requirements/bfcl.txt")
    with contextlib.ExitStack() as stack:
        options = {"workers": 1} if mode == "worker" else {}
        if mode == "http":
            pytest.importorskip("starlette", reason="pip install -r requirements/service.txt")
            options["url"] = stack.enter_context(serving(env, json.dumps(kwargs), "--workers", "1"))
        source = stack.enter_context(Source(env, kwargs, mode=mode, **options))
        assert_conforms(source.world, limit=2 if mode == "http" else 4)


class AcceptsAnySplit(Counter):
    def tasks(self, split):
        return super().tasks("train")


class NoUserMessage(Counter):
    def reset(self, task, seed=0):
        super().reset(task, seed)
        return Observation([{"role": "system", "content": task.query}], [{"name": "f"}])


class KeepsCount(Counter):
    """A world that continues the count of an earlier episode."""

    def reset(self, task, seed=0):
        self._count, before = getattr(self, "_after", 0), self._count
        self._after = before
        return Observation([{"role": "user", "content": f"{task.query} {self._count}"}])


class RandomInfo(Counter):
    numbers = itertools.count()

    def step(self, action):
        result = super().step(action)
        result.info["number"] = next(self.numbers)
        return result


class RaisesOnMalformed(Counter):
    def step(self, action):
        if action.startswith("<tool_call>"):
            json.loads(action.split("\n")[1])["name"]
        return super().step(action)


class NoMessages(Counter):
    def step(self, action):
        return StepResult([], info={"object": {1: 2}})


class EvaluationCounts(Counter):
    def evaluate(self):
        self._count += 1
        return Evaluation(self._count / 2, True)


class ProgressWithoutSuccess(Counter):
    def evaluate(self):
        return Evaluation(0.5, False, {"progress": 1.0})


class RewardsInaction(Counter):
    def evaluate(self):
        return Evaluation(1.0, True)


class RestoresNothing(Counter):
    def restore(self, snapshot):
        self._count = 0


class SnapshotNotJson(Counter):
    def snapshot(self):
        return {self._count}


class FunctionsNotTools(Counter):
    def functions(self):
        return [{"name": "f"}]


class CallsAnyFunction(Coder):
    def call_text(self, name, arguments):
        return f"{name}()"


class UnreadableCalls(Coder):
    def step(self, action):
        result = super().step(action)
        result.info["parse_error"] = action.startswith("add")
        return result


class ProfileNotJson(Counter):
    def profile(self):
        return {"me": (1, 2)}


BROKEN = {
    AcceptsAnySplit: {"rejects_unknown_splits"},
    NoUserMessage: {"resets_to_valid_observations"},
    KeepsCount: {"is_deterministic"},
    RandomInfo: {"is_deterministic"},
    RaisesOnMalformed: {"never_raises_in_step"},
    NoMessages: {"never_raises_in_step", "scores_references_one"},
    EvaluationCounts: {"evaluates_without_side_effects"},
    ProgressWithoutSuccess: {"evaluates_without_side_effects", "scores_references_one"},
    RewardsInaction: {"scores_inaction_zero"},
    RestoresNothing: {"restores_snapshots"},
    SnapshotNotJson: {"restores_snapshots"},
    FunctionsNotTools: {"lists_functions"},
    CallsAnyFunction: {"lists_functions"},
    UnreadableCalls: {"lists_functions"},
    ProfileNotJson: {"has_a_json_profile"},
}


@pytest.mark.parametrize("broken", BROKEN, ids=lambda cls: cls.__name__)
def test_each_violation_is_found_and_explained(broken):
    _, problems = conformance.run(broken)
    assert BROKEN[broken] <= {problem.check for problem in problems}
    assert all(problem.what and len(problem.why) > 40 for problem in problems)


@pytest.mark.parametrize("split, check", [("train", "lists_tasks"), ("dev", "keeps_splits_apart")])
def test_tasks_that_share_an_id_are_found_in_every_split(split, check):
    for goals in (3, 4), (3, 3):
        _, problems = conformance.run(lambda goals=goals: Twins(goals, split))
        said = [problem.what for problem in problems if problem.check == check]
        assert any("not unique" in what and f"count-{split}-0" in what for what in said)


def test_a_correct_environment_has_no_problems():
    for world in (Counter, Coder, broken.Store):
        assert_conforms(world)


FOUND = {  # a world: the checks of which one finds it, and a part of what it says
    "SharedState": ("shares_no_state_between_worlds", "in another world changes the episode"),
    "SharedGoal": ("shares_no_state_between_worlds", "in another world changes the episode"),
    "SharedLog": ("shares_no_state_between_worlds", "in another world changes the episode"),
    "HashOrder": ("agrees_between_processes", "at reset"),
    "HashTasks": ("agrees_between_processes", "the tasks of the split differ"),
    "ProcessStart": ("agrees_between_processes", "at step 0"),
    "KeyErrorOnMissing": ("takes_odd_arguments", "put with no arguments raised KeyError"),
    "Unhashable": ("takes_odd_arguments", "put with key=[] raised TypeError", "unhashable"),
    "Overflow": ("takes_odd_arguments", "put with value=1000"),
    "TypeErrorOnNone": ("takes_odd_arguments", "put with key=None raised TypeError"),
    "UnexpectedArgument": ("takes_odd_arguments", "put with an unknown argument raised TypeError"),
    "AnswersNothing": (
        "takes_odd_arguments",
        "put with key=[]: a NoneType instead of a StepResult",
    ),
    "SysExit": ("takes_odd_arguments", "put with key='' raised Escape", "SystemExit(0)"),
    "OsExit": ("takes_odd_arguments", '"key": "", "value"', "ended the process (exit code 0)"),
    "ExitsInReset": (
        "resets_to_valid_observations",
        "reset('train-",
        "ended the process (exit code 3)",
    ),
    "ExitsInTasks": ("tasks", "tasks('train') ended the process (exit code 4)"),
    "ExitsAtStart": ("tasks", "the constructor ended the process (exit code 5)"),
    "Hangs": ("takes_odd_arguments", '"key": {}', "did not return within 6 s"),
    "HangsInEvaluate": ("never_raises_in_step", "evaluate() did not return within 6 s"),
    "Stops": ("takes_odd_arguments", "put with no arguments raised StopIteration"),
    "Endless": ("ends_its_episodes", "it goes on"),
    "SameDev": ("keeps_splits_apart", "3 of the 3 tasks of dev are in train: train-0"),
    "RenamedDev": ("keeps_splits_apart", "3 of the 3 tasks of dev are in train: dev-0"),
    "Leaks": ("frees_its_episodes", "each reset keeps 20 MB"),
    "LeaksTouched": ("frees_its_episodes", "each reset keeps 5 MB"),
    "Surrogates": ("answers_with_valid_results", "lone surrogates"),
    "SurrogateQuery": ("resets_to_valid_observations", "lone surrogates"),
    "StringReward": ("answers_with_valid_results", "the reward is of type str"),
    "StringScore": ("evaluates_without_side_effects", "the score is of type str"),
    "HugeScore": (
        "evaluates_without_side_effects",
        "the score is a number of more than 300 digits",
    ),
    "DeepInfo": ("answers_with_valid_results", "deeper than 100 levels"),
    "ObjectInfo": ("answers_with_valid_results", "info.calls is of type set"),
    "NoneText": (
        "takes_odd_arguments",
        "put with value=-1: messages[0].content is of type NoneType",
    ),
}


def checked(name: str, mode: str = "inprocess") -> list[conformance.Problem]:
    spec = {"env": f"tests.envs.broken:{name}", "kwargs": {}, "split": "train", "limit": 2}
    spec["mode"] = mode
    return check.run(spec, 6.0 if "Hangs" in name else 60.0)[1]


# The default run waits for one world that hangs.
SLOW = {"HangsInEvaluate": pytest.mark.slow}


@pytest.mark.parametrize("name", [pytest.param(name, marks=SLOW.get(name, ())) for name in FOUND])
def test_a_broken_world_is_found_in_a_process_of_its_own(name):
    wanted, *parts = FOUND[name]
    said = [problem.what for problem in checked(name) if problem.check == wanted]
    assert any(all(part in what for part in parts) for what in said), said


def test_every_broken_world_has_its_check():
    kinds = [kind for kind in vars(broken).values() if isinstance(kind, type)]
    worlds = {kind.__name__ for kind in kinds if issubclass(kind, broken.Store)}
    assert worlds - {"Store"} == set(FOUND)


def test_the_checks_go_on_after_a_call_that_ended_the_process():
    assert checked("Store") == [] and checked("Store", "worker") == []
    for problems in (checked("OsExit"), checked("Hangs", "worker")):
        assert {problem.check for problem in problems} == {"takes_odd_arguments"}


def test_the_command_explains_failures_and_sets_its_exit_code(capsys):
    assert check.main([COUNTER, "--modes", "inprocess", "worker"]) == 0
    assert capsys.readouterr().out.count("18 of 18 checks passed") == 2
    assert check.main(["tests.envs.test_conformance:RewardsInaction", "--modes", "inprocess"]) == 1
    assert "doing nothing scores" in capsys.readouterr().out
    assert check.main(["no_such_module:World"]) == 1
    assert "No module named 'no_such_module'" in capsys.readouterr().out


# ------------------------------------------------------------------------------------- the documentation


def blocks(language: str) -> list[str]:
    page = (ROOT / "docs" / "environments.md").read_text(encoding="utf-8")
    return re.findall(rf"```{language}\n(.*?)```", page, flags=re.DOTALL)


def test_the_page_walks_through_an_environment_that_conforms(tmp_path):
    code = blocks("python")[0]
    assert len(code.splitlines()) < 60
    name = re.match(r"# (\w+)\.py", code).group(1)
    (tmp_path / f"{name}.py").write_text(code)
    lines = "\n".join(blocks("sh")).splitlines()
    commands = [line for line in lines if "envs.check" in line and name in line]
    assert commands
    for command in commands:
        words = shlex.split(command)
        assert words[:3] == ["python", "-m", "envs.check"]
        path = {"PYTHONPATH": f"{ROOT}:{tmp_path}"}
        done = subprocess.run(
            [sys.executable, *words[1:]], cwd=tmp_path, env=path, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stdout + done.stderr
        assert "18 of 18 checks passed" in done.stdout


def test_the_options_on_the_page_exist():
    page = "\n".join(blocks("sh")).replace("\\\n", " ")
    for module in ("envs.service", "envs.check"):
        lines = " ".join(line for line in page.splitlines() if module in line)
        used = set(re.findall(r"--(\w+)", lines))
        done = subprocess.run(
            [sys.executable, "-m", module, "--help"], cwd=ROOT, capture_output=True, text=True
        )
        assert used and not {option for option in used if f"--{option}" not in done.stdout}
