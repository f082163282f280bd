"""The Python of an instance in a pod, which waits prepared until it is told what to run."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from aenv_ray.engines.kubernetes import bootstrap
from aenv_ray.engines.kubernetes.bootstrap import PREPARE

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="pods run on Linux")

_REPORT = """
import json, os, resource, sys
names = sorted(name for name in globals() if not name.startswith("__"))
print(json.dumps({
    "argv": sys.argv, "names": names, "variables": dict(os.environ), "was_prepared":
    "asyncio" in sys.modules, "seed": sys.flags.hash_randomization,
    "file_bytes": resource.getrlimit(resource.RLIMIT_FSIZE)[0],
}))
"""
_COMMAND = [sys.executable, "-S", "-P"]


def run(variables: Mapping[str, str], usual: Mapping[str, str]) -> dict[str, Any]:
    ours, its = socket.socketpair()
    with ours, its:
        process = subprocess.Popen(
            [*_COMMAND, "-c", PREPARE, str(its.fileno())],
            env=dict(usual), pass_fds=[its.fileno()], stdout=subprocess.PIPE,
        )  # fmt: skip
        order = {
            "command": _COMMAND, "code": _REPORT, "arguments": ["--level", "3"],
            "variables": dict(variables), "file_bytes": 1 << 20,
        }  # fmt: skip
        data = json.dumps(order).encode()
        ours.sendall(len(data).to_bytes(8, "big") + data)
        out, _ = process.communicate(timeout=60)
    assert process.returncode == 0
    return dict(json.loads(out))


@pytest.mark.parametrize(
    ("more", "is_prepared"),
    [({"COLOUR": "blue"}, True), ({"PYTHONHASHSEED": "0"}, False), ({"TZ": "Asia/Tokyo"}, False)],
)
def test_it_runs_its_order_and_starts_anew_for_what_only_a_start_reads(
    more: dict[str, str], is_prepared: bool
) -> None:
    """Either way, the code sees its own variables and arguments and nothing of the preparation."""
    usual = {"LANG": "C.UTF-8", "PATH": os.environ["PATH"]}
    found = run({**usual, **more}, {**usual, "STALE": "1"})
    assert found["was_prepared"] is is_prepared
    assert found["variables"].items() >= {**usual, **more}.items()
    assert "STALE" not in found["variables"]
    assert found["argv"] == ["-c", "--level", "3"]
    assert found["file_bytes"] == 1 << 20
    assert not {"take", "prepare", "code", "socket"} & set(found["names"])
    assert found["seed"] == ("PYTHONHASHSEED" not in more)


def test_it_ends_with_the_process_that_started_it() -> None:
    ours, its = socket.socketpair()
    with its:
        process = subprocess.Popen(
            [*_COMMAND, "-c", PREPARE, str(its.fileno())], pass_fds=[its.fileno()]
        )
    ours.close()
    assert process.wait(timeout=60) == 0


_LEAVE = """
import json, os, runpy, sys
sys.path.insert(0, sys.argv[2])
runpy.run_path(sys.argv[1])["leave_variables_of_image"]()
from aenv_ray.runtime.system import carried_python
carried_python.leave_variables_of_image()
print(json.dumps([dict(os.environ), carried_python.variables_for("sh")]))
"""


@pytest.mark.parametrize("options", [["-I"], []])
def test_a_python_that_we_uploaded_leaves_variables_of_the_image_that_load_code(
    options: list[str],
) -> None:
    """D19: an agent may change what these name. Commands have them, and the image's own Python."""
    loading = {
        "LD_PRELOAD": "/missing.so", "OPENSSL_CONF": "/missing.cnf", "GCONV_PATH": "/missing",
        "LOCPATH": "/missing", "GLIBC_TUNABLES": "", "LD_AUDIT": "/missing.so",
    }  # fmt: skip
    file = str(bootstrap.__file__)
    command = [sys.executable, *options, "-c", _LEAVE, file, str(Path(file).parents[3])]
    variables = {"PATH": os.environ["PATH"], "LD_LIBRARY_PATH": "/missing", **loading}
    done = subprocess.run(command, env=variables, capture_output=True, check=True, timeout=60)
    own, of_commands = json.loads(done.stdout)
    assert own.keys() & loading.keys() == (set() if options else loading.keys())
    assert own["LD_LIBRARY_PATH"] == "/missing"
    assert of_commands.items() >= variables.items()
    assert "AENV_IMAGE_VARIABLES" not in of_commands
