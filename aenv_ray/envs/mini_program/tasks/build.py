"""Writes tasks.jsonl from the directories beside this file.

    python tasks/build.py

``task.json`` has the instruction and the checks of a task, ``app/`` its reference solution, and
``start/`` the files with which it starts, if any. Each ``style.css`` begins with ``base.css``.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
TASKS = HERE.parent / "tasks.jsonl"
GRADING_S = 300
"""As in the environment: browsers take seconds of CPU, and a busy node has little."""


def lines() -> str:
    """Return the content of tasks.jsonl."""
    rows = [_row(path.parent) for path in sorted(HERE.glob("*/task.json"))]
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


def _row(directory: Path) -> dict[str, Any]:
    task = json.loads((directory / "task.json").read_text(encoding="utf-8"))
    setup = {"browser_required": task.get("browser", True), "files": _files(directory / "start")}
    checks = {name: task[name] for name in ("behaviour", "structure") if name in task}
    app = _files(directory / "app")
    return {
        "id": directory.name,
        "instruction": task["instruction"],
        "setup": {"function": "start_app", "arguments": setup},
        "reward": {"name": "app_works", "arguments": checks, "timeout_s": GRADING_S},
        "reference": [
            {"tool": "write_file", "arguments": {"path": path, "content": content}}
            for path, content in app.items()
        ],
    }


def _files(directory: Path) -> dict[str, str]:
    return {
        path.relative_to(directory).as_posix(): _content(path)
        for path in sorted(directory.rglob("*"))
        if path.is_file()
    }


def _content(path: Path) -> str:
    text = path.read_text(encoding="utf-8")
    if path.name != "style.css":
        return text
    return (HERE / "base.css").read_text(encoding="utf-8") + "\n" + text


if __name__ == "__main__":
    TASKS.write_text(lines(), encoding="utf-8")
