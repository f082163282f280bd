"""Hostile archives and project directories, by each way in: gateway, hosts, command line."""

from __future__ import annotations

import gzip
import io
import json
import os
import re
import socket
import stat
import struct
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from pathspec import GitIgnoreSpec, RegexPattern

from aenv_ray.errors import ConfigError
from aenv_ray.hub.packing import looks_secret, unpack_any
from aenv_ray.hub.records import EnvironmentQuery, Role
from aenv_ray.hub.redis.server import RedisServer
from aenv_ray.project import files as project_files
from aenv_ray.project import project
from aenv_ray.project.files import IgnoreRules, linear
from tests.attacks.owners import push
from tests.contract.gateway.gateway_bench import a_gateway

CONFIG: Final = b'{"name": "evil", "version": "1.0.0"}'


# --- archives ------------------------------------------------------------------------------------


def member(name: str, kind: bytes = tarfile.REGTYPE, data: bytes = b"", **more: Any) -> bytes:
    """Return one member of a tar, without the end of the archive."""
    info = tarfile.TarInfo(name)
    info.type, info.size = kind, len(data)
    for key, value in more.items():
        setattr(info, key, value)
    head = info.tobuf(tarfile.PAX_FORMAT, "utf-8", "surrogateescape")
    return head + data + bytes(-len(data) % 512)


def pax(**headers: str) -> bytes:
    """Return a tar with a file that has these extended headers."""
    return member("config.json", data=CONFIG) + member("x", data=b"x", pax_headers=headers)


def zipped(name: str, mode: int = stat.S_IFREG, data: bytes = b"x", method: int = 0) -> bytes:
    """Return a zip of a project with one more file."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", method) as archive:
        archive.writestr("config.json", CONFIG)
        info = zipfile.ZipInfo(name)
        info.external_attr, info.create_system = (mode | 0o644) << 16, 3
        archive.writestr(info, data, method)
    return buffer.getvalue()


def listing(count: int) -> bytes:
    """Return a zip whose list of files names a file many times."""
    entry = zipped("x").partition(b"PK\1\2")[2].partition(b"PK\1\2")[0]
    entries = (b"PK\1\2" + entry) * count
    counts = [count & 0xFFFF] * 2
    end = struct.pack("<4s4H2LH", b"PK\5\6", 0, 0, *counts, len(entries), 64, 0)
    return b"PK\3\4" + bytes(60) + entries + end


def with_zip64() -> bytes:
    """Return a zip whose end points to another list of files."""
    data = zipped("x")
    start = data.rindex(b"PK\5\6")
    return data[:start] + struct.pack("<4sLQL", b"PK\6\7", 0, 0, 1) + data[start:]


HOSTILE: Final = {
    "fifo": member("config.json", data=CONFIG) + member("x", tarfile.FIFOTYPE),
    "character device": member("config.json", data=CONFIG) + member("x", tarfile.CHRTYPE),
    "block device": member("config.json", data=CONFIG) + member("x", tarfile.BLKTYPE),
    "hard link": member("config.json", data=CONFIG)
    + member("x", tarfile.LNKTYPE, linkname="/etc/passwd"),
    "sparse of GNU": member("config.json", data=CONFIG) + member("x", b"S"),
    "sparse of PAX": pax(**{"GNU.sparse.map": "0,1", "GNU.sparse.size": str(1 << 50)}),
    "unknown type": member("config.json", data=CONFIG) + member("x", b"Z"),
    "huge": pax(size=str(1 << 60)),
    "negative": pax(size="-512"),
    "absolute": pax(path="/etc/x"),
    "parent": pax(path="a/../../x"),
    "NUL in a name": pax(path="a\0b"),
    "long name": pax(path="a" * 300),
    "nothing": pax(path="./"),
    "below a file": pax(path="config.json/x"),
    "config is a link": member("config.json", tarfile.SYMTYPE, linkname="/etc/passwd"),
    "config is a loop": member("config.json", tarfile.SYMTYPE, linkname="config.json"),
    "config is a directory": member("config.json", tarfile.DIRTYPE),
    "deep JSON": member("config.json", data=b"[" * 200_000),
    "long number": member("config.json", data=b'{"name":' + b"1" * 10_000 + b"}"),
    "endless headers": member("x", tarfile.XHDTYPE, b"11 a=bcdef\n") * 5000,
    "bomb": gzip.compress(bytes(300 << 20), 1),
    "gzip of nothing": gzip.compress(b"") * 1000,
    "zip with a fifo": zipped("x", stat.S_IFIFO),
    "zip with a device": zipped("x", stat.S_IFBLK),
    "zip with a link": zipped("x", stat.S_IFLNK, b"/etc/passwd"),
    "zip with a parent": zipped("../x"),
    "zip of another method": zipped("x", method=zipfile.ZIP_LZMA),
    "zip with many files": listing(100_000),
    "zip with another list": with_zip64(),
    "large ignore file": member("config.json", data=CONFIG)
    + member(".gitignore", data=bytes(300_000)),
}  # fmt: skip


async def test_the_gateway_publishes_no_hostile_archive(
    tmp_path: Path, module_redis: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Invariants 7 and 13: each is refused as malformed, and nothing of it is left."""
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    monkeypatch.setenv("TMPDIR", str(scratch))
    monkeypatch.setattr("tempfile.tempdir", None)
    async with (
        a_gateway(tmp_path, redis=module_redis) as bench,
        bench.client(await bench.token(Role.PUBLISHER, "eve")) as eve,
    ):
        for name, data in HOSTILE.items():
            answer = await push(eve, data)
            assert answer.status_code == 400, (name, answer.text)
            assert answer.json()["error"]["code"] == ConfigError.code, (name, answer.text)
        assert (await bench.hub.environments(EnvironmentQuery(text="evil"))).total == 0
        assert await bench.hub.artifacts_held("eve") == (0, 0)
    assert list(scratch.iterdir()) == []


@pytest.mark.parametrize("name", [name for name in HOSTILE if "zip" not in name])
def test_a_host_unpacks_no_hostile_archive(tmp_path: Path, name: str) -> None:
    """Invariant 13: a driver of Ray sends them to hosts directly, with a digest of its choice."""
    with pytest.raises(ConfigError):
        project.unpack(HOSTILE[name], "d" * 64, tmp_path / "projects")
    assert list((tmp_path / "projects").iterdir()) == []


@pytest.mark.parametrize(
    "name", ["new\nline", "\x1b[2J\x1b]0;owned\a", "\u202egnp.py", "..\\..\\x", "-rf", "\udcff"]
)
def test_files_with_odd_names_are_packed_like_others(tmp_path: Path, name: str) -> None:
    """Invariant 6: it has the same digest everywhere, and is below the project's directory."""
    data = member("config.json", data=CONFIG) + member(name, data=b"1")
    unpacked = unpack_any(data, tmp_path)
    assert (unpacked.path / name).read_bytes() == b"1"
    assert project.load(unpacked.path).digest == unpacked.digest


# --- directories ---------------------------------------------------------------------------------


def _device(path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can make devices")
    os.mknod(path, 0o666 | stat.S_IFCHR, os.makedev(1, 5))  # /dev/zero


def _sparse(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(1 << 40)


def _socket(path: Path) -> None:
    directory = os.open(path.parent, os.O_RDONLY)  # a socket's path holds 107 bytes
    with socket.socket(socket.AF_UNIX) as sock:
        sock.bind(f"/proc/self/fd/{directory}/{path.name}")
    os.close(directory)


@pytest.mark.ordinary_user
@pytest.mark.parametrize("make", [os.mkfifo, _device, _socket])
@pytest.mark.parametrize("name", ["x", ".gitignore", "requirements.txt"])
def test_special_files_are_left_out_of_a_project(
    tmp_path: Path, make: Callable[[Path], None], name: str
) -> None:
    """Reading it would never end."""
    (tmp_path / "config.json").write_bytes(CONFIG)
    before = project.load(tmp_path)
    make(tmp_path / name)
    assert project.load(tmp_path).digest == before.digest
    assert project.load(tmp_path).archive() == before.archive()


@pytest.mark.parametrize("name", ["x", "config.json", ".gitignore", "requirements.txt"])
def test_a_sparse_file_is_too_large_for_a_project(tmp_path: Path, name: str) -> None:
    """A terabyte that takes no space on the disk is not read into memory."""
    (tmp_path / "config.json").write_bytes(CONFIG)
    _sparse(tmp_path / name)
    with pytest.raises(ConfigError, match=r"over 256 MiB|an ignore file has up to"):
        project.load(tmp_path)


def test_the_command_line_escapes_file_names(tmp_path: Path) -> None:
    """A terminal would obey it."""
    (tmp_path / "config.json").write_bytes(CONFIG)
    (tmp_path / "\x1b]0;owned\a\nfile").touch()
    os.mkfifo(tmp_path / "fifo")
    for output in ("table", "json"):
        command = ["push", "--dry-run", "--output", output, str(tmp_path)]
        done = subprocess.run(
            [sys.executable, "-m", "aenv_ray.cli.main", *command],
            capture_output=True, text=True, check=False, timeout=60,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        assert "\x1b]" not in done.stdout
        assert "\a" not in done.stdout
    assert json.loads(done.stdout)["files"] == ["\x1b]0;owned\a\nfile", "config.json"]


# --- time ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "path"),
    [
        ("*a" * 50 + "b", "a" * 250),
        ("[a-z]*" * 50 + "0", "a" * 250),
        ("x/" + "**/a/" * 50 + "b", "x/" + "a/" * 150 + "c"),
        ("/" + "*a*/**/" * 20 + "b", "aa/" * 150 + "c"),
    ],
)
def test_no_ignore_pattern_hangs_a_process(line: str, path: str) -> None:
    """Invariant 7: the match of an expression does not let other threads of a gateway run."""
    assert IgnoreRules(line).verdict(path, is_directory=False) is None


@pytest.mark.parametrize("piece", ["\n", " ", "\n ", "//a:_", "_auth\n", "password \n", "A "])
def test_the_search_for_secrets_takes_linear_time(piece: str) -> None:
    """Invariant 7, as above."""
    data = (piece * 200_000)[:262_144].encode()
    assert looks_secret("note.txt", data) is None
    assert looks_secret("note.txt", b"-----BEGIN " + data) is None


def test_patterns_have_a_limited_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Invariant 7: many simple patterns for many files."""
    monkeypatch.setattr(project_files, "MAX_RULES_CPU_S", 0.0)
    (tmp_path / "config.json").write_bytes(CONFIG)
    project.load(tmp_path)
    (tmp_path / ".gitignore").write_text("*.log\n")
    with pytest.raises(ConfigError, match="ignore files of the project take more than"):
        project.load(tmp_path)


parts = st.sampled_from(["a", "b", "*", "?", "[ab]", "/", "**", "/**/", "**/"])
segment = st.text("abc", min_size=1, max_size=4)


@given(
    pattern=st.lists(parts, min_size=1, max_size=8).map("".join),
    path=st.lists(segment, min_size=1, max_size=5).map("/".join),
    tail=st.sampled_from(["", "/"]),
)
@example("a/**/[ab]", "a/b/c/b", "")
@example("*a", "aa/a", "/")
def test_the_linear_expression_matches_the_same_entries(pattern: str, path: str, tail: str) -> None:
    """As pathspec's expression for the whole path, which tries all possibilities."""
    (found,) = GitIgnoreSpec.from_lines([pattern]).patterns
    if found.include is None:
        return
    assert isinstance(found, RegexPattern)
    assert found.regex is not None
    slow = found.regex.pattern
    whole = rf"(?:{slow})\Z" if "ps_d" in found.regex.groupindex else slow
    assert bool(re.search(whole, path + tail)) == bool(re.search(linear(slow), path + tail))
