"""Download models from the Hugging Face Hub."""

from __future__ import annotations

import re
from pathlib import Path

from models.hf_config import TOKENIZER_FILES, ModelError

ID = re.compile(r"(?!\.)[\w.-]+/[\w.-]+")
SMALL = ("config.json", "generation_config.json", *TOKENIZER_FILES)


def is_id(name: str) -> bool:
    """Return True if `name` has the form of a Hub id: owner/model."""
    return bool(ID.fullmatch(name))


def fetch(name: str, *, weights: bool = True) -> Path:
    """Return the local directory of a Hub model, downloading it if it is not in the cache.

    Without `weights`, only config and tokenizer are downloaded. Raises ModelError if there is no
    such model or the Hub cannot be reached.
    """
    from huggingface_hub import snapshot_download

    wanted = [*SMALL, "*.safetensors", "*.safetensors.index.json"] if weights else list(SMALL)
    try:
        return Path(snapshot_download(name, allow_patterns=wanted))
    except Exception as error:  # huggingface_hub and its transport raise a dozen types
        reason = " ".join(str(error).split()) or type(error).__name__
        raise ModelError(
            f"{name} is not a local directory and could not be downloaded from the Hugging Face"
            f" Hub: {reason[:500]} Log in if it is gated (`hf auth login`), or download it on a"
            " machine that can reach the Hub, and give its directory"
        ) from None
