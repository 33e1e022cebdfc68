"""Non-tensor state of a process as a JSON document. FORMAT.md is the specification.

``capture`` converts live state into a payload that shares nothing with it, ``encode`` and
``decode`` convert payloads into documents and back, ``apply`` writes a payload back into live
objects. No pickle: a document can hold values, never code.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any, cast

import msgspec

from emergency_ckpt.core.limits import (
    MAX_HOST_STATE_BYTES,
    MAX_HOST_STATE_CONTAINERS,
    MAX_PROCESSES,
)
from emergency_ckpt.core.step_names import is_format, is_item_name
from emergency_ckpt.core.timeline import check_save
from emergency_ckpt.errors import CorruptData, HostStateError, HostStateTooLarge
from emergency_ckpt.json_decoders import decoder_of
from emergency_ckpt.state import host_state_codec as codec
from emergency_ckpt.state.host_state_codec import Payload, as_stateful
from emergency_ckpt.types import OrbaxStep, SaveId

SCHEMA_VERSION = 1
_NOTHING = msgspec.Raw()


class HostStateDocument(msgspec.Struct, frozen=True):
    """A decoded document.

    Attributes:
      owner, count: index of the process, and number of processes of the job.
      digest: SHA-256 (hex) of the bytes of the payload, and of ``orbax`` after them.
      payload: for ``apply`` or ``value_of``.
      empty: the process had no non-tensor state.
      orbax: what Orbax's readers are to find of the step; of the first process alone.
    """

    save: SaveId
    owner: int
    count: int
    digest: str
    payload: Any
    orbax: OrbaxStep = OrbaxStep()

    @property
    def empty(self) -> bool:
        return self.payload is None


class _Document(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    schema_version: int
    save: SaveId
    owner: int
    count: int
    digest: str
    payload: msgspec.Raw
    orbax: msgspec.Raw = _NOTHING


class _VersionOnly(msgspec.Struct, frozen=True):
    schema_version: int


def document_name(owner: int, count: int) -> str:
    """Return the file name of a document: ``process_00003_of_00008.json``."""
    return f"process_{owner:05d}_of_{count:05d}.json"


def capture(value: object) -> Payload:
    """Return the state of ``value`` at this instant; later changes to ``value`` do not affect it.

    Accepts None, bool, int, float, str, bytes, numeric numpy arrays and scalars, dicts, lists and
    tuples of these, objects with ``get_state`` and ``set_state``, and iterators of ``tf.data``, at
    any depth up to 64. ``HostStateError`` names the place of anything else.
    """
    return codec.to_payload(value)


def value_of(payload: Payload) -> Any:
    """Return the captured value; for an object with a state, the state. ``CorruptData``."""
    return codec.from_payload(payload)


def encode(
    save: SaveId,
    owner: int,
    count: int,
    payload: Payload,
    *,
    orbax: OrbaxStep = OrbaxStep(),  # noqa: B008 - immutable
) -> bytes:
    """Return the document of a payload. ``HostStateTooLarge`` above the limit.

    ``orbax``: of the step; kept in the document of the first process alone.
    """
    target = f"of process {owner} of {count} at step {save.step}"
    encoded = msgspec.json.encode(payload)
    kept = msgspec.json.encode(orbax, order="sorted")
    if codec.containers_in(encoded) > MAX_HOST_STATE_CONTAINERS:
        raise HostStateTooLarge(
            "encode host state",
            target,
            f"it has more than {MAX_HOST_STATE_CONTAINERS} lists and dicts",
            hint="keep many small values in numpy arrays, bytes, or flat lists of numbers",
        )
    has_orbax = owner == 0 and orbax != OrbaxStep()
    kept = msgspec.Raw(kept) if has_orbax else _NOTHING
    document = _Document(
        schema_version=SCHEMA_VERSION,
        save=save,
        owner=owner,
        count=count,
        digest=_digest(encoded, kept),
        payload=msgspec.Raw(encoded),
        orbax=kept,
    )
    data = msgspec.json.encode(document, order="sorted")
    _check_identity(document)
    if len(data) > MAX_HOST_STATE_BYTES:
        raise HostStateTooLarge(
            "encode host state",
            target,
            "it is over the limit",
            expected=f"at most {MAX_HOST_STATE_BYTES} bytes",
            actual=f"{len(data)} bytes",
            hint="keep less in the iterator's state",
        )
    return data


def size_of(payload: Payload) -> int:
    """Return the bytes of a payload in a document."""
    return len(msgspec.json.encode(payload))


def decode_of(save: SaveId, owner: int, count: int, data: bytes) -> HostStateDocument:
    """Return the document of that save and owner. CorruptData when it is another's, or none."""
    document = decode(data)
    if (document.save, document.owner, document.count) != (save, owner, count):
        raise CorruptData(
            "publish",
            document_name(owner, count),
            "the document is another process's or another save's",
            expected=(save, owner, count),
            actual=(document.save, document.owner, document.count),
        )
    return document


def decode(data: bytes) -> HostStateDocument:
    """Return a document from its bytes, with its digest checked. Raises only ``CorruptData``."""
    if len(data) > MAX_HOST_STATE_BYTES:
        raise CorruptData(
            "decode",
            "host state",
            "too long",
            expected=f"at most {MAX_HOST_STATE_BYTES} bytes",
            actual=f"{len(data)} bytes",
        )
    try:
        version = decoder_of(_VersionOnly).decode(data).schema_version
        if version != SCHEMA_VERSION:
            raise CorruptData(
                "decode", "host state", "unknown schema version", expected=SCHEMA_VERSION
            )
        document = decoder_of(_Document).decode(data)
        _check_identity(document)
        encoded = bytes(document.payload)
        actual = _digest(encoded, document.orbax)
        if actual != document.digest:
            raise CorruptData("decode", "host state", "digest differs", actual=actual)
        if codec.containers_in(encoded) > MAX_HOST_STATE_CONTAINERS:
            problem = f"more than {MAX_HOST_STATE_CONTAINERS} lists and dicts"
            raise CorruptData("decode", "host state", problem)
        payload = decoder_of(Any).decode(encoded)
        orbax = decoder_of(OrbaxStep).decode(bytes(document.orbax) or b"{}")
        if not is_format(orbax.step_name) or not all(map(is_item_name, orbax.items or ())):
            raise CorruptData("decode", "host state", "a name of a step or item is none")
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise CorruptData("decode", "host state", f"not a document: {error!s:.200}") from error
    codec.from_payload(
        payload
    )  # so that a fault inside is found now and not half-way through apply
    return HostStateDocument(
        save=document.save,
        owner=document.owner,
        count=document.count,
        digest=document.digest,
        payload=payload,
        orbax=orbax,
    )


def _digest(payload: bytes, orbax: msgspec.Raw) -> str:
    return hashlib.sha256(payload + bytes(orbax)).hexdigest()


def apply(target: Any, payload: Payload) -> Any:
    """Write a payload back into the value it was captured from; return the restored value.

    Objects with ``set_state`` are repositioned in place, anywhere in the structure. The dicts and
    lists that lead to one are updated in place as well, and the top one if the payload is of its
    kind. Everything else is replaced. ``HostStateError`` names the place: of a structure that does
    not match, before anything is changed; of a failed ``set_state``, after earlier objects moved.
    """
    _check_structure(target, payload, "host_state")
    return _put(target, payload, top=True)


def _check_identity(document: _Document) -> None:
    check_save(document.save)
    if not 0 <= document.owner < document.count <= MAX_PROCESSES:
        raise CorruptData(
            "decode", "host state", f"owner {document.owner!s:.40} of {document.count!s:.40}"
        )


def _holds_stateful(value: object) -> bool:
    if isinstance(value, dict):
        return any(_holds_stateful(item) for item in cast(dict[Any, Any], value).values())
    if isinstance(value, (list, tuple)):
        return any(_holds_stateful(item) for item in cast(list[Any], value))
    return as_stateful(value) is not None


def _check_structure(target: object, payload: Payload, path: str) -> None:
    has_state = codec.tag_of(payload) == codec.STATE
    if (as_stateful(target) is not None) != has_state:
        raise HostStateError(
            "restore",
            path,
            "one side is an object with a state, the other is not",
            expected=type(target).__name__,
            actual="a state" if has_state else "a plain value",
            hint="give the same structure as at the save",
        )
    if has_state or not _holds_stateful(target):
        if not has_state and codec.holds_state(payload):
            raise _mismatch(path, "an object with a state is missing here")
        return
    if isinstance(target, dict):
        items = codec.dict_items(payload)
        expected = cast(dict[Any, Any], target)
        if items is None or {key for key, _ in items} != set(expected):
            raise _mismatch(path, "keys differ")
        for key, item in items:
            _check_structure(expected[key], item, f"{path}[{codec.text_of(key)}]")
        return
    sequence = codec.sequence_items(payload)
    values = cast(list[Any], target)
    if sequence is None or sequence[0] is not type(target) or len(sequence[1]) != len(values):
        raise _mismatch(path, "kind or length of a sequence differs")
    for index, (value, item) in enumerate(zip(values, sequence[1], strict=True)):
        _check_structure(value, item, f"{path}[{index}]")


def _put(target: Any, payload: Payload, *, top: bool = False) -> Any:
    stateful = as_stateful(target)
    if stateful is not None:
        state = codec.from_payload(payload)
        try:
            stateful.set_state(state)
        except Exception as error:
            name = type(target).__name__
            raise HostStateError("restore", name, f"set_state failed: {error}") from error
        return target
    leads_to_state = _holds_stateful(target)
    if isinstance(target, dict) and (top or leads_to_state):
        items = codec.dict_items(payload)
        if items is not None:
            old = cast(dict[Any, Any], target)
            new = {key: _put(old.get(key), item) for key, item in items}
            old.clear()
            old.update(new)
            return old
    if isinstance(target, (list, tuple)) and (top or leads_to_state):
        sequence = codec.sequence_items(payload)
        if sequence is not None and sequence[0] is type(target):
            old_items = cast(list[Any], target)
            padded = [*old_items, *[None] * len(sequence[1])]
            restored = [_put(old, new) for old, new in zip(padded, sequence[1], strict=False)]
            if isinstance(target, tuple):
                return tuple(restored)
            target[:] = restored
            return cast(Any, target)
    return codec.from_payload(payload)


def _mismatch(path: str, problem: str) -> HostStateError:
    return HostStateError(
        "restore", path, problem, hint="give host_state the structure that it had at the save"
    )


def payload_for(target: object, value: object, path: str = "host_state") -> Payload:
    """Return the payload of ``value``, with a state where ``target`` has an object for it.

    The result of a remap, in which an iterator's state is a plain value, can then be applied.
    """
    if as_stateful(target) is not None:
        return {codec.STATE: codec.to_payload(value, path)}
    if isinstance(target, dict) and isinstance(value, dict):
        targets, values = cast("dict[Any, Any]", target), cast("dict[Any, Any]", value)
        return codec.dict_payload(
            (key, payload_for(targets.get(key), item, f"{path}[{codec.text_of(key)}]"))
            for key, item in values.items()
        )
    if isinstance(target, list | tuple) and type(target) is type(value):  # pyright: ignore[reportUnknownArgumentType]
        targets, values = cast("Sequence[Any]", target), cast("Sequence[Any]", value)
        if len(targets) == len(values):
            items = [
                payload_for(old, new, f"{path}[{place}]")
                for place, (old, new) in enumerate(zip(targets, values, strict=True))
            ]
            return {codec.TUPLE: items} if type(values) is tuple else items
    return codec.to_payload(value, path)
