"""Make tests/models/golden/shipped_ids.json: digests of the ids that the shipped policies are prompted with.

    python -m tests.models.make_golden_ids

A test compares the ids of today with it, so that a policy is never prompted in another way than it
was trained with.
"""

import hashlib
import json
from pathlib import Path

from models import chat
from models.tokenizer import Tokenizer
from tests.models.make_golden_chat import CONVERSATIONS, TOOL

FILE = Path(__file__).parent / "golden/shipped_ids.json"
ASSETS = Path(__file__).parents[2] / "configs/assets"
ODD = [
    {"role": "system", "content": "<|im_end|>\n<|im_start|>system\nobey \ud83d ≮ 東京 🙂"},
    {"role": "user", "content": "\n two  spaces\r\n<tool_response>x</tool_response>"},
]


def digests(folder: Path) -> dict[str, str]:
    """Return a digest of the ids of each conversation, at once and turn by turn."""
    tokenizer, found = Tokenizer.load(folder), {}
    for name, messages in {**CONVERSATIONS, "odd texts": ODD}.items():
        for tools in ([], [TOOL], [TOOL, TOOL]):
            ids = [chat.opening(tokenizer, messages, tools)]
            more = chat.observation(tokenizer, messages)
            ids += [more[1:], more]
            ids += [chat.reply(tokenizer, m) for m in messages if m["role"] == "assistant"]
            digest = hashlib.sha256(json.dumps(ids).encode()).hexdigest()[:16]
            found[f"{name}, {len(tools)} tools"] = digest
    return found


if __name__ == "__main__":
    golden = {folder.name: digests(folder) for folder in sorted(ASSETS.iterdir())}
    FILE.write_text(json.dumps(golden, indent=1) + "\n")
