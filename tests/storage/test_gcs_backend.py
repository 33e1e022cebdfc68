"""TensorStore's driver of buckets, chosen by the environment as for Orbax.

No server here speaks gRPC, so this shows the specs that reach TensorStore, and that it knows them.
"""

from __future__ import annotations

import pytest
import tensorstore
from orbax.checkpoint._src.path import gcs_utils

from emergency_ckpt.errors import ConfigError
from emergency_ckpt.storage.array_writes import published_database_spec
from emergency_ckpt.storage.orbax_reader import kvstore_of

VARIABLE = "TENSORSTORE_GCS_BACKEND"
PLACE = "gs://some-bucket/run/5/state"


@pytest.mark.parametrize("driver", [None, "gcs", "gcs_grpc"])
def test_driver_of_buckets_is_that_of_orbax(
    driver: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    if driver is not None:
        monkeypatch.setenv(VARIABLE, driver)
    wanted = {"driver": driver or "gcs", "bucket": "some-bucket", "path": "run/5/state/"}
    assert kvstore_of(PLACE) == wanted
    assert gcs_utils.get_kvstore_for_gcs(PLACE)["driver"] == wanted["driver"]
    assert tensorstore.KvStore.Spec(kvstore_of(PLACE)).to_json() == wanted
    database = published_database_spec(PLACE)
    assert (database["base"]["driver"], database["manifest"]) == (wanted["driver"], wanted)


def test_unknown_driver_of_buckets_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "s3")
    with pytest.raises(ConfigError, match=rf"{VARIABLE}.*'s3' is no driver of buckets"):
        kvstore_of(PLACE)
    assert kvstore_of("/some/where") == {"driver": "file", "path": "/some/where/"}
