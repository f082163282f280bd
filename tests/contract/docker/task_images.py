"""An image with pytest for tasks of terminal-bench, and the tasks themselves."""

from __future__ import annotations

import hashlib
import importlib.util
import shutil
import tempfile
from functools import cache
from pathlib import Path

import pytest

from tests.contract.docker.docker_node import base_image, docker

_MODULES = ("pytest", "_pytest", "pluggy", "iniconfig", "packaging", "pygments", "py")
_FILE = """\
FROM {base}
COPY site /usr/local/lib/python3.11/dist-packages
COPY pytest /usr/local/bin/pytest
RUN chmod 755 /usr/local/bin/pytest
WORKDIR /app
"""
_PYTEST = "#!/usr/bin/python3\nimport sys\nimport pytest\nsys.exit(pytest.console_main())\n"

TEST_OUTPUTS = """\
import subprocess
from pathlib import Path


def test_exists():
    assert Path("/app/sum").exists()


def test_sum():
    assert Path("/app/sum").read_text() == "4\\n"


def test_program():
    program = Path("/app/run.sh")
    assert not program.exists() or subprocess.run(["sh", program], check=False).returncode == 0
"""
HARBOR_TEST = """\
#!/bin/bash
source $HOME/.local/bin/env 2>/dev/null
pytest /tests/test_outputs.py -rA
if [ $? -eq 0 ]; then echo 1 >/logs/verifier/reward.txt; else echo 0 >/logs/verifier/reward.txt; fi
"""


@cache
def task_image() -> str:
    """Return an image with Python and the pytest that runs these tests; made once."""
    content = f"{base_image()}{_FILE}{_PYTEST}{pytest.__version__}{_MODULES}2"
    name = f"aenv-test-tbench:{hashlib.sha256(content.encode()).hexdigest()[:12]}"
    if docker("images", "--quiet", name):
        return name
    with tempfile.TemporaryDirectory() as directory:
        context = Path(directory)
        (context / "site").mkdir()
        for name_of_module in _MODULES:
            spec = importlib.util.find_spec(name_of_module)
            assert spec is not None
            assert spec.origin is not None
            source = Path(spec.origin)
            if source.name == "__init__.py":
                ignored = shutil.ignore_patterns("__pycache__")
                shutil.copytree(
                    source.parent, context / "site" / source.parent.name, ignore=ignored
                )
            else:
                shutil.copy(source, context / "site")
        for facts in Path(pytest.__file__).parent.parent.glob("pluggy-*.dist-info"):
            shutil.copytree(facts, context / "site" / facts.name)  # pytest prints its version
        (context / "pytest").write_text(_PYTEST)
        (context / "Dockerfile").write_text(_FILE.format(base=base_image()))
        docker("build", "--quiet", "--tag", name, directory)
    return name
