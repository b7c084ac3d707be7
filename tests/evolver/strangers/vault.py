"""Notes of several people. Every call takes the token of a login, which is another one each time."""

import random
import secrets

_passwords: dict[str, str] = {}
_owners: dict[str, str] = {}
_notes: dict[str, dict[str, dict]] = {}


def reset(seed: int) -> None:
    rng = random.Random(seed)
    for table in (_passwords, _owners, _notes):
        table.clear()
    for user in rng.sample(["alice", "bruno", "carla", "dmitri", "elena"], 3):
        _passwords[user] = "".join(rng.choice("abcdefgh") for _ in range(6))
        titles = rng.sample(["groceries", "taxes", "gift ideas", "passwords"], 3)
        _notes[user] = {f"n{rng.randint(100, 999)}": {"title": t, "locked": False} for t in titles}


def show_accounts() -> list[dict[str, str]]:
    """List all accounts with their passwords."""
    return [{"user": user, "password": word} for user, word in _passwords.items()]


def login(user: str, password: str) -> dict[str, str]:
    """Log in and get a token."""
    if _passwords.get(user) != password:
        raise PermissionError("wrong user or password")
    token = f"tok_{secrets.token_hex(4)}0"
    _owners[token] = user
    return {"token": token}


def list_notes(token: str) -> list[dict]:
    """List your notes."""
    return [{"note_id": id, **note} for id, note in _of(token).items()]


def rename_note(token: str, note_id: str, title: str) -> str:
    """Give a note another title."""
    _unlocked(token, note_id)["title"] = title
    return "renamed"


def lock_note(token: str, note_id: str) -> str:
    """Lock a note against changes."""
    _unlocked(token, note_id)["locked"] = True
    return "locked"


def delete_note(token: str, note_id: str) -> str:
    """Delete a note."""
    _unlocked(token, note_id)
    del _of(token)[note_id]
    return "deleted"


def _of(token: str) -> dict[str, dict]:
    if token not in _owners:
        raise PermissionError("the token is not valid")
    return _notes[_owners[token]]


def _unlocked(token: str, note_id: str) -> dict:
    if note_id not in _of(token):
        raise KeyError(f"no note {note_id}")
    if _of(token)[note_id]["locked"]:
        raise ValueError("the note is locked")
    return _of(token)[note_id]
