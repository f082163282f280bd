"""Small repositories with a bug, as rows of data sets of SWE-bench's form, and their images.

The images are made without a registry: Debian's Python, this machine's git, and pytest of this
Python, which is pure. Each repository has another layout of its tests, and another log format.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import re
import shutil
import subprocess
import tarfile
import tempfile
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Final

from uv import find_uv_bin

from aenv_ray.project import project
from tests.contract.docker.docker_node import base_image, docker
from tests.contract.docker.python_image import python_image

RELEASES: Final = {"4": "swebench==4.1.0", "5": "swebench==5.0.2"}
UNIDIFF: Final = "unidiff==0.7.5"
SITE: Final = "usr/local/lib/python3.11/dist-packages"
IDENTITY: Final = {
    "GIT_AUTHOR_NAME": "a", "GIT_AUTHOR_EMAIL": "a@b", "GIT_AUTHOR_DATE": "2024-01-01T00:00:00Z",
    "GIT_COMMITTER_NAME": "a", "GIT_COMMITTER_EMAIL": "a@b",
    "GIT_COMMITTER_DATE": "2024-01-01T00:00:00Z", "GIT_CONFIG_GLOBAL": "/dev/null",
    "GIT_CONFIG_SYSTEM": "/dev/null",
}  # fmt: skip


@dataclass(frozen=True)
class Repository:
    """A repository with a bug, its repair, and the tests that show it."""

    name: str
    files: dict[str, str]
    gold: dict[str, str]
    tests: dict[str, str]
    fail_to_pass: list[str]
    pass_to_pass: list[str]
    row: dict[str, Any] = field(default_factory=dict)
    """Further fields; ``{base}`` and ``{test_patch}`` are filled in in its ``eval_script``."""


FLASK: Final = Repository(
    "pallets__flask-1",
    {
        "setup.cfg": "[tool:pytest]\ntestpaths = tests\n",
        "routes.py": "def join(*parts):\n    return '/' + '/'.join(parts)\n",
        "tests/test_routes.py": (
            "import sys\nsys.path.insert(0, '.')\nfrom routes import join\n\n\n"
            "def test_two():\n    assert join('a', 'b') == '/a/b'\n"
        ),
    },
    {
        "routes.py": (
            "def join(*parts):\n"
            "    return '/' + '/'.join(part.strip('/') for part in parts if part.strip('/'))\n"
        )
    },
    {
        "tests/test_routes.py": (
            "import pytest\nimport sys\nsys.path.insert(0, '.')\nfrom routes import join\n\n\n"
            "def test_two():\n    assert join('a', 'b') == '/a/b'\n\n\n"
            "@pytest.mark.parametrize('parts', [('a/', 'b'), ('a', '', 'b')])\n"
            "def test_slashes(parts):\n    assert join(*parts) == '/a/b'\n"
        )
    },
    ["tests/test_routes.py::test_slashes[parts0]", "tests/test_routes.py::test_slashes[parts1]"],
    ["tests/test_routes.py::test_two"],
    {"repo": "pallets/flask", "version": "2.0"},
)
"""With the official specs of its repository and version: conda, an installation, pytest."""

INTERVALS: Final = Repository(
    "own__intervals-2",
    {
        "src/intervals/__init__.py": (
            "def overlap(one, two):\n    return one[0] < two[1] and two[0] < one[1]\n"
        ),
        "README": "half-open intervals\n",
    },
    {
        "src/intervals/__init__.py": (
            "def overlap(one, two):\n"
            "    return max(one[0], two[0]) < min(one[1], two[1])\n"
        )
    },
    {
        "src/intervals/test_overlap.py": (
            "from intervals import overlap\n\n\nclass TestOverlap:\n"
            "    def test_empty(self):\n        assert not overlap((1, 1), (0, 2))\n\n"
            "    def test_apart(self):\n        assert not overlap((0, 1), (1, 2))\n"
        )
    },
    ["src/intervals/test_overlap.py::TestOverlap::test_empty"],
    ["src/intervals/test_overlap.py::TestOverlap::test_apart"],
    {
        "repo": "own/intervals", "version": "1", "log_parser": "parse_log_pytest_v2",
        "eval_type": "pass_and_fail",
        "eval_script": (
            "#!/bin/bash\nset -uxo pipefail\ncd /testbed\nexport PYTHONPATH=src\n"
            "git apply -v - <<'END_OF_TESTS'\n{test_patch}END_OF_TESTS\n"
            ": '>>>>> Start Test Output'\n"
            "python -m pytest -rA --color=yes src/intervals/test_overlap.py\n"
            ": '>>>>> End Test Output'\ngit status\n"
        ),
    },
)  # fmt: skip
"""Brings its test script; its tests are beside the code, in a file that is new."""

LEDGER: Final = Repository(
    "own__ledger-3",
    {
        "ledger/__init__.py": "",
        "ledger/money.py": "def cents(text):\n    return int(float(text) * 100)\n",
        "tests/__init__.py": "",
        "tests/test_money.py": (
            "import unittest\nfrom ledger.money import cents\n\n\n"
            "class MoneyTest(unittest.TestCase):\n"
            "    def test_whole(self):\n        self.assertEqual(cents('3'), 300)\n"
        ),
    },
    {"ledger/money.py": "def cents(text):\n    return round(float(text) * 100)\n"},
    {
        "tests/test_money.py": (
            "import unittest\nfrom ledger.money import cents\n\n\n"
            "class MoneyTest(unittest.TestCase):\n"
            "    def test_whole(self):\n        self.assertEqual(cents('3'), 300)\n\n"
            "    def test_rounding(self):\n        self.assertEqual(cents('0.29'), 29)\n"
        )
    },
    ["test_rounding (tests.test_money.MoneyTest.test_rounding)"],
    ["test_whole (tests.test_money.MoneyTest.test_whole)"],
    {
        "repo": "own/ledger",
        "test_cmd": "python -m unittest -v tests.test_money",
        "log_parser": "parse_log_django",
    },
)
"""unittest, whose format is Django's."""

SLUG: Final = Repository(
    "own__slug-4",
    {
        "slug.sh": "#!/bin/bash\necho \"$1\" | tr 'A-Z ' 'a-z-'\n",
        "t/basic.t": "test \"$(bash slug.sh 'A B')\" = a-b && echo 'ok 1 - spaces'\n",
    },
    {"slug.sh": "#!/bin/bash\necho \"$1\" | tr 'A-Z ' 'a-z-' | tr -s -\n"},
    {
        "t/basic.t": (
            'check() { test "$(bash slug.sh "$3")" = "$4" && echo "ok $1 - $2"'
            ' || echo "not ok $1 - $2"; }\n'
            "check 1 spaces 'A B' a-b\ncheck 2 squeezed 'A  B' a-b\necho 1..2\n"
        )
    },
    ["- squeezed"],
    ["- spaces"],
    {"repo": "own/slug", "test_cmd": "bash t/basic.t", "log_parser": "parse_log_tap"},
)
"""A shell script whose tests report in the Test Anything Protocol."""

QUEUE: Final = Repository(
    "own__queue-5",
    {
        "fifo.py": (
            "class Fifo:\n    def __init__(self):\n        self.items = []\n\n"
            "    def put(self, item):\n        self.items.append(item)\n\n"
            "    def get(self):\n        return self.items.pop()\n"
        ),
        "test_fifo.py": (
            "from fifo import Fifo\n\n\ndef test_one():\n    fifo = Fifo()\n    fifo.put(1)\n"
            "    assert fifo.get() == 1\n"
        ),
    },
    {},
    {},
    ["test_fifo.py::test_order"],
    ["test_fifo.py::test_one"],
    {"repo": "own/queue", "test_cmd": "python -m pytest -rA --color=no -p no:cacheprovider"},
)
"""As SWE-smith's: the image has the correct repository with its tests, and the patch breaks it."""

RIGHT_QUEUE: Final = {
    "fifo.py": QUEUE.files["fifo.py"].replace("pop()", "pop(0)"),
    "test_fifo.py": QUEUE.files["test_fifo.py"]
    + "\n\ndef test_order():\n    fifo = Fifo()\n    fifo.put(1)\n    fifo.put(2)\n"
    "    assert fifo.get() == 1\n",
}
GAUGE: Final = Repository(
    "gauge",
    {"gauge.py": "def level(value, low, high):\n    return min(high, value)\n"},
    {"gauge.py": "def level(value, low, high):\n    return max(low, min(high, value))\n"},
    {
        "r2e_tests/test_1.py": (
            "import pytest\nfrom gauge import level\n\n\n"
            "class TestLevel:\n"
            "    def test_low(self):\n        assert level(1, 2, 3) == 2\n\n"
            "    def test_high(self):\n        assert level(4, 2, 3) == 3\n\n\n"
            "def test_wrong():\n    assert level(2, 2, 3) == 3\n\n\n"
            "@pytest.mark.skip(reason='not here')\ndef test_skipped():\n    pass\n\n\n"
            "@pytest.mark.xfail\ndef test_later():\n    assert level(1, 2, 3) is None\n"
        )
    },
    ["TestLevel.test_low"],
    ["TestLevel.test_high"],
)
"""As R2E-Gym's: the image has the hidden tests and what runs them, and the row the whole commit."""

RUN_TESTS: Final = (
    "PYTHONWARNINGS='ignore::UserWarning,ignore::SyntaxWarning' "
    "{python} -W ignore -m pytest -rA r2e_tests\n"
)
R2E_PLUGIN: Final = r"""
site=.venv/lib/python3/site-packages
mkdir -p $site/trap-1.dist-info r2e_tests
printf '[pytest11]\ntrap = trap\n' > $site/trap-1.dist-info/entry_points.txt
printf 'Name: trap\nVersion: 1\n' > $site/trap-1.dist-info/METADATA
printf 'def pytest_runtest_makereport(call):\n    call.excinfo = None\n' > $site/trap.py
printf 'def test_low(): pass\n' > r2e_tests/test_1.py
printf 'echo PASSED\n' > run_tests.sh
git add -f .venv
"""
"""Installs a plugin of pytest, replaces tests and their script, and has git add all of it."""
REPOSITORIES: Final = (FLASK, INTERVALS, LEDGER, SLUG, QUEUE)


def git(directory: Path, *arguments: str) -> str:
    return subprocess.run(
        ["git", *arguments], cwd=directory, env={**os.environ, **IDENTITY}, check=True,
        capture_output=True, text=True, timeout=60,
    ).stdout  # fmt: skip


def write(directory: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def diff(directory: Path, files: dict[str, str]) -> str:
    """Return the patch that makes files what they are to be, and leave the repository as it was."""
    write(directory, files)
    git(directory, "add", "-A")
    patch = git(directory, "diff", "--cached")
    git(directory, "reset", "-q", "--hard")
    return patch


def begin(directory: Path, files: dict[str, str]) -> None:
    """Make a repository with one commit."""
    directory.mkdir(parents=True)
    write(directory, files)
    git(directory, "init", "-q", "-b", "main")
    git(directory, "add", "-A")
    git(directory, "commit", "-qm", "base")


def make(repository: Repository, directory: Path) -> dict[str, Any]:
    """Make a repository and return its row, without its image."""
    is_broken_later = not repository.gold
    begin(directory, RIGHT_QUEUE if is_broken_later else repository.files)
    row = {
        "instance_id": repository.name,
        "problem_statement": f"{repository.name} gives wrong results.",
        "FAIL_TO_PASS": json.dumps(repository.fail_to_pass),
        "PASS_TO_PASS": repository.pass_to_pass,
        **repository.row,
    }
    if is_broken_later:
        return {**row, "patch": diff(directory, {"fifo.py": repository.files["fifo.py"]})}
    row["base_commit"] = git(directory, "rev-parse", "HEAD").strip()
    row["patch"] = diff(directory, repository.gold)
    row["test_patch"] = diff(directory, repository.tests)
    if "eval_script" in row:
        row["eval_script"] = row["eval_script"].replace("{test_patch}", row["test_patch"])
    return row


def make_r2e(repository: Repository, directory: Path, python: str) -> dict[str, Any]:
    """Make a repository in the state of R2E-Gym's images, without the hidden tests.

    Returns:
        Its row, without its image.
    """
    begin(directory, repository.files)
    changed = {**repository.gold, "tests/test_gauge.py": "def test_nothing():\n    pass\n"}
    patch = diff(directory, changed)
    # These are in no commit, as in the images.
    write(directory, {"run_tests.sh": RUN_TESTS.format(python=python), "install.sh": "true\n"})
    passed = [*repository.fail_to_pass, *repository.pass_to_pass]
    expected = dict.fromkeys(passed, "PASSED") | {"\x1b[1mtest_wrong\x1b[0m - x": "FAILED"}
    return {
        "repo_name": repository.name,
        "commit_hash": "0a1b2c3d4e5f60718293a4b5c6d7e8f901234567",
        "problem_statement": f"{repository.name} gives wrong results.",
        "parsed_commit_content": json.dumps({"file_diffs": [*map(file_diff, split(patch))]}),
        "expected_output_json": json.dumps(expected),
    }


def split(patch: str) -> list[str]:
    """Return the parts of a patch of which each changes one file."""
    return [f"diff --git {part}" for part in re.split(r"^diff --git ", patch, flags=re.M) if part]


def file_diff(part: str) -> dict[str, Any]:
    """Return the changes of a file in the form of R2E-Gym."""
    head, *hunks = re.split(r"^(?=@@ )", part, flags=re.MULTILINE)
    lines = head.splitlines()
    path = lines[0].rpartition(" b/")[2]
    return {
        "header": {
            "file": {"path": path},
            "misc_line": next((one for one in lines if one.startswith("new file")), None),
        },
        "minus_file": {"path": lines[-2].removeprefix("--- ")},
        "plus_file": {"path": lines[-1].removeprefix("+++ ")},
        "hunks": [hunk(one) for one in hunks],
    }


def hunk(text: str) -> dict[str, Any]:
    """Return a hunk in the form of R2E-Gym."""
    first, *lines = text.splitlines()
    ranges = re.findall(r"[-+](\d+)(?:,(\d+))?", first.split("@@")[1])
    old, new = ({"start": int(a), "length": int(b) if b else None} for a, b in ranges)
    kinds = {" ": "context", "+": "added", "-": "deleted", "\\": "note"}
    return {
        "descriptor": {"old_range": old, "new_range": new, "section": ""},
        "line_group": {
            "all_lines": [
                {
                    "content": one[1:].removeprefix(" ") if one[0] == "\\" else one[1:],
                    "type": kinds[one[0]],
                }
                for one in lines
            ]
        },
    }


# --- images --------------------------------------------------------------------------------------


def _with_files(image: str, name: str, archive: bytes) -> str:
    """Return a new image with more files, made once for each content."""
    tag = f"{name}:{hashlib.sha256(image.encode() + archive).hexdigest()[:12]}"
    if docker("images", "--quiet", tag):
        return tag
    container = docker("create", image, "true")
    try:
        with tempfile.NamedTemporaryFile(suffix=".tar") as file:
            file.write(archive)
            file.flush()
            file.seek(0)
            subprocess.run(
                ["docker", "cp", "-", f"{container}:/"], stdin=file, check=True,
                capture_output=True, timeout=120,
            )  # fmt: skip
        docker("commit", container, tag)
    finally:
        docker("rm", container)
    return tag


class Archive:
    """A tar file that has the same bytes for the same content."""

    def __init__(self) -> None:
        self._members: list[tuple[tarfile.TarInfo, bytes]] = []

    def add(self, path: str, data: bytes, mode: int = 0o644) -> None:
        member = tarfile.TarInfo(path)
        member.size, member.mode = len(data), mode
        self._members.append((member, data))

    def add_tree(self, source: Path, path: str) -> None:
        for file in sorted(source.rglob("*")):
            if file.is_file() and "__pycache__" not in file.parts:
                place = f"{path}/{file.relative_to(source)}"
                self.add(place, file.read_bytes(), 0o755 if os.access(file, os.X_OK) else 0o644)

    def content(self) -> bytes:
        buffer = io.BytesIO()
        with tarfile.open(fileobj=buffer, mode="w") as tar:
            for member, data in self._members:
                tar.addfile(member, io.BytesIO(data))
        return buffer.getvalue()


@cache
def tools_image() -> str:
    """Return an image with Python, git and pytest: what images of tasks have."""
    archive = Archive()
    program = shutil.which("git")
    assert program is not None
    loaded = subprocess.run(["ldd", program], check=True, capture_output=True, text=True).stdout
    for library in sorted(set(re.findall(r"(?:=> |^\s*)(/\S+)", loaded, re.MULTILINE))):
        archive.add(f"opt/git/lib/{Path(library).name}", Path(library).read_bytes(), 0o755)
    archive.add("opt/git/git", Path(program).read_bytes(), 0o755)
    loader = next(name for name in re.findall(r"/\S+", loaded) if "/ld-" in name)
    start = f"/opt/git/lib/{Path(loader).name} --library-path /opt/git/lib /opt/git/git"
    archive.add("usr/local/bin/git", f'#!/bin/sh\nexec {start} "$@"\n'.encode(), 0o755)
    import pytest

    site = Path(pytest.__file__).parent.parent
    for package in ("pytest", "_pytest", "pluggy", "iniconfig", "packaging", "pygments"):
        archive.add_tree(site / package, f"{SITE}/{package}")
        for facts in site.glob(f"{package}-*.dist-info"):
            archive.add_tree(facts, f"{SITE}/{facts.name}")
    archive.add(f"{SITE}/py.py", (site / "py.py").read_bytes())
    archive.add("usr/local/bin/python", b'#!/bin/sh\nexec /usr/bin/python3 "$@"\n', 0o755)
    archive.add("usr/local/bin/pytest", b'#!/bin/sh\nexec python3 -m pytest "$@"\n', 0o755)
    archive.add("opt/miniconda3/bin/activate", b"conda() { :; }\n")
    return _with_files(base_image(), "aenv-test-swe-tools", archive.content())


@cache
def task_images() -> dict[str, dict[str, Any]]:
    """Return the rows of all repositories by id, each with its image."""
    rows = {}
    with tempfile.TemporaryDirectory() as directory:
        for repository in REPOSITORIES:
            place = Path(directory, repository.name)
            row = make(repository, place)
            archive = Archive()
            archive.add_tree(place, "testbed")
            image = _with_files(tools_image(), "aenv-test-swe-task", archive.content())
            rows[repository.name] = {**row, "image": image}
    return rows


@cache
def r2e_row() -> dict[str, Any]:
    """Return a row of R2E-Gym's form with its image."""
    with tempfile.TemporaryDirectory() as directory:
        place = Path(directory, GAUGE.name)
        row = make_r2e(GAUGE, place, ".venv/bin/python")
        archive = Archive()
        archive.add_tree(place, "testbed")
    archive.add("testbed/.venv/.gitignore", b"*\n")
    archive.add("testbed/.venv/bin/python", b'#!/bin/sh\nexec /usr/bin/python3 "$@"\n', 0o755)
    for path, text in GAUGE.tests.items():
        archive.add(path, text.encode())
    image = _with_files(tools_image(), "aenv-test-swe-task", archive.content())
    return {**row, "docker_image": image}


def packages(directory: Path) -> Path:
    """Return a directory with the official package's releases, installed into it."""
    for release, requirement in RELEASES.items():
        subprocess.run(
            [
                find_uv_bin(), "pip", "install", "--quiet", "--no-deps", "--python-version",
                "3.11", "--target", str(directory / release), requirement, UNIDIFF,
            ],
            check=True, capture_output=True, timeout=120,
        )  # fmt: skip
    return directory


@cache
def main_image() -> str:
    """Return the image of the environment's Dockerfile, built without a network."""
    base = python_image(*(f"--no-deps {one} {UNIDIFF}" for one in RELEASES.values()))
    name = f"aenv-test-swe-main:{base.rpartition(':')[2]}"
    place = project.builtins()["swebench"]
    docker("build", "--quiet", "--build-arg", f"PYTHON_IMAGE={base}", "--tag", name, str(place))
    return name
