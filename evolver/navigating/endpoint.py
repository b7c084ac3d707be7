"""Embeddings from a server: the `/embeddings` route of any OpenAI-compatible one."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from evolver.llm import Chat, ChatError, ServerDown


class EndpointEmbedder:
    """An Embedder (evolver/navigating/embed.py) that asks a role of the chat client. Vectors are cached by text.

    The first call asks for one vector, to know how long they are. Where the server does not answer, nothing can be
    searched or kept, so the run ends (ServerDown).
    """

    def __init__(self, chat: Chat, role: str = "embedder"):
        self.chat, self.role, self.name = chat, role, f"endpoint-{chat.roles[role].model}"
        self.dims = self._vectors(["dimensions"]).shape[1]

    def __call__(self, texts: Sequence[str]) -> np.ndarray:
        if not texts:
            return np.zeros((0, self.dims), np.float32)
        vectors_ND = self._vectors([text or " " for text in texts])  # servers refuse empty texts
        if vectors_ND.shape[1] != self.dims:
            raise ServerDown(f"{self.name} gives vectors of {vectors_ND.shape[1]} numbers, before it gave {self.dims}")
        return vectors_ND / np.maximum(np.linalg.norm(vectors_ND, axis=1, keepdims=True), 1e-12)

    def _vectors(self, texts: Sequence[str]) -> np.ndarray:
        try:
            return np.array(self.chat.embed(texts, role=self.role), np.float32)
        except ChatError as error:
            raise ServerDown(f"experience cannot be searched without embeddings: {error}") from None
        except ValueError:
            raise ServerDown(f"{self.name} gives vectors of different lengths") from None
