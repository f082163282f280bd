"""Run by each Python of the tests as it starts, as its ``sitecustomize``.

Nothing that the agent left in the working directory, which comes first with ``python -m``, or on
the task's ``PYTHONPATH`` takes the place of Python's own modules or of pytest: only the tests, and
the files that are there themselves, import from there first. Before pytest reads anything, it
waits until the grader has put back what it hid from the installers.

It runs in the task's Python, whatever its version, so it uses nothing new.
"""

import os
import sys

RUNNERS = (
    "pytest", "_pytest", "pluggy", "iniconfig", "py", "pytest_ctrf", "pytest_json_ctrf",
    "packaging", "exceptiongroup", "tomli", "pygments", "colorama",
)  # fmt: skip
TESTS = "/tests"
_LIBRARY = os.path.dirname(os.__file__)
_DYNAMIC = os.path.join(_LIBRARY, "lib-dynload")
_IMPORT_MODULE = os.path.join(_LIBRARY, "importlib", "__init__.py")
_PYTEST_IMPORTS = os.path.join("_pytest", "pathlib.py")


def _add_path():
    """Add the task's ``PYTHONPATH`` behind Python's own modules.

    Returns:
        Its directories, and those that the script has added.
    """
    given = os.environ.get("AENV_PYTHONPATH")
    paths = [] if given is None else [os.path.abspath(one) for one in given.split(os.pathsep)]
    paths = [path for path in paths if os.path.isdir(path) and path not in sys.path]
    at = sys.path.index(_LIBRARY) + 1 if _LIBRARY in sys.path else len(sys.path)
    at = sys.path.index(_DYNAMIC) + 1 if _DYNAMIC in sys.path else at
    sys.path[at:at] = paths
    own = os.path.dirname(os.path.abspath(__file__))
    added = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    return set(paths), {os.path.abspath(one) for one in added if one} - {own}


class _OwnFirst:
    """Finds Python's own modules, and pytest, before those in directories of the task."""

    def __init__(self, search, of_task, of_script):
        self._search = search
        self._of_task = of_task
        self._directories = of_task | of_script

    def find_spec(self, name, path=None, target=None):
        """Return where a module is; None if it is searched as always."""
        del target
        if path is not None or name == "test" or self._is_of_task():
            return None
        spec = self._search.find_spec(name, [_LIBRARY, _DYNAMIC])
        if spec is not None and spec.origin not in (None, "namespace"):
            return spec
        if name not in RUNNERS:
            return None
        # The script may itself bring pytest on its path.
        spec = self._find(name, self._directories) or self._find(name, self._of_task)
        if spec is None:
            raise ImportError("No module named " + repr(name), name=name)
        return spec

    def _find(self, name, without):
        places = [one for one in sys.path if os.path.abspath(one) not in without]
        return self._search.find_spec(name, places)

    def _is_of_task(self):
        """Return whether the tests, the task's files or pytest's collection import a module."""
        frame, is_by_name = sys._getframe(2), False
        while frame is not None:
            file = frame.f_code.co_filename
            is_by_name = is_by_name or file == _IMPORT_MODULE
            if file != _IMPORT_MODULE and not file.startswith("<frozen importlib"):
                return self._is_below(file) or (is_by_name and file.endswith(_PYTEST_IMPORTS))
            frame = frame.f_back
        return False

    def _is_below(self, file):
        path = os.path.abspath(file)
        is_installed = path.startswith(_LIBRARY + os.sep) or "-packages" + os.sep in path
        if is_installed or file.startswith("<"):
            return False
        roots = [TESTS] + sorted(self._directories)  # noqa: RUF005
        return any(path.startswith(root + os.sep) for root in roots)


def _runs_pytest():
    with open("/proc/self/cmdline", "rb") as file:
        words = file.read().split(b"\0")[1:]
    if {b"--version", b"-V", b"--help", b"-h"}.intersection(words):
        return False
    for number, word in enumerate(words):
        if word == b"-m":
            return words[number + 1 : number + 2] == [b"pytest"]
        if not word.startswith(b"-"):
            return os.path.basename(word) in (b"pytest", b"py.test")
    return False


def _wait():
    import socket

    connection = socket.socket(socket.AF_UNIX)
    connection.connect("\0" + os.environ["AENV_REPORT"])
    connection.sendall(b'{"starting": true}\n')
    connection.recv(1)
    connection.close()


_of_task, _of_script = _add_path()
if sys.version_info >= (3, 4):  # noqa: UP036
    from importlib.machinery import PathFinder

    try:  # noqa: SIM105
        _of_task.add(os.getcwd())
    except OSError:
        pass  # it was removed
    _finder = _OwnFirst(PathFinder, _of_task, _of_script)
    sys.meta_path.insert(sys.meta_path.index(PathFinder), _finder)
if "AENV_REPORT" in os.environ and _runs_pytest():
    _wait()
