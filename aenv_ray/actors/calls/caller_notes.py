"""What a running tool sends to its caller besides its result, on its way through the host.

It travels as a progress report: one without a progress has, as its message, the JSON text of a note
of `aenv_ray.runtime.door.caller_link`.
"""

from __future__ import annotations

from typing import Any

import pydantic_core

from aenv_ray.models import LogMessage, Question
from aenv_ray.runtime.door.caller_link import LOG, Note

Report = tuple[float | None, float | None, str | None]
"""Progress, total and message, as a tool reports them; or a note."""


def report_of(note: Note) -> Report:
    """Return a note as a report."""
    return None, None, pydantic_core.to_json(note).decode()


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
