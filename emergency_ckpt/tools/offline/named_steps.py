"""Steps by the names that a person gives them on a command line."""

from __future__ import annotations

import re

from emergency_ckpt.errors import ConfigError, PersistentTierError, StepNotFound
from emergency_ckpt.tools.offline.ram import RamSource
from emergency_ckpt.tools.offline.step_source import StepSource
from emergency_ckpt.tools.survey.places import Places
from emergency_ckpt.tools.survey.survey import RamSave, Survey, take_survey

_NAME = re.compile(r"(?:(ram|storage):)?(newest|[0-9]{1,19})")


def find_source(name: str, places: Places) -> StepSource:
    """Open the step called ``name``: a number is taken from RAM, where it is whole there.

    ``newest`` stands for the highest whole step. StepNotFound, ConfigError, PersistentTierError.
    """
    found = _NAME.fullmatch(name)
    if found is None:
        from emergency_ckpt.tools.offline.stored_source import open_folder  # noqa: PLC0415  takes a second

        return open_folder(name, places.timeout_s)
    tier, number = found[1], found[2]
    if not (places.local_dirs or places.directory):
        raise ConfigError([f"{name!r} needs --local-dir or --dir"], target="the step")
    survey = take_survey(places)
    if tier != "storage":
        saves = [each for each in survey.ram if each.state == "whole" and _is(each, number)]
        if tier == "ram" and number != "newest":
            saves += [each for each in survey.ram if _is(each, number)]  # its tensors may be whole
        stored = [each for each in survey.stored if each.state == "whole"]
        newest = max((each.step for each in stored), default=-1)
        is_older = tier is None and number == "newest" and saves and saves[0].save.step < newest
        if saves and not is_older:
            return _ram(saves[0], survey, places)
    if tier != "ram" and places.directory:
        steps = [each.step for each in survey.stored if each.state == "whole"]
        if number != "newest" or steps:
            wanted = max(steps) if number == "newest" else int(number)
            return _stored(wanted, places)
    raise StepNotFound("find", name, "no such whole step", hint=_reasons(survey, number))


def _is(each: RamSave, number: str) -> bool:
    return number == "newest" or each.save.step == int(number)


def _ram(each: RamSave, survey: Survey, places: Places) -> RamSource:
    inventory = survey.inventory(each.save.run_id)
    return RamSource(each.save, each.copies, inventory, places.owner_uid)


def _stored(step: int, places: Places) -> StepSource:
    from emergency_ckpt.tools.offline.stored_source import open_stored  # noqa: PLC0415  takes a second

    try:
        return open_stored(places.directory, step, places.signing(), places.timeout_s)
    except PersistentTierError as error:
        if error.operation == "find" and "no such step" in error.problem:
            raise StepNotFound("find", f"step {step}", f"not in {places.directory}") from error
        raise


def _reasons(survey: Survey, number: str) -> str:
    """Return why the steps of that number are not whole, and the faults, for people."""
    lines = [f"{each.save.step}: {each.reason}" for each in survey.ram if _is(each, number)]
    lines += [f"{fault.where}: {fault.problem}" for fault in survey.faults]
    return "; ".join(lines[:4]) or "'eckpt ls' lists the steps"
