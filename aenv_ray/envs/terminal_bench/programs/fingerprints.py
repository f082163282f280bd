"""What the tests of a task rely on in its container, and whether the agent has changed it.

The tests run in the container that the agent had, with its programs. The grader takes fingerprints
before the agent acts: of every program on the search path, of the libraries that interpreters load,
and of Python's own modules. Afterwards a program that the tests use must be as it was. What the
agent added is set aside if it would change how the tests run.
"""

from __future__ import annotations

import contextlib
import fnmatch
import glob
import os
import re
import stat
import subprocess
from collections.abc import Iterable, Iterator

Fingerprint = list[int]
"""Size, time of the content, time of the last change of any kind, and mode. The kernel sets the
third one, and no process without CAP_SYS_TIME can choose it."""

ALWAYS = (
    "sh", "bash", "dash", "env", "busybox", "cat", "cp", "mv", "rm", "mkdir", "chmod", "ln", "ls",
    "echo", "test", "[", "true", "false", "grep", "sed", "awk", "tee", "head", "tail", "sort",
    "cut", "tr", "diff", "cmp", "id", "dirname", "basename", "readlink", "date", "find", "timeout",
    "python", "python3", "pytest", "py.test", "pip", "pip3", "uv", "uvx", "node", "perl",
)  # fmt: skip
"""Programs that tests use without naming them, or by a shebang."""
OF_INSTALLERS = (
    "uname", "tar", "gzip", "gunzip", "xz", "unxz", "bzip2", "mktemp", "install", "ldd", "getconf",
    "stat", "touch", "wc", "xargs", "seq", "sleep", "expr", "which", "printf", "tty", "sha256sum",
    "apt", "apt-get", "apt-config", "gpgv", "dpkg", "dpkg-deb", "dpkg-query", "dpkg-split",
    "dpkg-trigger", "update-alternatives", "ldconfig", "apk", "dnf", "yum", "rpm",
)  # fmt: skip
"""Programs that installers use, which most test scripts run. The agent may add those that the image
did not have."""
RUNNERS = frozenset(
    {
        *("pytest", "_pytest", "pluggy", "iniconfig", "packaging", "py", "py.py", "exceptiongroup"),
        *("tomli", "pygments", "colorama", "pytest_ctrf", "pytest_json_ctrf"),
    }
)
"""Python packages that run tests."""
MODULES = frozenset(
    {"_bz2", "_ctypes", "_hashlib", "_lzma", "_ssl", "_uuid", "pyexpat", "readline", "zlib"}
)
"""Modules of Python that load libraries into pytest's process."""
STARTS = ("pyvenv.cfg", "pybuilddir.txt")
"""Files beside a Python that say where its modules are."""
HOOKS = frozenset({"sitecustomize.py", "usercustomize.py"})
SETTINGS = (
    *("conftest.py", "pytest.ini", ".pytest.ini", "pytest.toml", ".pytest.toml", "pyproject.toml"),
    *("tox.ini", "setup.cfg"),
)
"""Files that pytest reads in the directories above the tests."""
PRELOAD = "/etc/ld.so.preload"
LOADING = (PRELOAD, "/etc/nsswitch.conf", "/etc/ssl/openssl.cnf", "/etc/pki/tls/openssl.cnf")
"""Files by which the C library and OpenSSL load libraries into any process."""
HOME_PROGRAMS = (".local/bin", ".cargo/bin")
HOME_STARTS = (".local/bin/env", ".cargo/env", ".nvm/nvm.sh", ".dpkg.cfg")
"""What installers of uv, Rust and Node leave in the home directory. Test scripts install them, and
read the second, which puts the first on the search path; it keeps a file that is already there.
Dpkg runs the hooks in its file."""
MAX_FILES = 200_000
OF_APT = ("/usr/lib/apt/apt-helper", "/usr/lib/apt/methods/*", "/usr/lib/*/libapt-pkg.so*")
_LIBRARY = re.compile(r"(/\S+)(?= \(0x[0-9a-f]+\)| =>|$)", re.MULTILINE)
_SITE = ("site-packages", "dist-packages")
_CODE = (".py", ".so", ".pth", ".pyc", ".zip")


def fingerprint(path: str) -> Fingerprint | None:
    """Return the fingerprint of what a path leads to; None if that is nothing."""
    try:
        found = os.stat(path)
    except OSError:
        return None
    return [found.st_size, found.st_mtime_ns, found.st_ctime_ns, found.st_mode]


def take(search_path: str, home: str) -> dict[str, Fingerprint]:
    """Return the fingerprints of all files that tests may rely on, by path."""
    paths = [*programs(search_path).values(), *python_files(search_path), *LOADING]
    paths += [*python_starts(search_path), *home_files(home), *files_of_apt()]
    for name in ("sh", "bash", "python3", "python", "cat"):
        paths += libraries(programs(search_path).get(name))
    for module in filter(loads_libraries, paths[:]):
        paths += libraries(module, python_loader(search_path))
    found = {}
    for path in paths:
        mark = fingerprint(path)
        if mark is not None:
            found[path] = mark
    return found


def programs(search_path: str) -> dict[str, str]:
    """Return the programs on a search path, each by its name at the first place."""
    found: dict[str, str] = {}
    for directory in search_path.split(os.pathsep):
        try:
            names = os.listdir(directory)
        except OSError:
            continue
        for name in names:
            found.setdefault(name, os.path.join(directory, name))
    return found


def home_files(home: str) -> list[str]:
    """Return the programs in a home directory, and the scripts that put them on the path."""
    found = [os.path.join(home, one) for one in HOME_STARTS]
    for directory in HOME_PROGRAMS:
        place = os.path.join(home, directory)
        with contextlib.suppress(OSError):
            found += [os.path.join(place, name) for name in os.listdir(place)]
    return [path for path in dict.fromkeys(found) if os.path.lexists(path)]


def libraries(program: str | None, loader: str | None = None) -> list[str]:
    """Return the loader of a program, and the libraries that it loads.

    Args:
        program: A program, or a module of Python; None has no libraries.
        loader: That of the program which loads a module.
    """
    if program is not None and loader is None:
        loader = interpreter(program)
    if program is None or loader is None:
        return []
    done = subprocess.run(
        [loader, "--list", program], capture_output=True, text=True, check=False, timeout=20,
        env={"PATH": "/usr/bin:/bin"},
    )  # fmt: skip
    return [loader, *dict.fromkeys(_LIBRARY.findall(done.stdout))]


def interpreter(program: str) -> str | None:
    """Return the loader that a program names; None if it is static or no ELF file."""
    try:
        with open(program, "rb") as file:
            head = file.read(4096)
    except OSError:
        return None
    match = re.search(rb"(/lib[\w./+-]*/ld-[\w.+-]+)\0", head)
    return match[1].decode() if head.startswith(b"\x7fELF") and match else None


def files_of_apt() -> list[str]:
    """Return the programs and libraries that apt loads."""
    return sorted(path for pattern in OF_APT for path in glob.glob(pattern))


def python_loader(search_path: str) -> str | None:
    """Return the loader of the first Python on a search path."""
    found = programs(search_path)
    python = found.get("python3") or found.get("python")
    return None if python is None else interpreter(python)


def loads_libraries(path: str) -> bool:
    """Return whether a file is one of `MODULES`."""
    directory, name = os.path.split(path)
    return directory.endswith("/lib-dynload") and name.partition(".")[0] in MODULES


def python_places(search_path: str) -> set[str]:
    """Return the directories in which the Pythons on a search path look for their own files.

    Those of the programs, and the ones above them: Python takes the first with ``lib/python3.…``.
    """
    found = {"/usr", "/usr/local"}
    for name, path in programs(search_path).items():
        if re.fullmatch(r"python3?(\.\d+)?", name):
            for place in (path, os.path.realpath(path)):
                directory = os.path.dirname(place)
                found |= {directory, os.path.dirname(directory)}
    return found


def python_roots(search_path: str) -> list[str]:
    """Return the library directories of the Pythons on a search path."""
    places = python_places(search_path)
    found = {
        os.path.realpath(root)
        for place in places
        for root in glob.glob(os.path.join(place, "lib*", "python3*"))
    }
    return sorted(root for root in found if os.path.isdir(root))


def python_starts(search_path: str) -> list[str]:
    """Return the files by which a Python finds its modules, and zipped ones, which come first."""
    found = {
        path
        for place in python_places(search_path)
        for name in (*STARTS, "lib*/python3*.zip")
        for path in glob.glob(os.path.join(place, name))
    }
    return sorted(found)


def python_files(search_path: str) -> Iterator[str]:
    """Yield the modules of the Pythons on a search path, and what starts with them."""
    count = 0
    for root in python_roots(search_path):
        for directory, names, files in os.walk(root):
            names[:] = [name for name in names if name != "__pycache__"]
            is_site = any(part in _SITE for part in directory.split(os.sep))
            for name in files:
                if not name.endswith(_CODE) and name != "entry_points.txt":
                    continue
                path = os.path.join(directory, name)
                if is_site and not matters_in_site(path):
                    continue
                count += 1
                if count > MAX_FILES:
                    return
                yield path


def matters_in_site(path: str) -> bool:
    """Return whether an installed file takes part when tests are run, and not only when used."""
    parts = path.split(os.sep)
    site = max(n for n, part in enumerate(parts) if part in _SITE)
    inside = parts[site + 1 :]
    name = inside[-1]
    if inside[0] in RUNNERS or name == "entry_points.txt":
        return True
    return len(inside) == 1 and (name in HOOKS or name.endswith(".pth"))


def words_of(scripts: Iterable[str]) -> set[str]:
    """Return the words of scripts that may be names of programs."""
    return {word for script in scripts for word in re.findall(r"[\w.+-]+", script)}


class Comparison:
    """What the agent has done to what the tests rely on.

    Attributes:
        changed: Paths that the tests rely on, and that the agent changed, removed or replaced.
        added: Paths that the agent added, and that would change how the tests run.
    """

    def __init__(
        self,
        before: dict[str, Fingerprint],
        search_path: str,
        words: set[str],
        directory: str,
        home: str,
        python_path: str = "",
    ) -> None:
        self._before = before
        self.changed: list[str] = []
        self.added: list[str] = []
        self._compare_programs(search_path, words | set(ALWAYS))
        self._compare_installers(search_path)
        self._compare_home(home, words | set(ALWAYS))
        self._compare_python(search_path)
        place = directory or "/"
        paths = [os.path.join(place, one) for one in python_path.split(os.pathsep) if one]
        self._compare_settings([place, *paths])

    def _compare_programs(self, search_path: str, names: set[str]) -> None:
        before: dict[str, str] = {}
        for directory in search_path.split(os.pathsep):
            for name in names:
                path = os.path.join(directory, name)
                if path in self._before:
                    before.setdefault(name, path)
        now = programs(search_path)
        for name in sorted(names):
            first, place = before.get(name), now.get(name)
            if first is not None:
                if place != first or fingerprint(first) != self._before[first]:
                    self.changed.append(place or first)
                elif name in ("sh", "bash", "python3", "python", "cat"):
                    self._compare_libraries(first)
            elif place is not None and fingerprint(place) is not None:
                self.added.append(place)
        for path in LOADING:
            is_new = os.path.lexists(path) and path not in self._before
            if is_new and not is_harmless(path):
                self.added.append(path)

    def _compare_installers(self, search_path: str) -> None:
        now = programs(search_path)
        for name in OF_INSTALLERS:
            paths = (os.path.join(one, name) for one in search_path.split(os.pathsep))
            first = next((path for path in paths if path in self._before), None)
            place = now.get(name)
            if first is not None and (place != first or fingerprint(first) != self._before[first]):
                self.changed.append(place or first)
        self.changed += [
            path
            for pattern in OF_APT
            for path in self._before
            if fnmatch.fnmatch(path, pattern) and fingerprint(path) != self._before[path]
        ]

    def _compare_home(self, home: str, names: set[str]) -> None:
        starts = {os.path.join(home, one) for one in HOME_STARTS}
        for path in home_files(home):
            is_used = path in starts or os.path.basename(path) in names
            is_same = path in self._before and fingerprint(path) == self._before[path]
            if is_used and not is_same and path not in self.changed + self.added:
                self.added.append(path)

    def _compare_libraries(self, program: str) -> None:
        if PRELOAD in self._before and fingerprint(PRELOAD) != self._before[PRELOAD]:
            self.changed.append(PRELOAD)
        loader = interpreter(program)
        if loader is not None and fingerprint(loader) != self._before.get(loader):
            self.changed.append(loader)
            return  # it is not asked
        self._compare_libraries_of(program, loader)

    def _compare_libraries_of(self, program: str, loader: str | None) -> None:
        for path in libraries(program, loader):
            if fingerprint(path) != self._before.get(path) and path not in self.changed:
                self.changed.append(path)

    def _compare_python(self, search_path: str) -> None:
        now = {*python_files(search_path), *python_starts(search_path)}
        for path, mark in self._before.items():
            is_code = path.endswith((*_CODE, *STARTS, "entry_points.txt"))
            if is_code and fingerprint(path) != mark:
                self.changed.append(path)
        loader = python_loader(search_path)
        if loader is not None and fingerprint(loader) == self._before.get(loader):
            for module in filter(loads_libraries, self._before):
                self._compare_libraries_of(module, loader)
        for path in sorted(now - self._before.keys()):
            if is_harmless(path):
                continue
            self.added.append(path)

    def _compare_settings(self, directories: list[str]) -> None:
        """Find what pytest, or Python with ``-m``, would read of the agent's directories."""
        for name in SETTINGS:
            path = os.path.join("/", name)
            if os.path.lexists(path):
                self.added.append(path)
        for directory in dict.fromkeys(directories):
            for name in sorted({*RUNNERS, *HOOKS, *(f"{one}.py" for one in RUNNERS)}):
                path = os.path.join(directory, name)
                if os.path.lexists(path):
                    self.added.append(path)
        for directory in dict.fromkeys(directories[1:]):
            found = glob.glob(os.path.join(glob.escape(directory), "*-info", "entry_points.txt"))
            self.added += [path for path in sorted(found) if not is_harmless(path)]


def is_harmless(path: str) -> bool:
    """Return whether an added file does not change how the tests run."""
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            text = file.read(1 << 20)
    except OSError:
        return False
    if path.endswith(".pth"):
        return not re.search(r"^import[ \t]", text, re.MULTILINE)
    if path.endswith("entry_points.txt"):
        return "pytest11" not in text
    if path.endswith("openssl.cnf"):  # that of the package, which tests may need
        return not re.search(
            r"^\s*(\.include|(\w+\.)?(module|dynamic_path|SO_PATH)\s*=)", text, re.M
        )
    return False


def set_aside(paths: Iterable[str], target: str) -> list[str]:
    """Move paths into a directory; return those that could not be moved."""
    left = []
    for number, path in enumerate(dict.fromkeys(paths)):
        try:
            if os.path.islink(path) or not os.path.isdir(path):
                with_place = os.path.join(target, f"{number}-{os.path.basename(path)}")
                _move(path, with_place)
            else:
                os.rename(path, os.path.join(target, f"{number}-{os.path.basename(path)}"))
        except OSError:
            if os.path.lexists(path):
                left.append(path)
    return left


def _move(path: str, target: str) -> None:
    if stat.S_ISREG(os.lstat(path).st_mode) or os.path.islink(path):
        os.rename(path, target)
    else:
        os.unlink(path)
