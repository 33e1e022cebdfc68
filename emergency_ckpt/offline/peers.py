"""The RAM of hosts whose processes, or ``eckpt serve``, answer: listed, and copied to this host."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from collections.abc import Generator, Iterable, Mapping, Sequence
from pathlib import Path

import msgspec

from emergency_ckpt.core.limits import MAX_HOST_STATE_BYTES
from emergency_ckpt.core.restore.inventory import HolderInventory, Inventory
from emergency_ckpt.core.timeline import newest
from emergency_ckpt.errors import CheckpointError
from emergency_ckpt.survey.places import Places, SurveyFault
from emergency_ckpt.tiers.local.manifest import end_of
from emergency_ckpt.tiers.local.tier import LocalTier
from emergency_ckpt.transfer.client import TransferClient
from emergency_ckpt.transfer.source import ShardTarget
from emergency_ckpt.types import Contents, SaveId, Writer


def ask_peers(
    peers: Iterable[str], run_id: str, secret: bytes, inventory: Inventory
) -> tuple[list[HolderInventory], dict[str, Contents], list[SurveyFault]]:
    """Return the inventories and manifests of live peers, and a fault for each that is silent."""
    asked: list[HolderInventory] = []
    manifests: dict[str, Contents] = {}
    faults: list[SurveyFault] = []
    with TransferClient(run_id=run_id, secret=secret) as client:
        for address in peers:
            try:
                found = client.inventory(address)
                for held in found.tensors:
                    if held.digest not in manifests and held.digest not in inventory.manifests:
                        manifests[held.digest] = client.fetch_contents(address, held.digest)
            except CheckpointError as error:
                faults.append(SurveyFault.of(address, error))
                continue
            asked.append(msgspec.structs.replace(found, holder=address, address=address))
    return asked, manifests, faults


class PeerCopies:
    """Copies of one save's parts that peers alone have, on a scratch ramdisk of this host.

    Each manifest of the peers gets a process directory of its own, signed as this run's are.
    """

    def __init__(self, scratch: Path, save: SaveId, places: Places, secret: bytes) -> None:
        self._scratch = scratch
        self._save = save
        self._places = places
        self._client = TransferClient(run_id=save.run_id, secret=secret)
        self._count = 0
        self.faults: list[SurveyFault] = []

    def fetch(self, asked: Sequence[HolderInventory], inventory: Inventory, own: set[str]) -> None:
        """Fetch the manifests that are not among ``own``, and all host states. Blocks.

        A peer that fails is a fault, and the next one with the same manifest is asked.
        """
        done, states = set(own), set[tuple[int, int, str]]()
        with self._client:
            for peer in asked:
                tier = self._tier()
                try:
                    for held in peer.tensors:
                        if held.save == self._save and held.digest not in done:
                            contents = inventory.manifests[held.digest]
                            self._tensors(tier, peer.address, held.digest, contents)
                            done.add(held.digest)
                    self._host_states(tier, peer, states)
                except CheckpointError as error:
                    self.faults.append(SurveyFault.of(peer.address, error))
                finally:
                    tier.close()

    def _tier(self) -> LocalTier:
        self._count += 1
        return LocalTier.open(
            self._scratch,
            self._save.run_id,
            Writer(self._count, 0, 0, "drain"),
            host_state_limit_bytes=MAX_HOST_STATE_BYTES,
            copy_threads=1,
            start="drain",
            signer=self._places.signer(self._save.run_id),
        )

    def _tensors(self, tier: LocalTier, address: str, digest: str, contents: Contents) -> None:
        with tier.begin_write(self._save, end_of(contents)) as writer:
            wanted = [
                ShardTarget(shard=index, nbytes=entry.nbytes, offset=entry.offset)
                for index, entry in enumerate(contents.shards)
            ]
            # The CRC32Cs are compared when the shards are read.
            self._client.fetch_shards(
                address, digest, wanted, writer.mapping, self._places.timeout_s
            )
            writer.stage(contents)
            writer.publish()

    def _host_states(
        self, tier: LocalTier, peer: HolderInventory, done: set[tuple[int, int, str]]
    ) -> None:
        for held in peer.host_states:
            key = (held.owner, held.count, held.digest)
            if held.save == self._save and key not in done:
                data = self._client.fetch_host_state(
                    peer.address, held.save, held.owner, held.count
                )
                tier.publish_host_state(held.save, held.owner, held.count, data)
                done.add(key)


def merged(
    inventory: Inventory, asked: Sequence[HolderInventory], manifests: Mapping[str, Contents]
) -> Inventory:
    """Return the RAM of this host's ramdisks and of the peers together."""
    return msgspec.structs.replace(
        inventory,
        holders=(*inventory.holders, *asked),
        manifests={**inventory.manifests, **manifests},
        timeline=newest(inventory.timeline, *(each.timeline for each in asked)),
    )


@contextlib.contextmanager
def scratch_ramdisk(local_dirs: Sequence[Path]) -> Generator[Path]:
    """Make a directory on the first ramdisk, else on /dev/shm; removed at the end.

    Its name begins with a dot, so that it is not taken for a run.
    """
    base = local_dirs[0] if local_dirs else Path("/dev/shm")  # noqa: S108  a ramdisk, mode 0700
    path = Path(tempfile.mkdtemp(prefix=".eckpt-drain-", dir=base))
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)
