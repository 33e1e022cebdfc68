"""Scrapes over real sockets: of a checkpointer, by several, by rude ones, and of a taken port."""

from __future__ import annotations

import re
import select
import socket
import threading
import time
import urllib.request
from collections.abc import Iterator
from typing import Any

import prometheus_client
import pytest
from prometheus_client.registry import Collector
from world import World, finish, save_all

from emergency_ckpt.config import Config
from emergency_ckpt.errors import ConfigError, LocalTierError
from emergency_ckpt.events import Event, Origin
from emergency_ckpt.extras import prometheus_server
from emergency_ckpt.extras.prometheus import Prometheus
from emergency_ckpt.extras.prometheus_server import (
    MAX_SCRAPES,
    MetricsServer,
    RunMetrics,
    serve_metrics,
)


def scraped(port: int) -> dict[str, float]:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=20) as answer:
        text = answer.read().decode()
    lines = (line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    return {
        re.sub(r',?run="[^"]*"', "", name).replace("{,", "{"): float(value) for name, value in lines
    }


def port_of(events: list[Event]) -> int:
    (port,) = [event.fields["port"] for event in events if event.name == "start.metrics"]
    assert isinstance(port, int)
    return port


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> MetricsServer:
    monkeypatch.setattr(prometheus_server, "OF_PROGRAM", RunMetrics())
    return serve_metrics("127.0.0.1", 0)


def test_scrape_shows_saves_and_the_restore(world: World) -> None:
    seen: list[Event] = []
    with world.open_both(on_event=[seen.append, "prometheus(0)"]) as checkpointer:
        before = scraped(port_of(seen))
        save_all(checkpointer, world, 1, 2)
        now = scraped(port_of(seen))
        assert now['eckpt_newest_step{tier="local"}'] == 2
        assert now['eckpt_newest_step{tier="persistent"}'] == 2
        stalls = 'eckpt_save_stall_seconds_count{tier="local"}'
        assert now[stalls] - before.get(stalls, 0) == 2
        for phase in ("copy", "publish", "push", "vote", "host_states", "tensors"):
            assert now[f'eckpt_save_phase_seconds_count{{phase="{phase}"}}'] >= 1
        assert 0 <= now['eckpt_newest_step_age_seconds{tier="local"}'] < 300
        assert now["eckpt_ram_slots{}"] == 3  # one more, for the save to storage
        assert now["eckpt_ram_reserved_bytes{}"] > 0
    del seen[:]
    with world.open_both(on_event=[seen.append, "prometheus(0)"]) as checkpointer:
        checkpointer.restore(state=world.state(0))
        after = scraped(port_of(seen))
        assert after["eckpt_restored_step{}"] == 2
        assert after["eckpt_last_restore_seconds{}"] > 0
        assert after['eckpt_restored_bytes_total{source="own_ram"}'] > 0
        assert after['eckpt_restore_phase_seconds_count{phase="shards"}'] == 1
        assert after[stalls] == now[stalls]  # of the same program: it goes on counting
    with pytest.raises(OSError, match="refused"):
        scraped(port_of(seen))


def test_save_that_changes_nothing_is_counted(world: World) -> None:
    seen: list[Event] = []
    name = "eckpt_save_unchanged_total{}"
    with world.open(on_event=[seen.append, "prometheus(0)"]) as checkpointer:
        save_all(checkpointer, world, 1, 2)
        before = scraped(port_of(seen)).get(name, 0)
        for step in (3, 4):
            checkpointer.save(step=step, state=world.state(2), host_state={"at": step})
            finish(checkpointer)
        assert scraped(port_of(seen))[name] - before == 1, "told at step 3 alone"


def test_port_of_another_program_is_an_error_by_name(world: World) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"Prometheus port {port} on 127.0.0.1: .*in use"):
            world.open(on_event=Prometheus(port))
    with world.open(on_event=Prometheus(port)):  # what the failed start held is free
        assert scraped(port) is not None


def test_port_without_the_package_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    config = Config(dir="/p/run", local_dir="/dev/shm/e", on_event="prometheus(1)")
    with pytest.raises(ConfigError, match=r"emergency-ckpt\[metrics\]"):
        config.validated()


@pytest.mark.parametrize("port", ["9400", None, 9400.5, True, -1, 65536])
def test_port_that_is_none_is_a_config_error(port: Any) -> None:
    with pytest.raises(ConfigError, match="a port for Prometheus is 0 to 65535"):
        Prometheus(port)


def test_two_checkpointers_of_a_program_share_a_port(server: MetricsServer) -> None:
    second = serve_metrics("127.0.0.1", 0)
    assert second is server
    for run in ("one", "two"):
        origin = Origin(0, run_id=run)
        prometheus_server.OF_PROGRAM(Event("start.ready", {"copies": 3}, 1.0, origin))
    server.close()
    with urllib.request.urlopen(f"http://127.0.0.1:{server.port}/metrics") as answer:
        text = answer.read().decode()
    assert 'eckpt_copies{run="one"} 3.0' in text
    assert 'eckpt_copies{run="two"} 3.0' in text
    second.close()
    with pytest.raises(OSError, match="refused"):
        scraped(server.port)


def test_failed_start_leaves_the_port_of_another(world: World) -> None:
    observer = Prometheus(0)
    seen: list[Event] = []
    world.persistent.mkdir(parents=True)
    no_directory = world.persistent / "file"
    no_directory.write_text("")
    with world.open(on_event=[seen.append, observer]) as checkpointer:
        save_all(checkpointer, world, 1)  # else there may be nothing to scrape
        with pytest.raises(LocalTierError):
            world.open(on_event=observer, local_dir=str(no_directory))
        assert scraped(port_of(seen))
    with pytest.raises(OSError, match="refused"):
        scraped(port_of(seen))


def test_rude_scrapers_disturb_nobody(server: MetricsServer) -> None:
    rude = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(2)]
    rude[0].sendall(b"GET /metr")  # and silence
    rude[1].sendall(bytes(range(256)) * 300)
    assert scraped(server.port) is not None
    prometheus_server.OF_PROGRAM(Event("divergence", {}, 1.0, Origin(0)))
    assert scraped(server.port)["eckpt_divergence_total{}"] == 1
    before_s = time.monotonic()
    server.close()  # waits for nobody
    assert time.monotonic() - before_s < 5
    for each in rude:
        each.close()


def test_request_that_the_application_fails_on_writes_nothing(
    server: MetricsServer, capfd: pytest.CaptureFixture[str]
) -> None:
    accept = "application/openmetrics-text; version=x"
    address = f"http://127.0.0.1:{server.port}/metrics"
    with pytest.raises(OSError, match="500"):
        urllib.request.urlopen(urllib.request.Request(address, headers={"Accept": accept}))
    server.close()
    assert capfd.readouterr().err == ""


def test_dripping_scrapers_end_at_the_deadline() -> None:
    """Each byte comes in time, the request as a whole does not."""
    server = MetricsServer("127.0.0.1", 0, prometheus_server.OF_PROGRAM, deadline_s=1.0)
    try:
        rude = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(MAX_SCRAPES)]
        give_up_s = time.monotonic() + 30
        while rude and time.monotonic() < give_up_s:
            rude = [each for each in rude if drips(each)]
            time.sleep(0.05)
        assert not rude
        assert scraped(server.port) is not None
    finally:
        server.close()


def drips(scraper: socket.socket) -> bool:
    """Send one byte; False when the connection has ended."""
    try:
        scraper.sendall(b"G")
    except OSError:
        scraper.close()
        return False
    return True


def test_scrape_among_silent_connections_is_answered() -> None:
    """The connection that has been silent for the longest time gives its place up.

    A scrape may find the place of the one before not yet free, and take a further one.
    """
    server = MetricsServer("127.0.0.1", 0, prometheus_server.OF_PROGRAM, deadline_s=600.0)
    try:
        silent = [
            socket.create_connection(("127.0.0.1", server.port)) for _ in range(MAX_SCRAPES + 4)
        ]
        for _ in range(3):
            assert scraped(server.port) is not None
        assert [each.recv(1) for each in silent[:5]] == [b""] * 5
        assert select.select(silent[7:], [], [], 0)[0] == []
        for each in silent:
            each.close()
    finally:
        server.close()


def test_scrapers_beyond_the_bound_are_closed() -> None:
    """No scrape under way gives its place up."""
    asked, go_on = threading.Semaphore(0), threading.Event()

    class Slow(Collector):
        def collect(self) -> Iterator[prometheus_client.Metric]:
            asked.release()
            go_on.wait(60)
            return iter(())

    metrics = RunMetrics()
    server = MetricsServer("127.0.0.1", 0, metrics, deadline_s=600.0)
    metrics.registry.register(Slow())
    try:
        busy = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(MAX_SCRAPES)]
        for each in busy:
            each.sendall(b"GET /metrics HTTP/1.0\r\n\r\n")
        for _ in busy:
            assert asked.acquire(timeout=60)
        late = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(3)]
        assert [each.recv(1) for each in late] == [b"", b"", b""]
        go_on.set()
        for each in busy:
            assert each.recv(1) == b"H"
        for each in (*busy, *late):
            each.close()
    finally:
        server.close()
