"""What may be published, and archives of projects that anybody may have made."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import stat
import tarfile
import zipfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aenv_ray.errors import ConfigError
from aenv_ray.hub.packing import looks_secret, pack, unpack_any
from aenv_ray.project import archive as project_archive
from aenv_ray.project import project
from aenv_ray.testing.contract_bench import write_project

NPM = "//registry.npmjs.org/:_authToken="
KEY = "-----BEGIN {}PRIVATE KEY-----\nMIIEvQIBADANBg\n-----END {}PRIVATE KEY-----\n"


@pytest.fixture
def made(tmp_path: Path) -> Path:
    return write_project(tmp_path / "p", {"tools.py": "x = 1\n", "pack/run.sh": "#!/bin/sh\n"})


# --- secrets --------------------------------------------------------------------------------------

SECRET = {
    ".env": "A=1", "conf/.env.local": "A=1", "prod.env": "", "id_rsa": "x", "a/id_ed25519": "x",
    ".netrc": "machine x", "server.pem": KEY.format("", ""), "server.key": KEY.format("EC ", "EC "),
    "credentials.json": "{}", "client_secret_7.json": "{}", "b/.aws/credentials": "",
    ".npmrc": f"{NPM}npm_abc", ".ssh/config": "Host x",
    "src/oops.py": f'KEY = """\n{KEY.format("RSA ", "RSA ")}"""',
    ".pypirc": "password: pypi-" + "a" * 40,
    "notes.txt": "use AKIA" + "A1B2" * 4, "src/call.py": "T = 'ghp_" + "a" * 36 + "'",
    "google.json": '{"private_key": "-----BEGIN PRIVATE KEY-----\\nMII"}', "empty.pem": "",
    ".env.example": "AWS=AKIA" + "A1B2" * 4, "my.kubeconfig": "", "hf.txt": "hf_" + "a" * 34,
}  # fmt: skip
HARMLESS = {
    ".env.example": "API_KEY=", ".npmrc": f"{NPM}${{NPM_TOKEN}}\n",
    "ca.pem": "-----BEGIN CERTIFICATE-----\nMII", "id_rsa.pub": "ssh-rsa AAAA",
    "environment.py": "",
    "src/detect.py": 'if "-----BEGIN RSA PRIVATE KEY-----" in text:\n    pass\n',
    "src/auth.py": "_password = get()\n_auth = None\n", "env.py": "", "key.py": "",
    "conf/.npmrc": "# //x/:_authToken=abc\nregistry=https://x\n", "sk-learn.txt": "sk-learn",
}  # fmt: skip


@pytest.mark.parametrize("name", list(SECRET))
def test_what_looks_like_a_secret_is_not_published(made: Path, name: str) -> None:
    """Invariant 10: the file is named, its content is not."""
    (made / name).parent.mkdir(parents=True, exist_ok=True)
    (made / name).write_text(SECRET[name])
    loaded = project.load(made)  # a local create goes on to work
    assert loaded.archive()
    with pytest.raises(ConfigError) as raised:
        pack(loaded)
    whole = f"{raised.value.message} {raised.value.hint}"
    assert name in whole
    assert ".aenvignore" in whole
    assert "MII" not in whole
    assert "A1B2" not in whole
    assert pack(loaded, allow=[name]).data == loaded.archive()
    (made / ".aenvignore").write_text(f"/{name}\n")
    assert name.encode() not in pack(project.load(made)).data.replace(f"/{name}\n".encode(), b"")


@pytest.mark.parametrize("name", list(HARMLESS))
def test_what_only_reminds_of_a_secret_is_published(made: Path, name: str) -> None:
    (made / name).parent.mkdir(parents=True, exist_ok=True)
    (made / name).write_text(HARMLESS[name])
    assert pack(project.load(made)).data


def test_many_secrets_are_counted(made: Path) -> None:
    for number in range(8):
        (made / f"{number}.env").touch()
    with pytest.raises(ConfigError, match="and 3 more"):
        pack(project.load(made))
    assert pack(project.load(made), allow=["*.env"])


@given(content=st.binary(max_size=300))
def test_any_content_can_be_looked_at(content: bytes) -> None:
    assert looks_secret("src/a.bin", content) is None or b"PRIVATE" in content


def test_the_archive_is_named_by_what_it_is(made: Path) -> None:
    loaded = project.load(made)
    packed = pack(loaded)
    assert packed.data == loaded.archive()
    assert packed.sha256 == hashlib.sha256(packed.data).hexdigest()


# --- archives that others made --------------------------------------------------------------------


def tar_of(root: Path, prefix: str = "") -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        tar.add(root, prefix or ".")
    return buffer.getvalue()


def zip_of(root: Path, prefix: str = "") -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for path in sorted(root.rglob("*")):
            archive.write(path, prefix + path.relative_to(root).as_posix())
    return buffer.getvalue()


WAYS = {
    "ours": lambda root: project.load(root).archive(),
    "tar": tar_of,
    "tar of the directory": lambda root: tar_of(root, "demo-1.0.0"),
    "tar.gz": lambda root: gzip.compress(tar_of(root)),
    "two gzip members": lambda root: (
        gzip.compress(tar_of(root)[:700]) + gzip.compress(tar_of(root)[700:])
    ),
    "zip": zip_of,
    "zip of the directory": lambda root: zip_of(root, "demo/"),
}


@pytest.mark.parametrize("way", list(WAYS))
def test_the_same_files_are_the_same_project_however_they_came(
    tmp_path: Path, made: Path, way: str
) -> None:
    """Invariant 6: one digest, one archive."""
    (made / "src" / "pack" / "run.sh").chmod(0o755)
    (made / ".gitignore").write_text("*.log\n")
    loaded = project.load(made)
    (made / "noise.log").touch()
    (made / ".git").mkdir()
    (made / ".git" / "config").touch()
    found = unpack_any(WAYS[way](made), tmp_path / "cache")
    assert found.digest == loaded.digest
    assert found.archive() == loaded.archive()
    assert found.path == tmp_path / "cache" / loaded.digest
    assert [p.name for p in (tmp_path / "cache").iterdir()] == [loaded.digest]


def test_a_symlink_in_a_zip_is_one(tmp_path: Path, made: Path) -> None:
    def with_link(target: str) -> bytes:
        buffer = io.BytesIO(zip_of(made))
        with zipfile.ZipFile(buffer, "a") as archive:
            info = zipfile.ZipInfo("src/link.py")
            info.external_attr = (stat.S_IFLNK | 0o777) << 16
            archive.writestr(info, target)
        return buffer.getvalue()

    found = unpack_any(with_link("tools.py"), tmp_path / "cache")
    assert (found.path / "src" / "link.py").readlink() == Path("tools.py")
    with pytest.raises(ConfigError, match="escape"):
        unpack_any(with_link("../../../etc/passwd"), tmp_path / "cache")


@pytest.mark.parametrize("data", [b"", b"no archive", b"PK\x03\x04 zip?", b"\x1f\x8b gzip?",
                                  gzip.compress(b"no tar"), gzip.compress(bytes(5000))[:20],
                                  bytes(10240)], ids=len)  # fmt: skip
def test_what_is_no_archive_or_no_project_is_refused(tmp_path: Path, data: bytes) -> None:
    with pytest.raises(ConfigError, match="archive"):
        unpack_any(data, tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir()) == []


def bomb_in_zip() -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("config.json", json.dumps({"name": "bomb"}))
        archive.writestr("zeros", bytes(3_000_000))
    return buffer.getvalue()


def test_a_malformed_config_is_told_without_our_paths(tmp_path: Path, made: Path) -> None:
    (made / "config.json").write_text("{,")
    with pytest.raises(ConfigError, match="line 1") as raised:
        unpack_any(tar_of(made), tmp_path / "cache")
    assert str(tmp_path) not in raised.value.message


@pytest.mark.parametrize("data", [bomb_in_zip(), gzip.compress(bytes(30_000_000))],
                         ids=["zip", "gzip"])  # fmt: skip
def test_a_bomb_is_refused_before_it_grows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, data: bytes
) -> None:
    monkeypatch.setattr(project_archive, "MAX_ARCHIVE_BYTES", 1_000_000)
    with pytest.raises(ConfigError, match="over"):
        unpack_any(data, tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir()) == []


def test_an_archive_too_deep_to_walk_is_refused_and_leaves_nothing(tmp_path: Path) -> None:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for name in ("config.json", "/".join(["d"] * 1500)):
            info = tarfile.TarInfo(name)
            info.size = 2
            tar.addfile(info, io.BytesIO(b"{}"))
    with pytest.raises(ConfigError, match="more than 200 directories deep"):
        unpack_any(buffer.getvalue(), tmp_path / "projects")
    assert list((tmp_path / "projects").iterdir()) == []


def test_a_zip_that_lies_about_sizes_is_refused(tmp_path: Path) -> None:
    data = bomb_in_zip()
    lie = data.replace((3_000_000).to_bytes(4, "little"), (5).to_bytes(4, "little"))
    assert lie != data
    with pytest.raises(ConfigError, match="archive"):
        unpack_any(lie, tmp_path / "cache")
