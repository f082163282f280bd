"""A trainer that is missing, or of another version, is named with the way to install it."""

from __future__ import annotations

import importlib
import importlib.metadata
import sys

import pytest

from aenv_ray.errors import ConfigError

TRAINERS = {
    "trl": ("trl", "trl>=1.16,<2"),
    "gymnasium": ("gymnasium", "gymnasium>=1.0,<2"),
    "stable_baselines3": ("stable-baselines3", "stable-baselines3>=2.7,<3"),
    "skyrl_gym": ("skyrl-gym", "skyrl-gym>=0.4,<1"),
    "gem": ("gem", "gem-llm>=0.1,<1"),
    "verl": ("verl", "verl>=0.9,<1"),
    "areal": ("areal", "areal>=1.0,<2"),
    "openrlhf": ("openrlhf", "openrlhf>=0.11,<1"),
    "openenv": ("openenv", "openenv-core>=0.3,<1"),
    "openenv_containers": ("openenv", "openenv-core>=0.3,<1"),
    "verifiers": ("verifiers", "verifiers>=0.4,<0.5"),
    "nemo_gym": ("nemo-gym", "nemo-gym>=0.3,<1"),
    "nemo_gym_sandbox": ("nemo-gym", "nemo-gym>=0.4,<1"),
    "camel": ("camel", "camel-ai>=0.2.90,<0.3"),
}
"""By module: our extra, and what it installs."""


@pytest.mark.parametrize("installed", [None, "99.0"])
@pytest.mark.parametrize("module", sorted(TRAINERS))
def test_the_extra_and_the_range_are_named(
    module: str, installed: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    extra, wanted = TRAINERS[module]
    version = importlib.metadata.version

    def found(name: str) -> str:
        if name != wanted.partition(">")[0]:
            return "1.0" if name in {"gymnasium", "stable-baselines3"} else version(name)
        if installed is None:
            raise importlib.metadata.PackageNotFoundError(name)
        return installed

    monkeypatch.setattr(importlib.metadata, "version", found)
    name = f"aenv_ray.integrations.{module}"
    monkeypatch.delitem(sys.modules, name, raising=False)
    if module == "stable_baselines3":  # it builds on that of Gymnasium, which is not installed here
        monkeypatch.setitem(sys.modules, "aenv_ray.integrations.gymnasium", _Gymnasium)
    with pytest.raises(ConfigError, match=wanted) as caught:
        importlib.import_module(name)
    assert caught.value.hint == f"pip install 'aenv-ray[{extra}]'"


class _Gymnasium:
    Step = ToolEnv = ToolGame = object
