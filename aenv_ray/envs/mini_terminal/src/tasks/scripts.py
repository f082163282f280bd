"""Tasks that ask for a program; it is run on inputs that the agent has not seen."""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from tasks.base import Task, expect, expect_executable, expect_run, put, read_bytes, rng, run


def _in_scratch(name: str, check: Callable[[Path, Path], None]) -> Callable[[Path], None]:
    """Return a check that runs the program `name` in a directory of its own."""

    def checked(root: Path) -> None:
        program = root / name
        expect_executable(program)
        with tempfile.TemporaryDirectory(prefix="check-", ignore_cleanup_errors=True) as scratch:
            check(program, Path(scratch))

    return checked


def _empty(root: Path) -> None:
    put(root / "README", "Write the program here.\n")


def _check_sum(program: Path, scratch: Path) -> None:
    for numbers in ([], ["5"], ["3", "-7", "10"], ["08", "1"], ["1000000", "2345678", "-1"]):
        expect_run([program, *numbers], scratch, str(sum(map(int, numbers))))
    for bad in (["1", "x"], ["1.5"], [""], ["2", "3-4"], ["*"]):
        outcome = expect_run([program, *bad], scratch, "", code=2)
        expect(outcome.stderr.strip() != "", f"nothing on stderr for {bad}")


def _check_wordfreq(program: Path, scratch: Path) -> None:
    random = rng("wordfreq-hidden")
    for limit in (1, 3, 20):
        words = [random.choice(["pear", "fig", "plum", "Fig", "kiwi", "date"]) for _ in range(40)]
        words += ["zoo", "ant"]
        ranked = sorted(Counter(words).items(), key=lambda item: (-item[1], item[0]))
        expected = "\n".join(f"{word} {count}" for word, count in ranked[:limit])
        expect_run([program, str(limit)], scratch, expected, stdin="  ".join(words) + "\n")
    expect_run([program, "2"], scratch, "", stdin="")


def _roman(number: int) -> str:
    text = ""
    values = (1000, 900, 500, 400, 100, 90, 50, 40, 10, 9, 5, 4, 1)
    numerals = ("M", "CM", "D", "CD", "C", "XC", "L", "XL", "X", "IX", "V", "IV", "I")
    for value, letters in zip(values, numerals, strict=True):
        text += letters * (number // value)
        number %= value
    return text


def _check_roman(program: Path, scratch: Path) -> None:
    for number in (1, 4, 9, 14, 40, 90, 400, 944, 1994, 2023, 3888, 3999):
        expect_run([program, str(number)], scratch, _roman(number))
    for bad in ("0", "4000", "-3", "abc", ""):
        expect_run([program, bad], scratch, "", code=1)


def _check_backup(program: Path, scratch: Path) -> None:
    source, target = scratch / "my data", scratch / "back ups"
    put(source / "a b.txt", "first")
    put(source / ".hidden", "dot")
    target.mkdir()
    expect_run([program, source, target], scratch, "my data.1")
    put(source / "a b.txt", "second")
    expect_run([program, source, target], scratch, "my data.2")
    (target / "my data.10").mkdir()
    expect_run([program, source, target], scratch, "my data.11")
    for number, text in ((1, b"first"), (2, b"second"), (11, b"second")):
        copy = target / f"my data.{number}"
        expect(read_bytes(copy / "a b.txt") == text, f"{copy.name} has the wrong content")
        expect(read_bytes(copy / ".hidden") == b"dot", f"{copy.name} lacks .hidden")
    outcome = run([program, scratch / "none", target], scratch)
    expect(outcome.returncode != 0, "a missing source is not an error")


def _check_csvcol(program: Path, scratch: Path) -> None:
    text = 'id,full name,"a,b"\n1,"Lee, Ann",x\n2,Bo,"say ""hi"""\n3,,z\n'
    put(scratch / "in put.csv", text)
    for column, values in (
        ("id", "1\n2\n3"),
        ("full name", "Lee, Ann\nBo\n"),
        ("a,b", 'x\nsay "hi"\nz'),
    ):
        expect_run([program, "in put.csv", column], scratch, values)
    expect_run([program, "in put.csv", "name"], scratch, "", code=3)


def _check_cronmatch(program: Path, scratch: Path) -> None:
    cases = [
        ("* * * * *", "2024-05-13 03:00", True),
        ("0 3 * * 1", "2024-05-13 03:00", True),
        ("0 3 * * 0", "2024-05-12 03:00", True),
        ("0 3 * * 2", "2024-05-13 03:00", False),
        ("*/15 * * * *", "2024-05-13 03:45", True),
        ("*/15 * * * *", "2024-05-13 03:46", False),
        ("0 9-17 * * 1-5", "2024-05-17 17:00", True),
        ("0 9-17 * * 1-5", "2024-05-18 17:00", False),
        ("5,10 * * * *", "2024-05-13 03:10", True),
        ("5,10-12 * * * *", "2024-05-13 03:11", True),
        ("0 0 29 2 *", "2024-02-29 00:00", True),
        ("10-30/10 * * * *", "2024-05-13 08:20", True),
        ("10-30/10 * * * *", "2024-05-13 08:25", False),
        ("08 08 * * *", "2024-05-13 08:08", True),
    ]
    for expression, moment, is_due in cases:
        expect_run([program, expression, moment], scratch, "yes" if is_due else "no")


def _check_once(program: Path, scratch: Path) -> None:
    lock = scratch / "once.lock"
    expect_run([program, "echo", "two  spaces"], scratch, "two  spaces")
    expect(not lock.exists(), "once.lock stays after a run")
    expect_run([program, "bash", "-c", "test -d once.lock && exit 7"], scratch, "", code=7)
    expect(not lock.exists(), "once.lock stays after a failure")
    lock.mkdir()
    expect_run([program, "touch", "ran"], scratch, "", code=75)
    expect(not (scratch / "ran").exists(), "the command ran in spite of once.lock")
    expect(lock.exists(), "the lock of the other one was removed")


def _check_retry(program: Path, scratch: Path) -> None:
    body = 'echo x >> "tries $1"; [ "$(wc -l < "tries $1")" -ge "$2" ] || exit 9'
    for limit, needed, code, tries in ((3, 1, 0, 1), (3, 3, 0, 3), (3, 5, 9, 3), (1, 2, 9, 1)):
        key = f"{limit} {needed}"
        command = ["bash", "-c", body, "job", key, str(needed)]
        expect_run([program, str(limit), *command], scratch, "", code=code)
        found = len(read_bytes(scratch / f"tries {key}").split())
        expect(found == tries, f"with {limit} tries the command ran {found} times, not {tries}")


INI = """\
; settings
port = 1
[db]
host=db.example
port = 5432
# port = 9
[web server]
 port =  8080
path = /a=b
[empty]
"""


def _check_ini(program: Path, scratch: Path) -> None:
    put(scratch / "app.ini", INI)
    for section, key, value in (
        ("db", "port", "5432"),
        ("web server", "port", "8080"),
        ("web server", "path", "/a=b"),
        ("db", "host", "db.example"),
    ):
        expect_run([program, "app.ini", section, key], scratch, value)
    for section, key in (("empty", "port"), ("none", "port"), ("db", "path"), ("db", "por")):
        expect_run([program, "app.ini", section, key], scratch, "", code=1)


TASKS = {
    "script-sum-46": Task(_empty, _in_scratch("sum.sh", _check_sum)),
    "script-wordfreq-47": Task(_empty, _in_scratch("wordfreq.sh", _check_wordfreq)),
    "script-roman-48": Task(_empty, _in_scratch("roman.sh", _check_roman)),
    "script-backup-49": Task(_empty, _in_scratch("backup.sh", _check_backup)),
    "script-csvcol-50": Task(_empty, _in_scratch("csvcol.py", _check_csvcol)),
    "script-cronmatch-51": Task(_empty, _in_scratch("cronmatch", _check_cronmatch)),
    "script-once-52": Task(_empty, _in_scratch("once.sh", _check_once)),
    "script-retry-53": Task(_empty, _in_scratch("retry.sh", _check_retry)),
    "script-ini-54": Task(_empty, _in_scratch("ini-get.sh", _check_ini)),
}
