"""Tasks about directories, permissions, links and names."""

from __future__ import annotations

import hashlib
import os
import stat
from pathlib import Path

from tasks.base import Task, expect, expect_files, expect_lines, put, rng


def _sizes() -> dict[str, int]:
    random = rng("find-large-20")
    names = [f"{d}/{n}.dat" for d in ("a", "a/b c", ".hidden", "d") for n in ("one", "two", "x y")]
    edges = [10240, 10241, 10000, 10239, 20480, 9999]
    sizes = {name: random.choice(edges) for name in names}
    return sizes | {"a/edge": 10240, "a/over": 10241, "d/near": 10100}


def _set_find_large(root: Path) -> None:
    for name, size in _sizes().items():
        put(root / "tree" / name, b"x" * size)
    (root / "tree/link").symlink_to("a/over")


def _check_find_large(root: Path) -> None:
    expected = sorted(f"tree/{name}" for name, size in _sizes().items() if size > 10240)
    expect_lines(root / "large.txt", expected)


MODES = {
    "bin/run.sh": 0o644,
    "bin/lib/tool.sh": 0o640,
    "bin/data.bin": 0o664,
    "config/app.env": 0o644,
    "config/db.env": 0o666,
    "config/readme.md": 0o644,
    "notes.txt": 0o604,
    "x y.sh": 0o600,
}


def _set_permissions(root: Path) -> None:
    for name, mode in MODES.items():
        put(root / "project" / name, f"# {name}\n", mode)


def _check_permissions(root: Path) -> None:
    for name, mode in MODES.items():
        path = root / "project" / name
        expect(path.is_file(), f"{name} is missing")
        wanted = mode | 0o100 if name.endswith(".sh") else mode
        wanted = 0o600 if name.endswith(".env") else wanted
        found = stat.S_IMODE(path.stat().st_mode)
        expect(found == wanted, f"{name} has mode {found:o}, not {wanted:o}")


def _set_symlinks(root: Path) -> None:
    for name in ("report", "a b", "table"):
        put(root / f"data/new/{name}.txt", f"{name}\n")
    put(root / "data/keep.txt", "keep\n")
    (root / "links").mkdir()
    for name in ("report", "a b", "table", "gone", "lost"):
        (root / f"links/{name}").symlink_to(f"../data/old/{name}.txt")
    (root / "links/keep").symlink_to("../data/keep.txt")


def _check_symlinks(root: Path) -> None:
    names = (
        {path.name for path in (root / "links").iterdir()} if (root / "links").is_dir() else set()
    )
    expect(names == {"report", "a b", "table", "keep"}, f"links holds {sorted(names)}")
    for name in ("report", "a b", "table", "keep"):
        path = root / "links" / name
        expect(path.is_symlink(), f"links/{name} is not a symbolic link")
        target = os.readlink(path)
        wanted = "../data/keep.txt" if name == "keep" else f"../data/new/{name}.txt"
        expect(target == wanted, f"links/{name} points to {target!r}, not {wanted!r}")


def _photos() -> dict[str, bytes]:
    random = rng("bulk-rename-23")
    numbers = random.sample(range(1, 2000), 25)
    return {f"IMG_{number}.JPG": f"picture {number}".encode() for number in numbers}


OTHERS = {"IMG_list.txt": b"list", "my IMG_7.JPG": b"mine", "cover.jpg": b"cover"}


def _set_bulk_rename(root: Path) -> None:
    for name, content in (_photos() | OTHERS).items():
        put(root / "photos" / name, content)


def _check_bulk_rename(root: Path) -> None:
    renamed = {f"photo-{int(name[4:-4]):04}.jpg": content for name, content in _photos().items()}
    expect_files(root / "photos", renamed | OTHERS)


def _inbox() -> dict[str, bytes]:
    random = rng("dedup-files-24")
    contents = [bytes(random.choices(b"abcdef", k=40)) for _ in range(12)]
    names = [
        f"{d}{n}" for d in ("", "sub/", "sub dir/") for n in ("b.txt", "a.txt", "c 1.txt", "d")
    ]
    names += [f"{letter}{i}.txt" for letter in "mz" for i in range(5)]
    return {name: random.choice(contents) for name in names}


def _set_dedup_files(root: Path) -> None:
    for name, content in _inbox().items():
        put(root / "inbox" / name, content)


def _check_dedup_files(root: Path) -> None:
    kept: dict[bytes, str] = {}
    for name in sorted(_inbox(), key=lambda name: f"inbox/{name}".encode()):
        kept.setdefault(_inbox()[name], name)
    expect_files(root / "inbox", {name: content for content, name in kept.items()})


DOCS = {
    "readme.md": b"# top",
    "guide/intro.md": b"# intro",
    "guide/picture.png": b"\x89PNG",
    "guide/deep/more notes.md": b"# more",
    "api/data.json": b"{}",
    "api/old.md.bak": b"old",
    "-odd.md": b"# odd",
}


def _set_copy_tree(root: Path) -> None:
    for name, content in DOCS.items():
        put(root / "docs" / name, content)


def _check_copy_tree(root: Path) -> None:
    expect_files(root / "out", {n: c for n, c in DOCS.items() if n.endswith(".md")})
    expect(not (root / "out/api").exists(), "out/api has nothing to hold")
    expect_files(root / "docs", DOCS)


def _ages() -> dict[str, int]:
    random = rng("oldest-files-26")
    names = [f"{d}{n}.log" for d in ("", "x/", "x/y z/") for n in ("app", "db", "web", "mail")]
    times = random.sample(range(1_500_000_000, 1_700_000_000), len(names))
    return dict(zip(names, times, strict=True))


def _set_oldest_files(root: Path) -> None:
    for name, modified in _ages().items():
        put(root / "logs" / name, f"{name}\n")
        os.utime(root / "logs" / name, (1_700_000_000 - modified % 1000, modified))


def _check_oldest_files(root: Path) -> None:
    ranked = sorted(_ages(), key=_ages().__getitem__)
    expect_lines(root / "oldest.txt", [f"logs/{name}" for name in ranked[:3]])


def _usage() -> dict[str, list[int]]:
    random = rng("disk-usage-27")
    return {name: [random.randint(1, 9000) for _ in range(5)] for name in ("a", "b b", "c", "d")}


def _set_disk_usage(root: Path) -> None:
    for name, sizes in _usage().items():
        for number, size in enumerate(sizes):
            put(root / "store" / name / f"{'deep/' * (number % 3)}f{number}", b"z" * size)


def _check_disk_usage(root: Path) -> None:
    ranked = sorted(_usage().items(), key=lambda item: -sum(item[1]))
    expect_lines(root / "usage.txt", [f"{sum(sizes)} {name}" for name, sizes in ranked])


LINKED = ("pool/a/first.bin", "pool/second.bin", "pool/c d/third.bin")


def _set_hard_links(root: Path) -> None:
    content = b"the same bytes\n"
    put(root / "original.bin", content)
    for name in LINKED:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        os.link(root / "original.bin", root / name)
    put(root / "pool/copy.bin", content)
    put(root / "pool/a/other.bin", b"other\n")
    (root / "pool/soft.bin").symlink_to("../original.bin")


def _check_hard_links(root: Path) -> None:
    expect_lines(root / "links.txt", sorted(LINKED))


def _packages() -> dict[str, tuple[bytes, bytes | None]]:
    """Return the content that was summed, and the present content; None for a missing file."""
    random = rng("checksums-29")
    packages: dict[str, tuple[bytes, bytes | None]] = {}
    for number in range(20):
        content = bytes(random.choices(b"01", k=64))
        now = random.choice([content, content, content + b"!", None])
        packages[f"pkg {number:02}.bin"] = (content, now)
    return packages


def _set_checksums(root: Path) -> None:
    sums = ""
    for name, (content, now) in _packages().items():
        sums += f"{hashlib.sha256(content).hexdigest()}  {name}\n"
        if now is not None:
            put(root / name, now)
    put(root / "SHA256SUMS", sums)


def _check_checksums(root: Path) -> None:
    packages = _packages()
    bad = sorted(name for name, (was, now) in packages.items() if now not in (was, None))
    expect_lines(root / "bad.txt", bad)
    expect_lines(root / "missing.txt", sorted(n for n, (_, now) in packages.items() if now is None))


def _journal() -> list[str]:
    random = rng("split-file-30")
    return [f"{number} {random.random():.6f}" for number in range(1, 4322)]


def _check_split_file(root: Path) -> None:
    lines = [f"{line}\n" for line in _journal()]
    expected = {
        f"part-{number:03}.log": "".join(lines[number * 1000 : (number + 1) * 1000]).encode()
        for number in range(5)
    }
    expect_files(root / "parts", expected)


OLD = {"same.c": b"s", "edit me.c": b"old", "lib/gone.c": b"g", "lib/x.c": b"1", "lib/y.c": b"y"}
NEW = {"same.c": b"s", "edit me.c": b"new", "lib/x.c": b"2", "lib/y.c": b"y", "lib/n/added.c": b""}


def _set_tree_changes(root: Path) -> None:
    for top, files in (("old", OLD), ("new", NEW)):
        for name, content in files.items():
            put(root / top / name, content)


def _check_tree_changes(root: Path) -> None:
    lines = [f"A {name}" for name in NEW.keys() - OLD.keys()]
    lines += [f"D {name}" for name in OLD.keys() - NEW.keys()]
    lines += [f"M {name}" for name in OLD.keys() & NEW.keys() if OLD[name] != NEW[name]]
    expect_lines(root / "changes.txt", sorted(lines))


TASKS = {
    "find-large-20": Task(_set_find_large, _check_find_large),
    "permissions-21": Task(_set_permissions, _check_permissions),
    "symlinks-22": Task(_set_symlinks, _check_symlinks),
    "bulk-rename-23": Task(_set_bulk_rename, _check_bulk_rename),
    "dedup-files-24": Task(_set_dedup_files, _check_dedup_files),
    "copy-tree-25": Task(_set_copy_tree, _check_copy_tree),
    "oldest-files-26": Task(_set_oldest_files, _check_oldest_files),
    "disk-usage-27": Task(_set_disk_usage, _check_disk_usage),
    "hard-links-28": Task(_set_hard_links, _check_hard_links),
    "checksums-29": Task(_set_checksums, _check_checksums),
    "split-file-30": Task(
        lambda root: put(root / "journal.log", "\n".join(_journal()) + "\n"), _check_split_file
    ),
    "tree-changes-31": Task(_set_tree_changes, _check_tree_changes),
}
