"""Settings come from the environment, and what cannot be used is said by name."""

from __future__ import annotations

from pathlib import Path

import pytest

from aenv_ray.config import read_settings
from aenv_ray.errors import ConfigError

NAMES = (
    "AENV_DATA_DIR",
    "AENV_RUNTIME_DIR",
    "AENV_ENGINE",
    "AENV_ISOLATION",
    "AENV_SYSTEM_URL",
    "DUMMY_INSTANCE_IP",
    "RAY_ADDRESS",
)


@pytest.fixture(autouse=True)
def _nothing_set(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)


def test_with_nothing_set_there_are_the_documented_defaults(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("HOME", "/home/somebody")
    settings = read_settings()
    assert settings.data_dir == Path("/home/somebody/.cache/aenv")
    assert settings.runtime_dir.name.startswith("aenv-")
    assert (settings.engine, settings.isolation) == ("process", "auto")
    assert settings.system_url is settings.dummy_instance is settings.ray_address is None


def test_an_empty_variable_is_one_that_is_not_set(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = read_settings()
    for name in NAMES:
        monkeypatch.setenv(name, "")
    assert read_settings() == plain


def test_each_variable_sets_its_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in NAMES:
        monkeypatch.setenv(name, "required")
    assert read_settings().model_dump() == {
        "data_dir": Path("required"),
        "runtime_dir": Path("required"),
        "engine": "required",
        "isolation": "required",
        "system_url": "required",
        "dummy_instance": "required",
        "ray_address": "required",
    }


@pytest.mark.parametrize("value", ["auto", "required", "none"])
def test_isolation_may_be_one_of_three(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv("AENV_ISOLATION", value)
    assert read_settings().isolation == value


@pytest.mark.parametrize("value", ["yes", "AUTO", "0", " auto"])
def test_another_isolation_is_refused_by_the_variables_name(
    monkeypatch: pytest.MonkeyPatch, value: str
) -> None:
    """Never silently weaker than asked for (invariant 7)."""
    monkeypatch.setenv("AENV_ISOLATION", value)
    with pytest.raises(ConfigError, match=r"AENV_ISOLATION.*auto.*required.*none"):
        read_settings()
