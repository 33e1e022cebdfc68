"""The page of settings: as written from ``Config``."""

from __future__ import annotations

from places import ROOT

from emergency_ckpt.config.document import KEYWORDS, configuration_page, keywords_module

PAGE = ROOT / "docs" / "configuration.md"


def test_keywords_are_those_of_config() -> None:
    assert (ROOT / KEYWORDS).read_text() == keywords_module()


def test_configuration_page_is_that_of_config() -> None:
    assert PAGE.read_text() == configuration_page()
