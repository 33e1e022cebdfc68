"""Run tests of the suite with a known defect in place: at least one must fail.

    python verification/simulation/mutated.py NAME [arguments of pytest]

Without arguments it runs the tests that ``mutants.py`` names. It prints those that failed. Exit
status 1 when none did. Other processes that a test starts do not have the defect.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
_LONGEST_TEST_S = 60


class _PutBack:
    """Puts a defect back once all test modules are imported, and notes which tests fail."""

    def __init__(self, name: str) -> None:
        sys.path.insert(0, str(HERE))
        from mutants import MUTANTS  # noqa: PLC0415

        sys.path.remove(str(HERE))
        self.mutant = MUTANTS[name]
        self.failed: list[str] = []

    def pytest_collection_finish(self) -> None:
        """Hook of pytest."""
        self.mutant.put_back()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Hook of pytest."""
        if report.failed:
            self.failed.append(report.nodeid)


def main(name: str, *arguments: str) -> int:
    plugin = _PutBack(name)
    options = ["--tb=no", "--no-header", "-q", f"--timeout={_LONGEST_TEST_S}"]
    code = pytest.main([*options, *(arguments or plugin.mutant.tests)], plugins=[plugin])
    for each in plugin.failed:
        print(f"{name}: failed {each}", flush=True)
    return 0 if code == pytest.ExitCode.TESTS_FAILED and plugin.failed else 1


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
