"""``eckpt ls --survives``: the hosts and slices whose loss would cost the newest step in RAM.

A host is one ``--local-dir``, or one address of a peer: what lies there is lost together. Whether
a step is whole without some host is decided as a restore decides it.
"""

from __future__ import annotations

import argparse
import ipaddress
import time
from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import NamedTuple

import msgspec

from emergency_ckpt.core.address import parse_address, split_holder
from emergency_ckpt.core.restore.inventory import HolderInventory, Inventory
from emergency_ckpt.core.wording import count_text
from emergency_ckpt.errors import ConfigError
from emergency_ckpt.tools.cli.arguments import BAD, GOOD, places_of, print_json
from emergency_ckpt.tools.cli.output import print_faults, print_line, print_table
from emergency_ckpt.tools.draining.peer_ram import peer_ram
from emergency_ckpt.tools.survey.places import Places, SurveyFault
from emergency_ckpt.tools.survey.survey import (
    Survey,
    lacks_of,
    newest_complete,
    take_survey,
    with_folders,
)
from emergency_ckpt.types import PERSISTENT, SaveId
from emergency_ckpt.work_progress import WorkProgress

FORMAT = 1


class Loss(msgspec.Struct, frozen=True):
    """The loss of a host or a slice.

    Attributes:
      what: "host" or "slice".
      left_step: the newest whole step left in either tier; None without any.
      from_storage: ``left_step`` is left in storage alone.
      steps_lost: the newest step less that; None when nothing would be left.
      missing: what the newest step would lack; empty when it survives.
    """

    what: str
    name: str
    left_step: int | None
    steps_lost: int | None
    missing: str
    from_storage: bool = False


class SurvivalReport(msgspec.Struct, frozen=True):
    """The losses that the newest step in RAM survives, and their cost.

    Attributes:
      step: the newest whole step in RAM, None without one; of ``run_id``, in ``incarnation``.
      stored_step: the newest in storage.
      shards, host_states: the number of parts by the number of hosts that hold each.
      losses: of each host, and of each slice where there are several.
    """

    format: int
    run_id: str
    step: int | None
    incarnation: str
    stored_step: int | None
    hosts: int
    shards: Mapping[int, int]
    host_states: Mapping[int, int]
    losses: tuple[Loss, ...]
    faults: tuple[SurveyFault, ...]


class _Holder(NamedTuple):
    """The RAM of one process. ``slice_index``: None where it is not known."""

    inventory: HolderInventory
    host: str
    slice_index: int | None


def report_survival(places: Places, peers: Sequence[str]) -> SurvivalReport:
    """Return what the newest step in RAM survives. Blocks for storage and peers; changes nothing.

    ConfigError without RAM to look at, or for peers without a secret or a run.
    """
    survey = take_survey(places)
    run_id = survey.only_run(peers, "eckpt ls --survives")
    processes_of_peers: dict[str, int | None] = {}
    faults: list[SurveyFault] = []
    if peers:
        progress = WorkProgress.until(time.monotonic() + places.timeout_s)
        with peer_ram(survey, run_id, peers, "eckpt ls --survives", progress) as answers:
            processes_of_peers = {peer.address: peer.process_index for peer in answers.asked}
            survey, faults = with_folders(survey, answers.folders), answers.faults
    inventory = survey.inventory(run_id)
    holders = _holders_of(survey, run_id, processes_of_peers)
    if places.local_dirs or places.directory:  # else the survey only says that there is nothing
        faults = [*survey.faults, *faults]
    stored_steps = [
        step.step
        for step in survey.of(PERSISTENT)
        if step.state == "whole" and step.run_id in ("", run_id)
    ]
    stored_step = max(stored_steps, default=None)
    save = newest_complete(inventory)
    hosts = sorted({holder.host for holder in holders})
    slices = sorted({holder.slice_index for holder in holders if holder.slice_index is not None})
    losses: list[Loss] = []
    if save is not None:
        for host in hosts:
            others = [holder for holder in holders if holder.host != host]
            losses.append(_loss("host", host, others, inventory, save, stored_step))
        for number in slices if len(slices) > 1 else ():
            others = [holder for holder in holders if holder.slice_index != number]
            losses.append(_loss("slice", str(number), others, inventory, save, stored_step))
    return SurvivalReport(
        format=FORMAT,
        run_id=run_id,
        step=None if save is None else save.step,
        incarnation="" if save is None else save.incarnation,
        stored_step=stored_step,
        hosts=len(hosts),
        shards=_copies(
            (holder.host, contents.shard_id(index))
            for holder in holders
            for manifest in holder.inventory.tensors
            if manifest.save == save
            if (contents := inventory.manifests.get(manifest.digest))
            for index, entry in enumerate(contents.shards)
            if entry.nbytes
        ),
        host_states=_copies(
            (holder.host, host_state.owner)
            for holder in holders
            for host_state in holder.inventory.host_states
            if host_state.save == save
        ),
        losses=tuple(losses),
        faults=tuple(faults),
    )


def _holders_of(
    survey: Survey, run_id: str, processes_of_peers: Mapping[str, int | None]
) -> list[_Holder]:
    holders: list[_Holder] = []
    hosts: dict[int, str] = {}
    for folder in survey.folders:
        address = str(folder.path)
        if address in processes_of_peers:
            # A peer may be the process of a ramdisk that was read too: its copies count once.
            process, host = processes_of_peers[address], _host_name(address)
            if process is not None:
                host = hosts.get(process, host)
            holders.append(_Holder(folder.holder, host, None))
        elif folder.run_id == run_id:
            host, slice_index = str(folder.local_dir), None
            writers = (copy.published.writer for copy in reversed(folder.copies))
            writer = next((writer for writer in writers if writer is not None), None)
            if writer is not None:
                hosts[writer.process_index] = host
                # Peers do not say of which slice they are.
                slice_index = None if processes_of_peers else writer.slice_index
            holders.append(_Holder(folder.holder, host, slice_index))
    return holders


def _host_name(address: str) -> str:
    """Return the host of an address; each port of the loopback counts as a host of its own.

    Such ports lead through tunnels to the hosts, as those of ``kubectl port-forward`` do.
    """
    plain = split_holder(address)[1]
    host, _ = parse_address(plain)
    try:
        return plain if ipaddress.ip_address(host).is_loopback else host
    except ValueError:
        return host


def _loss(
    what: str,
    name: str,
    others: Iterable[_Holder],
    inventory: Inventory,
    save: SaveId,
    stored_step: int | None,
) -> Loss:
    """Return the loss of all holders but ``others``."""
    holders = tuple(holder.inventory for holder in others)
    left = msgspec.structs.replace(inventory, holders=holders)
    missing = lacks_of(save, left)
    if not missing:
        return Loss(what, name, save.step, 0, "")
    older = newest_complete(left)
    in_ram = -1 if older is None else older.step
    in_storage = -1 if stored_step is None else stored_step
    left_step = max(in_ram, in_storage)
    if left_step < 0:
        return Loss(what, name, None, None, missing)
    steps_lost = max(save.step - left_step, 0)
    return Loss(what, name, left_step, steps_lost, missing, in_storage > in_ram)


def _copies(held_parts: Iterable[tuple[str, Hashable]]) -> dict[int, int]:
    """Return the number of parts by their copies, from the hosts and the parts that they hold.

    Shards of different boxes count as different parts, also where they overlap, so that no more
    copies are counted than there are.
    """
    hosts_of_parts: dict[Hashable, set[str]] = {}
    for host, part in held_parts:
        hosts_of_parts.setdefault(part, set()).add(host)
    return dict(sorted(Counter(map(len, hosts_of_parts.values())).items()))


def run(args: argparse.Namespace) -> int:
    """Print the report; return 1 when the loss of one host or slice would cost the step."""
    if not (args.local_dir or args.peers):
        raise ConfigError(["name --local-dir, --peers or both"], target="eckpt ls --survives")
    report = report_survival(places_of(args, may_be_none=True), args.peers)
    if args.json:
        print_json(report)
    else:
        _print(report)
    outlives_each = report.step is not None and all(loss.steps_lost == 0 for loss in report.losses)
    return GOOD if outlives_each and not report.faults else BAD


def _print(report: SurvivalReport) -> None:
    stored = "none" if report.stored_step is None else str(report.stored_step)
    if report.step is None:
        print_line(f"no whole step in RAM on {count_text(report.hosts, 'host', 'hosts')}")
    else:
        name = f"step {report.step} of run {report.run_id}, incarnation {report.incarnation}"
        print_line(f"newest in RAM: {name}; in storage: {stored}")
        _print_copies("shards", report.shards)
        _print_copies("host states", report.host_states)
        costly = [loss for loss in report.losses if loss.steps_lost != 0]
        print()
        if costly:
            columns = ["LOST", "LEFT", "STEPS LOST", "WITHOUT IT"]
            print_table(columns, [_row(loss) for loss in costly])
        else:
            slices = " and any one slice" if len(report.losses) > report.hosts else ""
            by_storage = any(loss.from_storage for loss in report.losses)
            why = f": storage has step {report.stored_step} too" if by_storage else ""
            print_line(f"the newest step outlives any one host{slices}{why}")
    print_faults(report.faults)


def _print_copies(what: str, parts_by_copies: Mapping[int, int]) -> None:
    if not parts_by_copies:
        return
    copies_text = ", ".join(
        f"{parts} with {count_text(copies, 'copy', 'copies')}"
        for copies, parts in parts_by_copies.items()
    )
    may_fail = min(parts_by_copies) - 1
    lost = count_text(may_fail, "host", "hosts")
    outcome = f"RAM outlives the loss of any {lost}"
    if may_fail == 0:
        outcome = "the loss of 1 host costs some of them in RAM"
    print_line(f"{what}: {copies_text}; {outcome}")


def _row(loss: Loss) -> list[str]:
    tier = " in storage" if loss.from_storage else ""
    left = "nothing" if loss.left_step is None else f"step {loss.left_step}{tier}"
    lost = "all" if loss.steps_lost is None else str(loss.steps_lost)
    return [f"{loss.what} {loss.name}", left, lost, loss.missing]
