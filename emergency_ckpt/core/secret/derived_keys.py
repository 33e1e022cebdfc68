"""The secret of a run, and the keys that are derived from it, one for each purpose."""

from __future__ import annotations

import dataclasses

from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

KEY_BYTES = 32


@dataclasses.dataclass(frozen=True)
class RunSecret:
    """The secret that all processes of a run share. Its repr never shows it.

    Attributes:
      run_id: the run.
      value: 32 bytes or more.
      given: True when the user gave it. Otherwise the job generated it at this start: the next
        start has another one, and anyone with access to the coordination service can read it.
    """

    run_id: str
    value: bytes = dataclasses.field(repr=False)
    given: bool

    def key_for(self, purpose: str) -> bytes | None:
        """Return this run's key of 32 bytes for ``purpose``; None for a generated secret.

        A generated secret proves nothing: other lives have another one, and anyone with access to
        the coordination service can read it.
        """
        return derive_key(self.value, purpose, self.run_id) if self.given else None


def derive_key(secret: bytes, purpose: str, run_id: str) -> bytes:
    """Return the key of 32 bytes for ``purpose`` in the run ``run_id``: HKDF-SHA256.

    All processes and all lives of a run derive the same key. No key reveals another one or the
    secret.
    """
    fields = (b"emergency_ckpt key", purpose.encode(), run_id.encode())
    # Each field is preceded by its length, so that different inputs have different encodings.
    info = b"".join(len(field).to_bytes(4, "big") + field for field in fields)
    return HKDF(algorithm=SHA256(), length=KEY_BYTES, salt=None, info=info).derive(secret)
