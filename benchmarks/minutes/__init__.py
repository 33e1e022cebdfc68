"""The benchmark ``python -m benchmarks.minutes``."""
