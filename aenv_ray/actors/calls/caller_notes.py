"""What a running tool sends to its caller besides its result, on its way through the host.

It travels as a progress report: one without a progress has, as its message, the JSON text of a note
of `aenv_ray.runtime.door.caller_link`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any, Final

import pydantic_core

from aenv_ray.models import LogMessage, Question
from aenv_ray.runtime.door.caller_link import LOG, Note

Report = tuple[float | None, float | None, str | None]
"""Progress, total and message, as a tool reports them; or a note."""


MAX_REPORTS: Final = 1000
MAX_REPORTS_CHARACTERS: Final = 4 * 1024 * 1024


class HeldReports:
    """The reports of one call that its reader has not taken yet.

    A slow reader loses the oldest beyond `MAX_REPORTS` or `MAX_REPORTS_CHARACTERS`.
    """

    def __init__(self) -> None:
        self._reports: deque[Report] = deque()
        self._characters = 0

    def __len__(self) -> int:
        return len(self._reports)

    def __iter__(self) -> Iterator[Report]:
        return iter(self._reports)

    def add(self, report: Report) -> None:
        """Hold a report."""
        self._reports.append(report)
        self._characters += len(report[2] or "")
        while (
            len(self._reports) > MAX_REPORTS or self._characters > MAX_REPORTS_CHARACTERS
        ) and len(self._reports) > 1:
            self.pop()

    def pop(self) -> Report:
        """Return the oldest, and hold it no more."""
        report = self._reports.popleft()
        self._characters -= len(report[2] or "")
        return report

    def clear(self) -> None:
        """Hold none any more."""
        self._reports.clear()
        self._characters = 0


def note_of(report: Report) -> Note | None:
    """Return the note in a report; None if it is progress."""
    progress, _, text = report
    if progress is not None or text is None:
        return None
    note: Note = pydantic_core.from_json(text)
    return note


def message_of(note: Note) -> LogMessage | Question | None:
    """Return a note for callers in Python; None for one that they do not need."""
    method, params = str(note.get("method")), note.get("params") or {}
    question = note.get("question")
    if method == LOG:
        data: Any = params.get("data") or {}
        return LogMessage(str(params.get("level")), str(data.get("msg")), data.get("extra"))
    if question is None or method.startswith("notifications/"):
        return None
    return Question(str(question), method, params)
