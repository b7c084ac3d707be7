"""Serve the word vectors of the package `wordllama` as an OpenAI-compatible `/v1/embeddings`, to
measure `endpoint`.

    pip install --no-deps 'wordllama>=0.4,<0.5'    # 19 MB: 256-dimensional vectors, 32,000 tokens
    python -m experiments.bench.embeddings --port 8012

A text's vector is the mean of its tokens' vectors. No other server of embeddings comes from the
package index alone.
"""

import contextlib
import importlib.util
import json
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file
from tokenizers import Tokenizer

from envs.values import Json
from experiments import commands


class Server(ThreadingHTTPServer):
    """A server of the vectors in a folder of the package. port: 0 = any free one."""

    def __init__(self, folder: Path, port: int):
        super().__init__(("127.0.0.1", port), Handler)
        tokenizer = folder / "tokenizers" / "l2_supercat_tokenizer_config.json"
        self.tokenizer = Tokenizer.from_file(str(tokenizer))
        weights = load_file(folder / "weights" / "l2_supercat_256.safetensors")
        self.table_VD = weights["embedding.weight"]

    def vector(self, text: str) -> np.ndarray:
        """Return the mean vector of a text, float32 (D,); zeros for a text without tokens."""
        ids = self.tokenizer.encode(text, add_special_tokens=False).ids
        return self.table_VD[ids].astype(np.float32).sum(0) / max(len(ids), 1)


class Handler(BaseHTTPRequestHandler):
    """Answers the requests of a server."""

    server: Server

    def do_GET(self) -> None:
        self.reply({"object": "list", "data": [{"id": "wordllama", "object": "model"}]})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers.get("Content-Length", 0))))
        texts = [body["input"]] if isinstance(body["input"], str) else body["input"]
        found = [self.server.vector(text).tolist() for text in texts]
        data = [
            {"object": "embedding", "index": n, "embedding": vector}
            for n, vector in enumerate(found)
        ]
        usage = {"prompt_tokens": sum(len(self.server.tokenizer.encode(t).ids) for t in texts)}
        self.reply({"object": "list", "model": "wordllama", "data": data, "usage": usage})

    def reply(self, value: Json) -> None:
        content = json.dumps(value).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: Any) -> None:
        """Print nothing."""


def main(*, port: int = 8012) -> None:
    """Serve until Ctrl-C."""
    spec = importlib.util.find_spec("wordllama")
    if spec is None or spec.origin is None:
        hint = "pip install --no-deps 'wordllama>=0.4,<0.5'"
        raise commands.Problems(f"wordllama is not installed: {hint}")
    with Server(Path(spec.origin).parent, port) as server:
        print(f"embeddings on http://127.0.0.1:{server.server_port}/v1", flush=True)
        with contextlib.suppress(KeyboardInterrupt):
            server.serve_forever()


if __name__ == "__main__":
    commands.program(main)
