"""Benchmarks: each folder one of them, run as a module from the folder above; see README.md."""

from pathlib import Path

ROOT = Path(__file__).parents[1]
"""From where processes that benchmarks start import ``benchmarks``: their PYTHONPATH."""
