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
    assert settings.engine is None
    assert settings.isolation is None
    assert settings.system_url is None
    assert settings.runtime_dir.name == f"aenv-{os.getuid()}"
    assert len(str(settings.runtime_dir)) < 40  # a socket's path holds 107 bytes


def test_empty_means_not_set(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AENV_ENGINE", "AENV_ISOLATION", "AENV_SYSTEM_URL", "AENV_DATA_DIR"):
        monkeypatch.setenv(name, "")
    settings = read_settings()
    assert (settings.engine, settings.isolation) == (None, None)
    assert settings.system_url is None


def test_a_value_that_cannot_be_used_names_its_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AENV_ISOLATION", "maybe")
    with pytest.raises(ConfigError, match="AENV_ISOLATION"):
        read_settings()


@pytest.mark.parametrize(
    ("slots", "engines"),
    [("", ()), ("kubernetes=4,process=0,docker=4", ("kubernetes", "docker")), ("docker=0", ())],
)
def test_the_engines_of_workers_that_may_join_are_those_with_slots(
    slots: str, engines: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AENV_ENGINE_SLOTS", slots)
    assert read_settings().joining_engines == engines


def test_malformed_engine_slots_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AENV_ENGINE_SLOTS", "kubernetes")
    with pytest.raises(ConfigError, match="AENV_ENGINE_SLOTS"):
        _ = read_settings().joining_engines
