"""Loading the code of a project, for each test in its own module space."""

from __future__ import annotations

import sys
from importlib.machinery import SOURCE_SUFFIXES, FileFinder, SourceFileLoader
from pathlib import Path

import pytest

from aenv_ray.engines.fake.modules import ModuleSpace
from aenv_ray.runtime.api.loader import load_project
from aenv_ray.runtime.api.registry import Registry
from aenv_ray.runtime.faults import ProjectLoadError
from aenv_ray.testing.contract_bench import write_project

HEAD = "from aenv_ray.runtime import register_tool\n"


def tool(name: str, expression: str = "1") -> str:
    return f"@register_tool\ndef {name}():\n    return {expression}\n"


def load(directory: Path, files: dict[str, str]) -> Registry:
    return ModuleSpace(write_project(directory, files)).load()


def call(registry: Registry, name: str) -> object:
    return registry.tools[name].function()


def test_every_module_is_imported_once_even_if_others_import_it(tmp_path: Path) -> None:
    files = {
        "a.py": HEAD + "import helper\n" + tool("one", "helper.LOADS"),
        "b.py": HEAD + "from helper import LOADS\n" + tool("two", "LOADS"),
        "helper.py": "import builtins as b\nb.aenv_loads = getattr(b, 'aenv_loads', 0) + 1\n"
        "LOADS = b.aenv_loads\n",
    }  # fmt: skip
    registry = load(tmp_path, files)
    assert call(registry, "one") == call(registry, "two")


def test_packages_relative_imports_and_directories_without_init(tmp_path: Path) -> None:
    files = {
        "pack/__init__.py": "from .inner import WORD\n",
        "pack/inner.py": "WORD = 'inner'\n",
        "pack/tools.py": HEAD + "from . import WORD\nfrom .deep.er import MORE\n"
        + tool("packed", "WORD + MORE"),
        "pack/deep/er.py": "from ..inner import WORD\nMORE = WORD.upper()\n",
    }  # fmt: skip
    assert call(load(tmp_path, files), "packed") == "innerINNER"


def test_the_code_directory_can_be_a_package(tmp_path: Path) -> None:
    """Each module once, whether it is imported relatively, by its bare name or by all of it."""
    once = (
        "import builtins as b\nb.aenv_once = getattr(b, 'aenv_once', 0) + 1\nONCE = b.aenv_once\n"
    )
    files = {
        "__init__.py": "LEVEL = 'top'\n",
        "tools.py": HEAD + "from . import LEVEL\nfrom .helper import ONCE as A\n"
        "import helper\nfrom helper import ONCE as B\nfrom pack import deep\n"
        + tool("same", "(LEVEL, A == B == helper.ONCE == deep.ONCE, deep.json.dumps(1))"),
        "helper.py": once,
        "json.py": "",
        "pack/__init__.py": "",
        "pack/deep.py": "import json\nfrom ..helper import ONCE\n",
        "later.py": HEAD + "@register_tool\ndef late():\n    from .pack import deep\n"
        "    import helper\n    return deep.ONCE == helper.ONCE\n",
    }  # fmt: skip
    finders = list(sys.meta_path)
    registry = load(tmp_path / "a", files)
    assert call(registry, "same") == ("top", True, "1")
    assert call(registry, "late") is True
    other = load(tmp_path / "b", files | {"helper.py": "ONCE = 7\n"})
    assert call(other, "late") is call(registry, "late") is True
    assert sys.meta_path == finders
    assert not {"helper", "tools", "src"} & sys.modules.keys()


@pytest.mark.parametrize("init", ["raise KeyError('alas')\n", "import nothing_such\n"])
def test_a_package_that_does_not_load_names_the_line(tmp_path: Path, init: str) -> None:
    files = {"__init__.py": init, "tools.py": HEAD + "from . import x\n" + tool("one")}
    with pytest.raises(ProjectLoadError, match=r"__init__\.py does not load: "):
        load(tmp_path, files)


def test_tests_and_other_directories_are_not_loaded(tmp_path: Path) -> None:
    bad = "raise RuntimeError('loaded')\n"
    skipped = (
        "test_x.py", "x_test.py", "conftest.py", "_private.py", "tests/a.py", "venv/a.py",
        ".hidden/a.py", "_internal/a.py", "pack/tests/a.py", "node_modules/a.py", "setup.py.txt",
    )  # fmt: skip
    files = dict.fromkeys(skipped, bad) | {"tools.py": HEAD + tool("one")}
    assert list(load(tmp_path, files).tools) == ["one"]


def test_names_of_the_standard_library_do_not_clash(tmp_path: Path) -> None:
    files = {
        "json.py": HEAD + tool("mine"),
        "tools.py": HEAD + "import json\n" + tool("theirs", "json.dumps([1])"),
        "my-env.py": HEAD + tool("dashed"),
    }
    registry = load(tmp_path, files)
    assert set(registry.tools) == {"mine", "theirs", "dashed"}
    assert call(registry, "theirs") == "[1]"
    assert sys.modules["json"].__name__ == "json"
    assert hasattr(sys.modules["json"], "dumps")


def test_imports_of_aenvironment_give_this_runtime(tmp_path: Path) -> None:
    """Existing environment projects keep working."""
    source = (
        "from aenv import register_tool, register_reward\n"
        "from aenv.core.tool import get_registry\n"
        "from aenv.core.function_registry import register_function, register_health\n"
        "from aenv.core.logging import getLogger\n"
        "from aenv.core.exceptions import ToolError\n"
        "log = getLogger(__name__)\n" + tool("one")
    )
    assert list(load(tmp_path, {"tools.py": source}).tools) == ["one"]


def test_a_project_can_be_its_src_a_flat_directory_or_one_file(tmp_path: Path) -> None:
    made = write_project(tmp_path / "p", {"tools.py": HEAD + tool("one")})
    for path in (made, made / "src"):
        assert list(ModuleSpace(path).load().tools) == ["one"]
    with pytest.raises(ProjectLoadError, match="no such project"):
        load_project(tmp_path / "nowhere")


def test_the_traceback_has_only_frames_of_the_project(tmp_path: Path) -> None:
    files = {"tools.py": "from helper import go\ngo()\n", "helper.py": "def go():\n    1 / 0\n"}
    with pytest.raises(ProjectLoadError) as raised:
        load(tmp_path, files)
    text = str(raised.value)
    assert "tools.py does not load: ZeroDivisionError" in text
    assert "helper.py" in text
    assert "in go" in text
    for foreign in ("runtime/loader.py", "importlib", "fake_modules.py", "engines"):
        assert foreign not in text, foreign


def test_two_spaces_of_one_project_share_no_state(tmp_path: Path) -> None:
    files = {
        "tools.py": HEAD + "import state\n" + tool("bump", "state.bump()"),
        "state.py": "count = 0\ndef bump():\n    global count\n    count += 1\n    return count\n",
    }
    made = write_project(tmp_path, files)
    one, two = ModuleSpace(made).load(), ModuleSpace(made).load()
    assert [call(one, "bump"), call(one, "bump"), call(two, "bump")] == [1, 2, 1]


def test_a_space_leaves_the_process_as_it_was(tmp_path: Path) -> None:
    modules, path, finders = set(sys.modules), list(sys.path), list(sys.meta_path)
    files = {
        "wsp_tools.py": HEAD + "import wsp_pack.late\n" + tool("one"),
        "wsp_pack/late.py": "X = 1\n", "wsp_pack/__init__.py": "",
    }  # fmt: skip
    made = write_project(tmp_path, files)
    ModuleSpace(made).load()
    with pytest.raises(ProjectLoadError):
        load(tmp_path / "bad", {"wsp_broken.py": "import wsp_nothing\n"})
    assert not {n for n in set(sys.modules) - modules if n.startswith("wsp")}
    assert (sys.path, sys.meta_path) == (path, finders)
    assert not list(made.rglob("__pycache__"))


def test_a_changed_source_is_loaded_again(tmp_path: Path) -> None:
    made = write_project(tmp_path, {"tools.py": HEAD + tool("one", "1")})
    assert call(ModuleSpace(made).load(), "one") == 1
    (made / "src" / "tools.py").write_text(HEAD + tool("one", "'changed'"))
    assert call(ModuleSpace(made).load(), "one") == "changed"


def test_imports_inside_a_tool_find_the_spaces_own_modules(tmp_path: Path) -> None:
    source = HEAD + "@register_tool\ndef late():\n    import other, json\n    return other.NAME\n"
    registries = [
        load(tmp_path / name, {"tools.py": source, "other.py": f"NAME = {name!r}\n"})
        for name in ("x", "y")
    ]
    assert [call(registry, "late") for registry in registries] == ["x", "y"]


def test_an_import_hook_of_another_library_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Theirs(SourceFileLoader):
        """What beartype's import hook puts there when FastMCP's client is imported."""

    hook = FileFinder.path_hook((Theirs, SOURCE_SUFFIXES))
    monkeypatch.setattr(sys, "path_hooks", [hook, *sys.path_hooks])
    monkeypatch.setattr(sys, "path_importer_cache", {})
    source = HEAD + "@register_tool\ndef late():\n    import other\n    return other.NAME\n"
    registry = load(tmp_path, {"tools.py": source, "other.py": "NAME = 'own'\n"})
    assert call(registry, "late") == "own"
