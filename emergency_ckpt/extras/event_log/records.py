"""Lines of the event log: their type, their encoding, and what of a foreign line is refused."""

from __future__ import annotations

import re
from typing import Annotated, Any, Final

import msgspec

from emergency_ckpt.core.limits import MAX_LINE_BYTES, MAX_TIME_S
from emergency_ckpt.events import Event, point_of
from emergency_ckpt.json_decoders import decoder_of

LAUNCHER_FILE: Final = "events_launcher"
FILE_PATTERN: Final = re.compile(r"events_(?:\d{5,9}|launcher)(?:-\d+)?(?:\.\d+)?\.jsonl")

_MAX_CLIPPED_FIELDS: Final = 32
_CLIPPED_CHARS: Final = 500
_WORD: Final = 1 << 63

_Name = Annotated[str, msgspec.Meta(min_length=1, max_length=100)]
_Index = Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]
_Id = Annotated[str, msgspec.Meta(max_length=400)]


class LoggedEvent(msgspec.Struct, frozen=True, kw_only=True):
    """One line.

    Attributes:
      time_s: Unix time.
      name, fields: of the event; ``fields`` has JSON values.
      process, slice: the emitting process and its slice; None for the launcher.
      run_id, incarnation: of the emitting checkpointer; empty before they are known.
      life: number of restarts by ``eckpt launch`` before this; 0 without it.
    """

    time_s: Annotated[float, msgspec.Meta(ge=0, le=MAX_TIME_S)]
    name: _Name
    process: _Index | None = None
    slice: _Index | None = None
    run_id: _Id = ""
    incarnation: _Id = ""
    fields: dict[str, Any] = {}
    life: _Index = 0

    @property
    def point(self) -> str:
        """Return the name, with the stage or the cause if there is one, as ``Event.point``."""
        return point_of(self.name, self.fields)


def logged(event: Event, life: int = 0) -> LoggedEvent:
    """Return the line of ``event``; ``process`` is not repeated in its fields."""
    origin = event.origin
    fields = {key: value for key, value in event.fields.items() if key != "process"}
    return LoggedEvent(
        time_s=event.time_s,
        name=event.name,
        process=origin.process_index,
        slice=origin.slice_index,
        run_id=origin.run_id,
        incarnation=origin.incarnation,
        fields=fields,
        life=life,
    )


def encode_line(event: LoggedEvent) -> bytes:
    """Return one line, of at most ``MAX_LINE_BYTES``.

    Values that JSON does not have become text; fields that are too long are cut.
    """
    try:
        line = _ENCODER.encode(event) + b"\n"
        if len(line) <= MAX_LINE_BYTES:
            return line
    except (TypeError, ValueError, OverflowError, RecursionError):
        pass  # a surrogate, an integer beyond 64 bits, a key that is no text, a cycle
    first = list(event.fields.items())[:_MAX_CLIPPED_FIELDS]
    clipped = {ascii(key)[1:-1][:100]: _clipped_value(value) for key, value in first}
    return _ENCODER.encode(msgspec.structs.replace(event, fields=clipped)) + b"\n"


def decode_line(line: bytes) -> LoggedEvent:
    """Return the event in ``line``. Raises ValueError for anything else."""
    if len(line) > MAX_LINE_BYTES:
        raise ValueError(f"decode event: {len(line)} bytes in a line, over {MAX_LINE_BYTES}")
    try:
        return _DECODER.decode(line)
    except RecursionError as error:
        raise ValueError("decode event: too deeply nested") from error
    # msgspec's errors and UnicodeDecodeError are ValueErrors.


def _clipped_value(value: object) -> object:
    is_short_int = type(value) is int and -_WORD < value < _WORD
    if value is None or isinstance(value, bool | float) or is_short_int:
        return value
    return _as_text(value)[:_CLIPPED_CHARS]


def _as_text(value: object) -> str:
    try:
        return ascii(value)
    except Exception as error:  # noqa: BLE001 - a user's __repr__ must not end the log
        return f"<{type(value).__name__}: {type(error).__name__}>"


_ENCODER = msgspec.json.Encoder(enc_hook=_as_text)
_DECODER = decoder_of(LoggedEvent)
