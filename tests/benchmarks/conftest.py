import sys
from pathlib import Path

# The benchmarks are beside the package, and not installed with it.
sys.path.insert(0, str(Path(__file__).parents[2]))
