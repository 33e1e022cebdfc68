"""Bounds of names, numbers and documents that one process writes and another reads.

Each bound stands here once. The writer and every reader use it, so that what is saved can be read.
"""

from __future__ import annotations

import re
from typing import Final

MAX_INT: Final = (1 << 63) - 1
"""Largest number in a file or a frame."""
MAX_STEP: Final = MAX_INT
MAX_PROCESSES: Final = 1_000_000
MAX_LEAVES: Final = 1_000_000
MAX_SHARDS: Final = 1_000_000
"""Maximum for one process."""
MAX_DIMENSIONS: Final = 32
"""Maximum for a leaf, and for an array in a host state."""
MAX_PATH_CHARS: Final = 4096
"""Maximum for a leaf's path."""
MAX_NAME_CHARS: Final = 128
"""Maximum for a run id and for an incarnation."""
MAX_LABEL_CHARS: Final = 255
"""Maximum for a host name, and for the name of a random key's implementation."""
MAX_MANIFEST_BYTES: Final = 64 << 20
MAX_HOST_STATE_BYTES: Final = 64 << 20
"""Maximum for an encoded host state, for every reader: from RAM, storage or a peer.

A job's own limit is the setting ``host_state_limit_bytes``. A later job with a lower setting, and a
server without settings, must still read it.
"""

PLAIN_NAME: Final = r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,127}"
"""Run ids and incarnations: safe as one component of a path, and never a hidden file."""
NAME_PATTERN: Final = re.compile(PLAIN_NAME)
