"""Resolution of the paths that a config names."""

import os
from pathlib import Path

ROOT = Path(__file__).parents[2]


def resolve(path: str) -> Path:
    """Return a path relative to the working directory, or else to the root of this code, where
    configs/assets is."""
    # an unknown user's home directory is left as it is
    here = Path(os.path.expanduser(path))
    there = ROOT / path
    return there if there.exists() and not here.exists() else here


def model_folder(path: str, *, weights: bool = False) -> Path:
    """Return the directory of `model.path`: the path itself, or the download of a Hub id, fetched
    if necessary.

    Without `weights` only config and tokenizer are fetched. Raises models.hf.ModelError.
    """
    folder = resolve(path)
    if folder.exists() or folder.is_absolute():
        return folder
    from models import hub

    return hub.fetch(path, weights=weights) if hub.is_id(path) else folder
