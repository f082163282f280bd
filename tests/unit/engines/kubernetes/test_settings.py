"""Settings of pods."""

from __future__ import annotations

from pathlib import Path

import pytest

from aenv_ray.config import Settings
from aenv_ray.engines.kubernetes.settings import PodSettings, parse_pairs
from aenv_ray.errors import (
    ConfigError,
)


def test_pod_settings_come_from_settings(tmp_path: Path) -> None:
    settings = Settings(
        data_dir=tmp_path, runtime_dir=tmp_path, docker_config=tmp_path,
        kubernetes_node_selector="pool=a, disk=ssd", kubernetes_pull_secrets="x,y",
        kubernetes_life="2h", kubernetes_requests=0.5, pod_name="ray-1",
    )  # fmt: skip
    found = PodSettings.of(settings)
    assert found.node_selector == {"pool": "a", "disk": "ssd"}
    assert found.pull_secrets == ("x", "y")
    assert found.requests_share == 0.5
    assert (found.longest_life_s, found.pod_name) == (7200.0, "ray-1")
    with pytest.raises(ConfigError, match="SETTING"):
        parse_pairs("pool", "SETTING")
