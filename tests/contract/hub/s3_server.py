"""An S3 server in its own process: Moto, which keeps its objects in memory."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx

from aenv_ray.cli.local.free_ports import free_port

START_S = 60.0


@contextmanager
def running(log: Path) -> Iterator[str]:
    """Run a server until the block ends; yield its URL."""
    url = f"http://127.0.0.1:{(port := free_port())}"
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
    try:
        _wait(process, url, log)
        yield url
    finally:
        process.kill()
        process.wait()


def _wait(process: subprocess.Popen[bytes], url: str, log: Path) -> None:
    until = time.monotonic() + START_S
    while True:
        try:
            httpx.get(f"{url}/moto-api/data.json", trust_env=False).raise_for_status()
            return
        except httpx.TransportError:
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < until, log.read_text()
            time.sleep(0.05)
