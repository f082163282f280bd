"""Kubernetes quantities: every valid form is read, and every other one is refused by name."""

from __future__ import annotations

import pytest

from aenv_ray.cluster import quantities
from aenv_ray.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("500m", 0.5),
        ("2Gi", 2 * 2**30),
        ("1.5", 1.5),
        ("1.", 1.0),
        (".5", 0.5),
        ("1e3", 1000.0),
        ("-1", -1.0),
        (4, 4.0),
        ("1E", None),
        ("1.2.3", None),
        (".", None),
        ("", None),
        ("2 Gi", None),
        ("2gi", None),
        (None, None),
    ],
)
def test_a_quantity_is_read_or_refused(text: object, value: float | None) -> None:
    if value is not None:
        assert quantities.parse(text) == value
        return
    with pytest.raises(ConfigError, match="invalid quantity") as caught:
        quantities.parse(text)
    assert "500m" in (caught.value.hint or "")
