"""How Ray's failures become ours."""

from __future__ import annotations

import socket
import tempfile
from pathlib import Path
from typing import Any

import pytest
import ray

from aenv_ray.actors import ray_address, ray_api
from aenv_ray.errors import FabricUnavailable


@pytest.mark.parametrize(
    ("address", "words", "hint"),
    [(None, "a local Ray cannot be started", "short of"), ("auto", "Ray at auto", "RAY_ADDRESS")],
)
def test_a_ray_that_does_not_come_up_is_typed(
    monkeypatch: pytest.MonkeyPatch, address: str | None, words: str, hint: str
) -> None:
    """Ray raises a bare `Exception` when its processes take too long."""

    def init(**_: Any) -> None:
        raise Exception("The current node timed out during startup")

    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "init", init)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    with pytest.raises(FabricUnavailable, match=f"{words}.*timed out during startup") as raised:
        ray_api.ensure_ray(address)
    assert hint in str(raised.value.hint)
    assert raised.value.retryable


def test_a_named_ray_where_nothing_listens_is_given_up_and_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        ray_address.await_listener(address)
        ray_address.await_listener(f"ray://{address}")
    with pytest.raises(FabricUnavailable, match=f"no Ray listens at {address}") as raised:
        ray_address.await_listener(address, patience_s=0)
    assert "RAY_ADDRESS" in str(raised.value.hint)


@pytest.mark.parametrize("address", ["auto", "local", "nonsense", "host:name", "a:99999", ":1", ""])
def test_only_a_host_and_a_port_are_tried(address: str) -> None:
    ray_address.await_listener(address, patience_s=0)


def test_a_long_directory_for_temporary_files_does_not_stop_a_local_ray(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Its sockets lie below that directory, and their paths have a limit."""
    monkeypatch.delenv("RAY_TMPDIR", raising=False)
    monkeypatch.setattr(tempfile, "tempdir", "/tmp")
    assert ray_address.short_directory() is None
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / ("x" * 60)))
    assert ray_address.short_directory() == "/tmp/ray"
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    assert ray_address.short_directory() is None
