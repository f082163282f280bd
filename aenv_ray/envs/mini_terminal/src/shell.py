"""A persistent shell: runs commands in order, survives timeouts, and is replaced when it ends."""

from __future__ import annotations

import signal
import time
from typing import Any, Final

from bash_process import BashProcess
from fifo_lock import FifoLock
from output import BoundedOutput

TIMED_OUT: Final = 124
"""Return code of a command that was stopped, as from `timeout(1)`."""

MAX_TIMEOUT_S: Final = 24 * 3600.0

_STEPS: Final = (
    (signal.SIGINT, 0.5),
    (signal.SIGTERM, 0.3),
    (signal.SIGKILL, 0.3),
    (signal.SIGINT, 0.3),
    (signal.SIGKILL, 0.3),
)
"""Signals to a command that timed out, and how many seconds it gets after each."""


class Shell:
    """A persistent bash, started by the first command. Thread-safe.

    Args:
        directory: Working directory at its start. None: that of this process at that time.
    """

    def __init__(self, directory: str | None = None) -> None:
        self._directory = directory
        self._lock = FifoLock()
        self._bash: BashProcess | None = None
        self._has_ended = False

    def run(self, command: str, timeout_s: float) -> dict[str, Any]:
        """Run `command` and return ``{"output": [text, finished], "returncode": code, …}``.

        Calls run in the order in which they arrived.

        Args:
            command: Bash source, one or more lines.
            timeout_s: Above 0, at most a day; includes the wait for earlier calls. After it the
                command is stopped, and the shell keeps running.

        Returns:
            The result. Where they apply, it also has ``truncated`` (output was cut), ``restarted``
            (this is a new shell, since the previous one ended) and ``note`` (the command was
            stopped, or the shell ended).

        Raises:
            ValueError: `command` contains NUL or a lone surrogate, or `timeout_s` is out of range.
        """
        _check(command, timeout_s)
        if _is_empty(command):
            return _result("", 0)
        deadline = time.monotonic() + timeout_s
        ticket = self._lock.acquire(deadline)
        if ticket is None:
            note = f"not started: earlier commands took the whole timeout of {timeout_s:g} s"
            return _result("", TIMED_OUT, finished=False, note=note)
        try:
            return self._run(command, timeout_s, deadline)
        finally:
            self._lock.release(ticket)

    def move(self, directory: str | None) -> None:
        """Make the next command start a new shell in `directory`.

        Waits for a running command, at most `MAX_TIMEOUT_S`.
        """
        ticket = self._lock.acquire(time.monotonic() + MAX_TIMEOUT_S)
        self._close()
        self._directory = directory
        self._has_ended = False
        if ticket is not None:
            self._lock.release(ticket)

    def close(self) -> None:
        """Kill the shell and the processes that it started, even while a command runs.

        A later `run` starts a new shell.
        """
        ticket = self._lock.acquire(time.monotonic())
        if ticket is None:
            if (bash := self._bash) is not None:
                bash.kill_session()
            ticket = self._lock.acquire(time.monotonic() + 5)
        self._close()
        if ticket is not None:
            self._lock.release(ticket)

    def _close(self) -> None:
        bash, self._bash = self._bash, None
        if bash is not None:
            bash.close()

    def _run(self, command: str, timeout_s: float, deadline: float) -> dict[str, Any]:
        bash, is_restarted = self._ready()
        output = BoundedOutput()
        try:
            is_handed_over = bash.begin(command, deadline)
            mark = bash.collect(output, deadline) if is_handed_over else None
        except BaseException:
            # The call was cancelled. If this is interrupted too, the next call stops the command.
            self._stop(bash, BoundedOutput())
            raise
        extra: dict[str, Any] = {"restarted": True} if is_restarted else {}
        if mark is not None:
            return _result(output, mark.returncode, **extra)
        if bash.returncode is not None:
            code = self._note_end(bash)
            note = f"the shell exited with {code}; the next command starts a new one"
            return _result(output, code, note=note, **extra)
        note = f"stopped after {timeout_s:g} s"
        if not self._stop(bash, output):
            note += "; this ended the shell, the next command starts a new one"
        return _result(output, TIMED_OUT, finished=False, note=note, **extra)

    def _ready(self) -> tuple[BashProcess, bool]:
        """Return an idle shell, and whether it replaces one that has ended."""
        if self._bash is not None and self._bash.is_busy:
            self._stop(self._bash, BoundedOutput())
        if self._bash is not None and not self._bash.is_alive:
            self._note_end(self._bash)
        if self._bash is None:
            self._bash = BashProcess(self._directory)
            is_restarted, self._has_ended = self._has_ended, False
            return self._bash, is_restarted
        return self._bash, False

    def _stop(self, bash: BashProcess, output: BoundedOutput) -> bool:
        """Stop the running command; return whether the shell still runs."""
        before_bytes = output.total_bytes
        if not bash.collect(output, 0):
            for number, grace_s in _STEPS:
                bash.signal_foreground(number)
                bash.nudge()
                mark = bash.collect(output, time.monotonic() + grace_s)
                if mark is not None or bash.returncode is not None:
                    break
            else:
                bash.kill()
                bash.collect(output, time.monotonic() + 1)
            # Bash ends the line after it interrupts a command.
            output.drop_line_end(before_bytes)
        if bash.is_alive:
            return True
        self._note_end(bash)
        return False

    def _note_end(self, bash: BashProcess) -> int:
        bash.release()
        self._bash, self._has_ended = None, True
        return bash.returncode if bash.returncode is not None else 255


def _check(command: str, timeout_s: float) -> None:
    if "\0" in command:
        raise ValueError("the command contains a NUL character, which bash does not accept")
    try:
        command.encode()
    except UnicodeEncodeError as exc:
        raise ValueError(
            f"the command contains the lone surrogate {command[exc.start]!r} at {exc.start}, "
            "which is not a character"
        ) from None
    if not 0 < timeout_s <= MAX_TIMEOUT_S:
        raise ValueError(f"timeout {timeout_s!r} is not above 0 and at most {MAX_TIMEOUT_S:g} s")


def _is_empty(command: str) -> bool:
    """Whether there is nothing to run: bash would report the previous command's code."""
    lines = (line.strip() for line in command.splitlines())
    return all(not line or line.startswith("#") for line in lines)


def _result(
    output: BoundedOutput | str, returncode: int, *, finished: bool = True, **extra: Any
) -> dict[str, Any]:
    text = output if isinstance(output, str) else output.text()
    result: dict[str, Any] = {"output": [text, finished], "returncode": returncode}
    if isinstance(output, BoundedOutput) and output.is_cut:
        result["truncated"] = True
    return result | extra
