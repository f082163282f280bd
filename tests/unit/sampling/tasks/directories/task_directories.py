"""Small tasks in the formats of Terminal-Bench 1 and Harbor, written to a directory."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

TERMINAL_BENCH = {
    "task.yaml": "instruction: Write 4 to /app/sum.\nparser_name: pytest\n"
    "max_agent_timeout_sec: 90.0\nmax_test_timeout_sec: 30\n",
    "Dockerfile": "FROM scratch\n",
    "solution.sh": "echo 4 >/app/sum\n",
    "run-tests.sh": "pytest $TEST_DIR/test_outputs.py -rA\n",
    "tests/test_outputs.py": "def test_sum():\n    assert open('/app/sum').read() == '4\\n'\n",
}
HARBOR = {
    "task.toml": "[agent]\ntimeout_sec = 90.0\n[verifier]\ntimeout_sec = 30.0\n",
    "instruction.md": "Write 4 to /app/sum.\n",
    "environment/Dockerfile": "FROM scratch\n",
    "solution/solve.sh": "echo 4 >/app/sum\n",
    "tests/test.sh": "grep -qx 4 /app/sum && echo 1 >/logs/verifier/reward.txt\n",
}


def write_task(
    directory: Path, base: Mapping[str, str], changes: Mapping[str, str | None] | None = None
) -> Path:
    """Write the files of a task; None leaves a file out."""
    for name, text in {**base, **(changes or {})}.items():
        if text is not None:
            path = directory / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
    return directory
