"""The run's secret at a start: the secret given to all processes, or a random one of process 0.

The settings' comparison (``start_agreement``) also compares the given secrets, by ``secret_text``.
A random secret passes through JAX's coordination service in the clear. An attacker who can read in
that service can read the secret; one who can write there controls the job in any case. JAX's own
mTLS closes the service (docs/security.md).
"""

from __future__ import annotations

import hashlib

from emergency_ckpt.cluster.coordination import Coordinator, forget
from emergency_ckpt.cluster.round import wait_for_key
from emergency_ckpt.run_secret import OwnSecret, check_secret, generate_secret, stretched

_KEY = "secret"
MADE_UP = (
    "no secret is given, so process 0 made one up and gave it to the others through JAX's"
    " coordination service, where anyone who reaches the coordinator's port can read it. Set"
    ' secret_file or ECKPT_SECRET, and require={"secret"} to refuse a start without one'
)
"""Warning of a job of several processes without a given secret."""


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
