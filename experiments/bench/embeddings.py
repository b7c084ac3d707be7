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

from experiments import commands


class Vectors:
    """The vectors and the tokenizer in a folder of the package."""

    def __init__(self, folder: Path):
        self.tokenizer = Tokenizer.from_file(
            str(folder / "tokenizers" / "l2_supercat_tokenizer_config.json")
        )
        self.table_VD = load_file(folder / "weights" / "l2_supercat_256.safetensors")[
            "embedding.weight"
        ]

    def __call__(self, text: str) -> np.ndarray:
        """Return the mean vector of a text, float32 (D,); zeros for a text without tokens."""
        ids = self.tokenizer.encode(text, add_special_tokens=False).ids
        return (
            self.table_VD[ids].astype(np.float32).mean(0)
            if ids
            else np.zeros(self.table_VD.shape[1], np.float32)
        )


def handler(vectors: Vectors) -> type[BaseHTTPRequestHandler]:
    """Return the class that answers the requests of a server."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.reply({"object": "list", "data": [{"id": "wordllama", "object": "model"}]})

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers.get("Content-Length", 0))))
            texts = [body["input"]] if isinstance(body["input"], str) else body["input"]
            data = [
                {"object": "embedding", "index": n, "embedding": vectors(t).tolist()}
                for n, t in enumerate(texts)
            ]
            usage = {"prompt_tokens": sum(len(vectors.tokenizer.encode(t).ids) for t in texts)}
            self.reply({"object": "list", "model": "wordllama", "data": data, "usage": usage})

        def reply(self, value: dict[str, Any]) -> None:
            content = json.dumps(value).encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, format: str, *args: Any) -> None:
            pass

    return Handler


def main(*, port: int = 8012) -> None:
    """Serve until Ctrl-C."""
    spec = importlib.util.find_spec("wordllama")
    if spec is None or spec.origin is None:
        hint = "pip install --no-deps 'wordllama>=0.4,<0.5'"
        raise commands.Problems(f"wordllama is not installed: {hint}")
    vectors = Vectors(Path(spec.origin).parent)
    with ThreadingHTTPServer(("127.0.0.1", port), handler(vectors)) as server:
        print(f"embeddings on http://127.0.0.1:{server.server_port}/v1", flush=True)
        with contextlib.suppress(KeyboardInterrupt):
            server.serve_forever()


if __name__ == "__main__":
    commands.program(main)
