"""Loading a project's code: imports as people write them, and failures that say why."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from aenv_ray.runtime.faults import ProjectLoadError
from aenv_ray.runtime.loader import load_project
from aenv_ray.runtime.registry import Registry, registering_in

TOOL = """from aenv_ray.runtime import register_tool

@register_tool
def {name}() -> str:
    {body}
"""


def tool(name: str, body: str = "return 'x'") -> str:
    return TOOL.format(name=name, body=body)


@pytest.fixture(autouse=True)
def _imports_are_undone() -> Iterator[None]:
    """Projects put their modules where everybody's are."""
    modules, path = dict(sys.modules), list(sys.path)
    writes = sys.dont_write_bytecode
    sys.dont_write_bytecode = True
    yield
    sys.dont_write_bytecode = writes
    sys.path[:] = path
    for name in set(sys.modules) - set(modules):
        del sys.modules[name]
    sys.modules.update(modules)


def make(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def load(path: Path) -> Registry:
    registry = Registry()
    with registering_in(registry):
        assert load_project(path) is registry
    return registry


def refusal(path: Path) -> str:
    with pytest.raises(ProjectLoadError) as caught:
        load(path)
    return str(caught.value)


@pytest.mark.parametrize("place", ["src/zz_tools.py", "zz_tools.py"])
def test_a_project_has_its_code_in_src_or_at_its_root(tmp_path: Path, place: str) -> None:
    make(tmp_path, {place: tool("one")})
    assert list(load(tmp_path).tools) == ["one"]


def test_one_file_is_a_project(tmp_path: Path) -> None:
    make(tmp_path, {"zz_tools.py": tool("one"), "zz_other.py": tool("two")})
    assert list(load(tmp_path / "zz_tools.py").tools) == ["one"]


def test_code_beside_src_is_not_loaded(tmp_path: Path) -> None:
    make(tmp_path, {"src/zz_tools.py": tool("one"), "setup.py": "raise SystemExit"})
    assert list(load(tmp_path).tools) == ["one"]


def test_packages_are_loaded_with_relative_imports(tmp_path: Path) -> None:
    files = {
        "src/zz_pack/__init__.py": "from .names import NAME\n",
        "src/zz_pack/names.py": "NAME = 'deep'\n",
        "src/zz_pack/inner/__init__.py": "",
        "src/zz_pack/inner/tools.py": "from ..names import NAME\n" + tool("one", "return NAME"),
        "src/zz_loose/tools.py": "from zz_pack import NAME\n" + tool("two", "return NAME"),
    }
    registry = load(make(tmp_path, files))
    assert {name: entry.function() for name, entry in registry.tools.items()} == {
        "one": "deep",
        "two": "deep",
    }


def test_a_helper_is_imported_once_under_its_own_name(tmp_path: Path) -> None:
    files = {
        "src/zz_a.py": "import zz_helper\n" + tool("one", "return zz_helper.STATE"),
        "src/zz_helper.py": "STATE = []\nclass Kept: ...\n",
        "src/zz_z.py": "from zz_helper import STATE\n" + tool("two", "return STATE"),
    }
    registry = load(make(tmp_path, files))
    assert registry.tool("one").function() is registry.tool("two").function()
    assert sys.modules["zz_helper"].Kept.__module__ == "zz_helper"


def test_a_helper_may_be_imported_when_a_tool_is_called(tmp_path: Path) -> None:
    files = {
        "src/zz_tools.py": tool("one", "import _zz_late; return _zz_late.VALUE"),
        "src/_zz_late.py": "VALUE = 3\n",
    }
    registry = load(make(tmp_path, files))
    assert "_zz_late" not in sys.modules
    assert registry.tool("one").function() == 3


def test_loading_twice_registers_once(tmp_path: Path) -> None:
    make(tmp_path, {"src/zz_tools.py": tool("one")})
    registry = Registry()
    with registering_in(registry):
        load_project(tmp_path)
        load_project(tmp_path / "src")
    assert list(registry.tools) == ["one"]


@pytest.mark.parametrize("file", ["json.py", "random.py", "my-tools.py", "2nd.py"])
def test_a_file_may_have_a_name_that_is_taken_or_is_no_name(tmp_path: Path, file: str) -> None:
    import json
    import random

    make(tmp_path, {f"src/{file}": tool("one")})
    assert list(load(tmp_path).tools) == ["one"]
    assert sys.modules["json"] is json
    assert sys.modules["random"] is random


def test_tests_and_private_files_are_not_the_environment(tmp_path: Path) -> None:
    skipped = (
        "test_tools.py",
        "tools_test.py",
        "conftest.py",
        "_private.py",
        "tests/anything.py",
        "test/anything.py",
        ".hidden/anything.py",
        "venv/anything.py",
        "zz_pack/tests/anything.py",
        "zz_pack/test_inner.py",
    )
    files = {f"src/{name}": "raise RuntimeError('loaded')" for name in skipped}
    make(tmp_path, files | {"src/zz_tools.py": tool("one")})
    assert list(load(tmp_path).tools) == ["one"]


@pytest.mark.parametrize(
    "statement",
    [
        "from aenv import register_tool",
        "from aenv.core.tool import register_tool",
        "from aenv.core import register_tool",
        "import aenv\nregister_tool = aenv.register_tool",
    ],
)
def test_code_written_for_aenvironment_loads(tmp_path: Path, statement: str) -> None:
    text = f"{statement}\n\n@register_tool\ndef one() -> int:\n    return 1\n"
    registry = load(make(tmp_path, {"src/zz_tools.py": text}))
    assert registry.tool("one").function() == 1


# --- failures -------------------------------------------------------------------------------------


def test_a_syntax_error_is_shown_with_its_line(tmp_path: Path) -> None:
    message = refusal(make(tmp_path, {"src/zz_tools.py": "x = 1\ndef broken(:\n"}))
    assert message.startswith("zz_tools.py does not load: SyntaxError")
    assert "line 2" in message
    assert "def broken(:" in message


def test_a_missing_import_is_shown_with_the_projects_frames_only(tmp_path: Path) -> None:
    files = {
        "src/zz_a_tools.py": "import zz_helper\n" + tool("one"),
        "src/zz_helper.py": "import no_such_module_anywhere\n",
    }
    message = refusal(make(tmp_path, files))
    assert "zz_a_tools.py does not load: ModuleNotFoundError" in message
    assert "no_such_module_anywhere" in message
    assert 'zz_helper.py", line 1' in message
    assert "loader.py" not in message
    assert "importlib" not in message


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("raise SystemExit(3)", "SystemExit: 3"),
        ("1 / 0", "ZeroDivisionError"),
        (tool("one") + tool("one").replace("'x'", "'y'"), "'one' is already registered by"),
    ],
)
def test_whatever_happens_at_import_is_said(tmp_path: Path, text: str, words: str) -> None:
    assert words in refusal(make(tmp_path, {"src/zz_tools.py": text}))


def test_a_module_that_failed_can_be_loaded_once_it_is_mended(tmp_path: Path) -> None:
    for file in ("zz_tools.py", "zz-tools.py"):
        make(tmp_path, {f"src/{file}": "1 / 0"})
        refusal(tmp_path / "src" / file)
        make(tmp_path, {f"src/{file}": tool("one")})
        assert list(load(tmp_path / "src" / file).tools) == ["one"]


def test_an_environment_without_tools_is_no_environment(tmp_path: Path) -> None:
    """It would be healthy and useless: an agent that does nothing looks like a failing policy."""
    message = refusal(make(tmp_path, {"src/zz_tools.py": "def one(): ...\n"}))
    assert "zz_tools.py" in message
    assert "@register_tool" in message


def test_a_project_without_code_is_said(tmp_path: Path) -> None:
    (tmp_path / "src").mkdir()
    assert "no Python files to load" in refusal(tmp_path)
    assert "no such project" in refusal(tmp_path / "nowhere")
    assert "no such project" in refusal(make(tmp_path, {"config.json": "{}"}) / "config.json")


def test_a_parameter_that_json_cannot_carry_is_said_at_load(tmp_path: Path) -> None:
    text = tool("one").replace("one()", "one(a: int, /)")
    assert "one: parameter 'a' is positional-only" in refusal(
        make(tmp_path, {"src/zz_tools.py": text})
    )
