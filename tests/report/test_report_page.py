"""The page of a report: complete in itself, and text of a log stays text."""

from __future__ import annotations

from html.parser import HTMLParser
from pathlib import Path

import pytest
from looks import eckpt_here
from run_log_support import failed_run, logged, report_page, restored_at, write_log

from emergency_ckpt.extras.event_log import LoggedEvent

HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(2)>&\"'<!--"


class Elements(HTMLParser):
    """Elements of a page, the content of its scripts, and its text."""

    def __init__(self, page: str) -> None:
        super().__init__(convert_charrefs=True)
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: list[str] = []
        self.words: list[str] = []
        self.feed(page)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        (self.scripts if self.cdata_elem == "script" else self.words).append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())


def page(events: list[LoggedEvent], **changes: object) -> Elements:
    return Elements(report_page(events, **changes))


def events_that_say(words: str) -> list[LoggedEvent]:
    names = ("restore.quarantined", "save.incomplete", words)
    fields = dict.fromkeys(("holder", "detail", "reason", "text", "tier", words), words)
    received = {"step": 20, "holder": words, "size_bytes": 7}
    return [
        *failed_run(),
        *(logged(1060, name, 1, 1, step=20, **fields) for name in names),
        logged(1060, "warning", 1, 1, step=20, cause="setting", **fields),
        logged(1056, "restore.stage", 1, 1, stage="received", **received),
        restored_at(1057.3, 1, bytes_peer=7),
    ]


def test_page_tells_figures_of_the_run() -> None:
    text = page(failed_run()).text
    for words in (
        "goodput: 44.3%",
        "recoveries: 1",
        "steps lost, all: 3",
        "RPO, longest: 3 s",
        "RTO, longest: 25.2 s",
        "failed saves: 0",
        "2 processes, 2 lives, 1970-01-01 00:16:40 to 1970-01-01 00:17:47 UTC",
    ):
        assert words in text


def test_page_says_at_least_where_steps_are_unknown() -> None:
    assert "steps lost, all: at least 0" in page(failed_run(every_step=False)).text


def test_page_hostile_log_adds_no_element() -> None:
    clean, dirty = (page(events_that_say(words), warnings=[words]) for words in ("x", HOSTILE))
    assert [tag for tag, _ in dirty.elements] == [tag for tag, _ in clean.elements]
    assert "img" not in {tag for tag, _ in dirty.elements}
    assert not any(name.startswith("on") for _, attrs in dirty.elements for name in attrs)
    assert dirty.text.count("<script>alert(1)</script>") >= 5


def test_page_has_no_script_and_allows_no_request() -> None:
    found = page(failed_run())
    (policy,) = [
        attrs["content"] or ""
        for tag, attrs in found.elements
        if tag == "meta" and attrs.get("http-equiv") == "Content-Security-Policy"
    ]
    assert "default-src 'none'" in policy
    assert "script" not in policy
    assert {tag for tag, _ in found.elements}.isdisjoint({"script", "link", "img", "a"})


def test_page_draws_each_process_and_failure() -> None:
    found = page([*failed_run(), logged(1040, "persistent.failed", 1, step=20, reason="down")])
    for words in ("process 1, slice 1", "process 0: restore, step 20, 3.25 s", "reason down"):
        assert words in found.text
    assert sum(tag == "path" for tag, _ in found.elements) == 3  # and two that were lost


def test_page_many_processes_are_bounded() -> None:
    events = [logged(1000 + i / 1000, "restore.nothing", i) for i in range(500)]
    assert "The 436 last processes are left out." in page(events).text


def test_page_many_failures_are_bounded() -> None:
    few = [logged(i, "persistent.failed", step=i, reason="down") for i in range(1, 900)]
    many = [logged(i, "persistent.failed", step=i, reason="down") for i in range(1, 3001)]
    assert "oldest failures" not in page(few).text
    shown = page(many)
    assert "The 2000 oldest failures, warnings and notices are left out." in shown.text
    assert len(shown.elements) < 2 * len(page(few).elements)


def test_report_command_writes_the_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "report.html"
    log = write_log(tmp_path / "log", failed_run())
    with (log / "events_00001.jsonl").open("a") as file:
        file.write('damaged\n{"time_s": 1')
    assert eckpt_here("report", log, "-o", out) == 0
    told = capsys.readouterr().out
    assert "warning: 2 lines are no event and left out: events_00001.jsonl at byte" in told
    assert told.splitlines()[0].endswith("half a line.")
    assert "Run run7" in Elements(out.read_text()).text
    assert sorted(path.name for path in tmp_path.iterdir()) == ["log", "report.html"]


@pytest.mark.parametrize("name", ["absent", "empty"])
def test_report_command_without_log_fails(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    (tmp_path / "empty").mkdir()
    out = tmp_path / "report.html"
    assert eckpt_here("report", tmp_path / name, "-o", out) == 1
    assert capsys.readouterr().err.startswith(f"eckpt report: read {tmp_path / name}: ")
    assert not out.exists()


@pytest.mark.parametrize("option", ["-o", "--trace"])
def test_report_to_a_folder_is_an_error_of_one_line(
    option: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = tmp_path / "log"
    write_log(log, failed_run())
    words = ["-o", tmp_path / "report.html"] if option != "-o" else []
    assert eckpt_here("report", log, *words, option, "/") == 1
    assert capsys.readouterr().err.startswith("eckpt report: [Errno 21] Is a directory: '/'")
