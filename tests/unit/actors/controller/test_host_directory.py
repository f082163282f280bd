"""Hosts that an earlier controller started: they are used if their version is compatible."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

import aenv_ray
from aenv_ray.actors.controller.host_directory import HostDirectory
from aenv_ray.actors.ray_shell import ray_api
from aenv_ray.errors import FabricUnavailable

NAME, NODE = "aenv-host-node-0", "node"


def host_of(version: str) -> Any:
    async def ready() -> str:
        return version

    return SimpleNamespace(ready=SimpleNamespace(remote=ready), exchange=None)


@pytest.fixture
def killed(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    found: list[Any] = []
    monkeypatch.setattr(ray_api, "kill", found.append)
    return found


async def test_a_controller_checks_the_hosts_that_it_did_not_start(
    monkeypatch: pytest.MonkeyPatch, killed: list[Any]
) -> None:
    """The instances of an incompatible host go on; it gets no new ones."""
    monkeypatch.setattr(ray_api, "find_actor", lambda _: host_of("0.0.9"))
    hosts = HostDirectory()
    assert await hosts.find([NAME]) == [NAME]
    with pytest.raises(FabricUnavailable, match=r"0\.0\.9.*incompatible"):
        await hosts.shared(NAME, NODE, None)
    assert hosts.refusal(NODE) is not None
    assert NAME in hosts.actors, "its instances can still be found and released"
    assert not killed


async def test_a_compatible_host_is_used(
    monkeypatch: pytest.MonkeyPatch, killed: list[Any]
) -> None:
    host = host_of(aenv_ray.__version__)
    monkeypatch.setattr(ray_api, "find_actor", lambda _: host)
    hosts = HostDirectory()
    assert await hosts.shared(NAME, NODE, None) is host
    assert hosts.nodes == {NAME: NODE}
    assert await hosts.shared(NAME, NODE, None) is host
    assert not killed


async def test_a_host_that_is_forgotten_while_it_is_checked_is_used(
    monkeypatch: pytest.MonkeyPatch, killed: list[Any]
) -> None:
    """A request to it may fail meanwhile, for example as its node is being lost."""
    hosts = HostDirectory()

    async def ready() -> str:
        hosts.forget(NAME)
        return aenv_ray.__version__

    host = SimpleNamespace(ready=SimpleNamespace(remote=ready), exchange=None)
    monkeypatch.setattr(ray_api, "find_actor", lambda _: host)
    assert await hosts.shared(NAME, NODE, None) is host
    assert hosts.actors == {NAME: host}
    assert not killed
