"""What the grader knows about the processes of the agent, and about the files that pytest reads."""

from __future__ import annotations

import base64
import io
import os
import subprocess
import sys
import tarfile
from hashlib import sha256
from pathlib import Path
from typing import Any

import grader
import pytest

_EXIT = {"x86_64": 60, "aarch64": 93}[os.uname().machine]
_WITHOUT_MAIN_THREAD = (
    "import ctypes, threading\n"
    "threading.Thread(target=input).start()\n"
    f"ctypes.CDLL(None).syscall({_EXIT}, 0)\n"
)


def test_a_process_whose_main_thread_has_ended_is_left() -> None:
    """The kernel reports its state as that of a process that has ended."""
    with subprocess.Popen(
        [sys.executable, "-c", _WITHOUT_MAIN_THREAD], stdin=subprocess.PIPE
    ) as child:
        try:
            while ") Z" not in Path(f"/proc/{child.pid}/stat").read_text():
                assert child.poll() is None
            assert child.pid in grader._others()
            child.kill()
            os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
            assert child.pid not in grader._others()
        finally:
            child.kill()


def _archive(**files: str) -> str:
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w") as tar:
        for name, text in files.items():
            member = tarfile.TarInfo(f"{name}.py")
            member.size = len(text)
            tar.addfile(member, io.BytesIO(text.encode()))
    return base64.b64encode(content.getvalue()).decode()


def _read(**files: str) -> list[list[dict[str, Any]]]:
    return [
        [
            {"file": path.replace("__", "/") + ".py", "digest": sha256(text.encode()).hexdigest()}
            for path, text in files.items()
        ]
    ]


@pytest.mark.parametrize(
    ("read", "copied", "replaced"),
    [
        ({"__tests__test_a": "1", "__app__test_own": "5"}, True, []),
        ({"__app__tests__test_a": "1", "__app__own__test_a": "5"}, True, []),
        ({"__tests__test_a": "5"}, False, ["/tests/test_a.py"]),
        ({"__tests__test_b": "2", "__app__tests__test_a": "5"}, True, ["/app/tests/test_a.py"]),
        ({"__app__tests__test_own": "5"}, True, ["/app/tests/test_own.py"]),
        ({"__app__tests__test_own": "5", "__app__helper": "3"}, True, ["/app/tests/test_own.py"]),
        ({"__app__tests__test_a": "5"}, False, []),
        ({}, True, []),
    ],
)
def test_files_that_pytest_reads_in_the_place_of_the_tests_are_found(
    read: dict[str, str], copied: bool, replaced: list[str]
) -> None:
    """The image of a task may have copies of its tests, and the agent may have changed them."""
    archive = _archive(test_a="1", test_b="2", helper="3")
    assert grader.replaced_tests(_read(**read), archive, copied) == replaced
