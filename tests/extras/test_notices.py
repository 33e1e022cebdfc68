"""Sources of notices: a metadata server over HTTP that behaves, or not; a file; a function."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from world import World, save

from emergency_ckpt.cluster.coordination import LocalCoordinator
from emergency_ckpt.errors import ConfigError, CoordinationError
from emergency_ckpt.events import Event, EventSink
from emergency_ckpt.extras.notices import (
    FlagFile,
    MetadataServer,
    Notices,
    from_text,
    process_start_s,
)
from emergency_ckpt.observer import JobView, StepProgress

WAIT_S = 30.0


class Metadata:
    """Answers by key: (status, body), or a function that writes the answer itself."""

    def __init__(self) -> None:
        self.answers: dict[str, tuple[int, bytes] | Callable[[Any], None]] = {
            "preempted": (200, b"FALSE"),
            "maintenance-event": (200, b"NONE"),
        }
        self.flavor = "Google"
        self.asked: list[tuple[str, str | None]] = []


@contextlib.contextmanager
def served(metadata: Metadata) -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            key = self.path.removeprefix("/computeMetadata/v1/instance/")
            metadata.asked.append((key, self.headers["Metadata-Flavor"]))
            answer = metadata.answers.get(key, (404, b"not found"))
            if callable(answer):
                answer(self)
                return
            self.send_response(answer[0])
            self.send_header("Metadata-Flavor", metadata.flavor)
            self.end_headers()
            with contextlib.suppress(ConnectionError):  # the client stops at its bound
                self.wfile.write(answer[1])

        def log_message(self, format: str, *args: Any) -> None:
            del format, args

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.fixture
def metadata(monkeypatch: pytest.MonkeyPatch) -> Iterator[Metadata]:
    found = Metadata()
    with served(found) as address:
        monkeypatch.setenv("GCE_METADATA_HOST", address)
        yield found


class Heard:
    """What ``sources`` gave notice of, and the events."""

    def __init__(self, *sources: Notices) -> None:
        self.noticed = threading.Event()
        self.failed = threading.Event()
        self.events: list[Event] = []
        self._sources = sources
        sink = EventSink(self._listen, process_index=0)
        self._job = JobView(LocalCoordinator(), sink, StepProgress(), "", self.noticed.set)
        for source in sources:
            source.join(self._job)

    def close(self) -> None:
        for source in self._sources:
            source.leave(self._job)

    def _listen(self, event: Event) -> None:
        self.events.append(event)
        if event.name == "preemption.unheard":
            self.failed.set()

    def names(self) -> list[str]:
        return [event.name for event in self.events]


def window(ahead_s: float) -> bytes:
    start = time.strftime("%Y-%m-%dT%H:%M:%S+00:00", time.gmtime(time.time() + ahead_s))
    return json.dumps({"maintenance_status": "PENDING", "window_start_time": start}).encode()


def test_metadata_server_is_asked_with_its_header(metadata: Metadata) -> None:
    assert MetadataServer().inspect() == ""
    keys = ["preempted", "maintenance-event", "upcoming-maintenance"]
    assert metadata.asked == [(key, "Google") for key in keys]


def test_preempted_is_a_notice_at_the_first_look_too(metadata: Metadata) -> None:
    metadata.answers["preempted"] = (200, b"TRUE\n")
    assert "preempted" in MetadataServer().inspect()


@pytest.mark.parametrize(
    ("key", "near"),
    [
        ("maintenance-event", b"TERMINATE_ON_HOST_MAINTENANCE"),
        ("upcoming-maintenance", b'{"maintenance_status": "ONGOING"}'),
    ],
)
def test_maintenance_there_at_the_start_waits_for_the_next(
    metadata: Metadata, key: str, near: bytes
) -> None:
    quiet = metadata.answers.get(key, (404, b""))
    metadata.answers[key] = (200, near)
    server = MetadataServer()
    assert [server.inspect() for _ in range(2)] == ["", ""]
    metadata.answers[key] = quiet
    assert server.inspect() == ""
    metadata.answers[key] = (200, near)
    assert "metadata server" in server.inspect()


def test_maintenance_announced_withdrawn_and_near(metadata: Metadata) -> None:
    server = MetadataServer()
    metadata.answers["upcoming-maintenance"] = (200, window(6 * 86400))
    assert server.inspect() == ""
    del metadata.answers["upcoming-maintenance"]
    assert server.inspect() == "", "withdrawn"
    metadata.answers["upcoming-maintenance"] = (200, window(5 * 86400))
    assert server.inspect() == ""
    metadata.answers["upcoming-maintenance"] = (200, window(80))
    assert "maintenance" in server.inspect()


@pytest.mark.parametrize(
    "answer", [(503, b""), (200, b"<html>"), (200, b'{"maintenance_status": "CANCELLED"}')]
)
def test_maintenance_event_counts_beside_an_error(
    metadata: Metadata, answer: tuple[int, bytes]
) -> None:
    metadata.answers["upcoming-maintenance"] = answer
    server = MetadataServer()
    with pytest.raises(CoordinationError):
        server.inspect()
    metadata.answers["maintenance-event"] = (200, b"TERMINATE_ON_HOST_MAINTENANCE")
    assert "TERMINATE_ON_HOST_MAINTENANCE" in server.inspect()


@pytest.mark.parametrize(
    "answer", [(503, b""), (200, b"<html>"), (200, b"REBOOT_ON_HOST_MAINTENANCE")]
)
@pytest.mark.parametrize("key", ["preempted", "maintenance-event"])
def test_upcoming_maintenance_counts_beside_an_error(
    metadata: Metadata, key: str, answer: tuple[int, bytes]
) -> None:
    metadata.answers[key] = answer
    server = MetadataServer()
    with pytest.raises(CoordinationError, match=key):
        server.inspect()
    metadata.answers["upcoming-maintenance"] = (200, window(80))
    assert "maintenance of the host" in server.inspect()


def test_metadata_server_without_vm_metadata_is_said(metadata: Metadata) -> None:
    """GKE's own, which has a cluster's name and tokens, and nothing of the machine."""
    metadata.answers.clear()
    heard = Heard(from_text("gce"))
    try:
        assert heard.failed.wait(30)
        (event,) = heard.events
        assert event.fields["source"] == "gce"
        assert "Workload Identity" in event.fields["text"]
        assert "SIGTERM is the notice" in event.fields["text"]
    finally:
        heard.close()


def _endless(handler: Any) -> None:
    handler.wfile.write(b"HTTP/1.1 200 OK\r\nMetadata-Flavor: Google\r\n\r\n")
    with contextlib.suppress(ConnectionError):
        while True:
            handler.wfile.write(b"T")
            time.sleep(0.05)


def _silent(handler: Any) -> None:
    handler.rfile.read(1)  # until the client gives up


def _no_http(handler: Any) -> None:
    handler.wfile.write(b"\x00\xff" * 100)


LIES: dict[str, Any] = {
    "junk": (200, b"\xff\xfe"),
    "lower_case": (200, b"true"),
    "page": (200, b"<html>"),
    "huge": (200, b"T" * (1 << 20)),
    "error": (500, b"TRUE"),
    "redirect": (302, b"TRUE"),
    "endless": _endless,
    "silent": _silent,
    "no_http": _no_http,
}


@pytest.mark.parametrize("lie", LIES)
def test_metadata_server_that_lies_is_a_bounded_error(metadata: Metadata, lie: str) -> None:
    metadata.answers["preempted"] = LIES[lie]
    with pytest.raises(CoordinationError, match="metadata server"):
        MetadataServer().inspect()


def test_server_without_google_flavor_is_not_believed(metadata: Metadata) -> None:
    metadata.flavor = "Other"
    metadata.answers["preempted"] = (200, b"TRUE")
    with pytest.raises(CoordinationError, match="Metadata-Flavor"):
        MetadataServer().inspect()


def test_deeply_nested_maintenance_is_a_bounded_error(metadata: Metadata) -> None:
    metadata.answers["upcoming-maintenance"] = (200, b"[" * 15000)
    with pytest.raises(CoordinationError):
        MetadataServer().inspect()


def test_failing_source_is_said_once_and_the_others_go_on(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The server is absent at first, and one function blocks for ever."""
    with served(Metadata()) as address:
        pass
    monkeypatch.setenv("GCE_METADATA_HOST", address)
    asked, blocks = threading.Event(), threading.Event()

    def refuses() -> bool:
        if asked.is_set():
            return True
        asked.set()
        raise RuntimeError("not now")

    flag = tmp_path / "flag"
    functions = (Notices(blocks.wait, "blocked"), Notices(refuses))
    heard = Heard(from_text("gce"), *functions, from_text(f"file:{flag}"))
    try:
        assert heard.noticed.wait(WAIT_S)
        flag.touch()
        deadline_s = time.monotonic() + WAIT_S
        while heard.names().count("preemption.notice") < 2 and time.monotonic() < deadline_s:
            time.sleep(0.02)
    finally:
        heard.close()
        blocks.set()
    failed = [e.fields["source"] for e in heard.events if e.name == "preemption.unheard"]
    assert sorted(failed) == ["function", "gce"]
    told = [e.fields["source"] for e in heard.events if e.name == "preemption.notice"]
    assert told == ["function", f"file:{flag}"]


def test_flag_file_left_over_counts_when_it_is_written(tmp_path: Path) -> None:
    flag = tmp_path / "flag"
    flag.touch()
    old_s = process_start_s() - 5.0
    os.utime(flag, (old_s, old_s))
    file = FlagFile(flag)
    assert [file.inspect(), file.inspect()] == ["", ""]
    flag.touch()
    assert file.inspect()
    assert FlagFile(flag).inspect() == "", "this process has acted on it"
    flag.unlink()
    assert FlagFile(flag).inspect() == ""


def test_each_job_has_looks_of_its_own_until_it_leaves() -> None:
    has_notice, looks = threading.Event(), threading.Semaphore(0)

    def inspect() -> bool:
        looks.release()
        return has_notice.is_set()

    source = Notices(inspect)
    ended, running = Heard(source), Heard(source)
    try:
        ended.close()
        ended.close()
        has_notice.set()
        assert running.noticed.wait(WAIT_S)
    finally:
        running.close()
    assert not ended.noticed.is_set()


def test_flag_file_is_a_notice_for_all_running_jobs(tmp_path: Path) -> None:
    flag = tmp_path / "flag"
    shared = from_text(f"file:{flag}")
    jobs = [Heard(shared), Heard(shared), Heard(from_text(f"file:{flag}"))]
    try:
        flag.touch()
        assert all(job.noticed.wait(WAIT_S) for job in jobs)
    finally:
        for job in jobs:
            job.close()


def test_maintenance_during_one_job_is_no_notice_for_the_next(metadata: Metadata) -> None:
    source = from_text("gce")
    first = Heard(source)
    try:
        while ("upcoming-maintenance", "Google") not in metadata.asked:
            time.sleep(0.02)
        metadata.answers["maintenance-event"] = (200, b"TERMINATE_ON_HOST_MAINTENANCE")
        assert first.noticed.wait(WAIT_S)
    finally:
        first.close()
    metadata.asked.clear()
    second = Heard(source)
    try:
        # Two looks of three questions each, and a third that has begun.
        while len(metadata.asked) < 7 and not second.noticed.is_set():
            time.sleep(0.02)
    finally:
        second.close()
    assert not second.noticed.is_set()


def test_process_start_is_before_now_and_after_the_boot() -> None:
    assert 0.0 <= time.time() - process_start_s() < time.clock_gettime(time.CLOCK_BOOTTIME)


def test_process_start_under_a_name_cut_inside_a_letter() -> None:
    """The kernel keeps the first 15 bytes of a name, which need not be UTF-8."""
    place, before_s = Path("/proc/self/comm"), process_start_s()
    name = place.read_bytes()
    place.write_bytes("vierzehn Zeich\u00e9".encode())
    try:
        assert process_start_s() == pytest.approx(before_s, abs=1.0)
    finally:
        place.write_bytes(name)


@pytest.mark.parametrize("text", ["", "aws", "sigterm", "file:", "file:relative", "file:/a\nb"])
def test_source_that_is_none_is_named(text: str) -> None:
    with pytest.raises(
        ConfigError,
        match=r"a source of notices is gce, ray, file: .* or signal: and a name such as USR1",
    ):
        from_text(text)


@pytest.mark.parametrize("name", ["USR1", "SIGUSR1"])
def test_signal_that_is_named_is_a_notice_to_a_job(world: World, name: str) -> None:
    """As Slurm's ``--signal=USR1@60``, which would end a process that has no handler of it."""
    before = signal.getsignal(signal.SIGUSR1)
    listeners = [f"notices(signal:{name})", world.events.append]
    with world.open_both(on_event=listeners, local_save_every=100, save_every=100) as ckpt:
        save(ckpt, world, 1)
        assert not ckpt.reached_preemption(1)
        os.kill(os.getpid(), signal.SIGUSR1)
        deadline_s, step = time.monotonic() + WAIT_S, 2
        while not ckpt.reached_preemption(step):
            assert time.monotonic() < deadline_s
            time.sleep(0.01)
            step += 1
        assert save(ckpt, world, step)
        ckpt.wait_until_finished()
    assert signal.getsignal(signal.SIGUSR1) == before
    assert not world.named("preemption.missed", cause="not_written")
    world.restores(step)


def test_signal_source_calls_the_handler_before_it() -> None:
    came: list[int] = []
    before = signal.signal(signal.SIGUSR2, lambda number, _: came.append(number))
    try:
        source = from_text("signal:USR2")
        for _ in range(2):  # of two checkpointers at once
            source.begin(0)
        source.close()
        signal.raise_signal(signal.SIGUSR2)
        heard = Heard(source)
        assert heard.noticed.wait(WAIT_S)
        heard.close()
        source.close()
        signal.raise_signal(signal.SIGUSR2)
    finally:
        signal.signal(signal.SIGUSR2, before)
    assert came == [signal.SIGUSR2] * 2


@pytest.mark.parametrize("text", ["signal:KILL", "signal:TERM", "signal:", "signal:USR3"])
def test_signal_that_is_no_notice_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="signal: and a name such as USR1"):
        from_text(text)
