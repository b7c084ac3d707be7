"""A model's files by the name a user gives: a directory, or an id on the Hugging Face hub."""

from __future__ import annotations

import re
from pathlib import Path

from models.hf import TOKENIZER_FILES, ModelError

ID = re.compile(r"[\w.-]+/[\w.-]+")
SMALL = ("config.json", "generation_config.json", *TOKENIZER_FILES)


def is_id(name: str) -> bool:
    """Whether a name that is no directory could be one of the hub's: owner/model."""
    return bool(ID.fullmatch(name)) and not name.startswith(".")


def fetch(name: str, *, weights: bool = True) -> Path:
    """The directory of a hub id, downloaded if it is not in the cache; without `weights`, config and tokenizer only.

    Raises ModelError: no such model, no way to the hub.
    """
    from huggingface_hub import snapshot_download

    wanted = [*SMALL, "*.safetensors", "*.safetensors.index.json"] if weights else list(SMALL)
    try:
        return Path(snapshot_download(name, allow_patterns=wanted))
    except Exception as error:  # of a dozen kinds, most of the transport's
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ModelError(
            f"{name} is no directory here, and the Hugging Face hub did not give it: {reason}. Download it where there "
            "is a way to the hub, and give its directory"
        ) from None
