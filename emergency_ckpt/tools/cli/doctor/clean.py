"""``eckpt doctor --clean`` and ``--adopt``: what is left over, and what others have written."""

from __future__ import annotations

import argparse
import secrets
import socket
import time
from collections.abc import Sequence

from emergency_ckpt.core.address import parse_address
from emergency_ckpt.core.step_log import Entry, Table
from emergency_ckpt.core.wording import size_text
from emergency_ckpt.errors import ConfigError, LocalTierError
from emergency_ckpt.ram.leftovers import (
    LeftRun,
    holder_of,
    left_runs,
    remove_run,
)
from emergency_ckpt.storage.directory import storage_time_s
from emergency_ckpt.storage.directory_writer import DirectoryWriter
from emergency_ckpt.storage.hidden_steps import hidden_since
from emergency_ckpt.storage.tier import PersistentTier
from emergency_ckpt.tools.cli.output import age_text, print_line
from emergency_ckpt.tools.survey.places import Places
from emergency_ckpt.transfer.pool import NotConnected, numeric_addresses


def run(args: argparse.Namespace) -> int:
    """List, with ``--yes`` remove; return 1 if the named run is absent or stays. Errors pass."""
    if args.local_dir is None and not args.dir:
        raise ConfigError(["name --local-dir, --dir or both"], target="eckpt doctor --clean")
    if args.dir:
        _clean_storage(args)
    return 0 if args.local_dir is None else _clean_ramdisk(args)


def _clean_storage(args: argparse.Namespace) -> None:
    """List the hidden steps, with ``--yes`` remove them. Blocks for storage.

    What is removed was hidden for long enough by the clock of storage. A list alone writes nothing,
    and so compares the times of storage with the clock of this host.
    """
    tier = Places(directory=args.dir, timeout_s=args.timeout).storage()
    table = tier.found.log.read().table
    if table is None:
        print_line(f"no step log in {args.dir}")
        return
    hidden = [entry for entry in table.steps if entry.state == "hidden"]
    ages = _ages(tier, table, hidden, args.yes)
    chosen = [entry for entry in hidden if ages.get(entry.step, 0.0) >= args.older_than]
    removed: set[int] = set()
    if args.yes and chosen:
        writer = _writer(tier, table, "clean")
        saves = {(entry.step, entry.incarnation) for entry in chosen}
        removed = writer.remove_hidden(saves, table.incarnation)
    for entry in hidden:
        if entry not in chosen:
            text = "stays: not old enough (--older-than)"
        elif not args.yes:
            text = "would be removed (--yes)"
        else:
            text = "removed" if entry.step in removed else "stays: a job has changed it meanwhile"
        print_line(f"step {entry.step}  {_described(entry, ages.get(entry.step))}  {text}")


def _ages(
    tier: PersistentTier, table: Table, hidden: Sequence[Entry], is_sure: bool
) -> dict[int, float]:
    """Return for how many seconds each step has been hidden, at least; without unknown ones."""
    if not hidden:
        return {}
    since = hidden_since(tier.storage, tier.found, table, hidden)
    now_s = storage_time_s(tier.storage) if is_sure else time.time()
    return {} if now_s is None else {step: max(now_s - at_s, 0.0) for step, at_s in since.items()}


def adopt(args: argparse.Namespace) -> int:
    """List the steps of other programs in the step log, and print them. Blocks for storage.

    With ``--run-id`` the directory is that run's from then on.
    """
    if not args.dir:
        raise ConfigError(["name --dir"], target="eckpt doctor --adopt")
    tier = Places(directory=args.dir, timeout_s=args.timeout).storage()
    table = tier.found.log.read().table
    if table is None:
        print_line(f"no step log in {args.dir}: the first save there takes in all steps")
        return 0
    for entry in _writer(tier, table, "adopt").adopt(args.run_id):
        print_line(f"step {entry.step}  taken in as {entry.incarnation}")
    if args.run_id not in (None, table.run_id):
        print_line(f"{args.dir} belongs to run {args.run_id!r} now; it was {table.run_id!r}'s")
    return 0


def _writer(tier: PersistentTier, table: Table, purpose: str) -> DirectoryWriter:
    return DirectoryWriter(
        tier.storage,
        tier.found,
        run_id=table.run_id,
        from_dir=table.from_dir,
        writer=f"{purpose}-{secrets.token_hex(8)}",
    )


def _described(entry: Entry, age_s: float | None) -> str:
    age = "at an unknown time" if age_s is None else f"{age_text(age_s)} ago or before"
    return f"incarnation {entry.incarnation}  {size_text(entry.size_bytes)}  hidden {age}"


def _clean_ramdisk(args: argparse.Namespace) -> int:
    try:
        runs = left_runs(args.local_dir)
    except OSError as error:
        raise LocalTierError("list", str(args.local_dir), error.strerror or str(error)) from error
    if args.run_id is not None:
        runs = [left for left in runs if left.run_id == args.run_id]
        if not runs:
            print_line(f"no run {args.run_id!r} in {args.local_dir}")
            return 1
    now_s, is_removed = time.time(), False
    for left in runs:
        try:
            text, is_removed = _outcome(left, now_s, args)
        except OSError as error:  # a run that the kernel refuses, as another user's, stops no other
            problem = f"{error.filename}: {error.strerror}" if error.filename else str(error)
            text, is_removed = f"stays: {problem}", False
        age_s, mib = max(left.age_s(now_s), 0), left.size_bytes / (1 << 20)
        print_line(f"{left.run_id}  {mib:.1f} MiB  {age_text(age_s)} old  {text}")
    stays = args.run_id is not None and args.yes and not is_removed
    return 1 if stays else 0


def _outcome(left: LeftRun, now_s: float, args: argparse.Namespace) -> tuple[str, bool]:
    """Return the outcome for a run in words, and True when it was removed."""
    stays = ""
    if (holder := holder_of(left)) is not None:
        stays = f"in use by {holder.describe()}"
    elif left.age_s(now_s) < args.older_than:
        stays = "not old enough (--older-than)"
    elif args.served:
        signs = (_sign_of_life(peer, args.timeout) for peer in args.peers)
        stays = next((sign for sign in signs if sign), "")
    if stays:
        return f"stays: {stays}", False
    if not args.yes:
        return "would be removed (--yes)", False
    if remove_run(left, although_served=args.served):
        return f"removed: {', '.join(path.name for path in left.directories)}", True
    return "stays: a process has it, or there is something else in it", False


def _sign_of_life(peer: str, timeout_s: float) -> str:
    """Return why a process may live at ``peer``, empty when none can. Blocks.

    Only a host whose process has ended refuses a connection; a silent one may live.
    """
    try:
        addresses = numeric_addresses(peer)
    except NotConnected as error:
        return f"{peer} {error.problem}"
    for address in addresses:
        try:
            socket.create_connection(parse_address(address), timeout_s).close()
        except ConnectionRefusedError:
            continue
        except OSError as error:
            return f"{address} does not answer, and may live: {error}"
        return f"a process answers at {address}"
    return ""
