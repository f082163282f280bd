"""A plugin of pytest that reports each test over a socket to the program that runs the tests.

It is loaded by the pytest of the task's tests, whatever its Python, so it uses nothing new. Code of
the agent that the tests run cannot read this process or take over its connection. The variables
that load the plugin are removed: what the tests start does not report.

At the end it runs a test that passes and one that fails, and reports whether pytest calls the
second one passed: then something of the agent, such as a conftest.py, hides failures.
"""

import json
import os
import socket
import sys
import warnings

MAX_DIRECTORIES = 20
_INFORMS = {"--version", "-V", "--help", "-h"}
"""Options with which pytest runs no tests."""
_CANARY = """
def test_passing():
    pass


def test_failing():
    assert False
"""
_connection = None
_files = set()
_order = []


def _connect():
    global _connection
    name = os.environ.pop("AENV_REPORT", None)
    directory = os.path.dirname(os.path.abspath(__file__))
    os.environ.pop("PYTEST_ADDOPTS", None)
    paths = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    of_task = os.environ.pop("AENV_PYTHONPATH", "").split(os.pathsep)
    _defer(set(map(os.path.abspath, filter(None, of_task))))
    for variable in os.environ.pop("AENV_FOR_INSTALLERS", "").split():
        os.environ.pop(variable, None)
    paths += of_task
    paths = [path for path in paths if path and os.path.abspath(path) != directory]
    if paths:
        os.environ["PYTHONPATH"] = os.pathsep.join(paths)
    else:
        os.environ.pop("PYTHONPATH", None)
    if name is None or _INFORMS.intersection(sys.argv[1:]):
        return
    try:
        import ctypes

        ctypes.CDLL(None).prctl(4, 0, 0, 0, 0)  # PR_SET_DUMPABLE
    except (ImportError, OSError, AttributeError, TypeError):
        sys.stderr.write("pytest's process is not protected: no ctypes\n")
    _connection = socket.socket(socket.AF_UNIX)
    _connection.connect("\0" + name)
    _connection.recv(1)  # sent when files of the agent that installers might use are back


def _defer(directories):
    """Put directories of the task last, so that no installed plugin is taken from them."""
    _order[:] = sys.path
    later = [path for path in sys.path if path in directories]
    sys.path[:] = [path for path in sys.path if path not in directories] + later


def pytest_load_initial_conftests():
    """Restore the order of the path: the plugins are loaded, and the task's files are not."""
    sys.path[:] = [*(path for path in sys.path if path not in _order), *_order]


def _say(message):
    if _connection is not None:
        _connection.sendall(json.dumps(message).encode() + b"\n")


def pytest_sessionstart(session):
    """Report that a session has begun."""
    _say({"began": os.getpid()})


def pytest_plugin_registered(plugin):
    """Report the content of a conftest.py."""
    path = str(getattr(plugin, "__file__", ""))
    if os.path.basename(path) == "conftest.py":
        _say_content(path)


def pytest_collectstart(collector):
    """Report the content of a file with tests."""
    path = str(getattr(collector, "fspath", ""))
    if path.endswith(".py"):
        _say_content(path)


def _say_content(path):
    """Report the digest of a file once, so that another one in its place is noticed."""
    if _connection is None or path in _files:
        return
    _files.add(path)
    import hashlib

    try:
        with open(path, "rb") as file:
            digest = hashlib.sha256(file.read()).hexdigest()
    except OSError:
        return
    _say({"file": os.path.realpath(path), "digest": digest})


def pytest_runtest_logreport(report):
    """Report a phase of a test."""
    _say({
        "test": report.nodeid,
        "when": report.when,
        "outcome": report.outcome,
        "expected": hasattr(report, "wasxfail"),
        "text": "" if report.passed else str(report.longrepr)[-2000:],
    })  # fmt: skip


def pytest_collectreport(report):
    """Report a file that cannot be collected."""
    if report.failed:
        _say({
            "test": report.nodeid or "collection",
            "when": "collect",
            "outcome": "failed",
            "expected": False,
            "text": str(report.longrepr)[-2000:],
        })  # fmt: skip


def pytest_sessionfinish(session, exitstatus):
    """Report whether failures are hidden, and how the session ended."""
    if _connection is not None:
        _say({"hides_failures": _hides_failures(session)})
    _say({"ended": int(exitstatus)})


def _hides_failures(session):
    """Return whether a test that fails is reported as passed; False if it cannot be told.

    Hooks apply to the files below them, so each directory with tests is tried. Nothing of this is
    in the output, the exit code or the reports of pytest.
    """
    items = getattr(session, "items", None) or []
    directories = sorted({os.path.dirname(str(item.fspath)) for item in items})
    return any(_hides_failures_in(session, one) for one in directories[:MAX_DIRECTORIES])


def _hides_failures_in(session, directory):
    path = os.path.join(directory, "test_" + os.urandom(8).hex() + ".py")
    outcomes = {}
    try:
        from _pytest import runner

        with open(path, "x") as file:
            file.write(_CANARY)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # those of plugins that do not know these tests
                for item in _items(session, path):
                    del item.fixturenames[:]  # a conftest.py's may take long, or work only once
                    reports = runner.runtestprotocol(item, log=False, nextitem=None)
                    outcomes[item.name] = {report.outcome for report in reports}
        finally:
            os.unlink(path)
    except Exception:  # noqa: BLE001  # another pytest, or the directory cannot be written
        return False
    is_run = outcomes.get("test_passing") == {"passed"} and "test_failing" in outcomes
    return is_run and "failed" not in outcomes["test_failing"]


def _items(session, path):
    """Return the tests of a file."""
    import pytest

    try:
        import pathlib

        module = pytest.Module.from_parent(session, path=pathlib.Path(path))
    except TypeError:  # before pytest 7
        import py

        module = pytest.Module.from_parent(session, fspath=py.path.local(path))
    return list(module.collect())


_connect()
