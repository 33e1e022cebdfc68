"""Steps by the names that a person gives them on a command line."""

from __future__ import annotations

import re

from emergency_ckpt.core.restore.inventory import PersistentStep
from emergency_ckpt.errors import ConfigError, PersistentTierError, StepNotFound
from emergency_ckpt.storage.steps.inspection import FoundStep
from emergency_ckpt.tier import StepReader
from emergency_ckpt.tools.survey.places import Places
from emergency_ckpt.tools.survey.survey import Survey, SurveyedStep, take_survey
from emergency_ckpt.types import LOCAL, PERSISTENT

_NAME = re.compile(r"(?:(ram|storage):)?(newest|[0-9]{1,19})")


def find_step(name: str, places: Places) -> StepReader:
    """Open the step called ``name``: a number is taken from RAM, where it is whole there.

    ``newest`` stands for the highest whole step. StepNotFound, ConfigError, PersistentTierError.
    """
    found = _NAME.fullmatch(name)
    if found is None:
        return _open_folder(name, places)
    only, number = found[1], found[2]
    if not (places.local_dirs or places.directory):
        raise ConfigError([f"{name!r} needs --local-dir or --dir"], target="the step")
    survey = take_survey(places)
    in_ram, stored = (_whole(survey.of(tier), number) for tier in (LOCAL, PERSISTENT))
    if only == "ram" and number != "newest":
        in_ram += [each for each in survey.of(LOCAL) if _is(each, number)]  # tensors may be whole
    is_older = only is None and number == "newest" and in_ram and stored
    if in_ram and only != "storage" and not (is_older and in_ram[0].step < stored[0].step):
        return survey.open_step(in_ram[0])
    if only != "ram" and places.directory and (number != "newest" or stored):
        # Also one that is hidden, or that cannot be used: its error says more.
        return places.storage().open_step(stored[0].step if number == "newest" else int(number))
    raise StepNotFound("find", name, "no such whole step", hint=_reasons(survey, number))


def _whole(steps: list[SurveyedStep], number: str) -> list[SurveyedStep]:
    return [each for each in steps if each.state == "whole" and _is(each, number)]


def _is(each: SurveyedStep, number: str) -> bool:
    return number == "newest" or each.step == int(number)


def _open_folder(folder: str, places: Places) -> StepReader:
    """Open a folder into which Orbax wrote a step or an item. PersistentTierError."""
    digits = re.search(r"[0-9]{1,18}$", folder.rstrip("/"))
    step = PersistentStep(int(digits[0]) if digits else 0, 0, False)
    tier = Places(directory=folder, timeout_s=places.timeout_s).storage()
    reader = tier.reader(FoundStep(step, None, ""))
    reader.name = folder
    try:
        reader.arrays()
    except PersistentTierError as error:
        hint = "give a step's folder, or the one of its item"
        raise PersistentTierError("open", folder, error.problem, hint=hint) from error
    return reader


def _reasons(survey: Survey, number: str) -> str:
    """Return why the steps of that number are not whole, and the faults, for people."""
    steps = [each for each in survey.of(LOCAL) if _is(each, number)]
    lines = [f"{each.step}: {each.reason}" for each in steps]
    lines += [f"{fault.where}: {fault.problem}" for fault in survey.faults]
    return "; ".join(lines[:4]) or "'eckpt ls' lists the steps"
