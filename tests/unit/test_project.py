"""Projects on disk: config, digest, archive, and where references lead."""

from __future__ import annotations

import io
import json
import os
import tarfile
from pathlib import Path
from typing import Any

import pytest

from aenv_ray import project
from aenv_ray.errors import ConfigError, EnvironmentNotFound


def make(root: Path, config: Any = None, files: dict[str, str] | None = None) -> Path:
    (root / "src").mkdir(parents=True)
    text = config if isinstance(config, str) else json.dumps(config or {"name": "demo"})
    (root / "config.json").write_text(text)
    for name, content in (files or {"src/tools.py": "x = 1\n"}).items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    return root


# --- config.json ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "words", "hint"),
    [
        ('{\n  "name": "demo",\n  "version" "1"\n}', "line 3, column 13", '"version" "1"'),
        ('{"name": "demo",}', "line 1, column 1", '{"name": "demo",}'),
        ("", "line 1, column 1", "the file is empty"),
        ('{"name": "demo"\n', "line 2, column 1", "ends too early"),
        ('{"a": "\u2028",\n "b" 1}', "line 2, column 6", '"b" 1}'),
    ],
)
def test_malformed_json_is_named_by_line_and_column(
    tmp_path: Path, text: str, words: str, hint: str
) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        project.load(make(tmp_path / "p", text))
    assert str(tmp_path / "p" / "config.json") in caught.value.message
    assert hint in (caught.value.hint or "")


@pytest.mark.parametrize("text", ["[]", '"demo"', "3", "null"])
def test_a_config_that_is_no_object_is_refused(tmp_path: Path, text: str) -> None:
    with pytest.raises(ConfigError, match="not an object"):
        project.load(make(tmp_path / "p", text))


@pytest.mark.parametrize(
    ("config", "field"),
    [
        ({}, "name"),
        ({"name": 3}, "name"),
        ({"name": "d", "deployConfig": {"service": {"port": 0}}}, "deployConfig.service.port"),
        ({"name": "d", "deployConfig": {"network": "moon"}}, "deployConfig.network"),
        ({"name": "d", "deployConfig": []}, "deployConfig"),
        ({"name": "d", "artifacts": [{"type": "image"}]}, "artifacts.0.content"),
    ],
)
def test_a_wrong_field_is_named_by_its_path(
    tmp_path: Path, config: dict[str, Any], field: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        project.load(make(tmp_path / "p", json.dumps(config)))
    assert f"{field}: " in caught.value.message


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"name": "No_Name"}, "'No_Name'"),
        ({"name": "d", "version": "../1"}, "version"),
        ({"name": "d", "deployConfig": {"ttl": "soon"}}, "'soon' is not a duration"),
        ({"name": "d", "deployConfig": {"memory": "lots"}}, "'lots' is not a size"),
        ({"name": "d", "deployConfig": {"cpu": "many"}}, "'many' is not a number of cores"),
    ],
)
def test_a_value_that_is_wrong_keeps_its_hint(
    tmp_path: Path, config: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        project.load(make(tmp_path / "p", config))
    assert "config.json" in caught.value.message
    assert caught.value.hint


def test_a_config_that_is_no_text_is_a_config_error(tmp_path: Path) -> None:
    root = make(tmp_path / "p")
    (root / "config.json").write_bytes(b"\xff\xfe{}")
    with pytest.raises(ConfigError, match="cannot be read"):
        project.load(root)


def test_unknown_fields_are_kept(tmp_path: Path) -> None:
    """Other tools read the same file."""
    config = {"name": "demo", "ours": 1, "deployConfig": {"theirs": {"a": [1]}}}
    loaded = project.load(make(tmp_path / "p", config)).config
    assert loaded.model_extra == {"ours": 1}
    assert loaded.deploy.model_extra == {"theirs": {"a": [1]}}


def test_the_newer_spelling_of_variables_wins(tmp_path: Path) -> None:
    deploy = {"env": {"A": "old", "B": "b"}, "environmentVariables": {"A": "new"}}
    loaded = project.load(make(tmp_path / "p", {"name": "demo", "deployConfig": deploy}))
    assert loaded.config.deploy.variables == {"A": "new", "B": "b"}


def test_empty_sizes_mean_no_limit(tmp_path: Path) -> None:
    deploy = {"cpu": "", "memory": "", "ttl": "", "ephemeralStorage": ""}
    loaded = project.load(make(tmp_path / "p", {"name": "demo", "deployConfig": deploy}))
    found = loaded.config.deploy
    assert (found.cpu, found.memory, found.ttl, found.ephemeral_storage) == (None,) * 4


# --- digest and archive ---------------------------------------------------------------------------


def test_the_digest_is_of_the_content_not_of_place_or_time(tmp_path: Path) -> None:
    one, two = make(tmp_path / "one"), make(tmp_path / "two")
    os.utime(two / "src" / "tools.py", (1, 1))
    assert project.load(one).digest == project.load(two).digest
    assert project.load(one).archive() == project.load(two).archive()


def test_what_is_no_source_changes_no_digest(tmp_path: Path) -> None:
    root = make(tmp_path / "p")
    before = project.load(root)
    for name in (".git/HEAD", "src/__pycache__/x.pyc", "src/a.pyc", ".venv/x", "venv/y"):
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("noise")
    after = project.load(root)
    assert after.digest == before.digest
    assert after.archive() == before.archive()


@pytest.mark.parametrize("change", ["edit", "same size", "add", "rename", "remove", "mode", "link"])
def test_every_change_of_the_source_changes_the_digest(tmp_path: Path, change: str) -> None:
    """Invariant 6: a version's content is what its digest says."""
    root = make(tmp_path / "p", files={"src/tools.py": "x = 1\n", "src/data.txt": "data"})
    tools, data = root / "src" / "tools.py", root / "src" / "data.txt"
    before = project.load(root).digest
    if change == "edit":
        tools.write_text("x = 22\n")
    elif change == "same size":
        tools.write_text("x = 2\n")
        os.utime(tools, ns=(5, 5))
    elif change == "add":
        (root / "src" / "more.py").write_text("")
    elif change == "rename":
        data.rename(root / "src" / "other.txt")
    elif change == "remove":
        data.unlink()
    elif change == "mode":
        data.chmod(0o755)
    else:
        data.unlink()
        data.symlink_to("data")
    assert project.load(root).digest != before


def test_two_files_cannot_pass_for_one(tmp_path: Path) -> None:
    one = make(tmp_path / "one", files={"a": "1f 1 b", "c": ""})
    two = make(tmp_path / "two", files={"a": "1", "b": "", "c": ""})
    assert project.load(one).digest != project.load(two).digest


def test_an_archive_holds_the_files_and_nobodys_name(tmp_path: Path) -> None:
    root = make(tmp_path / "p")
    (root / "src" / "run.sh").write_text("#!/bin/sh\n")
    (root / "src" / "run.sh").chmod(0o700)
    (root / "src" / "link").symlink_to("tools.py")
    with tarfile.open(fileobj=io.BytesIO(project.load(root).archive())) as tar:
        members = {m.name: m for m in tar.getmembers()}
    assert set(members) == {"config.json", "src/tools.py", "src/run.sh", "src/link"}
    assert members["src/run.sh"].mode == 0o755
    assert members["src/link"].issym()
    assert {(m.uid, m.uname, m.mtime) for m in members.values()} == {(0, "", 0)}


def test_a_project_that_is_too_large_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(project, "MAX_ARCHIVE_BYTES", 1024)
    with pytest.raises(ConfigError, match="is over"):
        project.load(make(tmp_path / "p", files={"src/big": "x" * 4096})).archive()


# --- unpack ---------------------------------------------------------------------------------------


def test_what_is_unpacked_has_the_same_digest(tmp_path: Path) -> None:
    """Invariant 6: an instance runs a copy that is the project, byte for byte."""
    root = make(tmp_path / "p")
    (root / "src" / "run.sh").write_text("#!/bin/sh\n")
    (root / "src" / "run.sh").chmod(0o755)
    (root / "src" / "link").symlink_to("tools.py")
    loaded = project.load(root)
    target = project.unpack(loaded.archive(), loaded.digest, tmp_path / "cache")
    assert target == tmp_path / "cache" / loaded.digest
    assert project.load(target).digest == loaded.digest


def test_unpacking_twice_leaves_what_is_there(tmp_path: Path) -> None:
    archive = project.load(make(tmp_path / "p")).archive()
    first = project.unpack(archive, "digest", tmp_path / "cache")
    inode = first.stat().st_ino
    assert project.unpack(b"not even read", "digest", tmp_path / "cache") == first
    assert first.stat().st_ino == inode
    assert [p.name for p in (tmp_path / "cache").iterdir()] == ["digest"]


def member(name: str, kind: bytes = tarfile.REGTYPE, linkname: str = "") -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type, info.linkname = kind, linkname
    return info


@pytest.mark.parametrize(
    "info",
    [
        member("../evil"),
        member("src/../../evil"),
        member("/etc/evil"),
        member("src/link", tarfile.SYMTYPE, "/etc/passwd"),
        member("src/link", tarfile.SYMTYPE, "../../evil"),
        member("link", tarfile.SYMTYPE, ".."),
        member("hard", tarfile.LNKTYPE, "/etc/passwd"),
        member("hard", tarfile.LNKTYPE, "config.json"),
        member("device", tarfile.CHRTYPE),
        member("block", tarfile.BLKTYPE),
        member("pipe", tarfile.FIFOTYPE),
    ],
    ids=lambda info: f"{info.name}-{info.type!r}-{info.linkname}",
)
def test_an_archive_cannot_leave_its_directory(tmp_path: Path, info: tarfile.TarInfo) -> None:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        tar.addfile(member("config.json"))
        tar.addfile(info)
    with pytest.raises(ConfigError, match="project archive"):
        project.unpack(buffer.getvalue(), "digest", tmp_path / "cache" / "deep")
    assert list((tmp_path / "cache" / "deep").iterdir()) == []
    assert not list(tmp_path.rglob("evil"))


def test_a_link_inside_the_project_is_kept(tmp_path: Path) -> None:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        tar.addfile(member("data"))
        tar.addfile(member("src/link", tarfile.SYMTYPE, "../data"))
    target = project.unpack(buffer.getvalue(), "digest", tmp_path)
    assert os.readlink(target / "src" / "link") == "../data"


def test_a_broken_archive_leaves_nothing(tmp_path: Path) -> None:
    whole = project.load(make(tmp_path / "p", files={"src/a": "a" * 20_000})).archive()
    for archive in (b"", b"no tar at all", whole[: len(whole) // 2]):
        with pytest.raises(ConfigError, match="project archive"):
            project.unpack(archive, "digest", tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir()) == []


# --- references -----------------------------------------------------------------------------------


def test_a_built_in_environment_is_found_by_name_and_by_version() -> None:
    by_name = project.resolve("mini-terminal")
    assert project.resolve(by_name.reference) == by_name
    assert "mini-terminal" in project.builtins()


def test_every_built_in_environment_bears_the_name_of_its_directory() -> None:
    for name, path in project.builtins().items():
        assert project.load(path).config.name == name


def test_an_unknown_name_is_answered_with_the_known_ones() -> None:
    with pytest.raises(EnvironmentNotFound, match="'no-such-env'") as caught:
        project.resolve("no-such-env")
    assert "mini-terminal" in (caught.value.hint or "")
    assert "./no-such-env" in (caught.value.hint or "")


def test_an_unknown_version_is_answered_with_the_one_there_is() -> None:
    with pytest.raises(EnvironmentNotFound, match=r"'99\.0\.0'") as caught:
        project.resolve("mini-terminal@99.0.0")
    assert project.resolve("mini-terminal").reference in (caught.value.hint or "")


def test_a_path_is_a_path_in_every_form(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = make(tmp_path / "demo")
    expected = project.load(root)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    for reference in (root, str(root), "./demo", "~/demo", "demo/", Path("demo")):
        assert project.resolve(reference) == expected
    monkeypatch.chdir(root)
    assert project.resolve(".") == expected


def test_a_path_that_leads_nowhere_is_not_found(tmp_path: Path) -> None:
    with pytest.raises(EnvironmentNotFound, match="no project directory") as caught:
        project.resolve(tmp_path / "nothing")
    assert "aenv init" in (caught.value.hint or "")
    (tmp_path / "empty").mkdir()
    with pytest.raises(EnvironmentNotFound, match=r"has no config\.json"):
        project.resolve(tmp_path / "empty")


@pytest.mark.parametrize("reference", ["", "Upper", "a b", "env@", "env@1@2"])
def test_a_malformed_reference_is_a_config_error(reference: str) -> None:
    with pytest.raises(ConfigError):
        project.resolve(reference)
