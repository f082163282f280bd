"""Tasks about logs."""

from __future__ import annotations

import math
import re
from collections import Counter
from pathlib import Path

from tasks.base import Task, expect_lines, put, rng


def _access() -> list[tuple[str, int, str]]:
    random = rng("client-errors-40")
    addresses = [f"10.0.{a}.{b}" for a in (0, 1) for b in range(2, 12)]
    weights = [random.random() ** 3 for _ in addresses]
    rows = [
        (ip, random.choice([200, 200, 301, 404, 403, 500]), random.choice(["/404", "/a", "/403"]))
        for ip in random.choices(addresses, weights, k=700)
    ]
    # A tie at the top, so that the order within it matters.
    return rows + [(ip, 404, "/t") for ip in ("10.0.9.10", "10.0.9.9") for _ in range(200)]


def _set_client_errors(root: Path) -> None:
    rows = _access()
    rng("shuffle").shuffle(rows)
    put(
        root / "access.log",
        "".join(f'{ip} - - [11/May/2024] "GET {path} HTTP/1.1" {s} 512\n' for ip, s, path in rows),
    )


def _check_client_errors(root: Path) -> None:
    counts = Counter(ip for ip, status, _ in _access() if 400 <= status < 500)
    ranked = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    expect_lines(root / "top.txt", [f"{count} {ip}" for ip, count in ranked[:3]])


def _app() -> list[str]:
    random = rng("log-window-41")
    seconds = sorted(random.sample(range(9 * 3600, 12 * 3600), 400))
    edges = [10 * 3600 + 15 * 60, 10 * 3600 + 45 * 60]
    lines = []
    for second in sorted({*seconds, *edges}):
        clock = f"{second // 3600:02}:{second // 60 % 60:02}:{second % 60:02}"
        lines.append(f"2024-05-11 {clock} {random.choice(['INFO', 'WARN'])} retry at 10:30:00")
    return lines


def _check_log_window(root: Path) -> None:
    expected = [line for line in _app() if "10:15:00" <= line.split()[1] < "10:45:00"]
    expect_lines(root / "window.log", expected)


def _logins() -> list[tuple[int, str, str]]:
    random = rng("log-sessions-42")
    rows, inside, now = [], set[str](), 1_700_000_000
    for _ in range(160):
        now += random.randint(1, 500)
        user = random.choice(["ann", "bob", "cat", "dan", "eve"])
        rows.append((now, user, "logout" if user in inside else "login"))
        inside ^= {user}
    return rows


def _check_log_sessions(root: Path) -> None:
    totals: Counter[str] = Counter()
    since: dict[str, int] = {}
    for now, user, event in _logins():
        if event == "login":
            since[user] = now
        else:
            totals[user] += now - since.pop(user)
    expect_lines(root / "online.txt", [f"{user} {totals[user]}" for user in sorted(totals)])


def _latencies() -> list[tuple[str, int]]:
    random = rng("percentile-43")
    return [
        (random.choice(["/api", "/home", "/cart"]), int(random.expovariate(0.01)) + 5)
        for _ in range(333)
    ]


def _check_percentile(root: Path) -> None:
    lines = []
    for path in ("/api", "/cart", "/home"):
        values = sorted(ms for p, ms in _latencies() if p == path)
        lines.append(f"{path} {values[math.ceil(0.95 * len(values)) - 1]}")
    expect_lines(root / "p95.txt", lines)


def _traces() -> str:
    random = rng("exceptions-44")
    kinds = ["ValueError", "KeyError", "app.errors.QuotaError", "TimeoutError"]
    parts = []
    for number in range(90):
        kind = random.choice(kinds)
        parts.append(f"INFO request {number} done\n")
        if random.random() < 0.3:
            parts.append(f"WARN handled ValueError: in request {number}\n")
        if random.random() < 0.6:
            parts.append(
                "ERROR failed\nTraceback (most recent call last):\n"
                f'  File "x.py", line {number}, in f\n    raise {kind}: no\n{kind}: item {number}\n'
            )
    return "".join(parts)


def _check_exceptions(root: Path) -> None:
    kinds = re.findall(r"^(?:\w+\.)*(\w+Error): item", _traces(), re.MULTILINE)
    ranked = sorted(Counter(kinds).items(), key=lambda item: (-item[1], item[0]))
    expect_lines(root / "exceptions.txt", [f"{count} {kind}" for kind, count in ranked])


CRONTAB = """\
# m h dom mon dow command
0 3 * * * /opt/nightly.sh
*/15 * * * * /opt/poll.sh --fast
0 3 * * 1 /opt/weekly.sh
30 3 * * * /opt/half.sh
0 1-5 * * * /opt/range.sh a b
#0 3 * * * /opt/disabled.sh
0 2,3 1 * * /opt/first.sh
0 */2 * * * /opt/even.sh
10,20 3 * * * /opt/tens.sh
* 3 * 5 * /opt/may.sh
0 */3 * 4 * /opt/april.sh
MAILTO=ops@example.org

0 0 * * 0 /opt/sunday.sh
"""
DUE = [
    "/opt/nightly.sh",
    "/opt/poll.sh --fast",
    "/opt/weekly.sh",
    "/opt/range.sh a b",
    "/opt/may.sh",
]
"""What runs on Monday, 13 May 2024, at 03:00."""

TASKS = {
    "client-errors-40": Task(_set_client_errors, _check_client_errors),
    "log-window-41": Task(
        lambda root: put(root / "app.log", "\n".join(_app()) + "\n"), _check_log_window
    ),
    "log-sessions-42": Task(
        lambda root: put(root / "auth.log", "".join(f"{t} {u} {e}\n" for t, u, e in _logins())),
        _check_log_sessions,
    ),
    "percentile-43": Task(
        lambda root: put(root / "latency.log", "".join(f"{p} {ms}\n" for p, ms in _latencies())),
        _check_percentile,
    ),
    "exceptions-44": Task(lambda root: put(root / "app.log", _traces()), _check_exceptions),
    "crontab-45": Task(
        lambda root: put(root / "crontab.txt", CRONTAB),
        lambda root: expect_lines(root / "due.txt", DUE),
    ),
}
