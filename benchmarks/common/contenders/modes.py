"""Tells the processes of our contender which ``transfer_security`` to use."""

import os

MODES = ("mac", "aead", "crc")
"""The default first."""

VARIABLE = "ECKPT_BENCHMARK_TRANSFER_SECURITY"


def chosen() -> str:
    """Return the mode of this process; the default where none was asked for."""
    return os.environ.get(VARIABLE, MODES[0])
