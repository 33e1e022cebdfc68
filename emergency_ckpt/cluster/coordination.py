"""All uses of JAX's coordination service, and the decoding of the values from it.

Control data only: a value takes about 0.4 ms, and the service carries some tens of MB/s. No call
here belongs on the training thread's save path.

Any value there may be damaged, of another version, or forged. A value that cannot be decoded is a
CoordinationError that names the message and its process. A collective call treats such a value as a
failure of that process, so that all processes see the failure (``decode_each``).
"""

from __future__ import annotations

import contextlib
import itertools
import socket
import threading
import time
from collections.abc import Callable, Generator, Mapping
from typing import Any, Protocol, TypeVar

import jax
import msgspec
from absl import logging

from emergency_ckpt.core.limits import MAX_MESSAGE_BYTES, MAX_REASON_BYTES
from emergency_ckpt.core.wording import unexpected_text
from emergency_ckpt.errors import (
    CheckpointError,
    ConfigError,
    CoordinationError,
    DeadlineExceeded,
)
from emergency_ckpt.json_decoders import decoder_of
from emergency_ckpt.private_names import private_module

ERROR_LIMIT_CHARS = 2000
"""Maximum length of an error text that one process sends to the others."""
JOINED_LIMIT_CHARS = 1000

_DISCARD_PORT = 9
"""No datagram is sent: any port would do."""

Told = TypeVar("Told")

distributed = private_module("jax._src.distributed", "global_state", project="jax")
"""The state that has the client of JAX's coordination service; JAX has no public name for it."""
_T = TypeVar("_T")
_UNREADABLE_LIMIT_CHARS = 400
_HINT = "all processes must run the same version"
_REPEAT_S, _REPEAT_PAUSE_S = 5.0, 0.2
"""Time for which a call without an answer is repeated: a connection is made anew in a second."""


class Coordinator(Protocol):
    """A small shared store. Keys are set once. All methods block, with a deadline.

    A ``get`` that reaches its deadline costs the service some 15 kB until the key is set; repeat
    ``find`` instead (``round.wait_for_key``).
    """

    @property
    def process_index(self) -> int: ...
    @property
    def process_count(self) -> int: ...

    def put(self, key: str, value: bytes) -> None:
        """Set ``key`` once; CoordinationError when ``key`` is already set."""
        ...

    def get(self, key: str, timeout_s: float) -> bytes:
        """Wait for the value of ``key``; DeadlineExceeded when ``key`` is not set in time."""
        ...

    def list(self, prefix: str) -> Mapping[str, bytes]:
        """Return every key under ``prefix`` and its value; keys are returned without the prefix."""
        ...

    def delete(self, prefix: str) -> None:
        """Delete ``prefix`` and every key below it."""
        ...

    def find(self, key: str) -> bytes | None:
        """Return the value of ``key``, or None when ``key`` is not set. Does not wait."""
        ...

    def replace(self, key: str, value: bytes) -> None:
        """Set ``key``, whether or not it was set before."""
        ...


class JaxCoordinator:
    """Coordinator over the service that ``jax.distributed.initialize`` started.

    JAX's client makes each call once, and a connection that breaks fails all calls under way. So a
    call that the service did not answer is repeated for ``_REPEAT_S``: without that, one such call
    would end a vote or a restore for all processes. After a call that failed for so long, calls
    are made once until the service answers again.
    """

    def __init__(self, client: Any, namespace: str, process_index: int, process_count: int) -> None:
        self._client = client
        self._namespace = namespace
        self.process_index = process_index
        self.process_count = process_count
        self._is_silent = False

    def _key(self, key: str) -> str:
        return f"{self._namespace}/{key}"

    def _call(self, operation: str, key: str, work: Callable[[], _T]) -> _T:
        deadline_s = time.monotonic() + _REPEAT_S
        while True:
            try:
                with _service_errors(operation, key):
                    result = work()
            except CheckpointError as error:
                is_answer = not error.problem.startswith("UNAVAILABLE")
                if is_answer or self._is_silent or time.monotonic() >= deadline_s:
                    self._is_silent = not is_answer
                    raise
                time.sleep(_REPEAT_PAUSE_S)
            else:
                self._is_silent = False
                return result

    def put(self, key: str, value: bytes) -> None:
        is_repeated = False

        def put() -> None:
            nonlocal is_repeated
            was_tried, is_repeated = is_repeated, True
            try:
                self._client.key_value_set_bytes(self._key(key), value)
            except jax.errors.JaxRuntimeError as error:
                # The try whose answer was lost may have set the key.
                may_be_ours = was_tried and str(error).startswith("ALREADY_EXISTS")
                if not may_be_ours or self.find(key) != value:
                    raise

        self._call("put", key, put)

    def get(self, key: str, timeout_s: float) -> bytes:
        deadline_s = time.monotonic() + timeout_s

        def get() -> bytes:
            timeout_ms = max(1, int(deadline_left_s(deadline_s) * 1000))
            return self._client.blocking_key_value_get_bytes(self._key(key), timeout_ms)

        return self._call("wait for", key, get)

    def list(self, prefix: str) -> Mapping[str, bytes]:
        name = self._key(prefix)
        entries = self._call("list", prefix, lambda: self._client.key_value_dir_get_bytes(name))
        return {key[len(name) + 1 :]: value for key, value in entries}

    def delete(self, prefix: str) -> None:
        name = self._key(prefix)
        self._call("delete", prefix, lambda: self._client.key_value_delete(name))

    def find(self, key: str) -> bytes | None:
        return self._call("look for", key, lambda: _find(self._client, self._key(key), key))

    def replace(self, key: str, value: bytes) -> None:
        def replace() -> None:
            self._client.key_value_set_bytes(self._key(key), value, allow_overwrite=True)

        self._call("replace", key, replace)


@contextlib.contextmanager
def _service_errors(operation: str, key: str) -> Generator[None]:
    """Raise the service's error inside as CoordinationError or DeadlineExceeded."""
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        # The service's error code is only in the text, at its start.
        text = str(error).split("\n", maxsplit=1)[0][:300]
        is_late = text.startswith("DEADLINE_EXCEEDED")
        kind = DeadlineExceeded if is_late else CoordinationError
        raise kind(operation, key, text) from error


class LocalCoordinator:
    """Coordinator of a job of one process: the same contract, in memory."""

    process_index = 0
    process_count = 1

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}
        self._changed = threading.Condition()

    def put(self, key: str, value: bytes) -> None:
        with self._changed:
            if key in self._values:
                raise CoordinationError("put", key, "the key is set already")
            self._values[key] = value
            self._changed.notify_all()

    def get(self, key: str, timeout_s: float) -> bytes:
        with self._changed:
            if not self._changed.wait_for(lambda: key in self._values, timeout_s):
                raise DeadlineExceeded("wait for", key, f"not set within {timeout_s:g} s")
            return self._values[key]

    def list(self, prefix: str) -> Mapping[str, bytes]:
        start = len(prefix) + 1
        with self._changed:
            return {k[start:]: v for k, v in self._values.items() if k.startswith(prefix + "/")}

    def delete(self, prefix: str) -> None:
        with self._changed:
            for key in [k for k in self._values if k == prefix or k.startswith(prefix + "/")]:
                del self._values[key]

    def find(self, key: str) -> bytes | None:
        with self._changed:
            return self._values.get(key)

    def replace(self, key: str, value: bytes) -> None:
        with self._changed:
            self._values[key] = value
            self._changed.notify_all()


def namespace(name: str) -> str:
    """Return the prefix of all keys of one checkpointer; short, because every key has it.

    ``name``: that of its start (``membership.agree_settings``), which all processes have.
    """
    return f"eckpt/{name[:_NAME_CHARS]}"


_NAME_CHARS = 10
_instances: dict[str, itertools.count[int]] = {}
"""The count of starts. No start that failed later, on whatever process, is left out."""


def connect(name: str) -> Coordinator:
    """Return the coordinator of this job whose keys are those of ``name`` alone."""
    return _connect(namespace(name))


def connect_start() -> Coordinator:
    """Return the coordinator for a start's first round; its namespace depends on no setting.

    All processes must begin the same sequence of starts.
    """
    return _connect(f"eckpt/start/{next(_instances.setdefault('', itertools.count()))}")


def _connect(prefix: str) -> Coordinator:
    client = distributed.global_state.client
    if client is None or jax.process_count() == 1:
        return LocalCoordinator()
    return JaxCoordinator(client, prefix, jax.process_index(), jax.process_count())


def jax_hears_notices() -> bool:
    """Return whether JAX takes preemption notices (``jax_enable_preemption_service``)."""
    return distributed.global_state.preemption_sync_manager is not None


_JAX_NOTICE, _JAX_ANSWERS = "RECEIVED_PREEMPTION_NOTICE", "PREEMPTION_CURRENT_COUNTER"
"""Keys of JAX's preemption service in the store of all processes; see ``private_names``."""
_LONG_AGO = b"1970-01-01T00:00:00+00:00"
"""The time in our notices: JAX waits until the time in a notice, by each process's own clock."""


def jax_has_notice() -> bool:
    """Return whether JAX's preemption service has received a notice at any process."""
    client = distributed.global_state.client
    return jax_hears_notices() and _find(client, _JAX_NOTICE, _JAX_NOTICE) is not None


def tell_jax_of_notice() -> None:
    """Give JAX's preemption service a notice on all processes, unless it has one or is off."""
    if not jax_hears_notices():
        return
    try:
        with _service_errors("put", _JAX_NOTICE):
            distributed.global_state.client.key_value_set_bytes(_JAX_NOTICE, _LONG_AGO)
    except CoordinationError as error:
        if not error.problem.startswith("ALREADY_EXISTS"):
            raise


def jax_has_answers(count: int) -> bool:
    """Return whether JAX's service of all ``count`` processes has answered a notice, or is off.

    JAX delays the end of each process by three minutes when one ends before it has answered.
    """
    if not jax_hears_notices():
        return True
    with _service_errors("list", _JAX_ANSWERS):
        answers = distributed.global_state.client.key_value_dir_get_bytes(_JAX_ANSWERS)
    return len(answers) >= count


def _find(client: Any, key: str, shown: str) -> bytes | None:
    """Return the value of ``key``, None while it is not set; errors name the key ``shown``."""
    try:
        with _service_errors("look for", shown):
            return client.key_value_try_get_bytes(key)
    except CoordinationError as error:
        if error.problem.startswith("NOT_FOUND"):
            return None
        raise


def own_address(bind_host: str | None = None) -> str:
    """Return ``bind_host`` as a numeric address, else this host's on its route to the coordinator.

    The address is 127.0.0.1 in a job on one machine, or without ``jax.distributed``. The address is
    also a loopback address on the coordinator's host, if the host's name means a loopback address
    there: see ``reachable_host``. ConfigError: ``bind_host`` is no address.
    """
    if bind_host is not None:
        try:
            addresses = socket.getaddrinfo(bind_host or None, 0, type=socket.SOCK_STREAM)
        except (OSError, UnicodeError) as error:
            problem = f"transfer address {bind_host!r}: {error}"
            raise ConfigError([problem], target="transfer server") from error
        return str(addresses[0][4][0])
    address = distributed.global_state.coordinator_address
    if not address:
        return "127.0.0.1"
    host, _, port = address.rpartition(":")
    try:
        return _address_towards(host.strip("[]"), int(port))
    except (OSError, ValueError) as error:
        problem = f"no address of this host leads to {address}: {error}"
        hint = "set bind_host to this host's address on the network that leads to its peers"
        raise CoordinationError("find", "this host's address", problem, hint=hint) from error


def route_to(host: str) -> str:
    """Return this host's address on its route to the address ``host``; empty without one."""
    try:
        return _address_towards(host, _DISCARD_PORT)
    except OSError as error:
        logging.warning("no address of this host leads to %s: %s", host, error)
        return ""


def _address_towards(host: str, port: int) -> str:
    kind, _, _, _, place = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(kind, socket.SOCK_DGRAM) as probe:
        probe.connect(place)  # sends nothing: it only chooses the route
        return str(probe.getsockname()[0])


def joined_errors(errors: Mapping[int, str]) -> str:
    """Return the failures by process in one line of bounded length; empty texts are no failures."""
    failed = [(p, text[:JOINED_LIMIT_CHARS]) for p, text in sorted(errors.items()) if text]
    return "; ".join(f"process {p}: {text}" for p, text in failed[:4])


def run_and_report(
    work: Callable[[], object], tell: Callable[[CheckpointError | None], Told]
) -> Told:
    """Run ``work``, and call ``tell`` with its error as a CheckpointError, with None on success.

    Returns the result of ``tell``; but raises the error of ``work``.
    """
    failure: CheckpointError | None = None
    try:
        work()
    except CheckpointError as error:
        failure = error
    except Exception as error:  # noqa: BLE001 - it must be reported, since the others wait
        text = unexpected_text(error)
        failure = CheckpointError("run", "the collective work", text)
        failure.__cause__ = error
    answer = tell(failure)
    if failure is not None:
        raise failure
    return answer


def forget(coordinator: Coordinator, prefix: str) -> None:
    """Delete keys that no process needs any more. A failure is logged, and a few keys stay."""
    try:
        coordinator.delete(prefix)
    except CheckpointError as error:
        logging.warning("%s", error)


def deadline_left_s(deadline_s: float) -> float:
    """Return the seconds until ``deadline_s`` of ``time.monotonic``, at least a millisecond."""
    return max(0.001, deadline_s - time.monotonic())


def decode_message(
    data: bytes, kind: type[_T] | Any, name: str, *, limit_bytes: int = MAX_MESSAGE_BYTES
) -> _T:
    """Return the decoded message ``name``. CoordinationError when ``data`` is no such message."""
    if len(data) > limit_bytes:
        raise _not_a_message(name, f"{len(data)} bytes are more than {limit_bytes}")
    try:
        return decoder_of(kind).decode(data)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise _not_a_message(name, f"{error!s:.300}") from error


def decode_each(
    values: Mapping[int, bytes],
    kind: type[_T],
    name: str,
    unreadable: Callable[[str], _T],
    *,
    limit_bytes: int = MAX_MESSAGE_BYTES,
) -> dict[int, _T]:
    """Return the message ``name`` of each process; never raises.

    ``unreadable``: makes the message that replaces an undecodable one, from the reason.
    """
    messages: dict[int, _T] = {}
    for process, data in values.items():
        try:
            messages[process] = decode_message(
                data, kind, f"{name}/{process}", limit_bytes=limit_bytes
            )
        except CoordinationError as error:
            messages[process] = unreadable(str(error)[:_UNREADABLE_LIMIT_CHARS])
    return messages


def by_process(values: Mapping[str, bytes], name: str, process_count: int) -> dict[int, bytes]:
    """Return the values below the key ``name`` by process. CoordinationError: unknown process."""
    by_number: dict[int, bytes] = {}
    for text, data in values.items():
        process = number_of(text, name)
        if process >= process_count:
            raise _not_a_message(f"{name}/{text[:40]}", f"there are {process_count} processes")
        by_number[process] = data
    return by_number


def number_of(text: str | bytes, name: str) -> int:
    """Return a whole number from 0 on, in its shortest decimal form. CoordinationError."""
    plain = text if isinstance(text, str) else text[:40].decode(errors="replace")
    is_number = plain.isascii() and plain.isdecimal() and len(plain) <= 20
    if not is_number or str(int(plain)) != plain:
        raise _not_a_message(name, f"{plain[:40]!r} is no number")
    return int(plain)


def reason_of(data: bytes) -> str:
    """Return the reason in ``data``, cut to its limit and made readable. Never raises."""
    return data[:MAX_REASON_BYTES].decode(errors="replace")


def _not_a_message(name: str, problem: str) -> CoordinationError:
    return CoordinationError(
        "decode", f"message {name!r}", f"not such a message: {problem}", hint=_HINT
    )
