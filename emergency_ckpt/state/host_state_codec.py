"""Values of a host state as trees of plain JSON, exactly and without pickle. See FORMAT.md.

JSON types are written directly; every other type is an object with one key, its tag. Dicts that
look like a tagged object, or have keys that are not strings, are written as a list of pairs.
"""

from __future__ import annotations

import base64
import binascii
import math
import re
import struct
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Literal, Protocol, cast, runtime_checkable

import numpy as np

from emergency_ckpt.core.limits import (
    MAX_DEPTH,
    MAX_DIMENSIONS,
    MAX_EQUAL_HASHES,
    MAX_HOST_STATE_CONTAINERS,
)
from emergency_ckpt.errors import CorruptData, HostStateError

_FILES = {"index": ".index", "data": ".data-00000-of-00001"}
"""Suffixes of the files of one TensorFlow checkpoint."""


class TfIterator:
    """The state of an iterator over a ``tf.data.Dataset``, also of ``as_numpy_iterator()``.

    A dataset that calls Python (``from_generator``) cannot be saved and raises TensorFlow's own
    error. A shuffle buffer is part of the state unless the dataset's options have
    ``experimental_symbolic_checkpoint``.
    """

    def __init__(self, tensorflow: Any, iterator: object) -> None:
        self._checkpoint = tensorflow.train.Checkpoint(iterator=iterator)

    def get_state(self) -> dict[str, bytes]:
        """Return the files of a checkpoint of the iterator. Blocks for local file IO."""
        with tempfile.TemporaryDirectory(prefix="eckpt-tf-") as directory:
            prefix = Path(directory) / "iterator"
            self._checkpoint.write(str(prefix))
            return {
                name: prefix.with_name(prefix.name + ending).read_bytes()
                for name, ending in _FILES.items()
            }

    def set_state(self, state: object, /) -> None:
        """Move the iterator, in place, to a saved position. CorruptData; TensorFlow's errors."""
        files = cast("dict[str, Any]", state) if isinstance(state, dict) else {}
        if set(files) != set(_FILES) or not all(isinstance(d, bytes) for d in files.values()):
            raise CorruptData("restore", "tf.data iterator", "this is not an iterator's state")
        with tempfile.TemporaryDirectory(prefix="eckpt-tf-") as directory:
            prefix = Path(directory) / "iterator"
            for name, ending in _FILES.items():
                prefix.with_name(prefix.name + ending).write_bytes(files[name])
            self._checkpoint.read(str(prefix)).assert_existing_objects_matched()


_MIN_JSON_INT, _MAX_JSON_INT = -(1 << 63), (1 << 63) - 1
_PLAIN = frozenset({type(None), bool, int, float, str})
_STRING = re.compile(rb'"(?:[^"\\]++|\\.)*+"', re.DOTALL)

BYTES, TUPLE, FLOAT, INT, DICT, ARRAY, STATE = (
    "__bytes__",
    "__tuple__",
    "__float__",
    "__int__",
    "__dict__",
    "__array__",
    "__state__",
)
_ORDERS: tuple[Literal["<", ">"], ...] = ("<", ">")
_ARRAY_DTYPES = frozenset(
    np.dtype(code).newbyteorder(order).str for code in "?bBhHiIlLqQefdFD" for order in _ORDERS
)
_HINT = (
    "use dict, list, tuple, str, int, float, bool, None, bytes, numeric numpy arrays,"
    " tf.data iterators, or objects with get_state and set_state;"
    " device arrays belong in the state"
)

Payload = None | bool | int | float | str | list[Any] | dict[str, Any]
"""A tree of JSON values. It shares nothing with its source."""


@runtime_checkable
class Stateful(Protocol):
    """An object with a state of its own, such as a data iterator."""

    def get_state(self) -> Any: ...

    def set_state(self, state: Any, /) -> Any: ...


def as_stateful(value: object) -> Stateful | None:
    """Return the object with the state of ``value``, usually itself; None without a state."""
    if isinstance(value, Stateful):
        return None if isinstance(value, type) else value
    tensorflow: Any = sys.modules.get("tensorflow")
    data = getattr(tensorflow, "data", None)  # None also while it is being imported
    if data is None or not isinstance(value, (data.Iterator, data.NumpyIterator)):
        return None
    return TfIterator(tensorflow, value)


def to_payload(value: object, path: str = "host_state", depth: int = 0) -> Payload:
    """Return the payload of a value. ``HostStateError`` names the place of an unsupported value."""
    if depth > MAX_DEPTH:
        raise HostStateError(
            "capture",
            path,
            f"nested deeper than {MAX_DEPTH} levels",
            hint="check whether it contains itself",
        )
    if type(value) is str:
        _check_text(value, path)
        return value
    if value is None or type(value) is bool:
        return value
    encoder = _ENCODERS.get(type(value))
    if encoder is not None:
        return encoder(value, path, depth + 1)
    if isinstance(value, (np.ndarray, np.generic)):
        return {ARRAY: _encode_array(value, path)}
    stateful = as_stateful(value)
    if stateful is not None:
        try:
            state = stateful.get_state()
        except Exception as error:
            raise HostStateError("capture", path, f"get_state failed: {error}") from error
        return {STATE: to_payload(state, f"{path}.get_state()", depth + 1)}
    name = f"{type(value).__module__}.{type(value).__qualname__}"
    raise HostStateError("capture", path, f"cannot store a value of type {name}", hint=_HINT)


def from_payload(payload: object, depth: int = 0) -> Any:
    """Return the value of a payload; for an object with a state, the state itself.

    ``CorruptData`` for a tree that ``to_payload`` cannot have made.
    """
    if depth > MAX_DEPTH:
        raise _corrupt(f"nested deeper than {MAX_DEPTH} levels")
    if type(payload) in _PLAIN:
        return payload
    if isinstance(payload, list):
        return _values(cast(list[object], payload), depth + 1)
    if not isinstance(payload, dict):
        raise _corrupt(f"a value of type {type(payload).__name__}")
    mapping = cast(dict[str, object], payload)
    tag = tag_of(mapping)
    if tag is None:
        return {key: from_payload(item, depth + 1) for key, item in mapping.items()}
    return _DECODERS[tag](mapping[tag], depth + 1)


def _values(payloads: list[object], depth: int) -> list[Any]:
    # Millions of numbers are their own values; a call for each would take a second.
    if depth <= MAX_DEPTH and _PLAIN.issuperset(map(type, payloads)):
        return list(payloads)
    return [from_payload(item, depth) for item in payloads]


def containers_in(encoded: bytes) -> int:
    """Return at least the number of lists and dicts in the JSON text of a payload.

    It is exact where there are more than ``MAX_HOST_STATE_CONTAINERS``.
    """
    count = encoded.count(b"[") + encoded.count(b"{")
    if count <= MAX_HOST_STATE_CONTAINERS:
        return count
    plain = _STRING.sub(b"", encoded)
    return plain.count(b"[") + plain.count(b"{")


def tag_of(payload: object) -> str | None:
    """Return the tag of a tagged object, None for any other value. ``CorruptData``: unknown tag."""
    if not isinstance(payload, dict):
        return None
    mapping = cast(dict[str, object], payload)
    if len(mapping) != 1:
        return None
    key = next(iter(mapping))
    if not _looks_like_tag(key):
        return None
    if key not in _DECODERS:
        raise _corrupt(f"unknown tag {key[:40]!r}")
    return key


def dict_items(payload: object) -> list[tuple[Any, Any]] | None:
    """Return (key, payload of the value) of a dict's payload in either form, else None."""
    tag = tag_of(payload)
    if tag == DICT:
        return _pairs(cast(dict[str, Any], payload)[DICT], 0)
    if tag is None and isinstance(payload, dict):
        return list(cast(dict[Any, Any], payload).items())
    return None


def sequence_items(payload: object) -> tuple[type, list[Any]] | None:
    """Return (list or tuple, payloads of the items) of a sequence's payload, else None."""
    if isinstance(payload, list):
        return list, cast(list[Any], payload)
    if tag_of(payload) == TUPLE:
        items = cast(dict[str, Any], payload)[TUPLE]
        if isinstance(items, list):
            return tuple, cast(list[Any], items)
    return None


def dict_payload(
    items: Iterable[tuple[Any, Payload]], path: str = "host_state", depth: int = 0
) -> Payload:
    """Return the payload of a dict, from its keys and the payloads of its values."""
    pairs = list(items)
    if all(type(key) is str and not _looks_like_tag(key) for key, _ in pairs):
        for key, _ in pairs:
            _check_text(key, f"{path} key {text_of(key)}")
        return dict(pairs)
    if _too_many_equal_hashes(key for key, _ in pairs):
        problem = f"over {MAX_EQUAL_HASHES} keys of a dict have the same hash"
        raise HostStateError("capture", path, problem, hint="keep them in a list of pairs")
    return {DICT: [[to_payload(key, f"{path} key {text_of(key)}", depth), v] for key, v in pairs]}


def text_of(key: object) -> str:
    """Return a key of a dict as text. Python refuses to write out an integer of many digits."""
    try:
        return repr(key)
    except ValueError:
        return f"a {type(key).__name__} with an integer of many digits"


def _too_many_equal_hashes(keys: Iterable[object]) -> bool:
    """Return whether a dict of ``keys`` would take a long time. TypeError: a key has no hash."""
    return max(Counter(map(hash, keys)).values(), default=0) > MAX_EQUAL_HASHES


def holds_state(payload: Payload) -> bool:
    """Return whether the payload has the state of an object anywhere."""
    if tag_of(payload) == STATE:
        return True
    items = [item for _, item in dict_items(payload) or ()]
    sequence = sequence_items(payload)
    return any(map(holds_state, items + (sequence[1] if sequence else [])))


def _check_text(text: str, path: str) -> None:
    """Raise HostStateError for a text that has no UTF-8, such as a name of a file may be."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        hint = "keep the name of a file as bytes, which os.fsencode returns"
        raise HostStateError("capture", path, "text is not valid Unicode", hint=hint) from error


def _looks_like_tag(key: object) -> bool:
    return isinstance(key, str) and key.startswith("__") and key.endswith("__")


def _encode_int(value: int, path: str, depth: int) -> Payload:
    # Many JSON readers keep at most 64 bits.
    return value if _MIN_JSON_INT <= value <= _MAX_JSON_INT else {INT: hex(value)}


def _encode_float(value: float, path: str, depth: int) -> Payload:
    # JSON has no NaN and no infinity; the bits keep a NaN's payload too.
    return value if math.isfinite(value) else {FLOAT: struct.pack(">d", value).hex()}


def _encode_bytes(value: bytes, path: str, depth: int) -> Payload:
    return {BYTES: base64.b64encode(value).decode()}


def _encode_list(value: list[Any], path: str, depth: int) -> Payload:
    return [to_payload(item, f"{path}[{i}]", depth) for i, item in enumerate(value)]


def _encode_tuple(value: tuple[Any, ...], path: str, depth: int) -> Payload:
    return {TUPLE: [to_payload(item, f"{path}[{i}]", depth) for i, item in enumerate(value)]}


def _encode_dict(value: dict[Any, Any], path: str, depth: int) -> Payload:
    items = list(value.items())  # read once, since another thread may change it
    pairs = [(key, to_payload(item, f"{path}[{text_of(key)}]", depth)) for key, item in items]
    return dict_payload(pairs, path, depth)


def _encode_array(value: np.ndarray[Any, Any] | np.generic, path: str) -> Payload:
    if value.dtype.str not in _ARRAY_DTYPES:
        raise HostStateError("capture", path, f"cannot store a numpy {value.dtype}", hint=_HINT)
    if isinstance(value, np.ndarray) and type(value) not in (np.ndarray, np.memmap):
        problem = f"a {type(value).__name__} would come back as a plain array"
        raise HostStateError("capture", path, problem, hint="give numpy.asarray of it")
    array = np.ascontiguousarray(value)
    return {
        "scalar": isinstance(value, np.generic),
        "dtype": array.dtype.str,
        "shape": list(value.shape),
        "data": base64.b64encode(array.tobytes()).decode(),
    }


def _decode_bytes(value: object, depth: int) -> bytes:
    if not isinstance(value, str):
        raise _corrupt("bytes are not a string")
    try:
        return base64.b64decode(value.encode("ascii"), validate=True)
    except (binascii.Error, ValueError) as error:
        raise _corrupt("bytes are not base64") from error


def _decode_tuple(value: object, depth: int) -> tuple[Any, ...]:
    if not isinstance(value, list):
        raise _corrupt("a tuple is not a list")
    return tuple(_values(cast(list[object], value), depth))


def _decode_float(value: object, depth: int) -> float:
    try:
        if isinstance(value, str) and len(value) == 16:
            return struct.unpack(">d", bytes.fromhex(value))[0]
    except ValueError:
        pass
    raise _corrupt("a float is not 16 hexadecimal digits")


def _decode_int(value: object, depth: int) -> int:
    """Return the integer of hexadecimal digits, in a time that is linear in their number.

    ``MAX_HOST_STATE_BYTES`` bounds these digits. Decimal digits would take the square of their
    number, so they are for integers of 64 bits; msgspec refuses more than 4300 decimal digits.
    """
    try:
        if isinstance(value, str):
            return int(value, 16)
    except ValueError:
        pass
    raise _corrupt("an integer is not hexadecimal")


def _pairs(value: object, depth: int) -> list[tuple[Any, Any]]:
    pairs: list[tuple[Any, Any]] = []
    for pair in cast(list[object], value) if isinstance(value, list) else [None]:
        if not isinstance(pair, list) or len(cast(list[object], pair)) != 2:
            raise _corrupt("a dict is not a list of pairs")
        key, item = cast(list[object], pair)
        pairs.append((from_payload(key, depth), item))
    return pairs


def _decode_dict(value: object, depth: int) -> dict[Any, Any]:
    try:
        pairs = _pairs(value, depth)
        if _too_many_equal_hashes(key for key, _ in pairs):
            raise _corrupt(f"over {MAX_EQUAL_HASHES} keys of a dict have the same hash")
        return {key: from_payload(item, depth) for key, item in pairs}
    except TypeError as error:
        raise _corrupt("a dict key is not hashable") from error


def _decode_array(value: object, depth: int) -> Any:
    fields = cast(dict[str, Any], value) if isinstance(value, dict) else {}
    if set(fields) != {"scalar", "dtype", "shape", "data"}:
        raise _corrupt("an array lacks a field")
    name, shape = fields["dtype"], fields["shape"]
    data = _decode_bytes(fields["data"], depth)
    plain_shape = isinstance(shape, list) and len(cast(list[Any], shape)) <= MAX_DIMENSIONS
    # np.dtype accepts strings of many forms; only those that the encoder writes are accepted here.
    if not isinstance(name, str) or name not in _ARRAY_DTYPES or not plain_shape:
        raise _corrupt("an array of unknown dtype or shape")
    dimensions = cast(list[Any], shape)
    if any(type(n) is not int or not 0 <= n <= _MAX_JSON_INT for n in dimensions):
        raise _corrupt("an array of unknown dtype or shape")
    dtype = np.dtype(name)
    if math.prod(dimensions) * dtype.itemsize != len(data):
        raise _corrupt("an array's bytes do not fit its shape")
    try:
        array = np.frombuffer(data, dtype).reshape(dimensions).copy()
    except ValueError as error:  # 0 times a huge dimension
        raise _corrupt("an array of impossible shape") from error
    if fields["scalar"] is True and not dimensions:
        return array[()]
    return array


def _corrupt(problem: str) -> CorruptData:
    return CorruptData("decode", "host state", problem)


_ENCODERS: dict[type, Callable[[Any, str, int], Payload]] = {
    int: _encode_int,
    float: _encode_float,
    bytes: _encode_bytes,
    list: _encode_list,
    tuple: _encode_tuple,
    dict: _encode_dict,
}
_DECODERS: dict[str, Callable[[object, int], Any]] = {
    BYTES: _decode_bytes,
    TUPLE: _decode_tuple,
    FLOAT: _decode_float,
    INT: _decode_int,
    DICT: _decode_dict,
    ARRAY: _decode_array,
    STATE: from_payload,
}
