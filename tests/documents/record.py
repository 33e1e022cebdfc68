"""Rules of ``verification/record.md``: each test and each commit that it names exists."""

from __future__ import annotations

import functools
import re
import subprocess
from collections.abc import Iterator

from findings import ROOT

PAGE = (ROOT / "verification" / "record.md").read_text("utf-8")
COLUMNS = ["what went wrong, and why", "introduced by", "mended in", "found by", "tests"]
GIVEN_UP = "given up on purpose, because "
COMMIT = re.compile(r"`([0-9a-f]{7})`")
TESTS = re.compile(r"`((?:tests|verification)/[\w/]+\.py)`(?:: ((?:`\w+`(?:, )?)+))?")


def cells(row: str) -> list[str]:
    return [cell.strip() for cell in row.strip().strip("|").split(" | ")]


def rows() -> list[str]:
    """Return the rows of all tables that name tests, and those of defects that were given up."""
    return [
        line
        for line in PAGE.splitlines()
        if line.startswith("| ") and (re.search("`(tests|verification)/", line) or GIVEN_UP in line)
    ]


def defects() -> list[list[str]]:
    return [cells(row) for row in rows() if row.count(" | ") > 1]


def check_rows_name_tests_that_exist() -> Iterator[str]:
    for row in rows():
        tests = cells(row)[-1]
        named = TESTS.findall(tests)
        if not named and not tests.startswith(GIVEN_UP):
            yield f"{row[2:42]}: it names no test, and does not say '{GIVEN_UP}...'"
        for file, names in named:
            path = ROOT / file
            text = path.read_text("utf-8") if path.exists() else ""
            if not text:
                yield f"{row[2:42]}: there is no {file}"
                continue
            for name in re.findall(r"\w+", names):
                if f"def {name}(" not in text:
                    yield f"{row[2:42]}: {file} has no {name}"


def check_defects_name_both_commits() -> Iterator[str]:
    for row in defects():
        if len(row) != len(COLUMNS):
            yield f"{row[0][:40]}: {len(row)} columns, expected {len(COLUMNS)}"
            continue
        values = dict(zip(COLUMNS, row, strict=True))
        if not COMMIT.search(values["introduced by"]):
            yield f"{row[0][:40]}: it names no commit that introduced it"
        if not re.fullmatch(r"`[0-9a-f]{7}`(, `[0-9a-f]{7}`)*", values["mended in"]):
            yield f"{row[0][:40]}: 'mended in' is no list of commits"


def check_tables_of_defects_have_the_columns() -> Iterator[str]:
    heads = [line for line in PAGE.splitlines() if line.startswith("| what went wrong")]
    if not heads:
        yield "there is no table of defects"
    yield from (f"columns {head}" for head in heads if cells(head) != COLUMNS)


@functools.cache
def history() -> frozenset[str] | str:
    """Return the first 7 digits of each commit before this one, or the reason why there is none."""

    def ask(*arguments: str) -> str:
        command = ["git", "-C", str(ROOT), *arguments]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        return done.stdout.strip() if done.returncode == 0 else ""

    if ask("rev-parse", "--show-toplevel") != str(ROOT):
        return "no checkout of git"
    if ask("rev-parse", "--is-shallow-repository") != "false":
        return "a shallow clone"
    return frozenset(commit[:7] for commit in ask("rev-list", "HEAD").split())


def commits_are_in_history() -> Iterator[str]:
    known = history()
    if isinstance(known, str):
        print(f"commits of the record cannot be looked up: {known}")
        return
    yield from (each for each in sorted(set(COMMIT.findall(PAGE))) if each not in known)
