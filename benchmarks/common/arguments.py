"""Argument types for flags. The error of each says what is wrong with the value."""

import argparse
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any


def positive(text: str) -> int:
    if (value := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"{value} is less than 1")
    return value


def positives(text: str) -> list[int]:
    return [positive(part) for part in text.split(",")]


def above_0(text: str) -> float:
    if not 0 < (value := float(text)) < math.inf:
        raise argparse.ArgumentTypeError(f"{text} is not above 0 and finite")
    return value


def words(text: str) -> list[str]:
    """Return the values without duplicates, in the order given."""
    return list(dict.fromkeys(text.split(",")))


def some_of(names: Collection[str]) -> Callable[[str], list[str]]:
    """Return an argument type that accepts only these words."""

    def parse(text: str) -> list[str]:
        if unknown := [word for word in words(text) if word not in names]:
            raise argparse.ArgumentTypeError(f"{unknown} not in {list(names)}")
        return words(text)

    return parse


def parse_with_quick(
    parser: argparse.ArgumentParser, arguments: Sequence[str] | None, quick: Mapping[str, Any]
) -> argparse.Namespace:
    """Return the options; with ``--quick`` other defaults apply, and flags still win over them."""
    options = parser.parse_args(arguments)
    if options.quick:
        parser.set_defaults(**quick)
        options = parser.parse_args(arguments)
    return options
