"""Why a container ended: only what cannot come from inside keeps an episode out of means."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from aenv_ray.engines.docker import janitor
from aenv_ray.engines.docker.containers import Containers
from aenv_ray.engines.docker.files import DockerFiles
from aenv_ray.engines.docker.host import DockerHost
from aenv_ray.engines.node.docker_client import DockerClient
from aenv_ray.errors import InsideCause
from aenv_ray.ids import HostId

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
    assert containers.cause(NAME, ended(code), is_own_exit=True).inside is InsideCause.EXIT


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
    found = containers.cause(NAME, ended(137), is_own_exit=True)
    assert (found.text, found.inside) == (cause, inside)


def test_failures_of_the_daemon_do_not_count(containers: Containers) -> None:
    for state in ({"Error": "no such device"}, {"Status": "removing"}):
        assert containers.cause(NAME, ended(1, **state)).inside is None
