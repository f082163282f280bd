"""What the launcher tells of an instance that does not come up."""

from __future__ import annotations

import os
import socket
import subprocess
from pathlib import Path
from typing import Any

import pytest

from aenv_ray.engines.process import launcher as launcher_module
from aenv_ray.engines.process.forks import Fork, InstanceProcess
from aenv_ray.engines.process.launcher import BOOT_DEADLINE_S, InstanceFiles, Launcher
from aenv_ray.engines.process.templates import TemplateProcess
from tests.fake_clock import FakeClock


@pytest.mark.parametrize(
    ("printed", "told"),
    [
        (b"loading\nstill looking\n", "; the end of its log:\nloading\nstill looking"),
        (b"", ""),
    ],
    ids=["printed", "silent"],
)
def test_an_instance_that_does_not_come_up_tells_the_end_of_its_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, printed: bytes, told: str
) -> None:
    """Invariant 9: what it waited for, and what there is to see of it."""
    InstanceFiles(tmp_path).prepare()
    clock = FakeClock()
    monkeypatch.setattr(launcher_module, "kill_stragglers", lambda _: None)  # of this process
    launcher = Launcher(tmp_path, clock)
    sent: list[dict[str, Any]] = []
    monkeypatch.setattr(launcher._peers, "send", lambda _, message: sent.append(message))
    instance = InstanceProcess(
        id="one", host="host", template="key", deadline=clock.now() + 600.0, item={},
        boot_by=clock.now() + BOOT_DEADLINE_S, reply=(Any, 1),
    )  # fmt: skip
    launcher._instances["one"] = instance
    output = launcher._logs.open(instance.log)
    os.write(output, printed)
    launcher._sweep()
    assert sent == []
    clock.advance(BOOT_DEADLINE_S)
    launcher._sweep()
    os.close(output)
    failed = next(message["failed"] for message in sent if "failed" in message)
    assert failed == f"it was not up after {BOOT_DEADLINE_S:g} s{told}"


def test_the_reason_of_a_failed_start_is_read_if_its_end_is_known_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a busy node both are there when the launcher looks, in any order."""
    InstanceFiles(tmp_path).prepare()
    clock = FakeClock()
    launcher = Launcher(tmp_path, clock)
    sent: list[dict[str, Any]] = []
    monkeypatch.setattr(launcher._peers, "send", lambda _, message: sent.append(message))
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    control, jailer = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs, control, jailer, subprocess.Popen(["true"]) as process:
        template = TemplateProcess(
            "key", {"preload": False}, process, control, clock.now(), clock.now()
        )
        fork = Fork(1, ours, instance="one", status=70)
        template.instances[1] = fork
        launcher._templates._templates["key"] = template
        launcher._templates._listen(template, fork)
        instance = InstanceProcess(
            id="one", host="host", template="key", deadline=clock.now() + 600.0, item={},
            boot_by=clock.now() + BOOT_DEADLINE_S, reply=(Any, 1), fork=fork,
        )  # fmt: skip
        launcher._instances["one"] = instance
        os.close(launcher._logs.open(instance.log))
        theirs.send(b'{"boot_failed": "tools.py: SyntaxError"}')
        launcher._templates._on_fork_end(template, fork)
    failed = next(message["failed"] for message in sent if "failed" in message)
    assert failed == "tools.py: SyntaxError"
