"""Every wait of the docker engine has a deadline."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from aenv_ray.engines.base import EndCause
from aenv_ray.engines.docker import containers as docker_containers
from aenv_ray.engines.docker import instances as docker_instances
from aenv_ray.engines.docker import networks as docker_networks
from aenv_ray.engines.docker.containers import Containers
from aenv_ray.engines.docker.files import START_PERMITS, DockerFiles
from aenv_ray.engines.docker.firewall import Bridge
from aenv_ray.engines.docker.host import DockerHost
from aenv_ray.engines.docker.instances import SIDECAR, DockerInstance, await_boot
from aenv_ray.engines.docker.link import SocketLink
from aenv_ray.engines.docker.networks import DockerNetworks
from aenv_ray.engines.node import docker_client
from aenv_ray.engines.node.docker_client import DaemonRefused, DockerClient
from aenv_ray.errors import FabricUnavailable, PolicyRefused, SandboxStartFailed
from aenv_ray.ids import HostId, InstanceId
from aenv_ray.policy import STRICT, Policy
from aenv_ray.project.config import NetworkMode


@pytest.fixture
def directory() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="ae-", dir="/tmp") as name:  # short, for sockets
        yield Path(name)


@pytest.fixture
def files(directory: Path) -> DockerFiles:
    made = DockerFiles(directory)
    made.prepare()
    return made


# --- a silent daemon ------------------------------------------------------------------


@pytest.fixture
async def silent(directory: Path) -> AsyncIterator[DockerClient]:
    """Yield a client of a daemon that accepts connections and never answers."""
    held: list[asyncio.StreamWriter] = []

    async def hold(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        held.append(writer)

    path = directory / "silent.sock"
    server = await asyncio.start_unix_server(hold, path)
    client = DockerClient(f"unix://{path}")
    yield client
    await client.close()
    for writer in held:
        writer.close()
    server.close()
    await server.wait_closed()


async def test_a_silent_daemon_is_unavailable(
    silent: DockerClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Invariant 9."""
    monkeypatch.setattr(docker_client, "REQUEST_DEADLINE_S", 0.05)
    with pytest.raises(FabricUnavailable, match="does not answer"):
        await silent.request("GET", "/info", within_s=0.05)
    with pytest.raises(FabricUnavailable, match="does not answer"):
        await silent.log("name", 50)
    with pytest.raises(FabricUnavailable, match="does not answer"):
        await anext(silent.frames("/containers/name/logs", {}))
    with pytest.raises(FabricUnavailable, match="does not answer"):
        async with silent.stream("GET", "/events", opens_in_s=0.05):
            pass


# --- removals ------------------------------------------------------------------------------------


class _Scripted(DockerClient):
    """Gives a list of answers, in order."""

    def __init__(self, *answers: Exception | None) -> None:
        super().__init__("unix:///nowhere")
        self._answers = list(answers)
        self.asked: list[str] = []

    async def request(self, method: str, path: str, **_: Any) -> Any:
        self.asked.append(f"{method} {path}")
        answer = self._answers.pop(0)
        if answer is not None:
            raise answer


def containers(client: DockerClient, files: DockerFiles) -> Containers:
    return Containers(DockerHost(HostId("host"), "scope", client, files))


BUSY = DaemonRefused(409, "removal of container is already in progress")
DELETE, WAIT = "DELETE /containers/one", "POST /containers/one/wait"


async def test_a_removal_that_somebody_else_began_and_did_not_finish_is_retried(
    files: DockerFiles,
) -> None:
    """Invariant 3: the daemon does not tell those who wait that a removal failed."""
    client = _Scripted(BUSY, FabricUnavailable("no answer"), BUSY, None, None)
    await containers(client, files).remove("one")
    assert client.asked == [DELETE, WAIT, DELETE, WAIT, DELETE]


async def test_a_removal_that_somebody_else_finishes_is_done(files: DockerFiles) -> None:
    client = _Scripted(BUSY, None, DaemonRefused(404, "no such container"))
    await containers(client, files).remove("one")
    assert client.asked == [DELETE, WAIT, DELETE]


async def test_a_removal_that_the_daemon_failed_to_do_is_retried(
    files: DockerFiles,
) -> None:
    """Its log driver still writes below the container's directory while it is deleted."""
    failed = DaemonRefused(500, "unable to remove filesystem: directory not empty")
    client = _Scripted(failed, failed, BUSY, None, None)
    await containers(client, files).remove("one")
    assert client.asked == [DELETE, DELETE, DELETE, WAIT, DELETE]


async def test_a_cancelled_creation_waits_for_the_daemons_answer(
    files: DockerFiles,
) -> None:
    """Invariant 3: otherwise the daemon could create the container after its removal."""
    asked, answers = asyncio.Event(), asyncio.Event()

    class Slow(DockerClient):
        async def request(self, *_: Any, **__: Any) -> Any:
            asked.set()
            await answers.wait()
            return {"Id": "1"}

    creating = asyncio.create_task(containers(Slow("unix:///none"), files).create("one", {}))
    await asked.wait()
    creating.cancel()
    for _ in range(5):
        await asyncio.sleep(0)
    assert not creating.done()
    answers.set()
    with pytest.raises(asyncio.CancelledError):
        await creating


async def test_a_removal_that_keeps_failing_is_an_error(
    files: DockerFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(docker_containers, "REMOVAL_S", 0.0)
    monkeypatch.setattr(docker_containers, "FAILED_REMOVAL_S", 0.0)
    with pytest.raises(FabricUnavailable, match="could not remove one: removal of container"):
        await containers(_Scripted(BUSY), files).remove("one")
    with pytest.raises(FabricUnavailable, match="could not remove one: device is busy"):
        await containers(_Scripted(DaemonRefused(500, "device is busy")), files).remove("one")
    with pytest.raises(FabricUnavailable, match="could not remove one: you must not"):
        await containers(_Scripted(DaemonRefused(403, "you must not")), files).remove("one")


# --- permits --------------------------------------------------------------------------------------


async def _hold(some: Containers, let_go: asyncio.Event) -> None:
    async with some.start_permit():
        await let_go.wait()


async def test_a_permit_is_given_back_even_if_the_wait_for_it_is_cancelled(
    files: DockerFiles,
) -> None:
    others, ours = (containers(_Scripted(), files) for _ in range(2))
    let_go = asyncio.Event()
    holding = [asyncio.create_task(_hold(others, let_go)) for _ in range(START_PERMITS)]
    await asyncio.sleep(0)
    assert files.locks.take_permit() is None
    waiting = [asyncio.create_task(_hold(ours, let_go)) for _ in range(3 * START_PERMITS)]
    await asyncio.sleep(0)
    for task in waiting[::2]:
        task.cancel()
    let_go.set()
    async with asyncio.timeout(60.0):
        await asyncio.wait([*holding, *waiting])
    assert sum(task.cancelled() for task in waiting) == len(waiting[::2])
    free = [files.locks.take_permit() for _ in range(START_PERMITS)]
    assert None not in free
    for permit in free:
        assert permit is not None
        permit.close()


async def test_permits_that_are_never_given_back_block_nobody_for_ever(
    files: DockerFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Invariant 9: a host that hangs in the middle of its starts still holds them."""
    monkeypatch.setattr(docker_containers, "PERMIT_S", 0.0)
    with contextlib.ExitStack() as held:
        for _ in range(START_PERMITS):
            permit = files.locks.take_permit()
            assert permit is not None
            held.enter_context(permit)
        async with asyncio.timeout(60.0), containers(_Scripted(), files).start_permit():
            pass


# --- networks ------------------------------------------------------------------------------------


async def test_cancelling_the_wait_for_a_network_leaves_it_removable(files: DockerFiles) -> None:
    """Invariant 11: the janitor removes only networks that no host uses."""
    bridge = Bridge("scope", ("1.2.3.4",))
    networks = DockerNetworks(DockerHost(HostId("host"), "scope", _Scripted(), files))

    async def join() -> None:
        async with networks.joined(NetworkMode.ALLOWLIST, bridge.allow, Policy()):
            pass

    reservation = files.locks.reserve_network(bridge.chain)
    assert reservation is not None
    with reservation:
        joining = asyncio.create_task(join())
        await asyncio.wait([joining], timeout=0.1)
        assert joining.cancel()
        await asyncio.wait([joining])
    again = files.locks.reserve_network(bridge.chain)
    assert again is not None
    again.close()


async def test_a_name_does_not_open_addresses_that_the_policy_closes(
    files: DockerFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Invariant 15: a publisher decides what its name resolves to."""

    async def look_up(_: str) -> tuple[str, ...]:
        return ("8.8.8.8", "10.0.0.7")

    monkeypatch.setattr(docker_networks, "_look_up", look_up)
    networks = DockerNetworks(DockerHost(HostId("host"), "scope", _Scripted(), files))
    with pytest.raises(PolicyRefused, match=r"rebound\.example requests destination 10\.0\.0\.7"):
        async with networks.joined(NetworkMode.ALLOWLIST, ("rebound.example",), STRICT):
            pass


# --- boots ---------------------------------------------------------------------------------------


async def test_the_error_for_a_boot_that_hangs_shows_the_end_of_the_log(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Invariant 9."""
    monkeypatch.setattr(docker_instances, "BOOT_DEADLINE_S", 0.05)
    instance = DockerInstance(
        InstanceId("one-1"), "one", asyncio.get_running_loop().create_future()
    )
    link = SocketLink(directory / "boot", directory / "door")
    await link.before_start("id")

    async def last_log() -> str:
        return "loading weights"

    with pytest.raises(SandboxStartFailed) as raised:
        await await_boot(instance, link, last_log, SIDECAR)
    assert raised.value.message.splitlines() == [
        "one-1 did not start: its sidecar: it was not ready after 0.05 s; the end of its log:",
        "loading weights",
    ]


async def test_a_container_that_failed_before_the_host_accepted_it_says_why(
    directory: Path,
) -> None:
    """On a busy node it has reported, closed its connection and ended by then."""
    instance = DockerInstance(
        InstanceId("one-1"), "one", asyncio.get_running_loop().create_future()
    )
    link = SocketLink(directory / "boot", directory / "door")
    await link.before_start("id")
    with socket.socket(socket.AF_UNIX) as container:
        container.connect(str(directory / "boot"))
        container.sendall(b'{"failed": "tools.py: SyntaxError"}\n')
    instance.ended.set_result(EndCause("its main process exited with code 70"))

    async def last_log() -> str:
        return ""

    with pytest.raises(SandboxStartFailed, match=r"^one-1 did not start: tools.py: SyntaxError$"):
        await await_boot(instance, link, last_log)
