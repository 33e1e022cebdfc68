"""Bring back non-tensor state: this process's own document, or a remap of all documents."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future

from absl import logging

from emergency_ckpt.background import run_in_thread
from emergency_ckpt.cluster.job import Job
from emergency_ckpt.cluster.shard_source import ProcessHoldings, holder_name
from emergency_ckpt.core.restore.inventory import Quarantined
from emergency_ckpt.core.restore.plan_types import HostStateFetch
from emergency_ckpt.errors import (
    CheckpointError,
    CorruptData,
    HostStateError,
    NotHeld,
)
from emergency_ckpt.restore.holders import HolderCalls
from emergency_ckpt.restore.room import RestoreRoom
from emergency_ckpt.restore.shards import CopiesFailed
from emergency_ckpt.state import host_state as host_states
from emergency_ckpt.state.host_state_codec import as_stateful
from emergency_ckpt.types import HostStateRemap, SaveId


def fetch_documents(
    holdings: ProcessHoldings,
    calls: HolderCalls,
    room: RestoreRoom,
    fetches: Sequence[HostStateFetch],
    addresses: Mapping[str, str],
    save: SaveId,
    count: int,
    me: str,
    process: tuple[int, int],
) -> list[host_states.HostStateDocument]:
    """Return the documents that this process needs, from its own RAM or from peers.

    A fetched document of this process's share is published here too: its own document, so that it
    has as many holders as before the loss, and where a remap is due, an equal part of all. The
    other documents of a remap are only read: each process needs all of them, and keeps few.
    CopiesFailed when no source has a document, HolderUnreachable.

    Args:
      count: number of processes at the save.
      me: name of this process as a holder.
      process: its index, and the number of processes now.
    """

    index, process_count = process

    def fetch(request: HostStateFetch) -> host_states.HostStateDocument:
        name = f"host state of process {request.owner}"
        failed: list[Quarantined] = []

        def ask(source: str) -> tuple[str, bytes, host_states.HostStateDocument]:
            if source == me:
                data = holdings.host_state_bytes(save, request.owner, count)
            else:
                address = addresses[source]
                data = calls.client.fetch_host_state(address, save, request.owner, count)
            if data is None:
                raise NotHeld("read", name, "not here any more")
            document = host_states.decode(data)
            if document.digest != request.digest or document.save != save:
                raise CorruptData("read", name, "another one")
            return source, data, document

        def note(source: str, error: CheckpointError) -> None:
            logging.warning("%s at %s: %s", name, source, error)
            failed.append(Quarantined(source, request.digest))

        own_first = sorted(request.sources, key=lambda source: source != me)
        answer = calls.first(f"{name} at step {save.step}", own_first, ask, note)
        if answer is None:
            raise CopiesFailed(save.step, failed)
        source, data, document = answer
        if source != me and request.owner % process_count == index:
            room.publish_host_state(save, request.owner, count, data)
        return document

    return [fetch(wanted) for wanted in fetches]


class HostStateRestore:
    """The caller's non-tensor state in one restore, which can be undone.

    A thread also sends this process's document of the step to each buddy. So a buddy that lost its
    RAM keeps a copy again, as after a save, and the restore goes on meanwhile.

    Attributes:
      restored: the value as restored; None where there was none.
    """

    def __init__(self, job: Job, value: object, buddies: Sequence[int]) -> None:
        self._job = job
        self._value = value
        self._buddies = buddies
        self._before = host_states.capture(value)
        self._moved = False
        self._pushed: Future[None] | None = None
        self.restored: object = None

    @property
    def size_bytes(self) -> int:
        """Return the size of a document of the value as it was before."""
        return host_states.size_of(self._before)

    def apply(self, save: SaveId, documents: Sequence[host_states.HostStateDocument]) -> None:
        """Send this process's document of ``save`` to the buddies, and apply it to the value."""
        job = self._job
        # The step is complete, whatever the end of this attempt: a copy of it does no harm.
        data = job.holdings.host_state_bytes(save, *job.process)
        if data is not None and self._buddies:
            try:
                self._pushed = run_in_thread("eckpt-push", lambda: self._push(save, data))
            except RuntimeError:  # the process may have no more threads
                self._push(save, data)
        if self._value is not None:
            self._moved = True
            remap = job.config.host_state_remap
            self.restored = apply_host_state(self._value, documents, remap, job.process)

    def _push(self, save: SaveId, data: bytes) -> None:
        for buddy in self._buddies:
            try:
                self._job.peers.push_host_state(buddy, save, data)
            except CheckpointError as error:
                # The restore does not fail; until the next save there is one copy less.
                self._job.events.emit(
                    "restore.peer_unreachable",
                    role="buddy",
                    peer=holder_name(buddy),
                    reason=str(error),
                )

    def finish(self) -> None:
        """Wait for the pushes to the buddies."""
        pushed, self._pushed = self._pushed, None
        if pushed is not None:
            pushed.result()

    def undo(self) -> None:
        """Give the value its former state back: the attempt failed, here or on another process.

        An object that refuses this state is reported, and ends neither the next attempt nor the
        error of this one.
        """
        self.finish()
        if self._moved:
            self._moved = False
            try:
                host_states.apply(self._value, self._before)
            except HostStateError as error:
                text = f"the host state is not what it was before the restore: {error}"
                self._job.events.emit("restore.note", text=text)


def apply_host_state(
    target: object,
    documents: Sequence[host_states.HostStateDocument],
    remap: HostStateRemap | None,
    process: tuple[int, int],
) -> object:
    """Apply the documents to the caller's object, and return the restored value."""
    if not documents:
        logging.warning("the restored step has no non-tensor state; it is left as it is")
        return target
    me, count = process
    if len(documents) == 1 and documents[0].count == count:
        return host_states.apply(target, documents[0].payload)
    if remap is None:
        raise HostStateError(
            "restore",
            f"host state of process {me}",
            "it was saved by another number of processes",
            expected=count,
            actual=len(documents),
            hint="set host_state_remap",
        )
    payloads = [d.payload for d in sorted(documents, key=lambda document: document.owner)]
    value = remap([host_states.value_of(payload) for payload in payloads], me, count)
    stateful = as_stateful(target)
    if stateful is not None:
        stateful.set_state(value)  # as it is: the remap knows what the object takes
        return target
    return host_states.apply(target, host_states.payload_for(target, value))
