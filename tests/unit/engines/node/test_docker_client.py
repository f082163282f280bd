"""Finding the Docker daemon."""

from __future__ import annotations

import hashlib
import json

import pytest

from aenv_ray.engines.node.docker_client import daemon_hint

_DEFAULT = "unix:///var/run/docker.sock"


def use_context(directory, name: str, host: str) -> None:
    """Write what ``docker context create`` and ``docker context use`` write."""
    (directory / "config.json").write_text(json.dumps({"currentContext": name}))
    meta = directory / "contexts" / "meta" / hashlib.sha256(name.encode()).hexdigest()
    meta.mkdir(parents=True)
    endpoints = {"docker": {"Host": host, "SkipTLSVerify": False}}
    (meta / "meta.json").write_text(
        json.dumps({"Name": name, "Metadata": {}, "Endpoints": endpoints})
    )


def test_the_hint_names_the_daemon_of_dockers_current_context(tmp_path, monkeypatch):
    monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path))
    use_context(tmp_path, "rootless", "unix:///run/user/1000/docker.sock")
    assert "DOCKER_HOST=unix:///run/user/1000/docker.sock" in daemon_hint(_DEFAULT)
    assert "start Docker" in daemon_hint("unix:///run/user/1000/docker.sock")


@pytest.mark.parametrize("config", [None, "{", json.dumps({"currentContext": "gone"})])
def test_without_a_usable_context_the_hint_is_to_start_docker(tmp_path, monkeypatch, config):
    monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path))
    if config is not None:
        (tmp_path / "config.json").write_text(config)
    assert "start Docker" in daemon_hint(_DEFAULT)
