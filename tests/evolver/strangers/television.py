"""The remote control of a television: coroutines, a state that is a dataclass, and numbers of
channels beside a volume that takes any number."""

import random
from dataclasses import dataclass
from enum import Enum

NAMES = ("News 24", "Sport One", "Kids", "Movies", "Music Box", "Nature")


class Source(Enum):
    HDMI1 = "hdmi1"
    HDMI2 = "hdmi2"
    TUNER = "tuner"


@dataclass
class State:
    power: bool = False
    volume: int = 10
    channel: int = 1
    source: Source = Source.TUNER
    muted: bool = False


_state = State()
_channels: dict[int, str] = {}


def reset(seed: int) -> None:
    global _state
    rng = random.Random(seed)
    _state = State(volume=rng.randint(5, 20), channel=rng.randint(1, 5))
    _channels.clear()
    _channels.update(enumerate(rng.sample(NAMES, 5), 1))


async def get_state() -> State:
    """Return the state of the TV."""
    return _state


async def list_channels() -> dict[int, str]:
    """Return numbers and names of the channels."""
    return _channels


async def set_power(on: bool) -> None:
    """Turn the TV on or off."""
    _state.power = on


async def set_volume(level: int) -> None:
    """Set the volume, 0 to 40."""
    _check_on()
    if not 0 <= level <= 40:
        raise ValueError("level out of range")
    _state.volume, _state.muted = level, False


async def mute() -> None:
    """Mute the sound."""
    _check_on()
    _state.muted = True


async def tune(channel: int) -> str:
    """Switch to a channel."""
    _check_on()
    if _state.source is not Source.TUNER:
        raise RuntimeError("the tuner is not the source")
    if channel not in _channels:
        raise ValueError("no such channel")
    _state.channel = channel
    return _channels[channel]


async def select_source(source: Source) -> None:
    """Select the picture source."""
    _check_on()
    _state.source = source


def _check_on() -> None:
    if not _state.power:
        raise RuntimeError("the TV is off")
