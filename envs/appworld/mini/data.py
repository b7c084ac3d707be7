"""The people of the mini data set and the content of their accounts. All of it is invented; none is
AppWorld's data.

`tables()` returns the rows of every table of the base databases in the order of their creation. The
id of a row is its position, counted from 1, and rows refer to each other by id.
"""

from __future__ import annotations

import datetime as dt
import functools
import random
from typing import Any

Row = dict[str, Any]

NOW = dt.datetime(2024, 3, 14, 9, 30)  # a Thursday; every task's clock is frozen at this time
APPS = ("spotify", "venmo", "phone", "simple_note", "todoist", "file_system")
GENRES = ("pop", "jazz", "rock", "folk")

# The first three are the tasks' supervisors: variant n of a scenario is about person n.
PEOPLE = (
    ("Mira", "Okafor", "1991-07-02"),
    ("Jonas", "Weber", "1988-11-23"),
    ("Leila", "Haddad", "1995-01-30"),
    ("Tomas", "Ruiz", "1990-04-17"),
    ("Priya", "Nair", "1993-09-05"),
    ("Owen", "Clarke", "1987-12-11"),
    ("Sofia", "Marino", "1996-06-26"),
    ("Kenji", "Mori", "1992-02-08"),
)
SUPERVISORS = 3
RELATIONSHIPS = (
    ["roommate"],
    ["roommate", "friend"],
    ["sibling"],
    ["coworker"],
    ["coworker", "friend"],
    ["doctor"],
)

_ARTISTS = (
    "Nova Reed",
    "Juno Park",
    "The Salt Flats",
    "Ida Lind",
    "Marlow Finch",
    "Coastal Kin",
    "Vera Sand",
    "Dune Ten",
)
_FIRST = (
    "Blue",
    "Quiet",
    "Glass",
    "Paper",
    "Winter",
    "Copper",
    "Silver",
    "Hollow",
    "Golden",
    "Distant",
)
_SECOND = ("Kite", "Rail", "Tide", "Lantern", "Orchard")
_PLAYLISTS = (
    ("Morning Run", "Slow Sunday", "Deep Focus"),
    ("Road Trip", "Kitchen Dance", "Late Shift"),
    ("Gym Hour", "Rainy Day", "Dinner Guests"),
)
_PAYMENTS = (
    "pizza",
    "concert ticket",
    "taxi",
    "groceries",
    "electricity",
    "birthday gift",
    "coffee",
    "museum",
)
_GROCERIES = (
    ("oat milk", "rye bread", "lentils"),
    ("eggs", "spinach", "basmati rice"),
    ("tofu", "limes", "couscous"),
)
_PACKING = (
    ("passport", "rain jacket", "phone charger", "sunscreen"),
    ("hiking boots", "water bottle", "first aid kit"),
    ("swimsuit", "sunglasses", "travel adapter", "paperback", "earplugs"),
)
_BOOKS = (
    ("The Sea Road", "Iron Garden"),
    ("A Map of Salt", "Ninth Winter"),
    ("Small Engines", "The Long Field"),
)
_ALARMS = (("wake up", "06:45"), ("medication", "20:15"), ("gym", "17:30"))
_PROJECTS = {
    "Home": (
        "fix the tap",
        "call the landlord",
        "water the plants",
        "clean the oven",
        "sort old clothes",
        "buy a lamp",
    ),
    "Work": (
        "prepare slides",
        "review the budget",
        "book a room",
        "answer the survey",
        "update the wiki",
        "order chairs",
    ),
    "Trip": ("renew insurance", "print tickets"),
}
_TEXTS = (
    "Are you free on Friday?",
    "The train is late.",
    "Thanks for yesterday!",
    "Call me when you can.",
    "Happy birthday!",
)
_FILES = ("invoice", "lease", "scan", "ticket", "report", "receipt")


def email(person: int) -> str:
    """Return the email address of a person; people are numbered from 1."""
    first, last, _ = PEOPLE[person - 1]
    return f"{first}.{last}@example.com".lower()


def phone(person: int) -> str:
    """Return the phone number of a person."""
    return f"55501{person:05d}"


def name(person: int) -> str:
    """Return the full name of a person."""
    return " ".join(PEOPLE[person - 1][:2])


def password(person: int, app: str) -> str:
    """Return the password of a person's account."""
    return f"{app[:4]}-{PEOPLE[person - 1][0].lower()}-{person * 137}"


def contacts(person: int) -> list[tuple[int, list[str]]]:
    """Return (contact, relationships) for each contact in the address book of `person`."""
    others = [other for other in range(1, len(PEOPLE) + 1) if other != person]
    shift = person % len(others)
    return list(zip(others[shift:] + others[:shift], RELATIONSHIPS))


def related(person: int, relationship: str) -> list[int]:
    """Return the contacts of `person` that have this relationship."""
    return [other for other, relationships in contacts(person) if relationship in relationships]


@functools.cache
def tables() -> dict[str, list[Row]]:
    """Return the rows of each table "app.Model". Times are datetimes; paths of files start with
    ~/."""
    tables: dict[str, list[Row]] = {
        "admin.MainUser": [
            {**_person(p), "email": email(p), "phone_number": phone(p), **_birth(p)}
            for p in _everyone()
        ],
        "admin.AccountPassword": [
            {"main_user_id": p, "account_name": app, "password": password(p, app)}
            for p in _everyone()
            for app in APPS
        ],
    }
    for app in APPS:
        key = {"phone_number": phone} if app == "phone" else {"email": email}
        verified = {} if app == "phone" else {"verified": True}
        balance = {"venmo_balance": 500.0} if app == "venmo" else {}
        tables[f"{app}.User"] = [
            {
                **_person(p),
                **{k: f(p) for k, f in key.items()},
                "password": password(p, app),
                **verified,
                **balance,
            }
            for p in _everyone()
        ]
    for make in (_music, _libraries, _money, _phone, _notes, _todo, _files):
        tables |= make(random.Random(f"mini {make.__name__}"))
    return tables


def rows(table: str, **fields: Any) -> list[Row]:
    """Return the rows of a table that have these values, each with its "id"."""
    numbered = ({"id": i, **row} for i, row in enumerate(tables()[table], 1))
    return [row for row in numbered if all(row[key] == value for key, value in fields.items())]


def _everyone() -> range:
    return range(1, len(PEOPLE) + 1)


def _person(person: int) -> Row:
    first, last, _ = PEOPLE[person - 1]
    return {"first_name": first, "last_name": last}


def _birth(person: int) -> Row:
    return {"birthday": PEOPLE[person - 1][2]}


def _ago(days: float, hours: float = 0) -> dt.datetime:
    return NOW - dt.timedelta(days=days, hours=hours)


def _music(rng: random.Random) -> dict[str, list[Row]]:
    titles = [f"{a} {b}" for a in _FIRST for b in _SECOND]
    rng.shuffle(titles)
    plays = rng.sample(range(1_000, 90_000), len(titles))
    artists = [
        {"name": artist, "genre": GENRES[i % len(GENRES)]} for i, artist in enumerate(_ARTISTS)
    ]
    albums, songs = [], []
    for i, artist in enumerate(_ARTISTS, 1):
        released = dt.datetime(2012 + i, 1 + i % 12, 5)
        album = f"{artist.split()[-1]} Sessions"
        albums.append(
            {
                "title": album,
                "artist_ids": [i],
                "release_date": released,
                "genre": artists[i - 1]["genre"],
            }
        )
    for i, title in enumerate(titles):
        artist_id = 1 + i % len(_ARTISTS)
        songs.append(
            {
                "title": title,
                "artist_ids": [artist_id],
                "album_id": artist_id if i % 3 else None,
                "duration": rng.randrange(120, 400),
                "release_date": dt.datetime(2012 + artist_id, 1 + artist_id % 12, 5),
                "genre": GENRES[i % len(GENRES)],
                "play_count": plays[i],
            }
        )
    return {"spotify.Artist": artists, "spotify.Album": albums, "spotify.Song": songs}


def _libraries(rng: random.Random) -> dict[str, list[Row]]:
    library, playlists, members, likes, following = [], [], [], [], []
    songs = range(1, len(_FIRST) * len(_SECOND) + 1)
    for user in range(1, SUPERVISORS + 1):
        mine = rng.sample(songs, 24)
        library += [{"user_id": user, "song_id": song} for song in mine]
        likes += [{"user_id": user, "song_id": song} for song in rng.sample(mine, 5)]
        following += [
            {"user_id": user, "artist_id": artist} for artist in sorted(rng.sample(range(1, 9), 3))
        ]
        for title in _PLAYLISTS[user - 1]:
            playlists.append({"title": title, "user_id": user})
            members += [
                {"playlist_id": len(playlists), "song_id": song} for song in rng.sample(songs, 7)
            ]
    return {
        "spotify.MusicPlayer": [{"user_id": user} for user in _everyone()],
        "spotify.UserLibrarySong": library,
        "spotify.Playlist": playlists,
        "spotify.PlaylistSong": members,
        "spotify.SongLike": likes,
        "spotify.UserArtistFollowing": following,
    }


def _money(rng: random.Random) -> dict[str, list[Row]]:
    transactions, requests = [], []
    for user in range(1, SUPERVISORS + 1):
        people = [person for person, _ in contacts(user)]
        for i in range(24):
            other, sent = people[i % len(people)], rng.random() < 0.5
            transactions.append(
                {
                    "sender_id": user if sent else other,
                    "receiver_id": other if sent else user,
                    "amount": rng.randrange(300, 6000) / 100,
                    "description": rng.choice(_PAYMENTS),
                    "created_at": _ago(1 + 4 * i, rng.randrange(8)),
                }
            )
        for i, other in enumerate(people[:4] + people[:2]):
            requests.append(
                {
                    "sender_id": other,
                    "receiver_id": user,
                    "amount": rng.randrange(300, 4000) / 100,
                    "description": _PAYMENTS[(i + user) % len(_PAYMENTS)],
                    "created_at": _ago(2 + i),
                }
            )
    friends = [
        {"user_id": u, "friend_id": f}
        for u in range(1, SUPERVISORS + 1)
        for f, _ in contacts(u)[:5]
    ]
    return {
        "venmo.Friendship": friends,
        "venmo.Transaction": transactions,
        "venmo.PaymentRequest": requests,
    }


def _phone(rng: random.Random) -> dict[str, list[Row]]:
    book, alarms, texts, copies = [], [], [], []
    for user in range(1, SUPERVISORS + 1):
        for other, relationships in contacts(user):
            known = {
                **_person(other),
                "email": email(other),
                "phone_number": phone(other),
                **_birth(other),
            }
            book.append({"user_id": user, **known, "relationships": relationships})
        for label, time in _ALARMS:
            hour, minute = map(int, time.split(":"))
            time = f"{hour:02d}:{(minute + 5 * user) % 60:02d}"
            alarms.append(
                {
                    "user_id": user,
                    "time": time,
                    "label": label,
                    "enabled": True,
                    "snooze_minutes": 10,
                }
            )
        for i in range(16):
            other = contacts(user)[rng.randrange(6)][0]
            pair = (user, other) if rng.random() < 0.4 else (other, user)
            when = _ago(12 - i // 2, i % 5)
            texts.append(
                {
                    "sender_id": pair[0],
                    "receiver_id": pair[1],
                    "message": rng.choice(_TEXTS),
                    "created_at": when,
                }
            )
            copies += [
                {"global_text_message_id": len(texts), "user_id": p, "created_at": when}
                for p in pair
            ]
    return {
        "phone.Contact": book,
        "phone.Alarm": alarms,
        "phone.GlobalTextMessage": texts,
        "phone.UserTextMessage": copies,
    }


def _notes(rng: random.Random) -> dict[str, list[Row]]:
    notes = []
    for user in range(1, SUPERVISORS + 1):
        i = user - 1
        texts = {
            "Groceries": "\n".join(f"- {item}" for item in _GROCERIES[i]),
            "Packing list": "\n".join(f"- {item}" for item in _PACKING[i]),
            "Books to read": "\n".join(f"- [ ] {title}" for title in _BOOKS[i]),
            "Wifi at the cabin": f"network: pine-{user}\npassword: {rng.randrange(10**7, 10**8)}",
            "Meeting notes": "Budget is due at the end of the month.",
            "Garden": "Plant the beans in May.",
        }
        notes += [
            {"user_id": user, "title": title, "content": text, "tags": []}
            for title, text in texts.items()
        ]
    return {"simple_note.Note": notes}


def _todo(rng: random.Random) -> dict[str, list[Row]]:
    projects, links, tasks = [], [], []
    for user in range(1, SUPERVISORS + 1):
        for project, titles in {"Inbox": (), **_PROJECTS}.items():
            projects.append({"name": project, "user_id": user, "is_inbox": project == "Inbox"})
            links.append({"project_id": len(projects), "user_id": user})
            for i, title in enumerate(rng.sample(titles, len(titles))):
                priority = ("high", "low", "high", "medium", "high", "low")[(i + user) % 6]
                due = (NOW + dt.timedelta(days=rng.choice((-9, -4, 3, 8)))).replace(
                    hour=0, minute=0
                )
                tasks.append(
                    {
                        "project_id": len(projects),
                        "user_id": user,
                        "title": title,
                        "priority": priority,
                        "is_completed": i < user,
                        "due_date": due,
                        "order_index": i,
                    }
                )
    return {
        "todoist.Project": projects,
        "todoist.ProjectCollaboratorLink": links,
        "todoist.Task": tasks,
    }


def _files(rng: random.Random) -> dict[str, list[Row]]:
    directories, files = [], []
    for user in range(1, SUPERVISORS + 1):
        directories += [
            {"user_id": user, "path": path}
            for path in (
                "/",
                "~/",
                "~/documents/",
                "~/documents/papers/",
                "~/downloads/",
                "~/photos/",
            )
        ]
        for i, stem in enumerate(rng.sample(_FILES, len(_FILES))):
            for extension in ("pdf", "txt", "jpg")[: 1 + (i + user) % 3]:
                path = f"~/downloads/{stem}_{2020 + (i + user) % 4}.{extension}"
                files.append({"user_id": user, "path": path, "content": f"{stem}, page 1"})
        for i in range(3 + user):
            files.append(
                {"user_id": user, "path": f"~/photos/beach_{i + 1}.jpg", "content": "sand and sea"}
            )
    return {"file_system.Directory": directories, "file_system.File": files}
