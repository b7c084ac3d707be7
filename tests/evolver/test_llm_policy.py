"""Roles of config.llm that the policy plays: the engine's answers, their place in the cache, and what
of them can train."""

import asyncio
import contextlib
import functools
import time
from concurrent.futures import ThreadPoolExecutor

import jax
import numpy as np
import pytest

from configs import base
from evolver.build import make_responders
from evolver.llm.answers import array, record, string
from evolver.llm.client import Chat, Limits
from evolver.llm.policy import PolicyResponder, fingerprint, trajectory_of
from evolver.llm.questions import CURRENT_POLICY, INITIAL_POLICY, Question, Role
from evolver.llm.store import Cache
from evolver.processes.interrupt import Interrupted, Stop
from models import hf
from models.tokenizer import Tokenizer
from rl.engines import EngineFault
from rl.engines.grammar import Grammars
from rl.engines.jax.engine import JaxEngine
from rl.trajectory import Completion, Sampling
from tests.evolver.chat_server import ChatServer


class Fake:
    """An engine that answers with the tokens of a text, after `seconds`."""

    version = 0

    def __init__(self, tokenizer, text="yes", seconds=0.0, fault=None):
        self.tokenizer = tokenizer
        self.text = text
        self.seconds = seconds
        self.fault = fault
        self.asked = []
        self.released = []

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
        engine = Fake(tokenizer, **fake)
        lines = []
        judge = Role(CURRENT_POLICY, CURRENT_POLICY, temperature=0.5, max_tokens=50, extra=extra)
        chat = Chat(
            {"judge": judge, "writer": Role(server.url, "tiny")},
            limits=limits or Limits(attempts=2),
            cache=Cache(cache),
            check=check or stop.check,
            say=lines.append,
            loop=stop.loop,
        )
        chat.responders[CURRENT_POLICY] = PolicyResponder(engine, tokenizer, context, WEIGHTS)
        chat.engine = engine
        chat.lines = lines
        with contextlib.closing(chat):
            yield chat


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
            chat.responders[CURRENT_POLICY].grammars = Grammars(tokenizer, 400)
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
                chat.engine.version = version
                chat.engine.text = f"answer {version}"
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
        yes = played["Is it?"]
        unreadable = played["Score it."]
        assert yes.evaluation.success and not unreadable.evaluation.success
        assert yes.task.id != unreadable.task.id
        (only,) = yes.turns
        assert only.prompt == chat.engine.asked[0][0] and only.trains and only.action == "yes"
        assert only.completion.tokens == [*tokenizer.encode("yes"), tokenizer.im_end]
        assert only.completion.version == 0
        assert not only.completion.logprobs  # not at the learner's temperature
        chat.responders[CURRENT_POLICY].temperature = 0.5
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
        responder.grammars = Held()
        responder.temperature = 0.5
        chat.keeps = True
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
