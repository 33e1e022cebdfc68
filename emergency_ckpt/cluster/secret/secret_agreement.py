"""The second round of a start: all processes have the same secret, and keys for this start.

The first round, ``start_agreement``, is not authenticated; so its result, equal settings, is
compared here once more.
"""

from __future__ import annotations

import os
import secrets
import time
from typing import NamedTuple

from emergency_ckpt.cluster.coordination import (
    ERROR_LIMIT_CHARS,
    Coordinator,
    deadline_left_s,
    forget,
)
from emergency_ckpt.cluster.round import Round
from emergency_ckpt.cluster.secret.exchange import Exchange
from emergency_ckpt.cluster.secret.sealed_coordination import SealedCoordinator
from emergency_ckpt.core.secret.derived_keys import RunSecret
from emergency_ckpt.errors import ConfigError, ForgedValue
from emergency_ckpt.run_secret import (
    OwnSecret,
    generate_secret,
    own_secret,
)

_HELLO = "secret/hello"
MADE_UP = (
    "no secret is given, so the processes generated one through JAX's coordination service. It"
    " protects against an attacker who only reads, or only reaches the transfer ports; not against"
    " one who could write at the coordinator's port during this start. It cannot sign saves. Set"
    ' secret_file or ECKPT_SECRET, and require={"secret"} to refuse a start without one'
)
"""Warning of a job of several processes with a generated secret."""


class Agreed(NamedTuple):
    """The common result on all processes of this start.

    Attributes:
      secret: the run's secret.
      is_made_up: the processes generated it and exchanged it.
      coordinator: the given one; in a job of several processes it seals each value with a key that
        only these processes have.
      start: unique name of this start.
    """

    secret: RunSecret
    is_made_up: bool
    coordinator: Coordinator
    start: str


def agree_secret(
    coordinator: Coordinator,
    run_id: str,
    secret_file: str | None,
    timeout_s: float,
    *,
    settings: str = "",
) -> Agreed:
    """Return the run's secret, and a coordinator that only its owners can write to. Collective.

    Args:
      settings: digest of the settings that must be equal on all processes.

    Raises:
      ConfigError: on all processes, when one cannot read its secret, or lacks the secret that the
        others have. ForgedValue: another writer answered in the leader's place, or deleted a value.
        DeadlineExceeded: a process did not come.
    """
    deadline_s = time.monotonic() + timeout_s
    own: OwnSecret | None = None
    failure: ConfigError | None = None
    try:
        own = own_secret(secret_file, os.environ)
    except ConfigError as error:
        failure = error
    if coordinator.process_count == 1:
        if failure is not None:
            raise failure
        return _alone(coordinator, run_id, own)
    exchange = Exchange(run_id, coordinator.process_index, own, settings)
    problem = "" if failure is None else str(failure)[:ERROR_LIMIT_CHARS]
    limit_s = deadline_left_s(deadline_s)
    held = Round(coordinator, _HELLO, limit_s, prompt=True, for_each=True)
    rule = held.when_all(lambda hellos: exchange.answers(hellos)[0])
    found = exchange.session(held.hold(exchange.hello(problem), rule))
    if failure is not None:
        raise failure
    if found is None:
        raise ForgedValue(
            "start",
            f"{_HELLO}.told/{coordinator.process_index}",
            "it is not an answer to this process, sealed with the run's secret",
            hint="compare the secrets of the processes; if they are equal, the value is forged",
        )
    if isinstance(found, str):
        raise ConfigError([f"the run's secret differs between the processes: {found}"])
    sealed = SealedCoordinator(coordinator, found.key_for("coordination"))
    is_made_up = own is None
    return Agreed(found.secret, is_made_up, sealed, found.key_for("name of the start").hex()[:16])


def forget_exchange(coordinator: Coordinator) -> None:
    """Delete the keys of the agreement. For the leader, once all processes have finished it."""
    if coordinator.process_index == 0:
        forget(coordinator, "secret")


def _alone(coordinator: Coordinator, run_id: str, own: OwnSecret | None) -> Agreed:
    value = generate_secret() if own is None else own.value
    secret = RunSecret(run_id, value, given=own is not None and own.kind == "given")
    return Agreed(secret, False, coordinator, secrets.token_hex(8))
