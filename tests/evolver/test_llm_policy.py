"""Roles of config.llm that the policy plays: the engine's answers, their place in the cache, and
whole runs."""

import asyncio
import contextlib
import functools
import json
import time
from concurrent.futures import ThreadPoolExecutor

import jax
import numpy as np
import pytest

from configs import base
from evolver.attributing import BAD, GOOD, Label, TurnJudge
from evolver.build import make_responders
from evolver.config.checks.workdir import differences
from evolver.engines import jax_engine
from evolver.files.workdir import plain
from evolver.llm import roles
from evolver.llm.answers import array, record, string
from evolver.llm.client import Chat, Limits
from evolver.llm.policy import PolicyResponder, fingerprint, trajectory_of
from evolver.llm.prompts import prompt
from evolver.llm.questions import CURRENT_POLICY, INITIAL_POLICY, Call, ChatError, Question, Role
from evolver.llm.store import ledger_lines
from evolver.plan import calls, targets
from evolver.plan.case import Case
from evolver.processes.interrupt import Interrupted, Stop
from evolver.recipes import Recipe
from models import chat, hf, qwen
from models.tokenizer import Tokenizer
from rl.engines import EngineFault
from rl.engines.grammar import Grammars
from rl.engines.jax.engine import JaxEngine
from rl.trajectory import Completion, Sampling
from tests.evolver.chat_server import ChatServer
from tests.evolver.runs import figures, go, rollouts_of


class Fake:
    """An engine that answers with the tokens of a text, after `seconds`."""

    version = 0

    def __init__(self, tokenizer, text="yes", seconds=0.0, fault=None):
        self.tokenizer, self.text, self.seconds, self.fault = tokenizer, text, seconds, fault
        self.asked, self.released = [], []

    async def generate(self, prompt_ids, sampling, *, session, guide=None):
        self.asked.append((prompt_ids, sampling))
        if self.fault:
            raise self.fault
        await asyncio.sleep(self.seconds)
        text = self.text if guide is None else guide
        tokens = [*self.tokenizer.encode(text), self.tokenizer.im_end]
        return Completion(tokens, [0.0] * len(tokens), "stop", self.version)

    async def release(self, session):
        self.released.append(session)

    async def close(self):
        pass


WEIGHTS = {"w": jax.numpy.arange(6.0).reshape(2, 3)}


@contextlib.contextmanager
def client_of(tokenizer, cache, *, context=128, limits=None, extra="", check=None, **fake):
    """A client whose judge is a Fake on the event loop of a Stop, and whose writer is a server."""
    with Stop(background=True) as stop, ChatServer("from afar") as server:
        engine, lines = Fake(tokenizer, **fake), []
        judge = Role(CURRENT_POLICY, CURRENT_POLICY, temperature=0.5, max_tokens=50, extra=extra)
        chat = Chat(
            {"judge": judge, "writer": Role(server.url, "tiny")},
            limits=limits or Limits(attempts=2),
            cache=cache,
            check=check or stop.check,
            say=lines.append,
            loop=stop.loop,
        )
        chat.responders[CURRENT_POLICY] = PolicyResponder(engine, tokenizer, context, WEIGHTS)
        chat.engine, chat.lines = engine, lines
        try:
            yield chat
        finally:
            chat.close()


@pytest.fixture(scope="module")
def tokenizer(policy):
    return Tokenizer.load(policy)


@pytest.fixture
def asking(tokenizer, tmp_path):
    return functools.partial(client_of, tokenizer, tmp_path / "cache")


def judged(text, role="judge", **more):
    return Question(role, [{"role": "user", "content": text}], **more)


IS_IT = judged("Is it?")


class TestResponder:
    def test_a_question_in_the_chat_template_gets_text_and_counts(self, tokenizer, asking):
        with asking(extra='{"top_k": 7}') as chat:
            (reply,) = chat.ask([judged("Is it?", seed=3)])
            assert (reply.text, reply.finish, reply.cached) == ("yes", "stop", False)
            prompt, sampling = chat.engine.asked[0]
            text = tokenizer.decode(prompt)
            assert text.endswith("<|im_start|>user\nIs it?<|im_end|>\n<|im_start|>assistant\n")
            assert (sampling.temperature, sampling.top_k, sampling.max_tokens) == (0.5, 7, 50)
            assert sampling.stop_tokens == (tokenizer.im_end, tokenizer.endoftext)
            assert reply.prompt_tokens == len(prompt) and chat.engine.released == ["chat/0"]
            figures = chat.ledger.metrics()
            assert figures["llm/judge/calls"] == 1 and figures["llm/money"] == 0
            assert figures["llm/tokens"] == len(prompt) + reply.completion_tokens
            chat.ask([judged("Is it?", seed=3), judged("Is it?", seed=4), judged("So?", seed=3)])
            seeds = [sampling.seed for _, sampling in chat.engine.asked]
            assert len(seeds) == len(set(seeds)) == 3  # the first of them was in the cache

    def test_an_answer_is_searched_for_json_and_cut_where_the_context_ends(self, asking):
        schema = record(score={"type": "integer"})
        with asking(text='Well: {"score": 7}') as chat:
            (reply,) = chat.ask([judged("Score it.", schema=schema)])
            assert reply.parsed == {"score": 7}
            (prompt, _), *_ = chat.engine.asked
        with asking(text="seven", context=len(prompt) + 9) as chat:
            (error,) = chat.ask([judged("Score it!", schema=schema)])
            assert error.kind == "unreadable" and chat.engine.asked[0][1].max_tokens == 9

    def test_random_weights_answer_in_the_form_that_is_asked_for(self, policy, tokenizer):
        """A policy of random weights would write no JSON, and would not end a text, by itself."""
        more = array(record(text=string(0)), 2)
        schema = record(why=string(12), label={"enum": ["GOOD", "BAD"]}, more=more)
        shape, params = hf.load(policy, mesh=None)
        with Stop(background=True) as stop:
            engine = JaxEngine(shape, params, slots=4, context=256)
            role = Role(INITIAL_POLICY, INITIAL_POLICY, temperature=1.0, max_tokens=150)
            chat = Chat({"judge": role}, loop=stop.loop)
            grammars = Grammars(tokenizer, shape.vocab)
            responder = PolicyResponder(engine, tokenizer, 256, params, grammars=grammars)
            chat.responders[INITIAL_POLICY] = responder
            held = chat.ask([judged("Label it.", schema=schema, seed=seed) for seed in range(4)])
            (free,) = chat.ask([judged("Label it.", seed=9)])
            chat.close()
            stop.finish(engine.close())
        assert len({reply.text for reply in held}) > 1 and "cut at max_tokens" in str(free)
        for reply in held:
            assert reply.finish == "stop" and reply.parsed["label"] in ("GOOD", "BAD")
            assert len(reply.parsed["why"]) <= 12 and len(reply.parsed["more"]) <= 2
            assert all(entry == {"text": ""} for entry in reply.parsed["more"])

    def test_what_cannot_be_asked_is_counted_and_the_next_question_answered(
        self, tokenizer, asking
    ):
        with asking(limits=Limits(failures=3)) as chat:
            chat.responders[CURRENT_POLICY]._grammars = Grammars(tokenizer, 400)
            robot = Question("judge", [{"role": "robot", "content": ""}])
            unknown = judged("Is it?", schema={"type": "robot"})
            long, odd, wrong, fine = chat.ask(
                [judged("word " * 200), robot, unknown, judged("short")]
            )
            assert [error.kind for error in (long, odd, wrong)] == ["context", "request", "request"]
            assert "of 128 (config.llm.context) none is left" in str(long)
            assert "unknown role 'robot'" in str(odd) and "JSON schema" in str(wrong)
            figures = chat.ledger.metrics()
            assert figures["llm/judge/unanswered"] == 3 and fine.text == "yes"
            assert len(chat.lines) == 2 and "judge (policy at policy)" in chat.lines[0]

    def test_a_slow_engine_meets_the_deadline(self, asking):
        limits = Limits(deadline=0.05, attempts=2, first_wait=0.01)
        with asking(seconds=60.0, limits=limits) as chat:
            (error,) = chat.ask([IS_IT])
            assert error.kind == "timeout" and "config.llm.deadline" in str(error)
            assert len(chat.engine.released) == 2 and chat.ledger.metrics()["llm/tokens"] == 0

    def test_a_broken_engine_ends_the_run(self, asking):
        with asking(fault=EngineFault("out of memory")) as chat:
            with pytest.raises(EngineFault, match="out of memory"):
                chat.ask([IS_IT, judged("Is it not?")])

    def test_an_interrupted_question_is_dropped_and_closing_waits_for_none(self, asking):
        def check():
            if chat.engine.asked:
                raise Interrupted

        forever = Limits(deadline=3600, grace=3600)
        with asking(seconds=3600.0, check=check, limits=forever) as chat:
            with pytest.raises(Interrupted):
                chat.ask([IS_IT])
        assert chat.engine.released

    def test_threads_that_ask_when_the_client_closes_are_interrupted(self, asking):
        def ask(text):
            with pytest.raises(Interrupted):
                chat.ask([judged(text)])

        with ThreadPoolExecutor(3) as threads:
            with asking(seconds=60.0) as chat:
                asked = [threads.submit(ask, text) for text in "abc"]
                while len(chat.engine.asked) < 3:
                    time.sleep(0.01)
            for thread in asked:
                thread.result(5)
        ask("d")

    def test_a_server_and_the_policy_are_asked_side_by_side_from_many_threads(self, asking):
        def ask(n):
            role = "writer" if n % 2 else "judge"
            return chat.ask([judged(f"{n}", role)])[0].text

        with asking() as chat, ThreadPoolExecutor(16) as threads:
            assert not chat.server_problems()
            assert list(threads.map(ask, range(16))) == ["yes", "from afar"] * 8

    def test_a_coroutine_of_the_engines_loop_can_await_but_not_block(self, asking):
        async def template():
            with pytest.raises(RuntimeError, match="use `await chat"):
                chat.ask([IS_IT])
            return await chat(IS_IT.messages, role="judge")

        with asking() as chat:
            assert asyncio.run_coroutine_threadsafe(template(), chat._loop).result(10).text == "yes"


def test_an_engine_that_has_just_dropped_a_question_can_clear_its_cache(policy):
    async def drop(engine):
        sampling = Sampling(max_tokens=4)
        question = asyncio.ensure_future(engine.generate([1, 2], sampling, session="chat/0"))
        await asyncio.sleep(0)
        question.cancel()
        await asyncio.wait([question])
        engine.clear_cache()

    shape, params = hf.load(policy, mesh=None)
    with Stop() as stop:
        engine = JaxEngine(shape, params, slots=4, context=256)
        stop.run(drop(engine))
        stop.finish(engine.close())


class TestWeights:
    def test_any_changed_weight_changes_the_fingerprint(self):
        def of(change=lambda a: a, dtype=np.float32):
            a = np.arange(24, dtype=np.float32).reshape(2, 3, 4)
            weights = {"a": change(a), "b": np.ones(2)}
            return fingerprint({name: jax.numpy.asarray(w, dtype) for name, w in weights.items()})

        def raised(a):
            a[1, 2, 3] = np.nextafter(a[1, 2, 3], 99)
            return a

        flips = [lambda a, axis=axis: np.flip(a, axis) for axis in range(3)]
        prints = [of(change) for change in (np.copy, raised, np.negative, *flips)]
        prints.append(of(dtype=jax.numpy.bfloat16))
        assert of() == prints[0] and len(set(prints)) == len(prints)

    def test_answers_of_other_weights_are_not_taken_from_the_cache(self, asking):
        with asking() as chat:

            def answer_of(weights, version):
                chat.responders[CURRENT_POLICY].expect(weights, version)
                chat.engine.version, chat.engine.text = version, f"answer {version}"
                return chat.ask([IS_IT])[0]

            assert chat.ask([IS_IT])[0].text == "yes"
            assert answer_of({"w": WEIGHTS["w"] + 1}, 1).text == "answer 1"
            reply = answer_of(WEIGHTS, 2)
            assert reply.text == "yes" and reply.cached

    def test_an_answer_given_during_an_update_is_not_cached(self, asking):
        with asking() as chat:
            chat.responders[CURRENT_POLICY].expect({"w": WEIGHTS["w"] + 1}, 1)
            generate = chat.engine.generate

            async def overtaken(*args, **kwargs):
                chat.engine.version = 1
                return await generate(*args, **kwargs)

            chat.engine.generate = overtaken
            cached = [chat.ask([IS_IT])[0].cached for _ in range(3)]
            assert cached == [False, False, True]

    def test_a_server_of_the_runs_own_engine_has_the_weights_in_its_key(self, tokenizer):
        config = base.get_config()
        config.engine.name = "vllm"
        engine = Fake(tokenizer)
        engine.urls = ["http://127.0.0.1:8000", "http://10.0.0.2:8000/"]
        hosts = ("localhost:8000", "10.0.0.2:8000", "10.0.0.3:8000")
        served = [Role(f"http://{host}/v1", "policy") for host in hosts]
        chat = Chat({str(n): role for n, role in enumerate(served)})
        chat.close()
        responder, initial = make_responders(config, chat, engine, tokenizer, None, WEIGHTS)
        assert chat.responders == {role.server: responder for role in served[:2]}
        assert initial is None
        assert make_responders(config, None, engine, tokenizer, None, WEIGHTS) == (None, None)


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
    "--config.advantage.name=adca", "--config.llm.step_judge.max_tokens=8", "--config.llm.step_judge.temperature=1.0",
)  # fmt: skip


SHORT = ("--config.steps=2", "--config.eval.every=1", "--config.eval.greedy=False")


def call(tiny, workdir, *words, url="policy"):
    """Play a run of two steps whose turns are labelled by the policy."""
    return go(tiny, workdir, f"--config.llm.url={url}", *SHORT, *LABELLED, *words)


def asked(workdir, what="call"):
    return sum(line["what"] == what for line in ledger_lines(workdir / "llm.jsonl"))


def answers_in(workdir):
    """Return the cached answers by the names of their files."""
    files = (workdir / "llm_cache").rglob("*.json")
    return {path.name: json.loads(path.read_text()) for path in files}


def test_a_missing_package_of_schemas_is_reported_before_anything_is_computed(monkeypatch):
    config = base.get_config()
    config.attributing.enabled, config.attributing.judge.name = True, "llm"
    there = ("httpx", "jsonschema")
    monkeypatch.setattr(roles, "is_missing", lambda package: package not in there)
    config.llm.url, config.llm.model = "http://127.0.0.1:9/v1", "judge"
    assert not list(roles.llm_problems(config, "train"))  # a server has its own
    config.llm.url = CURRENT_POLICY
    (problem,) = roles.llm_problems(config, "train")
    assert "llguidance" in problem and "llm" in problem


def test_what_the_policy_says_can_train(tokenizer, asking):
    schema = {"type": "object", "properties": {"score": {"type": "integer"}}}
    with asking() as chat:
        chat.ask([IS_IT])
        assert chat.said() == []
        chat.keeps = True
        again, _ = chat.ask([IS_IT, judged("Score it.", schema=schema)])
        said = chat.said()
        assert again.cached and chat.said() == []
        assert [one.key for one in said] == sorted(one.key for one in said)
        played = {t.task.query: t for t in (trajectory_of(one, tokenizer) for one in said)}
        yes, unreadable = played["Is it?"], played["Score it."]
        assert yes.evaluation.success and not unreadable.evaluation.success
        assert yes.task.id != unreadable.task.id
        (only,) = yes.turns
        assert only.prompt == chat.engine.asked[0][0] and only.trains and only.action == "yes"
        assert only.completion.tokens == [*tokenizer.encode("yes"), tokenizer.im_end]
        assert only.completion.version == 0
        assert not only.completion.logprobs  # not at the learner's temperature
        chat.responders[CURRENT_POLICY]._temperature = 0.5
        chat.ask([judged("So?")])
        (reply,) = (one.reply for one in chat.said())
        assert len(reply.logprobs) == len(reply.tokens)


class Held:
    """Grammars whose guide is the only answer that they allow."""

    def guide(self, schema):
        return '{"score": 7}'


def test_a_free_role_shows_its_form_and_is_held_to_it_where_it_misses_it(tokenizer, asking):
    schema = record(score={"type": "integer"})
    with asking(text="seven") as chat:
        responder = chat.responders[CURRENT_POLICY]
        responder._grammars, responder._temperature, chat.keeps = Held(), 0.5, True
        asked = [judged("Score it.", schema=schema, about=name) for name in ("a/1", "a/0", "")]
        assert [reply.parsed for reply in chat.ask(asked)] == 3 * [{"score": 7}]
        (held,) = chat.said()
        assert held.held and held.usable and held.about == ("a/0", "a/1")
        assert not held.reply.logprobs
        chat.free = ("judge",)
        assert [reply.parsed for reply in chat.ask(asked)] == 3 * [{"score": 7}]
        missed, held = sorted(chat.said(), key=lambda one: one.held)
        assert (missed.usable, held.usable) == (False, True) and missed.about == held.about
        assert missed.reply.text == "seven" and missed.reply.logprobs and not held.reply.logprobs
        assert missed.key != held.key and chat.ledger.metrics()["llm/judge/unanswered"] == 0
        chat.engine.text = 'Well: {"score": 3}'
        (reply,) = chat.ask([judged("Score it!", schema=schema)])
        assert reply.parsed == {"score": 3} and [one.held for one in chat.said()] == [False]
        chat.ask([judged("Well?")])
        assert [one.held for one in chat.said()] == [True]  # nothing to be held to


JUDGING = (
    "--config.recipe.name=multi_agent", "--config.recipe.args.analysis=20",
    "--config.recipe.args.proposals=2", "--config.questioning.judge.name=naive",
    "--config.questioning.judge.args.analysis=20", "--config.questioning.enabled=True",
    "--config.questioning.budget=6", "--config.env.name=travel", "--config.llm.url=policy",
    "--config.llm.context=1024", "--config.llm.shown=100", "--config.llm.judge.temperature=1.0",
    "--config.llm.judge.max_tokens=96", "--config.learner.row=1024", "--config.steps=1",
    "--config.eval.every=0",
)  # fmt: skip


def test_the_judge_of_multi_agent_trains_and_raises_no_alarm(tiny, tmp_path):
    """A policy of random weights writes no judgement by itself, and a grammar writes all alike."""
    assert go(tiny, tmp_path / "run", *JUDGING) == 0
    last = figures(tmp_path / "run")[-1]
    assert last["multi_agent/judgements"] > 1 and last["multi_agent/usable"] == 0
    extra = rollouts_of(tmp_path / "run", "extra_000001")
    judged = [t for t in extra if t["task"].startswith("judge/")]
    assert len(judged) == last["multi_agent/judgements"]
    assert {t["fate"] for t in judged} == {"trained"} and {t["success"] for t in judged} == {
        True,
        False,
    }
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
        whole, parts = tmp_path / "whole", tmp_path / "parts"
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
        choose, fresh = Recipe.choose, []

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
        run, cache = tmp_path / "run", f"--config.llm.cache={straight / 'llm_cache'}"
        assert call(tiny, run, "--config.steps=1", cache) == 0
        assert asked(run) == 0 < asked(run, "hit")
        assert call(tiny, run) == 0
        assert asked(run) == figures(straight)[2]["llm/step_judge/calls"]
        assert figures(run, "llm/") == figures(straight, "llm/")

    def test_the_initial_policy_answers_as_it_did_before_the_updates(
        self, tiny, policy, straight, tmp_path
    ):
        run = tmp_path / "run"
        assert call(tiny, run, url=INITIAL_POLICY) == 0
        first, second = (figures(path, "llm/")[1] for path in (run, straight))
        assert first == second  # before the first update both policies are the same
        config = base.get_config()
        config.model.dtype, config.rollout.context = "float32", 128
        shape, params = hf.load(policy, mesh=None)
        engine, fresh = jax_engine(config, shape, params, 4), Tokenizer.load(policy)
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

    def test_asynchronous_rollouts_and_judges_in_threads_share_the_engine(self, tiny, tmp_path):
        words = ["--config.rollout.async_depth=1", "--config.steps=3"]
        assert call(tiny, tmp_path / "run", *words) == 0
        assert figures(tmp_path / "run")[-1]["step"] == 3 and asked(tmp_path / "run") > 0

    def test_a_judge_whose_questions_can_never_fit_is_refused(self, tiny, tmp_path, capsys):
        assert call(tiny, tmp_path / "run", LLM_JUDGE) == 2
        err = capsys.readouterr().err
        assert "config.llm.step_judge: the policy cannot answer" in err
        assert "within config.rollout.context=192: set config.llm.context" in err

    @pytest.mark.slow
    def test_a_judge_may_have_a_context_of_its_own(self, tiny, tmp_path):
        # A large window means few calls, and so few windows to compile.
        words = ["--config.steps=1", "--config.llm.context=2048", "--config.engine.prefill=1024"]
        assert call(tiny, tmp_path / "run", LLM_JUDGE, *words) == 0
        line = figures(tmp_path / "run")[1]
        assert line["llm/step_judge/calls"] and "llm/step_judge/failures/context" not in line

    def test_a_judge_whose_questions_hardly_fit_says_so_and_counts_them(
        self, tiny, tokenizer, tmp_path, capsys
    ):
        context = len(chat.opening(tokenizer, prompt("step_judge").empty())) + 1
        words = ["--config.steps=1", f"--config.llm.context={context}"]
        assert call(tiny, tmp_path / "run", LLM_JUDGE, *words) == 0
        assert "ALARM: the policy plays the step_judge" in capsys.readouterr().out
        line = figures(tmp_path / "run")[1]
        assert line["llm/step_judge/unanswered"] == line["llm/step_judge/failures/context"] > 0
        assert line["attributing/abstain_rate"] == 1.0


def test_the_policy_needs_no_model_and_no_price(tmp_path):
    prices = tmp_path / "prices.json"
    prices.write_text("{}")
    config = base.get_config()
    config.attributing.enabled, config.attributing.judge.name = True, "llm"
    config.llm.url, config.llm.budget_money, config.llm.prices = CURRENT_POLICY, 1.0, str(prices)
    assert not list(roles.llm_problems(config, "train"))


def test_a_role_stays_with_the_policy_when_a_run_resumes():
    config = base.get_config()
    config.llm.url, config.llm.judge.url = "http://a/v1", CURRENT_POLICY
    before = plain(config.to_dict())
    config.llm.url = "http://b/v1"
    assert not differences(before, config, base.Config)
    config.llm.judge.url = ""
    (problem,) = differences(before, config, base.Config)
    assert problem.startswith("llm.judge.url: 'policy' then, 'http://b/v1' now")


def test_the_plan_bills_the_policy_no_money_and_counts_a_second_engine():
    config = base.get_config()
    config.attributing.enabled, config.attributing.judge.name = True, "llm"
    config.llm.url, config.llm.concurrency, config.engine.slots = CURRENT_POLICY, 32, 64
    bill = calls.bill(config)["step_judge"]
    assert bill.model == "policy" and bill.cost == 0
    assert "costs no money" in "\n".join(calls.lines(config))

    def engine():
        return Case(config, qwen.PRESETS[config.model.preset], targets.parse("h100:1")).engine

    assert engine().initial == 0
    config.llm.url = INITIAL_POLICY
    assert engine().initial == engine().weights + engine().cache / 2
