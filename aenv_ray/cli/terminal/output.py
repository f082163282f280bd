"""Printing of results: a table for people, JSON or YAML for programs, and progress bars."""

from __future__ import annotations

import contextlib
import json
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from enum import StrEnum
from typing import Any, Final

from aenv_ray.cli.terminal import console
from aenv_ray.findings import Finding, Verdict

_GAP: Final = "  "
_LEAST: Final = 8
"""Minimum width of a column on a narrow terminal."""
_BOLD, _OFF = "\033[1m", "\033[0m"

Columns = Mapping[str, Callable[[Any], Any]]
"""Heading → function that returns a row's value."""

_FINDING_COLUMNS: Final[Columns] = {
    "CHECK": lambda c: c["name"],
    "": lambda c: c["verdict"],
    "FOUND": lambda c: c["found"],
}


class Format(StrEnum):
    """How a result is printed."""

    TABLE = "table"
    JSON = "json"
    YAML = "yaml"


def chosen(given: Format | None) -> Format:
    """Return the format of the option, else of the config file, else a table.

    Raises:
        ConfigError: The config file cannot be read.
    """
    if given is not None:
        return given
    from aenv_ray.cli.terminal import config_file

    return Format(config_file.find().values.output)


def show_rows(
    rows: Sequence[Any],
    given: Format | None,
    columns: Columns,
    *,
    empty: str = "nothing",
    cut_first: str = "",
) -> None:
    """Print a list.

    Args:
        rows: JSON data.
        given: The ``-o`` option.
        columns: Columns of the table.
        empty: Printed on standard error instead of an empty table.
        cut_first: Heading of the column that is cut before others on a narrow terminal.
    """
    form = chosen(given)
    if form is not Format.TABLE:
        _write(as_text(list(rows), form))
    elif rows:
        cells = [[_cell(get(row)) for get in columns.values()] for row in rows]
        _write(table(cells, list(columns), cut_first))
    else:
        console.say(empty)


def show(data: Any, given: Format | None, lines: Mapping[str, Any] | str | None = None) -> None:
    """Print one result.

    Args:
        data: JSON data.
        given: The ``-o`` option.
        lines: Shown instead in a table: text, or names with values. None shows `data`.
    """
    form = chosen(given)
    if form is not Format.TABLE:
        _write(as_text(data, form))
        return
    shown = data if lines is None else lines
    if isinstance(shown, Mapping):
        shown = pairs(shown)
    _write(printable(str(shown), keep="\n\t") + "\n")


def show_findings(findings: Sequence[Finding], given: Format | None) -> None:
    """Print findings on standard output, and how to fix them on standard error."""
    show_rows([asdict(finding) for finding in findings], given, _FINDING_COLUMNS)
    for finding in findings:
        if finding.mend and finding.verdict is not Verdict.OK:
            console.say(f"\n{finding.name}: {finding.found}\n  {finding.mend}")


def show_done(data: Any, given: Format | None) -> None:
    """Print the result of an action as data; in a table format, print nothing."""
    if chosen(given) is not Format.TABLE:
        show(data, given)


def as_text(data: Any, form: Format) -> str:
    """Return JSON data as JSON or YAML."""
    if form is Format.YAML:
        import yaml

        dump: Any = yaml.safe_dump
        text = json.dumps(data, ensure_ascii=False)
        plain = json.loads(text)  # yaml.safe_dump refuses string enums
        # PyYAML writes this line break as it is, and reads it back as a space.
        return str(dump(plain, sort_keys=False, allow_unicode="\x85" not in text))
    return json.dumps(data, indent=2, ensure_ascii=not _can_write(data)) + "\n"


def _can_write(data: Any) -> bool:
    """Return whether standard output can encode the data."""
    try:
        json.dumps(data, ensure_ascii=False).encode(sys.stdout.encoding or "ascii")
    except (UnicodeEncodeError, LookupError):
        return False
    return True


def pairs(values: Mapping[str, Any]) -> str:
    """Return names and values as aligned lines, without empty values."""
    from rich.cells import cell_len, set_cell_size

    known = {
        name: _cell(value) for name, value in values.items() if value not in (None, "", [], {})
    }
    width = max(map(cell_len, known), default=0)
    return "\n".join(f"{set_cell_size(name, width)}{_GAP}{known[name]}" for name in known)


def table(rows: Sequence[Sequence[str]], headings: Sequence[str], cut_first: str = "") -> str:
    """Return aligned rows; on a terminal all columns but the first are cut to its width."""
    from rich.cells import cell_len

    everything = [list(headings), *rows]
    widths = [max(cell_len(row[n]) for row in everything) for n in range(len(headings))]
    terminal = sys.stdout.isatty()
    if terminal:
        first = headings.index(cut_first) if cut_first else None
        widths = fitted(widths, shutil.get_terminal_size().columns, first)
    lines = [_line(row, widths) for row in everything]
    if terminal and console.wants_colour():
        lines[0] = f"{_BOLD}{lines[0]}{_OFF}"
    return "\n".join(lines) + "\n"


def fitted(widths: Sequence[int], available: int, cut_first: int | None = None) -> list[int]:
    """Return column widths that fit: the widest are reduced first, to at least `_LEAST`.

    The first column keeps its width, as its names are used in further commands.

    Args:
        widths: Of the columns.
        available: Width of the terminal.
        cut_first: Number of the column that is reduced before others; None: none is.
    """
    first, *result = widths
    over = first + sum(result) + len(_GAP) * len(result) - available
    if cut_first and over > 0:
        taken = min(over, max(0, result[cut_first - 1] - _LEAST))
        result[cut_first - 1] -= taken
        over -= taken
    while over > 0 and result:
        widest = max(range(len(result)), key=result.__getitem__)
        if result[widest] <= _LEAST:
            break
        result[widest] -= 1
        over -= 1
    return [first, *result]


def _line(row: Sequence[str], widths: Sequence[int]) -> str:
    from rich.cells import cell_len, set_cell_size

    cells = [
        text if cell_len(text) <= width else f"{set_cell_size(text, width - 1)}…"
        for text, width in zip(row, widths, strict=True)
    ]
    padded = [set_cell_size(text, width) for text, width in zip(cells, widths, strict=True)]
    return _GAP.join(padded).rstrip()


def _cell(value: Any) -> str:
    if value is None or value == "":
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, Mapping):
        return printable(",".join(f"{k}={v}" for k, v in value.items())) or "-"
    if isinstance(value, list | tuple):
        return printable(", ".join(map(str, value))) or "-"
    return printable(" ".join(str(value).split()))


def printable(text: str, *, keep: str = "") -> str:
    """Return text without control characters, which could change the terminal's state."""
    return "".join(c if c.isprintable() or c in keep else "\ufffd" for c in text)


def moment(value: Any) -> str:
    """Return a local time, from seconds since the epoch or ISO 8601."""
    if value in (None, ""):
        return "-"
    try:
        when = (
            datetime.fromtimestamp(float(value), UTC)
            if isinstance(value, int | float)
            else datetime.fromisoformat(str(value))
        )
        return when.astimezone().strftime("%Y-%m-%d %H:%M:%S")
    except (ValueError, OverflowError, OSError):
        return str(value)


def size(count: int) -> str:
    """Return a number of bytes with a unit."""
    number = float(count)
    for unit in ("B", "KiB", "MiB"):
        if number < 1024:
            return f"{number:.0f} {unit}" if unit == "B" else f"{number:.1f} {unit}"
        number /= 1024
    return f"{number:.1f} GiB"


def _write(text: str) -> None:
    encoding = sys.stdout.encoding or "utf-8"
    sys.stdout.write(text.encode(encoding, "replace").decode(encoding))
    sys.stdout.flush()


@contextlib.contextmanager
def progress(what: str, total: int) -> Iterator[Callable[[int], None]]:
    """Show a progress bar while the block runs, if standard error is a terminal.

    Args:
        what: Label of the bar.
        total: Number of bytes.

    Yields:
        A function to call with the number of bytes transferred since the last call.
    """
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(binary_units=True),
               TransferSpeedColumn())  # fmt: skip
    terminal = Console(stderr=True)
    with Progress(*columns, console=terminal, disable=not terminal.is_terminal) as bar:
        task = bar.add_task(what, total=total)
        yield lambda count: bar.advance(task, count)
