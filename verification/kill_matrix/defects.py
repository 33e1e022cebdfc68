"""The list of defects that can be put back: ``defects.toml``, and its edits of product files."""

from __future__ import annotations

import ast
import functools
import hashlib
import re
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
LIST = HERE / "defects.toml"
RECORD = ROOT / "verification" / "record.md"
_WORDS = ("same_as", "gone", "cannot", "yet")
_FILE_OF_TESTS = re.compile(r"`((?:tests|verification)/[\w/]+\.py)`")


@dataclass(frozen=True)
class Edit:
    """Text of one product file, and what stands in its place while the defect is back."""

    file: str
    old: str
    new: str

    def range_in(self, text: str) -> tuple[int, int]:
        """Return where ``text`` differs afterwards: the first character, and the one behind."""
        before = _alike(self.old, self.new)
        behind = _alike(self.old[before:][::-1], self.new[before:][::-1])
        start = text.index(self.old)
        return start + before, start + max(before + 1, len(self.old) - behind)


@dataclass(frozen=True)
class Mutant:
    """One defect, put back by edits, or by a function of ``simulation/mutants.py``.

    ``touches``: functions that the function changes, as ``file:qualified name``; ``record_tests``:
    test files that the reliability record names for the defect, or its entry if it is made up.
    """

    name: str
    says: str
    edits: tuple[Edit, ...]
    in_process: str
    touches: tuple[str, ...]
    record_tests: tuple[str, ...]

    @property
    def digest(self) -> str:
        """Of what the mutant changes: a result counts for this text only."""
        return hashlib.sha256(repr((self.edits, self.in_process)).encode()).hexdigest()[:12]

    def functions(self, root: Path = ROOT) -> set[str]:
        """Return the changed functions of the tree at ``root``, as ``file:qualified name``."""
        changed = set(self.touches)
        for edit in self.edits:
            text = (root / edit.file).read_text()
            is_python = edit.file.endswith(".py")
            function = _function_at(text, *edit.range_in(text)) if is_python else "<file>"
            changed.add(f"{edit.file}:{function}")
        return changed


@dataclass(frozen=True)
class Row:
    """One row of the reliability record.

    It has ``mutants``, or those of ``same_as``, the name of another row's, put it back too; or it
    is ``gone`` with a mechanism that the product gives up, or it ``cannot`` be put back, or it is
    not built ``yet``: words that say why.
    """

    begins: str
    mended: tuple[str, ...]
    mutants: tuple[Mutant, ...]
    words: dict[str, str]


def record_rows() -> list[tuple[str, tuple[str, ...], tuple[str, ...]]]:
    """Return of each defect in the record its words, its mending commits and its test files."""
    rows = []
    for line in RECORD.read_text().splitlines():
        cells = [cell.strip() for cell in line.strip().strip("|").split(" | ")]
        if line.startswith("| ") and len(cells) == 5 and re.search("`[0-9a-f]{7}`", cells[2]):
            commits = tuple(re.findall("`([0-9a-f]{7})`", cells[2]))
            rows.append((cells[0], commits, tuple(_FILE_OF_TESTS.findall(cells[4]))))
    return rows


def load() -> tuple[list[Row], list[Mutant]]:
    """Return the rows of the record, and all mutants: those of rows and those made up."""
    listed = tomllib.loads(LIST.read_text())
    tests = {words: files for words, _, files in record_rows()}
    rows: list[Row] = []
    for each in listed["rows"]:
        files = next((f for words, f in tests.items() if words.startswith(each["begins"])), ())
        mutants = tuple(_mutant(one, each["begins"], files) for one in each.get("mutants", ()))
        words = {name: each[name] for name in _WORDS if name in each}
        rows.append(Row(each["begins"], tuple(each["mended"]), mutants, words))
    made_up = [
        _mutant(one, "", tuple(one.get("tests", ())))
        for one in listed["made_up"]
        if "gone" not in one
    ]
    return rows, [one for row in rows for one in row.mutants] + made_up


def _mutant(one: dict[str, Any], says: str, tests: tuple[str, ...]) -> Mutant:
    edits = tuple(Edit(**each) for each in one.get("edits", ()))
    if "file" in one:
        edits = (Edit(one["file"], one["old"], one["new"]), *edits)
    in_process = one.get("in_process", "")
    tests = (*_in_process().get(in_process, ()), *tests)
    touches = tuple(one.get("touches", ()))
    name = one.get("name") or in_process
    return Mutant(name, one.get("says", says), edits, in_process, touches, tests)


def faults() -> Iterator[str]:
    """Say what is wrong with the list; nothing when every edit applies and every row is there."""
    rows, mutants = load()
    names = [one.name for one in mutants]
    for name in sorted({name for name in names if names.count(name) > 1}):
        yield f"{name}: two mutants have this name"
    for mutant in mutants:
        yield from _faults_of(mutant)
    record = record_rows()
    for words, commits, _ in record:
        entries = [row for row in rows if words.startswith(row.begins)]
        if len(entries) != 1:
            yield f"{len(entries)} entries begin as this row of the record: {words[:70]}"
        elif entries[0].mended != commits:
            yield f"the record has other commits, {', '.join(commits)}: {entries[0].begins}"
    for row in rows:
        if not any(words.startswith(row.begins) for words, _, _ in record):
            yield f"verification/record.md has no row that begins so: {row.begins}"
        if bool(row.mutants) + len(row.words) != 1:
            yield f"mutants, or one of {', '.join(_WORDS)}, are needed: {row.begins}"
        if row.words.get("same_as", names[0]) not in names:
            yield f"same_as names no mutant: {row.begins}"
    yield from _faults_of_in_process({one.in_process for one in mutants} - {""})


def _faults_of_in_process(listed: set[str]) -> Iterator[str]:
    there = _in_process().keys()
    gone = {one["name"] for one in tomllib.loads(LIST.read_text())["made_up"] if "gone" in one}
    for name in sorted(listed - there):
        yield f"{name}: simulation/mutants.py has no such function"
    for name in sorted(there - listed - gone):
        yield f"{name}: simulation/mutants.py has it, and defects.toml not"


@functools.cache
def _in_process() -> dict[str, tuple[str, ...]]:
    """Return the defects of ``simulation/mutants.py`` with the tests that it names for each."""
    text = (ROOT / "verification" / "simulation" / "mutants.py").read_text()
    found: dict[str, tuple[str, ...]] = {}
    for each in ast.parse(text).body:
        for mark in each.decorator_list if isinstance(each, ast.FunctionDef) else ():
            if isinstance(mark, ast.Call) and ast.unparse(mark.func) == "_mutant":
                tests = tuple(ast.literal_eval(one) for one in mark.args)
                found[each.name] = tests
    return found


def _faults_of(mutant: Mutant) -> Iterator[str]:
    for file in mutant.record_tests:
        if not (ROOT / file).is_file():
            yield f"{mutant.name}: there is no {file}, whose tests shall notice it"
    if bool(mutant.edits) == bool(mutant.in_process):
        yield f"{mutant.name}: it needs edits, or the name of a function of simulation/mutants.py"
    for place in mutant.touches:
        file, _, function = place.partition(":")
        name = function.rpartition(".")[2]
        if not (ROOT / file).is_file() or f"def {name}(" not in (ROOT / file).read_text():
            yield f"{mutant.name}: there is no {place}, which it says that it changes"
    for edit in mutant.edits:
        path = ROOT / edit.file
        count = path.read_text().count(edit.old) if path.is_file() else 0
        if count != 1:
            yield (
                f"{mutant.name}: {edit.file} has this text {count} times, not once: {edit.old!r}."
                " Aim the edit at the code that now does this, so that the same defect comes back;"
                " only where its mechanism is gone, write gone = '...' in its place"
            )
        elif edit.file.endswith(".py"):
            try:
                ast.parse(path.read_text().replace(edit.old, edit.new))
            except SyntaxError as error:
                yield f"{mutant.name}: {edit.file} does not compile with it: {error}"


def _alike(one: str, other: str) -> int:
    """Return the length of what both begin with."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((n for n, (a, b) in pairs if a != b), min(len(one), len(other)))


def _function_at(text: str, start: int, end: int) -> str:
    """Return the qualified name of the innermost function around a range, else ``<module>``."""
    part = text[start:end]
    first = text.count("\n", 0, start + len(part) - len(part.lstrip())) + 1
    last = text.count("\n", 0, start + len(part.rstrip())) + 1
    name = "<module>"

    def visit(node: ast.AST, path: str) -> None:
        nonlocal name
        for child in ast.iter_child_nodes(node):
            inner = path
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                inner = f"{path}{child.name}"
                end = child.end_lineno or 0
                if not isinstance(child, ast.ClassDef):
                    if child.lineno <= first and last <= end:
                        name = inner
                    inner += ".<locals>"
                inner += "."
            visit(child, inner)

    visit(ast.parse(text), "")
    return name
