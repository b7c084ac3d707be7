"""A client whose language models are scripts, for the tests of this folder."""

import pytest

from evolver.llm.client import Chat, Limits
from evolver.llm.questions import Role
from tests.evolver.chat_server import ChatServer

ROLES = ("explorer", "writer", "judge", "step_judge", "summariser", "reranker", "embedder")


@pytest.fixture
def chat_of():
    """A client whose every role is answered by a script."""
    open_ones = []

    def make(script, **limits) -> Chat:
        server = ChatServer(script).__enter__()
        options = {
            "first_wait": 0.01,
            "longest_wait": 0.02,
            "attempts": 2,
            "failures": 1000,
        } | limits
        roles = {name: Role(server.url, "tiny", max_tokens=500) for name in ROLES}
        chat = Chat(roles, limits=Limits(**options), say=lambda text: None)
        open_ones.extend([chat, server])
        chat.server = server
        return chat

    yield make
    for thing in open_ones:
        thing.__exit__() if isinstance(thing, ChatServer) else thing.close()
