"""``python -m benchmarks peers``: the same work on aenv-ray and on other libraries, one at a time.

Each library is installed by uv into a virtual environment of its own, which is kept in the cache
directory of the user. The table and the chart go to ``benchmarks/README.md`` and
``benchmarks/peers.svg``.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import math
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final
from xml.sax.saxutils import escape

from benchmarks.readme import machine, replace_section

HERE: Final = Path(__file__).parent
CHART: Final = HERE.parent / "peers.svg"
PEER_S: Final = 900.0
"""Longest run of one library."""


@dataclass(frozen=True)
class Library:
    """One library.

    Args:
        script: Which measures it.
        label: In the table.
        requirements: Of its virtual environment; none: it runs in this one.
        does_not: What it does not do that aenv-ray does.
    """

    script: str
    label: str
    requirements: tuple[str, ...] = ()
    does_not: str = ""


LIBRARIES: Final = {
    "aenv-ray": Library("aenv_ray_process", "aenv-ray, process engine"),
    "ray-actor": Library(
        "ray_actor",
        "a Ray actor for each environment",
        does_not="isolates nothing from the network, the files or Ray; no rewards, records or "
        "deadlines; a call may run twice or not at all after a failure",
    ),
    "aenvironment": Library(
        "aenvironment_server",
        "AEnvironment, client and server",
        ("aenvironment==0.1.7",),
        "needs its Kubernetes service to create environments: here a script starts its server, "
        "without isolation; no sampler",
    ),
    "openenv": Library(
        "openenv_server",
        "OpenEnv, local server",
        ("openenv-core==0.3.0",),
        "environments of a local server share one process and are not isolated from each other",
    ),
    "swe-rex": Library(
        "swe_rex_local",
        "SWE-ReX, local deployment",
        ("swe-rex==1.4.0",),
        "runs shell commands on the machine itself, without isolation; no tools, rewards or "
        "sampler",
    ),
    "verifiers": Library(
        "verifiers_runtime",
        "verifiers, local runtime",
        ("verifiers==0.4.0",),
        "its local runtime is a directory in which each call starts a process, without isolation; "
        "its sandboxes are containers or hosted services",
    ),
    "fastmcp": Library(
        "fastmcp_server",
        "FastMCP, a server for each environment",
        ("fastmcp==4.1.2",),
        "a protocol and not an environment: no isolation, rewards, deadlines of instances or "
        "sampler",
    ),
}
FIGURES: Final = {
    "create_ms": "create → first result, ms",
    "call_ms": "call p50, ms",
    "calls_per_s_1": "calls/s, 1 caller",
    "calls_per_s_16": "calls/s, 16 callers",
    "calls_per_s_256": "calls/s, 256 callers",
    "burst_100_s": "burst of 100, s",
    "episodes_per_s": "episodes/s",
    "memory_mib": "memory each, MiB",
}
IN_CHART: Final = ("create_ms", "call_ms", "calls_per_s_16", "burst_100_s", "episodes_per_s")


@dataclass
class Measured:
    """What came of one library."""

    values: dict[str, float] = field(default_factory=dict)
    errors: dict[str, str] = field(default_factory=dict)
    failure: str = ""
    """Why nothing could be measured; empty if something was."""


def main(words: Sequence[str]) -> None:
    """Measure, print, and write the table and the chart unless only some libraries were chosen."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks peers", description=__doc__)
    parser.add_argument("--only", nargs="+", choices=LIBRARIES, help="for trying; writes nothing")
    options = parser.parse_args(words)
    found = {}
    for name in options.only or LIBRARIES:
        print(f"{name} …", file=sys.stderr, flush=True)
        found[name] = _measured(LIBRARIES[name])
        print(f"  {found[name].failure or found[name].values}", file=sys.stderr, flush=True)
    text = table(found)
    print(text)
    if options.only is None:
        CHART.write_text(chart(found), encoding="utf-8")
        picture = "![Chart of these figures](peers.svg)"
        replace_section("peers", f"{machine()}\n\n{text}\n\n{picture}")


# --- measuring -----------------------------------------------------------------------------------


def _measured(library: Library) -> Measured:
    try:
        python = _python(library)
    except subprocess.CalledProcessError as exc:
        return Measured(failure=f"it does not install: {_last_line(exc.stderr)}")
    process = subprocess.Popen(
        [python, str(HERE / f"{library.script}.py")],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
        env=os.environ | ({} if library.requirements else {"PYTHONPATH": str(HERE.parent.parent)}),
    )  # fmt: skip
    try:
        lines, log = process.communicate(timeout=PEER_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        lines, log = process.communicate()
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)  # what a figure that was given up left behind
    result = Measured()
    for line in filter(lambda one: one.startswith('{"figure"'), lines.splitlines()):
        one = json.loads(line)
        if "value" in one:
            result.values[one["figure"]] = one["value"]
        else:
            result.errors[one["figure"]] = one["error"]
            print(f"  {one['figure']}: {one['error']}", file=sys.stderr)
    if not result.values:
        result.failure = f"it does not run: {_last_line(log)}"
    return result


def _python(library: Library) -> str:
    """Return the interpreter of a library, once it is installed.

    Raises:
        CalledProcessError: It cannot be installed.
    """
    if not library.requirements:
        return sys.executable
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "aenv-ray", "peers")
    wanted = "\n".join((sys.version, *library.requirements)).encode()
    directory = cache / f"{library.script}-{hashlib.sha256(wanted).hexdigest()[:12]}"
    python = directory / "bin" / "python"
    done = directory / "installed"
    if not done.exists():
        _uv("venv", "--clear", "--python", sys.executable, str(directory))
        _uv("pip", "install", "--python", str(python), *library.requirements)
        done.touch()
    return str(python)


def _uv(*words: str) -> None:
    command = [sys.executable, "-m", "uv", *words]
    subprocess.run(command, check=True, capture_output=True, text=True, timeout=PEER_S)


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1][:200] if lines else "it printed nothing"


# --- showing -------------------------------------------------------------------------------------


def number(value: float) -> str:
    """Return a figure with three significant digits."""
    if value >= 100:
        return f"{value:,.0f}"
    return f"{value:.{max(0, 2 - math.floor(math.log10(value)))}f}" if value > 0.001 else "0"


def table(found: Mapping[str, Measured]) -> str:
    """Return the figures in Markdown, and what each library does not do."""
    lines = ["| | " + " | ".join(FIGURES.values()) + " |", "|---|" + "--:|" * len(FIGURES)]
    for name, result in found.items():
        label = LIBRARIES[name].label
        if result.failure:
            cells = [result.failure.replace("|", "/"), *([""] * (len(FIGURES) - 1))]
        else:
            cells = [_cell(result, key) for key in FIGURES]
        lines.append(f"| {label} | " + " | ".join(cells) + " |")
    lines += ["", "| | what it does not do |", "|---|---|"]
    for name in found:
        if LIBRARIES[name].does_not:
            lines.append(f"| {LIBRARIES[name].label} | {LIBRARIES[name].does_not} |")
    return "\n".join(lines)


def _cell(result: Measured, key: str) -> str:
    if key in result.values:
        return number(result.values[key])
    return "> 60 s" if "TimeoutError" in result.errors.get(key, "") else "failed"


_ROW, _LABEL, _BAR = 20, 280, 460


def chart(found: Mapping[str, Measured]) -> str:
    """Return the figures as bars on a logarithmic scale, as SVG."""
    parts: list[str] = []
    y = 0
    for key in IN_CHART:
        values = {n: one.values[key] for n, one in found.items() if one.values.get(key, 0.0) > 0}
        y += 30
        parts.append(f'<text x="8" y="{y}" font-weight="bold">{escape(FIGURES[key])}</text>')
        y += 8
        if not values:
            continue
        low = math.log10(min(values.values())) - 0.3
        span = math.log10(max(values.values())) - low
        for name, value in values.items():
            width = _BAR * (math.log10(value) - low) / span
            colour = "#1f77b4" if name == "aenv-ray" else "#b0b0b0"
            y += _ROW
            parts.append(f'<text x="16" y="{y - 5}">{escape(LIBRARIES[name].label)}</text>')
            parts.append(
                f'<rect x="{_LABEL}" y="{y - 16}" width="{width:.1f}" height="14" fill="{colour}"/>'
            )
            parts.append(f'<text x="{_LABEL + width + 6:.1f}" y="{y - 5}">{number(value)}</text>')
    width = _LABEL + _BAR + 90
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{y + 16}" '
        f'font-family="sans-serif" font-size="12">'
        f'<rect width="{width}" height="{y + 16}" fill="white"/>'
    )
    return "\n".join([head, *parts, "</svg>", ""])
