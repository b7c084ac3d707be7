"""Where the files are that a config names."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).parents[1]


def resolve(path: str) -> Path:
    """A path as the user meant it: from here, or from the root of this code (where configs point to assets)."""
    here = Path(path).expanduser()
    return here if here.exists() or here.is_absolute() else ROOT / path if (ROOT / path).exists() else here


def model_folder(path: str, *, weights: bool = False) -> Path:
    """The directory of `model.path`: itself, or where the hub's model of that id lies, downloaded if need be.

    Without `weights`, config and tokenizer only. Raises models.hf.ModelError.
    """
    folder = resolve(path)
    if folder.exists() or folder.is_absolute():
        return folder
    from models import hub

    return hub.fetch(path, weights=weights) if hub.is_id(path) else folder
