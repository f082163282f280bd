"""One bash on a terminal of its own: start it, tell it a command, wait for the mark.

How a command is run:

* Bash is interactive, so ``^C``, ``set -u`` and syntax errors end the command and not the shell.
  Its standard input is a pipe that only we write to. A command's own standard input is
  ``/dev/null``, so no command can swallow the next one.
* For each command we write one line to the pipe: assignments of the command's text, quoted, to a
  variable, of its serial number and of ``PROMPT_COMMAND``. Bash then runs ``PROMPT_COMMAND``, which
  evaluates the text and writes the mark. ``PROMPT_COMMAND`` is run again before the next prompt
  when the evaluation was aborted (an unset variable, an interrupt), so the mark comes even then.
  Code that runs there prints no job notices.
* The mark goes to the terminal through a file descriptor that is closed while the command runs.
  It is in the same stream as the output: whatever was written before it comes before it.
* Between commands the shell's stdout and stderr are parked and replaced by ``/dev/null``, which
  takes prompts, traces and notices of the shell's own.

What a background job prints between two commands is part of the next command's output, as far as
the kernel keeps it (about 64 KiB; then the job waits).
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

from launch import START, prepare, spawn
from output import BoundedOutput, Mark, MarkedStream
from turns import WAKE_S

READ_BYTES: Final = 65536

_QUOTED: Final = {
    **{code: f"\\{code:03o}" for code in (*range(1, 32), 127, ord("!"))},
    ord("\\"): "\\\\",
    ord("'"): "\\'",
}


def quote(text: str) -> str:
    """Return `text` as one bash word on one line, whatever it contains but NUL."""
    return f"$'{text.translate(_QUOTED)}'"


class BashProcess:
    """A running bash; not thread-safe.

    Args:
        directory: Where it starts. None: the current directory of this process.

    Raises:
        OSError: There is no bash or no terminal to be had.
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
            # Kernels before 5.3 and some sandboxes have none: then `_wait` asks now and then.
            self._pidfd = os.pidfd_open(self.pid)
            self._poll.register(self._pidfd, select.POLLIN)
        start = START.replace("NONCE", nonce)
        if directory is not None:
            start += f"builtin cd -- {quote(directory)}\n"
        self._send(start.encode(), time.monotonic() + 10)

    @property
    def is_alive(self) -> bool:
        """Whether it still runs, asked now."""
        if self.returncode is None:
            self._reap(os.WNOHANG)
        return self.returncode is None

    @property
    def is_busy(self) -> bool:
        """Whether the mark of the latest command has not come."""
        return self._serial != self._marked

    def begin(self, command: str, deadline: float) -> bool:
        """Tell it to run `command`; `collect` gives the outcome.

        Returns:
            Whether the command was handed over before `deadline`.
        """
        with contextlib.suppress(termios.error):
            # `stty` of an earlier command would change every later one's output.
            if termios.tcgetattr(self._master) != self._attributes:
                termios.tcsetattr(self._master, termios.TCSANOW, self._attributes)
        self._serial += 1
        lines = [f"__aenv_go {self._code} && :"]
        # The mark's code switched tracing off for itself.
        lines += [f"\\builtin set -{option}" for option in "xv" if option in self.options]
        head = "; ".join(lines)
        return self._send(
            b"PROMPT_COMMAND=$__aenv_run __aenv_next=%d __aenv_text=%b; PS1='\\[\\]'\n"
            % (self._serial, quote(f"{head}\n{command}").encode()),
            deadline,
        )

    def collect(self, output: BoundedOutput, deadline: float) -> Mark | None:
        """Add the output of the command to `output` until its mark has come or the shell ended.

        Returns:
            The mark; None when the shell ended (`returncode` says how) or the deadline passed.
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
        """Have it write the mark if only a changed ``PROMPT_COMMAND`` prevented it."""
        self._send(b"PROMPT_COMMAND=$__aenv_run\n", time.monotonic() + WAKE_S)

    def signal_foreground(self, number: int) -> None:
        """Signal the foreground processes, and the shell itself only with what it survives.

        An interactive bash takes SIGINT as ``^C`` and stays. Command substitutions run in the
        shell's own process group; its other members are told one by one.
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
            # Else bash goes on with what follows in the list.
            _signal(os.kill, self.pid, signal.SIGINT)

    def kill(self) -> None:
        """SIGKILL the shell alone; whoever waits in `collect` sees its end."""
        if self.returncode is None:
            _signal(os.kill, self.pid, signal.SIGKILL)

    def kill_session(self) -> None:
        """SIGKILL the shell and everything in its session; whoever waits in `collect` sees it."""
        self.kill()
        # Dead but not collected, it starts nothing more and its number is not given away.
        with contextlib.suppress(ChildProcessError):
            os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT)
        for pid, (_, session) in _processes().items():
            if session == self.pid and pid != self.pid:
                _signal(os.kill, pid, signal.SIGKILL)

    def close(self) -> None:
        """Kill everything in its session and give its files back; may be called again."""
        if self._master < 0:
            return
        self.kill_session()
        if self.returncode is None:
            self._reap(0)
        self._close_files()

    def release(self) -> None:
        """Give back the files of a shell that ended; its background jobs go on."""
        self._close_files()

    # --- input and output ------------------------------------------------------------------

    def _send(self, line: bytes, deadline: float) -> bool:
        if self._is_control_cut:
            return False
        # Should this be interrupted, bash has half a line and is of no more use.
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
        """Wait for output or the end of the shell; False when the deadline passed without."""
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
            # Nobody has the terminal open; a program that replaced the shell may still run.
            self._is_hung_up = True
            self._poll.unregister(self._master)
        return data

    def _reap(self, flags: int) -> None:
        try:
            pid, status = os.waitpid(self.pid, flags)
        except ChildProcessError:
            # Somebody else collected it, and its status with it.
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
    """Return the process group and the session of every process that can be seen."""
    found = {}
    with contextlib.suppress(OSError):
        for name in os.listdir("/proc"):
            if name.isdecimal():
                with contextlib.suppress(OSError, ValueError, IndexError):
                    with open(f"/proc/{name}/stat", encoding="utf-8", errors="replace") as file:
                        fields = file.read().rpartition(")")[2].split()
                    found[int(name)] = (int(fields[2]), int(fields[3]))
    return found
