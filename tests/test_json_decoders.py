"""Threads that are the first to decode a struct, all at once.

In a process of its own, since what went wrong ended the process.
"""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import msgspec
import pytest

from emergency_ckpt.core.limits import ProcessIndex
from emergency_ckpt.json_decoders import decoder_of


class _Inner(msgspec.Struct):
    counts: dict[int, int] = {}


class _Nested(msgspec.Struct):
    parts: tuple[_Inner, ...] = ()


_PROGRAM = """
import sys, threading
import msgspec
from emergency_ckpt.json_decoders import decoder_of

FIELDS = "".join(f"    f{i}: 'int | None' = None\\n" for i in range(6))
SOURCE = f'''
class Inner(msgspec.Struct):
    x: 'int' = 0
    y: 'list[str] | None' = None

class Kind(msgspec.Struct):
{FIELDS}    inner: 'Inner | None' = None
'''
sys.setswitchinterval(1e-6)
right = 0
for _ in range(100):
    exec(SOURCE)  # structs that nobody has decoded
    together = threading.Barrier(4)

    def decode():
        global right
        together.wait()
        found = decoder_of(Kind).decode(b'{"f1":1,"inner":{"x":2}}')
        with lock:
            right += (found.f1, found.inner.x) == (1, 2)

    lock = threading.Lock()
    threads = [threading.Thread(target=decode) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
print(right)
"""


@pytest.mark.parametrize(
    "kind",
    [dict[int, str], list[dict[int, str]], dict[str, dict[int, int] | None], set[int], _Nested],
)
def test_dict_of_any_integers_is_refused(kind: Any) -> None:
    """Integers that differ by 2^61 - 1 have one hash: a dict of n takes the time of n squared."""
    with pytest.raises(TypeError, match="integers without bounds"):
        decoder_of(kind)


def test_bounded_integers_are_keys() -> None:
    assert decoder_of(dict[ProcessIndex, int]).decode(b'{"3":4}') == {3: 4}
    with pytest.raises(msgspec.ValidationError):
        decoder_of(dict[ProcessIndex, int]).decode(f'{{"{2**61 - 1}":4}}')


def test_threads_that_first_decode_a_struct_at_once() -> None:
    ran = subprocess.run([sys.executable, "-c", _PROGRAM], check=False, capture_output=True)
    assert (ran.returncode, ran.stdout.split()) == (0, [b"400"]), ran.stderr[-2000:]
