"""The options that name a gateway are added to commands, and their clients are closed."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Annotated

import pytest
import typer

from aenv_ray.cli.terminal import config_file
from aenv_ray.cli.terminal.options import GatewayOptions, OutputOption, with_gateway
from aenv_ray.client.gateway import Gateway
from aenv_ray.config import settings

clients: list[Gateway] = []


@with_gateway
def plain(gateway: GatewayOptions, output: OutputOption = None) -> None:
    clients.append(gateway.connect())
    assert not clients[-1].http._http.is_closed


@with_gateway
def with_a_timeout(
    gateway: GatewayOptions, timeout: Annotated[float, typer.Option("--timeout")] = 60.0
) -> None:
    clients.append(gateway.connect(timeout))


def test_the_options_follow_those_of_the_command() -> None:
    assert list(inspect.signature(plain).parameters) == [
        "output", "system_url", "api_key", "timeout"
    ]  # fmt: skip
    assert list(inspect.signature(with_a_timeout).parameters) == [
        "timeout", "system_url", "api_key"
    ]  # fmt: skip


def test_a_client_has_the_values_and_is_closed_when_the_command_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("AENV_DATA_DIR", str(tmp_path))
    monkeypatch.setattr(config_file, "SYSTEM_FILE", tmp_path / "none")
    settings.cache_clear()
    plain(output=None, system_url="http://gateway:1", api_key="secret", timeout=7.0)  # type: ignore[call-arg]
    (client,) = clients
    assert client.url == "http://gateway:1"
    assert client.http._http.headers["Authorization"] == "Bearer secret"
    assert client.http.policy.timeout_s == 7.0
    assert client.http._http.is_closed
    with_a_timeout(timeout=5.0, system_url="http://gateway:1", api_key=None)  # type: ignore[call-arg]
    assert clients[-1].http.policy.timeout_s == 5.0
    clients.clear()
    settings.cache_clear()
