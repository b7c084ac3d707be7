"""The studies of the mechanisms: their runs can start, and their tables say what the runs hold."""

import itertools
import shutil

from evolver.files.workdir import Workdir
from experiments import commands, compare, grid, mechanisms
from tests.experiments.results import named, record_attempt, scores_of


def test_every_run_of_every_study_can_start_and_has_a_name_of_its_own(tmp_path):
    studies = mechanisms.runs_of(mechanisms.STUDIES, [0, 1])
    points = itertools.chain(*(study.values() for study in studies.values()))
    settings = {}  # of each run
    for run in itertools.chain(*points):
        found = str((run.config, run.seed, dict(run.overrides)))
        assert settings.setdefault(run.name, (found, run))[0] == found
    first = [run for _, run in settings.values() if run.seed == 0]
    assert grid.problems(first, tmp_path) == []
    assert studies["grid"]["all"][0].same == "questioning,16,grpo-0"
    # nothing runs twice
    assert len({found for found, _ in settings.values()}) == len(settings) > 60


def test_seeds_vary_slowest_and_rows_differ_in_what_the_study_says():
    study = mechanisms.STUDIES["navigating"]
    runs = mechanisms.runs_of({"navigating": study}, [3, 4])["navigating"]["0.03"]
    assert [run.seed for run in runs] == [3, 3, 4, 4]
    first, second = runs[:2]
    assert (first.config, second.config) == ("configs/quickstart.py:q", "configs/quickstart.py:qn")
    assert second.overrides == first.overrides | mechanisms.SETTINGS["navigating"]
    assert first.overrides["env.args.rarity"] == 0.03


def finished(folder, name, means, seconds_per_step):
    """Write a finished run whose success on two tasks is `means` at steps 0, 5, 10, ..."""
    workdir = Workdir(folder / name)
    for n, mean in enumerate(means):
        workdir.log_scores(5 * n, scores_of([[int(i < 8 * mean) for i in range(8)]] * 2))
        workdir.log_metrics(5 * n, {"time/elapsed": seconds_per_step * 5.0 * n})
    record_attempt(folder, name)


def test_the_table_compares_at_equal_rollouts_and_at_equal_time(tmp_path):
    study = mechanisms.Study("dial", {"1": {"grpo": ("grpo", {}), "+x": ("q", {})}})
    points = mechanisms.runs_of({"s": study}, [0, 1])["s"]
    for seed in (0, 1):
        finished(tmp_path, f"s,1,grpo-{seed}", [0.0, 0.25, 0.5], seconds_per_step=1.0)
        # twice as slow
        finished(tmp_path, f"s,1,+x-{seed}", [0.0, 0.25, 1.0], seconds_per_step=2.0)
    lines = mechanisms.frame(tmp_path, points)
    plain, other = named(mechanisms.table(lines))
    assert other["difference [95%]"].startswith("+50.0") and plain["difference [95%]"] == ""
    assert other["at equal time [95%]"].startswith("-25.0")  # 0.25 after 10 seconds, against 0.5
    assert other["difference of curves [95%]"].startswith("+12.5")
    known = {"before": "0.0", "curve": "37.5"}  # (0 + 0.25) / 2, ...
    assert other.items() >= (known | {"steps to 50%": "10", "seeds": "2"}).items()
    mechanisms.draw(tmp_path, "s", study.dial, lines)
    assert (tmp_path / "s.png").stat().st_size > 5000


def test_what_the_runs_logged_is_averaged_over_the_early_steps_of_all_seeds(tmp_path):
    study = mechanisms.Study("dial", {"1": {"q": ("q", {}), "+n": ("qn", {})}})
    runs = mechanisms.runs_of({"s": study}, [0, 1, 2])["s"]  # that of seed 2 failed
    step = {"rollout/success": 0.5, "ledger/rollouts": 64, "questioning/pool": 30.0}
    advice = {"navigating/win_rate": 0.75, "navigating/expected_rate": 0.5}
    for seed in (0, 1):
        for row, extra in (("q", {}), ("+n", advice)):
            workdir = Workdir(tmp_path / f"s,1,{row}-{seed}")
            workdir.log_scores(0, scores_of([[0]]))
            workdir.log_metrics(0, {"questioning/pool": 30.0})
            workdir.log_metrics(1, {**step, **extra, "ledger/no_signal": 16 + 32 * seed})
            workdir.log_metrics(2, {**step, "ledger/no_signal": 32})  # no guided rollout
            late = {**step, "ledger/no_signal": 0, "questioning/pool": 40.0 + seed}
            workdir.log_metrics(mechanisms.EARLY + 1, late)
            record_attempt(tmp_path, workdir.path.name)
    record_attempt(tmp_path, "s,1,q-2", code=1)
    plain, other = named(mechanisms.logged(tmp_path, runs))
    known = {"row": "q", "seeds": "2", "invented tasks": "40"}  # 40.5, rounded to even
    known |= {"success": "50.0", "no signal": "50.0", "guided - unguided": ""}
    assert plain.items() >= known.items()
    known = {"row": "+n", "guided - unguided": "+25.0", "labels GOOD": ""}
    assert other.items() >= known.items()
    # of a study that went on elsewhere, the record may be all that there is
    shutil.rmtree(tmp_path / "s,1,+n-0")
    assert [line[2] for line in mechanisms.logged(tmp_path, runs)[1:]] == ["2", "1"]
    (tmp_path / "grid.jsonl").unlink()
    assert [line[2:] for line in mechanisms.logged(tmp_path, runs)[1:]] == [["0", *[""] * 8]] * 2


def test_a_row_that_never_gets_there_says_so():
    def curve(*means):
        return {5 * n: scores_of([[mean]]) for n, mean in enumerate(means)}

    def said(*curves):
        return mechanisms.steps_to_half(compare.Row("r", dict(enumerate(curves))))

    assert said(curve(0, 1), curve(0, 0)) == "5 (1 of 2 never)"
    assert said(curve(0, 0)) == "(1 of 1 never)" and said() == ""


def test_an_unknown_study_is_refused(stderr):
    assert commands.run(mechanisms.main, ["--studies", "nothing"]) == 2
    assert "questioning" in stderr()
