"""How Ray's failures become ours."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
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


def test_a_full_disk_is_named_as_what_a_local_ray_wants(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_TMPDIR", "/proc/self")  # a filesystem without room
    assert ray_address.way_out().startswith("/proc/self has 0 KiB of room left: ")
    monkeypatch.setenv("RAY_TMPDIR", "/no/such/place")
    assert ray_address.way_out().endswith("/no/such/place/ray/session_latest/logs")


@pytest.mark.parametrize("given", [None, "of-the-user"])
@pytest.mark.parametrize("home", ["/proc/no-home", "writable"])
def test_a_user_who_cannot_keep_a_token_carries_one(
    tmp_path: Path, home: str, given: str | None
) -> None:
    """Ray itself does not start then; with a home it makes one there, which others find."""
    kept = {name: text for name, text in os.environ.items() if not name.startswith("RAY_")}
    kept["HOME"] = str(tmp_path) if home == "writable" else home
    kept |= {} if given is None else {"RAY_AUTH_TOKEN": given}
    code = (
        "import os; from aenv_ray.actors.ray_token import carry_token; "
        "carry_token(); print(os.environ.get('RAY_AUTH_TOKEN', ''))"
    )  # in a process of its own: Ray remembers a token that it has found
    done = subprocess.run(
        [sys.executable, "-c", code], env=kept, capture_output=True, text=True, check=True
    )
    carried = done.stdout.strip()
    assert carried == given if given is not None else bool(carried) == (home != "writable")


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
