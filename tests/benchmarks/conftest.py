import sys
from pathlib import Path

# The benchmarks are scripts beside the package, not a part of it.
BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))
