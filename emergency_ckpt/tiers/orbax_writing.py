"""What of Orbax writes a state when not all processes of the job do."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

# What Orbax's default array handler keeps PRNG implementations in has no public name.
from orbax.checkpoint._src.metadata import array_metadata_store
from orbax.checkpoint._src.metadata.array_metadata import SerializedArrayMetadata
from orbax.checkpoint.future import Future


class _WritersOnly(array_metadata_store.Validator):
    """Orbax's own checks between writers; a single one has nothing to be compared with."""

    def validate_all_array_metadatas(
        self, array_metadatas: dict[int, list[SerializedArrayMetadata]]
    ) -> None:
        if len(array_metadatas) > 1:
            super().validate_all_array_metadatas(array_metadatas)


class ArrayWriter(ocp.type_handlers.ArrayHandler):
    """Orbax's own, whose writes can be cancelled. For one save.

    A single writer does not share the work with the other replicas.
    """

    def __init__(self, writers: Sequence[int]) -> None:
        super().__init__(
            primary_host=writers[0],
            use_replica_parallel=len(writers) > 1,
            array_metadata_store=array_metadata_store.Store(),
        )
        self._begun: list[Future] = []

    async def serialize(self, *args: Any, **kwargs: Any) -> Sequence[Future]:
        """As Orbax's."""
        futures = await super().serialize(*args, **kwargs)
        self._begun += futures
        return futures

    def cancel(self) -> None:
        """Nobody waits for what is being written any more. From any thread; does not block."""
        for future in self._begun:
            future.cancel()


def writing_handler(
    together: ocp.options.MultiprocessingOptions, arrays: ArrayWriter, *, at_once_bytes: int
) -> ocp.PyTreeCheckpointHandler:
    """Orbax's own handler; ``at_once_bytes``: how much may be on its way to storage at once."""
    scalars, numpys = ocp.type_handlers.ScalarHandler(), ocp.type_handlers.NumpyHandler()
    registry = ocp.type_handlers.create_type_handler_registry(
        (int, scalars), (float, scalars), (np.ndarray, numpys), (jax.Array, arrays)
    )
    return ocp.PyTreeCheckpointHandler(
        save_concurrent_gb=-(-at_once_bytes // 10**9) + 1,
        multiprocessing_options=together,
        type_handler_registry=registry,
        array_metadata_validator=_WritersOnly(),
    )
