"""The page of settings: as written from ``Config``."""

from __future__ import annotations

from places import ROOT

from emergency_ckpt.config.document import configuration_page

PAGE = ROOT / "docs" / "configuration.md"


def test_configuration_page_is_that_of_config() -> None:
    assert PAGE.read_text() == configuration_page()
