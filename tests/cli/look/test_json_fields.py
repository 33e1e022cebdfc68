"""The documents of ``--json``, and the fields that the number ``format`` of each stands for."""

from __future__ import annotations

import re
import sys

import msgspec
import pytest
from places import ROOT

from emergency_ckpt.tools.cli.ls import ListedDirectory, ListedProcess, Listing
from emergency_ckpt.tools.cli.ls.check import CheckResult
from emergency_ckpt.tools.cli.ls.explain import RestoreExplanation
from emergency_ckpt.tools.cli.ls.step import ShownHostState, ShownStep
from emergency_ckpt.tools.cli.ls.survives import SurvivalReport
from emergency_ckpt.tools.survey.places import SurveyedStep
from emergency_ckpt.types import LOCAL, PERSISTENT

STEP = (
    "age_s held_bytes holders incarnation lives processes reason run_id saved_s size_bytes state"
    " step tier"
)
FAULT = "hint problem step where"


@pytest.mark.parametrize(
    ("document", "number", "parts"),
    [
        (
            Listing,
            2,
            {
                "Listing": "changing directory faults format processes steps time_s",
                "SurveyedStep": STEP,
                "ListedProcess": "hostname is_running known_complete path pid process_count"
                " process_index run_id slice_index steps",
                "ListedDirectory": "directory hidden run_id unfinished",
                "SurveyFault": FAULT,
            },
        ),
        (
            ShownStep,
            2,
            {
                "ShownStep": f"{STEP} faults format host_states leaves",
                "ShownLeaf": "dtype key_impl path shape shards size_bytes",
                "ShownShard": "box crc32c holders size_bytes",
                "ShownHostState": "count digest holders process size_bytes value",
                "SurveyFault": FAULT,
            },
        ),
        (
            CheckResult,
            2,
            {
                "CheckResult": "checked faults format good read_data steps",
                "CheckCounts": "bytes gone host_states manifests shards",
                "SurveyedStep": STEP,
                "SurveyFault": FAULT,
            },
        ),
        (
            SurvivalReport,
            1,
            {
                "SurvivalReport": "faults format host_states hosts incarnation losses run_id shards"
                " step stored_step",
                "Loss": "from_storage left_step missing name steps_lost what",
                "SurveyFault": FAULT,
            },
        ),
        (
            RestoreExplanation,
            2,
            {
                "RestoreExplanation": "format incarnation life outcome passed_over processes"
                " remarks requested_step run_id seconds started_s step tier",
                "PassedOver": "reason step tier",
                "RestoreRemark": "after_s name process text",
                "RestoredProcess": "after_s bytes_local bytes_peer bytes_persistent last_event"
                " outcome phases process reason received seconds slice",
            },
        ),
    ],
)
def test_fields_of_a_format_stay(
    document: type[msgspec.Struct], number: int, parts: dict[str, str]
) -> None:
    """Where a field goes or gets another meaning, its document has to take the next number."""
    _, found = msgspec.json.schema_components([document])
    assert {name: set(part["properties"]) for name, part in found.items()} == {
        name: set(fields.split()) for name, fields in parts.items()
    }
    assert number == sys.modules[document.__module__].FORMAT


@pytest.mark.parametrize(
    ("row", "part"),
    [
        ("steps[]", SurveyedStep),
        ("processes[]", ListedProcess),
        ("directory", ListedDirectory),
        ("host_states[]", ShownHostState),
    ],
)
def test_page_names_the_fields_of_a_part(row: str, part: type[msgspec.Struct]) -> None:
    page = (ROOT / "docs" / "inspection.md").read_text("utf-8")
    (meaning,) = re.findall(rf"^\| `{re.escape(row)}` \| (.*) \|$", page, re.MULTILINE)
    named = set(re.findall("`([a-z_0-9]+)`", meaning)) - {LOCAL, PERSISTENT}
    assert named == set(part.__struct_fields__)
