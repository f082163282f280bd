"""Start bash: its terminal, its environment, its files, and the code it begins with."""

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

# 56 and 57 park stdout and stderr, 58 is the terminal for the mark, 59 is /dev/null. So high that
# `exec 3>` and flock's customary 9 and 200 stay free, below the smallest usual `ulimit -n`. While
# `eval 0<&59 58>&59` runs, bash keeps what it replaced above 59, closed in children; with
# `</dev/null` it would be at 10, in the way of `exec 10>`.
_PARKED_OUT: Final = 56
_PARKED_ERR: Final = 57
_MARK: Final = 58
_NULL: Final = 59

# A function of the user's named `builtin` would be called here in place of the real one: it is
# taken away, by `unset`, which no function hides in POSIX mode, and that an assignment switches on.
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

# Options and functions that the caller's environment would bring into the shell.
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
    """Make the terminal pass bytes as they are: no echo, no carriage return at a line's end."""
    attributes = termios.tcgetattr(slave)
    attributes[1] &= ~termios.OPOST
    attributes[3] &= ~termios.ECHO
    termios.tcsetattr(slave, termios.TCSANOW, attributes)
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))


def spawn(slave: int, control: int) -> int:
    """Start bash as the leader of a session whose terminal is `slave`; return its pid.

    `os.posix_spawn` makes the session before it opens the files, and the first terminal that a
    session leader opens becomes its controlling one. Unlike a fork it runs no Python in the child,
    which is unsafe while other threads hold locks.
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
        (os.POSIX_SPAWN_DUP2, _MARK, _PARKED_OUT),
        (os.POSIX_SPAWN_DUP2, _MARK, _PARKED_ERR),
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
        # Python ignores SIGPIPE, and `yes | head` would complain.
        setsigdef=[signal.SIGPIPE, signal.SIGINT, signal.SIGQUIT, signal.SIGHUP, signal.SIGXFSZ],
    )


def _inheritable() -> list[int]:
    """Return the descriptors, not ours, that would leak into the shell."""
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
    # Not empty, since scripts take an empty PS1 for a shell without a user; prints nothing.
    environment |= {"TERM": "dumb", "PS1": "\\[\\]", "PS2": "", "SHELL": bash}
    if not any(environment.get(name) for name in ("LC_ALL", "LC_CTYPE", "LANG")):
        environment["LANG"] = "C.UTF-8"
    return _DEFAULTS | environment
