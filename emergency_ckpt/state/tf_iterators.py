"""``tf.data`` iterators as objects with a state: TensorFlow's own checkpoint of one, as bytes.

The bytes are opaque here. TensorFlow is never imported, because a program with such an iterator
has imported it.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any, cast

from emergency_ckpt.errors import CorruptData

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


def tf_iterator(value: object) -> TfIterator | None:
    """Return an iterator of TensorFlow as an object with a state, None for any other value."""
    tensorflow: Any = sys.modules.get("tensorflow")
    data = getattr(tensorflow, "data", None)  # None also while it is being imported
    if data is None or not isinstance(value, (data.Iterator, data.NumpyIterator)):
        return None
    return TfIterator(tensorflow, value)
