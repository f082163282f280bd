"""A project's files on a node, and a node that has no place for them."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from aenv_ray.actors.host.projects import HostProjects
from aenv_ray.errors import AenvError, ConfigError, SandboxStartFailed


@pytest.mark.parametrize(
    ("place", "kind"),
    [("file/projects", ConfigError), ("/proc/no/place", SandboxStartFailed)],
)
def test_a_directory_that_cannot_be_written_is_named_with_its_way_out(
    tmp_path: Path, place: str, kind: type[AenvError]
) -> None:
    """Neither a bug of ours nor a bare `OSError`."""
    (tmp_path / "file").touch()
    projects = HostProjects(tmp_path / place, "node-0001")
    with pytest.raises(kind, match=rf"cannot write to .*{place} on node node-000: ") as raised:
        asyncio.run(projects.put("d", b""))
    assert "AENV_DATA_DIR" in str(raised.value.hint)
