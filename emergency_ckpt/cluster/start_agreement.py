"""The first agreements of a start: equal settings, a name for the start, and the run's secret.

The round of the settings precedes all work that depends on a setting. Otherwise a job in which
``dir`` differs would wait in two places for processes that never come there.

The run's secret is the secret that all processes were given, which the round compares by
``secret_text``, or a random one of process 0. A random secret passes through JAX's coordination
service in the clear. An attacker who can read in that service can read the secret; one who can
write there controls the job in any case. JAX's own mTLS closes the service (docs/security.md).
"""

from __future__ import annotations

import hashlib
import secrets
import time
from collections.abc import Mapping

import msgspec

from emergency_ckpt.cluster.coordination import (
    ERROR_LIMIT_CHARS,
    Coordinator,
    deadline_left_s,
    decode_each,
    decode_message,
    forget,
    joined_errors,
)
from emergency_ckpt.cluster.round import Answer, Round, nobody, wait_for_key
from emergency_ckpt.core.address import outside_hosts
from emergency_ckpt.core.wording import processes_text
from emergency_ckpt.errors import (
    CheckpointError,
    ConfigError,
    CoordinationError,
    DeadlineExceeded,
)
from emergency_ckpt.run_secret import OwnSecret, check_secret, generate_secret, stretched

_DIFFER_S = 5.0
"""Time for the second round, where the first round has taken the whole timeout."""
_MOST_LINES = 20
_KEY = "secret"
MADE_UP = (
    "no secret is given, so process 0 made one up and gave it to the others through JAX's"
    " coordination service, where anyone who reaches the coordinator's port can read it. Set"
    ' secret_file or ECKPT_SECRET, and require={"secret"} to refuse a start without one'
)
"""Warning of a job of several processes without a given secret."""


class _Hello(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    digest: str
    problem: str
    host: str = ""


class _Decision(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """``differ``: each process must publish its settings. ``start``: the name, on success."""

    start: str = ""
    error: str = ""
    differ: bool = False
    outside: tuple[str, ...] = ()


def tell_problem(coordinator: Coordinator, error: CheckpointError) -> None:
    """Report to the others that this process's settings are invalid, so that they do not wait.

    Does not block. A coordination error is not raised, because the caller's error matters more.
    """
    problem = str(error)[:ERROR_LIMIT_CHARS]
    try:
        settings_round = _round(coordinator, "settings", 0.0)
        settings_round.say(msgspec.json.encode(_Hello("", problem)))
        if coordinator.process_index == 0:
            settings_round.tell(msgspec.json.encode(_Decision(error=f"process 0: {problem}")))
    except CoordinationError as failure:
        error.add_note(f"The other processes got no report of this: {failure}")


def agree_settings(
    coordinator: Coordinator, own: Mapping[str, str], timeout_s: float, host: str = ""
) -> tuple[str, tuple[str, ...]]:
    """Begin a start of the job. Collective; blocks.

    Args:
      own: text of each setting that must be equal on all processes.
      host: numeric address on which this process would serve its peers.

    Returns:
      A unique name of this start, and the hosts of the job that cannot reach a loopback address
      (``core.address.outside_hosts``).

    Raises:
      ConfigError: a setting differs, or is invalid on some process; raised on all of them once the
        last process has come. DeadlineExceeded: a process did not come; the error names the
        process.
    """
    deadline_s = time.monotonic() + timeout_s
    text = msgspec.json.encode(dict(own), order="sorted")
    hello = _Hello(hashlib.sha256(text).hexdigest(), "", host)
    settings_round = _round(coordinator, "settings", timeout_s)
    try:
        data = settings_round.hold(
            msgspec.json.encode(hello), lambda said, _: _answer(settings_round, said)
        )
    except DeadlineExceeded as error:
        raise DeadlineExceeded(
            "start",
            "the job",
            f"not all processes came within {timeout_s:g} s",
            missing=error.missing,
            more=error.more,
            hint="look at the logs of the missing processes",
        ) from error
    decision: _Decision = decode_message(data, _Decision, "settings.told, process 0")
    if decision.differ:
        # The texts are sent only when the settings differ, because the texts of all processes are
        # large.
        texts = _round(coordinator, "settings.texts", deadline_left_s(deadline_s) + _DIFFER_S)
        differences = texts.hold(msgspec.json.encode(own), texts.when_all(_differences))
        name = "settings.texts.told, process 0"
        raise ConfigError(decode_message(differences, list[str], name))
    if decision.error:
        raise ConfigError([decision.error])
    return decision.start, decision.outside


def _round(coordinator: Coordinator, name: str, timeout_s: float) -> Round:
    # This round cannot find processes that have left: they announce that under the run's name.
    return Round(coordinator, name, timeout_s, absent=nobody, prompt=True)


def _answer(settings_round: Round, said: Mapping[int, bytes]) -> Answer | None:
    """Answer an error at once, before the last process has come; else when all have come."""
    hellos = decode_each(said, _Hello, "settings", lambda text: _Hello("", text))
    errors = joined_errors({p: hello.problem for p, hello in hellos.items()})
    if errors:
        return msgspec.json.encode(_Decision(error=errors))
    differ = len({hello.digest for hello in hellos.values()}) > 1
    if differ:
        decision = _Decision(differ=True)
    else:
        outside = outside_hosts(hello.host for hello in hellos.values() if hello.host)
        decision = _Decision(start=secrets.token_hex(8), outside=outside)
    return settings_round.when_all(lambda _: msgspec.json.encode(decision))(said, {})


def _differences(said: Mapping[int, bytes]) -> bytes:
    tables: dict[int, dict[str, str]] = {}
    unreadable: list[str] = []
    for process, data in said.items():
        key = f"settings.texts/{process}"
        try:
            tables[process] = decode_message(data, dict[str, str], key)
        except CoordinationError as error:
            unreadable.append(str(error))
    return msgspec.json.encode([*unreadable, *differing_settings(tables)][:_MOST_LINES])


def differing_settings(tables: Mapping[int, Mapping[str, str]]) -> list[str]:
    """Return a line for each setting that differs: its name, each value, and its processes.

    ``tables``: by process, the text of each setting that must agree. "Not known" counts as a
    value.
    """
    names = sorted({name for table in tables.values() for name in table})
    lines: list[str] = []
    for name in names:
        holders: dict[str, list[int]] = {}
        for process, table in sorted(tables.items()):
            holders.setdefault(table.get(name, "not known there"), []).append(process)
        if len(holders) > 1:
            values = "; ".join(
                f"{value} at {processes_text(who)}" for value, who in holders.items()
            )
            lines.append(f"{name} differs between the processes: {values}")
    return lines


def secret_text(run_id: str, own: OwnSecret | None) -> str:
    """Return a text that is equal on two processes exactly if they were given the same secret.

    The text has a digest of the stretched secret, so a guess costs as much as at a handshake.
    """
    if own is None:
        return "none"
    digest = hashlib.sha256(b"emergency_ckpt secret" + stretched(run_id, own.value)).hexdigest()
    return f"{own.kind}, {digest[:16]}"


def share_secret(coordinator: Coordinator, own: OwnSecret | None, timeout_s: float) -> bytes:
    """Return the run's secret: the given one (``own``), or one that process 0 makes up. Collective.

    All processes were given the same secret, or no process was given one. DeadlineExceeded when
    process 0 did not come; ConfigError when the value in the service is no secret.
    """
    if own is not None:
        return own.value
    if coordinator.process_index != 0:
        secret = wait_for_key(coordinator, _KEY, timeout_s, prompt=True)
        check_secret(secret)
        return secret
    secret = generate_secret()
    if coordinator.process_count > 1:
        coordinator.put(_KEY, secret)
    return secret


def forget_secret(coordinator: Coordinator) -> None:
    """Delete the secret from the service. For the leader, once all processes have read it."""
    if coordinator.process_index == 0:
        forget(coordinator, _KEY)
