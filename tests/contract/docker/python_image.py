"""A stand-in for `python:3.12-slim`: what the Dockerfiles of environments build on."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path
from typing import Final

from uv import find_uv_bin

from tests.contract.docker.docker_node import base_image, docker

_FILE: Final = """\
FROM {base}
COPY pip /usr/local/lib/python3.11/dist-packages
COPY wheels /wheels
COPY program /usr/local/bin/pip
ENV PIP_NO_INDEX=1 PIP_FIND_LINKS=/wheels PIP_BREAK_SYSTEM_PACKAGES=1
"""
_PROGRAM: Final = "#!/usr/bin/python3\nfrom pip._internal.cli.main import main\n\nexit(main())\n"


@cache
def python_image(*downloads: str) -> str:
    """Return an image with Python 3.11 and pip, which finds packages without a network.

    Args:
        downloads: Arguments of one ``pip download`` each, which runs on this machine.
    """
    content = repr((base_image(), _FILE, _PROGRAM, downloads)).encode()
    name = f"aenv-test-python:{hashlib.sha256(content).hexdigest()[:12]}"
    if docker("images", "--quiet", name):
        return name
    with tempfile.TemporaryDirectory() as directory:
        context = Path(directory)
        pip, wheels = context / "pip", context / "wheels"
        wheels.mkdir()
        _run(find_uv_bin(), "pip", "install", "--quiet", "--target", str(pip), "pip")
        for words in downloads:
            _run(
                sys.executable, "-m", "pip", "download", "--quiet", "--dest", str(wheels),
                "--python-version", "3.11", "--only-binary", ":all:", *words.split(),
                python_path=pip,
            )  # fmt: skip
        program = context / "program"
        program.write_text(_PROGRAM)
        program.chmod(0o755)
        (context / "Dockerfile").write_text(_FILE.format(base=base_image()))
        docker("build", "--quiet", "--tag", name, directory)
    return name


def _run(*command: str, python_path: Path | None = None) -> None:
    variables = {} if python_path is None else {"PYTHONPATH": str(python_path)}
    done = subprocess.run(
        command, env={**os.environ, **variables}, capture_output=True, text=True, check=False,
        timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
