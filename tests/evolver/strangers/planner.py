"""A meeting planner whose titles, dates and times are any texts. A room that is booked has to be
released before another one is; no description says so."""

import random

PEOPLE = ["anna", "boris", "chloe", "david", "elif", "farid"]
ROOMS = ["Oak", "Pine", "Maple"]
TITLES = ["Budget", "Standup", "Retro", "Hiring", "Roadmap", "Demo"]
meetings: dict = {}


def reset(seed: int) -> None:
    rng = random.Random(seed)
    meetings.clear()
    for title in rng.sample(TITLES, 4):
        meetings[rng.randint(100, 999)] = {
            "title": title,
            "date": f"2026-03-{rng.randint(1, 28):02d}",
            "time": f"{rng.randint(8, 17):02d}:00",
            "room": rng.choice([None, *ROOMS]),
            "attendees": sorted(rng.sample(PEOPLE, 2)),
            "cancelled": False,
        }


def list_meetings(date: str | None = None) -> list[dict]:
    """List the meetings, optionally of one date (YYYY-MM-DD)."""
    shown = []
    for meeting_id, meeting in meetings.items():
        if date in (None, meeting["date"]):
            fields = {name: meeting[name] for name in ("title", "date", "time")}
            shown.append({"id": meeting_id, **fields})
    return shown


def show_meeting(meeting_id: int) -> dict:
    """Show all details of a meeting."""
    if meeting_id not in meetings:
        raise KeyError("no such meeting")
    return meetings[meeting_id]


def create_meeting(title: str, date: str, time: str, attendees: list[str]) -> dict:
    """Create a meeting.

    :param title: what the meeting is about
    :param date: day, as YYYY-MM-DD
    :param time: start, as HH:MM
    :param attendees: first names of the people
    """
    if not set(attendees) <= set(PEOPLE):
        return {"success": False, "message": "somebody is unknown"}
    new = max(meetings) + 1
    meetings[new] = {"title": title, "date": date, "time": time, "room": None}
    meetings[new] |= {"attendees": sorted(attendees), "cancelled": False}
    return {"success": True, "id": new}


def book_room(meeting_id: int, room: str) -> str:
    """Book a room (Oak, Pine or Maple) for a meeting."""
    if room not in ROOMS:
        raise ValueError("unknown room")
    if show_meeting(meeting_id)["room"]:
        raise ValueError("cannot book")
    meetings[meeting_id]["room"] = room
    return "booked"


def release_room(meeting_id: int) -> str:
    """Release the room of a meeting."""
    if not show_meeting(meeting_id)["room"]:
        raise ValueError("no room")
    meetings[meeting_id]["room"] = None
    return "released"


def move_meeting(meeting_id: int, date: str, time: str) -> str:
    """Move a meeting to another date and time."""
    show_meeting(meeting_id).update(date=date, time=time)
    return "moved"


def invite(meeting_id: int, person: str) -> str:
    """Invite a person to a meeting."""
    if person not in PEOPLE:
        raise ValueError("unknown person")
    meeting = show_meeting(meeting_id)
    meeting["attendees"] = sorted({*meeting["attendees"], person})
    return "invited"


def cancel_meeting(meeting_id: int) -> str:
    """Cancel a meeting."""
    show_meeting(meeting_id)["cancelled"] = True
    return "cancelled"
