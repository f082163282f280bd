"""One bash process on its own pseudo-terminal: start it, run a command, wait for the end mark.

How a command runs:

* Bash is interactive, so ``^C``, ``set -u`` and syntax errors end the command and not the shell.
  Its standard input is a pipe to which only this module writes. The standard input of a command is
  ``/dev/null``, so a command cannot read the next one.
* For each command, one line is written to the pipe. It assigns the quoted text of the command, its
  serial number and ``PROMPT_COMMAND``. Bash then runs ``PROMPT_COMMAND``, which evaluates the text
  and writes the mark. If the evaluation is aborted (by an unset variable or an interrupt), bash
  runs ``PROMPT_COMMAND`` again before the next prompt, so the mark is written even then. Code in
  ``PROMPT_COMMAND`` prints no job notices.
* The mark is written to the terminal through a file descriptor that is closed while the command
  runs. It is in the same stream as the output, so it follows everything that was written before.
* Between commands, stdout and stderr of the shell are saved and replaced by ``/dev/null``, which
  discards the shell's prompts, traces and notices.

Output of a background job between two commands becomes part of the next command's output. The
kernel buffers about 64 KiB; then the job blocks.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import select
import signal
import termios
import time
from collections.abc import Callable
from typing import Final

from fifo_lock import WAKE_S
from launch import START, prepare, spawn
from output import BoundedOutput, Mark, MarkedStream

READ_BYTES: Final = 65536

_QUOTED: Final = {
    **{code: f"\\{code:03o}" for code in (*range(1, 32), 127, ord("!"))},
    ord("\\"): "\\\\",
    ord("'"): "\\'",
}


def quote(text: str) -> str:
    """Return `text`, which must not contain NUL, as one bash word on one line."""
    return f"$'{text.translate(_QUOTED)}'"


class BashProcess:
    """A running bash. Not thread-safe.

    Args:
        directory: Working directory. None: that of this process.

    Raises:
        OSError: There is no bash, or no terminal is available.
    """

    def __init__(self, directory: str | None = None) -> None:
        self.returncode: int | None = None
        """Exit code once it has ended; 128 + N for signal N."""
        self.options = ""
        self._serial = self._marked = 0
        self._code = 0
        self._is_hung_up = False
        self._is_control_cut = False
        nonce = secrets.token_hex(8).upper()
        self._stream = MarkedStream(nonce)
        self._master, slave = os.openpty()
        self._control = self._pidfd = -1
        try:
            prepare(slave)
            control, self._control = os.pipe()
            try:
                self.pid = spawn(slave, control)
            finally:
                os.close(control)
        except BaseException:
            self._close_files()
            raise
        finally:
            os.close(slave)
        self._attributes = termios.tcgetattr(self._master)
        os.set_blocking(self._control, False)
        os.set_blocking(self._master, False)
        self._poll = select.poll()
        self._poll.register(self._master, select.POLLIN)
        with contextlib.suppress(OSError, AttributeError):
            # Kernels before 5.3 and some sandboxes have no pidfd: then `_wait` polls.
            self._pidfd = os.pidfd_open(self.pid)
            self._poll.register(self._pidfd, select.POLLIN)
        start = START.replace("NONCE", nonce)
        if directory is not None:
            start += f"builtin cd -- {quote(directory)}\n"
        self._send(start.encode(), time.monotonic() + 10)

    @property
    def is_alive(self) -> bool:
        """Whether it still runs."""
        if self.returncode is None:
            self._reap(os.WNOHANG)
        return self.returncode is None

    @property
    def is_busy(self) -> bool:
        """Whether the latest command has not written its mark yet."""
        return self._serial != self._marked

    def begin(self, command: str, deadline: float) -> bool:
        """Start `command`; `collect` returns its outcome.

        Returns:
            Whether bash accepted the command before `deadline`.
        """
        with contextlib.suppress(termios.error):
            # An earlier `stty` would change the output of every later command.
            if termios.tcgetattr(self._master) != self._attributes:
                termios.tcsetattr(self._master, termios.TCSANOW, self._attributes)
        self._serial += 1
        lines = [f"__aenv_go {self._code} && :"]
        # The code that writes the mark has switched tracing off.
        lines += [f"\\builtin set -{option}" for option in "xv" if option in self.options]
        head = "; ".join(lines)
        return self._send(
            b"PROMPT_COMMAND=$__aenv_run __aenv_next=%d __aenv_text=%b; PS1='\\[\\]'\n"
            % (self._serial, quote(f"{head}\n{command}").encode()),
            deadline,
        )

    def collect(self, output: BoundedOutput, deadline: float) -> Mark | None:
        """Add the command's output to `output` until its mark arrives or the shell ends.

        Returns:
            The mark; None when the shell ended (see `returncode`) or the deadline passed.
        """
        data = b""
        while True:
            mark = self._stream.feed(data, self._serial, output)
            if mark is not None:
                self.options, self._code = mark.options, mark.returncode
                self._marked = self._serial
                return mark
            if self.returncode is not None:
                if not (data := self._read()):
                    self._stream.flush(output)
                    return None
                continue
            if not self._wait(deadline):
                return None
            data = self._read()

    def nudge(self) -> None:
        """Make bash write the mark if a command has changed ``PROMPT_COMMAND``."""
        self._send(b"PROMPT_COMMAND=$__aenv_run\n", time.monotonic() + WAKE_S)

    def signal_foreground(self, number: int) -> None:
        """Signal the foreground processes, and the shell only with signals that it survives.

        An interactive bash treats SIGINT as ``^C`` and keeps running. Command substitutions run in
        the process group of the shell, whose other members are signalled one by one.
        """
        group = self.pid
        with contextlib.suppress(OSError):
            group = os.tcgetpgrp(self._master) or self.pid
        if group != self.pid or number == signal.SIGINT:
            _signal(os.killpg, group, number)
        else:
            for pid, (member_group, _) in _processes().items():
                if member_group == group and pid != self.pid:
                    _signal(os.kill, pid, number)
        if number != signal.SIGINT:
            _signal(os.kill, self.pid, signal.SIGCONT)
            # Otherwise bash continues with the rest of the list.
            _signal(os.kill, self.pid, signal.SIGINT)

    def kill(self) -> None:
        """SIGKILL only the shell; a thread in `collect` sees its end."""
        if self.returncode is None:
            _signal(os.kill, self.pid, signal.SIGKILL)

    def kill_session(self) -> None:
        """SIGKILL all processes of its session; a thread in `collect` sees the shell end."""
        self.kill()
        # Dead but not reaped: it starts nothing more, and its pid is not reused.
        with contextlib.suppress(ChildProcessError):
            os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT)
        for pid, (_, session) in _processes().items():
            if session == self.pid and pid != self.pid:
                _signal(os.kill, pid, signal.SIGKILL)

    def close(self) -> None:
        """Kill all processes of its session and close its files. Idempotent."""
        if self._master < 0:
            return
        self.kill_session()
        if self.returncode is None:
            self._reap(0)
        self._close_files()

    def release(self) -> None:
        """Close the files of a shell that has ended; its background jobs continue."""
        self._close_files()

    # --- input and output ------------------------------------------------------------------

    def _send(self, line: bytes, deadline: float) -> bool:
        if self._is_control_cut:
            return False
        # If this is interrupted, bash has received half a line and is unusable.
        self._is_control_cut = True
        view = memoryview(line)
        writable = select.poll()
        writable.register(self._control, select.POLLOUT)
        while view:
            try:
                view = view[os.write(self._control, view) :]
            except BlockingIOError:
                remaining_s = deadline - time.monotonic()
                if remaining_s <= 0 or not self.is_alive:
                    return False
                writable.poll(1000 * min(WAKE_S, remaining_s))
            except BrokenPipeError:
                break
        self._is_control_cut = False
        return True

    def _wait(self, deadline: float) -> bool:
        """Wait for output or the end of the shell; False when the deadline passed first."""
        while True:
            remaining_s = max(0.0, deadline - time.monotonic())
            longest_s = 0.01 if self._is_hung_up and self._pidfd < 0 else WAKE_S
            events = self._poll.poll(1000 * min(longest_s, remaining_s))
            for descriptor, _ in events:
                if descriptor == self._pidfd:
                    self._reap(0)
            if not events and self._pidfd < 0:
                self._reap(os.WNOHANG)
            if events or self.returncode is not None:
                return True
            if remaining_s == 0:
                return False

    def _read(self) -> bytes:
        if self._is_hung_up:
            return b""
        try:
            data = os.read(self._master, READ_BYTES)
        except BlockingIOError:
            return b""
        except OSError as exc:
            if exc.errno != errno.EIO:
                raise
            data = b""
        if not data:
            # No process has the terminal open; a program that replaced the shell may still run.
            self._is_hung_up = True
            self._poll.unregister(self._master)
        return data

    def _reap(self, flags: int) -> None:
        try:
            pid, status = os.waitpid(self.pid, flags)
        except ChildProcessError:
            # Another thread reaped it and has its status.
            pid, status = self.pid, 255 << 8
        if pid:
            code = os.waitstatus_to_exitcode(status)
            self.returncode = code if code >= 0 else 128 - code
            if self._pidfd >= 0:
                self._poll.unregister(self._pidfd)
                os.close(self._pidfd)
                self._pidfd = -1

    def _close_files(self) -> None:
        for name in ("_master", "_control", "_pidfd"):
            descriptor = getattr(self, name)
            setattr(self, name, -1)
            if descriptor >= 0:
                os.close(descriptor)


def _signal(send: Callable[[int, int], None], target: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        send(target, number)


def _processes() -> dict[int, tuple[int, int]]:
    """Return process group and session of every visible process, by pid."""
    found = {}
    with contextlib.suppress(OSError):
        for name in os.listdir("/proc"):
            if name.isdecimal():
                with contextlib.suppress(OSError, ValueError, IndexError):
                    with open(f"/proc/{name}/stat", encoding="utf-8", errors="replace") as file:
                        fields = file.read().rpartition(")")[2].split()
                    found[int(name)] = (int(fields[2]), int(fields[3]))
    return found
