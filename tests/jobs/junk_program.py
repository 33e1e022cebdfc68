"""Looks for steps among junk in a bucket; ``test_junk_on_gcs.py`` judges."""

from __future__ import annotations

import json
import os
import sys

from fake_gcs import GcsControl
from persistent_steps import fill

from emergency_ckpt.storage import PersistentTier
from emergency_ckpt.storage.inspection import FoundStep

RUN = "gs://bucket/run"
STEPS = (10, 20)


def main(count: int) -> None:
    control = GcsControl(os.environ["STORAGE_EMULATOR_HOST"])
    control.put_object("bucket", "run/host_state/log/999999999999.json", b"{}")
    fill(RUN, STEPS)
    for number in range(100, 100 + count):
        if number % 4 == 0:
            control.put_object("bucket", f"run/{number}/notes", b"not a step")
            continue
        control.put_object("bucket", f"run/{number}/commit_success.txt", b"")
        if number % 2:
            control.put_object("bucket", f"run/host_state/{number}/marker.json", b"{")
    tier = PersistentTier(RUN)
    control.clear_requests()
    view = tier.found.view()
    listing = len(control.requests())
    unseen = [each for each in view.steps if not each.is_seen]
    looks = [each for each in tier.found.inspect_each(view, unseen) if isinstance(each, FoundStep)]
    requests = len(control.requests())
    control.clear_requests()
    tier.describe(tier.find(20))
    described = len(control.requests())
    found = {
        "listing": listing,
        "requests": requests,
        "described": described,
        "whole": [each.step for each in tier.found.counting()],
        "passed_over": len([each for each in looks if each.step.problem]),
        "left": len(control.object_names("bucket", "run/100/")),
    }
    print(json.dumps(found))


main(int(sys.argv[1]))
