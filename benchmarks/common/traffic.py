"""Bytes that crossed the network interfaces which this process sees, as the kernel counts them.

All processes of a job on one machine share its loopback, so they read one counter, into which also
headers, acknowledgements and the job's own coordination count. A host in a network namespace of
its own reads its own interfaces.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

LOOPBACK = "lo"
RECEIVED, SENT = 0, 1
_SENT_COLUMN = 8

Counters = Mapping[str, Sequence[int]]
"""By interface: bytes RECEIVED and SENT since it was made."""


def counters() -> dict[str, list[int]]:
    """Those of this process's network namespace."""
    return parse(Path("/proc/self/net/dev").read_text())


def parse(text: str) -> dict[str, list[int]]:
    """The byte columns of the kernel's table, which has two lines of header."""
    rows = (line.partition(":") for line in text.splitlines()[2:])
    columns = ((name.strip(), values.split()) for name, _, values in rows)
    return {name: [int(values[0]), int(values[_SENT_COLUMN])] for name, values in columns}


def over_links(before: Counters, after: Counters, direction: int) -> int:
    """Bytes that crossed all interfaces but the loopback meanwhile."""
    names = [name for name in after if name != LOOPBACK]
    return sum(after[name][direction] - before.get(name, (0, 0))[direction] for name in names)
