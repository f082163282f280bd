"""Runs the tests of a task in its container, after the agent.

This program runs with a Python that is not the image's, and that the agent cannot change. Its
standard input has the request, its standard output the outcome. No other process of the container
can read its memory or its files.
"""

from __future__ import annotations

import base64
import contextlib
import ctypes
import glob
import hashlib
import io
import json
import os
import re
import secrets
import selectors
import shutil
import signal
import socket
import stat
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable
from typing import Any

import fingerprints
import hidden
import package_managers

TESTS, LOGS, VERIFIER = "/tests", "/logs", "/logs/verifier"
OUTPUT_BYTES = 64 * 1024
REWARD_BYTES = 1 << 20
MESSAGE_BYTES = 1 << 20
MAX_TESTS = 20_000
END_S = 10.0
_NO_RUN = re.compile(r"\b(sudo|su|env -i|install|add|echo|printf|which|command)\b")
_REWARD = re.compile(
    r"""\b(?:echo|printf) ["']?(\d+(?:\.\d+)?)["']? ?>{1,2} ?["']?/logs/verifier/reward\.txt\b"""
)
_SHELLS = ("sh", "bash", "dash")
_TEST = re.compile(r"(^|/)(test_[^/]*|[^/]*_test)\.py$")
"""A file in which pytest looks for tests."""
_PR_SET_DUMPABLE, _PR_SET_CHILD_SUBREAPER = 4, 36


def main() -> None:
    """Answer the request on standard input."""
    ctypes.CDLL(None).prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)
    request = json.load(sys.stdin)
    sys.stdout.write(json.dumps(PROGRAMS[request["do"]](request)))


# --- before and after the agent -------------------------------------------------------------------


def prepare(request: dict[str, Any]) -> dict[str, Any]:
    """Take fingerprints, and save settings, the image's variables, and what uv finds in the place.

    Returns:
        Only ``not_root``, the user, if that is not root: nothing could be graded.
    """
    if os.getuid() != 0:
        return {"not_root": os.getuid()}
    found = fingerprints.take(os.environ.get("PATH", os.defpath), os.path.expanduser("~"))
    return {
        "fingerprints": found,
        "package_settings": package_managers.save(),
        "image_variables": dict(os.environ),
        "project": hidden.save(request["directory"]),
    }


def end_others(request: dict[str, Any] | None = None) -> dict[str, Any]:
    """Kill every other process of the container; return those that are left."""
    del request
    deadline = time.monotonic() + END_S
    while True:
        with contextlib.suppress(ProcessLookupError):
            os.kill(-1, signal.SIGKILL)  # all but this one and process 1, at once
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        left = _others()
        if not left or time.monotonic() > deadline:
            return {"left": left}
        time.sleep(0.01)


def _others() -> list[int]:
    """Return the other processes that run, without zombies, which process 1 reaps."""
    found = []
    for name in os.listdir("/proc"):
        if name.isdecimal() and int(name) not in (1, os.getpid()):
            with contextlib.suppress(OSError, IndexError):
                with open(f"/proc/{name}/stat", encoding="utf-8", errors="replace") as file:
                    words = file.read().rpartition(")")[2].split()
                # The state is that of the main thread; the 18th field counts the threads that run.
                if words[0] not in "ZX" or int(words[17]) > 1:
                    found.append(int(name))
    return found


def unpack(request: dict[str, Any]) -> dict[str, Any]:
    """Unpack an archive into a directory."""
    _extract(request["archive"], request["path"])
    return {}


def _extract(archive: str, path: str) -> None:
    os.makedirs(path, exist_ok=True)
    content = io.BytesIO(base64.b64decode(archive))
    with tarfile.open(fileobj=content) as tar:
        for member in tar.getmembers():
            member.uid, member.gid, member.uname, member.gname = os.getuid(), os.getgid(), "", ""
        tar.extractall(path)


# --- grading --------------------------------------------------------------------------------------


def grade(request: dict[str, Any]) -> dict[str, Any]:
    """Run the tests and return what they reported.

    Returns:
        ``refused``: why the tests were not run. Otherwise ``exit_code`` (None after a timeout),
        ``output``, ``sessions`` of pytest, and ``reward`` with the content of the reward file.
    """
    left = end_others()["left"]
    if left:
        return {"refused": f"processes of the agent did not end: {left[:20]}"}
    aside = _fresh_directory()
    for path in (TESTS, LOGS, VERIFIER):
        _remove(path)
    words = _words(request["tests"])
    compared = fingerprints.Comparison(
        request["fingerprints"],
        os.environ.get("PATH", os.defpath),
        words,
        request["directory"],
        os.path.expanduser("~"),
        _python_path(request),
    )
    if compared.changed:
        names = ", ".join([*dict.fromkeys(compared.changed)][:20])
        return {"refused": f"the agent changed what the tests rely on: {names}"}
    scripts = _texts(request["tests"], (request["script"],))
    is_pytest = runs_pytest(scripts)
    if not is_pytest:  # nothing would be put back
        compared.added += compared.to_set_aside()
    stuck = fingerprints.set_aside(compared.added, aside)
    if stuck:
        return {"refused": f"what the agent added cannot be set aside: {', '.join(stuck[:20])}"}
    concealed = hidden.Hidden()
    try:
        restored, changes = package_managers.restore(
            request["package_settings"],
            uses_packages=bool(words & fingerprints.PACKAGE_MANAGERS) and is_pytest,
        )
        package_managers.forget(compared.added)
        if is_pytest:
            concealed.hide([*compared.hidden, *_found_by_uv(request, scripts)], request["project"])
    except OSError as exc:
        return {"refused": f"files of the agent cannot be replaced by those of the image: {exc}"}
    for path in (LOGS, VERIFIER, TESTS):
        os.mkdir(path, 0o755)
    _extract(request["tests"], TESTS)
    verifier = os.open(VERIFIER, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)

    def put_back() -> None:
        concealed.put_back()
        package_managers.put_back(changes)

    outcome = _run(request, aside, put_back)
    outcome["reward"] = _reward(verifier)
    outcome["set_aside"] = [*compared.added, *restored]
    outcome["replaced_tests"] = replaced_tests(
        outcome["sessions"], request["tests"], request["copied"]
    )
    outcome["runs_pytest"] = is_pytest
    outcome["rewards_written"] = rewards_written_by(request["tests"])
    return outcome


def _found_by_uv(request: dict[str, Any], scripts: list[str]) -> list[str]:
    """Return what the agent has put where uv looks, or makes virtual environments."""
    script = "\n".join(line for one in scripts for line in _code(one))
    directory, since = request["directory"], request["fingerprints"]["since"]
    found = hidden.found_by_uv(script, directory, request["project"])
    return [*found, *hidden.made_by_script(script, directory, since)]


def _fresh_directory() -> str:
    path = f"/aenv-{secrets.token_hex(12)}"
    os.mkdir(path, 0o700)
    return path


def _remove(path: str) -> None:
    """Remove a path, and nothing that it leads to."""
    if os.path.islink(path) or not os.path.isdir(path):
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)
    else:
        shutil.rmtree(path)


def runs_pytest(scripts: list[str]) -> bool:
    """Return whether a script runs pytest as a user and with variables that let it report."""
    lines = [line for script in scripts for line in _code(script)]
    return any(re.search(r"\bpytest\b", line) and not _NO_RUN.search(line) for line in lines)


def rewards_written_by(archive: str) -> list[float] | None:
    """Return the numbers that an archive of tests writes; None if that cannot be told.

    Only shell and Python are understood: nothing is known if another file mentions a reward.
    """
    understood = (".sh", ".py")
    with tarfile.open(fileobj=io.BytesIO(base64.b64decode(archive))) as tar:
        for member in tar.getmembers():
            file = tar.extractfile(member) if member.isfile() else None
            if file is None or member.name.endswith(understood):
                continue
            if b"reward" in file.read():
                return None
    return rewards_written(_texts(archive, understood))


def rewards_written(texts: list[str]) -> list[float] | None:
    """Return the numbers that tests write as the reward; None if they write anything else."""
    found: list[float] = []
    for line in (line for text in texts for line in _code(text) if "reward" in line):
        numbers = _REWARD.findall(line)
        if len(numbers) != line.count("reward"):
            return None
        found += map(float, numbers)
    return found or None


def forbid_writes(texts: list[str]) -> bool:
    """Return whether tests run Python with audit hooks, which may fail each write of a cache.

    The cache of the image, which such tests expect, is not used.
    """
    return any("addaudithook" in text for text in texts)


def replaced_tests(
    sessions: list[list[dict[str, Any]]], archive: str, copied: bool = False
) -> list[str]:
    """Return the files that pytest read in the place of the archive's.

    Args:
        sessions: The reports of pytest.
        archive: The task's tests.
        copied: The image may have copies of the tests. Those that pytest reads instead of the files
            in `TESTS` count, too.
    """
    digests: dict[str, set[str]] = {}
    with tarfile.open(fileobj=io.BytesIO(base64.b64decode(archive))) as tar:
        for member in tar.getmembers():
            file = tar.extractfile(member) if member.isfile() else None
            if file is not None:
                name = os.path.basename(member.name)
                digests.setdefault(name, set()).add(hashlib.sha256(file.read()).hexdigest())
    known = set().union(*digests.values())
    read = {
        str(one["file"]): str(one.get("digest"))
        for session in sessions
        for one in session
        if "file" in one
    }
    found = {
        path for path, digest in read.items()
        if path.startswith(f"{TESTS}/") and digest not in known
    }  # fmt: skip
    if copied:
        of_tests = {path: one for path, one in read.items() if _TEST.search(path)}
        names = set(map(os.path.basename, of_tests)) & digests.keys()
        for name in names:
            same = [path for path in of_tests if os.path.basename(path) == name]
            if not any(read[path] in digests[name] for path in same):
                found.update(same)
        if not known.intersection(of_tests.values()) and any(map(_TEST.search, digests)):
            found.update(of_tests)
    return sorted(found)


def _code(text: str) -> list[str]:
    lines = map(str.strip, text.splitlines())
    return [line for line in lines if line and not line.startswith("#")]


def _texts(archive: str, ends: tuple[str, ...]) -> list[str]:
    """Return the content of the files whose names end so."""
    with tarfile.open(fileobj=io.BytesIO(base64.b64decode(archive))) as tar:
        members = [one for one in tar.getmembers() if one.isfile() and one.name.endswith(ends)]
        files = [tar.extractfile(one) for one in members]
        return [file.read().decode(errors="replace") for file in files if file is not None]


def _words(archive: str) -> set[str]:
    """Return the words of the scripts in an archive that may be names of programs.

    In Python most of them are not.
    """
    of_python = fingerprints.words_of(_texts(archive, (".py",)))
    of_shell = fingerprints.words_of(_texts(archive, (".sh",)))
    return of_shell | (of_python & fingerprints.IN_PYTHON)


def _python_path(request: dict[str, Any]) -> str:
    """Return the ``PYTHONPATH`` of the task's variables, or of its image."""
    return str({**os.environ, **request["variables"]}.get("PYTHONPATH", ""))


def python_variables(directory: str, path: str, start: str) -> dict[str, str]:
    """Return the variables by which Python finds the plugin in a directory, and then a path.

    Args:
        directory: A new directory.
        path: The task's ``PYTHONPATH``; "" for none.
        start: What each Python runs as it starts.
    """
    with open(f"{directory}/sitecustomize.py", "w", encoding="utf-8") as file:
        file.write(start)
    return {"PYTHONPATH": directory, **({"AENV_PYTHONPATH": path} if path else {})}


def _run(request: dict[str, Any], directory: str, put_back: Callable[[], None]) -> dict[str, Any]:
    script = os.path.join(TESTS, request["script"])
    os.chmod(script, 0o755)
    name = f"aenv-report-{secrets.token_hex(12)}"
    report = Report(name, put_back)
    module = f"aenv_{secrets.token_hex(12)}"
    with open(f"{directory}/{module}.py", "w", encoding="utf-8") as file:
        file.write(request["plugin"])
    given = {**request["image_variables"], **request["variables"]}
    for_installers = installer_variables(directory)
    variables = {
        **given,
        "PYTEST_ADDOPTS": f"-p {module}",
        **python_variables(directory, _python_path(request), request["start"]),
        "AENV_REPORT": name,
        **for_installers,
        "AENV_FOR_INSTALLERS": " ".join(one for one in for_installers if one not in given),
    }
    if forbid_writes(_texts(request["tests"], (".py", ".sh"))):
        variables["PYTHONDONTWRITEBYTECODE"] = "1"
    for unwanted in ("BASH_ENV", "ENV", "LD_PRELOAD", "LD_AUDIT", "LD_LIBRARY_PATH"):
        variables.pop(unwanted, None)
    process = subprocess.Popen(
        _command(script), cwd=request["directory"], env=variables, stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True,
    )  # fmt: skip
    output, in_time = report.collect(process, request["timeout_s"])
    exit_code = process.poll() if in_time else None
    end_others()
    return {
        "exit_code": exit_code,
        "in_time": in_time,
        "output": output.decode(errors="replace"),
        "sessions": report.sessions(),
    }


def installer_variables(directory: str) -> dict[str, str]:
    """Return the variables with which nothing of the agent is read as a setting or a cache.

    Args:
        directory: A new directory.
    """
    with open(f"{directory}/.curlrc", "w", encoding="utf-8"):
        pass  # without one, curl reads that of the home directory
    return {
        "PYTHONPYCACHEPREFIX": f"{directory}/cache",
        "PYTHONNOUSERSITE": "1",
        "UV_NO_CONFIG": "1",
        "UV_CACHE_DIR": f"{directory}/uv",
        "UV_TOOL_DIR": f"{directory}/tools",
        "UV_PYTHON_INSTALL_DIR": f"{directory}/pythons",
        "UV_VENV_CLEAR": "1",
        "PIP_CONFIG_FILE": "/dev/null",
        "PIP_NO_CACHE_DIR": "1",
        "CURL_HOME": directory,
        "WGETRC": "/dev/null",
        **_perl_variables(),
    }


def _perl_variables() -> dict[str, str]:
    """Return variables by which Debian's Perl takes its own modules first."""
    found = sorted(glob.glob("/usr/lib/*/perl-base"))
    is_first = fingerprints.programs(os.environ.get("PATH", os.defpath)).get("perl")
    is_debian = is_first in ("/usr/bin/perl", "/bin/perl")
    return {"PERL5LIB": found[0]} if found and is_debian else {}


def _command(script: str) -> list[str]:
    """Return the command of a script: by its own interpreter, if that is not a shell."""
    with open(script, "rb") as file:
        first = file.readline(256)
    if first.startswith(b"#!"):
        words = first[2:].decode(errors="replace").split()
        name = os.path.basename(words[-1] if words and words[0].endswith("/env") else words[0])
        if name not in _SHELLS:
            return [script]
    found = fingerprints.programs(os.environ.get("PATH", os.defpath))
    return [found.get("bash") or found["sh"], script]


class Report:
    """Listens for the plugin in the processes of pytest; each of its connections is a session.

    Args:
        name: That of the socket.
        started: Called once, when pytest starts; pytest waits for it.
    """

    def __init__(self, name: str, started: Callable[[], None]) -> None:
        self._started = started
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(f"\0{name}")
        self._listener.listen(64)
        self._listener.setblocking(False)
        self._received: list[bytearray] = []
        self._count = 0

    def collect(self, process: subprocess.Popen[bytes], timeout_s: float) -> tuple[bytes, bool]:
        """Return the end of the output, and whether the process ended in time."""
        assert process.stdout is not None
        deadline = time.monotonic() + timeout_s
        output = bytearray()
        ended = os.pidfd_open(process.pid)
        os.set_blocking(process.stdout.fileno(), False)
        with selectors.DefaultSelector() as selector:
            selector.register(self._listener, selectors.EVENT_READ)
            selector.register(process.stdout, selectors.EVENT_READ)
            selector.register(ended, selectors.EVENT_READ)
            has_ended = False
            while not has_ended:
                left_s = deadline - time.monotonic()
                if left_s <= 0:
                    break
                ready = [key for key, _ in selector.select(left_s)]
                has_ended = any(key.fileobj == ended for key in ready)
                self._read(selector, ready, process, output)
            if has_ended:  # what was sent before the end
                while ready := [k for k, _ in selector.select(0) if k.fileobj != ended]:
                    if not self._read(selector, ready, process, output):
                        break
        os.close(ended)
        return bytes(output[-OUTPUT_BYTES:]), has_ended

    def _read(
        self,
        selector: selectors.BaseSelector,
        ready: list[selectors.SelectorKey],
        process: subprocess.Popen[bytes],
        output: bytearray,
    ) -> int:
        """Read what is there; return the number of bytes and connections."""
        count = 0
        for key in ready:
            if key.fileobj is self._listener:
                connection, _ = self._listener.accept()
                if not self._received:
                    self._started()
                connection.setblocking(False)
                with contextlib.suppress(OSError):  # it has ended
                    connection.send(b"\n")
                self._received.append(bytearray())
                selector.register(connection, selectors.EVENT_READ, self._received[-1])
                count += 1
            elif key.fileobj is process.stdout or key.data is not None:
                data = b""
                with contextlib.suppress(BlockingIOError, ConnectionError):
                    data = os.read(key.fd, 65536)
                target = output if key.data is None else key.data
                target += data
                if key.data is None:
                    del output[: -2 * OUTPUT_BYTES]
                elif len(target) > 64 * MESSAGE_BYTES:
                    data = b""
                if not data:
                    selector.unregister(key.fileobj)
                count += len(data)
        return count

    def sessions(self) -> list[list[dict[str, Any]]]:
        """Return the messages of each session."""
        found = []
        for data in self._received:
            messages = []
            for line in bytes(data).split(b"\n"):
                with contextlib.suppress(ValueError):
                    message = json.loads(line)
                    if isinstance(message, dict):
                        messages.append(message)
            if not any("starting" in one for one in messages[:1]):
                found.append(messages[-MAX_TESTS:])
        return found


def _reward(directory: int) -> dict[str, Any]:
    """Return the content of the reward files, read through the directory that was made for them."""
    found: dict[str, Any] = {}
    for name in ("reward.txt", "reward.json", "ctrf.json"):
        with contextlib.suppress(OSError):
            flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
            file = os.open(name, flags, dir_fd=directory)
            try:
                facts = os.fstat(file)
                if stat.S_ISREG(facts.st_mode) and facts.st_nlink == 1:
                    found[name] = os.read(file, REWARD_BYTES).decode(errors="replace")
            finally:
                os.close(file)
    return found


PROGRAMS = {"prepare": prepare, "end_others": end_others, "unpack": unpack, "grade": grade}

if __name__ == "__main__":
    main()
