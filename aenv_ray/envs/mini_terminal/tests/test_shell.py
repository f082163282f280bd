"""The result of a command, and the state of the shell after it."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from conftest import Execute


def text(execute: Execute, command: str, timeout: float = 20) -> str:
    result = execute(command, timeout)
    assert result["output"][1], result
    return str(result["output"][0])


def test_result_has_output_and_exit_code(execute: Execute) -> None:
    assert execute("echo hi; (exit 7)") == {"output": ["hi\n", True], "returncode": 7}


@pytest.mark.parametrize(
    ("command", "output", "code"),
    [
        ("true", "", 0),
        ("false", "", 1),
        (":", "", 0),
        ("printf 'no line end'", "no line end", 0),
        ("echo one; echo two >&2; echo three", "one\ntwo\nthree\n", 0),
        ("for i in 1 2; do\n  echo $i\ndone", "1\n2\n", 0),
        ("cat <<'X'\na $b\nX", "a $b\n", 0),
        ("printf 'a\\r\\nb\\rc\\n'", "a\r\nb\rc\n", 0),
        ("printf 'a\\tb\\x07\\x1b[31m\\x00z'", "a\tb\x07\x1b[31m\0z", 0),
        ("printf '\\036'; printf '\\036\\036'", "\x1e\x1e\x1e", 0),
        ("echo 'é 日本' | cat", "é 日本\n", 0),
        ("printf '\\xff\\xc3'", "\ufffd\ufffd", 0),
        ("printf '\\xc3'; printf '\\xa9'", "é", 0),
        ('printf %s "a\'b\\\\c!d$((1+1))"', "a'b\\c!d2", 0),
        ("cat", "", 0),
        ('read x; echo "$? [$x]"', "1 []\n", 0),
        ("head -c 3 <<< abcdef", "abc", 0),
        ("[ -t 1 ] && echo terminal", "terminal\n", 0),
        ("yes | head -n 1", "y\n", 0),
        ("sh -c 'kill -TERM $$'", "", 143),
        ("printf '%300s|'", " " * 300 + "|", 0),
        ("# only a comment", "", 0),
        ("", "", 0),
        (" \n ", "", 0),
    ],
)
def test_output_is_exactly_the_commands(
    execute: Execute, command: str, output: str, code: int
) -> None:
    assert execute(command) == {"output": [output, True], "returncode": code}
    assert text(execute, "echo next") == "next\n"


@pytest.mark.parametrize("command", ["# a thought", " # a thought\n\n# and another", "\t", ""])
def test_empty_command_succeeds_and_keeps_the_previous_exit_code(
    execute: Execute, command: str
) -> None:
    execute("(exit 7)")
    assert execute(command) == {"output": ["", True], "returncode": 0}
    assert text(execute, "echo $?") == "7\n"


INCOMPLETE = [
    *("echo $(", "echo $(ls", 'echo "$(', "echo $(echo $(", "x=$(", "x=(1 $(", "echo $( # c"),
    *("echo ${x:-$(", "echo $((1+", "echo $(( $(", "echo $[1", "echo `x", "echo ${x", "cat <(ls"),
    *("echo 'open", 'echo "open', "echo $'open", 'echo $"open', "echo $(echo 'x"),
    *('echo $(echo "x', "(", "(echo hi", "((", "((1", "{", "{ echo hi", "f() {", "f()", "x=(1 2"),
    *("if", "if true; then", "while", "until", "for", "for i in a; do", "for ((", "select"),
    *(
        "time (",
        "case",
        "case x in",
        "case x in a)",
        "case $(",
        "echo $(case x in",
        "f() { echo $(",
    ),
    *("echo $(cat <<X", "echo $(cat <<X\na", "a &&", "a |", "true\necho $(", "eval 'echo $('"),
    *("[[", "[[ -n", "coproc"),
]
WRONG = ["a )", "}", "&&", ";;", "|", "done", "fi", "esac"]
TOLERATED = ["cat <<X", "cat <<X\nabc", "cat <<X\n$(", "echo a \\", "\\", "!", "time"]
"""Incomplete commands that bash accepts."""


@pytest.mark.parametrize("command", INCOMPLETE + WRONG)
def test_syntax_error_is_bashs_text_and_not_a_hang(execute: Execute, command: str) -> None:
    result = execute(command, 5)
    assert result["output"][1]
    assert result["returncode"] != 0
    assert "bash: " in result["output"][0]


@pytest.mark.parametrize("command", INCOMPLETE + WRONG + TOLERATED)
def test_incomplete_command_does_not_break_the_next(execute: Execute, command: str) -> None:
    execute("state=kept")
    for _ in range(2):
        assert execute(command, 5)["output"][1]
        assert execute('echo "next" \'$state\' "$(echo "$state")"') == {
            "output": ["next $state kept\n", True],
            "returncode": 0,
        }


def test_directory_variables_functions_options_and_code_persist(
    execute: Execute, workdir: Path
) -> None:
    assert text(execute, "pwd") == f"{workdir}\n"
    execute("mkdir 'a b'; cd 'a b'; x='1 2'; export Y=y; f() { echo \"f $1\"; }; shopt -s nullglob")
    assert text(execute, "pwd; echo \"$x\"; sh -c 'echo $Y'; f z; echo *.none") == (
        f"{workdir}/a b\n1 2\ny\nf z\n\n"
    )
    execute("alias ll='echo listed'")
    assert text(execute, "ll") == "listed\n"
    execute("(exit 9)")
    assert text(execute, "echo $?") == "9\n"


def test_long_commands_work(execute: Execute) -> None:
    assert text(execute, "echo " + "x" * 1_000_000 + " | wc -c").split() == ["1000001"]
    lines = 'it\'s \\ "line" $HOME !\n' * 40_000
    assert text(execute, f"wc -lc <<'END'\n{lines}END").split() == ["40000", str(len(lines))]


@pytest.mark.parametrize(
    "command",
    [
        "set -u; echo $undefined",
        "set -o pipefail -f -u; true",
        "set -x",
        "set -v",
        "set -o posix",
        "set -o noclobber",
        "PS1='$ ' PS2='> '",
        "readonly PS1='$ '",
        "PROMPT_COMMAND='echo prompt'",
        "unset PROMPT_COMMAND PS1 IFS PATH HOME",
        "IFS=abcdefghijklmnopqrstuvwxyz0123456789_",
        "printf() { :; }; eval() { :; }; set() { :; }; exec() { :; }; echo() { builtin echo; }",
        "builtin() { :; }",
        "set -xu; builtin() { echo x; }; unset() { :; }; eval() { :; }; printf() { :; }; echo $no",
        "alias printf=ls eval=ls builtin=ls command=ls exec=ls return=ls PROMPT_COMMAND=ls",
        "trap 'true' DEBUG ERR RETURN INT TERM",
        "exec 2>&1",
        "exec 3</dev/null 9>lock 10>ten 11>eleven 12>twelve 200>lock",
        "stty sane raw olcuc onlcr </dev/tty",
        "return 3",
        "break; continue",
        "exec no-such-program",
        "shopt -u expand_aliases; shopt -s extglob",
        "ulimit -n 64",
        "set +m",
        "set -o history -o histexpand",
        "PS4='trace '",
        "enable -n test",
        "umask 777; umask 022",
        "LC_ALL=C; LANG=C",
    ],
)
def test_what_a_command_changes_does_not_break_the_next(execute: Execute, command: str) -> None:
    execute("state=kept")
    first = execute(command, 5)
    assert first["output"][1]
    assert "note" not in first
    second = execute('{ set +xvu; } 2>/dev/null; \\builtin echo "next $state"', 5)
    assert second["output"][1]
    assert "restarted" not in second
    assert second["output"][0].endswith("next kept\n")


def test_redirected_shell_output_stays_redirected(execute: Execute, workdir: Path) -> None:
    execute("exec 4>&1 >out.txt 2>err.txt")
    assert text(execute, "echo to file; no-such-command") == ""
    assert text(execute, "exec >&4 2>&4; cat out.txt; wc -l < err.txt").split() == [
        *("to", "file"),
        "1",
    ]
    assert text(execute, "no-such-command") == "bash: no-such-command: command not found\n"


def test_closed_output_does_not_break_the_protocol(execute: Execute) -> None:
    assert execute("exec 1>&- 2>&-; true", 5)["returncode"] == 0
    assert execute("(exit 4)", 5)["returncode"] == 4
    assert text(execute, "exec >/dev/tty 2>&1; echo back", 5).endswith("back\n")


def test_trace_shows_only_the_commands(execute: Execute) -> None:
    execute("set -x")
    assert "echo seen\nseen\n" in (shown := text(execute, "echo seen"))
    assert "aenv" not in shown
    execute("set +x; set -v")
    assert text(execute, "echo seen") == "echo seen\nseen\n"


def test_children_inherit_no_descriptor_of_the_protocol(execute: Execute) -> None:
    shown = text(
        execute, "for f in /proc/self/fd/*; do readlink $f; done | grep -v '^/proc' | sort -u"
    )
    assert {line.split("/")[1] for line in shown.split() if line.startswith("/")} == {"dev"}
    assert "pipe" not in text(execute, "ls -l /proc/self/fd >list; cat list")
    assert "__aenv" not in text(execute, "env")


@pytest.mark.parametrize(
    ("command", "code"),
    [
        ("exit 3", 3),
        ("kill -9 $$", 137),
        ("exec true", 0),
        ("exec sh -c 'exit 5' >/dev/null 2>&1", 5),
        ("set -e; false; echo no", 1),
    ],
)
def test_shell_that_exits_is_reported_and_replaced(
    execute: Execute, command: str, code: int
) -> None:
    execute("cd /; x=1")
    first = execute(f"echo before; {command}", 5)
    assert first["output"] == ["before\n", True]
    assert first["returncode"] == code
    assert f"exited with {code}" in first["note"]
    second = execute('echo "[$x]"', 5)
    assert second == {"output": ["[]\n", True], "returncode": 0, "restarted": True}
    assert "restarted" not in execute("true")


def test_shell_killed_between_calls_is_replaced(execute: Execute) -> None:
    # The subshell kills the shell after the call has ended: descriptor 57 is open only then.
    pid = text(execute, "echo $$").strip()
    execute(f"(while [ -e /proc/{pid}/fd/57 ] || kill -9 {pid}; do break; done) & wait $!")
    assert text(execute, "echo alive") == "alive\n"


@pytest.mark.parametrize(
    ("command", "message"), [("a\0b", "NUL"), ("echo \ud800", "surrogate '\\\\ud800' at 5")]
)
def test_command_that_bash_cannot_take_is_refused(
    execute: Execute, command: str, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        execute(command)


@pytest.mark.parametrize("timeout", [0, -1, float("nan"), float("inf"), 86401])
def test_timeout_out_of_range_is_refused(execute: Execute, timeout: float) -> None:
    with pytest.raises(ValueError, match="timeout"):
        execute("true", timeout)


def test_output_over_the_limit_keeps_head_and_tail_and_says_so(execute: Execute) -> None:
    result = execute("echo first; head -c 10000000 /dev/zero | tr '\\0' x; echo; echo last", 20)
    shown = result["output"][0]
    assert result["truncated"] is True
    assert shown.startswith("first\nxxx")
    assert shown.endswith("xxx\nlast\n")
    assert "of 10000012 bytes left out here]" in shown
    assert len(shown) < 1_100_000


def test_fifty_megabytes_come_through(execute: Execute) -> None:
    result = execute(
        "yes 'a line of some length, again and again' | head -c 50000000; echo end", 30
    )
    assert result["output"][1]
    assert result["output"][0].endswith("end\n")


def test_background_job_does_not_block_and_runs_on(execute: Execute, workdir: Path) -> None:
    started = time.monotonic()
    assert execute("sleep 100 &", 10) == {"output": ["", True], "returncode": 0}
    assert execute("nohup sleep 100 >/dev/null 2>&1 &", 10)["output"] == ["", True]
    assert time.monotonic() - started < 5
    assert text(execute, "jobs -r | wc -l").strip() == "2"
    assert text(execute, "kill %1 %2; wait; echo done").endswith("done\n")


def test_late_output_of_a_job_is_shown_with_a_later_command(execute: Execute) -> None:
    execute("mkfifo gate; (read x < gate; echo late) & echo now")
    assert text(execute, "echo go > gate; wait; echo after") == "late\nafter\n"


def test_shell_starts_without_the_callers_settings(
    execute: Execute, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BASH_ENV", "/nonexistent")
    monkeypatch.setenv("SHELLOPTS", "errexit:xtrace")
    monkeypatch.setenv("PROMPT_COMMAND", "echo prompt")
    monkeypatch.setenv("BASH_FUNC_printf%%", "() { echo mine; }")
    assert text(execute, "false; echo $TERM $- ; printf ok") == "dumb himBs\nok"
    assert text(execute, "stty size </dev/tty") == "50 200\n"
