"""Creating, one or many: by name or path, with what was asked for, all or nothing."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import ray

import aenv_ray
from aenv_ray.actors.ray_shell import ray_api
from aenv_ray.cli.local.free_ports import free_port
from aenv_ray.errors import FileAccessError, SandboxStartFailed
from aenv_ray.models import ActorDensity, InstanceStatus, Lifetime
from aenv_ray.project.project import Project, load
from tests.ray.cluster import Cluster
from tests.ray.faults import PROBE


@pytest.mark.parametrize("reference", ["mini-terminal@1.0.0", "mini-terminal"])
def test_a_builtin_environment_is_created_by_name(make: Callable[..., Any], reference: str) -> None:
    """`create` takes a name with and without a version."""
    handle = make(
        reference,
    )
    assert handle.reference == "mini-terminal@1.0.0"
    assert handle.instance_id.startswith("mini-terminal-")
    result = ray.get(handle.call_tool.remote("execute_command", {"command": "echo hello"}))
    assert result.data == {"output": ["hello\n", True], "returncode": 0}
    assert not result.is_error


@pytest.mark.parametrize("form", [Path, str])
def test_a_project_is_created_by_path(make: Callable[..., Any], form: Callable[..., Any]) -> None:
    """`create` takes the path of a project, as a `Path` or as text."""
    handle = make(form(PROBE))
    assert handle.reference == "probe@1.2.0"
    assert ray.get(handle.call_tool.remote("add", {"a": 2, "b": 3})).data == 5


def test_an_edited_project_never_changes_what_runs(
    make: Callable[..., Any], project: Callable[..., Path]
) -> None:
    """Invariant 6: an instance runs the content that it was created with."""
    source = "from aenv_ray.runtime import register_tool\n@register_tool\ndef which() -> str:\n"
    old = make(project(f"{source}    return 'old'\n"))
    new = make(project(f"{source}    return 'new'\n"))
    answers = ray.get([h.call_tool.remote("which") for h in (old, new)])
    assert [a.data for a in answers] == ["old", "new"]


def test_a_repeated_create_packs_and_sends_no_archive(
    make: Callable[..., Any],
    project: Callable[..., Path],
    density: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The archive is sent only if the node does not have it."""
    marker = f"# {density}: no other test has this content\n"
    path = project(
        f"{marker}from aenv_ray.runtime import register_tool\n"
        "@register_tool\ndef which() -> str:\n    return 'here'\n"
    )
    packed: list[str] = []
    archive = Project.archive

    def counted(self: Project) -> bytes:
        packed.append(self.digest)
        return archive(self)

    monkeypatch.setattr(Project, "archive", counted)
    first = make(path, actor=density)
    assert packed == [load(path).digest]
    second = make(path, actor=density)
    assert len(packed) == 1
    answers = ray.get([h.call_tool.remote("which") for h in (first, second)])
    assert [a.data for a in answers] == ["here", "here"]


def test_info_shows_the_requested_options(make: Callable[..., Any], density: str) -> None:
    """Labels, owner, lifetime, deadline and density are those of the create; host and node real."""
    handle = make(
        actor=density, ttl="1h", idle_timeout="20m", labels={"run": "7"}, owner="ada",
        lifetime="detached",
    )  # fmt: skip
    info = ray.get(handle.info.remote())
    assert info.id == handle.instance_id
    assert info.reference == "probe@1.2.0"
    assert info.status is InstanceStatus.RUNNING
    assert info.density is ActorDensity(density)
    assert info.lifetime is Lifetime.DETACHED
    assert (info.owner, info.labels) == ("ada", {"run": "7"})
    assert info.deadline - info.created_at == pytest.approx(3600)
    assert info.idle_timeout_s == 1200
    assert info.engine == "process"
    assert info.node_id == ray_api.node_id()
    assert ray_api.find_actor(info.host) is not None
    assert (info.calls, info.generation) == (0, 0)


def test_an_instance_gets_its_variables_and_arguments(make: Callable[..., Any]) -> None:
    """Variables, arguments, labels and data source reach the code; the host's variables do not."""
    handle = make(
        environment_variables={"COLOUR": "blue"}, arguments=["--level", "3"],
        labels={"run": "7"}, datasource="set-1",
    )  # fmt: skip
    names = ["COLOUR", "AENV_INSTANCE_ID", "AENV_LABELS", "AENV_DATASOURCE", "envNAME"]
    leaks = ["RAY_ADDRESS", "RAY_TMPDIR", "RAY_JOB_ID", "AENV_RUNTIME_DIR", "AENV_DATA_DIR"]
    result = ray.get(handle.call_tool.remote("surroundings", {"names": names + leaks}))
    assert result.data["arguments"] == ["--level", "3"]
    assert [result.data["variables"][name] for name in names] == [
        "blue", handle.instance_id, "run=7", "set-1", "probe",
    ]  # fmt: skip
    assert [result.data["variables"][name] for name in leaks] == [None] * len(leaks)


READS_AT_IMPORT = """
import os, sys
from aenv_ray.runtime import register_tool
COLOUR = os.environ["COLOUR"]
OWN = os.environ.get("AENV_INSTANCE_ID")
LEVEL = int(sys.argv[1])
@register_tool
def read() -> list:
    return [COLOUR, OWN, LEVEL]
"""


def test_code_may_read_its_own_variables_when_it_is_imported(
    make: Callable[..., Any], project: Callable[..., Path]
) -> None:
    """Each instance's code sees its own variables, id and arguments, also at import."""
    path = project(READS_AT_IMPORT)
    for colour, level in (("blue", 1), ("red", 2)):
        handle = make(path, environment_variables={"COLOUR": colour}, arguments=[str(level)])
        result = ray.get(handle.call_tool.remote("read"))
        assert result.data == [colour, handle.instance_id, level]
        assert ray.get(handle.info.remote()).start_mode.startswith("bare: ")
    with pytest.raises(SandboxStartFailed, match="COLOUR"):
        make(path)
    only_id = project(
        READS_AT_IMPORT.replace('["COLOUR"]', '.get("COLOUR")').replace(
            "int(sys.argv[1])", "sys.argv[1:]"
        )
    )
    for _ in range(2):
        handle = make(only_id)
        result = ray.get(handle.call_tool.remote("read"))
        assert result.data == [None, handle.instance_id, []]


def test_two_instances_share_no_state(make: Callable[..., Any], density: str) -> None:
    """Memory and files of an instance are its own, also beside others on one host."""
    one, two = make(actor=density), make(actor="shared")
    counts = ray.get([h.call_tool.remote("count") for h in (one, one, two)])
    assert sorted(c.data for c in counts) == [1, 1, 2]
    ray.get(one.write_file.remote("mine.txt", "x"))
    with pytest.raises(FileAccessError):
        ray.get(two.read_file.remote("mine.txt"))


def test_create_many_makes_a_whole_group(cluster: Cluster, density: str) -> None:
    """`create_many` returns that many distinct working instances."""
    count = 12 if density == "shared" else 2
    before = cluster.sandboxes()
    group = aenv_ray.create_many(PROBE, count, actor=density)
    try:
        assert len({h.instance_id for h in group}) == count
        cluster.appeared(before, count)
        sums = ray.get([h.call_tool.remote("add", {"a": n}) for n, h in enumerate(group)])
        assert [s.data for s in sums] == [n + 1 for n in range(count)]
    finally:
        ray.get([h.release.remote() for h in group])


def test_create_many_is_all_or_nothing(
    cluster: Cluster, project: Callable[..., Path], density: str
) -> None:
    """If one of a group fails, none remains, and the error says so."""
    # With arguments each instance loads the code itself; only one of them gets the port.
    failing = project(
        "import socket, sys\nfrom aenv_ray.runtime import register_tool\n"
        "@register_tool\ndef fine() -> int: ...\n"
        "if sys.argv[1:]:\n"
        "    taken = socket.socket()\n"
        "    taken.bind(('127.0.0.1', int(sys.argv[1])))\n",
        network="host",
    )
    before = cluster.sandboxes()
    count = 16 if density == "shared" else 2
    said = f"{count - 1} of {count} .*in use" if density == "shared" else "in use"
    with pytest.raises(SandboxStartFailed, match=re.compile(said, re.S)):
        aenv_ray.create_many(failing, count, actor=density, arguments=[str(free_port())])
    assert cluster.sandboxes() == before
    assert [i for i in aenv_ray.list_instances() if i.reference.startswith("written")] == []


WHERE = """
import shutil, sys
import idna
from aenv_ray.runtime import register_tool
@register_tool
def where() -> list:
    return [sys.prefix, shutil.which("python"), idna.encode("ü.de").decode()]
"""


def test_a_project_with_requirements_runs_in_an_environment_of_its_own(
    make: Callable[..., Any], project: Callable[..., Path]
) -> None:
    """Its code and the commands in its sandbox use the environment built for it."""
    path = project(WHERE)
    (path / "requirements.txt").write_text("idna\n")
    handle = make(path)
    prefix, python, encoded = ray.get(handle.call_tool.remote("where")).data
    assert Path(prefix).is_relative_to(os.environ["AENV_REQUIREMENTS_CACHE"])
    assert python == f"{prefix}/bin/python"
    assert encoded == "xn--tda.de"
    done = ray.get(handle.exec.remote(["python", "-c", "import idna; print('found')"]))
    assert (done.exit_code, done.text()) == (0, "found\n")
