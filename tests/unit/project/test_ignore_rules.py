"""What `.gitignore` and `.aenvignore` leave out is what git leaves out, and the digest follows."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from aenv_ray.errors import ConfigError
from aenv_ray.project import files as project_files
from aenv_ray.project import project
from aenv_ray.project.files import IgnoreRules
from aenv_ray.testing.contract_bench import write_project
from tests.conftest import require


@pytest.mark.parametrize(
    ("lines", "path", "ignored"),
    [
        ("*.log", "a/b.log", True), ("*.log", "b.logs", None),
        ("data/", "data", None), ("data", "data", True), ("/data", "a/data", None),
        ("a/data", "a/data", True), ("a/data", "b/a/data", None), ("**/data", "b/a/data", True),
        ("a/**", "a/b/c", True), ("a/**", "a", None), ("a/**/b", "a/b", True),
        ("a/**/b", "a/x/y/b", True), ("a**b", "axxb", True), ("x/a**b", "x/a/b", None),
        ("?.txt", "a.txt", True), ("[ab].txt", "b.txt", True),
        ("[!ab].txt", "b.txt", None), ("[^ab].txt", "c.txt", True), ("[]].txt", "].txt", True),
        ("[a-c]", "b", True), ("[c-a]", "b", None), ("[a", "[a", None), ("[[:digit:]]", "4", True),
        ("[[:nothing:]]", "n", None), ("x[/]y", "x/y", None),
        ("# a", "# a", None), (r"\# a", "# a", True), (r"\!a", "!a", True), ("a ", "a", True),
        ("a\\ ", "a ", True), ("a\\", "a", None), ("a\r", "a", True), ("", "a", None),
        ("/", "a", None), ("!a", "a", False), ("a\n!a", "a", False), ("!a\na", "a", True),
        ("\ufeffa", "a", True), ("a.b", "axb", None), ("a+", "a+", True),
        ("\udcff", "\udcff", True),
    ],
)  # fmt: skip
def test_a_line_means_what_git_says(lines: str, path: str, ignored: bool | None) -> None:
    rules = IgnoreRules(lines)
    for _ in range(2):
        assert rules.verdict(path, is_directory=False) is ignored


def test_a_line_with_a_slash_at_its_end_means_directories() -> None:
    rules = IgnoreRules("data/\n")
    assert rules.verdict("data", is_directory=True) is True
    assert rules.verdict("data", is_directory=False) is None


# --- the same files as git's ----------------------------------------------------------------------

NAMES = ("a", "b", "ab", "a.b", "foo", "x.py", "[a]", "a b")
part = st.sampled_from((*NAMES, "*", "**", "?", "*.py", "a*", "[ab]", "[!a]", "f?o", "\\a"))
line = st.builds(
    lambda bang, lead, parts, tail: bang + lead + "/".join(parts) + tail,
    st.sampled_from(("", "", "!")),
    st.sampled_from(("", "/")),
    st.lists(part, min_size=1, max_size=3),
    st.sampled_from(("", "", "/", "/**", " ")),
)
lines = st.lists(line, max_size=5).map("\n".join)
paths = st.lists(
    st.lists(st.sampled_from(NAMES), min_size=1, max_size=4).map("/".join), max_size=12
)


def write(root: Path, name: str, text: str = "") -> None:
    """Write a file unless something that is in its way is there already."""
    path = root / name
    if any(parent.is_file() for parent in path.parents) or path.is_dir():
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def run_git(where: Path, *arguments: str) -> str:
    clean = {"HOME": str(where), "GIT_CONFIG_NOSYSTEM": "1", "PATH": os.environ["PATH"]}
    return subprocess.run(
        ["git", *arguments],
        cwd=where, env=clean, capture_output=True, text=True, check=True, timeout=60,
    ).stdout  # fmt: skip


@pytest.fixture(scope="module")
def empty_repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the directory of a repository without commits, for work trees anywhere."""
    require("git", shutil.which("git") is not None, "it is not installed")
    path = tmp_path_factory.mktemp("repository")
    run_git(path, "init", "--quiet", "--bare")
    return path


def of_git(repository: Path, root: Path) -> list[str]:
    where = [f"--git-dir={repository}", f"--work-tree={root}", "-c", "core.bare=false"]
    listed = run_git(root, *where, "ls-files", "-z", "--others", "--exclude-standard")
    return sorted(filter(None, listed.split("\0")))


@settings(max_examples=100, suppress_health_check=[HealthCheck.too_slow])
@given(names=paths, top=lines, nested=st.dictionaries(st.sampled_from(NAMES), lines, max_size=2))
def test_the_files_of_a_project_are_those_that_git_would_add(
    empty_repository: Path, names: list[str], top: str, nested: dict[str, str]
) -> None:
    with tempfile.TemporaryDirectory() as directory:
        root = Path(directory)
        (root / ".gitignore").write_text(top)
        for below, text in nested.items():
            write(root, f"{below}/.gitignore", text)
        for name in names:
            write(root, name)
        assert [row.name for row in project_files.scan(directory)] == of_git(empty_repository, root)


# --- in a project ---------------------------------------------------------------------------------


@pytest.fixture
def made(tmp_path: Path) -> Path:
    return write_project(tmp_path / "p", {"tools.py": "x = 1\n", "noise.log": "a\n"}, {})


def names_of(path: Path) -> set[str]:
    return {row.name for row in project_files.scan(str(path))}


def test_ignored_files_are_neither_in_the_digest_nor_in_the_archive(made: Path) -> None:
    """Invariant 6: one content, whichever way it is looked at."""
    (made / ".gitignore").write_text("*.log\n")
    before = project.load(made)
    assert b"noise.log" not in before.archive()
    (made / "src" / "noise.log").write_text("more\n")
    assert project.load(made) is before
    (made / ".gitignore").write_text("*.tmp\n")
    after = project.load(made)
    assert after.digest != before.digest
    assert b"noise.log" in after.archive()


def test_an_unpacked_project_has_the_same_digest(tmp_path: Path, made: Path) -> None:
    """Invariant 6: whoever unpacked it may archive it again."""
    (made / ".gitignore").write_text("*.log\n")
    loaded = project.load(made)
    unpacked = project.load(project.unpack(loaded.archive(), loaded.digest, tmp_path / "cache"))
    assert unpacked.digest == loaded.digest
    assert unpacked.archive() == loaded.archive()


def test_aenvignore_is_stronger_than_any_gitignore(made: Path) -> None:
    (made / "src" / ".gitignore").write_text("*.log\n")
    (made / ".aenvignore").write_text("!noise.log\ntools.py\n")
    assert names_of(made) == {".aenvignore", "config.json", "src/.gitignore", "src/noise.log"}


def test_a_config_is_never_ignored(made: Path) -> None:
    (made / ".gitignore").write_text("*\n")
    assert names_of(made) == {"config.json"}


def test_files_above_a_project_say_nothing(made: Path) -> None:
    (made.parent / ".gitignore").write_text("*\n")
    assert "src/tools.py" in names_of(made)


def test_an_ignore_file_that_is_a_link_says_nothing(made: Path) -> None:
    (made / "rules").write_text("*.log\n")
    (made / ".gitignore").symlink_to("rules")
    assert "src/noise.log" in names_of(made)


def test_an_ignored_directory_is_not_looked_into(made: Path) -> None:
    (made / ".gitignore").write_text("data/\n")
    (made / "data").mkdir()
    (made / "data" / "large.bin").write_text("x")
    (made / "data" / ".gitignore").write_text("!large.bin\n")
    assert not any(name.startswith("data") for name in names_of(made))


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads everything")
def test_a_file_that_cannot_be_read_is_said(made: Path) -> None:
    (made / "src" / "tools.py").chmod(0)
    with pytest.raises(ConfigError, match=r"tools\.py cannot be read"):
        project.load(made)


def test_a_name_that_is_no_text_is_archived(tmp_path: Path, made: Path) -> None:
    (made / os.fsdecode(b"na\xffme")).write_text("x")
    loaded = project.load(made)
    unpacked = project.unpack(loaded.archive(), loaded.digest, tmp_path / "cache")
    assert (unpacked / os.fsdecode(b"na\xffme")).read_text() == "x"
    assert json.loads((unpacked / "config.json").read_text())
