"""Benchmarks. Each folder is one, run as a module from the folder above; see README.md."""

import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
"""Directory from which started processes import ``benchmarks``: their PYTHONPATH."""

# The server of a bucket, and shards in memory.
sys.path += [str(ROOT / "verification"), str(ROOT / "tests" / "support")]
