"""The scripts behind ./quickstart, ./test and .ci/run: bootstrap and supervisor."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import subprocess
import sys
import urllib.request
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]
SUPERVISE = [sys.executable, "-I", str(ROOT / "scripts" / "supervise.py"), "--deadline", "20"]


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / "scripts" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


bootstrap = load("bootstrap")
package_index = load("package_index")
precompile = load("precompile")


def test_uv_is_what_the_project_itself_requires():
    assert bootstrap.requirement_of_uv(ROOT).startswith("uv>=")


def test_the_newest_wheel_of_pip_that_this_python_runs_is_taken(tmp_path):
    page = tmp_path / "pip"
    page.mkdir()
    digest = hashlib.sha256(b"x").hexdigest()
    rows = [
        ("pip-9.0-py3-none-any.whl", ""),
        ("pip-25.1-py3-none-any.whl", 'data-requires-python="&gt;=3.9"'),
        ("pip-25.3-py3-none-any.whl", "data-yanked"),
        ("pip-26.0rc1-py3-none-any.whl", ""),
        ("pip-99.0-py3-none-any.whl", 'data-requires-python="&gt;=3.99"'),
        ("pip-25.2.tar.gz", ""),
    ]
    links = [f'<a href="../files/{name}#sha256={digest}" {more}>{name}</a>' for name, more in rows]
    links.append('<a href="pip-98.0-py3-none-any.whl">without a checksum</a>')
    (page / "index.html").write_text("\n".join(links))
    opener = urllib.request.build_opener()
    url, found = package_index.newest_wheel(opener, f"{page.as_uri()}/")
    assert url == f"{tmp_path.as_uri()}/files/pip-25.1-py3-none-any.whl"
    assert found == digest


def test_a_password_in_an_index_address_is_not_shown():
    assert (
        package_index.without_secret("https://me:pw@a.example/simple") == "https://a.example/simple"
    )


def test_an_environment_counts_as_current_only_for_its_place_content_and_groups(tmp_path):
    venv = tmp_path / ".venv"
    (venv / "bin").mkdir(parents=True)
    (venv / "bin" / "python").touch()
    assert not bootstrap.is_current(venv, "a", [])
    bootstrap.note(venv, tmp_path, "a", ["dev"])
    assert bootstrap.is_current(venv, "a", [])
    assert bootstrap.is_current(venv, "a", ["dev"])
    assert not bootstrap.is_current(venv, "a", ["docs"])
    assert not bootstrap.is_current(venv, "b", [])
    (venv / "bin" / "python").unlink()
    assert not bootstrap.is_current(venv, "a", [])


def test_an_environment_of_another_python_than_the_one_asked_for_is_refused_and_kept(
    tmp_path, monkeypatch
):
    venv = tmp_path / ".venv"
    (venv / "bin").mkdir(parents=True)
    (venv / "bin" / "python").symlink_to("/elsewhere/python3")
    assert bootstrap.is_of_asked_python(venv)
    monkeypatch.setenv("AENV_PYTHON", "python3")
    assert not bootstrap.is_of_asked_python(venv)
    (venv / "bin" / "python").unlink()
    (venv / "bin" / "python").symlink_to(bootstrap.PYTHON)
    bootstrap.note(venv, tmp_path, "a", ["dev"])
    assert bootstrap.is_current(venv, "a", ["dev"])
    monkeypatch.setattr(bootstrap, "PYTHON", "/elsewhere/python3")
    assert not bootstrap.is_current(venv, "a", ["dev"])
    monkeypatch.setattr(bootstrap, "works", lambda venv: True)
    with pytest.raises(bootstrap.Failure, match="does not use AENV_PYTHON=python3") as raised:
        bootstrap.build(tmp_path, venv, "a", ["dev"])
    assert "remove it" in raised.value.hint
    assert (venv / "bin" / "python").exists()


def test_an_environment_below_a_name_that_is_not_ascii_starts_in_every_locale(tmp_path):
    root = tmp_path / "cloné dir"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", root / ".venv"], check=True)
    (packages,) = root.glob(".venv/lib/python*/site-packages")
    (packages / "project.pth").write_text(f"{root}", encoding="utf-8")  # written as installers do
    other = packages / "other.pth"
    other.write_text("import sys\n", encoding="ascii")
    bootstrap.point_in_ascii(root / ".venv", root)
    done = subprocess.run(
        [root / ".venv/bin/python", "-c", "import sys; print(ascii(sys.path))"],
        env={"LC_ALL": "C"}, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert ascii(str(root)) in done.stdout
    assert other.read_text() == "import sys\n"


def test_root_installs_what_its_sandboxes_can_read_whatever_the_umask(monkeypatch, tmp_path):
    masks = []
    monkeypatch.setattr(bootstrap.os, "geteuid", lambda: 0)
    monkeypatch.setattr(bootstrap, "works", lambda venv: False)
    monkeypatch.setattr(bootstrap, "clear", lambda venv: masks.append(os.umask(0o077)))
    monkeypatch.setattr(bootstrap, "group_requirements", lambda root, groups: [])
    monkeypatch.setattr(bootstrap, "install_with_uv", lambda *_: "")
    monkeypatch.setattr(bootstrap, "finish", lambda *_: None)
    before = os.umask(0o077)
    try:
        bootstrap.build(tmp_path, tmp_path / ".venv", "", [])
    finally:
        os.umask(before)
    assert masks == [0o022]


def test_a_directory_that_is_no_environment_is_never_removed(tmp_path):
    (tmp_path / ".venv").mkdir()
    (tmp_path / ".venv" / "thesis.tex").touch()
    with pytest.raises(bootstrap.Failure, match="in the way"):
        bootstrap.clear(tmp_path / ".venv")
    assert (tmp_path / ".venv" / "thesis.tex").exists()


def test_the_groups_of_pyproject_are_read():
    requirements = bootstrap.group_requirements(ROOT, ["dev"])
    assert any(r.startswith("pytest>") for r in requirements)


def started(path: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """Let the bootstrap choose a Python from the programs of a directory."""
    return subprocess.run(
        ["/bin/sh", "-c", '. "$1/scripts/bootstrap.sh"; bootstrap /nowhere', "sh", str(ROOT)],
        env={"PATH": str(path), **variables}, capture_output=True, text=True, timeout=30,
        check=False,
    )  # fmt: skip


@pytest.fixture
def old(tmp_path: Path) -> Path:
    python = tmp_path / "python3"
    python.write_text('#!/bin/sh\n[ "$1" = --version ] && echo Python 3.9.2\nexit 1\n')
    python.chmod(0o755)
    (tmp_path / "dirname").symlink_to("/usr/bin/dirname")
    return python


def test_an_old_python_is_refused_with_the_way_out(old):
    ran = started(old.parent)
    assert ran.returncode == 1
    assert "needs Python 3.11" in ran.stderr
    assert "Python 3.9.2" in ran.stderr
    assert "hint:" in ran.stderr


def test_the_python_that_was_asked_for_is_taken_or_nothing_is(old):
    taken = started(old.parent, AENV_PYTHON=bootstrap.PYTHON)
    assert "/nowhere/scripts/bootstrap.py" in taken.stderr, "it ran, and found no checkout there"
    for wrong in (str(old), "no-such-python"):
        ran = started(Path(bootstrap.PYTHON).parent, AENV_PYTHON=wrong)
        assert ran.returncode == 1
        assert f"error: AENV_PYTHON={wrong} is not a working Python 3.11 or newer" in ran.stderr
        assert "hint:" in ran.stderr


@pytest.mark.skipif(sys.platform != "linux", reason="the supervisor needs Linux")
@pytest.mark.parametrize(
    ("script", "code"),
    [("exit 0", 0), ("exit 7", 7), ("kill -9 $$", 137), ("sleep 0.2 & exit 0", 0)],
)
def test_the_supervisor_gives_the_code_of_a_command_that_leaves_nothing(script, code):
    ran = subprocess.run([*SUPERVISE, "--", "sh", "-c", script], timeout=30, check=False)
    assert ran.returncode == code


@pytest.mark.skipif(sys.platform != "linux", reason="the supervisor needs Linux")
def test_the_supervisor_names_and_ends_a_daemon_that_left_its_session():
    daemon = "setsid sh -c 'sleep 300 & wait' </dev/null >/dev/null 2>&1 & exit 0"
    ran = subprocess.run(
        [*SUPERVISE, "--grace", "0.5", "--", "sh", "-c", daemon],
        capture_output=True, text=True, timeout=30, check=False,
    )  # fmt: skip
    assert ran.returncode == 1
    left = [line.split()[0] for line in ran.stderr.splitlines() if "sleep 300" in line]
    assert left
    assert not [pid for pid in left if Path("/proc", pid).exists()]


@pytest.mark.skipif(sys.platform != "linux", reason="the supervisor needs Linux")
def test_the_supervisor_ends_what_passes_its_deadline():
    command = [*SUPERVISE[:-1], "0.5", "--", "sleep", "300"]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    assert ran.returncode == 124
    assert "sleep 300" in ran.stderr


@pytest.mark.parametrize("name", [*precompile.RAY, *precompile.OURS])
def test_what_is_compiled_beforehand_exists(name):
    """A module missing here would be compiled by each process that imports it."""
    assert importlib.util.find_spec(name) is not None
