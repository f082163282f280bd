"""Archives that somebody else made: nothing leads out of the directory, whatever is in them."""

from __future__ import annotations

import hashlib
import io
import os
import tarfile
import tempfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from aenv_ray.errors import ConfigError
from aenv_ray.project import archive as project_archive
from aenv_ray.project import project
from aenv_ray.project.archive import Member, unpack, write_members
from aenv_ray.testing.contract_bench import write_project

ANY_DIGEST = "d" * 64


def link(name: str, target: str) -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type, info.linkname = tarfile.SYMTYPE, target
    return info


def file(name: str) -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.size = 1
    return info


def tar_of(*members: tarfile.TarInfo) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for member in members:
            tar.addfile(member, io.BytesIO(b"x") if member.isfile() else None)
    return buffer.getvalue()


@pytest.mark.parametrize(
    "members",
    [
        [link("a", "b"), file("a/x")],
        [link("a/b/l", "../.."), link("a/b/m", "l/.."), file("z")],
        [file("a"), file("a")],
        [file("a"), file("a/b")],
        [file("a/./b")],
        [file("a//b")],
        [file("/a")],
        [file("b"), file("a")],
        [link("a", "")],
    ],
    ids=["through a link", "link by a link", "twice", "below a file", "dot", "two slashes",
         "absolute", "not sorted", "link to nothing"],
)  # fmt: skip
def test_a_member_that_would_lead_elsewhere_is_refused(
    tmp_path: Path, members: list[tarfile.TarInfo]
) -> None:
    with pytest.raises(ConfigError, match="archive"):
        unpack(tar_of(*members), ANY_DIGEST, tmp_path / "cache")
    assert list(tmp_path.rglob("*")) == [tmp_path / "cache"]


def test_an_archive_with_other_content_than_its_digest_says_is_refused(tmp_path: Path) -> None:
    """Invariant 6: nobody can put other files in a project's place."""
    loaded = project.load(write_project(tmp_path / "p", {"tools.py": "x = 1\n"}))
    other = loaded.archive().replace(b"x = 1", b"x = 2")
    with pytest.raises(ConfigError, match="has another digest"):
        unpack(other, loaded.digest, tmp_path / "cache")
    assert not (tmp_path / "cache" / loaded.digest).exists()


def test_files_that_its_own_rules_ignore_do_not_hide_in_an_archive(tmp_path: Path) -> None:
    """Invariant 6: the digest is of all that is in an archive."""
    made = write_project(tmp_path / "p", {"tools.py": "x = 1\n"})
    (made / ".gitignore").write_text("zz/\n")
    honest = project.load(made)
    buffer = io.BytesIO(honest.archive())
    with tarfile.open(fileobj=buffer, mode="a") as tar:
        tar.addfile(file("zz/evil.py"), io.BytesIO(b"x"))
    with pytest.raises(ConfigError, match="has another digest"):
        unpack(buffer.getvalue(), honest.digest, tmp_path / "cache")


@pytest.mark.parametrize("kind", [tarfile.FIFOTYPE, tarfile.CHRTYPE, tarfile.LNKTYPE, b"S"])
def test_what_is_neither_file_nor_symlink_is_refused(tmp_path: Path, kind: bytes) -> None:
    """``S`` is a sparse file: a few bytes that say they are a terabyte."""
    info = file("a")
    info.type, info.linkname = kind, "b"
    with pytest.raises(ConfigError, match="archive"):
        unpack(tar_of(info), ANY_DIGEST, tmp_path / "cache")


def test_a_size_that_is_a_lie_allocates_nothing(tmp_path: Path) -> None:
    info = file("a")
    info.size = 1 << 50
    buffer = info.tobuf(tarfile.GNU_FORMAT) + b"x" * 512
    with pytest.raises(ConfigError, match="over 256 MiB"):
        unpack(buffer, ANY_DIGEST, tmp_path / "cache")


def test_a_negative_size_ends(tmp_path: Path) -> None:
    """Python's own reader goes round in circles."""
    info = tarfile.TarInfo("a")
    info.size = -1536
    with pytest.raises(ConfigError, match="archive"):
        unpack(info.tobuf(tarfile.GNU_FORMAT) * 4, ANY_DIGEST, tmp_path / "cache")


def test_more_files_than_a_project_has_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(project_archive, "MAX_FILES", 3)
    members = [file(f"f{number}") for number in range(4)]
    with pytest.raises(ConfigError, match="more than 3 files") as raised:
        unpack(tar_of(*members), ANY_DIGEST, tmp_path / "cache")
    assert ".aenvignore" in str(raised.value.hint)
    made = write_project(tmp_path / "p", {f"f{number}.py": "" for number in range(4)})
    with pytest.raises(ConfigError, match="more than 3 files"):
        project.load(made).archive()


names = st.lists(st.sampled_from(("a", "b", "..", ".", "", "c")), min_size=1, max_size=4)
path = names.map("/".join)
hostile = st.lists(
    st.one_of(path.map(file), st.builds(link, path, st.builds("/".join, names))), max_size=8
)


@settings(max_examples=300, suppress_health_check=[HealthCheck.too_slow])
@given(members=hostile)
def test_nothing_is_ever_written_outside(members: list[tarfile.TarInfo]) -> None:
    with tempfile.TemporaryDirectory() as directory:
        outer = Path(directory, "outer")
        inner = outer / "inner"
        inner.mkdir(parents=True)
        given = (
            Member(info.name, 0o120777 if info.issym() else 0o100644, os.fsencode(info.linkname))
            for info in members
        )
        try:
            write_members(given, inner, "archive")
        except ConfigError:
            return
        finally:
            assert list(outer.iterdir()) == [inner]
            assert list(Path(directory).iterdir()) == [outer]
        top = os.path.realpath(inner)
        for found in inner.rglob("*"):
            assert os.path.realpath(found).startswith(top)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, bytes]:
    """Return a project's digest and archive."""
    made = write_project(
        tmp_path_factory.mktemp("whole") / "p", {"tools.py": "x = 1\n", "pack/run.sh": "#\n"}
    )
    loaded = project.load(made)
    return loaded.digest, loaded.archive()


@settings(max_examples=120, suppress_health_check=[HealthCheck.too_slow])
@given(edits=st.lists(st.tuples(st.integers(0, 6000), st.binary(min_size=1, max_size=12))))
def test_a_damaged_archive_is_refused_or_is_the_same(
    whole: tuple[str, bytes], edits: list[tuple[int, bytes]]
) -> None:
    """Invariant 6, whatever bits flip: typed, and nothing of it stays."""
    digest, archive = whole
    with tempfile.TemporaryDirectory() as directory:
        data = bytearray(archive)
        for at, replacement in edits:
            data[at : at + len(replacement)] = replacement
        cache = Path(directory, "cache")
        try:
            target = unpack(bytes(data), digest, cache)
        except ConfigError:
            assert list(cache.iterdir()) == []
        else:
            assert project.load(target).digest == digest


contents = st.dictionaries(
    st.text(st.characters(codec="utf-8", exclude_characters="/\0"), min_size=1, max_size=20)
    .filter(lambda name: name not in (".", "..") and len(name.encode()) < 100)
    .map(lambda name: f"d-{name}.x"),
    st.binary(max_size=600),
    max_size=6,
)


@settings(max_examples=50, suppress_health_check=[HealthCheck.too_slow])
@given(files=contents)
def test_what_is_packed_is_unpacked(files: dict[str, bytes]) -> None:
    with tempfile.TemporaryDirectory() as directory:
        made = write_project(Path(directory, "p"), {"tools.py": ""})
        for name, content in files.items():
            (made / name).write_bytes(content)
        loaded = project.load(made)
        data = loaded.archive()
        assert hashlib.sha256(data).digest() == hashlib.sha256(loaded.archive()).digest()
        target = unpack(data, loaded.digest, Path(directory, "cache"))
        assert {name: (target / name).read_bytes() for name in files} == files
