"""Check what is written: the house's rules, the record of defects, and the pages of docs.

    python tests/documents/run.py [--history]

``make check`` runs it. Prints every finding, and exits with 1 if there is one. ``--history`` also
looks each commit of the record up in the history of the checkout: a copy whose history was
rewritten fails it, and is whole nevertheless.
"""

from __future__ import annotations

import argparse
import sys

import house
import pages
import record
from findings import Check, checks_of


def main() -> int:
    """Run all checks; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--history", action="store_true", help="look commits up in the history")
    checks: list[Check] = [*checks_of(house), *checks_of(record), *checks_of(pages)]
    if parser.parse_args().history:
        checks.append(record.commits_are_in_history)
    findings = [f"{check.__name__}: {finding}" for check in checks for finding in check()]
    print(*findings, f"{len(checks)} checks of documents, {len(findings)} findings", sep="\n")
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main())
