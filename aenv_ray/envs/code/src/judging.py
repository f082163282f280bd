"""Starts a judge for a solution, and reads its report."""

from __future__ import annotations

import ast
import contextlib
import functools
import itertools
import marshal
import os
import secrets
import shutil
import signal
import subprocess
import sys
from enum import StrEnum
from pathlib import Path
from typing import Any, Final, Literal

from programs import communicate
from pydantic import BaseModel, ConfigDict, Field, field_validator

_MODULES: Final = (
    *("plain", "process", "solution", "starter", "link", "script", "program", "main"),
)
"""The modules of the judge, each after those that it imports."""
_START: Final = """
import marshal, os, sys
size, data = int(sys.argv.pop()), b""
while len(data) < size:
    data += os.read(0, size - len(data))
for name, code in marshal.loads(data):
    module = sys.modules[name] = type(sys)(name)
    if name == "judge":
        module.__path__ = []
    else:
        setattr(sys.modules["judge"], name[6:], module)
    exec(code, module.__dict__)
sys.modules["judge.main"].main()
"""
_TEMPORARY: Final = os.environ.get("TMPDIR") or "/tmp"
"""Where programs run. `tempfile.gettempdir` tries directories: a template has none that is
writable, and an agent can make them unusable."""
_MARGIN_S: Final = 3.0
"""How long before the end of its call a judge is ended."""
_LEAST_S: Final = 2.0
_HEADER_BYTES: Final = 8


def _program() -> bytes:
    """Return the judge's code; read at import, because the project is hidden later."""
    directory = Path(__file__).parent / "judge"
    codes = [("judge", compile("", "judge", "exec"))]
    for name in _MODULES:
        path = directory / f"{name}.py"
        codes.append((f"judge.{name}", compile(path.read_text("utf-8"), str(path.name), "exec")))
    return marshal.dumps(codes)


_CODE: Final = _program()
"""The first that a judge reads from its standard input; the job follows."""


class Kind(StrEnum):
    """How a test examines a solution."""

    SCRIPT = "script"
    """Python code that calls the solution and asserts what it returns."""
    CALL = "call"
    """A call with arguments, whose result must equal an expected value."""
    PROGRAM = "program"
    """The solution runs as a program; what it prints is compared."""


class Test(BaseModel):
    """A test of a solution."""

    __test__ = False  # for pytest

    model_config = ConfigDict(frozen=True, extra="forbid")

    kind: Kind
    setup: str = ""
    """For a script: code that runs before it, such as imports."""
    source: str = ""
    """For a script: its code."""
    names: tuple[str, ...] = ()
    """For a script: the functions and classes of the solution that it uses."""
    function: str = ""
    """For a call: the function's name."""
    is_method: bool = False
    """For a call: whether it is a method of the class ``Solution``."""
    arguments: tuple[Any, ...] = ()
    """The arguments of a call."""
    input: str = ""
    """For a program: its standard input."""
    expected: Any = None
    """For a call: the result, as JSON; for a program: what it prints."""

    @field_validator("setup", "source")
    @classmethod
    def _can_run(cls, code: str) -> str:
        """Refuse what no solution could pass, instead of scoring it."""
        try:
            statements = ast.parse(code).body
        except SyntaxError as exc:
            raise ValueError(f"it is not Python: {exc}") from None
        for node in statements:
            names = [one.name for one in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom):
                names = [node.module or "."]
            for name in names:
                if name.partition(".")[0] not in sys.stdlib_module_names:
                    raise ValueError(f"it imports {name}; the judge has the standard library only")
        return code


class Limits(BaseModel):
    """Limits of one test."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    cpu_s: int = Field(default=6, ge=1, le=600)
    """Seconds of CPU. In time, a test may take five times as long and ten seconds more, and what it
    waits for a CPU does not count, so that a busy node does not change a verdict."""
    memory_mib: int = Field(default=1024, ge=64)
    """Memory of the solution's process."""

    @property
    def wall_s(self) -> float:
        """Seconds that a test may take."""
        return 5.0 * self.cpu_s + 10.0


class CaseOutcome(BaseModel):
    """The outcome of a test."""

    model_config = ConfigDict(frozen=True)

    verdict: Literal["passed", "failed", "error", "timeout", "memory", "skipped"]
    """``failed``: a wrong result; ``error``: an exception or an unexpected end; ``skipped``: an
    earlier test took too long."""
    detail: str | None = None
    expected: str | None = None
    """The expected value, shortened; only of a wrong result."""
    got: str | None = None
    cpu_s: float = 0.0


class JudgeEnded(Exception):
    """The judge gave no report: the solution has ended or stopped it, or took all the time."""


def judge(source: str, tests: list[Test], limits: Limits, available_s: float) -> list[CaseOutcome]:
    """Run tests against a solution and return their verdicts.

    Args:
        source: The solution's code.
        tests: At least one.
        limits: The limits of each test.
        available_s: Seconds until the judge is ended.

    Raises:
        JudgeEnded: There are no verdicts.
        RuntimeError: The judge could not start, or the node could not run the tests.
        TimeoutError: Too little time is left for any test.
    """
    total_s = available_s - _MARGIN_S
    if total_s < _LEAST_S:
        raise TimeoutError(
            f"{available_s:.1f} s are left, too few to run a test: give it more time"
        )
    name = f"test-{secrets.token_hex(8)}"
    job = {
        "source": source,
        "tests": [test.model_dump(mode="json") for test in tests],
        "path": f"{_TEMPORARY}/{name}",
        "cpu_s": limits.cpu_s,
        "wall_s": limits.wall_s,
        "memory_bytes": limits.memory_mib << 20,
        "total_s": total_s - 1,
    }
    process = subprocess.Popen(
        # Isolated: no variables, no site-packages, no module of the working directory.
        [sys.executable, "-I", "-S", "-c", _START, str(len(_CODE))],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        cwd="/",
        env={"LANG": "C.UTF-8", "PATH": "/usr/local/bin:/usr/bin:/bin"},
        start_new_session=True,
    )
    try:
        look = functools.partial(_refuse_stopped, process.pid)
        given = _CODE + _framed(job)
        (report, error), has_ended = communicate(process, given, total_s, sys.maxsize, look)
        if not (has_ended or _is_complete(report)):
            raise JudgeEnded("the solution took all the time of its tests")
    finally:
        _end(process)
        for path in Path(_TEMPORARY).glob(f"{name}-*"):
            shutil.rmtree(path, ignore_errors=True)
    if len(report) > _HEADER_BYTES:
        found = marshal.loads(report[_HEADER_BYTES:])
        return [CaseOutcome.model_validate(one) for one in found]
    if process.returncode > 0:
        raise RuntimeError(f"the judge failed: {error.decode(errors='replace')[-2000:]}")
    raise JudgeEnded(f"the solution ended its judge: signal {-process.returncode}")


def _refuse_stopped(pid: int) -> None:
    if _is_stopped(pid):
        raise JudgeEnded("the solution stopped its judge")


def _is_stopped(pid: int) -> bool:
    """Whether a signal has stopped a judge, or its child that starts solutions."""
    pids = [str(pid)]
    with contextlib.suppress(OSError):
        pids += Path(f"/proc/{pid}/task/{pid}/children").read_text("ascii").split()
    for one in pids:
        with contextlib.suppress(OSError):  # it has ended
            state = Path(f"/proc/{one}/stat").read_bytes().rpartition(b")")[2].split()[0]
            if state == b"T":
                return True
    return False


def _framed(job: dict[str, Any]) -> bytes:
    data = marshal.dumps(job)
    return len(data).to_bytes(_HEADER_BYTES, "big") + data


def _is_complete(report: bytes) -> bool:
    return len(report) == _HEADER_BYTES + int.from_bytes(report[:_HEADER_BYTES], "big")


def _end(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    for stream in (process.stdin, process.stdout, process.stderr):
        if stream is not None:
            stream.close()


def with_preamble(preamble: str, submission: str) -> str:
    """Return the solution's code: a submission may be a whole program, or continue the preamble.

    Args:
        preamble: The beginning that the task gives, such as imports and the head of a function.
        submission: What the agent has submitted.
    """
    if not preamble:
        return submission
    # The second one is for code that must come first, such as an import from __future__.
    for source in itertools.chain([f"{preamble}\n{submission}"], [submission]):
        with contextlib.suppress(SyntaxError, ValueError, RecursionError, MemoryError):
            compile(source, "solution.py", "exec", dont_inherit=True)
            return source
    return f"{preamble}\n{submission}"
