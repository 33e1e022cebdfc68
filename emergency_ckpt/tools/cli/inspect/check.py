"""``eckpt ls --check``: what is damaged, in manifests and markers, or in every byte."""

from __future__ import annotations

import argparse
from collections.abc import Iterator

import msgspec

from emergency_ckpt.core.shard_layout import state_size_bytes
from emergency_ckpt.core.wording import count_text, size_text
from emergency_ckpt.tools.cli.arguments import BAD, GOOD, places_of, print_json
from emergency_ckpt.tools.cli.output import ProgressLines, print_faults, print_line
from emergency_ckpt.tools.offline.check_places import Check, CheckCounts
from emergency_ckpt.tools.survey.places import Places, SurveyedStep, SurveyFault
from emergency_ckpt.tools.survey.survey import Survey, take_survey

FORMAT = 2


class CheckResult(msgspec.Struct, frozen=True):
    """The result, as JSON. ``steps``: as ``eckpt ls`` lists them."""

    format: int
    good: bool
    read_data: bool
    checked: CheckCounts
    steps: tuple[SurveyedStep, ...]
    faults: tuple[SurveyFault, ...]


def run(args: argparse.Namespace) -> int:
    """Check; return 1 when something is damaged, absent or could not be read."""
    places = places_of(args)
    survey = take_survey(places)
    check = Check(survey, places)
    faults = list(check.small_files())
    if args.read_data:
        faults += _data(check, survey, places)
    faults = list(dict.fromkeys(faults))
    result = CheckResult(
        format=FORMAT,
        good=not faults,
        read_data=args.read_data,
        checked=check.counts,
        steps=survey.steps,
        faults=tuple(faults),
    )
    if args.json:
        print_json(result)
    else:
        _print(result)
    return GOOD if result.good else BAD


def _data(check: Check, survey: Survey, places: Places) -> Iterator[SurveyFault]:
    stored = list(check.found.values())
    sizes = (
        state_size_bytes(stored_step.marker.leaves) for stored_step in stored if stored_step.marker
    )
    total_bytes = check.ram_bytes + sum(sizes)
    advance = ProgressLines("check", total_bytes)
    yield from check.ram_data(advance)
    if stored:
        # Imported here: Orbax, which a check of RAM does without, takes seconds.
        from emergency_ckpt.tools.offline.check_stored import check_stored  # noqa: PLC0415

        for stored_step in stored:
            yield from check_stored(stored_step, places, check.counts, advance)


def _print(result: CheckResult) -> None:
    counts = result.checked
    states = [step.state.replace("_", " ") for step in result.steps]
    by_state = ", ".join(f"{states.count(state)} {state}" for state in dict.fromkeys(states))
    print_line(f"{count_text(len(states), 'step', 'steps')}{': ' if by_state else ''}{by_state}")
    checked = [
        count_text(counts.manifests, "manifest or marker", "manifests and markers"),
        count_text(counts.host_states, "host state", "host states"),
    ]
    if result.read_data:
        shards = count_text(counts.shards, "shard", "shards")
        checked.append(f"{shards} ({size_text(counts.bytes)})")
    print_line(f"checked: {', '.join(checked)}")
    if counts.gone:
        gone = count_text(counts.gone, "slot was", "slots were")
        print_line(f"{gone} saved over meanwhile and not checked")
    if result.good:
        print("good")
    else:
        print_line(f"{count_text(len(result.faults), 'fault', 'faults')}:")
    print_faults(result.faults)
