"""The types of public results, those of `EnvHandle` in particular, as type checkers see them."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

pytestmark = pytest.mark.timeout(600)

ROOT = Path(__file__).parents[2]
PROGRAM = """
import ray
import aenv_ray

env = aenv_ray.create("mini-terminal@1.0.0", ttl="30m")

async def main() -> None:
    reveal_type(await env.call_tool.remote("echo"))

reveal_type(ray.get(env.call_tool.remote("echo", {"text": "hi"}, timeout_s=3)))
reveal_type(ray.get([env.exec.remote(["ls"]), env.exec.remote("ls")]))
reveal_type(ray.get(env.read_file.remote("a.txt", length=10)))
reveal_type(env.release.remote())
env.call_tool.remote("echo", argument={})
env.call_tool.remote(3)
env.call_tool.remote()
env.call_tool("echo")
env.call_toll.remote("echo")

from aenv_ray.client.gateway import Gateway
from aenv_ray.trajectories import read

def ask(gateway: Gateway) -> None:
    reveal_type(gateway.pools())
    reveal_type(gateway.hub())
    reveal_type(read("run.jsonl").to_ray())
"""


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> str:
    program = tmp_path_factory.mktemp("user") / "program.py"
    program.write_text(PROGRAM)
    cache = ROOT / ".mypy_cache" / "user_program"
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--strict", f"--cache-dir={cache}", program.name],
        cwd=program.parent, text=True, capture_output=True, check=False,
    )  # fmt: skip
    assert not done.stderr, done.stderr
    return done.stdout


@pytest.mark.parametrize(
    ("line", "type_"),
    [
        (8, "aenv_ray.models.ToolResult"),
        (10, "aenv_ray.models.ToolResult"),
        (11, "list[aenv_ray.models.ExecResult]"),
        (12, "bytes"),
        (13, "ray.includes.object_ref.ObjectRef[None]"),
        (24, "list[aenv_ray.client.gateway_records.PoolAnswer]"),
        (25, "aenv_ray.client.gateway_records.HubAnswer"),
        (26, "ray.data.dataset.Dataset"),
    ],
)
def test_results_have_their_type(report: str, line: int, type_: str) -> None:
    revealed = dict(re.findall(r':(\d+): note: Revealed type is "(.*)"', report))
    assert revealed[str(line)] == type_


@pytest.mark.parametrize(
    ("line", "error"),
    [
        (14, 'Unexpected keyword argument "argument"'),
        (15, 'incompatible type "int"; expected "str"'),
        (16, 'Missing positional argument "name"'),
        (17, "not callable"),
        (18, '"EnvHandle" has no attribute "call_toll"'),
    ],
)
def test_wrong_calls_are_errors(report: str, line: int, error: str) -> None:
    (found,) = re.findall(rf"^.*:{line}: error: (.*)$", report, re.MULTILINE)
    assert error in found


def test_correct_calls_have_no_errors(report: str) -> None:
    lines = {int(line) for line in re.findall(r":(\d+): error:", report)}
    assert lines == {14, 15, 16, 17, 18}


UNTYPED = {
    "call_function": "data of the environment",
    "call_reward": "data of the environment",
    "read_result": "data of the environment",
    "data": "a response before it is read as a record",
    "answer": "a response before it is read as a record",
    "read_envelope": "a response before it is read as a record",
    "optional": "a module that may be missing",
    "pyarrow": "a module that may be missing",
    "storable": "any JSON value",
}
"""Public functions whose result has no type, and why."""


def untyped(body: list[ast.stmt]) -> Iterator[str]:
    """Yield the names of the public functions and methods that return Any, also in a collection."""
    for node in body:
        if isinstance(node, ast.ClassDef):
            yield from untyped(node.body)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            result = "" if node.returns is None else ast.unparse(node.returns)
            if not node.name.startswith("_") and re.match(r"(list\[|tuple\[)?Any\b", result):
                yield node.name


def test_public_results_have_a_type() -> None:
    files = [
        path
        for part in ("client", "trajectories")
        for path in (ROOT / "aenv_ray" / part).rglob("*.py")
    ]
    assert {
        name for path in files for name in untyped(ast.parse(path.read_text()).body)
    } == UNTYPED.keys()
