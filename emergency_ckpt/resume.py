"""A restore together with the saves around it: held up before, continued from its step after."""

from __future__ import annotations

import dataclasses

from emergency_ckpt.cluster.process_placement import ProcessPlacement
from emergency_ckpt.cluster.rounds import run_on_all
from emergency_ckpt.errors import RamdiskFull, RestoreFailed
from emergency_ckpt.opening import Opened
from emergency_ckpt.restore.request import RestoredState, RestoreRequest
from emergency_ckpt.restore.restore import Restore
from emergency_ckpt.state.tree import PyTree, describe
from emergency_ckpt.types import LOCAL, PERSISTENT, TierName


class Resume:
    """Restores and prefetches of one checkpointer. For the training thread.

    Neither ``save`` nor ``restore`` knows the other: what one has to learn from the other passes
    through here.
    """

    def __init__(self, parts: Opened) -> None:
        self._parts = parts
        self._restores = 0

    def prefetch(self, state: PyTree, step: int | None, *, wants_host_state: bool) -> None:
        """Begin a restore in the background. Collective; returns at once.

        Raises as ``EmergencyCheckpointer.prefetch``.
        """
        request, _ = self._request(state, step, wants_host_state=wants_host_state)
        request = dataclasses.replace(request, tensors_only=not wants_host_state)
        self._parts.prefetches.start(request, self._parts.saver.is_idle, self._parts.held_steps)

    def restore(
        self,
        state: PyTree,
        host_state: object,
        step: int | None,
        *,
        keep_newer: bool,
        tensors_only: bool,
    ) -> Restore:
        """Restore ``step``, and let saves go on from it. Collective; blocks. No save is under way.

        Returns a settled ``Restore``. Raises as ``EmergencyCheckpointer.restore``.
        """
        parts = self._parts
        request, placement = self._request(state, step, wants_host_state=host_state is not None)
        request = dataclasses.replace(request, tensors_only=tensors_only)
        number, self._restores = self._restores, self._restores + 1
        restore = Restore(
            parts.restore_parts,
            request,
            host_state=host_state,
            buddies=placement.buddies,
            number=number,
            keep_newer=keep_newer,
            prefetch=parts.prefetches.current,
        )
        parts.saver.begin_restore()
        try:
            with parts.held_steps():
                restore.run()
            self._settle_on_all(restore, placement, number)
        except BaseException as error:
            restore.undo()
            parts.events.emit("restore.failed", reason=str(error)[:500])
            raise
        finally:
            parts.prefetches.forget()
            parts.saver.end_restore()
        if restore.restored is not None:
            self._continue_from(restore.restored, keep_newer=keep_newer)
        parts.saver.expect_steps_after(-1 if restore.restored is None else restore.restored.step)
        return restore

    def _request(
        self, state: PyTree, step: int | None, *, wants_host_state: bool
    ) -> tuple[RestoreRequest, ProcessPlacement]:
        tree = describe(state, "restore")
        placement = self._parts.saver.place(tree)
        request = RestoreRequest(tree, state, step, wants_host_state, placement.retained)
        return request, placement

    def _settle_on_all(self, restore: Restore, placement: ProcessPlacement, number: int) -> None:
        """Settle, and return when all have: nobody trains while a peer counts on a leftover."""

        def settle() -> None:
            restore.settle()
            self._reserve(restore, placement)

        parts = self._parts
        errors = run_on_all(
            parts.member.coordinator,
            f"restore/{number}/ready",
            settle,
            parts.watch,
            parts.config.restore_timeout_s,
            parts.restore_parts.series,
        )
        if errors:
            raise RestoreFailed("settle", "what RAM holds", errors)

    def _reserve(self, restore: Restore, placement: ProcessPlacement) -> None:
        """Reserve RAM for the saves to come. What was restored is used also where it has no room.

        RamdiskFull where nothing was restored.
        """
        restored = restore.restored
        lack = "" if restored is None else restored.lack
        try:
            self._parts.saver.use_placement(
                placement, restore.host_state_bytes, in_background=restored is not None
            )
        except RamdiskFull as error:
            if restored is None:
                raise
            lack = str(error)
        if restored is not None and lack:
            self._parts.events.emit("ramdisk.full", step=restored.step, reason=lack[:500])

    def _continue_from(self, restored: RestoredState, *, keep_newer: bool) -> None:
        parts = self._parts
        # Not ``restored.tier``, which may differ between processes.
        tier: TierName = PERSISTENT if restored.is_loaded else LOCAL
        parts.saver.continue_from(restored.save, restored.incarnation, tier, keep_newer=keep_newer)
        parts.events.locate(incarnation=restored.incarnation)
        parts.local_saves.restart_from(restored.save)
        if parts.preservation is not None:
            stored = [each.step for each in restored.rejected if each.tier == PERSISTENT]
            parts.preservation.mark_failed(stored)
