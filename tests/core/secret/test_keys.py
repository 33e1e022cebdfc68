"""Keys that are derived from the run's secret."""

from __future__ import annotations

import hashlib
import hmac
import itertools

import pytest

from emergency_ckpt.core.keys import KEY_BYTES, RunSecret, derive_key

SECRET = b"5e" * 32


def by_hand(secret: bytes, info: bytes) -> bytes:
    extracted = hmac.digest(bytes(32), secret, "sha256")
    return hmac.digest(extracted, info + b"\x01", "sha256")


def test_derive_key_is_hkdf_with_each_length_before_its_field() -> None:
    info = b"\0\0\0\x12emergency_ckpt key\0\0\0\x05votes\0\0\0\x05run-a"
    assert derive_key(SECRET, "votes", "run-a") == by_hand(SECRET, info)
    assert hashlib.sha256().digest_size == KEY_BYTES


def test_derive_key_differs_in_secret_purpose_and_run() -> None:
    inputs = itertools.product([SECRET, b"5f" * 32], ["a", "ab"], ["bc", "c", ""])
    keys = [derive_key(*values) for values in inputs]
    assert len(set(keys)) == len(keys)


@pytest.mark.parametrize("given", [True, False])
def test_key_for_of_a_made_up_secret_is_none(given: bool) -> None:
    key = RunSecret("run-a", SECRET, given=given).key_for("votes")
    assert key == (derive_key(SECRET, "votes", "run-a") if given else None)


def test_run_secret_as_text_shows_no_secret() -> None:
    assert "5e" not in repr(RunSecret("run-a", SECRET, given=True))
