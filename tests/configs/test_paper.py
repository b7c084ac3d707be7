"""Every cell of the paper's tables: it resolves, it differs from its base only where the table
says, and cells that are one run in the paper are one run here."""

import ast
import collections
import functools
import importlib
import re
from pathlib import Path

import pytest

from configs import appworld_14b
from configs.paper import policies, runs
from configs.paper.cells import TABLES
from evolver.config.checks.workdir import expanded
from evolver.config.derived import MECHANISMS
from experiments.paper.study import UNTRAINED, study_of
from tests.configs import mistakes

ROOT = Path(__file__).parents[2]
MODELS = ("32b", "qwen3-8b", "qwen3-32b", "qwen3-30b-a3b", "qwen3-235b-a22b")
SERVED = dict.fromkeys(MODELS, "http://127.0.0.1:1,m,t")


def module(table):
    return importlib.import_module(f"configs.paper.{table}")


@functools.cache
def values(run):
    return expanded(runs.get_config(run))


def changed(ours, other):
    keys = ours.keys() | other.keys()
    return {key: ours.get(key) for key in keys if ours.get(key) != other.get(key)}


@pytest.mark.parametrize("scale", ["full", "tiny"])
@pytest.mark.parametrize("table", TABLES)
def test_every_cell_resolves(table, scale):
    for name, cell in TABLES[table].items():
        config = module(table).get_config(name + (",tiny" if scale == "tiny" else ""))
        mode = "eval" if cell.run.split(",")[2] in UNTRAINED else "train"
        found = [problem for problem in mistakes(config, mode) if "needs a pool" not in problem]
        assert not found, (name, found)


@pytest.mark.parametrize("table", TABLES)
def test_a_header_has_the_command_what_is_published_what_is_confirmed_and_the_cost(table):
    path = ROOT / f"configs/paper/{table}.py"
    text = ast.get_docstring(ast.parse(path.read_text()))
    assert f"python -m experiments.paper {table}" in text
    assert "Expected:" in text and "HOURS" not in text
    (argument,) = re.findall(rf"configs/paper/{table}\.py:(\S+)", text)
    assert argument in TABLES[table]
    assert re.search("Confirmed|Inferred|Not stated|Doubtful|read off|unconfirmed|repeat", text)


def test_an_unknown_cell_lists_the_cells():
    known = r"table2\.py:14b,appworld: choose one of 7b,appworld,base; "
    with pytest.raises(ValueError, match=known):
        module("table2").get_config("14b,appworld")
    with pytest.raises(ValueError, match=r"a row of base, thinking, icl, original"):
        runs.get_config("14b,appworld,nothing")
    with pytest.raises(ValueError, match=r"policies\.py"):
        policies.get_config("1b,bfcl")


@pytest.mark.parametrize("row", [row for row in runs.ROWS if row not in UNTRAINED])
@pytest.mark.parametrize("world", runs.WORLDS)
@pytest.mark.parametrize("size", ["7b", "14b"])
def test_a_row_differs_from_its_base_only_where_the_table_says(size, world, row):
    kind, says = runs.ROWS[row]
    source = expanded(runs.FULL[size][world].get_config(kind))
    different = set(changed(values(f"{size},{world},{row}"), source))
    # Another plug has other arguments.
    plugs = tuple(f"{key.removesuffix('name')}args." for key in says if key.endswith(".name"))
    assert {key for key in different if not key.startswith(plugs)} <= set(says)
    # A change that changes nothing would be a mistake, unless it states a default.
    assert set(says) - different <= {"steps", "eval.experience"}


def test_sizes_differ_in_the_model_and_its_place_only():
    def between(size, row):
        return changed(values(f"{size},appworld,{row}"), values(f"14b,appworld,{row}"))

    place = {"model.preset", "engine.vllm.devices", "optim.offload", "loss.reference"}
    for row in ("q", "all", "original"):
        assert set(between("7b", row)) == place
    for row, thinking in (("causal", "off"), ("reasoning", "on")):
        assert between("qwen3-14b", row) == {
            "model.preset": "qwen3-14b",
            "template.thinking": thinking,
        }


def test_tiny_cells_keep_what_their_row_is_about():
    for row, (kind, says) in runs.ROWS.items():
        tiny = values(f"14b,appworld,{row},tiny")
        for key, value in says.items():
            value = value["appworld"] if isinstance(value, dict) else value
            assert tiny[key] == runs.shrunk(key, value), (row, key)
        assert tiny["env.name"] == "travel" and tiny["model.preset"] == "tiny"
        assert not tiny["llm.url"]
        enabled = tuple(m for m in MECHANISMS if tiny[f"{m}.enabled"])
        assert enabled == appworld_14b.ROWS[kind]
        assert values(f"14b,bfcl,{row},tiny")["env.name"] == "bfcl"


SHARED = (
    {
        "table1:14b,appworld,q",
        "table2:14b,appworld,synthetic",
        "table3:14b,appworld,bfcl",
        "figure12a:500",
    },
    {
        "table1:14b,appworld,q",
        "table5:14b,appworld,no_labels",
        "table6:14b,appworld,baseline",
        "figure16:0",
    },
    {
        "table1:14b,appworld,qa",
        "table5:14b,appworld,attributing",
        "figure16:0.1",
        "table6:14b,appworld,attributing",
    },
    {"table1:14b,appworld,all", "figure1:agentevolver-14b,appworld", "controls:all"},
    {"table4:14b,appworld,grpo", "figure13b:trained,0", "table2:14b,appworld,original"},
    {"table4:14b,appworld,navigating", "figure13b:trained,0.5", "figure14:0.6"},
    {"table4:14b,appworld,unselected", "figure14:0.28"},
    {"figure12b:reference", "table1:14b,appworld,q"},
)


@pytest.fixture(scope="module")
def study():
    return study_of(TABLES, scale="full", models=SERVED)


@pytest.mark.parametrize("cells", SHARED, ids=lambda cells: sorted(cells)[0])
def test_cells_of_one_run_are_one_run(study, cells):
    trained = {study.sources[(*cell.split(":"), 0)].train for cell in cells}
    assert len(trained) == 1 and "" not in trained
    assert cells <= set(study.users[trained.pop()])


def test_no_two_runs_are_the_same_and_the_papers_are_counted(study):
    trained = [run for run in study.runs.values() if run.mode == "train"]
    resolved = {repr(sorted(values(run.config.partition(":")[2]).items())) for run in trained}
    assert len(resolved) == len(trained)
    own = {name for name, cell in TABLES["controls"].items() if not cell.published}
    own |= {"q80", "qn80", "qn_unselected80"}  # table 4 on the tasks that the paper may have used
    paper = [run for run in trained if run.config.rpartition(",")[2] not in own]
    # 16 of table 1, 8 more of table 2, 4 of figure 12, 5 more of table 4, 3 of figure 13b, 3 of
    # figure 14, 4 of table 5, 3 of figure 16, 4 of table 7.
    assert len(paper) == 50
    evaluations = [run for run in study.runs.values() if run.mode == "eval"]
    assert {run.overrides["eval.temperature"] for run in evaluations} == {0.0, 0.9}


def test_an_evaluation_in_another_world_starts_from_the_policy_of_the_run(study):
    source = study.sources["table3", "14b,appworld,bfcl", 0]
    run = study.runs[source.scores]
    assert run.overrides["model.path"] == "{folder}/14b-appworld-q-0/policy"
    assert run.after == ("14b-appworld-q-0",) and run.overrides["eval.split"] == "val"
    assert run.config == "configs/paper/runs.py:14b,bfcl,base"


def test_experience_at_inference_needs_a_pool_and_has_a_share(study):
    run = study.runs[study.sources["figure13b", "inference,0.25", 0].scores]
    assert run.overrides["eval.experience"] == 0.25 and run.after == ("pool-14b-appworld-0",)
    assert study.runs["pool-14b-appworld-0"].mode == "pool"


def test_published_numbers_agree_wherever_two_tables_print_one_score(study):
    """The paper prints some scores twice; where it prints others for one row, the header says
    so."""
    found = collections.defaultdict(set)
    for table in ("table1", "table2", "table3", "figure12a", "figure12b", "controls"):
        for name, cell in TABLES[table].items():
            for measure, value in cell.published.items():
                found[study.sources[table, name, 0].scores, measure].add(value)
    assert {key: numbers for key, numbers in found.items() if len(numbers) > 1} == {}
