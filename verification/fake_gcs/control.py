"""The client of a running server's control interface, in this process or another."""

from __future__ import annotations

import http.client
import os
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from typing import Any
from urllib.parse import quote, urlencode, urlsplit

import msgspec

from emergency_ckpt.errors import CheckpointError
from fake_gcs.admin import API_PREFIX
from fake_gcs.faults import FaultRule, FaultState
from fake_gcs.request_log import RequestRecord

_JSON = {"Content-Type": "application/json"}
_TIMEOUT_S = 30.0


class FakeGcsError(CheckpointError):
    """The fake server could not be started or reached, or refused a test's request."""


class GcsControl:
    """The faults, log and objects of the server at ``url``. Its requests get no faults, no log.

    Every method blocks for one local round trip, and raises FakeGcsError. Thread-safe.
    """

    def __init__(self, url: str) -> None:
        self.url = url

    def environment(self) -> dict[str, str]:
        """Return the environment of a process whose GCS clients use this server.

        Set it before TensorStore, gcsfs or Orbax are imported.
        """
        exempt = {"127.0.0.1", "localhost"}
        return {
            "STORAGE_EMULATOR_HOST": self.url,
            "TENSORSTORE_GCS_HTTP_URL": self.url,
            "GOOGLE_AUTH_TOKEN_FOR_TESTING": "x",
            "FSSPEC_GCS_TOKEN": "anon",
            "NO_GCE_CHECK": "true",
            "GOOGLE_CLOUD_PROJECT": "test-project",
            # Otherwise gcsfs asks storage.googleapis.com over gRPC for the kind of bucket.
            "GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT": "false",
            # A proxy that is configured for the machine must not get these requests.
            "NO_PROXY": ",".join(sorted(exempt.union(_listed("NO_PROXY")))),
            "no_proxy": ",".join(sorted(exempt.union(_listed("no_proxy")))),
        }

    # Faults

    def add_fault(self, rule: FaultRule) -> int:
        """Add the rule after the existing ones; return its id."""
        body = self._call("POST", "/_fake/faults", msgspec.json.encode(rule))
        return msgspec.json.decode(body, type=int)

    def remove_fault(self, rule_id: int) -> None:
        self._call("DELETE", f"/_fake/faults?rule_id={rule_id}")

    def clear_faults(self) -> None:
        self._call("DELETE", "/_fake/faults")

    def fault_states(self) -> list[FaultState]:
        """Return the active rules with the number of requests that each has matched and hit."""
        return msgspec.json.decode(self._call("GET", "/_fake/faults"), type=list[FaultState])

    @contextmanager
    def fault(self, rule: FaultRule) -> Generator[int]:
        """Activate the rule within the block."""
        rule_id = self.add_fault(rule)
        try:
            yield rule_id
        finally:
            self.remove_fault(rule_id)

    # Request log

    def requests(self) -> list[RequestRecord]:
        """Return the finished requests, in the order of their end."""
        found = self._call("GET", "/_fake/requests")
        return msgspec.json.decode(found, type=list[RequestRecord])

    def clear_requests(self) -> None:
        self._call("DELETE", "/_fake/requests")

    # Objects

    def put_object(self, bucket: str, name: str, data: bytes) -> int:
        """Store ``data`` in place of any object of that name; return its generation."""
        query = urlencode({"uploadType": "media", "name": name})
        path = f"{API_PREFIX}/upload/storage/v1/b/{quote(bucket, safe='')}/o?{query}"
        return int(_fields(self._call("POST", path, data))["generation"])

    def object_bytes(self, bucket: str, name: str) -> bytes:
        return self._call("GET", f"{_object_path(bucket, name)}?alt=media")

    def delete_object(self, bucket: str, name: str) -> None:
        self._call("DELETE", _object_path(bucket, name))

    def object_names(self, bucket: str, prefix: str = "") -> list[str]:
        """Return all names, in order."""
        names: list[str] = []
        query = {"prefix": prefix}
        while True:
            path = f"{API_PREFIX}/storage/v1/b/{quote(bucket, safe='')}/o?{urlencode(query)}"
            page = _fields(self._call("GET", path))
            names += [item["name"] for item in page.get("items", [])]
            if "nextPageToken" not in page:
                return names
            query["pageToken"] = page["nextPageToken"]

    def objects(self, bucket: str, prefix: str = "") -> dict[str, bytes]:
        """Return the bytes of all objects whose names begin with ``prefix``, in their order."""
        query = urlencode({"bucket": bucket, "prefix": prefix})
        body = self._call("GET", f"/_fake/objects?{query}")
        return msgspec.json.decode(body, type=dict[str, bytes])

    def put_objects(self, bucket: str, objects: Mapping[str, bytes]) -> None:
        """Store each in place of any object of its name."""
        path = f"/_fake/objects?{urlencode({'bucket': bucket})}"
        self._call("POST", path, msgspec.json.encode(objects))

    def delete_objects(self, bucket: str, prefix: str) -> None:
        """Delete all whose names begin with ``prefix``."""
        query = urlencode({"bucket": bucket, "prefix": prefix})
        self._call("DELETE", f"/_fake/objects?{query}")

    def _call(self, method: str, path: str, body: bytes | None = None) -> bytes:
        # http.client, because urllib.request may use a proxy.
        connection = http.client.HTTPConnection(urlsplit(self.url).netloc, timeout=_TIMEOUT_S)
        try:
            connection.request(method, path, body, _JSON if body is not None else {})
            reply = connection.getresponse()
            data = reply.read()
        except (OSError, http.client.HTTPException) as error:
            raise FakeGcsError(
                method.lower(), path, f"no answer from {self.url}: {error}", hint="is it running?"
            ) from error
        finally:
            connection.close()
        if reply.status >= 300:
            text = data.decode(errors="replace")[:500]
            raise FakeGcsError(method.lower(), path, text, expected="2xx", actual=reply.status)
        return data


def _object_path(bucket: str, name: str) -> str:
    return f"{API_PREFIX}/storage/v1/b/{quote(bucket, safe='')}/o/{quote(name, safe='')}"


def _fields(body: bytes) -> dict[str, Any]:
    return msgspec.json.decode(body, type=dict[str, Any])


def _listed(variable: str) -> set[str]:
    return {item.strip() for item in os.environ.get(variable, "").split(",") if item.strip()}
