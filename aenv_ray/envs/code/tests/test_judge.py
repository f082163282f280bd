"""What a solution may do, and the verdict that it gets."""

from __future__ import annotations

import os
import socket
import threading
import time
from typing import Any

import judging
import pytest
from judge import main, program
from judging import CaseOutcome, JudgeEnded, Limits, Test, judge, with_preamble

EXPECTED = 42424242
SCRIPT = Test(kind="script", source=f"assert f(1) == {EXPECTED}", names=("f",))
PROGRAM = Test(kind="program", input="1\n", expected=f"{EXPECTED}\n")
LIMITS = Limits(cpu_s=1, memory_mib=128)
_EXIT = {"x86_64": 60, "aarch64": 93}[os.uname().machine]
"""The system call that ends only the thread that calls it."""


def verdicts(source: str, *tests: Test) -> list[CaseOutcome]:
    return judge(source, list(tests), LIMITS, 30.0)


FORGERIES = {
    "exits": ("import os; os._exit(0)", "error"),
    "exits in the call": ("import os\ndef f(x): os._exit(0)", "error"),
    "sys.exit": ("import sys\ndef f(x): sys.exit(0)", "error"),
    "equals everything": (
        "class E:\n def __eq__(s, o): return True\ndef f(x): return E()",
        "failed",
    ),
    "equal number": (
        "class E(int):\n def __eq__(s, o): return True\ndef f(x): return E(9)",
        "failed",
    ),
    "builtins": ("import builtins\nbuiltins.AssertionError = str\ndef f(x): return 1", "failed"),
    "prints": ("print('passed')\ndef f(x): print({'verdict': 'passed'})", "failed"),
    "writes everywhere": (
        "import os\nfor n in range(99):\n"
        " try: os.write(n, b'passed' * 9)\n except OSError: pass\ndef f(x): return 1",
        "error",
    ),
    "replies early": (
        "import sys\nok = sys.modules['judge.plain'].encode(('ok', True, ()), id)\n"
        "for _ in range(9): sys.modules['judge.solution']._reply(ok)\ndef f(x): return 1",
        "error",
    ),
    "at exit": ("import atexit, os\natexit.register(os._exit, 0)\ndef f(x): return 1", "failed"),
    "waits": (
        "import os, time\nif not os.fork():\n os.setsid(); time.sleep(99)\ndef f(x): return 1",
        "failed",
    ),
    "kills its parent": ("import os\nos.kill(os.getppid(), 9)", "error"),
    "crashes": ("import ctypes\ndef f(x): ctypes.string_at(0)", "error"),
    "nested": ("def f(x):\n a = []\n for _ in range(9**5): a = [a]\n return a", "error"),
    "itself": ("def f(x):\n a = []; a.append(a)\n return a", "error"),
    "no Python": ("def f(x: return 1", "error"),
    "no function": ("g = 1", "error"),
    "loops": ("def f(x):\n while True: pass", "timeout"),
    "memory": ("def f(x): return len(bytearray(1 << 30))", "memory"),
}


@pytest.mark.parametrize(("source", "verdict"), FORGERIES.values(), ids=FORGERIES)
def test_no_solution_forges_a_verdict(source: str, verdict: str) -> None:
    assert [one.verdict for one in verdicts(source, SCRIPT)] == [verdict]


def test_a_process_whose_main_thread_has_ended_does_not_outlive_its_solution() -> None:
    """The kernel reports its state as that of a process that has ended."""
    name = f"\\0judged-{os.getpid()}"
    source = (
        "import ctypes, os, socket, threading, time\n"
        f"held = socket.socket(socket.AF_UNIX)\nheld.bind('{name}')\n"
        "if not (pid := os.fork()):\n"
        " threading.Thread(target=time.sleep, args=(600,)).start()\n"
        f" ctypes.CDLL(None).syscall({_EXIT}, 0)\n"
        "while ') Z' not in open(f'/proc/{pid}/stat').read(): pass\n"
        "def f(x): return 42424242"
    )
    assert [one.verdict for one in verdicts(source, SCRIPT)] == ["passed"]
    with socket.socket(socket.AF_UNIX) as probe:
        probe.bind(f"\0judged-{os.getpid()}")


def test_a_solution_that_ends_its_judge_has_no_verdicts() -> None:
    ends = (
        "import os\nstarter = os.getppid()\n"
        "stat = open(f'/proc/{starter}/stat').read().rpartition(')')[2].split()\n"
        "os.kill(int(stat[1]), 9)\n"
    )
    with pytest.raises(JudgeEnded, match="signal 9"):
        verdicts(ends, SCRIPT)


@pytest.mark.parametrize("whom", ["starter", "judge"])
def test_a_solution_that_stops_its_judge_is_not_waited_for(whom: str) -> None:
    stops = f"""
import os
starter = os.getppid()
judge = int(open(f"/proc/{{starter}}/stat").read().rpartition(")")[2].split()[1])
os.kill({whom}, 19)
"""
    with pytest.raises(JudgeEnded, match="stopped its judge"):
        judge(stops, [SCRIPT], LIMITS, 600.0)


def test_a_judge_that_starts_late_gets_its_whole_job(monkeypatch: pytest.MonkeyPatch) -> None:
    """The pipes of a busy node are small: its job does not fit in before the judge reads it."""
    monkeypatch.setattr(judging, "_START", f"import time; time.sleep(2.5)\n{judging._START}")
    source = f"def f(x): return 42424242\n# {'x' * 300_000}"
    assert [one.verdict for one in verdicts(source, SCRIPT)] == ["passed"]


def test_a_node_without_processes_is_no_fault_of_the_solution(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    start = judging._START.replace(
        'sys.modules["judge.main"].main()',
        "import os\nforks, fork = [], os.fork\n"
        "def limited():\n"
        "    forks.append(1)\n"
        "    if len(forks) > 1: raise OSError(11, 'no process is left')\n"
        "    return fork()\n"
        'os.fork = limited\nsys.modules["judge.main"].main()',
    )
    monkeypatch.setattr(judging, "_START", start)
    with pytest.raises(RuntimeError, match="no process is left"):
        verdicts("def f(x): return 42424242", SCRIPT)


def test_a_node_whose_cpus_are_taken_is_no_fault_of_the_solution(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    end = 'sys.modules["judge.main"].main()'
    busy = 'sys.modules["judge.main"]._starved_s = lambda pid: 100.0\n'
    waits = "import time\ndef f(x): time.sleep(99)"
    assert [one.verdict for one in judge(waits, [SCRIPT], LIMITS, 6.0)] == ["timeout"]
    monkeypatch.setattr(judging, "_START", judging._START.replace(end, busy + end))
    with pytest.raises(RuntimeError, match="the node is too busy"):
        judge(waits, [SCRIPT], LIMITS, 6.0)


def test_no_test_is_run_if_no_time_is_left_for_it() -> None:
    with pytest.raises(TimeoutError, match=r"4\.0 s are left"):
        judge("def f(x): return 42424242", [SCRIPT], LIMITS, 4.0)


def test_the_last_words_of_a_process_are_read_after_it_has_ended() -> None:
    """`select` may see the end, and not what was written just before it."""
    replies, writer = os.pipe()
    os.write(writer, b"42")
    ended, closed = os.pipe()
    os.close(closed)

    def late(*lists: Any) -> Any:
        return select(*lists) if len(lists) > 3 else ([ended], [], [])

    select = program.select.select
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(program.select, "select", late)
        assert program.output(replies, ended) == "42"
    for fd in (replies, writer, ended):
        os.close(fd)


def test_expected_values_are_not_in_the_memory_of_a_solution() -> None:
    reads = """
import re
def f(x):
    memory, pattern = open('/proc/self/mem', 'rb', 0), re.compile(b'asser[t] f|4242424[2]')
    for start, end in re.findall('([0-9a-f]+)-([0-9a-f]+) rw', open('/proc/self/maps').read()):
        memory.seek(int(start, 16))
        if pattern.search(memory.read(int(end, 16) - int(start, 16))):
            return 'found'
    return 'not found'
"""
    assert [one.got for one in verdicts(reads, SCRIPT)] == ["'not found'"]


def test_a_process_that_a_solution_leaves_does_not_see_the_next_test() -> None:
    leaves = (
        "import os\nchild = os.fork() or os.setsid()\nwhile not child: os.getpid()\n"
        "def f(x): return 1"
    )
    assert [one.verdict for one in verdicts(leaves, SCRIPT, SCRIPT)] == ["failed", "failed"]


def test_after_a_test_that_took_too_long_no_other_runs() -> None:
    loops = "def f(x):\n while True: pass"
    assert [one.verdict for one in verdicts(loops, SCRIPT, SCRIPT)] == ["timeout", "skipped"]


def test_a_verdict_names_what_was_expected_shortened() -> None:
    (one,) = verdicts("def f(x): return 'y' * 100_000", SCRIPT)
    assert one.expected == str(EXPECTED)
    assert one.got is not None
    assert "characters" in one.got
    assert len(one.got) < 400


@pytest.mark.parametrize(
    ("source", "verdict"),
    [
        (f"print({EXPECTED})", "passed"),
        (f"print('  {EXPECTED}.0  ')", "passed"),
        (f"import sys\nprint({EXPECTED})\nsys.exit(1)", "passed"),
        (f"print({EXPECTED})\n1 / 0", "error"),
        ("print(input())", "failed"),
        ("while True: print('x' * 99_999)", "error"),
        ("while True: pass", "timeout"),
        ("x = bytearray(1 << 30)", "memory"),
    ],
)
def test_programs_are_judged_by_what_they_print(source: str, verdict: str) -> None:
    assert [one.verdict for one in verdicts(source, PROGRAM)] == [verdict]


VALUES = (
    "None", "True", "10**400", "-1.5", "float('inf')", "1j", "'\\ud800é'", "b'x'", "[1, (2, {3})]",
    "{'a': frozenset({1})}", "range(1, 9, 2)", "__import__('decimal').Decimal('1.10')",
    "__import__('fractions').Fraction(1, 3)", "__import__('collections').deque([1], 2)",
    "__import__('datetime').date(2024, 2, 29)", "int", "{'a': 1}.items()",
)  # fmt: skip


def test_a_program_may_end_with_quit_and_recurse_deeply() -> None:
    deep = "import sys\nsys.setrecursionlimit(50000)\ndef f(n): return n and 1 + f(n - 1)\n"
    (one,) = verdicts(f"{deep}print({EXPECTED - 40000} + f(40000)); quit()\nprint(1)", PROGRAM)
    assert one.verdict == "passed"


@pytest.mark.parametrize(
    ("field", "code", "message"),
    [
        ("source", "import numpy as np\nassert f(1) == 1", "it imports numpy"),
        ("setup", "from a.b import c", "it imports a.b"),
        ("setup", "def f(:", "it is not Python"),
    ],
)
def test_a_test_that_no_solution_could_pass_is_refused(field: str, code: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Test.model_validate({"kind": "script", "source": "assert f(1)", field: code})


def test_values_arrive_in_tests_as_they_are() -> None:
    tests = [
        Test(kind="script", source=f"assert same({one}) == {one}", names=("same",))
        for one in VALUES
    ]
    found = verdicts("def same(x): return x", *tests)
    assert [one.verdict for one in found] == ["passed"] * len(VALUES), found


def test_tests_use_iterators_classes_exceptions_and_changes_in_place() -> None:
    source = """
from collections import Counter
class Own(Exception): pass
class Tree:
    def __init__(self, value): self.value, self.left = value, None
def total(tree): return tree.value + (total(tree.left) if tree.left else 0)
def count():
    n = 0
    while True:
        yield n
        n += 1
def fail(kind): raise {"own": Own, "value": ValueError}[kind]("no")
def clear(items, *, all): items.clear()
"""
    tests = [
        "numbers = count()\nassert [next(numbers) for _ in range(3)] == [0, 1, 2]",
        "root = Tree(1)\nroot.left = Tree(2)\nassert total(root) == 3 and root.left.value == 2",
        "try: fail('value')\nexcept ValueError as exc: assert str(exc) == 'no'",
        "try: fail('own')\nexcept Exception as exc: assert 'Own' in str(exc)",
        "items = [1]\nclear(items, all=True)\nassert items == []",
        "assert math.isclose(1, 1)",
    ]
    names = ("Tree", "total", "count", "fail", "clear")
    found = verdicts(source, *(Test(kind="script", source=one, names=names) for one in tests))
    assert [one.verdict for one in found] == ["passed"] * len(tests), found


def test_a_solution_cannot_replace_the_modules_of_a_test() -> None:
    test = Test(kind="script", source="assert math.isclose(f(1), 3.0)", names=("f",))
    source = "class math:\n isclose = lambda *a: True\ndef f(x): return 99.0"
    assert verdicts(source, test)[0].verdict == "failed"


@pytest.mark.parametrize("is_class", [True, False])
def test_calls_accept_methods_functions_and_tuples(is_class: bool) -> None:
    test = Test(kind="call", function="f", is_method=True, arguments=([1, 2],), expected=[2, 1])
    function = "def f(self, x): return tuple(x[::-1])"
    source = f"class Solution:\n {function}" if is_class else function.replace("self, ", "")
    assert verdicts(source, test)[0].verdict == "passed"


def test_a_submission_may_be_a_body_or_a_program() -> None:
    head = 'from math import pi\n\ndef f(x):\n    """Return it."""\n'
    body, program = f"    return {EXPECTED}\n", f"def f(x): return {EXPECTED} + 0 * pi\n"
    for submission in (
        body,
        program,
        f"from __future__ import annotations\ndef f(x): return {EXPECTED}",
    ):
        assert verdicts(with_preamble(head, submission), SCRIPT)[0].verdict == "passed"


def test_a_solution_starts_with_no_variables_and_no_files_of_the_agent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PYTHONPATH", os.getcwd())
    source = "import os, sys\ndef f(x): return [sorted(os.environ), os.listdir(), '' in sys.path]"
    test = Test(
        kind="script", source="assert f(1) == [['HOME', 'LANG', 'PATH'], [], False]", names=("f",)
    )
    assert verdicts(source, test)[0].verdict == "passed"


def test_what_a_solution_waits_for_a_cpu_is_not_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(main, "_starved_s", lambda pid: 0.3)
    started = time.monotonic()
    with pytest.raises(main.TimeIsUp), main._time_limit(0.1, started + 60.0, pid=0):
        threading.Event().wait(30.0)
    assert 0.4 <= time.monotonic() - started < 30.0
