"""Types of command-line arguments."""

from __future__ import annotations

import argparse
import pwd

from emergency_ckpt.core.limits import MAX_STEP

_LONGEST_S = 1e7


def port(text: str) -> int:
    """Return a port, or 0 for a free one."""
    return _between(text, 0, 65535)


def seconds(text: str) -> float:
    """Return a time above 0 and below four months."""
    try:
        value = float(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number") from error
    if not 0 < value < _LONGEST_S:
        raise argparse.ArgumentTypeError(f"{text} is not above 0 and below {_LONGEST_S:.0f}")
    return value


_UNITS_S = {"s": 1, "m": 60, "h": 3600, "d": 86400}


def duration(text: str) -> float:
    """Return a time of at least 0, in seconds or with a unit: 90s, 30m, 12h, 7d."""
    number, unit_s = (text[:-1], _UNITS_S[text[-1]]) if text[-1:] in _UNITS_S else (text, 1)
    try:
        value = float(number) * unit_s
    except ValueError as error:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a time such as 90s, 12h or 7d"
        ) from error
    if not 0 <= value < _LONGEST_S:
        raise argparse.ArgumentTypeError(f"{text} is not from 0 to {_LONGEST_S:.0f} seconds")
    return value


def step_number(text: str) -> int:
    """Return the number of a step."""
    return _between(text, 0, MAX_STEP)


def seed(text: str) -> int:
    """Return a seed of random numbers, of 32 bits."""
    return _between(text, 0, 2**32 - 1)


def user_id(text: str) -> int:
    """Return a user of this host, by name or number; a number need not have a name."""
    if text.isascii() and text.isdigit():
        return _between(text, 0, 2**32 - 2)
    try:
        return pwd.getpwnam(text).pw_uid
    except (KeyError, ValueError) as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not a user of this host") from error


def _between(text: str, least: int, most: int) -> int:
    try:
        value = int(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number") from error
    if not least <= value <= most:
        raise argparse.ArgumentTypeError(f"{text} is not between {least} and {most}")
    return value
