"""The second round of a start: all processes have the same secret, and keys for this start.

The first round, ``start_agreement``, is not authenticated; so its result, equal settings, is
compared here once more.

1. Each process sends a hello with a fresh number, sealed with a key of its given secret.
2. The leader answers each, sealed for that number, so that recorded answers are of no use.
3. A generated secret travels under keys of an X25519 exchange between the two.

A party that only reads does not learn a generated secret. One that also writes can act as the
other side, because no process knows anything else about it.

From then on values carry a mark that only the processes of this start can make
(``SealedCoordinator``).
"""

from __future__ import annotations

import dataclasses
import itertools
import os
import secrets
import threading
import time
from collections import OrderedDict
from collections.abc import Mapping
from typing import NamedTuple, TypeVar

import msgspec
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from emergency_ckpt.cluster.coordination import (
    ERROR_LIMIT_CHARS,
    Coordinator,
    deadline_left_s,
    forget,
)
from emergency_ckpt.cluster.round import Round
from emergency_ckpt.core.keys import OpenedValue, RunSecret, derive_key, open_value, seal_value
from emergency_ckpt.core.limits import MAX_EXCHANGE_BYTES
from emergency_ckpt.errors import ConfigError, CoordinationError, ForgedValue
from emergency_ckpt.json_decoders import decoder_of
from emergency_ckpt.run_secret import (
    OwnSecret,
    generate_secret,
    own_secret,
)

_REMEMBERED = 1 << 16
_SHOWN_CHARS = 200
_FOREIGN = "it has no mark of this start of the job: another client wrote it"
_OLD = "an older value was written back in its place"
_HINT = "keep the port of JAX's coordinator on the job's own network"
T = TypeVar("T")

_NONCE_BYTES = 16
_NOBODY = b"no secret was given to this process"
"""Placeholder for a missing secret: its seals prove nothing but identify such processes."""
_ONCE = bytes(12)  # the nonce of a key that seals one text


class SealedCoordinator:
    """Coordinator over another one, with ``key``, which all processes of this start have.

    JAX's coordination service does not authenticate its clients. A value that another writer
    forged, copied from another key, or replayed raises ForgedValue here, for all users. A value
    that another client deleted is absent as if it had never been set, and a wait for it ends at its
    deadline.

    ``key`` must belong to this start alone; otherwise values recorded in an earlier one would be
    accepted. Thread-safe. Every method raises the errors of the other coordinator, and those that
    return a value raise ForgedValue, which names the key, for a forged one.
    """

    def __init__(self, coordinator: Coordinator, key: bytes) -> None:
        self._coordinator = coordinator
        self._sealing_key = key
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()
        self._ticks = itertools.count()
        self._newest: OrderedDict[tuple[str, int], tuple[int, int]] = OrderedDict()

    @property
    def process_index(self) -> int:
        return self._coordinator.process_index

    @property
    def process_count(self) -> int:
        return self._coordinator.process_count

    def put(self, key: str, value: bytes) -> None:
        try:
            self._coordinator.put(key, self._sealed(key, 0, value))
        except CoordinationError as error:
            try:
                self.find(key)
            except ForgedValue as forged:
                raise forged from error  # it is why ours could not be set
            except CoordinationError:
                pass  # the first error is more specific
            raise

    def replace(self, key: str, value: bytes) -> None:
        self._coordinator.replace(key, self._sealed(key, next(self._numbers), value))

    def get(self, key: str, timeout_s: float) -> bytes:
        began = next(self._ticks)
        return self._opened("wait for", key, self._coordinator.get(key, timeout_s), began)

    def find(self, key: str) -> bytes | None:
        began = next(self._ticks)
        found = self._coordinator.find(key)
        return None if found is None else self._opened("look for", key, found, began)

    def list(self, prefix: str) -> Mapping[str, bytes]:
        began = next(self._ticks)
        return {
            rest: self._opened("list", f"{prefix}/{rest}", sealed, began)
            for rest, sealed in self._coordinator.list(prefix).items()
        }

    def delete(self, prefix: str) -> None:
        self._coordinator.delete(prefix)

    def _sealed(self, key: str, number: int, value: bytes) -> bytes:
        return seal_value(self._sealing_key, key, OpenedValue(number, self.process_index, value))

    def _opened(self, operation: str, key: str, sealed: bytes, began: int) -> bytes:
        opened = open_value(self._sealing_key, key, sealed)
        if opened is None:
            raise ForgedValue(operation, _shown(key), _FOREIGN, hint=_HINT)
        if opened.number and self._is_old(key, opened, began):
            raise ForgedValue(operation, _shown(key), _OLD, hint=_HINT)
        return opened.value

    def _is_old(self, key: str, opened: OpenedValue, began: int) -> bool:
        """Return whether a newer value of its writer was seen at ``key`` before this read began.

        Records this value. A value that another thread has read meanwhile does not count, because
        that read may have begun later.
        """
        place = key, opened.writer
        with self._lock:
            newest, seen = self._newest.pop(place, (0, 0))
            if opened.number > newest:
                self._newest[place] = opened.number, next(self._ticks)
            else:
                self._newest[place] = newest, seen
            if len(self._newest) > _REMEMBERED:
                self._newest.popitem(last=False)
        return opened.number < newest and seen < began


def _shown(key: str) -> str:
    """Return ``key`` for an error, since names below a prefix may be an attacker's choice."""
    return ascii(key[:_SHOWN_CHARS])[1:-1]


class SecretHello(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The message of one process. ``public``: its key in hexadecimal; ``settings``: a digest."""

    nonce: str
    public: str
    settings: str
    problem: str = ""


class SecretAnswer(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The leader's answer to one process.

    Attributes:
      session: unique name of this start; empty when it fails.
      public, box: the leader's key, and the generated secret encrypted for this process.
      problem: why the start fails, the same for all.
    """

    session: str = ""
    public: str = ""
    box: str = ""
    problem: str = ""


@dataclasses.dataclass(frozen=True)
class SharedSecret:
    """The secret and the unique name that all processes of one start share."""

    secret: RunSecret
    name: str

    def key_for(self, purpose: str) -> bytes:
        """Return the key of 32 bytes for ``purpose`` in this start."""
        return derive_key(self.secret.value, f"{purpose} {self.name}", self.secret.run_id)


class Exchange:
    """One process's side of the round. ``own``: None when it has no secret, or cannot read it."""

    def __init__(self, run_id: str, process: int, own: OwnSecret | None, settings: str) -> None:
        self._run_id = run_id
        self._process = process
        self._own = own
        self._settings = settings
        self._key, self._nobodys_key = _key(run_id, own), _key(run_id, None)
        self._nonce = secrets.token_hex(_NONCE_BYTES)
        self._private = X25519PrivateKey.generate()
        self._public = self._private.public_key().public_bytes_raw().hex()

    def hello(self, problem: str = "") -> bytes:
        """Return this process's message to the leader; ``problem``: why it cannot start."""
        hello = SecretHello(self._nonce, self._public, self._settings, problem)
        name = _hello_name(self._process)
        return _sealed(self._key, name, msgspec.json.encode(hello))

    # The leader's side.

    def answers(self, hellos: Mapping[int, bytes]) -> tuple[dict[int, bytes], SharedSecret | str]:
        """Return the answer to each process, and the session or the problem. At the leader."""
        opened = {p: self._opened_hello(p, data) for p, data in hellos.items()}
        lines = [f"process {p}: {text}" for p, found in opened.items() if (text := found.problem)]
        problem = "; ".join(lines[:4])
        session = None if problem else self._new_session()
        answers: dict[int, bytes] = {}
        for process, found in opened.items():
            box = ""
            if session is not None and found.box is not None:
                box = found.box.encrypt(_ONCE, session.secret.value, None).hex()
            answer = SecretAnswer(
                "" if session is None else session.name, self._public, box, problem
            )
            name = _answer_name(process, found.nonce)
            answers[process] = _sealed(found.key, name, msgspec.json.encode(answer))
        return answers, session or problem

    def _new_session(self) -> SharedSecret:
        made_up = generate_secret() if self._own is None else b""
        return SharedSecret(self._run_secret(made_up), secrets.token_hex(_NONCE_BYTES))

    def _opened_hello(self, process: int, data: bytes) -> _OpenedHello:
        for key in (self._key, self._nobodys_key):
            hello = _decoded(key, _hello_name(process), data, SecretHello)
            if hello is None:
                continue
            has_secret, box = key != self._nobodys_key, None
            problem = hello.problem or self._rejection_reason(hello, has_secret=has_secret)
            if self._own is None and not problem:  # a given secret travels in no box
                try:
                    box = self._box(hello.public)
                except ValueError:
                    problem = "sent no key of X25519"
            return _OpenedHello(key, hello.nonce, box, problem)
        has = "another one than process 0" if self._own is not None else "one, and process 0 none"
        return _OpenedHello(self._nobodys_key, "", None, f"has {has} (or its message is forged)")

    def _rejection_reason(self, hello: SecretHello, *, has_secret: bool) -> str:
        if self._own is not None and not has_secret:
            return "has none, and process 0 has one"
        if hello.settings != self._settings:
            return "has other settings, although the first round found all equal"
        return ""

    # The other processes' side.

    def session(self, data: bytes) -> SharedSecret | str | None:
        """Return the session of the leader's answer, or the problem; None for a foreign answer.

        An answer is foreign unless it was sealed for this process and this start, with the same
        secret.
        """
        for own, key in ((self._own, self._key), (None, self._nobodys_key)):
            name = _answer_name(self._process, self._nonce if own is self._own else "")
            answer = _decoded(key, name, data, SecretAnswer)
            if answer is None:
                continue
            if answer.problem:
                return answer.problem
            if own is not self._own or not answer.session:
                return None  # its writer does not have our secret
            made_up = b"" if self._own is not None else self._unboxed(answer)
            return (
                None if made_up is None else SharedSecret(self._run_secret(made_up), answer.session)
            )
        return None

    def _unboxed(self, answer: SecretAnswer) -> bytes | None:
        try:
            return self._box(answer.public).decrypt(_ONCE, bytes.fromhex(answer.box), None)
        except (InvalidTag, ValueError):
            return None

    def _box(self, public: str) -> AESGCM:
        """Return the cipher between this process and the owner of ``public``, for one text.

        ValueError when ``public`` is no key.
        """
        shared = self._private.exchange(X25519PublicKey.from_public_bytes(bytes.fromhex(public)))
        both = " ".join(sorted((self._public, public)))
        return AESGCM(derive_key(shared, f"box {both}", self._run_id))

    def _run_secret(self, made_up: bytes) -> RunSecret:
        own = self._own
        if own is None:
            return RunSecret(self._run_id, made_up, given=False)
        return RunSecret(self._run_id, own.value, given=own.kind == "given")


@dataclasses.dataclass(frozen=True)
class _OpenedHello:
    key: bytes
    nonce: str
    box: AESGCM | None
    problem: str


def _key(run_id: str, own: OwnSecret | None) -> bytes:
    value, kind = (_NOBODY, "nobody") if own is None else (own.value, own.kind)
    return derive_key(value, f"start {kind}", run_id)


def _hello_name(process: int) -> str:
    return f"hello {process}"


def _answer_name(process: int, nonce: str) -> str:
    return f"answer {process} {nonce}"


def _sealed(key: bytes, name: str, value: bytes) -> bytes:
    return seal_value(key, name, OpenedValue(0, 0, value))


def _decoded(key: bytes, name: str, data: bytes, kind: type[T]) -> T | None:
    """Return the message that was sealed for ``name``, None when ``data`` has none."""
    opened = open_value(key, name, data) if len(data) <= MAX_EXCHANGE_BYTES else None
    if opened is None:
        return None
    try:
        return decoder_of(kind).decode(opened.value)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None


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
            f"{_HELLO}.told, to process {coordinator.process_index}",
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
