"""What systemd says to the units of `clusters/local`, and Redis to the compose file's options."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import redis
import yaml

from aenv_ray.hub.redis.server import find_program
from tests.conftest import require
from tests.ray.faults import eventually
from tests.ray.nodes.machines import LOCAL


@pytest.mark.parametrize("role", ["head", "worker"])
def test_systemd_accepts_the_units(role: str, tmp_path: Path) -> None:
    has_systemd = shutil.which("systemd-analyze") is not None
    require("systemd", has_systemd, "systemd-analyze is not installed")
    name = f"aenv-ray-{role}.service"
    unit = tmp_path / name
    text = (LOCAL / name).read_text()
    unit.write_text(text.replace("/opt/aenv-ray/.venv/bin/python", sys.executable))
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", "--recursive-errors=no", str(unit)],
        capture_output=True, text=True, check=False, timeout=100,
    )  # fmt: skip
    assert [line for line in done.stderr.splitlines() if "aenv-ray" in line] == []
    assert done.returncode == 0, done.stderr


@pytest.mark.redis
def test_redis_accepts_the_options_of_the_compose_file(tmp_path: Path) -> None:
    program, _ = find_program(None)
    command = yaml.safe_load((LOCAL / "compose.yaml").read_text())["services"]["redis"]["command"]
    script, options = command[-1].split("redis-server /run/redis.conf ")
    words = re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", options).split()
    words[words.index("--dir") + 1] = str(tmp_path)
    (config,) = re.findall(r"printf '(.*?)\\n'", script)
    with subprocess.Popen(
        [program, "-", "--port", "0", "--unixsocket", "redis.sock", *words],
        cwd=tmp_path, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True,
    ) as process:  # fmt: skip
        try:
            assert process.stdin is not None
            process.stdin.write(config % "secret")
            process.stdin.close()
            path = tmp_path / "redis.sock"
            eventually(path.exists, 60.0, process.poll)
            with redis.Redis(unix_socket_path=str(path), password="secret") as client:
                wanted = {"appendfsync": "always", "appendonly": "yes", "requirepass": "secret"}
                assert wanted.items() <= client.config_get("*").items()
                assert int(client.config_get("maxmemory")["maxmemory"]) > 0
        finally:
            process.kill()
