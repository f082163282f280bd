"""Starts bash: its terminal, environment, descriptors and initial code."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import signal
import struct
import termios
from collections.abc import Mapping
from typing import Final

COLUMNS: Final = 200
ROWS: Final = 50

# 56 and 57 save stdout and stderr, 58 is the terminal for the mark, 59 is /dev/null. Scripts use
# lower numbers (`exec 3>`) and flock's customary 9 and 200; the smallest usual `ulimit -n` is 64.
# While `eval 0<&59 58>&59` runs, bash saves the replaced descriptors above 59, closed in children;
# with `</dev/null` it would save them at 10, which `exec 10>` uses.
_SAVED_OUT: Final = 56
_SAVED_ERR: Final = 57
_MARK: Final = 58
_NULL: Final = 59

# A function named `builtin` would be called here instead of the real one. It is removed with
# `unset`, which no function can shadow in POSIX mode; an assignment switches that mode on.
#
# The lone `)` is a deliberate syntax error. After an unterminated `$(` the parser of bash 5.2 has
# counted -1 open delimiters, and the next quote that it reads corrupts the heap. An ordinary syntax
# error resets the count.
START: Final = r"""
builtin set +o history +H; builtin shopt -u checkwinsize; builtin shopt -s execfail
builtin unset -v HISTFILE MAILCHECK; builtin export -n PS1 PS2 PROMPT_COMMAND
__aenv_text= __aenv_next= __aenv_now= __aenv_code=0 __aenv_options= __aenv_has=
__aenv_begin() { __aenv_code=$1; [[ $__aenv_next ]] && __aenv_now=$__aenv_next __aenv_next=; }
__aenv_go() { __aenv_text=; command exec >&56 56>&- || :
command exec 2>&57 57>&- || :; builtin return "$1"; }
__aenv_quiet() { __aenv_code=$1 __aenv_options=$-; __aenv_has=
builtin eval $'__aenv_has=1\n)' >&59 || :
if [[ ! $__aenv_has ]]; then POSIXLY_CORRECT=; unset -f builtin; unset -v POSIXLY_CORRECT; fi
builtin set +xv; }
__aenv_end() { if [[ $__aenv_now ]]; then command exec 57>&2 2>&59 || :
command exec 56>&1 >&59 || :
builtin printf '\036NONCE:%s:%s:%s\036' "$__aenv_now" "$__aenv_code" "$__aenv_options" >&58
__aenv_now=; fi; }
builtin readonly -f __aenv_begin __aenv_go __aenv_quiet __aenv_end
builtin readonly __aenv_run='if { __aenv_begin "$?"; } 2>&59; then
\builtin eval "$__aenv_text" 0<&59 58>&59; { __aenv_quiet "$?"; } 2>&59
else { __aenv_quiet "$__aenv_code"; } 2>&59; fi; __aenv_end'
"""

# Variables through which the environment would set options and functions of the shell.
_NOT_INHERITED: Final = frozenset(
    {
        *("BASH_ENV", "BASHOPTS", "COLUMNS", "ENV", "LINES", "OLDPWD", "POSIXLY_CORRECT"),
        *("PROMPT_COMMAND", "PS0", "PS4", "SHELLOPTS"),
    }
)
_DEFAULTS: Final = {
    "GIT_PAGER": "cat",
    "GIT_TERMINAL_PROMPT": "0",
    "MANPAGER": "cat",
    "PAGER": "cat",
    "SYSTEMD_PAGER": "cat",
}


def prepare(slave: int) -> None:
    """Make the terminal pass bytes unchanged: no echo, no carriage return at the end of a line."""
    attributes = termios.tcgetattr(slave)
    attributes[1] &= ~termios.OPOST
    attributes[3] &= ~termios.ECHO
    termios.tcsetattr(slave, termios.TCSANOW, attributes)
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))


def spawn(slave: int, control: int) -> int:
    """Start bash as the leader of a session whose terminal is `slave`; return its pid.

    `os.posix_spawn` creates the session before it opens the files, and the first terminal that a
    session leader opens becomes its controlling terminal. Unlike a fork it runs no Python in the
    child, which would be unsafe while other threads hold locks.
    """
    bash = shutil.which("bash") or "/bin/bash"
    try:
        terminal = os.ttyname(slave)
    except OSError:
        terminal = f"/proc/self/fd/{slave}"
    actions: list[tuple[int, ...] | tuple[int, int, str, int, int]] = [
        (os.POSIX_SPAWN_DUP2, control, 0),
        *((os.POSIX_SPAWN_CLOSE, number) for number in _inheritable()),
        (os.POSIX_SPAWN_OPEN, _MARK, terminal, os.O_RDWR, 0),
        (os.POSIX_SPAWN_DUP2, _MARK, _SAVED_OUT),
        (os.POSIX_SPAWN_DUP2, _MARK, _SAVED_ERR),
        (os.POSIX_SPAWN_OPEN, _NULL, os.devnull, os.O_RDWR, 0),
        (os.POSIX_SPAWN_DUP2, _NULL, 1),
        (os.POSIX_SPAWN_DUP2, _NULL, 2),
    ]
    return os.posix_spawn(
        bash,
        ["bash", "--noprofile", "--norc", "--noediting", "-i"],
        _environment(os.environ, bash),
        file_actions=actions,
        setsid=True,
        setsigmask=[],
        # Python ignores SIGPIPE; `yes | head` would then print an error.
        setsigdef=[signal.SIGPIPE, signal.SIGINT, signal.SIGQUIT, signal.SIGHUP, signal.SIGXFSZ],
    )


def _inheritable() -> list[int]:
    """Return inheritable descriptors of this process, which would leak into the shell."""
    with contextlib.suppress(OSError):
        found = []
        for number in map(int, os.listdir("/proc/self/fd")):
            with contextlib.suppress(OSError):
                if number > 2 and os.get_inheritable(number):
                    found.append(number)
        return found
    return []


def _environment(inherited: Mapping[str, str], bash: str) -> dict[str, str]:
    environment = {
        name: value
        for name, value in inherited.items()
        if name not in _NOT_INHERITED and not name.startswith("BASH_FUNC_")
    }
    # Prints nothing, but is not empty: scripts treat an empty PS1 as a non-interactive shell.
    environment |= {"TERM": "dumb", "PS1": "\\[\\]", "PS2": "", "SHELL": bash}
    if not any(environment.get(name) for name in ("LC_ALL", "LC_CTYPE", "LANG")):
        environment["LANG"] = "C.UTF-8"
    return _DEFAULTS | environment
