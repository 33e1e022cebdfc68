"""The RAM of hosts whose processes, or ``eckpt serve``, answer."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Generator, Iterable
from functools import partial
from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt

from emergency_ckpt._native import Mapping
from emergency_ckpt.background import new_memory
from emergency_ckpt.core.restore.inventory import (
    HeldHostState,
    HolderInventory,
    Inventory,
)
from emergency_ckpt.errors import CheckpointError, ConfigError
from emergency_ckpt.ram.manifest import decode_contents
from emergency_ckpt.ram.process_files import Ledger, Published
from emergency_ckpt.tools.survey.places import SurveyFault
from emergency_ckpt.tools.survey.ramdisk import ProcessFolder, RamCopy
from emergency_ckpt.tools.survey.survey import Survey
from emergency_ckpt.transfer.client import TransferClient
from emergency_ckpt.transfer.source import ShardTarget
from emergency_ckpt.types import ShardEntry
from emergency_ckpt.work_progress import WorkProgress


@contextlib.contextmanager
def peer_ram(
    survey: Survey, run_id: str, peers: Iterable[str], command: str, progress: WorkProgress
) -> Generator[PeerRam]:
    """Yield the RAM of ``peers``. ConfigError about ``command`` without the run's secret.

    A peer that is silent for a while, at most ``survey.places.timeout_s``, has no part in it.

    Args:
      survey: of this host, whose manifests need not be fetched.
      progress: counts the pieces of shards that come; no shard is waited for after its end.
    """
    secret = survey.places.secret
    if secret is None:
        raise ConfigError(["--peers needs the run's secret"], target=command)
    inventory = survey.inventory(run_id)
    longest_s = survey.places.timeout_s
    with (
        TransferClient(
            run_id=run_id,
            secret=secret,
            connect_timeout_s=min(longest_s, 10.0),
            io_timeout_s=min(longest_s, 30.0),
        ) as client,
        contextlib.closing(PeerRam(client, peers, inventory, run_id, progress)) as others,
    ):
        yield others


class PeerRam:
    """The RAM of peers, of which each shard is fetched when it is read. Not thread-safe.

    Nothing is kept on this host but the shard that was fetched last, because a state may be larger
    than the RAM of one host.

    Attributes:
      asked: the inventory of each peer that answered.
      folders: a process directory for each of these, named by its address.
      faults: one for each peer that is silent.
    """

    def __init__(
        self,
        client: TransferClient,
        peers: Iterable[str],
        inventory: Inventory,
        run_id: str,
        progress: WorkProgress,
    ) -> None:
        """Ask the peers. Blocks. The arguments are those of ``peer_ram``."""
        self.asked: list[HolderInventory] = []
        self.faults: list[SurveyFault] = []
        manifests = dict(inventory.manifests)
        for address in peers:
            try:
                holder = client.inventory(address)
                for manifest in holder.tensors:
                    if manifest.digest not in manifests:
                        data = client.fetch_contents(address, manifest.digest)
                        manifests[manifest.digest] = decode_contents(data, manifest.digest)
            except CheckpointError as error:
                self.faults.append(SurveyFault.of(address, error))
                continue
            self.asked.append(msgspec.structs.replace(holder, holder=address, address=address))
        self._client = client
        self._progress = progress
        self._buffer: Mapping | None = None
        self.folders = tuple(
            ProcessFolder(
                path=Path(peer.address),
                local_dir=Path(peer.address),
                run_id=run_id,
                owner=None,
                ledger=Ledger(peer.incarnation, peer.timeline, peer.known_complete),
                copies=tuple(
                    RamCopy(
                        folder=Path(peer.address),
                        number=number,
                        published=Published(manifest.digest, b"", manifests[manifest.digest]),
                        saved_s=0.0,
                    )
                    for number, manifest in enumerate(peer.tensors)
                ),
                host_states=peer.host_states,
                faults=(),
                version=(),
                read_shard=self._shard,
                read_document=partial(self._document, peer.address),
            )
            for peer in self.asked
        )

    def close(self) -> None:
        """Free the memory of the shard that was fetched last."""
        if self._buffer is not None:
            self._buffer.close()

    def _shard(self, copy: RamCopy, entry: ShardEntry) -> npt.NDArray[np.uint8]:
        """Return the bytes of a shard, valid until the next call. TransferError."""
        if entry.nbytes == 0:
            return np.empty(0, np.uint8)
        published = copy.published
        if self._buffer is None or self._buffer.size_bytes < entry.nbytes:
            self.close()
            self._buffer = new_memory("eckpt-drain", entry.nbytes)
        wanted = ShardTarget(published.contents.shards.index(entry), entry.nbytes, 0)
        address = str(copy.folder)
        self._client.fetch_shards(
            address,
            published.digest,
            [wanted],
            self._buffer,
            deadline_s=self._progress.end_s - time.monotonic(),
            on_bytes=lambda _: self._progress.touch(),  # the bytes count where they are written
        )
        return self._buffer.view(0, entry.nbytes, self)

    def _document(self, address: str, host_state: HeldHostState) -> bytes:
        return self._client.fetch_host_state(
            address, host_state.save, host_state.owner, host_state.count
        )
