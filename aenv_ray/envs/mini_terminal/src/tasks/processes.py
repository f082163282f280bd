"""Tasks about processes, signals and the persistent shell."""

from __future__ import annotations

import hashlib
import time
from pathlib import Path

from tasks.base import Failed, Task, expect, expect_lines, put, read_text

SETTLE_S = 3.0

WORKER = """\
#!/bin/bash
# Works until it is told to stop.
while :; do sleep 60; done
"""


def _expect_worker(root: Path, name: str, is_alive: bool) -> None:
    """Expect that the process whose id is in ``<name>.pid`` is a worker, or has ended.

    Waits a moment for a process that was just started or signalled.
    """
    text = read_text(root / f"{name}.pid").strip()
    expect(text.isdecimal(), f"{name}.pid does not hold one process id")
    deadline = time.monotonic() + SETTLE_S
    while True:
        try:
            data = Path(f"/proc/{int(text)}/cmdline").read_bytes()
        except (FileNotFoundError, ProcessLookupError):
            data = b""
        arguments = data.decode("utf-8", "replace").split("\0")[:-1]
        is_worker = any(Path(argument).name == "worker.sh" for argument in arguments[:2])
        if is_worker is is_alive and (is_alive or not arguments):
            return
        if time.monotonic() > deadline:
            found = " ".join(arguments[:3]) or "no process"
            raise Failed(f"the process id in {name}.pid belongs to: {found}")
        time.sleep(0.01)


START = """\
#!/bin/bash
# Starts three workers, each noting its process id in <name>.pid.
for name in alpha beta gamma; do
    nohup ./worker.sh "$name" >/dev/null 2>&1 &
    echo $! > "$name.pid"
done
while ! [ -e alpha.up -a -e beta.up -a -e gamma.up ]; do sleep 0.01; done
"""
POLITE = """\
#!/bin/bash
# Works until SIGTERM, then notes its farewell.
trap 'echo "goodbye from $1" > "$1.bye"; exit 0' TERM
touch "$1.up"
while :; do sleep 60 & wait $!; done
"""


def _set_stop_one(root: Path) -> None:
    put(root / "start.sh", START, 0o755)
    put(root / "worker.sh", POLITE, 0o755)


def _check_stop_one(root: Path) -> None:
    for name in ("alpha", "gamma", "beta"):
        _expect_worker(root, name, is_alive=name != "beta")
    expect_lines(root / "beta.bye", ["goodbye from beta"])


SESSION = (
    "# To be sourced.\nSESSION_TOKEN=$(printf '%s' \"tok-$((17 * 23))\")\nexport SESSION_TOKEN\n"
)
FINISH = """\
#!/bin/bash
# Works only in the directory inner, in a session.
[ "${PWD##*/}" = inner ] || { echo "wrong directory" >&2; exit 1; }
printf '%s' "$SESSION_TOKEN:$SESSION_USER" | sha256sum | cut -d' ' -f1 > ../result.txt
"""


def _set_session(root: Path) -> None:
    put(root / "session.sh", SESSION)
    put(root / "finish.sh", FINISH, 0o755)
    (root / "inner").mkdir()


def _check_session(root: Path) -> None:
    digest = hashlib.sha256(b"tok-391:ada").hexdigest()
    expect_lines(root / "result.txt", [digest])


def _check_exit_codes(root: Path) -> None:
    expect_lines(root / "codes.txt", [f"job{n}.sh {n * n % 7}" for n in (1, 2, 3, 4, 5, 12)])


def _set_exit_codes(root: Path) -> None:
    for number in (1, 2, 3, 4, 5, 12):
        body = f"#!/bin/bash\necho working\nexit {number * number % 7}\n"
        put(root / f"jobs/job{number}.sh", body, 0o755)


STREAMS = """\
#!/bin/bash
for n in 1 2 3 4; do
    echo "out $n"
    echo "err $n" >&2
done
exit 3
"""


def _check_streams(root: Path) -> None:
    expect_lines(root / "out.log", [f"out {n}" for n in range(1, 5)])
    expect_lines(root / "err.log", [f"err {n}" for n in range(1, 5)])
    merged = [f"{kind} {n}" for n in range(1, 5) for kind in ("out", "err")]
    expect_lines(root / "all.log", merged)
    expect_lines(root / "code.txt", ["3"])


TASKS = {
    "background-61": Task(
        lambda root: put(root / "worker.sh", WORKER, 0o755),
        lambda root: _expect_worker(root, "worker", is_alive=True),
        is_about_running=True,
    ),
    "stop-one-62": Task(_set_stop_one, _check_stop_one, is_about_running=True),
    "session-63": Task(_set_session, _check_session),
    "exit-codes-64": Task(_set_exit_codes, _check_exit_codes),
    "streams-65": Task(lambda root: put(root / "noisy.sh", STREAMS, 0o755), _check_streams),
}
