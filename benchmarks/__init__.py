"""Benchmarks. Each folder is one, run as a module from the folder above; see README.md."""

from pathlib import Path

ROOT = Path(__file__).parents[1]
"""Directory from which started processes import ``benchmarks``: their PYTHONPATH."""
