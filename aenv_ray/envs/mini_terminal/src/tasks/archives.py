"""Tasks about archives, compression and encodings."""

from __future__ import annotations

import base64
import gzip
import io
import tarfile
from pathlib import Path

from tasks.base import Failed, Task, expect, expect_files, expect_lines, put, read_bytes, rng

LIMIT_BYTES = 1024 * 1024


def _tar(files: dict[str, bytes], mode: str = "w:gz") -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode=mode) as archive:  # type: ignore[call-overload]
        for name, content in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return buffer.getvalue()


BUNDLE = {
    "bundle-1.2/readme.txt": b"read me\n",
    "bundle-1.2/src/main.c": b"int main;\n",
    "bundle-1.2/doc/deep/notes.txt": b"notes\n",
    "bundle-1.2/doc/a b.txt": b"a b\n",
    "bundle-1.2/doc/not.txt.gz": b"\x1f\x8b",
}


def _check_tar_extract(root: Path) -> None:
    expected = {n.split("/", 1)[1]: c for n, c in BUNDLE.items() if n.endswith(".txt")}
    expect_files(root / "out", expected)


PROJECT = {
    "main.py": b"print(1)\n",
    "run.log": b"log\n",
    "pkg/mod.py": b"x = 1\n",
    "pkg/debug.log": b"log\n",
    "pkg/catalog.txt": b"log\n",
    "web/node_modules/lib/index.js": b"js\n",
    "web/app.js": b"app\n",
    "node_modules/a.js": b"a\n",
    "logs/.keep": b"",
}


def _set_tar_create(root: Path) -> None:
    for name, content in PROJECT.items():
        put(root / "project" / name, content)


def _check_tar_create(root: Path) -> None:
    try:
        data = io.BytesIO(gzip.decompress(read_bytes(root / "backup.tar.gz")))
        with tarfile.open(fileobj=data, mode="r:") as archive:
            members = {m.name.removeprefix("./"): m for m in archive.getmembers() if m.isfile()}
            found = {}
            for name, member in members.items():
                expect(member.size < LIMIT_BYTES, f"{name} is too large")
                file = archive.extractfile(member)
                found[name] = file.read() if file else b""
    except (OSError, EOFError, tarfile.TarError) as exc:
        raise Failed(f"backup.tar.gz is not a gzipped tar archive: {exc}") from None
    wanted = {
        f"project/{name}": content
        for name, content in PROJECT.items()
        if not name.endswith(".log") and "node_modules" not in name
    }
    expect(found.keys() == wanted.keys(), f"the archive holds {sorted(found)}")
    expect(found == wanted, "a file in the archive has the wrong content")


def _rotated() -> dict[str, list[str]]:
    random = rng("rotated-logs-34")
    names = ["access.log", "access.log.1", "access.log.2.gz", "access.log.3.gz"]
    paths = ["/", "/a?x=500", "/500", "/b"]
    return {
        name: [
            f'10.0.0.{random.randint(1, 9)} "GET {random.choice(paths)} HTTP/1.1" '
            f"{random.choice([200, 200, 404, 500, 503])} {random.choice([12, 500, 5000])}"
            for _ in range(150)
        ]
        for name in names
    }


def _set_rotated_logs(root: Path) -> None:
    for name, lines in _rotated().items():
        data = ("\n".join(lines) + "\n").encode()
        put(root / "logs" / name, gzip.compress(data, mtime=0) if name.endswith("gz") else data)


def _check_rotated_logs(root: Path) -> None:
    lines = [line for lines in _rotated().values() for line in lines]
    expect_lines(root / "answer.txt", [str(sum(line.split()[-2] == "500" for line in lines))])


def _set_nested_archive(root: Path) -> None:
    inner = _tar({"inner/a/flag.txt": b"FLAG-7c1e-inner\n", "inner/b.txt": b"b\n"}, "w:bz2")
    middle = _tar({"m/data.bin": inner, "m/flag.txt": b"FLAG-0000-decoy\n"}, "w")
    put(root / "outer.bin", _tar({"o/payload": middle, "o/flag.txt": b"FLAG-1111-decoy\n"}))


def _check_nested_archive(root: Path) -> None:
    expect_lines(root / "answer.txt", ["FLAG-7c1e-inner"])


MESSAGE = "Grüße aus dem Archiv\nline two\n" * 20


def _set_base64(root: Path) -> None:
    packed = gzip.compress(MESSAGE.encode(), mtime=0)
    put(root / "message.b64", base64.encodebytes(packed))


def _check_base64(root: Path) -> None:
    expect(read_bytes(root / "message.txt") == MESSAGE.encode(), "message.txt is not the message")


MENU = "Crème brûlée 7£\nJalapeños 4£\nSmörgåsbord 12£\n½ chicken — no: ½ hen\n".replace("—", "-")


def _check_latin1(root: Path) -> None:
    expect(read_bytes(root / "menu-utf8.txt") == MENU.encode(), "menu-utf8.txt is not as asked")
    expect(read_bytes(root / "menu.txt") == MENU.encode("latin-1"), "menu.txt was changed")


DOCS = {
    "a.txt": b"one\r\ntwo\r\n",
    "sub/b c.txt": b"progress 1%\rprogress 2%\r\nend\r\n",
    "sub/unix.txt": b"fine\nalso\rfine\n",
    "image.dat": b"\x00\r\n\x01\r\n",
    "last.txt": b"no end\r\nhere",
}


def _set_line_ends(root: Path) -> None:
    for name, content in DOCS.items():
        put(root / "docs" / name, content)


def _check_line_ends(root: Path) -> None:
    expected = {
        name: content.replace(b"\r\n", b"\n") if name.endswith(".txt") else content
        for name, content in DOCS.items()
    }
    expect_files(root / "docs", expected)


BOM = b"\xef\xbb\xbf"
SOURCES = {
    "one.csv": BOM + b"id,name\n",
    "two.csv": b"id,name\n",
    "sub/three.csv": BOM + "größe\n".encode(),
    "sub/inside.csv": b"a" + BOM + b"b\n",
    "empty.csv": b"",
    "keep.bin": BOM + b"binary",
}


def _set_bom(root: Path) -> None:
    for name, content in SOURCES.items():
        put(root / "in" / name, content)


def _check_bom(root: Path) -> None:
    expected = {
        name: content.removeprefix(BOM) if name.endswith(".csv") else content
        for name, content in SOURCES.items()
    }
    expect_files(root / "in", expected)


TASKS = {
    "tar-extract-32": Task(
        lambda root: put(root / "bundle.tar.gz", _tar(BUNDLE)), _check_tar_extract
    ),
    "tar-create-33": Task(_set_tar_create, _check_tar_create),
    "rotated-logs-34": Task(_set_rotated_logs, _check_rotated_logs),
    "nested-archive-35": Task(_set_nested_archive, _check_nested_archive),
    "base64-36": Task(_set_base64, _check_base64),
    "latin1-37": Task(lambda root: put(root / "menu.txt", MENU.encode("latin-1")), _check_latin1),
    "line-ends-38": Task(_set_line_ends, _check_line_ends),
    "bom-39": Task(_set_bom, _check_bom),
}
