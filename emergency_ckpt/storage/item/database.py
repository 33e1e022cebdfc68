"""An OCDBT database with its manifest in memory, until the caller makes the manifest a file."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorstore

from emergency_ckpt.storage.item.array_writes import (
    ArrayWrites,
    database_spec,
    new_context,
)
from emergency_ckpt.storage.orbax_names import MANIFEST
from emergency_ckpt.storage.orbax_reader import kvstore_of


class UnpublishedDatabase:
    """A database in ``folder``. Blocks for storage, until the save is cancelled.

    TensorStore writes data and nodes under random names. Its manifest, by which it would find what
    another writer has left in the folder, stays in memory: the caller creates the file.
    """

    def __init__(self, folder: str, writes: ArrayWrites) -> None:
        self._writes = writes
        self._context = new_context()
        spec = database_spec(kvstore_of(folder)) | {"manifest": {"driver": "memory"}}
        self.store = writes.open(spec, self._context)

    def merge(self, folders: Sequence[str]) -> None:
        """Take over all keys of the databases in ``folders``, which stay where they are."""
        if not folders:
            return
        specs = [database_spec(kvstore_of(folder)) for folder in folders]
        opening = [tensorstore.KvStore.open(spec, context=self._context) for spec in specs]
        transaction = tensorstore.Transaction(atomic=True)
        into = self.store.with_transaction(transaction)
        copies = [self._writes.result(each).experimental_copy_range_to(into) for each in opening]
        for copy in copies:
            self._writes.result(copy)
        self._writes.result(transaction.commit_async())

    def manifest(self) -> bytes | None:
        """Return the bytes of the manifest, or None when nothing was written."""
        memory = tensorstore.KvStore.open({"driver": "memory"}, context=self._context)
        found: Any = self._writes.result(self._writes.result(memory).read(MANIFEST))
        return found.value if found.state == "value" else None
