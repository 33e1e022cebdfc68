"""The metrics of a process for Prometheus, as an observer: ``on_event=Prometheus(9400)``.

Needs prometheus-client: ``pip install 'emergency-ckpt[metrics]'``.
"""

from __future__ import annotations

import importlib.util

from emergency_ckpt.config.table import is_whole_number
from emergency_ckpt.errors import ConfigError
from emergency_ckpt.events import Event
from emergency_ckpt.observer import JobView, Observer


class Prometheus(Observer):
    """Serves the metrics of this process at ``http://<bind_host>:<port>/metrics``.

    On 127.0.0.1 where no ``bind_host`` is set. Each process of a host needs a port of its own; 0
    takes a free one, which the event ``start.metrics`` names.

    Raises:
      ConfigError: no such port, or prometheus-client is not installed.
    """

    def __init__(self, port: int) -> None:
        if not (is_whole_number(port, 0) and port <= 65535):
            raise ConfigError([f"a port for Prometheus is 0 to 65535, not {port!r}"])
        if importlib.util.find_spec("prometheus_client") is None:
            hint = "pip install 'emergency-ckpt[metrics]'"
            raise ConfigError([f"metrics for Prometheus need prometheus-client: {hint}"])
        from emergency_ckpt.extras import prometheus_server  # noqa: PLC0415 - an optional package

        self._port = port
        self._module = prometheus_server
        self._servers: list[prometheus_server.MetricsServer | None] = []
        """One entry for each checkpointer that has begun: its server, or None before ``join``."""

    def __call__(self, event: Event) -> None:
        """Count ``event``."""
        self._module.OF_PROGRAM(event)

    def begin(self, process_index: int) -> None:
        """Keep a place for the server of a checkpointer, whose start may fail before ``join``."""
        del process_index
        self._servers.append(None)

    def join(self, job: JobView) -> None:
        """Serve. ConfigError: another program has the port."""
        self._servers[-1] = server = self._module.serve_metrics(job.host, self._port)
        job.events.emit("start.metrics", host=job.host, port=server.port)

    def close(self) -> None:
        """Stop serving."""
        server = self._servers.pop()
        if server is not None:
            server.close()


def from_text(argument: str) -> Prometheus:
    """Return the observer of the text ``"prometheus(<port>)"``. ConfigError: no such port."""
    if not (argument.isascii() and argument.isdigit() and len(argument) < 6):
        raise ConfigError([f"prometheus({argument!r}): the argument is a port, 0 to 65535"])
    return Prometheus(int(argument))
