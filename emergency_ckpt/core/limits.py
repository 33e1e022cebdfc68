"""Bounds of names, numbers and documents that one process writes and another reads.

Each bound stands here once. The writer and every reader use it, so that what is saved can be read.
"""

from __future__ import annotations

import re
from typing import Final

MAX_INT: Final = (1 << 63) - 1
"""Of any number in a file or a frame."""
MAX_STEP: Final = MAX_INT
MAX_PROCESSES: Final = 1_000_000
MAX_LEAVES: Final = 1_000_000
MAX_SHARDS: Final = 1_000_000
"""Of one process."""
MAX_DIMENSIONS: Final = 32
"""Of a leaf, and of an array in a host state."""
MAX_PATH_CHARS: Final = 4096
"""Of a leaf's path."""
MAX_NAME_CHARS: Final = 128
"""Of a run id and of an incarnation."""
MAX_LABEL_CHARS: Final = 255
"""Of a host name, and of the name of a random key's implementation."""
MAX_MANIFEST_BYTES: Final = 64 << 20
MAX_HOST_STATE_BYTES: Final = 64 << 20
"""Of an encoded host state, for every reader: from RAM, storage or a peer.

A job's own limit is the setting ``host_state_limit_bytes``. A later job with a lower one, and a
server that knows no settings, must read it all the same.
"""

PLAIN_NAME: Final = r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,127}"
"""Run ids and incarnations: safe as one component of a path, and never hidden."""
NAME_PATTERN: Final = re.compile(PLAIN_NAME)
