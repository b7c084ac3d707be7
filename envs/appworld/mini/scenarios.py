"""The tasks of the mini data set: scenarios of three variants, each with a solution and its
expected effects.

Variant n of a scenario is about person n. The expected answer and changes are computed from
`data.tables`, whereas the solution uses the apps' APIs, so each checks the other when the engine
evaluates the solution. Task ids and random
draws depend on the names of functions here and in data.py: renaming a function changes them.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from envs.appworld.mini import data
from envs.appworld.mini.data import (
    GENRES,
    NOW,
    SUPERVISORS,
    contacts,
    email,
    name,
    phone,
    related,
    rows,
)

SPLITS = ("train", "dev", "test_normal")


@dataclass
class Draft:
    """The content of a task. `solution` lists code blocks; mini/evaluation.py defines `changes` and
    `touched`."""

    instruction: str
    solution: list[str]
    answer: Any = None
    changes: dict[str, dict[str, list[dict[str, Any]]]] = field(default_factory=dict)
    touched: list[str] = field(default_factory=list)


@dataclass
class MiniTask:
    """A draft with its id "<scenario>_<variant>", its split and the person it is about."""

    id: str
    split: str
    person: int
    draft: Draft

    @property
    def apps(self) -> list[str]:
        code = "\n".join(self.draft.solution)
        return [app for app in data.APPS if f"apis.{app}." in code]

    @property
    def turns(self) -> list[str]:
        """Return the solution as assistant turns."""
        return [
            f"{THOUGHTS[min(i, 2)]}\n```python\n{code}\n```"
            for i, code in enumerate(self.draft.solution)
        ]


THOUGHTS = ("I log in first.", "Next I look up what I need.", "Now I do it and complete the task.")

SETUP = '''\
passwords = {account["account_name"]: account["password"] for account in \
apis.supervisor.show_account_passwords()}
profile = apis.supervisor.show_profile()

def every(api, **arguments):
    """All pages of a list."""
    found, page = [], 0
    while batch := api(page_index=page, page_limit=20, **arguments):
        found += batch
        page += 1
    return found
'''
DONE = "apis.supervisor.complete_task()"
ANSWER = "apis.supervisor.complete_task(answer=answer)"


def _setup(*apps: str) -> str:
    lines = [SETUP]
    for app in apps:
        user = "phone_number" if app == "phone" else "email"
        login = f'apis.{app}.login(username=profile["{user}"], password=passwords["{app}"])'
        lines.append(f'{app} = {login}["access_token"]')
    lines.append(f"print({', '.join(apps)})")
    return "\n".join(lines)


# ------------------------------------------------------------------------------------------ spotify


def _library(user: int) -> list[dict[str, Any]]:
    songs = rows("spotify.Song")
    return [songs[row["song_id"] - 1] for row in rows("spotify.UserLibrarySong", user_id=user)]


def _most_played(user: int) -> Draft:
    genre = GENRES[user]
    best = max(
        (song for song in _library(user) if song["genre"] == genre),
        key=lambda song: song["play_count"],
    )
    find = f"""\
library = every(apis.spotify.show_song_library, access_token=spotify)
songs = [apis.spotify.show_song(song_id=entry["song_id"]) for entry in library]
songs = [song for song in songs if song["genre"] == "{genre}"]
print([(song["title"], song["play_count"]) for song in songs])"""
    act = f'answer = max(songs, key=lambda song: song["play_count"])["title"]\n{ANSWER}'
    return Draft(
        f"Which {genre} song in my Spotify song library has been played the most? Give me its "
        "title.",
        [_setup("spotify"), find, act],
        answer=best["title"],
    )


def _like_genre(user: int) -> Draft:
    genre = GENRES[user - 1]
    liked = {row["song_id"] for row in rows("spotify.SongLike", user_id=user)}
    wanted = [
        song["id"] for song in _library(user) if song["genre"] == genre and song["id"] not in liked
    ]
    find = f"""\
library = every(apis.spotify.show_song_library, access_token=spotify)
songs = [apis.spotify.show_song(song_id=entry["song_id"]) for entry in library]
liked = {{song["song_id"] for song in every(apis.spotify.show_liked_songs, access_token=spotify)}}
songs = [song for song in songs if song["genre"] == "{genre}" and song["song_id"] not in liked]
print([song["title"] for song in songs])"""
    act = f"""\
for song in songs:
    apis.spotify.like_song(song_id=song["song_id"], access_token=spotify)
{DONE}"""
    return Draft(
        f"Like every {genre} song in my Spotify song library that I have not liked yet.",
        [_setup("spotify"), find, act],
        changes={
            "spotify.SongLike": {"added": [{"user_id": user, "song_id": song} for song in wanted]}
        },
        touched=["spotify.Song"],
    )


def _artist_playlist(user: int) -> Draft:
    counts = {
        a["id"]: sum(a["id"] in song["artist_ids"] for song in _library(user))
        for a in rows("spotify.Artist")
    }
    artist = rows("spotify.Artist")[max(counts, key=counts.__getitem__) - 1]
    title = f"All {artist['name']}"
    playlist = len(rows("spotify.Playlist")) + 1
    songs = [song["id"] for song in _library(user) if artist["id"] in song["artist_ids"]]
    find = f"""\
library = every(apis.spotify.show_song_library, access_token=spotify)
songs = [song for song in library if "{artist["name"]}" in [artist["name"] for artist in \
song["artists"]]]
print([song["title"] for song in songs])"""
    act = f"""\
playlist = apis.spotify.create_playlist(title="{title}", access_token=spotify)["playlist_id"]
for song in songs:
    apis.spotify.add_song_to_playlist(playlist_id=playlist, song_id=song["song_id"], \
access_token=spotify)
{DONE}"""
    return Draft(
        f"Make a Spotify playlist called '{title}' with the songs by {artist['name']} that are in "
        "my song library.",
        [_setup("spotify"), find, act],
        changes={
            "spotify.Playlist": {"added": [{"id": playlist, "user_id": user, "title": title}]},
            "spotify.PlaylistSong": {
                "added": [{"playlist_id": playlist, "song_id": song} for song in songs]
            },
        },
    )


def _follow_artists(user: int) -> Draft:
    playlist = rows("spotify.Playlist", user_id=user)[user - 1]
    songs = [row["song_id"] for row in rows("spotify.PlaylistSong", playlist_id=playlist["id"])]
    artists = {artist for song in songs for artist in rows("spotify.Song")[song - 1]["artist_ids"]}
    artists -= {row["artist_id"] for row in rows("spotify.UserArtistFollowing", user_id=user)}
    find = f"""\
playlists = every(apis.spotify.show_playlist_library, access_token=spotify)
playlist = next(playlist for playlist in playlists if playlist["title"] == "{playlist["title"]}")
songs = [apis.spotify.show_song(song_id=song) for song in playlist["song_ids"]]
wanted = {{artist["id"] for song in songs for artist in song["artists"]}}
wanted -= {{artist["artist_id"] for artist in every(apis.spotify.show_following_artists, \
access_token=spotify)}}
print(sorted(wanted))"""
    act = f"""\
for artist in sorted(wanted):
    apis.spotify.follow_artist(artist_id=artist, access_token=spotify)
{DONE}"""
    return Draft(
        f"Follow all artists with a song in my Spotify playlist '{playlist['title']}', unless I "
        "follow them already.",
        [_setup("spotify"), find, act],
        changes={
            "spotify.UserArtistFollowing": {
                "added": [{"user_id": user, "artist_id": a} for a in sorted(artists)]
            },
        },
        touched=["spotify.Artist"],
    )


# ---------------------------------------------------------------------------------- venmo and phone


def _total_received(user: int) -> Draft:
    other = contacts(user)[user][0]
    received = rows("venmo.Transaction", sender_id=other, receiver_id=user)
    amounts = [
        row["amount"]
        for row in received
        if row["created_at"] >= NOW.replace(month=1, day=1, hour=0, minute=0)
    ]
    find = f"""\
received = every(
    apis.venmo.show_transactions,
    access_token=venmo,
    user_email="{email(other)}",
    direction="received",
    min_created_at="{NOW.year}-01-01",
)
print(received)"""
    act = f'answer = round(sum(transaction["amount"] for transaction in received), 2)\n{ANSWER}'
    return Draft(
        f"How many dollars have I received on Venmo from {name(other)} ({email(other)}) this "
        "year, in total?",
        [_setup("venmo"), find, act],
        answer=round(sum(amounts), 2),
    )


def _deny_requests(user: int) -> Draft:
    other = contacts(user)[0][0]
    requests = rows("venmo.PaymentRequest", sender_id=other, receiver_id=user)
    find = f"""\
pending = every(apis.venmo.show_received_payment_requests, access_token=venmo, status="pending")
pending = [request for request in pending if request["sender"]["email"] == "{email(other)}"]
print(pending)"""
    act = f"""\
for request in pending:
    apis.venmo.deny_payment_request(payment_request_id=request["payment_request_id"], \
access_token=venmo)
{DONE}"""
    return Draft(
        f"Deny all pending Venmo payment requests that {name(other)} has sent me.",
        [_setup("venmo"), find, act],
        changes={
            "venmo.PaymentRequest": {
                "updated": [
                    {"id": row["id"], "approved_at": None, "denied_at": NOW.isoformat()}
                    for row in requests
                ]
            }
        },
        touched=["venmo.Notification"],
    )


def _pay_related(user: int) -> Draft:
    relationship, reason = (
        ("roommate", "rent share"),
        ("coworker", "team lunch"),
        ("sibling", "flowers for mum"),
    )[user - 1]
    amount = 10.0 + 2.5 * user
    sent = [
        {"sender_id": user, "receiver_id": other, "amount": amount, "description": reason}
        for other in related(user, relationship)
    ]
    find = f"""\
people = every(apis.phone.search_contacts, access_token=phone, relationship="{relationship}")
print([(person["first_name"], person["email"]) for person in people])"""
    act = f"""\
for person in people:
    apis.venmo.create_transaction(
        receiver_email=person["email"], amount={amount}, description="{reason}", access_token=venmo
    )
{DONE}"""
    return Draft(
        f"Send ${amount:.2f} on Venmo to everyone who is a {relationship} in my phone's contacts,"
        f" each with the description '{reason}'.",
        [_setup("venmo", "phone"), find, act],
        changes={"venmo.Transaction": {"added": sent}},
        touched=["venmo.User", "venmo.Notification"],
    )


def _request_money(user: int) -> Draft:
    relationship = ("coworker", "roommate", "coworker")[user - 1]
    people = related(user, relationship)
    total = (45.0, 60.0, 81.0)[user - 1]
    share = total / (len(people) + 1)
    asked = [
        {
            "sender_id": user,
            "receiver_id": other,
            "amount": share,
            "description": "dinner on Tuesday",
        }
        for other in people
    ]
    find = f"""\
people = every(apis.phone.search_contacts, access_token=phone, relationship="{relationship}")
share = {total} / (len(people) + 1)
print(share, [person["email"] for person in people])"""
    act = f"""\
for person in people:
    apis.venmo.create_payment_request(
        user_email=person["email"], amount=share, description="dinner on Tuesday", \
access_token=venmo
    )
{DONE}"""
    return Draft(
        f"I paid ${total:.2f} for a dinner with all my {relationship}s (they are in my phone's "
        "contacts). Split it"
        " equally among all of us, me included, and request each one's share on Venmo with the "
        "description"
        " 'dinner on Tuesday'.",
        [_setup("venmo", "phone"), find, act],
        changes={"venmo.PaymentRequest": {"added": asked}},
        touched=["venmo.Notification"],
    )


def _shift_alarm(user: int) -> Draft:
    label = ("wake up", "gym", "medication")[user - 1]
    alarm = rows("phone.Alarm", user_id=user, label=label)[0]
    minutes = (25, -20, 40)[user - 1]
    hour, minute = map(int, alarm["time"].split(":"))
    hour, minute = divmod(hour * 60 + minute + minutes, 60)
    find = f"""\
alarm = next(a for a in every(apis.phone.show_alarms, access_token=phone) if a["label"] == \
"{label}")
print(alarm)"""
    act = f"""\
hour, minute = map(int, alarm["time"].split(":"))
hour, minute = divmod(hour * 60 + minute + {minutes}, 60)
apis.phone.update_alarm(alarm_id=alarm["alarm_id"], time=f"{{hour:02d}}:{{minute:02d}}", \
access_token=phone)
{DONE}"""
    direction = "later" if minutes > 0 else "earlier"
    return Draft(
        f"Set the '{label}' alarm on my phone {abs(minutes)} minutes {direction}. Leave my other "
        "alarms alone.",
        [_setup("phone"), find, act],
        changes={
            "phone.Alarm": {
                "updated": [{"id": alarm["id"], "time": f"{hour:02d}:{minute:02d}", "label": label}]
            }
        },
    )


def _text_related(user: int) -> Draft:
    relationship, message = (
        ("sibling", "I will call you tonight."),
        ("doctor", "May I come on Monday at nine?"),
        ("roommate", "The plumber comes at noon."),
    )[user - 1]
    people = related(user, relationship)
    find = f"""\
people = every(apis.phone.search_contacts, access_token=phone, relationship="{relationship}")
print([(person["first_name"], person["phone_number"]) for person in people])"""
    act = f"""\
for person in people:
    apis.phone.send_text_message(phone_number=person["phone_number"], message="{message}", \
access_token=phone)
{DONE}"""
    many = "each" if len(people) > 1 else "the one"
    return Draft(
        f"Send a text message to {many} of my phone's contacts who is my {relationship}. It "
        f"should say: {message}",
        [_setup("phone"), find, act],
        changes={
            "phone.GlobalTextMessage": {
                "added": [
                    {"sender_id": user, "receiver_id": other, "message": message}
                    for other in people
                ]
            },
        },
        touched=["phone.UserTextMessage"],
    )


def _count_texts(user: int) -> Draft:
    texts = rows("phone.GlobalTextMessage", receiver_id=user)
    counts = {other: sum(row["sender_id"] == other for row in texts) for other, _ in contacts(user)}
    other = max(counts, key=lambda person: (counts[person], -person))
    find = f"""\
person = every(apis.phone.search_contacts, access_token=phone, query="{name(other)}")[0]
texts = every(apis.phone.search_text_messages, access_token=phone, \
phone_number=person["phone_number"])
print(texts)"""
    act = f"""\
answer = sum(text["sender"]["phone_number"] == person["phone_number"] for text in texts)
{ANSWER}"""
    return Draft(
        f"How many text messages has {name(other)} sent me? They are on my phone.",
        [_setup("phone"), find, act],
        answer=counts[other],
    )


# --------------------------------------------------------------------- notes, to-do lists and files


def _append_groceries(user: int) -> Draft:
    item = ("peanut butter", "paper towels", "green tea")[user - 1]
    note = rows("simple_note.Note", user_id=user, title="Groceries")[0]
    find = """\
note = next(n for n in every(apis.simple_note.search_notes, access_token=simple_note) if \
n["title"] == "Groceries")
note = apis.simple_note.show_note(note_id=note["note_id"], access_token=simple_note)
print(note["content"])"""
    act = f"""\
content = note["content"] + "\\n- {item}"
apis.simple_note.update_note(note_id=note["note_id"], content=content, access_token=simple_note)
{DONE}"""
    return Draft(
        f"Put {item} at the end of the list in my Simple Note 'Groceries', on a line of its own "
        "that looks like the"
        " others.",
        [_setup("simple_note"), find, act],
        changes={
            "simple_note.Note": {
                "updated": [{"id": note["id"], "content": f"{note['content']}\n- {item}"}]
            }
        },
    )


def _note_to_tasks(user: int) -> Draft:
    note = rows("simple_note.Note", user_id=user, title="Packing list")[0]
    project = rows("todoist.Project", user_id=user, name="Trip")[0]
    items = [line.removeprefix("- ") for line in note["content"].splitlines()]
    find = """\
note = next(n for n in every(apis.simple_note.search_notes, access_token=simple_note) if \
n["title"] == "Packing list")
content = apis.simple_note.show_note(note_id=note["note_id"], access_token=simple_note)["content"]
project = next(p for p in every(apis.todoist.show_projects, access_token=todoist) if p["name"] == \
"Trip")
print(content, project)"""
    act = f"""\
for line in content.splitlines():
    title = "pack " + line.removeprefix("- ")
    apis.todoist.create_task(project_id=project["project_id"], title=title, priority="high", \
access_token=todoist)
{DONE}"""
    added = [
        {"project_id": project["id"], "title": f"pack {item}", "priority": "high"} for item in items
    ]
    return Draft(
        "For each item of my Simple Note 'Packing list', add a high-priority task to my Todoist "
        "project 'Trip' that is"
        " titled 'pack ' and the item, for example 'pack toothbrush'.",
        [_setup("simple_note", "todoist"), find, act],
        changes={"todoist.Task": {"added": added}},
    )


TASKS_OF = """\
project = next(p for p in every(apis.todoist.show_projects, access_token=todoist) if p["name"] == \
"{project}")
listed = apis.todoist.show_tasks(project_id=project["project_id"], access_token=todoist)
tasks = listed["no_section_tasks"]
print([(task["title"], task["priority"], task["is_completed"]) for task in tasks])"""


def _open_tasks(user: int, project: str, priority: str) -> list[dict[str, Any]]:
    project_id = rows("todoist.Project", user_id=user, name=project)[0]["id"]
    return rows("todoist.Task", project_id=project_id, priority=priority, is_completed=False)


def _complete_priority(user: int) -> Draft:
    project, priority = (("Home", "high"), ("Work", "high"), ("Home", "low"))[user - 1]
    done = [
        {"id": task["id"], "is_completed": True} for task in _open_tasks(user, project, priority)
    ]
    act = f"""\
for task in tasks:
    if task["priority"] == "{priority}" and not task["is_completed"]:
        apis.todoist.update_task(task_id=task["task_id"], is_completed=True, access_token=todoist)
{DONE}"""
    return Draft(
        f"Mark every {priority}-priority task in my Todoist project '{project}' as completed.",
        [_setup("todoist"), TASKS_OF.format(project=project), act],
        changes={"todoist.Task": {"updated": done}},
    )


def _count_open(user: int) -> Draft:
    project, priority = (("Work", "high"), ("Home", "high"), ("Work", "low"))[user - 1]
    act = f"""\
answer = sum(task["priority"] == "{priority}" and not task["is_completed"] for task in tasks)
{ANSWER}"""
    return Draft(
        f"How many {priority}-priority tasks of my Todoist project '{project}' are still open?",
        [_setup("todoist"), TASKS_OF.format(project=project), act],
        answer=len(_open_tasks(user, project, priority)),
    )


def _move_files(user: int) -> Draft:
    extension = ("pdf", "txt", "pdf")[user - 1]
    moved = [
        row
        for row in rows("file_system.File", user_id=user)
        if row["path"].startswith("~/downloads/") and row["path"].endswith(f".{extension}")
    ]
    find = f"""\
paths = apis.file_system.show_directory(
    directory_path="~/downloads/", entry_type="files", access_token=file_system
)
paths = [path for path in paths if path.endswith(".{extension}")]
print(paths)"""
    act = f"""\
for path in paths:
    target = "~/documents/papers/" + path.split("/")[-1]
    apis.file_system.move_file(source_file_path=path, destination_file_path=target, \
access_token=file_system)
{DONE}"""
    return Draft(
        f"Move all .{extension} files from ~/downloads/ to ~/documents/papers/ in my file system, "
        "under the same"
        " names.",
        [_setup("file_system"), find, act],
        changes={
            "file_system.File": {
                "added": [
                    {
                        "user_id": user,
                        "tilde_path": "~/documents/papers/" + row["path"].split("/")[-1],
                        "content": row["content"],
                    }
                    for row in moved
                ],
                "removed": [{"id": row["id"]} for row in moved],
            }
        },
    )


SCENARIOS: dict[str, tuple[Callable[[int], Draft], ...]] = {
    "train": (
        _most_played,
        _like_genre,
        _total_received,
        _pay_related,
        _shift_alarm,
        _append_groceries,
        _complete_priority,
        _move_files,
    ),
    "dev": (_artist_playlist, _deny_requests, _count_texts, _count_open),
    "test_normal": (_follow_artists, _request_money, _text_related, _note_to_tasks),
}


@functools.cache
def mini_tasks() -> tuple[MiniTask, ...]:
    """Return all tasks in the order of their splits and scenarios."""
    tasks = []
    for split, scenarios in SCENARIOS.items():
        for scenario in scenarios:
            key = hashlib.blake2b(scenario.__name__.strip("_").encode(), digest_size=4).hexdigest()[
                :7
            ]
            tasks += [
                MiniTask(f"{key}_{n}", split, n, scenario(n)) for n in range(1, SUPERVISORS + 1)
            ]
    return tuple(tasks)


def person_fields(person: int) -> dict[str, str]:
    """Return the fields with which AppWorld describes a supervisor."""
    first, last, _ = data.PEOPLE[person - 1]
    return {
        "first_name": first,
        "last_name": last,
        "email": email(person),
        "phone_number": phone(person),
    }
