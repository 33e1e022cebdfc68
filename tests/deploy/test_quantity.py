"""Sizes as Kubernetes writes them."""

from __future__ import annotations

import pytest

from emergency_ckpt.errors import ConfigError
from emergency_ckpt.tools.deploy.quantity import format_quantity, parse_quantity


@pytest.mark.parametrize(
    ("text", "size_bytes"), [("1", 1), ("200Gi", 200 << 30), ("1Ti", 1 << 40), ("3G", 3 * 10**9)]
)
def test_quantity_is_read_as_kubernetes_does(text: str, size_bytes: int) -> None:
    assert parse_quantity(text) == size_bytes
    assert parse_quantity(format_quantity(size_bytes)) == size_bytes


@pytest.mark.parametrize("text", ["", "0", "-1Gi", "1.5Gi", "1 Gi", "Gi", "1Zi", "9" * 30, "1e3"])
def test_quantity_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="is no size such as 200Gi"):
        parse_quantity(text)
