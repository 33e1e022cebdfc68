"""Where the explorer stops a life: at its k-th change of a directory, or request of a bucket.

Nothing here knows the product: a disk's changes are counted below the C library, so that those of
TensorStore are among them, and a bucket's by the server.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, Protocol
from unittest import mock

from fake_gcs import FaultRule, GcsControl

Mode = Literal["end", "hold", "lose"]
"""``end``: storage takes k changes and refuses all others, to whoever looks afterwards as if the
process had died. ``hold``: the k-th change, or look where k counts these too, waits until it is let
go. ``lose``: the reply to the k-th change gets lost; a bucket's alone."""

SHIM = "explorer_shim.so"
_SOURCE = Path(__file__).with_name("shim.c")
_BUCKET = "bucket"


class Point(Protocol):
    """The point at which a life is stopped."""

    def is_reached(self) -> bool: ...

    def go_on(self) -> None:
        """Let it go on, and count no more. Idempotent."""
        ...


class Place(Protocol):
    """Storage with a directory for each case."""

    name: str

    def url(self, run: str) -> str: ...

    def copy(self, run: str, to: str) -> None: ...

    def remove(self, run: str) -> None: ...

    def files(self, run: str) -> dict[str, bytes]: ...

    def stop(self, mode: Mode, run: str, k: int) -> Point: ...


class Files:
    """The files of a case, as ``format_reader`` asks for them."""

    def __init__(self, data: Mapping[str, bytes]) -> None:
        self._data = data

    def names(self) -> list[str]:
        return sorted(self._data)

    def read(self, name: str) -> bytes:
        return self._data[name]


def compiled(folder: Path) -> Path:
    """Compile the shim into ``folder``. Blocks, for a tenth of a second."""
    path = folder / SHIM
    words = ["-shared", "-fPIC", "-O1", "-w", "-o", str(path), str(_SOURCE), "-ldl"]
    subprocess.run([os.environ.get("CC", "cc"), *words], check=True)
    return path


class Disk:
    """Directories below ``root``, in a process that was started with the shim preloaded."""

    name = "disk"

    def __init__(self, root: Path, shim: str) -> None:
        self._root = root
        self._shim = ctypes.CDLL(shim)
        self._shim.explorer_arm.argtypes = [ctypes.c_char_p, ctypes.c_int, ctypes.c_long]

    def url(self, run: str) -> str:
        return str(self._root / run)

    def copy(self, run: str, to: str) -> None:
        shutil.copytree(self._root / run, self._root / to)

    def remove(self, run: str) -> None:
        shutil.rmtree(self._root / run)

    def files(self, run: str) -> dict[str, bytes]:
        root = self._root / run
        found = (path for path in sorted(root.rglob("*")) if path.is_file())
        return {path.relative_to(root).as_posix(): path.read_bytes() for path in found}

    def stop(self, mode: Mode, run: str, k: int) -> Point:
        self._shim.explorer_arm(f"{self.url(run)}/".encode(), ("", "end", "hold").index(mode), k)
        return _DiskPoint(self._shim)


class _DiskPoint:
    def __init__(self, shim: Any) -> None:
        self._shim = shim

    def is_reached(self) -> bool:
        return bool(self._shim.explorer_is_reached())

    def go_on(self) -> None:
        self._shim.explorer_disarm()


class Bucket:
    """Prefixes of a bucket of the server that this process finds by its environment."""

    name = "bucket"

    def __init__(self) -> None:
        self._control = GcsControl(os.environ["STORAGE_EMULATOR_HOST"])

    def url(self, run: str) -> str:
        return f"gs://{_BUCKET}/{run}"

    def copy(self, run: str, to: str) -> None:
        files = self.files(run).items()
        self._control.put_objects(_BUCKET, {f"{to}/{name}": data for name, data in files})

    def remove(self, run: str) -> None:
        self._control.delete_objects(_BUCKET, f"{run}/")

    def files(self, run: str) -> dict[str, bytes]:
        objects = self._control.objects(_BUCKET, f"{run}/")
        return {name.removeprefix(f"{run}/"): data for name, data in objects.items()}

    def stop(self, mode: Mode, run: str, k: int) -> Point:
        del run  # one case at a time
        rules = {
            "end": FaultRule(kind="status", status_code=403, method="[DP]*", skip=k),
            "hold": FaultRule(kind="hold", skip=k, count=1),
            "lose": FaultRule(kind="lose_reply", method="[DP]*", skip=k, count=1),
        }
        return _BucketPoint(self._control, self._control.add_fault(rules[mode]))


class _BucketPoint:
    def __init__(self, control: GcsControl, rule: int) -> None:
        self._control = control
        self._rule = rule
        self._was_reached: bool | None = None

    def is_reached(self) -> bool:
        if self._was_reached is not None:
            return self._was_reached
        states = self._control.fault_states()
        return any(each.hit for each in states if each.rule_id == self._rule)

    def go_on(self) -> None:
        if self._was_reached is None:
            self._was_reached = self.is_reached()
            self._control.remove_fault(self._rule)


class OldListings:
    """The names in each folder below ``root``, as a file server may go on to show them."""

    def __init__(self, root: str) -> None:
        self._root = root
        self._names = {path: [*folders, *files] for path, folders, files in os.walk(root)}

    @contextlib.contextmanager
    def shown(self) -> Iterator[None]:
        listdir = os.listdir

        def old(path: Any = ".") -> list[str]:
            name = os.fspath(path) if not isinstance(path, int) else ""
            now = listdir(path)
            return self._names.get(name, now) if str(name).startswith(self._root) else now

        with mock.patch.object(os, "listdir", old):
            yield
