"""Defects, made up and known, put back one at a time: the simulation must find each.

Where it does not, because histories lack what a defect needs, the entry names tests of the suite
that fail with it; `make simulate-mutants` runs these with the defect in place.
Each function changes the imported product, in this process alone.
"""

from __future__ import annotations
import __future__

import dataclasses
import importlib
import inspect
import sys
import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Mutant:
    """A defect.

    ``tests``: of the suite, which fail with it. ``simulated``: the simulation finds it.
    """

    put_back: Callable[[], None]
    tests: tuple[str, ...]
    simulated: bool


MUTANTS: dict[str, Mutant] = {}


def _mutant(
    *tests: str, simulated: bool = True
) -> Callable[[Callable[[], None]], Callable[[], None]]:
    def add(change: Callable[[], None]) -> Callable[[], None]:
        MUTANTS[change.__name__] = Mutant(change, tests, simulated)
        return change

    return add


def _module(name: str) -> Any:
    return importlib.import_module(f"emergency_ckpt.{name}")


def _replace_everywhere(module: str, name: str, value: Any) -> None:
    """Replace a function of ``module`` in every module of the product that has imported it."""
    real = vars(_module(module))[name]
    for each_name, each in list(sys.modules.items()):
        if each_name.startswith("emergency_ckpt.") and vars(each).get(name) is real:
            vars(each)[name] = value


def _edit(module: str, name: str, old: str, new: str) -> None:
    """Compile a function or method anew with ``new`` in place of its one ``old``."""
    function: Any = _module(module)
    for part in name.split("."):
        function = inspect.getattr_static(function, part)
    text = textwrap.dedent(inspect.getsource(function))
    assert text.count(old) == 1, f"{name} has {text.count(old)} times: {old}"
    flags = __future__.annotations.compiler_flag
    code = compile(text.replace(old, new), f"<{name}, changed>", "exec", flags)
    made: dict[str, Any] = {}
    exec(code, function.__globals__, made)
    function.__code__ = made[function.__name__].__code__


@_mutant()
def own_crc_not_compared() -> None:
    """P5: a process trusts the bytes of its own slots."""
    _module("ram.tier").LocalTier.verify = lambda self, digest, shards: []


@_mutant()
def incarnation_ignored() -> None:
    """P2: all lives have one incarnation, so that their saves mix."""
    _replace_everywhere(
        "core.timeline", "new_incarnation", lambda greatest, nonce: "1" * 12 + "-" + "0" * 16
    )


@_mutant()
def order_by_clock() -> None:
    """Known: a life is numbered by the clock of the host that begins it, whatever came before."""
    clock = _module("cluster.peers").time

    def new_incarnation(greatest: int, nonce: str) -> str:
        del greatest
        return f"{int(clock.time() * 100):012d}-{nonce}"

    _replace_everywhere("core.timeline", "new_incarnation", new_incarnation)


@_mutant()
def named_step_binds_late() -> None:
    """P3: after a restore of a step that the user names, newer ones count beside the next save."""
    _edit("save.saver", "Saver._settle_past", "job.timelines.bind()", "pass")


@_mutant()
def notice_acted_on_at_a_passed_step() -> None:
    """P2: a preemption is acted on at a call that some processes have made already."""
    name, after = "AgreedNotices._number", "return max(numbers.values()) + 1"
    _edit("cluster.preemption", name, after, "return max(numbers.values())")


@_mutant()
def removed_before_the_version() -> None:
    """P4: the files of a step go before a version of the log says that they will."""
    _edit(
        "storage.directory_writer",
        "DirectoryWriter._remove_listed",
        "self._append(change)",
        "self._finish_removal(leaving); leaving = leaving[:0]",
    )


@_mutant()
def created_without_precondition() -> None:
    """Of two writers that make one file, the second writes over the first."""
    directory = _module("storage.directory").StorageDirectory

    def put_first(self: Any, below: str, data: bytes, deadline_s: Any = None) -> bool:
        path = self.path / below

        def put() -> bool:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
            return True

        return self.do("write", f"/{below}", put, deadline_s)

    directory.put_first = put_first


@_mutant()
def decided_before_all_ballots() -> None:
    """P2: the leader decides "complete" while ballots are missing."""
    vote = _module("save.vote")
    real = vote.decide_vote
    vote.decide_vote = lambda everyone, published, refused: real(everyone, set(everyone), set())
    vote.Vote._wait_for_ballots = lambda self, save: {}


@_mutant()
def published_before_the_bytes() -> None:
    """P4: the manifest is renamed before the shards are copied."""
    module = _module("save.local_save")
    native = _module("_native")

    def publish(self: Any, job: Any) -> Any:
        writer = self._tier.begin_write(job.save, job.layout.size_bytes)
        views, job.capture._is_read = dict(job.capture.snapshot._views), True
        flat = [np.ascontiguousarray(views[n]).reshape(-1).view(np.uint8) for n in sorted(views)]
        crcs = [native.crc32c(each.tobytes()) for each in flat]
        digest = writer.stage(module.build_contents(job.save, job.leaves, job.layout, crcs))
        pin = writer.pin()
        writer.publish()
        for each, place in zip(flat, job.layout.shards, strict=True):
            module.time.sleep(0.001)
            native.copy_crc32c(writer._slot.mapping, [(each, place.offset)], 1)
        job.capture.hand_over(pin, job.leaves, job.layout, crcs)
        self._publish_host_state(job)
        return module.Ballot(bytes.fromhex(digest), module.layout_digest(job.layout))

    module.LocalSaves._publish = publish


@_mutant("tests/save/test_local_saves.py", simulated=False)
def doubt_forgotten() -> None:
    """P4: a save whose outcome is not known is not protected."""
    saves = _module("save.local_save").LocalSaves
    real = saves._settle

    def settle(self: Any, *args: Any) -> None:
        real(self, *args)
        self._in_doubt.clear()
        self._protect()

    saves._settle = settle


@_mutant()
def complete_not_protected() -> None:
    """P4: the newest complete save may be overwritten by the next."""

    def protect(self: Any, saves: Any) -> None:
        del saves
        self._protected = frozenset()

    tier = _module("ram.tier").LocalTier
    tier.protect = protect
    tier.note_complete = lambda self, save, **how: self._own.note_complete(save, **how)


@_mutant()
def deadline_dropped() -> None:
    """P6: a wait for a key ends only when the key is there."""
    real = _module("cluster.round").wait_for_key

    def wait(coordinator: Any, key: str, timeout_s: float, look: Any = None, **more: Any) -> Any:
        del timeout_s, look
        return real(coordinator, key, 1e9, None, **more)

    _replace_everywhere("cluster.round", "wait_for_key", wait)


@_mutant()
def host_states_swapped() -> None:
    """P2: a process gets the host state of its neighbour."""
    plan = _module("core.restore.restore_plan")
    real = plan._own_host_state

    def of_the_next(process: int, states: Any, me: str) -> Any:
        return real((process + 1) % states.count, states, me)

    plan._own_host_state = of_the_next


@_mutant("tests/restore/test_other_process_ids.py", simulated=False)
def orphans_released_too_early() -> None:
    """P3: adopted directories go before a newer save is complete."""
    saves = _module("save.local_save").LocalSaves
    real = saves._publish

    def publish(self: Any, job: Any) -> Any:
        self._tier.release_orphans()
        return real(self, job)

    saves._publish = publish


@_mutant()
def silence_taken_for_damage() -> None:
    """Known: a reset, or a silent peer, counted as damage of the copy."""
    _replace_everywhere("restore.holders", "is_about_copy", lambda error: True)


@_mutant("tests/restore/test_other_process_ids.py")
def orphans_not_adopted() -> None:
    """P8: directories of former process ids are not offered."""
    _module("ram.tier").LocalTier.adopt_orphans = lambda self, wait_s=0.0: None


@_mutant("tests/restore/test_other_process_ids.py")
def incarnation_kept_by_a_restore() -> None:
    """P2: training goes on in the incarnation of the start, or of the restored step."""
    restore = _module("restore.restore").Restore
    real = restore.run

    def run(self: Any) -> Any:
        restored = real(self)
        if restored is None:
            return None
        return dataclasses.replace(restored, incarnation=restored.save.incarnation)

    restore.run = run


@_mutant("tests/restore/test_rolled_back.py", simulated=False)
def rolled_back_not_recorded() -> None:
    """Known: after a return to an older step the abandoned newer ones still counted."""
    _module("cluster.timelines").Timelines._record = lambda self: None


@_mutant("tests/restore/test_restore_loads.py", simulated=False)
def storage_failure_taken_for_absence() -> None:
    """Known: a step of storage that failed for a moment was taken for deleted."""
    real = _module("restore.rounds").status_of

    def status_of(error: Any, plan: Any) -> Any:
        error.unreachable = False
        return real(error, plan)

    _replace_everywhere("restore.rounds", "status_of", status_of)


@_mutant()
def writers_do_not_wait() -> None:
    """Known: a writer begins before the first has made the folder, or is not waited for."""
    _module("save.persistent.rounds").WriterMeetings.meet = lambda self, *args: None


@_mutant("tests/ram/test_read_and_pinned_slots.py", simulated=False)
def mended_copy_beside_the_damaged() -> None:
    """Known: a slot with a damaged shard stayed published beside the slot that replaced it."""
    _module("ram.process_directory").ProcessDirectory.drop_twins = lambda self, of: None
    _module("ram.tier").LocalTier.keep_only = lambda self, save, digest: None


@_mutant()
def decision_forgotten() -> None:
    """Known: a process in doubt never learned what had been decided."""
    _module("save.vote").Vote.learn = lambda self, save: _module("save.vote").Outcome(
        "in_doubt", "nobody says"
    )


@_mutant()
def host_state_not_pushed() -> None:
    """P3: host states have no copy on another slice."""
    _module("cluster.peers").Peers.push_host_state = lambda self, *_, **__: None


@_mutant("tests/restore/test_restore_loads.py", simulated=False)
def quarantine_kept_for_ever() -> None:
    """Known: copies that were loaded again from storage are not used, as the damaged ones."""
    _replace_everywhere("restore.storage_load", "loaded_copies", lambda plan, found: set())


@_mutant("tests/ram/test_read_and_pinned_slots.py", simulated=False)
def quarantine_kept_by_the_slot() -> None:
    """Known: a slot that is written anew keeps the marks of its former damage."""
    _edit("ram.slots", "Slot.unpublish", "self.bad_shards.clear()", "pass")


@_mutant("tests/restore/shards/test_shard_collection.py", simulated=False)
def copied_crc_not_compared() -> None:
    """P5: own shards that go into a fresh slot may change on the way."""
    name = "ShardCollection._copy_own"
    _edit("restore.shards", name, "if crc != entry.crc32c:", "if False:")


@_mutant("tests/state/test_materialize.py", simulated=False)
def restored_arrays_are_the_slot() -> None:
    """P1: on CPU an array that is restored takes the memory of the slot, which a save writes."""
    _module("state.link")._private_copies = lambda views: views


@_mutant("tests/restore/test_host_state_sources.py", simulated=False)
def another_host_state_taken() -> None:
    """P2: a holder's host state of another save, or another digest, is applied."""
    check = "document.digest != request.digest or document.save != save"
    _edit("restore.host_state", "fetch_documents", check, "False")


@_mutant("tests/restore/test_other_process_ids.py", simulated=False)
def orphans_never_released() -> None:
    """P10: adopted directories stay, and hold RAM, after a newer save is complete."""
    _module("ram.tier").LocalTier.release_orphans = lambda self: None


@_mutant("tests/restore/shards/test_arrivals.py", simulated=False)
def arrivals_without_deadline() -> None:
    """P6: a restore waits without end for shards that do not come."""
    limit = "self._ended, self._progress.left_s + _GRACE_S"
    _edit("restore.shards", "Arrivals.__iter__", limit, "self._ended")


@_mutant("tests/restore/test_many_hosts.py", simulated=False)
def stall_without_end() -> None:
    """P6: work that moves nothing any more goes on until its total."""
    _edit("core.stall", "give_up_at_s", "min(end_s, moved_s + limits.stall_s + longer_s)", "end_s")


@_mutant("tests/cluster/test_beats.py", simulated=False)
def silence_not_heard() -> None:
    """P6: a process that hangs is waited for while its last beat stands there."""
    _edit("core.stall", "BeatLog.stuck", "silent_s >= self._limits.stall_s", "False")


@_mutant("tests/core/restore/test_one_content.py", simulated=False)
def own_copy_taken() -> None:
    """Known: where replicas differed, each process restored the copy that its plan named."""
    _module("core.restore.restore_plan").left_out = lambda *arguments: {}


@_mutant("tests/save/test_announcement_threads.py", simulated=False)
def late_process_is_silent() -> None:
    """P6: who learns too late of a save tells nobody, and all wait for that process's part."""
    _edit("save.announcements", "SaveAnnouncements._take", "self._missed(tier, late.step)", "pass")


@_mutant("tests/save/test_announcement_threads.py", simulated=False)
def end_of_the_announcements_not_read() -> None:
    """P6: a process whose loop ends first misses what the leader announces until its own end."""
    wait = "wait_for(self._changed, lambda: self._is_over, wait_s)"
    _edit("save.announcements", "SaveAnnouncements.stop", wait, "pass")


@_mutant("tests/save/test_asked_policies.py", simulated=False)
def late_save_not_announced_again() -> None:
    """P4: a save that one process learned of too late is not made up for."""
    _edit("save.schedule", "TierSchedule.announce_again", "or step == self.last", "or False")
