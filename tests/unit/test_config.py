"""Settings, read from the environment."""

from __future__ import annotations

import os

import pytest

from aenv_ray.config import read_settings
from aenv_ray.errors import ConfigError


@pytest.fixture(autouse=True)
def _empty(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith(("AENV_", "RAY_", "DUMMY_")):
            monkeypatch.delenv(name)


def test_defaults_need_nothing_set() -> None:
    settings = read_settings()
    assert settings.engine == "process"
    assert settings.isolation is None
    assert settings.system_url is None
    assert settings.runtime_dir.name == f"aenv-{os.getuid()}"
    assert len(str(settings.runtime_dir)) < 40  # a socket's path holds 107 bytes


def test_empty_means_not_set(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AENV_ENGINE", "AENV_ISOLATION", "AENV_SYSTEM_URL", "AENV_DATA_DIR"):
        monkeypatch.setenv(name, "")
    settings = read_settings()
    assert (settings.engine, settings.isolation) == ("process", None)
    assert settings.system_url is None


def test_a_value_that_cannot_be_used_names_its_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AENV_ISOLATION", "maybe")
    with pytest.raises(ConfigError, match="AENV_ISOLATION"):
        read_settings()


@pytest.mark.parametrize(
    ("slots", "engine"),
    [("", "process"), ("kubernetes=0,docker=4", "docker"), ("kubernetes=0,docker=0", "process")],
)
def test_without_an_engine_the_first_with_slots_is_the_default(
    slots: str, engine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AENV_ENGINE_SLOTS", slots)
    assert read_settings().engine == engine
    monkeypatch.setenv("AENV_ENGINE", "fake")
    assert read_settings().engine == "fake"


def test_malformed_engine_slots_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AENV_ENGINE_SLOTS", "kubernetes")
    with pytest.raises(ConfigError, match="AENV_ENGINE_SLOTS"):
        read_settings()
