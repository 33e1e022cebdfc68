"""Fields of axlearn's config follow from the table of settings."""

from __future__ import annotations

import dataclasses
import importlib
from typing import Any

import pytest

from emergency_ckpt.config import Config, settings_table
from emergency_ckpt.errors import ConfigError

IN_AXLEARNS_FORM = {
    "run_id": "trainer_dir",
    "mesh": "",  # of the trainer's state
    "replica_axis": "replica_axis_index",
    "save_every": "save_policy",
    "local_save_every": "local_save_policy",
    "preservation_policy": "keep_last_n",
    "stall_timeout_s": "non_tensor_async_timeout_secs",
    "total_timeout_s": "async_timeout_secs",
}
SAME = [row for row in settings_table(Config) if row.name not in {*IN_AXLEARNS_FORM, "dir"}]


def test_axlearn_config_every_setting_has_a_field(axlearn_face: Any) -> None:
    fields = {f.name for f in dataclasses.fields(axlearn_face.EmergencyCheckpointer.Config)}
    wanted = {IN_AXLEARNS_FORM.get(row.name, row.name) for row in settings_table(Config)}
    assert wanted - {""} <= fields
    assert not fields & set(IN_AXLEARNS_FORM)


def test_axlearn_config_default_is_that_of_the_table(axlearn_face: Any) -> None:
    config = axlearn_face.EmergencyCheckpointer.default_config()
    differing = {
        row.name
        for row in settings_table(Config)
        if row.name not in IN_AXLEARNS_FORM and getattr(config, row.name) != row.default
    }
    own = {"dir", "local_dir", "keep_last_n"}
    assert differing == {*own, "on_preemption"}


@pytest.mark.parametrize("row", SAME, ids=lambda row: row.name)
def test_axlearn_config_wrong_value_is_named(axlearn_face: Any, row: Any) -> None:
    wrong: Any = 1.5 if row.problem(1.5) else "wrong"
    config_module = importlib.import_module("axlearn.common.config")
    policies = importlib.import_module("axlearn.common.checkpointer")
    every_step = config_module.config_for_function(policies.every_n_steps_policy).set(n=1)
    cfg = axlearn_face.EmergencyCheckpointer.default_config().set(
        name="checkpointer", dir="/persistent", trainer_dir="/t", save_policy=every_step
    )
    cfg.set(local_save_policy=every_step, replica_axis_index=0, **{row.name: wrong})
    with pytest.raises(ConfigError, match=row.name):
        cfg.instantiate(parent=None)
