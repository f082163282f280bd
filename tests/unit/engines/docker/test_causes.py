"""Why a container ended: only what cannot come from inside keeps an episode out of means."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from aenv_ray.engines.base import EndCause
from aenv_ray.engines.docker import instances as docker_instances
from aenv_ray.engines.docker import janitor
from aenv_ray.engines.docker.containers import Containers
from aenv_ray.engines.docker.files import DockerFiles
from aenv_ray.engines.docker.host import DockerHost
from aenv_ray.engines.docker.names import sidecar_name
from aenv_ray.engines.node.docker_client import DaemonRefused, DockerClient
from aenv_ray.errors import FabricUnavailable, InsideCause
from aenv_ray.ids import HostId, InstanceId

NAME = "aenv-x"


@pytest.fixture
def files(tmp_path: Path) -> DockerFiles:
    files = DockerFiles(tmp_path)
    files.prepare()
    return files


@pytest.fixture
def containers(files: DockerFiles) -> Containers:
    return Containers(DockerHost(HostId("h"), "s", DockerClient("unix:///d"), files))


def ended(code: int, *, memory: int = 0, **state: Any) -> dict[str, Any]:
    return {
        "State": {"Status": "exited", "ExitCode": code, **state},
        "HostConfig": {"Memory": memory},
    }


@pytest.mark.parametrize("code", [0, 1, 137, 143, 255])
def test_an_end_that_was_seen_is_an_exit_whatever_its_code(
    containers: Containers, code: int
) -> None:
    """Invariant 14: a process chooses its code, such as that of a killed one."""
    assert containers.cause(NAME, ended(code), is_seen=True).inside is InsideCause.EXIT


@pytest.mark.parametrize(
    ("code", "inside"),
    [(0, InsideCause.EXIT), (1, InsideCause.EXIT), (137, None), (143, None), (255, None)],
)
def test_an_end_that_was_not_seen_counts_if_nothing_outside_can_have_caused_it(
    containers: Containers, code: int, inside: InsideCause | None
) -> None:
    assert containers.cause(NAME, ended(code)).inside is inside


@pytest.mark.parametrize(("limit", "inside"), [(64 << 20, InsideCause.MEMORY), (0, None)])
def test_its_own_limit_of_memory_counts_and_that_of_the_node_does_not(
    containers: Containers, limit: int, inside: InsideCause | None
) -> None:
    """Invariant 14: an agent could use memory up to void an episode."""
    later = containers.cause(NAME, ended(137, memory=limit, OOMKilled=True))
    reported = containers.cause(NAME, ended(137, memory=limit), {NAME})
    assert (later.inside, reported.inside) == (inside, inside)


def test_a_kill_is_no_lack_of_memory_because_a_process_lacked_some_before(
    containers: Containers,
) -> None:
    """Invariant 2: the daemon remembers each process that the kernel killed, for ever."""
    before = {"memory": 64 << 20, "OOMKilled": True}
    assert containers.cause(NAME, ended(137, **before), may_be_killed=True).inside is None
    assert containers.cause(NAME, ended(143, **before), {NAME}).inside is None
    for code in (0, 1):
        own = containers.cause(NAME, ended(code, **before), {NAME}, is_seen=True)
        assert own.inside is InsideCause.EXIT


@pytest.mark.parametrize(("code", "inside"), [(137, None), (143, InsideCause.EXIT)])
def test_only_the_exit_code_of_the_kernels_kills_is_in_doubt_on_a_node_without_memory(
    containers: Containers, code: int, inside: InsideCause | None
) -> None:
    """Invariants 2 and 14."""
    found = containers.cause(NAME, ended(code), is_seen=True, may_lack_memory=True)
    assert found.inside is inside


@pytest.mark.parametrize(
    ("cause", "inside"),
    [
        (janitor.TTL_PASSED, None),
        (janitor.HOST_GONE, None),
        ("it wrote 90 MiB to its image's directories", InsideCause.DISK),
    ],
)
def test_what_the_janitor_ended_counts_if_it_wrote_too_much(
    containers: Containers, files: DockerFiles, cause: str, inside: InsideCause | None
) -> None:
    files.record_cause(NAME, cause)
    found = containers.cause(NAME, ended(137), is_seen=True)
    assert (found.text, found.inside) == (cause, inside)


def test_failures_of_the_daemon_do_not_count(containers: Containers) -> None:
    for state in ({"Error": "no such device"}, {"Status": "removing"}):
        assert containers.cause(NAME, ended(1, **state)).inside is None


# --- what is known when it ended -----------------------------------------------------------------


class FakeContainers(Containers):
    """Containers that all ended in the same way."""

    state: dict[str, Any]
    log_error: Exception | None = None

    async def details(self, name: str) -> dict[str, Any]:
        return self.state

    async def log(self, name: str) -> str:
        if self.log_error:
            raise self.log_error
        return ""

    async def remove_all(self, name: str, *, has_sidecar: bool) -> None:
        pass


@pytest.fixture
def fake(files: DockerFiles) -> FakeContainers:
    return FakeContainers(DockerHost(HostId("h"), "s", DockerClient("unix:///d"), files))


class Node:
    """How many processes the kernel has killed for lack of memory."""

    kills = 7


@pytest.fixture
def node(monkeypatch: pytest.MonkeyPatch) -> Node:
    made = Node()
    monkeypatch.setattr(docker_instances, "node_oom_kills", lambda: made.kills)
    return made


async def end_of(fake: FakeContainers, *events: str, node: Node | None = None) -> EndCause:
    """Return the cause of an end after events, each for the main container or ``sidecar``."""
    table = docker_instances.DockerInstances(fake)
    instance = table.track(InstanceId("x-1"), NAME)
    instance.ids = {NAME: "1", sidecar_name(NAME): "2"}
    for event in (*events, "die"):
        action, _, of = event.partition(" of ")
        if action == "kernel":
            assert node is not None
            node.kills += 1
        elif action == "time":
            for _ in range(10):
                table.note_oom_kills()
        else:
            attributes = {"aenv.instance": "x-1"}
            actor = {"ID": "2" if of else "1", "Attributes": attributes}
            table.on_event({"Action": action, "Actor": actor})
    cause = await instance.ended
    await table.settle()
    return cause


async def test_a_kill_from_outside_is_one_though_a_child_ran_out_of_memory(
    fake: FakeContainers, node: Node
) -> None:
    """Invariant 2."""
    fake.state = ended(137, memory=64 << 20, OOMKilled=True)
    assert (await end_of(fake, "oom", "kill", node=node)).inside is None
    assert (await end_of(fake, "oom", node=node)).inside is InsideCause.MEMORY


@pytest.mark.parametrize(
    ("events", "inside"),
    [
        (["kernel"], None),
        (["kernel", "time"], InsideCause.EXIT),
        (["kernel", "oom of sidecar"], InsideCause.EXIT),
        ([], InsideCause.EXIT),
    ],
)
async def test_an_agent_cannot_make_its_exit_look_like_a_lack_of_memory_of_the_node(
    fake: FakeContainers, node: Node, events: list[str], inside: InsideCause | None
) -> None:
    """Invariant 14: by an earlier kill, or one of its own."""
    fake.state = ended(137, memory=64 << 20)
    assert (await end_of(fake, *events, node=node)).inside is inside


@pytest.mark.parametrize("error", [DaemonRefused(500, "no"), FabricUnavailable("no")])
async def test_an_exit_counts_though_its_log_cannot_be_read(
    fake: FakeContainers, node: Node, error: Exception
) -> None:
    """Invariant 14."""
    fake.state, fake.log_error = ended(3), error
    assert (await end_of(fake)).inside is InsideCause.EXIT
