"""Tests of the explorer's table: what is measured, the trials of a verifier, and going on after an
interruption."""

import json
import random
import re

import pytest

from envs.toolcalls import call_text, parse
from envs.travel import Travel
from envs.world import Task, WorldError
from experiments import commands, exploring
from tests.evolver.chat_server import ChatServer, answer, said
from tests.experiments.results import rows_of


def run(words: str, *more: str) -> int:
    return commands.run(exploring.main, [*words.split(), *more])


def columns(text: str, row: str) -> dict[str, str]:
    """Return {column: cell} of a row of the last table that has one."""
    rows = rows_of(text)
    return dict(zip(rows["world"], rows[row], strict=True))


@pytest.fixture(scope="module")
def out(tmp_path_factory):
    out = tmp_path_factory.mktemp("exploring")
    run(f"--worlds travel --budget 4 --seeds 0 --tasks 16 --out {out}")
    return out


def test_the_table_has_what_was_measured(out):
    figures = json.loads((out / "travel-0.json").read_text())
    assert len(figures["tasks"]) == sum(figures["difficulty"].values()) == 4
    assert figures["agree"] == [True] * 4 and not figures["disagreements"]
    assert figures["trials"] >= 5 * 4 and figures["ended"] == "budget"
    assert figures["step"] > figures["reset"] > 0 and figures["walks"] > 0
    found = columns((out / "exploring.md").read_text(), "travel")
    assert found["tasks"] == "4" and found["agree"] == "100.0%"
    assert float(found["per 1,000 steps"]) == pytest.approx(4000 / figures["step"], abs=0.01)


def test_explorers_and_writers_are_compared_by_what_they_cost(tmp_path, stdout):
    """A scripted server explores, writes and rewords; some of what it says is used, and all of it
    is counted."""

    def script(body, n):
        last = body["messages"][-1]["content"]
        if "THE RECORD" in last:
            flight = re.search(r"\bF\d\d\b", last.partition("THE RECORD")[2])
            idea = {"query": f"Which flights are there, the {n}th time?", "confidence": 1.0}
            idea |= {"steps": [1], "answer": flight[0] if flight else "none"}
            return answer({"tasks": [idea]})
        if "schema" in str(body.get("response_format")):  # other words
            return answer({"queries": ["Something else.", "Nothing."]})
        call = call_text("flights", {"to": "Rome"})
        return said(call if len(body["messages"]) < 4 else "done", prompt=100)

    command = "--worlds travel --seeds 0 --tasks 16 --budget 2 --model tiny"
    command += f" --out {tmp_path} --by curiosity/plain curiosity/model llm/plain"
    options = 'llm={"breadth": 1, "depth": 1, "rounds": 1}'
    with ChatServer(script) as server:
        run(f"{command} --url {server.url}", "--options", options)
        asked = len(server.requests)
    out = stdout()
    plain = columns(out, "travel")
    assert plain.items() >= {"calls": "0", "reworded": "-", "tokens per task": "0.0"}.items()
    # no wording was faithful
    known = {"calls": "2", "reworded": "0", "tasks": "2"}
    assert columns(out, "travel, curiosity/model").items() >= known.items()
    llm = columns(out, "travel, llm/plain")
    known = {"tasks": "2", "unanswered": "0", "calls": str(asked - 2)}
    known |= {"calls per task": f"{(asked - 2) / 2:.1f}"}
    assert llm.items() >= known.items() and float(llm["steps per task"]) > 1


@pytest.mark.parametrize("limit,steps", [("--steps 300", 300), ("--minutes 0", 0)])
def test_a_measurement_that_takes_too_long_ends_with_what_it_has(tmp_path, limit, steps):
    run(f"--worlds travel --budget 50 --seeds 0 {limit} --out {tmp_path}")
    figures = json.loads((tmp_path / "travel-0.json").read_text())
    assert figures["ended"] in (tmp_path / "exploring.md").read_text()
    assert figures["ended"] == f"out of {'steps' if steps else 'time'}"
    assert figures["step"] == steps and figures["tasks"] == [] and figures["similarity"] == 0.0


def test_what_was_measured_is_not_measured_again(out, monkeypatch, stdout):
    monkeypatch.setattr(exploring, "measure", lambda *_, **__: pytest.fail("measured again"))
    command = f"--worlds travel --seeds 0 --tasks 16 --out {out} --budget"
    run(f"{command} 4")
    assert "| travel | 1 | 4 |" in " ".join(stdout().split())
    with pytest.raises(pytest.fail.Exception, match="measured again"):
        run(f"{command} 5")  # another budget is another measurement


def test_the_explorer_of_travel_gets_no_help():
    world = exploring.Unaided()
    assert world.profile() == {}
    assert not hasattr(world, "difference") and not hasattr(world, "describe")


def made_up(start: Task, probes: list, answer: dict | None) -> Task:
    """An invented task that ends where `start` does, with these probes and this answer."""
    none = {"ids": [], "known": [], "mask": [], "code": False}
    verifier = {"start": start.verifier, "probes": probes, "answer": answer, **none}
    place = {"origin": "synthetic", "seed": start.seed, "meta": {"source": "a"}}
    return Task("syn/1", "travel", "?", reference=start.reference, verifier=verifier, **place)


@pytest.fixture
def start():
    """Return a task that changes the agency."""
    return next(t for t in exploring.Unaided().tasks("train") if t.verifier["state"])


def agreement(task: Task) -> dict:
    return exploring.agreement(exploring.Unaided(), [task], random.Random(0))


def test_a_verifier_that_checks_too_little_disagrees_with_the_world(start):
    task = made_up(start, [], {"value": "x", "others": []})
    task.reference = [*start.reference[:-1], "x"]
    made = exploring.trials(task, [task], random.Random(0))
    assert all(parse(actions[-1]).calls == [] for actions in made) and [exploring.CLOSING] in made
    figures = agreement(task)
    assert figures["agree"] == figures["sound"] == [False]
    assert not figures["disagreements"][0]["right"]


def test_a_verifier_that_demands_too_much_is_sound_and_disagrees(start, monkeypatch):
    monkeypatch.setitem(exploring.STATES, "travel", lambda world: None)
    figures = agreement(made_up(start, [{"tool": "flights", "action": "x", "digest": "y"}], None))
    assert figures["agree"] == [False] and figures["sound"] == [True]


def test_what_the_world_itself_cannot_compare_does_not_count(start, monkeypatch):
    monkeypatch.setitem(exploring.STATES, "travel", lambda world: float("nan"))  # equal to nothing
    figures = agreement(start)
    assert figures["agree"] == figures["sound"] == [] and figures["trials"] == 0


def test_wrong_arguments_are_listed_together_before_anything_starts(tmp_path, stderr):
    wrong = ['travel={"rules": "x"}', "bfcl={}", "--options", 'curiosity={"dept": 3}', "llm=[]"]
    words = f"--worlds travel mars --out {tmp_path}/o --by llm/plain --python appworld --kwargs"
    code = run(words, *wrong)
    said = stderr()
    assert code == 2 and not (tmp_path / "o").exists()
    parts = ("rules='x'", "there is no world 'mars'", "--kwargs bfcl", "llm=[]", "needs --url")
    for part in (*parts, "'dept' (did you mean depth?)", "NAME=VALUE, not appworld"):
        assert part in said, part


class Broken(Travel):
    """A world whose server is down."""

    def reset(self, task, seed):
        raise WorldError("the server is down")


def test_a_world_that_fails_stops_no_other(tmp_path):
    broken = f"{__name__}:Broken"
    command = f"--worlds {broken} travel --budget 2 --tasks 16 --seeds 0 --out {tmp_path}"
    assert run(command) == 1
    table = " ".join((tmp_path / "exploring.md").read_text().split())
    assert f"{broken}, seed 0: failed: the server is down" in table
    assert "| travel | 1 | 2 |" in table
