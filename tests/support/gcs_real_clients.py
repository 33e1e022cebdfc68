"""The real GCS clients, each in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any

from gcs_clients.worker import receive, send
from places import JOBS

CLIENTS_DIR = JOBS / "gcs_clients"
BUCKET = "bucket"
CALL_TIMEOUT_S = 120.0


class ClientFailure(Exception):
    """The client raised; ``kind`` is the class of its error."""

    def __init__(self, kind: str, text: str) -> None:
        self.kind = kind
        super().__init__(f"{kind}: {text}")


class Client:
    """A real client in a process of its own. ``client.read(bucket, name)`` calls it there."""

    def __init__(self, name: str, environment: dict[str, str]) -> None:
        self.name = name
        path = os.pathsep.join([str(CLIENTS_DIR), os.environ.get("PYTHONPATH", "")])
        self._process = subprocess.Popen(
            [sys.executable, str(CLIENTS_DIR / "worker.py"), f"ops_{name}"],
            env={**os.environ, **environment, "PYTHONPATH": path, "JAX_PLATFORMS": "cpu"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )

    def __getattr__(self, function: str) -> Callable[..., Any]:
        def call(**arguments: Any) -> Any:
            # A call that hangs must end the test, not the test run.
            deadline = threading.Timer(CALL_TIMEOUT_S, self._process.kill)
            deadline.start()
            try:
                send(self._process.stdin, [function, arguments])
                reply = receive(self._process.stdout)
            finally:
                deadline.cancel()
            if "error" in reply:
                raise ClientFailure(reply["error"], reply["text"])
            return reply["value"]

        return call

    def close(self) -> None:
        self._process.stdin.close()
        self._process.wait(timeout=30)
        self._process.stdout.close()
