"""Bytes that crossed the network interfaces of this process, as the kernel counts them.

All processes of a job on one machine share its loopback and so read one counter. The counter
includes headers, acknowledgements and the job's own coordination. A host in its own network
namespace reads its own interfaces.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

LOOPBACK = "lo"
RECEIVED, SENT = 0, 1
_SENT_COLUMN = 8

Counters = Mapping[str, Sequence[int]]
"""Bytes RECEIVED and SENT since the interface was made, by interface."""


def counters() -> dict[str, list[int]]:
    """Return the counters of this process's network namespace."""
    return parse(Path("/proc/self/net/dev").read_text())


def parse(text: str) -> dict[str, list[int]]:
    """Return the byte columns of the kernel's table, which has two header lines."""
    rows = (line.partition(":") for line in text.splitlines()[2:])
    columns = ((name.strip(), values.split()) for name, _, values in rows)
    return {name: [int(values[0]), int(values[_SENT_COLUMN])] for name, values in columns}


def over_links(before: Counters, after: Counters, direction: int) -> int:
    """Return the bytes that crossed all interfaces but the loopback between two readings."""
    names = [name for name in after if name != LOOPBACK]
    return sum(after[name][direction] - before.get(name, (0, 0))[direction] for name in names)
