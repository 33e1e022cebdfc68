"""Sizes as Kubernetes writes them."""

from __future__ import annotations

import re

from emergency_ckpt.core.limits import MAX_QUANTITY_BYTES
from emergency_ckpt.errors import ConfigError

_UNITS = {
    "": 1,
    **{f"{prefix}i": 1 << (10 * power) for power, prefix in enumerate("KMGTP", start=1)},
    **{prefix: 1000**power for power, prefix in enumerate("kMGTP", start=1)},
}
_PATTERN = re.compile(r"([0-9]{1,19})([KMGTP]i|[kMGTP])?")


def parse_quantity(text: str) -> int:
    """Return the bytes of a size such as ``200Gi`` or ``1T``. ConfigError for anything else."""
    match = _PATTERN.fullmatch(text)
    size_bytes = int(match[1]) * _UNITS[match[2] or ""] if match else 0
    if not 0 < size_bytes <= MAX_QUANTITY_BYTES:
        problem = f"{text!r} is no size such as 200Gi, above 0 and at most 1024Pi"
        raise ConfigError([problem], target="a size")
    return size_bytes


def format_quantity(size_bytes: int) -> str:
    """Return the shortest size with a binary unit that is exactly ``size_bytes``."""
    for power, prefix in reversed(tuple(enumerate("KMGTP", start=1))):
        if size_bytes % (1 << (10 * power)) == 0:
            return f"{size_bytes >> (10 * power)}{prefix}i"
    return str(size_bytes)
