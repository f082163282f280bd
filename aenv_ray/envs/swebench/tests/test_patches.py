"""What of a submitted patch is graded."""

from __future__ import annotations

import patches
import pytest

FORM = "diff --git a/{0} b/{0}\nindex 1..2 100644\n--- a/{0}\n+++ b/{0}\n@@ -1 +1 @@\n-a\n+b\n"
NEW = "diff --git a/{0} b/{0}\nnew file mode 100644\n--- /dev/null\n+++ b/{0}\n@@ -0,0 +1 @@\n+b\n"


def test_a_patch_is_split_by_file() -> None:
    renamed = "diff --git a/old.py b/new.py\nsimilarity index 100%\nrename from old.py\n"
    parts = patches.split(FORM.format("a.py") + NEW.format("b c.py") + renamed)
    assert [sorted(part.paths) for part in parts] == [["a.py"], ["b c.py"], ["new.py", "old.py"]]
    assert "".join(part.text for part in parts).count("diff --git") == 3


def test_a_patch_without_git_headers_is_one_part() -> None:
    text = "--- a/x.py\t2024\n+++ b/x.py\n@@ -1 +1 @@\n-a\n+b\n"
    assert patches.paths(text) == {"x.py"}
    assert patches.split(" \n") == []


@pytest.mark.parametrize(
    "path",
    [
        "conftest.py",
        "pkg/deep/conftest.py",
        "sitecustomize.py",
        "lib/usercustomize.py",
        "x.pth",
        "pytest.ini",
        "pytest.toml",
        ".git/hooks/post-checkout",
        ".git/config",
        "pytest.py",
        "_pytest/main.py",
        "unittest/__init__.py",
        "tests/test_hidden.py",
    ],
)
def test_what_steers_the_tests_is_left_out(path: str) -> None:
    submitted = FORM.format("code.py") + NEW.format(path)
    found = patches.permitted(submitted, tests={"tests/test_hidden.py"}, gold=())
    assert (found.patch, found.left_out) == (FORM.format("code.py"), (path,))


@pytest.mark.parametrize(
    "path",
    [
        "src/pytest/main.py",
        "setup.cfg",
        ".github/hooks/x",
        "tests/test_other.py",
        "pytest.md",
        "fix.py",
    ],
)
def test_other_files_are_graded(path: str) -> None:
    submitted = FORM.format(path)
    found = patches.permitted(submitted, tests={"tests/test_hidden.py"}, gold=())
    assert (found.patch, found.left_out) == (submitted, ())


def test_files_of_the_reference_may_be_changed() -> None:
    submitted = FORM.format("conftest.py")
    assert patches.permitted(submitted, tests=(), gold={"conftest.py"}).patch == submitted
