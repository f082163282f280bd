"""The plugin of pytest, as the output of the tests shows it: not at all."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

from conftest import PROJECT

OTHER_PLUGIN = """
import pytest

def pytest_collection_modifyitems(items):
    for item in items:
        item.known = True

@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item):
    yield
    item.known
"""


def test_other_plugins_do_not_warn_of_the_tests_that_it_adds(tmp_path: Path) -> None:
    """They may not know tests that were not collected."""
    (tmp_path / "aenv_report.py").write_text((PROJECT / "programs/report_plugin.py").read_text())
    (tmp_path / "other.py").write_text(OTHER_PLUGIN)
    (tmp_path / "test_a.py").write_text("def test_a(): pass\n")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind("")  # the kernel chooses a name that is not in the file system
        listener.listen()
        name = listener.getsockname()[1:].decode()
        variables = {"PATH": os.defpath, "PYTHONPATH": str(tmp_path), "AENV_REPORT": name}
        listener.settimeout(60.0)
        process = subprocess.Popen(
            [sys.executable, "-m", "pytest", "-p", "aenv_report", "-p", "other", "test_a.py"],
            env=variables, cwd=tmp_path, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        connection, _ = listener.accept()
        with connection:
            connection.sendall(b"\n")  # pytest may start
            output, _ = process.communicate(timeout=60.0)
            assert b'"hides_failures": false' in connection.recv(1 << 16)
    assert process.returncode == 0
    assert "1 passed in" in output
    assert "warning" not in output
