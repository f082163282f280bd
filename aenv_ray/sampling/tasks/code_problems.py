"""Programming problems in the formats of HumanEval, MBPP and LiveCodeBench, as tasks of ``code``.

The formats are recognized by their fields. Hidden tests become arguments of the reward, which reach
a sandbox only for grading; the agent gets the public tests.

Sources: the data files of https://github.com/openai/human-eval,
https://github.com/google-research/google-research/tree/master/mbpp, and the loader
``lcb_runner/benchmarks/code_generation.py`` of https://github.com/LiveCodeBench/LiveCodeBench.
"""

from __future__ import annotations

import ast
import base64
import binascii
import builtins
import io
import json
import pickle
import sys
import warnings
import zlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

from aenv_ray.errors import ConfigError

_MOST_TEST_BYTES: Final = 512 * 1024 * 1024
"""Size limit of the tests of one problem after decompression."""
GRADING_S: Final = 600.0
"""The longest that all tests of a problem may take, as in the environment. Their own limits exclude
what they wait for a CPU, so on a busy node they must not end before."""
_LIVE_CODE_BENCH_MODULES: Final = (
    *("string", "re", "datetime", "collections", "heapq", "bisect", "copy", "math", "random"),
    *("statistics", "itertools", "functools", "operator", "io", "sys", "json", "builtins"),
    "typing",
)
"""Modules that its harness imports for every solution, with all their names."""
_LIVE_CODE_BENCH_RECURSION: Final = 50_000
"""The recursion limit of its harness, which sets no limit of memory."""
_LIVE_CODE_BENCH_LIMITS: Final = {"memory_mib": 1536}
"""Most of what an instance of ``code`` has."""

ProblemRow = Mapping[str, Any]


def as_task(row: ProblemRow, where: str) -> dict[str, Any] | None:
    """Return a problem as the fields of a task; None if the row has none of the formats.

    Args:
        row: A row of a data set.
        where: Location of the row, for messages.

    Raises:
        ConfigError: A field has the wrong type, the tests are malformed, or one of several fields
            that tell a format is missing.
    """
    for fields, convert in _FORMATS.items():
        if all(field in row for field in fields):
            try:
                return convert(row)
            except (TypeError, ValueError, KeyError, AttributeError) as exc:
                raise ConfigError(
                    f"{where}: not a valid {convert.__name__.strip('_')} problem: {exc}",
                    hint="correct this row, or convert it before",
                ) from None
    for fields, convert in _FORMATS.items():
        missing = [field for field in fields if field not in row]
        if len(missing) == 1 and len(fields) > 2:
            raise ConfigError(
                f"{where}: {missing[0]} is missing; with it, this is a "
                f"{convert.__name__.strip('_')} problem",
                hint="a row of another format needs an id: --task-field id=COLUMN",
            )
    return None


def _humaneval(row: ProblemRow) -> dict[str, Any]:
    """Convert ``prompt``, ``test`` with a function ``check``, ``entry_point``, a solution."""
    name, prompt = _text(row, "entry_point"), _text(row, "prompt")
    test: dict[str, Any] = {
        "kind": "script",
        "setup": _completed(prompt),
        "source": f"{_text(row, 'test')}\n\ncheck({name})\n",
        "names": [name],
    }
    _parsed(test["source"], "test")
    instruction = (
        f"Complete the Python function {name}. Submit the whole function, or only what "
        f"follows its docstring.\n\n{prompt}"
    )
    return _task(
        str(row["task_id"]), instruction, [test], row.get("canonical_solution"), preamble=prompt
    )


def _mbpp(row: ProblemRow) -> dict[str, Any]:
    """Convert ``text`` or ``prompt``, ``code``, ``test_list``, and code that prepares the tests."""
    asserts = [str(one) for one in _list(row, "test_list")]
    code = row.get("code")
    own = _parsed(code, "code").body if isinstance(code, str) else []
    # Tests use what the solution imports, and take the classes that it defines.
    imports = [ast.unparse(one) for one in own if isinstance(one, ast.Import | ast.ImportFrom)]
    prepared = [*map(str, row.get("test_imports") or ()), str(row.get("test_setup_code") or "")]
    defined = {
        one.name for one in own if isinstance(one, ast.FunctionDef | ast.ClassDef)
    } or _called("\n".join(asserts))
    setup = "\n".join(one.replace("\r\n", "\n") for one in prepared if one)
    tests: list[dict[str, Any]] = [
        {
            "kind": "script",
            "setup": "\n".join(imports),
            "source": f"{setup}\n{one}",
            "names": sorted(defined),
        }
        for one in asserts
    ]
    for test in tests:
        _parsed(test["source"], "test_list")
    description = _text(row, "text" if "text" in row else "prompt")
    shown = "\n".join(asserts)
    instruction = f"{description}\nThe solution must pass these tests:\n\n{shown}"
    return _task(f"MBPP/{row['task_id']}", instruction, tests, code, public=tests)


def _livecodebench(row: ProblemRow) -> dict[str, Any]:
    """Convert ``question_content``, ``starter_code``, and public and private test cases."""
    metadata = _data(row.get("metadata") or "{}")
    function = metadata.get("func_name")
    public = [_case(one, function) for one in _cases(row["public_test_cases"])]
    private = [_case(one, function) for one in _cases(row["private_test_cases"])]
    starter = str(row.get("starter_code") or "")
    how = (
        f"Complete this Python code:\n\n{starter}"
        if starter
        else "Write a Python program that reads standard input and writes standard output."
    )
    title = str(row.get("question_title") or "")
    return _task(
        str(row["question_id"]),
        f"{title}\n\n{_text(row, 'question_content')}\n\n{how}".strip(),
        [*public, *private],
        None,
        preamble="".join(f"from {one} import *\n" for one in _LIVE_CODE_BENCH_MODULES)
        + "".join(f"import {one}\n" for one in _LIVE_CODE_BENCH_MODULES)
        + f"sys.setrecursionlimit({_LIVE_CODE_BENCH_RECURSION})\n",
        public=public,
        limits=_LIVE_CODE_BENCH_LIMITS,
    )


_FORMATS: Final[Mapping[tuple[str, ...], Callable[[ProblemRow], dict[str, Any]]]] = {
    ("task_id", "prompt", "test", "entry_point"): _humaneval,
    ("task_id", "test_list"): _mbpp,
    ("question_id", "question_content", "public_test_cases", "private_test_cases"): _livecodebench,
}
"""The fields that tell a format."""


def _task(
    name: str,
    instruction: str,
    tests: list[dict[str, Any]],
    solution: Any,
    *,
    preamble: str = "",
    public: list[dict[str, Any]] | None = None,
    limits: Mapping[str, int] | None = None,
) -> dict[str, Any]:
    if not tests:
        raise ValueError("it has no tests")
    given: dict[str, Any] = {"preamble": preamble} if preamble else {}
    if limits:
        given["limits"] = dict(limits)
    needed = sorted({name for test in tests for name in _foreign_modules(test)})
    why = f"its tests import {', '.join(needed)}; the judge has the standard library only"
    reference = [{"tool": "submit_solution", "arguments": {"code": solution}}]
    return {
        "id": name,
        "instruction": instruction,
        "public_tests": public or [],
        "reward": {
            "name": "grade",
            "arguments": {"tests": tests, **given},
            "timeout_s": GRADING_S,
        },
        **given,
        **({"reference": reference} if isinstance(solution, str) else {}),
        **({"unsupported": why} if needed else {}),
    }


def _foreign_modules(test: Mapping[str, Any]) -> Iterator[str]:
    """Yield the modules outside the standard library that a script needs when it begins."""
    for field in ("setup", "source"):
        for node in _parsed(test.get(field, ""), field).body:
            if isinstance(node, ast.Import):
                names = [one.name for one in node.names]
            elif isinstance(node, ast.ImportFrom):
                names = [node.module or "."]
            else:
                continue
            for name in names:
                top = name.partition(".")[0]
                if top not in sys.stdlib_module_names:
                    yield top or name


def _case(case: Any, function: str | None) -> dict[str, Any]:
    given, expected = str(case["input"]), str(case["output"])
    if case["testtype"] == "stdin":
        return {"kind": "program", "input": given, "expected": expected}
    if case["testtype"] != "functional" or not function:
        raise ValueError(f"a test of type {case['testtype']!r} without a function")
    return {
        "kind": "call",
        "function": function,
        "is_method": True,
        "arguments": [json.loads(line) for line in given.split("\n")],
        "expected": json.loads(expected),
    }


def _cases(field: Any) -> list[Any]:
    """Return test cases: a list, JSON text, or JSON text that is pickled, compressed and base64."""
    if isinstance(field, list):
        return field
    try:
        found = json.loads(field)
    except ValueError:
        found = json.loads(_unpacked(field))
    if not isinstance(found, list):
        raise TypeError("test cases are not a list")
    return found


def _unpacked(text: str) -> str:
    try:
        unpacker = zlib.decompressobj()
        data = unpacker.decompress(base64.b64decode(text, validate=True), _MOST_TEST_BYTES)
        if unpacker.unconsumed_tail:
            raise ValueError(f"test cases have more than {_MOST_TEST_BYTES} bytes")
        found = _TextOnly(io.BytesIO(data)).load()
    except (binascii.Error, zlib.error, pickle.UnpicklingError, EOFError) as exc:
        raise ValueError(f"test cases are neither JSON nor compressed JSON: {exc}") from None
    return str(found)


class _TextOnly(pickle.Unpickler):
    """Reads text, and refuses everything that would run code."""

    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"test cases contain {module}.{name}")


def _data(field: Any) -> dict[str, Any]:
    found = json.loads(field) if isinstance(field, str) else field
    if not isinstance(found, dict):
        raise TypeError("metadata is not an object")
    return found


def _text(row: ProblemRow, field: str) -> str:
    value = row[field]
    if not isinstance(value, str):
        raise TypeError(f"{field} is not text")
    return value


def _list(row: ProblemRow, field: str) -> list[Any]:
    value = row[field]
    if not isinstance(value, list) or not value:
        raise TypeError(f"{field} is not a list of tests")
    return value


def _parsed(code: str, field: str) -> ast.Module:
    try:
        return _tree(code)
    except SyntaxError as exc:
        raise ValueError(f"{field} is not Python: {exc}") from None


def _tree(code: str) -> ast.Module:
    """Parse code of a data set, without the warnings for escape sequences in MBPP's strings."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return ast.parse(code)


def _completed(prompt: str) -> str:
    """Return a prompt as code that runs by itself: its last function may have no body yet."""
    try:
        _tree(prompt)
    except SyntaxError:
        with_body = f"{prompt.rstrip()}\n    pass\n"
        _parsed(with_body, "prompt")
        return with_body
    return prompt


def _called(code: str) -> set[str]:
    """Return the functions that code calls, except builtins and modules of Python."""

    def names() -> Iterator[str]:
        for node in ast.walk(_parsed(code, "test_list")):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                yield node.func.id

    return {one for one in names() if not hasattr(builtins, one)} - sys.stdlib_module_names
