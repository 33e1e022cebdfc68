"""Google's Storage Control client, which gcsfs asks about folders, on the folders of ``FakeGcs``.

The real one speaks gRPC with TLS to Google alone. ``install`` puts this one into gcsfs.
"""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any
from urllib.parse import quote

from gcsfs.extended_gcsfs import ExtendedGcsFileSystem
from google.api_core import exceptions


class FolderClient:
    """The calls that gcsfs makes, each as one of the JSON API."""

    def __init__(self, url: str) -> None:
        self._url = url

    async def get_storage_layout(self, *, name: str, **_: Any) -> Any:
        found = self._call("GET", f"b/{name.split('/')[3]}/storageLayout")
        enabled = bool(found["hierarchicalNamespace"]["enabled"])
        return SimpleNamespace(
            location_type=found["locationType"],
            hierarchical_namespace=SimpleNamespace(enabled=enabled),
        )

    async def get_folder(self, *, request: Any, **_: Any) -> Any:
        self._call("GET", _path_of(request.name))
        return _folder(request.name)

    async def create_folder(self, *, request: Any, **_: Any) -> None:
        bucket = request.parent.split("/")[3]
        self._call("POST", f"b/{bucket}/folders", {"name": request.folder_id})

    async def delete_folder(self, *, request: Any, **_: Any) -> None:
        self._call("DELETE", _path_of(request.name))

    async def list_folders(self, *, request: Any, **_: Any) -> AsyncIterator[Any]:
        found = self._call(
            "GET", f"b/{request.parent.split('/')[3]}/folders?prefix={quote(request.prefix)}"
        )
        names = [f"{request.parent}/folders/{each['name']}" for each in found["items"]]

        async def folders() -> AsyncIterator[Any]:
            for name in names:
                yield _folder(name)

        return folders()

    def _call(self, method: str, path: str, body: Any = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(f"{self._url}/storage/v1/{path}", data, method=method)
        try:
            with urllib.request.urlopen(request) as reply:
                return json.loads(reply.read() or b"{}")
        except urllib.error.HTTPError as error:
            if error.code == 404:
                raise exceptions.NotFound(path) from error
            raise exceptions.FailedPrecondition(path) from error


def install(url: str) -> None:
    """Let gcsfs, in this process, ask the server at ``url`` for folders."""
    client = FolderClient(url)

    async def control_plane(_: Any) -> FolderClient:
        return client

    ExtendedGcsFileSystem._get_control_plane_client = control_plane


def _path_of(name: str) -> str:
    bucket, _, folder = name.removeprefix("projects/_/buckets/").partition("/folders/")
    return f"b/{bucket}/folders/{quote(folder, safe='')}"


def _folder(name: str) -> Any:
    return SimpleNamespace(name=name, create_time=None, update_time=None, metageneration=1)
