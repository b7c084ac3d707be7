"""Notes that say when they were made, by the clock."""

import time

_notes: dict[str, tuple[str, str]] = {}


def reset(seed: int) -> None:
    _notes.clear()
    _notes.update({f"J{seed % 89 + n}": (word, _now()) for n, word in enumerate(("milk", "rent"))})


def list_notes() -> str:
    """List the notes."""
    rows = (f"{id} {text} | made: {when}" for id, (text, when) in _notes.items())
    return "\n".join(rows)


def change_note(id: str, text: str) -> str:
    """Change the text of a note."""
    if id not in _notes:
        raise KeyError(f"no note {id}")
    _notes[id] = (text, _now())
    return "changed"


def _now() -> str:
    return time.strftime("%a %d %H:%M:%S")
