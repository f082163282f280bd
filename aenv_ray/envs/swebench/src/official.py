"""Program: the official ``swebench`` package's specs and grading, for one request.

``python3 -I -c "$PROGRAM" DIRECTORY`` reads a JSON request from standard input and writes a JSON
answer. `DIRECTORY` has an installed package. Of its dependencies only those are loaded that specs
and log parsers use: the others build images, run containers and download data sets.

* ``{"do": "check", "specs": {"repo": …, "version": …, "log_parser": …}}``: nothing if it knows them
* ``{"do": "script", "instance": …}``: ``{"script": …}``, what runs the tests of an instance
* ``{"do": "grade", "instance": …, "patch": …, "log": …}``: the official report, and ``conflicts``,
  required tests whose lines in the log disagree

The answer has ``error`` if the package does not know the repository, version or log parser.
"""

from __future__ import annotations

import importlib
import json
import re
import sys
import tempfile
import types
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, Final

UNUSED: Final = ("datasets", "dotenv", "requests", "tqdm", "docker", "modal", "rich")
"""Packages that `swebench` imports and that neither specs nor log parsers use."""
FAILING: Final = ("FAILED", "ERROR")
CASE: Final = re.compile(r"(?:FAIL|ERROR): ((\S+ \(\S+\)).*|\S.*)")
"""How unittest and Django head the traceback of a test."""
FUNCTION: Final = re.compile(r"_+ \S+\.py:(\S+) _+|(test_\S+) [EF](?:\s+\[FAIL\])?")
"""How SymPy heads the traceback of a test, and reports its result."""


class UnknownError(Exception):
    """The package does not know what an instance names."""


class _Unused(types.ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *_, **__: None


def load(directory: Path) -> None:
    """Make the package of a directory importable, without what its ``__init__`` files import."""
    sys.path.insert(0, str(directory))
    for name in UNUSED:
        sys.modules[name] = _Unused(name)
    for name in ("swebench", "swebench.harness", "swebench.harness.test_spec"):
        package = types.ModuleType(name)
        package.__path__ = [str(directory.joinpath(*name.split(".")))]
        sys.modules[name] = package


def of(name: str) -> Any:
    """Return a module of the package."""
    return importlib.import_module(f"swebench.{name}")


# --- releases before 5: specs by repository and version -------------------------------------------


def specified(instance: dict[str, Any]) -> tuple[Any, Any]:
    """Return the test spec of an instance, and the parser of its logs.

    Raises:
        UnknownError: The package has no spec for the repository and version.
    """
    constants = of("harness.constants")
    repo, version = instance["repo"], instance["version"]
    expect_known(repo, version, "")
    specs = constants.MAP_REPO_VERSION_TO_SPECS[repo]
    commands = of("harness.test_spec.create_scripts").make_eval_script_list(
        instance,
        specs[version],
        "testbed",
        instance["directory"],
        instance["base_commit"],
        instance["test_patch"],
    )
    spec = of("harness.test_spec.test_spec").TestSpec(
        instance_id=instance["instance_id"],
        repo=repo,
        version=version,
        repo_script_list=[],
        eval_script_list=commands,
        env_script_list=[],
        arch="x86_64",
        FAIL_TO_PASS=instance["FAIL_TO_PASS"],
        PASS_TO_PASS=instance["PASS_TO_PASS"],
        language=constants.MAP_REPO_TO_EXT[repo],
        docker_specs={},
        namespace=None,
    )
    return spec, of("harness.log_parsers").MAP_REPO_TO_PARSER[repo]


# --- releases from 5 on: instances that bring their script and name their log parser --------------


def described(instance: dict[str, Any]) -> tuple[Any, Any]:
    """Return the test spec of an instance, and the parser of its logs.

    Raises:
        UnknownError: The package has no such log parser.
    """
    name = instance["log_parser"]
    expect_known("", "", name)
    row = {**instance, "image": ""}
    return of("harness.utils").make_test_spec(row), of("harness.log_parsers").PARSER_REGISTRY[name]


def expect_known(repo: str, version: str, log_parser: str) -> None:
    """Raise an error for a repository, version or log parser that the package does not know.

    Args:
        repo: Empty if an instance brings its own script.
        version: The version of the repository.
        log_parser: The log parser of an instance that brings its own script.

    Raises:
        UnknownError: It does not know it.
    """
    if repo:
        specs = of("harness.constants").MAP_REPO_VERSION_TO_SPECS.get(repo, {})
        if version not in specs:
            known = ", ".join(sorted(specs)) or "none"
            raise UnknownError(
                f"swebench has no specs for {repo} {version!r} (versions that it knows: {known}); "
                "give the rows a test_cmd, or an eval_script and a log_parser"
            )
    elif log_parser not in (parsers := of("harness.log_parsers").PARSER_REGISTRY):
        raise UnknownError(
            f"swebench has no log parser {log_parser!r}; it has {', '.join(sorted(parsers))}"
        )


def conflicts(parse: Callable[[str, Any], dict[str, str]], spec: Any, log: str) -> list[str]:
    """Return required tests that some line of a log reports as failed.

    The parsers keep the last line of a test, which the program under test may have written.
    """
    required = {*spec.FAIL_TO_PASS, *spec.PASS_TO_PASS}
    found = required.intersection(failures(log))
    for line in dict.fromkeys(log.splitlines()):
        if any(word in line for word in ("FAIL", "ERROR", "not ok", "[err]")):
            statuses = _parsed_line(parse, line, spec)
            found |= {name for name, status in statuses if status in FAILING and name in required}
    return sorted(found)


def failures(log: str) -> Iterator[str]:
    """Yield the tests that unittest, Django or SymPy report as failed where no parser looks.

    A program under test can print in the middle of a line with a result, but not of these.
    """
    lines = [line.strip() for line in log.splitlines()]
    for line, following in zip(lines, [*lines[1:], ""], strict=True):
        if case := CASE.fullmatch(line):
            yield from filter(None, (*case.groups(), following))  # a test may go by its docstring
        elif function := FUNCTION.fullmatch(line):
            yield function[1] or function[2]


def _parsed_line(parse: Any, line: str, spec: Any) -> Iterable[tuple[str, str]]:
    try:
        return list(parse(line, spec).items())
    except (IndexError, ValueError, KeyError):  # a parser that needs several lines
        return []


def grade(instance: dict[str, Any], patch: str, log: str) -> dict[str, Any]:
    """Return the official report of a log."""
    spec, parse = spec_of(instance)
    prediction = {"instance_id": spec.instance_id, "model_patch": patch, "model_name_or_path": ""}
    with tempfile.NamedTemporaryFile("w", suffix=".txt", encoding="utf-8", newline="") as file:
        file.write(log)
        file.flush()
        grading = of("harness.grading")
        reports = grading.get_eval_report(spec, prediction, file.name, include_tests_status=True)
        statuses, _ = grading.get_logs_eval(spec, file.name)
    report: dict[str, Any] = dict(reports[spec.instance_id])
    report["statuses"] = {name: str(status) for name, status in statuses.items()}
    report["conflicts"] = conflicts(parse, spec, log) if report["resolved"] else []
    return report


def spec_of(instance: dict[str, Any]) -> tuple[Any, Any]:
    """Return the test spec of an instance, and the parser of its logs."""
    return described(instance) if instance.get("eval_script") else specified(instance)


def answer(request: dict[str, Any]) -> dict[str, Any]:
    """Return the answer to a request."""
    try:
        if request["do"] == "check":
            expect_known(**request["specs"])
            return {}
        if request["do"] == "grade":
            return grade(request["instance"], request["patch"], request["log"])
        return {"script": spec_of(request["instance"])[0].eval_script}
    except UnknownError as exc:
        return {"error": str(exc)}


if __name__ == "__main__":
    load(Path(sys.argv[1]))
    json.dump(answer(json.load(sys.stdin)), sys.stdout)
