"""The losses of hosts and slices that the newest step in RAM survives now.

A host is one ``--local-dir``, or one address of a peer: what lies there is lost together. Whether
a step is whole without some host is decided as a restore decides it.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Collection, Hashable, Sequence

import msgspec

from emergency_ckpt.core.address import parse_address, split_holder
from emergency_ckpt.core.restore.inventory import Inventory
from emergency_ckpt.core.restore.restore_plan import lacks_of, newest_complete
from emergency_ckpt.core.wording import count_text
from emergency_ckpt.errors import ConfigError
from emergency_ckpt.tools.offline.draining.peer_ram import ask_peers, merged
from emergency_ckpt.tools.placement_study import Survival, holders_of_parts, survival_of
from emergency_ckpt.tools.survey.places import Places, SurveyFault
from emergency_ckpt.tools.survey.survey import Survey, take_survey
from emergency_ckpt.transfer.client import TransferClient
from emergency_ckpt.types import PERSISTENT, SaveId


class Loss(msgspec.Struct, frozen=True):
    """The loss of a host or a slice.

    Attributes:
      what: "host" or "slice".
      left_step: the newest whole step left in either tier; None without any.
      steps_lost: the newest step less that; None when nothing would be left.
      missing: what the newest step would lack; empty when it survives.
    """

    what: str
    name: str
    left_step: int | None
    steps_lost: int | None
    missing: str


class SurvivalReport(msgspec.Struct, frozen=True):
    """The losses that the newest step in RAM survives, and their cost.

    Attributes:
      step: the newest whole step in RAM, None without one; of ``run_id``, in ``incarnation``.
      stored_step: the newest in storage.
      seen, processes: of the job of that step, the processes whose RAM was read, and all of them.
      shards, host_states: copies by host.
      losses: of each host, and of each slice where there are several.
    """

    run_id: str
    step: int | None
    incarnation: str
    stored_step: int | None
    hosts: int
    seen: int
    processes: int
    shards: Survival | None
    host_states: Survival | None
    losses: tuple[Loss, ...]
    faults: tuple[SurveyFault, ...]

    @property
    def survives_any_one(self) -> bool:
        """Return whether the newest step outlives each host and each slice."""
        return self.step is not None and all(loss.steps_lost == 0 for loss in self.losses)


class _Ram:
    """The RAM of one run, by host. ``process_of``: of holders whose process is known."""

    def __init__(
        self,
        inventory: Inventory,
        host_of: dict[str, str],
        slice_of: dict[str, int],
        process_of: dict[str, int],
    ):
        self.inventory = inventory
        self.host_of = host_of
        self.slice_of = slice_of
        self.process_of = process_of

    def processes_with(self, save: SaveId) -> int:
        """Return the number of processes whose part of ``save`` was read, each once."""
        seen: set[int] = set()
        count = 0
        for each in self.inventory.holders:
            process = self.process_of.get(each.holder)
            if process not in seen:
                count += sum(held.save == save for held in each.tensors)
            if process is not None:
                seen.add(process)
        return count

    def without(self, lost: Collection[str]) -> Inventory:
        """Return the inventory without some holders."""
        left = tuple(each for each in self.inventory.holders if each.holder not in lost)
        return msgspec.structs.replace(self.inventory, holders=left)


def report_survival(places: Places, peers: Sequence[str]) -> SurvivalReport:
    """Return what the newest step in RAM survives. Blocks for storage and peers; changes nothing.

    ConfigError without RAM to look at, or for peers without a secret or a run.
    """
    survey = take_survey(places)
    run_id = survey.only_run(peers, "eckpt ls --survives")
    ram, faults = _ram_of(survey, run_id, places, peers)
    if places.local_dirs or places.directory:  # else the survey only says that there is nothing
        faults = [*survey.faults, *faults]
    stored = [
        each.step
        for each in survey.of(PERSISTENT)
        if each.state == "whole" and each.run_id in ("", run_id)
    ]
    stored_step = max(stored, default=None)
    save = newest_complete(ram.inventory)
    hosts = sorted(set(ram.host_of.values()))
    if save is None:
        return SurvivalReport(
            run_id, None, "", stored_step, len(hosts), 0, 0, None, None, (), tuple(faults)
        )
    losses = [_loss("host", host, _of(ram.host_of, host), ram, save, stored_step) for host in hosts]
    slices = sorted(set(ram.slice_of.values()))
    for number in slices if len(slices) > 1 else ():
        lost = _of(ram.slice_of, number)
        losses.append(_loss("slice", str(number), lost, ram, save, stored_step))
    shards, host_states = _copies(ram, save, len(hosts))
    return SurvivalReport(
        run_id=run_id,
        step=save.step,
        incarnation=save.incarnation,
        stored_step=stored_step,
        hosts=len(hosts),
        seen=ram.processes_with(save),
        processes=max(
            (h.count for each in ram.inventory.holders for h in each.host_states if h.save == save),
            default=0,
        ),
        shards=shards,
        host_states=host_states,
        losses=tuple(losses),
        faults=tuple(faults),
    )


def copies_text(survival: Survival) -> str:
    """Return the number of parts by their copies, in words."""
    return ", ".join(
        f"{parts} with {count_text(copies, 'copy', 'copies')}"
        for copies, parts in survival.parts_by_copies.items()
    )


def _ram_of(
    survey: Survey, run_id: str, places: Places, peers: Sequence[str]
) -> tuple[_Ram, list[SurveyFault]]:
    folders = [folder for folder in survey.folders if folder.run_id == run_id]
    host_of = {folder.holder.holder: str(folder.local_dir) for folder in folders}
    writers = {
        folder.holder.holder: copy.published.writer
        for folder in folders
        for copy in folder.copies
        if copy.published.writer is not None
    }
    slice_of = {holder: writer.slice_index for holder, writer in writers.items()}
    process_of = {holder: writer.process_index for holder, writer in writers.items()}
    inventory = survey.inventory(run_id)
    if not peers:
        return _Ram(inventory, host_of, slice_of, process_of), []
    if places.secret is None:
        raise ConfigError(["--peers needs the run's secret"], target="eckpt ls --survives")
    with TransferClient(run_id=run_id, secret=places.secret) as client:
        asked, manifests, faults = ask_peers(client, peers, inventory)
    # A peer may be the process of a ramdisk that was read too: its copies count once.
    read = {process: host_of[holder] for holder, process in process_of.items()}
    for each in asked:
        host_of[each.holder] = _host_name(each.address)
        if each.process_index is not None:
            host_of[each.holder] = read.get(each.process_index, host_of[each.holder])
            process_of[each.holder] = each.process_index
    # Peers do not say of which slice they are.
    return _Ram(merged(inventory, asked, manifests), host_of, {}, process_of), faults


def _host_name(address: str) -> str:
    """Return the host of an address; each port of the loopback is a host of its own, for tests."""
    plain = split_holder(address)[1]
    host, _ = parse_address(plain)
    try:
        return plain if ipaddress.ip_address(host).is_loopback else host
    except ValueError:
        return host


def _of(units: dict[str, str] | dict[str, int], unit: object) -> set[str]:
    return {holder for holder, of in units.items() if of == unit}


def _loss(
    what: str, name: str, lost: set[str], ram: _Ram, save: SaveId, stored_step: int | None
) -> Loss:
    left = ram.without(lost)
    missing = lacks_of(save, left)
    if not missing:
        return Loss(what, name, save.step, 0, "")
    older = newest_complete(left)
    steps = [step for step in (older.step if older else None, stored_step) if step is not None]
    left_step = max(steps, default=None)
    steps_lost = None if left_step is None else max(save.step - left_step, 0)
    return Loss(what, name, left_step, steps_lost, missing)


def _copies(ram: _Ram, save: SaveId, hosts: int) -> tuple[Survival, Survival]:
    """Return the copies of the save's shards and of its host states, by host.

    Shards of different boxes count as different parts, also where they overlap, so that no more
    copies are counted than there are.
    """
    shards: dict[str, set[Hashable]] = {}
    states: dict[str, set[Hashable]] = {}
    for holder in ram.inventory.holders:
        host = ram.host_of[holder.holder]
        for held in holder.tensors:
            contents = ram.inventory.manifests.get(held.digest)
            if held.save == save and contents is not None:
                own = shards.setdefault(host, set())
                own.update(
                    contents.shard_id(index)
                    for index, entry in enumerate(contents.shards)
                    if entry.nbytes
                )
        documents = {held.owner for held in holder.host_states if held.save == save}
        states.setdefault(host, set()).update(documents)
    return (
        survival_of(holders_of_parts(shards).values(), hosts),
        survival_of(holders_of_parts(states).values(), hosts),
    )
