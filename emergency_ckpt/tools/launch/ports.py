"""Loopback ports that stay reserved from their choice to the server's start."""

from __future__ import annotations

import socket

LOOPBACK = "127.0.0.1"


class ReservedPort:
    """A free TCP port on loopback, reserved while this object is open.

    The socket is bound with SO_REUSEPORT and never listens. No other program can take the port
    before the coordinator starts, but a server of the same user that sets SO_REUSEPORT too, as
    gRPC does, can bind it and gets every connection.
    """

    def __init__(self) -> None:
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        try:
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            self._socket.bind((LOOPBACK, 0))
        except OSError:
            self._socket.close()
            raise
        self.address = f"{LOOPBACK}:{self._socket.getsockname()[1]}"

    def close(self) -> None:
        """Release the port."""
        self._socket.close()
