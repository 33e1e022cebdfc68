"""Looks for steps among junk in a bucket; ``test_junk_on_gcs.py`` judges."""

from __future__ import annotations

import hashlib
import json
import os
import sys

from persistent_steps import fill

from emergency_ckpt.core.secret.step_signature import StepSigning
from emergency_ckpt.testing.gcs import GcsControl
from emergency_ckpt.tiers.persistent.tier import PersistentTier

RUN = "gs://bucket/run"
STEPS = (10, 20)
SIGNING = StepSigning(b"k" * 32)
FORGED = 10**9


def forge(control: GcsControl) -> None:
    """Copy the newest step to a higher number, with a marker whose plain digests are right."""
    for name in control.object_names("bucket", "run/"):
        for folder in ("run/20/", "run/host_state/20/"):
            if name.startswith(folder):
                copy = f"{folder.removesuffix('20/')}{FORGED}/{name.removeprefix(folder)}"
                control.put_object("bucket", copy, control.object_bytes("bucket", name))
    path = f"run/host_state/{FORGED}/marker.json"
    marker = json.loads(control.object_bytes("bucket", path))["marker"]
    marker["save"]["step"] = FORGED
    body = json.dumps(marker, separators=(",", ":"))
    digest = hashlib.sha256(body.encode()).hexdigest()
    file = f'{{"format":2,"digest":"{digest}","marker":{body}}}'
    control.put_object("bucket", path, file.encode())


def main(count: int) -> None:
    control = GcsControl(os.environ["STORAGE_EMULATOR_HOST"])
    fill(RUN, STEPS, signing=SIGNING)
    forge(control)
    for number in range(100, 100 + count):
        if number % 4 == 0:
            control.put_object("bucket", f"run/{number}/notes", b"not a step")
            continue
        control.put_object("bucket", f"run/{number}/commit_success.txt", b"")
        if number % 2:
            control.put_object("bucket", f"run/host_state/{number}/marker.json", b"{")
    tier = PersistentTier(RUN, signing=StepSigning(SIGNING.key, required=True))
    control.clear_requests()
    steps = tier.steps()
    requests = len(control.requests())
    control.clear_requests()
    tier.describe(20)
    found = {
        "requests": requests,
        "described": len(control.requests()),
        "whole": [each.step for each in steps if not each.problem],
        "passed_over": len(tier.found.passed_over),
        "forged": [each.problem for each in steps if each.step == FORGED],
        "named": [each.doubt for each in PersistentTier(RUN, signing=SIGNING).steps()][-1],
        "left": len(control.object_names("bucket", "run/100/")),
    }
    print(json.dumps(found))


main(int(sys.argv[1]))
