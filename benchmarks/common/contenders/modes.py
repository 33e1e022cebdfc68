"""The ``transfer_security`` of our contender, which its processes read from the environment."""

import os

MODES = ("aead", "crc")
"""All modes; the first one is the default."""

VARIABLE = "ECKPT_BENCHMARK_TRANSFER_SECURITY"


def chosen() -> str:
    """Return the mode of this process: the requested one, or the default."""
    return os.environ.get(VARIABLE, MODES[0])
