"""The docs name each command, setting and error, and their code runs."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from typer.main import get_command

import aenv_ray
from aenv_ray.actors.calls.handle import EnvHandle, remote_method
from aenv_ray.cli.main import COMMANDS, app, load_command
from aenv_ray.config import Settings
from aenv_ray.engines.images.node_images import BUNDLES, FACTS
from aenv_ray.errors import ERRORS, is_infrastructure
from aenv_ray.project.config import DeployConfig
from aenv_ray.project.project import builtins, read_config

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
FENCE = re.compile(r"^```(\S+)(?: ([^\n]*))?\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(([^)#\s]+)")


OF_FRAMEWORKS = (
    "a2a",
    "areal",
    "camel",
    "inspect",
    "nemo-gym",
    "nemo-rl",
    "openai-agents",
    "openenv-client",
    "openenv-container",
    "openenv-server",
    "openrlhf",
    "slime",
    "trl",
    "verifiers",
    "verl",
)
"""Modes of blocks that tests with the framework run, see `tests/fixtures/doc_blocks.py`."""


@dataclass(frozen=True)
class Block:
    """A fenced block: ``python`` runs here, ``python ray`` in the e2e tests."""

    page: Path
    number: int
    language: str
    mode: str
    text: str

    @property
    def id(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.number}"


def blocks() -> Iterator[Block]:
    for page in PAGES:
        for number, match in enumerate(FENCE.finditer(page.read_text(encoding="utf-8")), 1):
            yield Block(page, number, match[1], match[2] or "", match[3])


PYTHON = [pytest.param(b, id=b.id) for b in blocks() if b.language == "python"]
PLAIN = [pytest.param(b, id=b.id) for b in blocks() if (b.language, b.mode) == ("python", "")]
SHELL = [pytest.param(b, id=b.id) for b in blocks() if b.language == "sh"]
JSON = [pytest.param(b, id=b.id) for b in blocks() if b.language == "json"]
EVERY_PAGE = [pytest.param(page, id=str(page.relative_to(ROOT))) for page in PAGES]


def text_of(*names: str) -> str:
    return "\n".join((ROOT / name).read_text(encoding="utf-8") for name in names)


@pytest.mark.parametrize("block", PYTHON)
def test_python_blocks_compile_and_have_a_known_mode(block):
    compile(block.text, block.id, "exec")
    assert block.mode in ("", "ray", *OF_FRAMEWORKS)
    uses_ray = re.search(r"^import .*\bray\b|aenv_ray\.(create|sample)", block.text, re.MULTILINE)
    assert not (uses_ray and block.mode == ""), "mark it: ```python ray"


@pytest.mark.parametrize("mode", OF_FRAMEWORKS)
def test_python_blocks_of_a_framework_are_run_by_a_test(mode):
    tests = [*ROOT.glob("tests/fixtures/*/test_*.py"), *ROOT.glob("tests/*/test_*.py")]
    tests += ROOT.glob("tests/unit/integrations/**/test_*.py")
    assert any(f'doc_blocks("{mode}")' in path.read_text() for path in tests)


def test_code_of_frameworks_is_marked_as_such():
    for block in blocks():
        if block.page.name == "integrations.md" and block.language == "text":
            with pytest.raises(SyntaxError):
                compile(block.text, block.id, "exec")


def test_every_example_of_a_framework_is_run_by_a_test():
    tests = "\n".join(path.read_text() for path in ROOT.glob("tests/**/test_*.py"))
    for path in ROOT.glob("examples/integrations/*/*.py"):
        assert re.search(rf"\b{path.stem}\b", tests), path.name


@pytest.mark.parametrize("block", PLAIN)
def test_plain_python_blocks_run(block, tmp_path):
    (tmp_path / "block.py").write_text(block.text, encoding="utf-8")
    ran = subprocess.run(
        [sys.executable, "block.py"], cwd=tmp_path, capture_output=True, text=True, timeout=60,
        check=False,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr


@pytest.mark.parametrize("block", SHELL)
def test_shell_blocks_use_commands_files_and_options_that_exist(block):
    for line in block.text.splitlines():
        words = shlex.split(line, comments=True)
        if words and words[0].startswith("./"):
            assert (ROOT / words[0]).is_file(), line
        if not words or words[0] != "aenv":
            continue
        assert words[1] in COMMANDS, line
        command = load_command(words[1], COMMANDS[words[1]])
        if len(words) > 2 and words[2] in getattr(command, "commands", {}):
            command = command.commands[words[2]]
        known = {option for p in command.params for option in (*p.opts, *p.secondary_opts)}
        used = {word.partition("=")[0] for word in words[2:] if word.startswith("-")}
        assert used <= known | {"--help"}, line


@pytest.mark.parametrize("block", JSON)
def test_json_blocks_are_project_configs_that_parse(block, tmp_path):
    json.loads(block.text)
    (tmp_path / "config.json").write_text(block.text, encoding="utf-8")
    assert not read_config(tmp_path / "config.json").deploy.model_extra


@pytest.mark.parametrize("page", EVERY_PAGE)
def test_links_lead_somewhere(page):
    for target in LINK.findall(page.read_text(encoding="utf-8")):
        if "://" not in target:
            assert (page.parent / target).exists(), target


def test_readme_lists_every_command_and_no_other():
    listed = set(re.findall(r"^\| `aenv (\S+?)[ `]", text_of("README.md"), re.MULTILINE))
    assert listed == set(COMMANDS) == set(get_command(app).list_commands(None))


def test_operations_documents_every_setting_with_its_variable():
    page = text_of("docs/operations.md")
    rows = dict(re.findall(r"^\| `([A-Z0-9_]+)` \| `([a-z0-9_]+)` \|", page, re.MULTILINE))
    assert rows == {field.alias: name for name, field in Settings.model_fields.items()}


def test_operations_names_the_caches_of_images():
    page = text_of("docs/operations.md")
    assert set(re.findall(r"`docker/([a-z-]+)`", page)) == {BUNDLES, FACTS}


def test_rollouts_documents_every_error_and_which_ones_void_an_episode():
    page = text_of("docs/rollouts.md")
    rows = re.findall(r"^\| `(\w+)` \| .*? \| (yes|) ?\| (yes|) ?\|$", page, re.MULTILINE)
    found = {name: (void == "yes", retryable == "yes") for name, void, retryable in rows}
    assert found == {e.__name__: (is_infrastructure(e("")), e.retryable) for e in ERRORS}


def test_rollouts_documents_every_method_of_a_handle():
    page = text_of("docs/rollouts.md")
    methods = [n for n, v in vars(EnvHandle).items() if isinstance(v, remote_method)]
    assert methods
    for name in methods:
        assert re.search(rf"`{name}[(`]", page), name


def test_environments_documents_only_deploy_fields_that_exist():
    page = text_of("docs/environments.md")
    known = {f.alias or name for name, f in DeployConfig.model_fields.items()}
    named = set(re.findall(r"`deployConfig\.(\w+)`", page))
    assert named
    assert named <= known


def test_the_docs_name_what_the_package_exports():
    pages = "\n".join(page.read_text(encoding="utf-8") for page in PAGES)
    for name in aenv_ray.__all__:
        assert re.search(rf"\b{name}\b", pages), name


def test_the_changelog_has_an_entry_for_this_version():
    entries = re.findall(r"^## (\S+)", text_of("CHANGELOG.md"), re.MULTILINE)
    assert entries[0] == aenv_ray.__version__
    with (ROOT / "pyproject.toml").open("rb") as file:
        assert tomllib.load(file)["project"]["version"] == aenv_ray.__version__


def test_no_file_of_the_project_names_a_path_of_the_machine_it_was_written_on():
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT, capture_output=True, timeout=30, check=False,
    )  # fmt: skip
    if listed.returncode:
        pytest.skip("not a git checkout")
    # Split, so that this file does not contain them.
    local = [b"/".join((b"", *parts)) for parts in ((b"work", b"main"), (b"work", b"shared"),
             (b"work", b"venv"), (b"opt", b"pypi"), (b"opt", b"wheels"))]  # fmt: skip
    for name in filter(None, listed.stdout.decode().split("\0")):
        path = ROOT / name
        if path.is_file():
            content = path.read_bytes()
            assert not [p for p in local if p in content], name


@pytest.mark.parametrize("name", builtins())
def test_a_built_in_environment_says_what_it_costs_and_whose_tasks_it_has(name: str) -> None:
    readme = (builtins()[name] / "README.md").read_text()
    assert re.search(r"\blicen[cs]e|\bMIT\b", readme, re.IGNORECASE), "of its tasks"
    pages = (ROOT / "docs" / "benchmarks.md").read_text().split("\n## ")
    (section,) = (page for page in pages if page.startswith(f"{name}\n"))
    assert f"aenv sample {name}" in section
    assert re.search(r"\bverdict|official harness", section, re.IGNORECASE), "how it compares"
    assert re.search(r"\bcost\b|\bCPU time\b|\bseconds\b", section, re.IGNORECASE), "its cost"
