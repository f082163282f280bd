"""A shell that stays: commands in order, timeouts that keep it, a fresh one when it has ended."""

from __future__ import annotations

import signal
import time
from typing import Any, Final

from bash_process import BashProcess
from output import BoundedOutput
from turns import Turns

TIMED_OUT: Final = 124
"""Return code of a command that was stopped, as `timeout(1)` gives it."""

MAX_TIMEOUT_S: Final = 24 * 3600.0

_STEPS: Final = (
    (signal.SIGINT, 0.5),
    (signal.SIGTERM, 0.3),
    (signal.SIGKILL, 0.3),
    (signal.SIGINT, 0.3),
    (signal.SIGKILL, 0.3),
)
"""What a command that overran is sent, and how long it then has, in seconds."""


class Shell:
    """A persistent bash, started at the first command; safe to use from several threads.

    Args:
        directory: Where it starts. None: the current directory of the process at that time.
    """

    def __init__(self, directory: str | None = None) -> None:
        self._directory = directory
        self._turns = Turns()
        self._bash: BashProcess | None = None
        self._has_ended = False

    def run(self, command: str, timeout_s: float) -> dict[str, Any]:
        """Run `command` and return ``{"output": [text, finished], "returncode": code, …}``.

        Calls run in the order in which they came; the wait for earlier ones counts.

        Args:
            command: Bash source, of one or many lines.
            timeout_s: Above 0, at most a day. Then the command is stopped, and the shell stays.

        Returns:
            Also ``truncated`` (output was cut), ``restarted`` (this shell is a fresh one, since the
            one before ended) and ``note`` (what went wrong around the command), when they apply.

        Raises:
            ValueError: `command` holds NUL or a lone surrogate, or `timeout_s` is out of range.
        """
        _check(command, timeout_s)
        if _says_nothing(command):
            return _result("", 0)
        deadline = time.monotonic() + timeout_s
        turn = self._turns.take(deadline)
        if turn is None:
            note = f"not started: earlier commands took all of the {timeout_s:g} s"
            return _result("", TIMED_OUT, finished=False, note=note)
        try:
            return self._run(command, timeout_s, deadline)
        finally:
            self._turns.give_back(turn)

    def move(self, directory: str | None) -> None:
        """Have the next command run in a fresh shell in `directory`.

        Waits for a running command to end, at most `MAX_TIMEOUT_S`.
        """
        turn = self._turns.take(time.monotonic() + MAX_TIMEOUT_S)
        self._close()
        self._directory = directory
        self._has_ended = False
        if turn is not None:
            self._turns.give_back(turn)

    def close(self) -> None:
        """Kill the shell and what it started, under a running command too.

        A later `run` starts a fresh one.
        """
        turn = self._turns.take(time.monotonic())
        if turn is None:
            if (bash := self._bash) is not None:
                bash.kill_session()
            turn = self._turns.take(time.monotonic() + 5)
        self._close()
        if turn is not None:
            self._turns.give_back(turn)

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
            # The call was cancelled. Should this be cut short too, the next call does it.
            self._stop(bash, BoundedOutput())
            raise
        extra: dict[str, Any] = {"restarted": True} if is_restarted else {}
        if mark is not None:
            return _result(output, mark.returncode, **extra)
        if bash.returncode is not None:
            code = self._note_end(bash)
            note = f"the shell exited with {code}; the next command starts a fresh one"
            return _result(output, code, note=note, **extra)
        note = f"stopped after {timeout_s:g} s"
        if not self._stop(bash, output):
            note += "; the shell did not survive it, the next command starts a fresh one"
        return _result(output, TIMED_OUT, finished=False, note=note, **extra)

    def _ready(self) -> tuple[BashProcess, bool]:
        """Return a shell that waits for a command, and whether it replaces one that ended."""
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
        """Stop the command that runs; return whether the shell lived on."""
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
            # Bash itself ends the line of an interrupted command.
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
        raise ValueError("the command holds a NUL character, which bash cannot take")
    try:
        command.encode()
    except UnicodeEncodeError as exc:
        raise ValueError(
            f"the command holds the lone surrogate {command[exc.start]!r} at {exc.start}, "
            "which is no character"
        ) from None
    if not 0 < timeout_s <= MAX_TIMEOUT_S:
        raise ValueError(f"timeout {timeout_s!r} is not above 0 and at most {MAX_TIMEOUT_S:g} s")


def _says_nothing(command: str) -> bool:
    """Whether there is nothing to run: bash would report the code of the command before."""
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
