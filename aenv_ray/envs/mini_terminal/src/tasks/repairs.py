"""Tasks that ask for a repair."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

from tasks.base import (
    Failed,
    Task,
    expect,
    expect_executable,
    expect_run,
    files_in,
    put,
    read_bytes,
    read_text,
)

AVERAGE = """\
import sys

numbers = [int(line) for line in sys.stdin]
total = 0
for number in numbers[1:]:
    total += number
print("%.2f" % (total // len(numbers)))
"""


def _check_average(root: Path) -> None:
    command: list[str | Path] = ["python3", root / "average.py"]
    for given, expected in (
        ("1\n2\n", "1.50"),
        ("10\n", "10.00"),
        ("-3\n\n4\n4\n", "1.67"),
        ("  7 \n8\n\n", "7.50"),
    ):
        expect_run(command, root, expected, stdin=given)
    for given in ("", "\n\n"):
        expect_run(command, root, "no data", code=1, stdin=given)


CLEAN = """\
#!/bin/bash
cd $1
for file in `ls *.tmp`; do
    rm $file
done
"""


def _check_clean(root: Path) -> None:
    expect_executable(root / "clean.sh")
    with tempfile.TemporaryDirectory(prefix="check-", ignore_cleanup_errors=True) as scratch:
        top = Path(scratch) / "some dir"
        names = ["a.tmp", "b c.tmp", "-rf.tmp", "keep.txt", "x.tmpl", "sub/d.tmp", "c.tmp", "b"]
        for name in names:
            put(top / name, name)
        expect_run([root / "clean.sh", top], Path(scratch), "")
        expect(
            set(files_in(top)) == {"keep.txt", "x.tmpl", "sub/d.tmp", "b"}, "the wrong files went"
        )
        expect_run([root / "clean.sh", top], Path(scratch), "")
        expect_run([root / "clean.sh", Path(scratch) / "missing"], Path(scratch), "", code=1)


PAGINATE = """\
import sys


def page(lines, number, size):
    start = number * size
    return lines[start : start + size - 1]


if __name__ == "__main__":
    number, size = int(sys.argv[1]), int(sys.argv[2])
    print("".join(page(sys.stdin.readlines(), number, size)))
"""


def _check_paginate(root: Path) -> None:
    given = "".join(f"l{number}\n" for number in range(1, 8))
    for number, size, expected in ((1, 3, "l1 l2 l3"), (3, 3, "l7"), (2, 5, "l6 l7"), (7, 1, "l7")):
        outcome = expect_run(
            ["python3", root / "paginate.py", str(number), str(size)],
            root,
            expected.replace(" ", "\n"),
            stdin=given,
        )
        expect(not outcome.stdout.endswith("\n\n"), "there is an empty line at the end")
    for missing in ("4", "0", "-1"):
        expect_run(["python3", root / "paginate.py", missing, "3"], root, "", code=1, stdin=given)


BROKEN_JSON = """\
{
  // where the service listens
  "host": 'localhost',
  "port": 8080,
  "paths": ["/a", "/b//c", "/d",],
  "greeting": "it's // fine",
  "limits": {"cpu": 2, "memory": "1G",},
}
"""
MENDED_JSON = {
    "host": "localhost",
    "port": 8080,
    "paths": ["/a", "/b//c", "/d"],
    "greeting": "it's // fine",
    "limits": {"cpu": 2, "memory": "1G"},
}


def _check_json(root: Path) -> None:
    try:
        found = json.loads(read_text(root / "settings.json"))
    except (ValueError, RecursionError) as exc:
        raise Failed(f"settings.json is not JSON: {exc}") from None
    expect(found == MENDED_JSON, "settings.json has other values than before")


GREET = (
    '#!/bin/bash\r\nname=${1:-world}\r\nif [ -n "$name" ]; then\r\n  echo "hello $name"\r\nfi\r\n'
)


def _check_greet(root: Path) -> None:
    expect_executable(root / "greet")
    expect(b"\r" not in read_bytes(root / "greet"), "greet holds carriage returns")
    expect_run([root / "greet"], root, "hello world")
    expect_run([root / "greet", "a b"], root, "hello a b")


PIPELINE = {
    "Makefile.sh": "#!/bin/bash\nset -e\n./extract.sh < raw.txt > words.txt\n./rank.sh words.txt\n",
    "extract.sh": "#!/bin/bash\ngrep -o '[a-z]*' | tr 'A-Z' 'a-z'\n",
    "rank.sh": "#!/bin/bash\nuniq -c \"$1\" | sort -r | head -n 2 | awk '{print $2}'\n",
}


def _set_pipeline(root: Path) -> None:
    for name, content in PIPELINE.items():
        put(root / name, content, 0o755)
    put(root / "raw.txt", "Sun moon sun star\nMoon sun Mars\n")


def _check_pipeline(root: Path) -> None:
    many = " ".join(["b"] * 9 + ["a"] * 10 + ["c"] * 2)
    cases = {
        "Sun moon sun star\nMoon sun Mars\n": "sun\nmoon",
        many + "\n": "a\nb",
        "Zoe zoe, ALF alf alf; x-ray\n": "alf\nzoe",
        "pear fig PEAR fig kiwi\n": "fig\npear",
    }
    for raw, expected in cases.items():
        with tempfile.TemporaryDirectory(prefix="check-", ignore_cleanup_errors=True) as scratch:
            for name in PIPELINE:
                expect_executable(root / name)
                put(Path(scratch) / name, read_bytes(root / name), 0o755)
            put(Path(scratch) / "raw.txt", raw)
            expect_run(["./Makefile.sh"], Path(scratch), expected)


TASKS = {
    "fix-average-55": Task(lambda root: put(root / "average.py", AVERAGE), _check_average),
    "fix-clean-56": Task(lambda root: put(root / "clean.sh", CLEAN, 0o755), _check_clean),
    "fix-paginate-57": Task(lambda root: put(root / "paginate.py", PAGINATE), _check_paginate),
    "fix-json-58": Task(lambda root: put(root / "settings.json", BROKEN_JSON), _check_json),
    "fix-greet-59": Task(lambda root: put(root / "greet", GREET), _check_greet),
    "fix-pipeline-60": Task(_set_pipeline, _check_pipeline),
}
