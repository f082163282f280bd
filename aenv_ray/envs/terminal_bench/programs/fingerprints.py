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
import tempfile
from collections.abc import Iterable, Iterator
from typing import TypedDict

Fingerprint = list[int]
"""Size, time of the content, time of the last change of any kind, and mode. The kernel sets the
third one, and no process without CAP_SYS_TIME can choose it."""

ALWAYS = (
    "sh", "bash", "dash", "env", "busybox", "cat", "cp", "mv", "rm", "mkdir", "chmod", "ln", "ls",
    "echo", "test", "[", "true", "false", "grep", "sed", "awk", "tee", "head", "tail", "sort",
    "cut", "tr", "diff", "cmp", "id", "dirname", "basename", "readlink", "date", "find", "timeout",
    "python", "python3", "pytest", "py.test",
)  # fmt: skip
"""Programs that tests use without naming them, or by a shebang."""
OF_INSTALLERS = (
    "uname", "tar", "gzip", "gunzip", "xz", "unxz", "bzip2", "mktemp", "install", "ldd", "getconf",
    "stat", "touch", "wc", "xargs", "seq", "sleep", "expr", "which", "printf", "tty", "sha256sum",
    "apt", "apt-get", "apt-config", "gpgv", "dpkg", "dpkg-deb", "dpkg-query", "dpkg-split",
    "dpkg-trigger", "update-alternatives", "ldconfig", "apk", "dnf", "yum", "rpm", "perl",
)  # fmt: skip
"""Programs that installers use, which most test scripts run. The agent may add those that the image
did not have."""
PACKAGE_MANAGERS = frozenset({"apt", "apt-get", "aptitude", "dpkg", "apk", "dnf", "yum", "rpm"})
OF_PACKAGES = (
    "adduser", "addgroup", "chgrp", "chown", "deb-systemd-helper", "deb-systemd-invoke",
    "dpkg-divert", "dpkg-maintscript-helper", "dpkg-preconfigure", "dpkg-reconfigure",
    "dpkg-statoverride", "getent", "groupadd", "install-info", "invoke-rc.d", "ischroot",
    "locale-gen", "policy-rc.d", "py3clean", "py3compile", "run-parts", "runlevel",
    "sync", "ucf", "update-ca-certificates", "update-rc.d", "useradd", "usermod",
)  # fmt: skip
"""Programs that the scripts of packages run."""
RUNNERS = frozenset(
    {"pytest", "_pytest", "pluggy", "iniconfig", "py", "pytest_ctrf", "pytest_json_ctrf"}
)
"""Python packages that run tests."""
SHARED = frozenset({"packaging", "exceptiongroup", "tomli", "pygments", "colorama"})
"""Python packages that pytest uses, as many others do."""
INSTALLERS = frozenset({"pip", "pip3"})
"""Programs that are the package ``pip`` of a Python."""
INTO_IMAGE = INSTALLERS | {
    *("conda", "mamba", "micromamba", "poetry", "pdm", "pipenv", "easy_install"),
}
"""Programs that install pytest for a Python of the image, and not apart from it as uv does."""
OF_NODE = frozenset(
    {
        *("npm", "npx", "yarn", "yarnpkg", "pnpm", "pnpx", "corepack"),
        *("jest", "mocha", "tsc", "ts-node", "tsx", "vitest"),
    }
)
"""Programs that are run by node, also those that a script of the tests installs."""
IN_PYTHON = OF_NODE | {"node", "uv", "uvx"}
"""Programs that tests in Python run to check something."""
_PYTEST_OF_SYSTEM = re.compile(r"py(thon)?3?-pytest")
"""Packages of distributions that do so."""
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
DEVICES = tuple(
    f"/dev/{name}"
    for name in (
        *("null", "zero", "full", "random", "urandom", "tty"),
        *("fd", "stdin", "stdout", "stderr"),
    )
)
"""Devices, and links to files of a process, that programs and the grader use by name."""
HOME_PROGRAMS = (".local/bin", ".cargo/bin")
HOME_STARTS = (".local/bin/env", ".cargo/env", ".nvm/nvm.sh", ".dpkg.cfg")
"""What installers of uv, Rust and Node leave in the home directory. Test scripts install them, and
read the second, which puts the first on the search path; it keeps a file that is already there.
Dpkg runs the hooks in its file."""
MAX_FILES = 200_000
TEXT_BYTES = 1 << 20
"""A larger file by which packages are loaded is not read, and so counts as one with code."""
OF_APT = ("/usr/lib/apt/apt-helper", "/usr/lib/apt/methods/*", "/usr/lib/*/libapt-pkg.so*")
CODE_OF_PACKAGES = (
    "/usr/share/debconf",
    "/usr/share/perl5/Debconf",
    "/usr/lib/*/perl-base",
    "/usr/lib/apk/exec",
)
"""Code that the scripts of packages run besides programs."""
_PYTHON = re.compile(r"(python|pypy)\d?(\.\d+)?t?")
"""A program that uv asks whether it is a Python."""
_LIBRARY = re.compile(r"(/\S+)(?= \(0x[0-9a-f]+\)| =>|$)", re.MULTILINE)
_SITE = ("site-packages", "dist-packages")
_ENTRY_POINTS = "entry_points.txt"
"""A file by which pytest loads installed packages."""
_IS_CODE = re.compile(r"import[ \t]")
"""A line of a ``.pth`` file that is run."""
_CODE = (".py", ".so", ".pth", ".pyc", ".zip")


def fingerprint(path: str) -> Fingerprint | None:
    """Return the fingerprint of what a path leads to; None if that is nothing."""
    try:
        found = os.stat(path)
    except OSError:
        return None
    return [found.st_size, found.st_mtime_ns, found.st_ctime_ns, found.st_mode]


def device(path: str) -> str:
    """Return what a path in ``/dev`` is; "" if nothing is there."""
    try:
        found = os.lstat(path)
        target = os.readlink(path) if stat.S_ISLNK(found.st_mode) else ""
    except OSError:
        return ""
    return f"{stat.S_IFMT(found.st_mode)} {found.st_rdev} {target}"


class Marks(TypedDict):
    """What was there before the agent acted.

    Attributes:
        files: The fingerprints of all files that tests may rely on, by path.
        plugins: The Python packages that pytest loads as plugins.
        starting: The Python packages that a Python imports when it starts, by ``.pth`` files.
        beside: Packages that tests run with, in other directories on the path of a Python.
        devices: What each of `DEVICES` is.
        since: The time, in nanoseconds.
    """

    files: dict[str, Fingerprint]
    plugins: list[str]
    starting: list[str]
    beside: list[str]
    devices: dict[str, str]
    since: int


def take(search_path: str, home: str) -> Marks:
    """Return the marks of what tests may rely on."""
    sites = python_sites(search_path)
    plugins = {name for site in sites for name in plugins_in(site)}
    starting = {name for site in sites for name in started_by(site_files(site, "*.pth"))}
    paths = [*programs(search_path).values(), *LOADING]
    paths += [one for path in paths for one in started_with(path) if os.path.isabs(one)]
    paths += [
        path
        for path in python_files(search_path, plugins | starting)
        if not (path.endswith((".pth", _ENTRY_POINTS)) and is_harmless(path))
    ]
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
    return {
        "files": found,
        "plugins": sorted(plugins),
        "starting": sorted(starting),
        "beside": packages_beside(search_path, plugins),
        "devices": {path: device(path) for path in DEVICES},
        "since": _now(),
    }


def _now() -> int:
    """Return the time that the kernel gives to changes of files."""
    with tempfile.TemporaryFile() as file:
        return os.fstat(file.fileno()).st_ctime_ns


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


def started_with(path: str) -> list[str]:
    """Return what runs a script: the path of an interpreter, or the name that ``env`` looks up."""
    if not os.path.isfile(path):
        return []
    try:
        with open(path, "rb") as file:
            line = file.read(256).partition(b"\n")[0].decode(errors="replace")
    except OSError:
        return []
    words = line.removeprefix("#!").split() if line.startswith("#!") else []
    if not words or os.path.basename(words[0]) != "env":
        return words[:1]
    return [one for one in words[1:] if not one.startswith("-") and "=" not in one][:1]


def with_starters(words: set[str]) -> set[str]:
    """Return programs, and those by which programs of known names are run."""
    node = {"node"} if words & OF_NODE else set()
    return words | node | ({"uv"} if "uvx" in words else set())


def home_files(home: str) -> list[str]:
    """Return the programs in a home directory, and the scripts that put them on the path."""
    found = [os.path.join(home, one) for one in HOME_STARTS]
    for directory in HOME_PROGRAMS:
        place = os.path.join(home, directory)
        with contextlib.suppress(OSError):
            found += [os.path.join(place, name) for name in os.listdir(place)]
    return [path for path in dict.fromkeys(found) if os.path.lexists(path)]


def is_newer(path: str, since: int) -> bool:
    """Return whether a path was made, changed or renamed after a time in nanoseconds."""
    try:
        return os.lstat(path).st_ctime_ns > since
    except OSError:
        return False


def newer_files(patterns: Iterable[str], since: int) -> list[str]:
    """Return the directories and files in directories that are newer than a time."""
    return [
        path
        for pattern in patterns
        for root in glob.glob(pattern)
        for directory, names, files in os.walk(root)
        for path in [directory, *(os.path.join(directory, one) for one in (*names, *files))]
        if is_newer(path, since)
    ]


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
        if _PYTHON.fullmatch(name):
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


def python_sites(search_path: str) -> list[str]:
    """Return the directories of installed packages of the Pythons on a search path."""
    found = (os.path.join(root, name) for root in python_roots(search_path) for name in _SITE)
    return [directory for directory in found if os.path.isdir(directory)]


def site_files(site: str, pattern: str) -> list[str]:
    """Return the files in a directory of packages that match a pattern."""
    return sorted(glob.glob(os.path.join(glob.escape(site), pattern), include_hidden=True))


def entry_points(directory: str) -> list[str]:
    """Return the files in a directory on the path of a Python that name plugins of pytest."""
    names = os.listdir(directory) if os.path.isdir(directory) else []
    infos = (os.path.join(directory, one) for one in names if one.lower().endswith("-info"))
    return sorted(os.path.join(one, _ENTRY_POINTS) for one in infos)


def places_of(path: str) -> list[str]:
    """Return what the lines of a ``.pth`` file add to the path of a Python."""
    lines = (line.rstrip() for line in text_of(path).splitlines() if not _IS_CODE.match(line))
    given = (line for line in lines if line and not line.startswith("#"))
    return [os.path.normpath(os.path.join(os.path.dirname(path), line)) for line in given]


def directories_beside(search_path: str) -> list[str]:
    """Return the directories that ``.pth`` files add to the paths of Pythons."""
    sites = python_sites(search_path)
    files = (file for site in sites for file in site_files(site, "*.pth"))
    found = (place for file in files for place in places_of(file))
    return [one for one in dict.fromkeys(found) if os.path.isdir(one) and one not in sites]


def packages_beside(search_path: str, packages: set[str]) -> list[str]:
    """Return packages that tests run with, in the directories that ``.pth`` files add."""
    wanted = packages | RUNNERS | SHARED
    return sorted(
        os.path.join(directory, name)
        for directory in directories_beside(search_path)
        for name in os.listdir(directory)
        if stem(name) in wanted and not name.endswith("-info")
    )


def plugins_in(site: str) -> set[str]:
    """Return the packages in a directory that belong to plugins of pytest."""
    found = set()
    for path in entry_points(site):
        text = text_of(path)
        if "pytest11" in text:
            record = text_of(os.path.join(os.path.dirname(path), "RECORD"))
            files = {line.partition(",")[0] for line in record.splitlines()}
            found |= {stem(file.partition("/")[0]) for file in files if file.endswith(_CODE)}
            found |= set(re.findall(r"^[^=\[#]+=\s*(\w+)", text, re.MULTILINE))
    return found - {"", "__pycache__"}


def started_by(paths: Iterable[str]) -> set[str]:
    """Return the words in the code of ``.pth`` files, among them the packages that it imports."""
    lines = (line for path in paths for line in text_of(path).splitlines())
    return {word for line in lines if _IS_CODE.match(line) for word in re.findall(r"\w+", line)}


def python_files(search_path: str, packages: set[str]) -> Iterator[str]:
    """Yield the modules of the Pythons on a search path, and what starts with them.

    Args:
        search_path: Where the Pythons are.
        packages: Installed packages that matter, besides those that run tests and pip.
    """
    count = 0
    packages = packages | RUNNERS | SHARED | {"pip"}
    beside = directories_beside(search_path)
    for directory in [*python_sites(search_path), *beside]:
        yield from filter(os.path.lexists, entry_points(directory))
    for hook in (os.path.join(directory, name) for directory in beside for name in HOOKS):
        if os.path.lexists(hook):
            yield hook
    for root in python_roots(search_path):
        for directory, names, files in os.walk(root):
            names[:] = [name for name in names if name != "__pycache__"]
            is_site = any(part in _SITE for part in directory.split(os.sep))
            if os.path.basename(directory) in _SITE:  # by these, pip knows what is installed
                yield from (
                    os.path.join(directory, name)
                    for name in names
                    if name.endswith("-info") and package_of(name) in packages
                )
            for name in files:
                if not name.endswith(_CODE):
                    continue
                path = os.path.join(directory, name)
                if is_site and not matters_in_site(path, packages):
                    continue
                count += 1
                if count > MAX_FILES:
                    return
                yield path


def inside_site(path: str) -> list[str]:
    """Return the parts of a path below its directory of packages; none if it is in no such one."""
    parts = path.split(os.sep)
    places = [number for number, part in enumerate(parts[:-1]) if part in _SITE]
    return parts[places[-1] + 1 :] if places else []


def stem(name: str) -> str:
    """Return the package of a file or directory that is directly in a directory of packages."""
    return package_of(name) if name.endswith("-info") else name.partition(".")[0]


def package_of(name: str) -> str:
    """Return the package of a directory such as ``Pygments-2.18.0.dist-info``."""
    return re.split("[-.]", name)[0].lower()


def matters_in_site(path: str, packages: set[str]) -> bool:
    """Return whether an installed file takes part when tests are run, and not only when used."""
    inside = inside_site(path)
    if stem(inside[0]) in packages:
        return True
    return len(inside) == 1 and (inside[0] in HOOKS or inside[0].endswith(".pth"))


def words_of(scripts: Iterable[str]) -> set[str]:
    """Return the words of scripts that may be names of programs."""
    return {word for script in scripts for word in re.findall(r"[\w.+-]+", script)}


class Comparison:
    """What the agent has done to what the tests rely on.

    Attributes:
        changed: Paths that the tests rely on, and that the agent changed, removed or replaced.
        added: Paths that the agent added, and that would change how the tests run.
        hidden: Paths that the agent added, and that installers must not find.
    """

    def __init__(
        self,
        before: Marks,
        search_path: str,
        words: set[str],
        directory: str,
        home: str,
        python_path: str = "",
    ) -> None:
        self._before = before["files"]
        self._plugins, self._starting = set(before["plugins"]), set(before["starting"])
        self._beside = set(before["beside"])
        self.changed = [path for path, kind in before["devices"].items() if device(path) != kind]
        self._since = before["since"]
        self.added: list[str] = []
        self.hidden: list[str] = []
        pythons = {*filter(_PYTHON.fullmatch, programs(search_path))}
        names = with_starters(words) | set(ALWAYS) | pythons
        self._compare_programs(search_path, names)
        self.hidden += [path for path in self.added if os.path.basename(path) in pythons - words]
        self.added = [path for path in self.added if path not in self.hidden]
        self._compare_installers(search_path)
        if words & PACKAGE_MANAGERS:
            self._compare_packages(search_path)
        self._compare_home(home, names)
        self._compare_python(search_path, words)
        place = directory or "/"
        paths = [os.path.join(place, one) for one in python_path.split(os.pathsep) if one]
        self._compare_settings([place, *paths])

    def to_set_aside(self) -> list[str]:
        """Return what of `hidden` is set aside if it cannot be put back when pytest starts."""
        return [
            path
            for path in self.hidden
            if os.path.basename(path) in ALWAYS or not _PYTHON.fullmatch(os.path.basename(path))
        ]

    def _compare_programs(self, search_path: str, names: set[str]) -> None:
        now = programs(search_path)
        left, seen = sorted(names), set(names)
        for name in left:  # it grows by the interpreters of scripts
            paths = (os.path.join(one, name) for one in search_path.split(os.pathsep))
            first = next((path for path in paths if path in self._before), None)
            place = now.get(name)
            if first is not None:
                if place != first or fingerprint(first) != self._before[first]:
                    self.changed.append(place or first)
                    continue
                if name in ("sh", "bash", "python3", "python", "cat"):
                    self._compare_libraries(first)
                for one in started_with(first):
                    if not os.path.isabs(one):
                        left += {one} - seen
                        seen.add(one)
                    elif one in self._before and fingerprint(one) != self._before[one]:
                        self.changed.append(one)
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

    def _compare_packages(self, search_path: str) -> None:
        """Find changed programs that scripts of packages run; those before them are hidden."""
        for name in OF_PACKAGES:
            paths = [os.path.join(one, name) for one in search_path.split(os.pathsep)]
            first = next((path for path in paths if path in self._before), None)
            if first is not None and fingerprint(first) != self._before[first]:
                self.changed.append(first)
            if first is not None or name == "policy-rc.d":
                until = len(paths) if first is None else paths.index(first)
                self.hidden += [one for one in paths[:until] if os.path.lexists(one)]
        self.changed += newer_files(CODE_OF_PACKAGES, self._since)

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

    def _compare_python(self, search_path: str, words: set[str]) -> None:
        names = self._plugins | self._starting
        now = {*python_files(search_path, names), *python_starts(search_path)}
        code = {one for one in self._before if one.endswith((*_CODE, *STARTS, _ENTRY_POINTS))}
        different = {one for one in code if fingerprint(one) != self._before[one]}
        new = {one for one in now - self._before.keys() if not is_harmless(one)}
        kept = self._kept(words)
        tested_with = self._plugins | RUNNERS | SHARED | {"pip", *map(stem, HOOKS)}
        only_starting = self._starting - tested_with
        starting: set[str] = set()
        for path in sorted(different | new):
            inside = inside_site(path)
            is_of_pytest = path.endswith(_ENTRY_POINTS)
            name = stem(inside[0]) if inside and not is_of_pytest else ""
            if len(inside) == 1 and path.endswith(".pth"):
                if os.path.lexists(path) and not is_harmless(path):
                    self.added.append(path)
            elif name in kept:
                continue
            elif name in only_starting:
                starting.add(name)
            elif path in different:
                self.changed.append(path)
            else:
                self._add(path, inside)
        for path in sorted(one for one in code - different if one.endswith(".pth")):
            if starting & started_by([path]):
                self.added.append(path)
        found = packages_beside(search_path, self._plugins)
        self.added += [
            one
            for one in found
            if one not in self._beside and stem(os.path.basename(one)) not in kept
        ]
        loader = python_loader(search_path)
        if loader is not None and fingerprint(loader) == self._before.get(loader):
            for module in filter(loads_libraries, self._before):
                self._compare_libraries_of(module, loader)

    def _kept(self, words: set[str]) -> set[str]:
        """Return packages that are the agent's to change, since the tests do not run with them.

        Pytest runs with those of the image's Python only if it was in the image, or is installed
        into it. Pip matters if the tests use it.
        """
        has_pytest = any(inside_site(path)[:1] == ["_pytest"] for path in self._before)
        is_added = words & INTO_IMAGE or any(map(_PYTEST_OF_SYSTEM.match, words))
        kept = set() if has_pytest or is_added else {*SHARED}
        return kept if words & INSTALLERS else {*kept, "pip"}

    def _add(self, path: str, inside: list[str]) -> None:
        """Set a file aside, or the whole of what is new in the directory of packages."""
        top = path
        if inside and path.endswith(_CODE):
            top = path[: len(path) - len(os.path.join(*inside))] + inside[0]
            if any(one.startswith(f"{top}/") for one in self._before):
                top = path
        if top not in self.added:
            self.added.append(top)

    def _compare_settings(self, directories: list[str]) -> None:
        """Find what pytest, or any Python, would read of the agent's directories as it starts."""
        given = [os.path.join("/", name) for name in SETTINGS]
        given += [os.path.join(one, name) for one in dict.fromkeys(directories) for name in HOOKS]
        self.added += [path for path in given if is_newer(path, self._since)]
        for directory in dict.fromkeys(directories[1:]):
            for path in filter(os.path.lexists, entry_points(directory)):
                is_new = any(is_newer(one, self._since) for one in (path, os.path.dirname(path)))
                if is_new and not is_harmless(path):
                    self.added.append(path)


def is_harmless(path: str) -> bool:
    """Return whether an added file does not change how the tests run."""
    try:
        if not os.path.isfile(path) or os.path.getsize(path) > TEXT_BYTES:
            return False
    except OSError:
        return False
    text = text_of(path)
    if path.endswith(".pth"):
        has_code = any(map(_IS_CODE.match, text.splitlines()))
        return not has_code and not any(map(os.path.isfile, places_of(path)))  # zipped modules
    if path.endswith(_ENTRY_POINTS):
        return "pytest11" not in text
    if path.endswith("openssl.cnf"):  # that of the package, which tests may need
        return not re.search(
            r"^\s*(\.include|(\w+\.)?(module|dynamic_path|SO_PATH)\s*=)", text, re.M
        )
    return False


def text_of(path: str) -> str:
    """Return the begin of a text file; "" if it cannot be read."""
    try:
        with open(path, encoding="utf-8-sig", errors="replace") as file:
            return file.read(TEXT_BYTES)
    except OSError:
        return ""


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
