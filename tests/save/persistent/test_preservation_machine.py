"""Saves, restores, removals and crashes in any order: what is needed is never removed.

Real files in a real directory, without the arrays: what is whole does not depend on them.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from persistent_steps import RUN_ID, complete_steps, life, writer_of

from emergency_ckpt.background import Failures
from emergency_ckpt.core.save.save_rules import choose_removals
from emergency_ckpt.core.step_log import LogWriter, begun, in_state, listing
from emergency_ckpt.core.step_names import STEP_METADATA
from emergency_ckpt.save.persistent.retention import Preservation
from emergency_ckpt.storage import PersistentTier
from emergency_ckpt.storage.marker import OURS
from emergency_ckpt.types import LeafSpec, SaveId

LONG_S = 60.0
FILES = ("state/_METADATA", "state/manifest.ocdbt", "state/d/data")


class Keeps:
    """A policy that wants just the steps that it is told to; it may be wrong about all of them."""

    def __init__(self) -> None:
        self.steps = frozenset[int]()

    def should_preserve(self, checkpoints: Any, *, context: Any) -> list[bool]:
        return [each.step in self.steps for each in checkpoints]


class PreservationMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.root = Path(tempfile.mkdtemp(prefix="eckpt-test-"))
        self.policy = Keeps()
        self.saved: list[int] = []
        self.reading = contextlib.ExitStack()
        self.read: frozenset[int] | None = None
        self.failures = Failures()
        self.lives = 0

    @initialize()
    def start(self) -> None:
        """A life begins: what an earlier one left half removed goes."""
        self.tier = PersistentTier(str(self.root))
        self.tier.create()
        self.lives += 1
        self.writer = writer_of(self.tier)
        self.writer.begin(life(self.lives))
        self.preservation = Preservation(
            self.writer,
            self.failures,
            policy=self.policy,
            keep_last_n=None,
            keep_every_n_steps=None,
            timeout_s=LONG_S,
        )

    def whole(self) -> list[int]:
        return complete_steps(self.tier)

    @rule(gap=st.integers(1, 3), data=st.data())
    def save(self, gap: int, data: st.DataObject) -> None:
        """A step becomes whole; then the policy is asked, by now of another mind."""
        step = (self.saved or [0])[-1] + gap
        save = SaveId(step, life(self.lives), RUN_ID)
        self.writer.make_room(step)
        custom = {OURS: {"run_id": RUN_ID, "incarnation": save.incarnation}}
        metadata = json.dumps({"custom_metadata": custom}).encode()
        for name, contents in {**dict.fromkeys(FILES, b"x"), STEP_METADATA: metadata}.items():
            path = self.root / str(step) / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(contents)
        self.tier.write_document(step, 0, 1, b"{}")
        leaves = [LeafSpec("w", "int8", (1,))]
        entry = self.tier.finish(save, {0: ("0" * 64, True)}, leaves, {})
        self.writer.publish(entry, None)
        self.saved.append(step)
        self.policy.steps = frozenset(data.draw(st.sets(st.sampled_from(self.saved))))
        before = self.whole()
        self.preservation.after_save()
        if self.read is None:
            assert self.preservation.wait_idle(LONG_S)
            left = self.whole()
            # Just what was wanted, and the newest.
            assert left == [s for s in before if s in self.policy.steps or s == step]

    @precondition(lambda self: self.read is None)
    @rule()
    def begin_restore(self) -> None:
        self.reading.enter_context(self.preservation.held())
        self.read = frozenset(self.whole())

    @precondition(lambda self: self.read is not None)
    @rule()
    def end_restore(self) -> None:
        self.read = None
        self.reading.close()
        assert self.preservation.wait_idle(LONG_S)

    @precondition(lambda self: self.read is None)
    @rule(data=st.data(), done=st.integers(0, 4))
    def crash_in_removal(self, data: st.DataObject, done: int) -> None:
        """Of a removal that the policy asked for only some parts were done; a new life begins."""
        steps = self.whole()
        wanted = data.draw(st.lists(st.booleans(), min_size=len(steps), max_size=len(steps)))
        removed = choose_removals(steps, wanted)
        self.preservation.stop(LONG_S)
        if removed:
            step = removed[0]
            hidden = self.root / f"{step}.orbax-checkpoint-tmp-removed"
            parts = (
                lambda: self.announce(step),
                lambda: (self.root / str(step)).rename(hidden),
                lambda: shutil.rmtree(hidden),
                lambda: shutil.rmtree(self.root / "host_state" / str(step)),
            )
            for part in parts[:done]:
                part()
        self.start()
        names = {path.name.partition(".")[0] for path in self.root.iterdir()} - {"host_state"}
        documents = {path.name for path in (self.root / "host_state").glob("*")} - {"log"}
        assert names == documents == {str(step) for step in self.whole()}
        assert self.whole() == [s for s in steps if not done or s not in removed[:1]]

    def announce(self, step: int) -> None:
        """The version that comes before a deletion."""
        read = self.tier.found.log.read()
        assert read.table is not None
        table = begun(read.table, LogWriter(RUN_ID, False, life(self.lives)))
        entries = [entry for entry in table.steps if entry.step == step]
        assert self.tier.found.log.append(listing(table, *in_state("removing", entries)))

    @invariant()
    def the_last_whole_step_is_there(self) -> None:
        if self.saved:
            assert self.whole()[-1:] == self.saved[-1:]

    @invariant()
    def nothing_that_may_be_read_has_gone(self) -> None:
        if self.read is not None:
            assert self.read <= set(self.whole())

    @invariant()
    def what_counts_has_all_its_files(self) -> None:
        for step in self.whole() if self.saved else ():
            assert all((self.root / str(step) / name).exists() for name in FILES)

    def teardown(self) -> None:
        self.reading.close()
        self.preservation.stop(LONG_S)
        shutil.rmtree(self.root)
        assert self.failures.count == 0


TestPreservation = pytest.mark.dear(PreservationMachine.TestCase)
TestPreservation.settings = settings(max_examples=15, stateful_step_count=20, deadline=None)
