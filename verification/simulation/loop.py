"""The training loop of each simulated process in one life of the job."""

from __future__ import annotations

import contextlib
import datetime
import traceback
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import bucket
import devices
import install
import sim
from judge import KEPT_IN_STORAGE, Judge, Seen, Violation
from lives import life_of
from plan import Life, Plan
from scheduler import Killed, Process

RUN = "run"
SAVE_TIMEOUT_S = 10.0
HEALED_SAVES = 4
"""Saves after the last fault, of which the last must be complete."""
_IN_MEMORY = 2
"""In one of so many histories a tier in memory takes the place of storage in the list of steps."""
_QUIET_S = 210.0
"""Time from the last fault to the first of these: what was under way has failed by then."""
SECOND = 100
"""What follows a second restore counts as a life of its own, whose number is so much greater."""


class Loop:
    """The loops of all processes. ``left``: how many have not ended; ``seen``: what they did."""

    def __init__(
        self,
        plan: Plan,
        life: Life,
        number: int,
        judge: Judge,
        storage: Path,
        log: Callable[[str], None],
        *,
        verbose: bool,
    ) -> None:
        self._plan = plan
        self._life = life
        self._number = number
        self._judge = judge
        self._dir = f"{bucket.URL}/{storage.name}" if plan.in_bucket else str(storage)
        self._log = log
        self._is_verbose = verbose
        count = len(life.hosts)
        self.seen = [Seen() for _ in range(count)]
        self.left = count
        self.is_healed = False
        self.is_between = False
        self._come = 0
        self._newest = max((max(steps) for steps in judge.saved_by_tag.values()), default=0)

    def run(self, process: Process) -> None:
        """Restore, train and save in ``process``, as a program that uses the product."""
        try:
            self._train(process)
        except Killed:
            raise
        except BaseException as error:  # noqa: BLE001 - judged
            self.seen[process.index].error = _without_frames(error)
            self._log(f"{process.name} raised {type(error).__name__}: {str(error)[:300]}")
        self.left -= 1

    def go_on(self, number: int) -> None:
        """Let all go on, who have met before their second restore: as the life ``number``."""
        self.seen = [Seen() for _ in self.seen]
        self._number = number
        self.is_between = False

    def _checkpointer(self, process: Process) -> Any:
        plan = self._plan
        config = install.config(
            start_timeout_s=60.0,
            save_timeout_s=SAVE_TIMEOUT_S,
            transfer_timeout_s=5.0,
            storage_wait_timeout_s=1.0,
        )
        return install.checkpointer(copy_batch_bytes=200)(
            config,
            run_id=RUN,
            local_dir=str(process.host.ram),
            bind_host=process.host.address,
            local_save_every=self._rule(self._life.interval),
            dir=self._dir if plan.stored_every else None,
            save_every=self._rule(plan.stored_every),
            keep_last_n=KEPT_IN_STORAGE if plan.stored_every else None,
            local_keep_last_n=plan.keep_last_n,
            placement=plan.placement,
            on_preemption="save" if self._life.noticed else "ignore",
            stall_timeout_s=20.0,
            total_timeout_s=600.0,
            host_state_remap=lambda payloads, index, count: {**payloads[0], "me": index},
            on_event=lambda event: self._on_event(process, event),
        )

    def _rule(self, interval: int) -> Any:
        """Return what is due every ``interval`` steps, or by the policy of this life."""
        life = self._life
        if not interval or not life.announced:
            return interval
        if life.announced == "seconds":
            return datetime.timedelta(seconds=interval * life.step_s)
        from emergency_ckpt.core.save.timing import Continuous  # noqa: PLC0415 - after ``install``

        return Continuous()

    def _train(self, process: Process) -> None:
        scheduler, life = sim.scheduler, self._life
        checkpointer = self._checkpointer(process)
        step = {"zero": 0, "ahead": self._newest + 1}.get(life.begins)
        if step is None:
            step = self._restore(checkpointer, process)
        process.outages = tuple(
            (scheduler.now_s + begin_s, scheduler.now_s + begin_s + length_s)
            for begin_s, length_s in process.outages
        )
        process.is_training = True
        kills = {at: calls for who, at, calls in life.killed_in_step if who == process.index}
        last = self._steps(checkpointer, process, step, life.steps, kills)
        if life.again:
            checkpointer.wait_until_finished()
            if self._meet():
                self.is_between = self._number < SECOND
                while self.is_between:  # the history judges now, unless a process has died
                    scheduler.sleep(0.5)
                step = self._restore(checkpointer, process)
                last = self._steps(checkpointer, process, step, life.again, {})
        if life.heals:
            self._heal(checkpointer, process, last)
        if self._is_undisturbed:
            checkpointer.check_for_errors()
        if life.ends_well:
            from emergency_ckpt.errors import SaveFailed  # noqa: PLC0415 - after ``install``

            # The end of a run raises the error of a last save to storage, which may fail here.
            forgiven = () if self._is_undisturbed else (SaveFailed,)
            with contextlib.suppress(*forgiven):
                checkpointer.stop()
        else:
            scheduler.sleep(life.step_s * 4)

    def _steps(
        self, checkpointer: Any, process: Process, first: int, count: int, kills: dict[int, int]
    ) -> int:
        """Train so many steps after ``first``; return the last."""
        scheduler, life = sim.scheduler, self._life
        for number in range(1, count + 1):
            if life.writes_s and not self._meet():
                return first + number - 1
            scheduler.sleep(life.step_s * (1 if life.writes_s else 0.5 + scheduler.random.random()))
            if process.host.is_full and number == 3:
                process.host.is_full = False
            if number in kills:
                process.calls_left = kills[number]
            if life.noticed == (process.index, number):
                checkpointer.request_preemption()
            self._save(checkpointer, process, first + number)
            if checkpointer.reached_preemption(first + number):
                checkpointer.wait_until_finished()
                self.seen[process.index].preempted = first + number
                return first + number
        return first + count

    def _restore(self, checkpointer: Any, process: Process) -> int:
        """Restore; return the step, 0 where there is none."""
        seen, asked = self.seen[process.index], self._judge.asked
        start = _start(process)
        host = {"tag": 0, "step": 0, "me": process.index}
        step, state = None, None
        if asked is not None:
            try:
                step, state = checkpointer.restore(asked, state=start, host_state=host)
                seen.has_gone_back = True
            except Exception as error:
                if type(error).__name__ not in ("StepNotFound", "Unrecoverable"):
                    raise
                seen.refused = _without_frames(error)
        if not seen.has_gone_back:
            step, state = checkpointer.restore(state=start, host_state=host)
        seen.returned = True
        if step is None:
            return 0
        seen.restored = self._check_restored(process, state, host, step)
        self._log(f"{process.name} restored step {step} of life {seen.restored[0]}")
        return step

    @property
    def _is_undisturbed(self) -> bool:
        """True when no save may fail, or be skipped because the one before is not done."""
        life = self._life
        return life.is_calm and life.waits and life.service_slow_s < 1

    def _save(
        self, checkpointer: Any, process: Process, step: int, *, waits: bool | None = None
    ) -> None:
        tag, seen = self._number, self.seen[process.index]
        self._judge.saved_by_tag.setdefault(tag, set()).add(step)
        seen.may_have_bound |= seen.has_gone_back
        has_begun = checkpointer.save(
            step=step,
            state=devices.state(process.globals["shape"], process.index, tag, step),
            host_state={"tag": tag, "step": step, "me": process.index},
            force=self._life.forces and step % 2 == 0,
        )
        seen.has_bound |= has_begun and seen.has_gone_back
        if self._life.waits if waits is None else waits:
            checkpointer.wait_until_finished()

    def _heal(self, checkpointer: Any, process: Process, last: int) -> None:
        """End all faults once every process has trained, and train on: a save must be complete."""
        scheduler, life = sim.scheduler, self._life
        if not self._meet():
            return
        self.is_healed = True
        process.outages = ()
        process.host.is_full = False
        scheduler.sleep(_QUIET_S)
        for _ in range(HEALED_SAVES * life.interval):
            last += 1
            if not self._meet():
                return
            self._save(checkpointer, process, last, waits=True)
        self.seen[process.index].last_due = last - last % life.interval
        if self._meet() and self._plan.seed % _IN_MEMORY == 0:
            self._exchange_storage(checkpointer, process)

    def _exchange_storage(self, checkpointer: Any, process: Process) -> None:
        """Copy the newest step of storage into a tier in memory, which lists it from then on."""
        # Imported here: of the product as it is simulated.
        from memory_tier import MemoryTier  # noqa: PLC0415

        steps = checkpointer.steps
        ram, *stored = steps.tiers
        for tier in stored:
            memory = MemoryTier(tier.name)
            for save in tier.complete_steps()[-1:]:
                memory.publish(tier.open_step(save.step))
                self._check_copy(process, memory.open_step(save.step))
                self._log(f"{process.name} has {save} of storage in memory")
                before = steps.describe(save.step)
                # A step of a rival life, one of the same number, is off this life's chain.
                was_known = save.step in steps.known()
                steps.tiers = (ram, memory)
                after = steps.describe(save.step)
                is_known = save.step in steps.known()
                if before._replace(written_s=None) != after or was_known != is_known:
                    raise Violation(f"{process.name} describes {after} in memory, not {before}")

    def _check_copy(self, process: Process, step: Any) -> None:
        number = step.save.step
        tag = self._judge.tags.source((step.save.incarnation, number))
        for name, value in devices.whole(tag, number).items():
            parts = {box: step.read(name, box) for box in step.boxes(name)}
            for box, part in parts.items():
                if part.tobytes() != value[tuple(slice(*span) for span in box)].tobytes():
                    raise Violation(f"{process.name} copied other bytes of {name}{box} of {tag}")
        owners = sorted(step.host_states())
        if owners != list(range(len(owners))):
            raise Violation(f"{process.name} copied the host states of {owners}")

    def _meet(self) -> bool:
        """Wait for all processes, as a training step does; False when one has ended."""
        self._come += 1
        round_of_this = -(-self._come // len(self.seen))
        while self._come < round_of_this * len(self.seen):
            if self.left < len(self.seen):
                return False
            sim.scheduler.sleep(0.5)
        return True

    def _check_restored(
        self, process: Process, state: Any, host: Any, step: int
    ) -> tuple[int, int]:
        tag = int(state["n"].local) - step * 1000
        if step not in self._judge.saved_by_tag.get(tag, ()):
            raise Violation(
                f"{process.name} restored step {step} of life {tag}, which was never saved"
            )
        truth = devices.state(process.globals["shape"], process.index, tag, step)
        for name, value in truth.items():
            if value.local.tobytes() != state[name].local.tobytes():
                raise Violation(
                    f"{process.name} restored other bytes of {name} than life {tag} saved"
                )
        wanted = {"tag": tag, "step": step, "me": process.index}
        if host != wanted:
            raise Violation(f"{process.name} restored the host state {host}, not {wanted}")
        return tag, step

    def _on_event(self, process: Process, event: Any) -> None:
        fields, seen = event.fields, self.seen[process.index]
        sim.scheduler.note(zlib.crc32(event.point.encode()) ^ int(fields.get("step") or 0))
        if self._is_verbose:
            text = ", ".join(f"{key}={value}" for key, value in fields.items())
            self._log(f"{process.name} {event.name} {text[:300]}")
        incarnation = event.origin.incarnation
        if incarnation:
            self._judge.tags.setdefault(life_of(incarnation), self._number)
        if event.point == "save.stage.invalidated":
            for who, least_s, most_s in self._life.writes_s:
                if who == process.index:
                    sim.scheduler.sleep(
                        least_s + (most_s - least_s) * sim.scheduler.random.random()
                    )
        if event.name == "restore.finished":
            seen.tier = str(fields["tier"])
        if event.name == "persistent.complete":
            seen.stored.append(int(fields["step"]))
        if event.name == "preemption.missed" and fields["cause"] == "not_written":
            seen.has_missed = True
        if event.name == "save.complete":
            seen.complete.append(int(fields["step"]))


def _start(process: Process) -> Any:
    return devices.state(process.globals["shape"], process.index, 0, 0)


def _without_frames(error: BaseException) -> BaseException:
    """Return ``error``, which then holds nothing of the process that raised it."""
    left: list[BaseException | None] = [error]
    done: set[int] = set()
    text = "".join(traceback.format_exception(error))
    while left:
        part = left.pop()
        if part is None or id(part) in done:
            continue
        done.add(id(part))
        left += [part.__cause__, part.__context__]
        part.__traceback__ = None
    error.add_note(text)
    return error
