"""What the kernel tells about the end of a fork."""

from __future__ import annotations

import os
import signal
import socket

import pytest

from aenv_ray.engines.process.forks import Fork


@pytest.mark.skipif(os.geteuid() != 0, reason="the kernel tells only root why it ended")
@pytest.mark.parametrize("ends_with", [3, -signal.SIGKILL])
def test_an_end_is_known_until_the_process_is_reaped(ends_with: int) -> None:
    fork = _ended(ends_with)
    assert fork.kernel_status() == ends_with
    os.waitpid(fork.pid, 0)
    assert fork.kernel_status() is None
    _close(fork)


def test_an_exit_code_of_zero_is_not_believed() -> None:
    """The kernel tells it to users who may not trace the process, however it has ended."""
    fork = _ended(0)
    assert fork.kernel_status() is None
    os.waitpid(fork.pid, 0)
    _close(fork)


def _ended(with_status: int) -> Fork:
    """Return a fork that has ended and is not reaped yet."""
    channel, other = socket.socketpair()
    other.close()
    pid = os.fork()
    if pid == 0:
        if with_status < 0:
            os.kill(os.getpid(), -with_status)
        os._exit(max(0, with_status))
    fork = Fork(1, channel, pid, os.pidfd_open(pid))
    os.waitid(os.P_PIDFD, fork.pidfd, os.WEXITED | os.WNOWAIT)
    return fork


def _close(fork: Fork) -> None:
    os.close(fork.pidfd)
    fork.channel.close()
