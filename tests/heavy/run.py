"""Tests all adapters with their frameworks, those too large for CI included, and prints a table.

    ./test integrations --heavy [SUITE] [PYTEST ARGUMENTS]

The virtual environments are several GB and built once, so neither `./test` nor CI does it.
Frameworks that cannot be installed together have one each.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final
from xml.etree import ElementTree

from tests.fixtures.framework_suites import LIGHT, ROOT, TOOLS, Suite

HERE: Final = Path(__file__).parent
LIMIT_S: Final = 1200
_VERSIONS: Final = """
import importlib.metadata, json, sys
print(json.dumps([f"{name} {importlib.metadata.version(name)}" for name in sys.argv[1:]]))
"""

WITH_VERL: Final = ("test_verl.py",)
WITH_OPENENV: Final = ("test_openenv.py", "test_openenv_containers.py")
WITH_NEMO_GYM: Final = ("test_nemo_gym.py",)
WITH_AREAL: Final = ("test_areal.py",)
WITH_OPENRLHF: Final = ("test_openrlhf.py",)
APART: Final = WITH_VERL + WITH_OPENENV + WITH_NEMO_GYM + WITH_AREAL + WITH_OPENRLHF
_LEFT_OUT: Final = "python_version < '3'"
"""Marker of requirements that need CUDA, or are not needed."""
HEAVY: Final = (
    Suite(
        "trainers", HERE,
        ("trl", "gymnasium", "stable-baselines3", "rllib", "gem"),
        ("torch==2.13.0", *TOOLS),
        tuple(f"--ignore={name}" for name in APART),
    ),
    # Its hydra needs another antlr than gem's math-verify; its torch is that of verl[cpu].
    Suite("verl", HERE, ("verl",), ("torch==2.11.0", *TOOLS), WITH_VERL),
    Suite("openenv", HERE, ("openenv",), TOOLS, WITH_OPENENV),
    Suite(
        "nemo-gym", HERE, ("nemo-gym",), ("nemo-gym>=0.4", *TOOLS), WITH_NEMO_GYM,
        # Its servers with MCP need version 1 of mcp; ours are plain ones.
        overrides=("mcp>=2",), python="3.12",
    ),
    Suite(
        "areal", HERE, ("areal",), ("torch==2.13.0", *TOOLS), WITH_AREAL,
        overrides=(
            "torch==2.13.0",
            *(f"{name}; {_LEFT_OUT}" for name in ("torchaudio", "torchvision", "awex")),
        ),
    ),
    Suite(
        "openrlhf", HERE, ("openrlhf",), ("torch==2.13.0", *TOOLS), WITH_OPENRLHF,
        overrides=tuple(
            f"{name}; {_LEFT_OUT}" for name in ("flash-attn", "deepspeed", "bitsandbytes")
        ),
    ),
)  # fmt: skip


@dataclass(frozen=True)
class Double:
    """Tests of an adapter whose framework cannot run here, with a test double of it."""

    name: str
    of: str
    """What the double follows."""
    why: str
    """Why the framework itself is not tested."""
    tests: tuple[str, ...]
    """Paths in `tests/unit/integrations`."""


DOUBLES: Final = (
    Double("slime", "slime, August 2026", "it is not on PyPI", ("support/test_token_loop.py",)),
    Double("nemo-rl", "nemo-rl, August 2026", "it is not on PyPI", ("test_nemo_rl.py",)),
)


@dataclass(frozen=True)
class Row:
    """What the table says of a suite."""

    suite: str
    packages: str
    outcome: str
    code: int
    """Exit code of pytest; 1 if it did not run."""


def main(arguments: list[str]) -> int:
    """Run the suites, print the table, and return pytest's worst exit code.

    Args:
        arguments: Of pytest. The first may name a suite, to run only that one.
    """
    chosen: list[Suite | Double] = [*LIGHT, *HEAVY, *DOUBLES]
    if arguments and arguments[0] in {one.name for one in chosen}:
        chosen = [one for one in chosen if one.name == arguments[0]]
        arguments = arguments[1:]
    rows = []
    for one in chosen:
        sys.stdout.write(f"\n== {one.name}\n")
        sys.stdout.flush()
        is_double = isinstance(one, Double)
        rows.append(_run_double(one, arguments) if is_double else _run(one, arguments))
    sys.stdout.write(f"\n{_table(rows)}\n")
    return max(row.code for row in rows)


def _run(suite: Suite, arguments: Sequence[str]) -> Row:
    environment, refusal = suite.environment()
    if environment is None:
        return Row(suite.name, ", ".join(suite.frameworks), f"not installable: {refusal}", 1)
    python = str(environment / "bin" / "python")
    found = subprocess.run(
        [python, "-c", _VERSIONS, *suite.frameworks],
        capture_output=True, text=True, check=True, timeout=60,
    )  # fmt: skip
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as data:
        code, outcome = _pytest(
            [*suite.command(environment), *arguments], suite.directory,
            suite.variables(environment, Path(data)),
        )  # fmt: skip
    return Row(suite.name, ", ".join(json.loads(found.stdout)), outcome, code)


def _run_double(double: Double, arguments: Sequence[str]) -> Row:
    paths = [str(ROOT / "tests" / "unit" / "integrations" / name) for name in double.tests]
    command = [sys.executable, "-m", "pytest", "-q", *paths, *arguments]
    code, outcome = _pytest(command, ROOT, None)
    return Row(double.name, f"double of {double.of}: {double.why}", outcome, code)


def _pytest(
    command: list[str], directory: Path, variables: dict[str, str] | None
) -> tuple[int, str]:
    """Run pytest; return its exit code, and how many tests passed."""
    with tempfile.TemporaryDirectory() as reports:
        report = Path(reports) / "report.xml"
        try:
            done = subprocess.run(
                [*command, f"--junitxml={report}"], cwd=directory, env=variables, check=False,
                timeout=LIMIT_S,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            return 1, f"did not end within {LIMIT_S} s"
        if not report.exists():
            return done.returncode or 1, f"pytest ended with {done.returncode}"
        [counts] = ElementTree.parse(report).getroot().iter("testsuite")
    number = {
        name: int(counts.get(name, "0")) for name in ("tests", "failures", "errors", "skipped")
    }
    failed = number["failures"] + number["errors"]
    told = [f"{number['tests'] - failed - number['skipped']} passed"]
    told += [f"{failed} failed"] if failed else []
    told += [f"{number['skipped']} skipped"] if number["skipped"] else []
    return done.returncode, f"{', '.join(told)} in {float(counts.get('time', '0')):.0f} s"


def _table(rows: Sequence[Row]) -> str:
    lines = [("suite", "outcome", "packages")]
    lines += [(row.suite, row.outcome, row.packages) for row in rows]
    widths = [max(len(line[column]) for line in lines) for column in (0, 1)]
    return "\n".join(
        f"{name:<{widths[0]}}  {outcome:<{widths[1]}}  {packages}"
        for name, outcome, packages in lines
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
