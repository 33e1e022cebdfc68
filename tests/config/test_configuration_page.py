"""The page of settings: as written from ``Config``."""

from __future__ import annotations

import dataclasses

from places import ROOT
from settings_page import (
    KEYWORDS,
    configuration_page,
    keywords_module,
    meanings_of_settings,
)

from emergency_ckpt.config import Config

PAGE = ROOT / "docs" / "configuration.md"


def test_keywords_are_those_of_config() -> None:
    assert (ROOT / KEYWORDS).read_text() == keywords_module()


def test_configuration_page_has_basic_settings_first() -> None:
    basic, advanced = PAGE.read_text().split("\n## Advanced settings\n")
    assert "| `save_every` |" in basic
    assert "| `transfer_timeout_s` |" in advanced


def test_configuration_page_is_that_of_config() -> None:
    assert PAGE.read_text() == configuration_page()


def test_table_every_setting_has_a_meaning() -> None:
    meanings = meanings_of_settings()
    assert list(meanings) == [field.name for field in dataclasses.fields(Config)]
    assert all(len(text) > 10 for text in meanings.values())
