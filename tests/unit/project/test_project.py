"""A project on disk: its config, digest, archive, and where references lead."""

from __future__ import annotations

import io
import json
import os
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from aenv_ray.errors import ConfigError, EnvironmentNotFound
from aenv_ray.project import archive as project_archive
from aenv_ray.project import project
from aenv_ray.testing.contract_bench import write_project

FILES = {"tools.py": "x = 1\n", "pack/data.txt": "data\n", "run.sh": "#!/bin/sh\n"}


@pytest.fixture
def made(tmp_path: Path) -> Path:
    return write_project(tmp_path / "p", FILES, {"description": "d"})


def with_config(directory: Path, text: str | bytes) -> Path:
    directory.mkdir(exist_ok=True)
    data = text.encode() if isinstance(text, str) else text
    (directory / "config.json").write_bytes(data)
    return directory


# --- config.json --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{\n  "name": "x",\n  "version": "1.0.0",,\n}', ["line 3", "column 22"]),
        ("{", ["line 1"]),
        ("", ["line 1", "the file is empty"]),
        ("[]", ["list", "not an object"]),
        ("null", ["NoneType"]),
        ("{}", ["name"]),
        ('{"name": "Not Legal"}', ["Not Legal", "lower-case"]),
        ('{"name": "x", "version": "one two"}', ["one two"]),
        ('{"name": "x", "deployConfig": {"memory": "2Q"}}', ["2Q"]),
        ('{"name": "x", "deployConfig": {"cpu": "many"}}', ["many"]),
        ('{"name": "x", "deployConfig": {"ttl": "soon"}}', ["soon"]),
        ('{"name": "x", "deployConfig": {"ttl": -5}}', ["-5"]),
        ('{"name": "x", "deployConfig": {"network": "open"}}', ["deployConfig.network", "'none'"]),
        ('{"name": "x", "deployConfig": {"service": {"replicas": -1}}}', ["replicas"]),
        (
            '{"name": "x", "deployConfig": {"innerInstances": 2}}',
            ["deployConfig.innerInstances requires entries in deployConfig.environments"],
        ),
        (
            '{"name": "x", "deployConfig": {"innerInstances": 17, "environments": ["y"]}}',
            ["innerInstances", "16"],
        ),
        ('{"name": 3}', ["name"]),
        ('{"name": "x", "requiresPython": "3.12 or so"}', ["requiresPython", "'3.12 or so'"]),
        (b"\xff\xfe{}", ["cannot be read"]),
    ],
)  # fmt: skip
def test_a_malformed_config_says_where_and_what(
    tmp_path: Path, text: str | bytes, words: list[str]
) -> None:
    path = with_config(tmp_path / "p", text)
    with pytest.raises(ConfigError) as raised:
        project.load(path)
    whole = f"{raised.value.message} {raised.value.hint}"
    assert str(path / "config.json") in whole
    for word in words:
        assert word in whole


def test_an_unknown_field_of_a_container_is_refused(tmp_path: Path) -> None:
    """Nobody else reads those, and a slip of the pen would take a wall away in silence."""
    deploy = {"deployConfig": {"container": {"readonlyRoot": True, "image": "some"}}}
    (tmp_path / "config.json").write_text(json.dumps({"name": "x", "version": "1.0.0", **deploy}))
    with pytest.raises(
        ConfigError, match=r"container has unknown fields: 'readonlyRoot'$"
    ) as raised:
        project.read_config(tmp_path / "config.json")
    assert str(raised.value.hint).endswith("capAdd, sidecarCapAdd, pids, readOnlyRoot, door")


def test_fields_of_other_tools_are_kept(tmp_path: Path) -> None:
    data = {
        "name": "x", "theirs": {"a": [1]},
        "deployConfig": {"imagePrefix": "r/", "custom": True, "service": {"port": 9000, "q": 1}},
    }  # fmt: skip
    config = project.load(with_config(tmp_path / "p", json.dumps(data))).config
    kept = config.model_dump(by_alias=True)
    assert kept["theirs"] == {"a": [1]}
    assert kept["deployConfig"]["custom"] is True
    assert kept["deployConfig"]["service"]["q"] == 1
    assert config.deploy.service.port == 9000


def test_both_spellings_of_variables_are_merged(tmp_path: Path) -> None:
    deploy = {"env": {"A": "old", "B": "old"}, "environmentVariables": {"B": "new"}}
    path = with_config(tmp_path / "p", json.dumps({"name": "x", "deployConfig": deploy}))
    assert project.load(path).config.deploy.variables == {"A": "old", "B": "new"}


def test_empty_limits_are_none(tmp_path: Path) -> None:
    """Old projects write them as empty strings."""
    deploy = {"cpu": "", "memory": "", "ttl": "", "ephemeralStorage": ""}
    path = with_config(tmp_path / "p", json.dumps({"name": "x", "deployConfig": deploy}))
    config = project.load(path).config.deploy
    assert (config.cpu, config.memory, config.ttl, config.ephemeral_storage) == (None,) * 4


@pytest.mark.parametrize(
    ("fields", "limit"),
    [
        ({}, 0),
        ({"environments": ["a", "b@1.0.0"]}, 2),
        ({"environments": ["a"], "innerInstances": 5}, 5),
        ({"environments": [f"a{number}" for number in range(20)]}, 16),
    ],
)
def test_inner_instances_are_one_of_each_environment_or_as_many_as_it_says(
    tmp_path: Path, fields: dict[str, Any], limit: int
) -> None:
    path = with_config(tmp_path / "p", json.dumps({"name": "x", "deployConfig": fields}))
    assert project.load(path).config.deploy.inner_limit == limit


# --- digest (invariant 6) ---------------------------------------------------------------------


def test_the_digest_is_that_of_the_content_wherever_it_lies(tmp_path: Path, made: Path) -> None:
    """Invariant 6."""
    other = write_project(tmp_path / "deep" / "q", FILES, {"description": "d"})
    assert project.load(made).digest == project.load(other).digest
    assert project.load(made).archive() == project.load(other).archive()


def append(path: Path) -> None:
    with path.open("a") as file:
        file.write("more\n")


CHANGES: dict[str, Callable[[Path], object]] = {
    "content": lambda p: append(p / "src/tools.py"),
    "config": lambda p: (p / "config.json").write_text('{"name": "made", "version": "1.0.1"}'),
    "new file": lambda p: (p / "src/new.py").touch(),
    "removed file": lambda p: (p / "src/run.sh").unlink(),
    "renamed file": lambda p: (p / "src/run.sh").rename(p / "src/walk.sh"),
    "executable bit": lambda p: (p / "src/run.sh").chmod(0o755),
    "symlink": lambda p: (p / "src/link").symlink_to("tools.py"),
    "nested content": lambda p: append(p / "src/pack/data.txt"),
}


@pytest.mark.parametrize("change", list(CHANGES))
def test_every_change_of_content_is_another_digest(made: Path, change: str) -> None:
    """Invariant 6."""
    before = project.load(made)
    archive = before.archive()
    CHANGES[change](made)
    after = project.load(made)
    assert before.digest != after.digest
    assert after.archive() != archive


@pytest.mark.parametrize(
    "name", [".git/config", "__pycache__/x.pyc", ".venv/bin/python", "src/y.pyc", ".DS_Store"]
)
def test_what_is_no_content_changes_nothing(made: Path, name: str) -> None:
    before = project.load(made)
    archive = before.archive()
    path = made / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("noise")
    os.utime(made / "src" / "tools.py", (1, 1))
    after = project.load(made)
    assert before.digest == after.digest
    assert after.archive() == archive


def rewrite(path: Path, text: str) -> None:
    """Change a file's content and nothing else that can be seen without reading it."""
    status = path.stat()
    assert len(text) == status.st_size
    path.write_text(text)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


@pytest.mark.parametrize("change", list(CHANGES))
def test_an_edit_after_loading_is_never_sent_under_the_old_digest(made: Path, change: str) -> None:
    """Invariant 6."""
    loaded = project.load(made)
    CHANGES[change](made)
    with pytest.raises(ConfigError, match="was edited after it was loaded"):
        loaded.archive()
    again = project.load(made)
    assert again.digest != loaded.digest
    assert again.archive()


def test_an_edit_that_only_reading_shows_is_found_too(made: Path) -> None:
    """Invariant 6: two edits within one tick of the file system's clock."""
    loaded = project.load(made)
    rewrite(made / "src" / "tools.py", "x = 2\n")
    with pytest.raises(ConfigError, match="edited"):
        loaded.archive()
    again = project.load(made)
    assert again.digest != loaded.digest
    assert b"x = 2" in again.archive()


def test_an_edit_while_it_is_read_gives_the_digest_of_what_is_there(
    made: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Invariant 6: config and digest are of one content."""
    read, edits = project.read_config, [CHANGES["config"]]

    def read_then_edit(path: Path) -> Any:
        config = read(path)
        if edits:
            edits.pop()(made)
        return config

    monkeypatch.setattr(project, "read_config", read_then_edit)
    loaded = project.load(made)
    assert loaded.config.version == "1.0.1"
    assert loaded.archive() == project.load(made).archive()


def test_a_project_that_never_holds_still_is_refused(
    made: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = project.read_config

    def read_and_edit(path: Path) -> Any:
        append(made / "src" / "tools.py")
        return read(path)

    monkeypatch.setattr(project, "read_config", read_and_edit)
    with pytest.raises(ConfigError, match="keeps changing"):
        project.load(made)


# --- archive and unpacking ----------------------------------------------------------------------


def test_an_archive_unpacks_to_the_same_project(tmp_path: Path, made: Path) -> None:
    (made / "src" / "run.sh").chmod(0o700)
    (made / "src" / "link").symlink_to("tools.py")
    loaded = project.load(made)
    target = project.unpack(loaded.archive(), loaded.digest, tmp_path / "cache")
    assert target == tmp_path / "cache" / loaded.digest
    again = project.load(target)
    assert again.digest == loaded.digest
    assert (target / "src" / "link").readlink() == Path("tools.py")
    assert os.access(target / "src" / "run.sh", os.X_OK)
    assert [p.name for p in (tmp_path / "cache").iterdir()] == [loaded.digest]


def test_hard_links_are_archived_as_the_files_they_are(tmp_path: Path, made: Path) -> None:
    os.link(made / "src" / "tools.py", made / "src" / "twin.py")
    loaded = project.load(made)
    target = project.unpack(loaded.archive(), loaded.digest, tmp_path / "cache")
    assert project.load(target).digest == loaded.digest


def test_unpacking_again_returns_what_is_there(tmp_path: Path, made: Path) -> None:
    loaded = project.load(made)
    target = project.unpack(loaded.archive(), loaded.digest, tmp_path)
    assert project.unpack(b"not even read", loaded.digest, tmp_path) == target


def archive_with(*members: tarfile.TarInfo, **contents: bytes) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for member in members:
            data = contents.get(member.name, b"x")
            if member.isfile():
                member.size = len(data)
                tar.addfile(member, io.BytesIO(data))
            else:
                tar.addfile(member)
    return buffer.getvalue()


def member(name: str, kind: bytes = tarfile.REGTYPE, target: str = "") -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type, info.linkname = kind, target
    return info


@pytest.mark.parametrize(
    "members",
    [
        [member("../escaped")],
        [member("a/../../escaped")],
        [member("link", tarfile.SYMTYPE, "/etc")],
        [member("link", tarfile.SYMTYPE, "../../escaped")],
        [member("link", tarfile.LNKTYPE, "../escaped")],
        [member("device", tarfile.CHRTYPE)],
    ],
    ids=["up", "up inside", "absolute link", "link up", "hard link", "device"],
)
def test_an_archive_that_would_escape_is_refused(
    tmp_path: Path, members: list[tarfile.TarInfo]
) -> None:
    with pytest.raises(ConfigError, match="archive"):
        project.unpack(archive_with(*members), "d" * 64, tmp_path / "cache")
    assert not (tmp_path / "escaped").exists()
    assert list((tmp_path / "cache").iterdir()) == []


def test_a_damaged_archive_is_refused(tmp_path: Path, made: Path) -> None:
    whole = project.load(made).archive()
    for broken in (b"no tar at all", b"", whole[:700]):
        with pytest.raises(ConfigError, match="archive"):
            project.unpack(broken, "d" * 64, tmp_path / "cache")
        assert list((tmp_path / "cache").iterdir()) == []


def test_a_project_that_is_too_large_is_refused(
    made: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(project_archive, "MAX_ARCHIVE_BYTES", 1024)
    (made / "src" / "large").write_bytes(bytes(5000))
    with pytest.raises(ConfigError, match="over"):
        project.load(made).archive()


# --- references ---------------------------------------------------------------------------------


def test_references_lead_to_built_in_environments_and_paths(
    made: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, path = next(iter(project.builtins().items()))
    built_in = project.load(path)
    assert project.resolve(name).digest == built_in.digest
    assert project.resolve(built_in.reference).path == path.resolve()
    monkeypatch.chdir(made)
    for reference in (".", "./", str(made), made, f"../{made.name}"):
        assert project.resolve(reference).path == made


@pytest.mark.parametrize(
    ("reference", "hint"),
    [
        ("no-such-environment", "mini-terminal"), ("mini-terminal@99.0.0", "mini-terminal@"),
        ("./no-such-directory", "aenv init"),
    ],
)  # fmt: skip
def test_what_is_not_there_is_said_with_what_is(reference: str, hint: str) -> None:
    with pytest.raises(EnvironmentNotFound) as raised:
        project.resolve(reference)
    assert hint in str(raised.value.hint)


def test_a_directory_without_a_config_is_no_project(tmp_path: Path) -> None:
    with pytest.raises(EnvironmentNotFound, match=r"config\.json"):
        project.load(tmp_path)
