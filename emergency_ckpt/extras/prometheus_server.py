"""Samples for Prometheus: its metrics, and the server that a scraper asks.

Needs the extra ``metrics`` (prometheus-client).
"""

from __future__ import annotations

import contextlib
import functools
import io
import socket
import socketserver
import threading
import time
from collections.abc import Callable
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from absl import logging
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, make_wsgi_app

from emergency_ckpt.errors import ConfigError
from emergency_ckpt.events import Event
from emergency_ckpt.extras.metrics import METRICS, samples_of
from emergency_ckpt.forked import drop_in_child

MAX_SCRAPES = 16
"""Scrapes at one time. A further connection takes the place of the one that has been silent for the
longest time; when none is silent, the further connection is closed."""

_DEADLINE_S = 10.0
_PLACE_WAIT_S = 1.0  # until the thread of a connection that was ended has given its place up
_BUCKETS = tuple(base * 10.0**power for power in range(-4, 3) for base in (1, 2.5, 5))

_lock = threading.Lock()
_servers: dict[tuple[str, int], MetricsServer] = {}
"""The servers of ``serve_metrics``, by address as asked for."""


class RunMetrics:
    """All metrics; each has the label ``run``, and at most one more."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._collectors: dict[str, Any] = {}
        for metric in METRICS:
            labels = ("run", metric.label) if metric.label else ("run",)
            kind: Any = Counter if metric.kind == "counter" else Gauge
            if metric.kind == "histogram":
                kind = functools.partial(Histogram, buckets=_BUCKETS)
            collector = kind(metric.name, metric.meaning, labels, registry=self.registry)
            self._collectors[metric.name] = collector

    def __call__(self, event: Event) -> None:
        """Count ``event``."""
        run = event.origin.run_id
        for sample in samples_of(event.name, event.fields, event.time_s):
            metric = sample.metric
            labels = (run, sample.label) if metric.label else (run,)
            collector = self._collectors[metric.name].labels(*labels)
            if metric.kind == "histogram":
                collector.observe(sample.value)
            elif metric.kind == "counter":
                collector.inc(max(0.0, sample.value))
            elif metric.kind == "gauge":
                collector.set(sample.value)
            else:
                collector.set_function(_age_since(sample.value))


def _age_since(since_s: float) -> Callable[[], float]:
    return lambda: max(0.0, time.time() - since_s)


OF_PROGRAM = RunMetrics()
"""The metrics of this program: a checkpointer that is built again goes on counting."""


class _Handler(WSGIRequestHandler):
    def parse_request(self) -> bool:
        """Read the request, after which no further connection takes its place."""
        is_request = super().parse_request()
        server: Any = self.server
        server.request_came(self.connection)
        return is_request

    def log_message(self, format: str, *args: Any) -> None:
        """Write no line for each scrape."""

    def get_stderr(self) -> io.StringIO:
        """Drop the tracebacks of the application: a scraper may cause one by each request."""
        return io.StringIO()


class MetricsServer(socketserver.ThreadingMixIn, WSGIServer):
    """Answers scrapes in threads of its own. Made by ``serve_metrics``; each user calls ``close``.

    Attributes:
      port: the port of its socket.
    """

    daemon_threads = True
    block_on_close = False
    allow_reuse_port = False
    request_queue_size = MAX_SCRAPES

    def __init__(
        self, host: str, port: int, metrics: RunMetrics, *, deadline_s: float = _DEADLINE_S
    ) -> None:
        """``deadline_s``: of each scrape, from its connection to the last byte of the answer."""
        self.users = 0
        self._places = threading.Semaphore(MAX_SCRAPES)
        self._deadline_s = deadline_s
        self._ends_s: dict[Any, float] = {}  # by connection
        self._silent: dict[Any, None] = {}  # without a whole request yet, in the order of accept
        try:
            super().__init__((host, port), _Handler)
        except OSError as error:
            raise ConfigError(
                [
                    f"Prometheus port {port} on {host}: {error.strerror or error}; each process of"
                    " a host needs a port of its own (0 takes a free one)"
                ]
            ) from error
        self.set_app(make_wsgi_app(metrics.registry))
        self.port = self.server_port
        self._thread = threading.Thread(
            target=self.serve_forever, name=f"eckpt-metrics {self.port}", daemon=True
        )
        self._thread.start()
        drop_in_child(self, socketserver.TCPServer.server_close)

    def close(self) -> None:
        """Stop listening after the last user's call. Does not wait for scrapes under way."""
        with _lock:
            self.users -= 1
            if self.users > 0:
                return
            for key in [key for key, server in _servers.items() if server is self]:
                del _servers[key]
        self.shutdown()
        self.server_close()
        self._thread.join()

    def server_bind(self) -> None:
        """Bind without the base class's question to a name server."""
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = str(self.server_address[0]), self.server_address[1]
        self.setup_environ()

    def process_request(self, request: Any, client_address: Any) -> None:
        """Answer in a thread, or close the connection when too many scrapes are under way."""
        if self._places.acquire(blocking=False) or self._took_silent_place():
            self._ends_s[request] = time.monotonic() + self._deadline_s
            self._silent[request] = None
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def _took_silent_place(self) -> bool:
        """End the connection that has been silent for the longest time, and take its place.

        Sixteen silent connections, opened again at each deadline, would shut every scraper out.
        """
        silent = next(iter(list(self._silent)), None)
        if silent is None:
            return False
        self.request_came(silent)
        with contextlib.suppress(OSError):  # it has just ended
            silent.shutdown(socket.SHUT_RDWR)
        return self._places.acquire(timeout=_PLACE_WAIT_S)

    def request_came(self, request: Any) -> None:
        """Count the connection no longer as silent."""
        self._silent.pop(request, None)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Answer one request."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._ends_s.pop(request, None)
            self._silent.pop(request, None)
            self._places.release()

    def service_actions(self) -> None:
        """End the scrapes that have had their time. Called twice a second, and after each one."""
        now_s = time.monotonic()
        for request, end_s in list(self._ends_s.items()):
            if now_s >= end_s:
                with contextlib.suppress(OSError):  # it has just ended
                    request.shutdown(socket.SHUT_RDWR)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Log what a scraper caused at the lowest level: it may be repeated without end."""
        logging.vlog(1, "metrics: a scrape from %s failed", client_address[0], exc_info=True)


def serve_metrics(host: str, port: int) -> MetricsServer:
    """Return the server at ``host:port``; 0 takes a free port. Checkpointers of a program share it.

    Raises:
      ConfigError: another program has the port.
    """
    with _lock:
        server = _servers.get((host, port))
        if server is None:
            server = _servers[host, port] = MetricsServer(host, port, OF_PROGRAM)
        server.users += 1
        return server
