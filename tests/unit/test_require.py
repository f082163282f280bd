"""A missing prerequisite is a visible skip on a laptop and a failure in CI."""

from __future__ import annotations

import pytest

from tests import conftest


def test_what_is_missing_skips_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conftest, "REQUIRED", frozenset())
    with pytest.raises(pytest.skip.Exception, match="needs redis: none runs"):
        conftest.require("redis", False, "none runs")


def test_what_ci_requires_fails_instead(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conftest, "REQUIRED", frozenset({"redis"}))
    with pytest.raises(pytest.fail.Exception, match="redis is required here"):
        conftest.require("redis", False, "none runs")
    with pytest.raises(pytest.skip.Exception):
        conftest.require("docker", False, "no daemon")
