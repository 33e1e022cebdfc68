"""Rules of the pages: they say what the code says, and lead to places that exist."""

from __future__ import annotations

import dataclasses
import inspect
import re
import sys
from collections.abc import Iterator
from fnmatch import fnmatch

import yaml
from findings import ROOT, differing

from emergency_ckpt import errors
from emergency_ckpt.config import Config
from emergency_ckpt.extras.metrics import METRICS

sys.path.insert(0, str(ROOT / "tests" / "support"))
import cli_page
from settings_page import (
    KEYWORDS,
    PAGE,
    configuration_page,
    keywords_module,
    meanings_of_settings,
)

DOCS = ROOT / "docs"
RUNBOOK = (DOCS / "runbook.md").read_text("utf-8")
MONITORING = (DOCS / "monitoring.md").read_text("utf-8")
SHORTEST_MEANING_CHARS = 10
LEAST_SETTINGS_IN_RUNBOOK = 6
NOTICED = "What you will notice"
MOST_ROWS_NOTICED = 10


def errors_of_package() -> list[str]:
    return sorted(
        name
        for name, value in inspect.getmembers(errors, inspect.isclass)
        if issubclass(value, errors.CheckpointError) and value.__module__ == errors.__name__
    )


def sections() -> dict[str, str]:
    """Return the text below each heading of the runbook's part ``Errors``."""
    part = RUNBOOK.split("\n## Errors\n")[1].split("\n## ")[0]
    return {each.split("\n")[0]: each for each in part.split("\n### ")[1:]}


def anchor(heading: str) -> str:
    """Return the anchor that the code host makes of a heading."""
    return re.sub(r"[^a-z0-9 _-]", "", heading.lower()).replace(" ", "-")


def check_workflows_call_targets_of_the_makefile() -> Iterator[str]:
    makefile = (ROOT / "Makefile").read_text("utf-8") + (ROOT / "native/native.mk").read_text()
    versions = re.findall(r"^VERSIONS = (.*)$", makefile, re.M)[0].split()
    targets = {f"test-{name}" for name in versions}
    for line in re.findall(r"^([a-z][^:=\n]*):(?!=)", makefile, re.M):
        targets |= set(line.split())
    for path in sorted((ROOT / ".github" / "workflows").glob("*.yml")):
        workflow = yaml.safe_load(path.read_text("utf-8"))
        for job in workflow["jobs"].values():
            matrix = job.get("strategy", {}).get("matrix", {})
            rows = matrix.get("include") or [
                {name: value} for name, values in matrix.items() for value in values
            ]
            for step in job["steps"]:
                for row in rows or [{}]:
                    command = step.get("run", "")
                    for name, value in row.items():
                        command = command.replace(f"${{{{ matrix.{name} }}}}", value)
                    target = re.match(r"make (\S+)", command)
                    if command and (target is None or target[1] not in targets):
                        yield f"{path.name}: {command!r} calls no target of the Makefile"


def check_runbook_has_a_section_for_each_error() -> Iterator[str]:
    yield from differing(errors_of_package(), list(sections()), "docs/runbook.md")
    for name, text in sections().items():
        labels = re.findall(r"^- \*\*(.+?)\*\*: \S", text, re.M)
        if labels != ["Means", "Look at", "Do"]:
            yield f"{name}: its points are {labels}"


def check_links_of_the_pages_lead_somewhere() -> Iterator[str]:
    for page in (ROOT / "README.md", *sorted(DOCS.glob("*.md"))):
        for place in re.findall(r"\]\(([^):\s]+)\)", page.read_text("utf-8")):
            path, _, fragment = place.partition("#")
            target = page.parent / path if path else page
            if not target.exists():
                yield f"{page.name}: {place}"
            elif fragment:
                headings = re.findall(r"^#+ (.+)$", target.read_text("utf-8"), re.M)
                if fragment not in {anchor(heading) for heading in headings}:
                    yield f"{page.name}: {place}"


def check_pages_of_migrations_are_alike() -> Iterator[str]:
    """Each says what a user will notice, in a table of at most ten rows, and how to go back."""
    pages = sorted(DOCS.glob("migrating_*.md"))
    linked = re.findall(r"\]\((migrating_\w+\.md)\)", (DOCS / "migrating.md").read_text("utf-8"))
    yield from differing([page.name for page in pages], linked, "docs/migrating.md")
    for page in pages:
        parts = re.split(r"^## (.+)$", page.read_text("utf-8"), flags=re.M)[1:]
        sections = dict(zip(parts[::2], parts[1::2], strict=True))
        rows = [line for line in sections.get(NOTICED, "").splitlines() if line.startswith("|")]
        count = len(rows) - 2  # without the heads and the line below these
        if not 1 <= count <= MOST_ROWS_NOTICED:
            yield f"{page.name}: {NOTICED!r} has {count} rows"
        if not any(title.lower().endswith("how to go back") for title in sections):
            yield f"{page.name}: no section says how to go back"


def check_settings_that_the_runbook_names_exist() -> Iterator[str]:
    known = set(re.findall(r"^\| `(\w+)` \|", (ROOT / PAGE).read_text("utf-8"), re.M))
    named = set(re.findall(r"`((?:\w+_)+(?:s|bytes|n|id|dir|file|host|port|remap))`", RUNBOOK))
    yield from sorted(named - known - {"get_state"})
    if len(named & known) <= LEAST_SETTINGS_IN_RUNBOOK:
        yield f"only {len(named & known)} settings were found in it: has its form changed?"


def check_readme_line_on_security_is_that_of_the_page() -> Iterator[str]:
    readme, page = (
        " ".join((ROOT / name).read_text("utf-8").split())
        for name in ("README.md", "docs/security.md")
    )
    line = re.search(r"- (Peers exchange nothing.*?\.) \[docs/security.md\]", readme)
    if line is None:
        yield "the README has no such line"
    elif line[1] not in page:
        yield f"not in docs/security.md: {line[1]}"


def check_page_of_commands_is_that_of_their_parsers() -> Iterator[str]:
    if (ROOT / cli_page.PAGE).read_text("utf-8") != cli_page.cli_page():
        yield f"{cli_page.PAGE}: write it again with tests/support/cli_page.py"


def check_page_and_keywords_of_settings_are_those_of_config() -> Iterator[str]:
    again = "write it again with tests/support/settings_page.py"
    page = (ROOT / PAGE).read_text("utf-8")
    if page != configuration_page():
        yield f"{PAGE}: {again}"
    if (ROOT / KEYWORDS).read_text("utf-8") != keywords_module():
        yield f"{KEYWORDS}: {again}"
    basic, advanced = page.split("\n## Advanced settings\n")
    if "| `save_every` |" not in basic:
        yield "save_every is no basic setting"
    if "| `total_timeout_s` |" not in advanced:
        yield "total_timeout_s is no advanced setting"


def check_each_setting_has_a_meaning() -> Iterator[str]:
    meanings = meanings_of_settings()
    yield from differing([field.name for field in dataclasses.fields(Config)], list(meanings), PAGE)
    for name, text in meanings.items():
        if len(text) <= SHORTEST_MEANING_CHARS:
            yield f"{name}: {text}"


def check_metrics_are_those_of_the_page_on_monitoring() -> Iterator[str]:
    table = [
        str([m.name, "gauge" if m.kind == "age" else m.kind, m.label, m.meaning]) for m in METRICS
    ]
    part = MONITORING.split("| metric | type | label | meaning |\n")[1].split("\n\n")[0]
    lines = [
        str([cell.strip(" `") for cell in line.split("|")[1:-1]])
        for line in part.splitlines()
        if line.startswith("| `")
    ]
    yield from differing(table, lines, "docs/monitoring.md")
    if sorted(table) == sorted(lines) and table != lines:
        yield "the rows are in another order"


def check_events_of_metrics_are_those_of_the_page_on_monitoring() -> Iterator[str]:
    fields: dict[str, str] = {}
    stages: dict[str, set[str]] = {}
    for line in MONITORING.split("| event | fields | meaning |")[1].splitlines():
        if line.startswith("| `"):
            _, names, values, meaning, *_ = line.split("|")
            for name in re.findall(r"`([a-z_.]+)`", names):
                fields[name] = values
                stages[name] = set(re.findall(r'"(\w+)"', meaning))
    for metric in METRICS:
        for source in metric.sources:
            wanted = {source.field, *re.findall(r"{(\w+)}", source.label)} - {""}
            parts = source.event.split(".")
            event, stage = ".".join(parts[:2]), parts[2:]
            for name in sorted(wanted - set(re.findall(r"\w+", fields.get(event, "")))):
                yield f"{metric.name}: {event} has no field {name}"
            if not stages.get(event, set()).issuperset(stage):
                yield f"{metric.name}: {event} has no stage {stage[0]}"


def check_changelog() -> Iterator[str]:
    lines = (ROOT / "CHANGELOG.md").read_text("utf-8").splitlines()
    titles = [line for line in lines if line.startswith("## ")]
    if titles[:1] != ["## [Unreleased]"]:
        yield f"the first title of CHANGELOG.md is {titles[:1]}, expected ## [Unreleased]"


def check_image_is_pinned_and_without_root() -> Iterator[str]:
    text = (ROOT / "deploy" / "Dockerfile").read_text("utf-8")
    lines = text.splitlines()
    stages = [line for line in lines if line.startswith("FROM ")]
    if stages != ["FROM ${BASE} AS build", "FROM ${BASE}"]:
        yield f"stages {stages}"
    bases = "\n".join(line for line in lines if line.startswith("ARG BASE="))
    pinned = r"ARG BASE=python:3\.[0-9]+\.[0-9]+-slim-[a-z]+@sha256:[0-9a-f]{64}"
    if not re.fullmatch(pinned, bases):
        yield f"the base is not pinned by its digest: {bases}"
    users = [line for line in lines if line.startswith("USER ")]
    if users != ["USER 1000:1000"]:
        yield f"users {users}"
    else:
        for line in lines[lines.index(users[0]) :]:
            if line.startswith(("RUN", "COPY", "ADD")):
                yield f"after USER: {line}"
    for path in re.findall(r"(?:COPY |/src/)((?:docs|deploy)/\S+)", text):
        if not (ROOT / path).is_file():
            yield f"there is no {path}"


def check_context_of_the_image_leaves_out_what_git_ignores() -> Iterator[str]:
    ignored = (ROOT / "deploy" / "Dockerfile.dockerignore").read_text("utf-8").splitlines()
    left_out = [line.removeprefix("**/") for line in ignored if line and not line.startswith("#")]
    names = [
        line.rstrip("/") for line in (ROOT / ".gitignore").read_text("utf-8").splitlines() if line
    ]
    for name in (".git", *names):
        if not any(fnmatch(name, each) for each in left_out):
            yield f"{name}: not in deploy/Dockerfile.dockerignore"
