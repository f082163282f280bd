"""A server of the runtime in its own process, and what its tests wait for."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
import threading
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from aenv_ray.testing.contract_bench import pause_s

PROJECT = Path(__file__).parents[1] / "fixtures" / "projects" / "kitchen-sink"
START_S = 30.0


class Server:
    """A server process; `url` and `socket` are its two doors."""

    def __init__(self, process: subprocess.Popen[str], url: str, socket_path: Path) -> None:
        self.process = process
        self.url = url
        self.socket = socket_path

    def stop(self, number: int = signal.SIGTERM) -> int:
        self.process.send_signal(number)
        return self.process.wait(10)


@contextmanager
def serving(project: Path, tmp_path: Path, *flags: str) -> Iterator[Server]:
    socket_path = tmp_path / f"{uuid.uuid4().hex[:8]}.sock"
    log = (tmp_path / "server.log").open("a")
    process = subprocess.Popen(
        [
            *[sys.executable, "-m", "aenv_ray.runtime", str(project), "--host", "127.0.0.1"],
            *["--port", "0", "--socket", str(socket_path), *flags],
        ],
        stdout=log,
        stderr=subprocess.PIPE,
        text=True,
        cwd=tmp_path,
    )
    try:
        yield Server(process, _read_url(process), socket_path)
    finally:
        process.kill()
        process.communicate()
        log.close()


def _read_url(process: subprocess.Popen[str]) -> str:
    """Return the URL from the line that says that the server listens; drain the rest."""
    assert process.stderr is not None
    stderr = process.stderr
    watchdog = threading.Timer(START_S, process.kill)
    watchdog.start()
    for line in stderr:
        if "listening on" in line:
            watchdog.cancel()
            threading.Thread(target=stderr.read, daemon=True).start()
            return line.rsplit(maxsplit=1)[-1]
    raise AssertionError("the server ended before it listened")


async def eventually(condition: Callable[[], bool], what: str) -> None:
    """Wait for something that another process does."""
    loop = asyncio.get_running_loop()
    began = loop.time()
    while not condition():
        waited_s = loop.time() - began
        assert waited_s < 60.0, what
        await asyncio.sleep(pause_s(waited_s, 0.0))


async def cancel_begun(call: asyncio.Task[Any], marker: Path) -> None:
    """Cancel a call once its tool began; the tool must hear of it (invariant 11).

    Args:
        call: Of a tool that says by files beside `marker` that it began and that it was stopped.
        marker: What the tool was given.
    """
    await eventually(marker.with_suffix(".began").exists, "the tool began")
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    await eventually(marker.with_suffix(".stopped").exists, "the tool was told")


async def swallow(call: Any) -> Exception | None:
    try:
        await call
    except Exception as exc:  # noqa: BLE001  # which one is what the tests ask
        return exc
    return None
