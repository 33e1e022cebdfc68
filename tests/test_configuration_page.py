"""The page of settings: as written from ``Config``."""

from __future__ import annotations

from pathlib import Path

from emergency_ckpt.config.document import configuration_page

PAGE = Path(__file__).parents[1] / "docs" / "configuration.md"


def test_configuration_page_is_that_of_config() -> None:
    assert PAGE.read_text() == configuration_page()
