"""A node inspects the images that publishers name without trusting them, and keeps few notes."""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from aenv_ray.engines.images.credentials import Credentials
from aenv_ray.engines.images.node_images import FACTS, DockerImages
from aenv_ray.engines.node.docker_client import DaemonRefused, DockerClient
from aenv_ray.errors import SandboxStartFailed

_FACTS = {"version": [3, 12], "machine": "x86_64", "libc": "glibc", "aenvironment": False}
_MONTHS_S = 90 * 86_400.0


class FakeDaemon(DockerClient):
    """Has every image that its name does not call missing; none can be pulled."""

    def __init__(self) -> None:
        super().__init__("unix:///nowhere")
        self.created: list[dict[str, Any]] = []
        self.locks: list[list[str]] = []
        self.pulls = Path("/nowhere")

    async def request(self, method: str, path: str, *, body: Any = None, **_: Any) -> Any:
        if path.startswith("/images/"):
            reference = path.removeprefix("/images/").removesuffix("/json")
            if "missing" in reference:
                raise DaemonRefused(404, "no such image")
            return {"Id": f"sha256:{reference.encode().hex()}"}
        if path == "/containers/create":
            self.created.append(body)
        return {"StatusCode": 0} if path.endswith("/wait") else None

    async def log(self, container: str, lines: int) -> str:
        return json.dumps(_FACTS)

    @contextlib.asynccontextmanager
    async def stream(
        self, method: str, path: str, **_: Any
    ) -> AsyncIterator[AsyncIterator[dict[str, Any]]]:
        self.locks.append(sorted(os.listdir(self.pulls)))

        async def lines() -> AsyncIterator[dict[str, Any]]:
            yield {"error": "manifest unknown"}

        yield lines()


def images_of(daemon: DockerClient, directory: Path) -> DockerImages:
    labels: Mapping[str, str] = {"aenv.scope": "s"}
    return DockerImages(daemon, Credentials(directory), labels, directory)


async def test_the_programs_of_an_image_are_inspected_without_any_right(tmp_path: Path) -> None:
    """Invariant 13: an image is a publisher's code, and this runs before any instance does."""
    daemon = FakeDaemon()
    found = await images_of(daemon, tmp_path).find("acme/tool:1")
    assert found.python is not None
    (body,) = daemon.created
    host = body["HostConfig"]
    assert body["User"] == "65534:65534"
    assert body["NetworkDisabled"] is True
    assert (host["NetworkMode"], host["Mounts"]) == ("none", [])
    assert (host["CapDrop"], host["SecurityOpt"]) == (["ALL"], ["no-new-privileges"])
    assert host["Memory"] == host["MemorySwap"] == 1 << 30
    assert (host["PidsLimit"], host["ShmSize"]) == (256, 1 << 20)
    assert [limit["Name"] for limit in host["Ulimits"]] == ["fsize"]
    assert host["LogConfig"]["Config"]["max-size"] == "1m"
    assert float(body["Labels"]["aenv.deadline"]) > time.time(), "the janitor ends it"
    assert "aenv.storage-bytes" in body["Labels"]


async def test_what_is_known_about_images_is_collected(tmp_path: Path) -> None:
    """Invariant 7: publishers name any number of images, and the node keeps a note of each."""
    daemon, facts = FakeDaemon(), tmp_path / FACTS
    for name in ("old", "used"):
        await images_of(daemon, tmp_path).find(name)
    for mark in facts.glob("*.used"):
        os.utime(mark, (time.time() - _MONTHS_S,) * 2)
    await images_of(daemon, tmp_path).find("used")  # by a later host
    assert len(daemon.created) == 2, "it was inspected once"
    await images_of(daemon, tmp_path).find("new")
    notes = {bytes.fromhex(path.stem).decode() for path in facts.glob("*.json")}
    assert notes == {"used", "new"}
    assert len(list(facts.iterdir())) == 4


async def test_an_image_that_cannot_be_pulled_leaves_nothing(tmp_path: Path) -> None:
    """Invariant 7: not even the lock that lets one host of a node pull it."""
    daemon = FakeDaemon()
    daemon.pulls = tmp_path / "pulls"
    for number in range(3):
        with pytest.raises(SandboxStartFailed, match="cannot be pulled"):
            await images_of(daemon, tmp_path).find(f"missing:{number}")
    assert [len(locks) for locks in daemon.locks] == [1, 1, 1]
    assert list(daemon.pulls.iterdir()) == []
