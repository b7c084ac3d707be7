"""Whole runs in which the policy plays roles of config.llm, and their configs."""

import json

import pytest

from configs import base
from evolver.attributing import BAD, GOOD, Label, TurnJudge
from evolver.config.checks.workdir import differences
from evolver.engines import jax_engine
from evolver.files.workdir import plain
from evolver.llm import roles
from evolver.llm.policy import PolicyResponder, trajectory_of
from evolver.llm.prompts import prompt
from evolver.llm.questions import CURRENT_POLICY, INITIAL_POLICY, Call, ChatError, Role
from evolver.llm.store import ledger_lines
from evolver.plan import calls, targets
from evolver.plan.case import Case
from evolver.processes.interrupt import Stop
from evolver.recipes import Recipe
from models import chat, hf, qwen
from models.tokenizer import Tokenizer
from tests.evolver.runs import figures, go, rollouts_of
from tests.evolver.test_llm_policy import judged


class Speaking(Recipe):
    """Trains on what the policy said of turns: odd lengths are worth more."""

    roles = ("step_judge",)

    def __init__(self, parts):
        super().__init__(parts)
        parts.chat.keeps = True

    def extra(self, run, trajectories, step):
        said = [trajectory_of(one, run.actor.tokenizer) for one in self.parts.chat.said()]
        for t in said:
            t.turns[0].advantage = len(t.turns[0].action) % 2 - 0.25
        return said


class Lengths(TurnJudge):
    """Labels turns by the length of what the policy, asked freely, says about them."""

    roles = ("step_judge",)
    concurrency = 2

    def __init__(self, parts):
        self.chat = parts.chat

    def label(self, trajectories):
        asked = []
        for t in trajectories:
            asked += [
                judged(turn.action[:9], "step_judge", seed=n) for n, turn in enumerate(t.turns)
            ]
        labels = iter([label_of(reply) for reply in self.chat.ask(asked)])
        return [[next(labels) for _ in t.turns] for t in trajectories]

    def metrics(self):
        return {}


def label_of(reply):
    return Label(GOOD if isinstance(reply, ChatError) or len(reply.text) % 2 else BAD)


LLM_JUDGE = "--config.attributing.judge.name=llm"
LABELLED = (
    "--config.attributing.enabled=True", f"--config.attributing.judge.name={__name__}:Lengths",
    "--config.advantage.name=adca", "--config.llm.step_judge.max_tokens=8",
    "--config.llm.step_judge.temperature=1.0", "--config.llm.url=policy", "--config.steps=2",
    "--config.eval.every=1", "--config.eval.greedy=False",
)  # fmt: skip


def call(tiny, workdir, *words):
    """Play a run of two steps whose turns are labelled by the policy."""
    return go(tiny, workdir, *LABELLED, *words)


def asked(workdir, what="call"):
    return sum(line["what"] == what for line in ledger_lines(workdir / "llm.jsonl"))


def answers_in(workdir):
    """Return the cached answers by the names of their files."""
    files = (workdir / "llm_cache").rglob("*.json")
    return {path.name: json.loads(path.read_text()) for path in files}


JUDGING = (
    "--config.recipe.name=multi_agent", "--config.recipe.args.analysis=20",
    "--config.recipe.args.proposals=2", "--config.questioning.judge.name=naive",
    "--config.questioning.judge.args.analysis=20", "--config.questioning.enabled=True",
    "--config.questioning.budget=6", "--config.env.name=travel", "--config.llm.url=policy",
    "--config.llm.context=1024", "--config.llm.shown=100", "--config.llm.judge.temperature=1.0",
    "--config.llm.judge.max_tokens=96", "--config.learner.row=1024", "--config.steps=1",
    "--config.eval.every=0",
)  # fmt: skip


def test_the_judge_of_multi_agent_trains_and_raises_no_alarm(finish):
    """A policy of random weights writes no judgement by itself, and a grammar writes all alike."""
    run = finish("run", *JUDGING)
    last = figures(run)[-1]
    assert last["multi_agent/judgements"] > 1 and last["multi_agent/usable"] == 0
    assert "llm/judge/failures/context" not in last  # a judge may have a context of its own
    extra = rollouts_of(run, "extra_000001")
    judged = [t for t in extra if t["task"].startswith("judge/")]
    assert len(judged) == last["multi_agent/judgements"]
    assert {t["fate"] for t in judged} == {"trained"}
    assert {t["success"] for t in judged} == {True, False}
    assert last["alarm/weights"] == 0 and last["mismatch/max"] < 1e-4
    assert last["importance_weight"] == pytest.approx(1, abs=1e-4)


class TestRuns:
    @pytest.fixture(scope="class", autouse=True)
    def whole_answers(self):
        """The random policy never ends an answer, and one that is cut counts as unanswered."""

        async def whole(responder, call):
            return await answer(responder, call) | {"finish": "stop"}

        answer = PolicyResponder.answer
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(PolicyResponder, "answer", whole)
            yield

    @pytest.fixture(scope="class")
    def straight(self, tiny, tmp_path_factory):
        workdir = tmp_path_factory.mktemp("runs") / "straight"
        assert call(tiny, workdir) == 0
        return workdir

    def test_the_policy_labels_its_own_turns(self, straight):
        last = figures(straight)[-1]
        assert last["llm/step_judge/calls"] > 0 and "llm/step_judge/failures/context" not in last
        assert {line["model"] for line in ledger_lines(straight / "llm.jsonl")} == {"policy"}

    def test_what_the_policy_says_of_its_turns_trains_and_resumes(self, tiny, straight, tmp_path):
        recipe = f"--config.recipe.name={__name__}:Speaking"
        whole = tmp_path / "whole"
        parts = tmp_path / "parts"
        assert call(tiny, whole, recipe) == 0
        assert call(tiny, parts, recipe, "--config.steps=1") == 0
        assert call(tiny, parts, recipe) == 0
        last = figures(whole)[-1]
        assert last["ledger/extra_trained"] == last["ledger/extra"] > 0
        # The log-probabilities of the engine are those of the learner.
        assert last["mismatch/max"] < 1e-4
        assert figures(straight)[-1]["grad_norm"] != last["grad_norm"]
        assert figures(parts, "llm/") == figures(whole, "llm/")

    def test_the_same_command_gives_the_same_answers(self, tiny, straight, tmp_path, monkeypatch):
        choose = Recipe.choose
        fresh = []

        def watched(self, run, step):
            fresh.append(not any(engine._slots.filled.any() for engine in run.engines))
            return choose(run, step)

        monkeypatch.setattr(Recipe, "choose", watched)
        again = tmp_path / "again"
        assert call(tiny, again) == 0
        assert figures(again) == figures(straight)
        cached = answers_in(straight)
        assert cached == answers_in(again)
        assert len(cached) > 4 and fresh == [True, True]  # as the engine of a resumed run would be

    def test_a_resumed_run_goes_on_as_if_it_had_not_ended(self, tiny, straight, tmp_path):
        run = tmp_path / "run"
        cache = f"--config.llm.cache={straight / 'llm_cache'}"
        assert call(tiny, run, "--config.steps=1", cache) == 0
        assert asked(run) == 0 < asked(run, "hit")
        assert call(tiny, run) == 0
        assert asked(run) == figures(straight)[2]["llm/step_judge/calls"]
        assert figures(run, "llm/") == figures(straight, "llm/")

    def test_the_initial_policy_answers_as_it_did_before_the_updates(
        self, tiny, policy, straight, tmp_path
    ):
        run = tmp_path / "run"
        assert call(tiny, run, f"--config.llm.url={INITIAL_POLICY}") == 0
        first, second = (figures(path, "llm/")[1] for path in (run, straight))
        assert first == second  # before the first update both policies are the same
        config = base.get_config()
        config.model.dtype = "float32"
        config.rollout.context = 128
        shape, params = hf.load(policy, mesh=None)
        engine = jax_engine(config, shape, params, 4)
        fresh = Tokenizer.load(policy)
        records = [*answers_in(run).values()]
        role = Role(INITIAL_POLICY, INITIAL_POLICY, temperature=1.0, max_tokens=8)
        body = {"model": INITIAL_POLICY} | role.sampling(seed=0)
        with Stop() as stop:
            responder = PolicyResponder(engine, fresh, 128, params)
            for rollout in rollouts_of(run, 2)[:3]:
                question = judged(rollout["turns"][0]["action"][:9])
                asked_again = Call("step_judge", role, body | {"messages": question.messages})
                assert stop.run(responder.answer(asked_again)) in records
            stop.finish(engine.close())

    def test_asynchronous_rollouts_and_judges_in_threads_share_the_engine(self, finish):
        run = finish("run", *LABELLED, "--config.rollout.async_depth=1", "--config.steps=3")
        assert figures(run)[-1]["step"] == 3 and asked(run) > 0

    def test_a_judge_whose_questions_can_never_fit_is_refused(self, ends):
        err = ends(2, *LABELLED, LLM_JUDGE)
        assert "config.llm.step_judge: the policy cannot answer" in err
        assert "within config.rollout.context=192: set config.llm.context" in err

    @pytest.mark.slow
    def test_a_judge_may_have_a_context_of_its_own(self, finish):
        # A large window means few calls, and so few windows to compile.
        words = ["--config.steps=1", "--config.llm.context=2048", "--config.engine.prefill=1024"]
        line = figures(finish("run", *LABELLED, LLM_JUDGE, *words))[1]
        assert line["llm/step_judge/calls"] and "llm/step_judge/failures/context" not in line

    def test_a_judge_whose_questions_hardly_fit_says_so_and_counts_them(
        self, finish, policy, capsys
    ):
        context = len(chat.opening(Tokenizer.load(policy), prompt("step_judge").empty())) + 1
        words = ("--config.steps=1", f"--config.llm.context={context}")
        line = figures(finish("run", *LABELLED, LLM_JUDGE, *words))[1]
        assert "ALARM: the policy plays the step_judge" in capsys.readouterr().out
        assert line["llm/step_judge/unanswered"] == line["llm/step_judge/failures/context"] > 0
        assert line["attributing/abstain_rate"] == 1.0


def config_of(**llm):
    """A config whose turns are labelled by a language model."""
    config = base.get_config()
    config.attributing.enabled = True
    config.attributing.judge.name = "llm"
    config.llm.update(llm)
    return config


def test_a_missing_package_of_schemas_is_reported_before_anything_is_computed(monkeypatch):
    there = ("httpx", "jsonschema")
    monkeypatch.setattr(roles, "is_missing", lambda package: package not in there)
    config = config_of(url="http://127.0.0.1:9/v1", model="judge")
    assert not list(roles.llm_problems(config, "train"))  # a server has its own
    config.llm.url = CURRENT_POLICY
    (problem,) = roles.llm_problems(config, "train")
    assert "llguidance" in problem and "llm" in problem


def test_the_policy_needs_no_model_and_no_price(tmp_path):
    prices = tmp_path / "prices.json"
    prices.write_text("{}")
    config = config_of(url=CURRENT_POLICY, budget_money=1.0, prices=str(prices))
    assert not list(roles.llm_problems(config, "train"))


def test_a_role_stays_with_the_policy_when_a_run_resumes():
    config = base.get_config()
    config.llm.url = "http://a/v1"
    config.llm.judge.url = CURRENT_POLICY
    before = plain(config.to_dict())
    config.llm.url = "http://b/v1"
    assert not differences(before, config, base.Config)
    config.llm.judge.url = ""
    (problem,) = differences(before, config, base.Config)
    assert problem.startswith("llm.judge.url: 'policy' then, 'http://b/v1' now")


def test_the_plan_bills_the_policy_no_money_and_counts_a_second_engine():
    config = config_of(url=CURRENT_POLICY, concurrency=32)
    config.engine.slots = 64
    bill = calls.bill(config)["step_judge"]
    assert bill.model == "policy" and bill.cost == 0
    assert "costs no money" in "\n".join(calls.lines(config))

    def engine():
        return Case(config, qwen.PRESETS[config.model.preset], targets.parse("h100:1")).engine

    assert engine().initial == 0
    config.llm.url = INITIAL_POLICY
    assert engine().initial == engine().weights + engine().cache / 2
