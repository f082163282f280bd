"""Makes the checkout's virtual environment, `.venv`, with the project and dependency groups in it.

    python -I scripts/bootstrap.py ROOT [GROUP]...

Standard library only: it runs before anything is installed, also where Python came without
``ensurepip`` and without pip. It installs with uv, in a fifth of pip's time: the one on PATH, else
one that pip installs first; and with pip when uv fails. pip is the one that ``venv`` brings, else
the system's, else one from the package index. It is silent but for one line, unless something
fails: then the installer's own words follow.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path

# Python runs isolated, and then looks neither beside its script nor where the project is.
sys.path.insert(0, str(Path(__file__).parent))
sys.path.append(str(Path(__file__).parents[1]))

from package_index import fetch_wheel

from aenv_ray.engines.node.installer import uv_options, uv_variables, without_passwords

STAMP = "aenv-bootstrap.json"
# Below an environment, ours that is being replaced or one that is active: what it was made from.
PYTHON = getattr(sys, "_base_executable", None) or sys.executable
VENV_HINT = "sudo apt-get install python3-venv, then run this again"


class Failure(Exception):
    """The environment cannot be made; the message is for the user, the hint the way out."""

    def __init__(self, message: str, hint: str = "", words: str = "") -> None:
        super().__init__(message)
        self.hint = hint
        self.words = words


def say(text: str) -> None:
    """Write a line for people; standard output is the program's that is started afterwards."""
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()


def main(root: Path, groups: Sequence[str]) -> int:
    """Make sure that ``ROOT/.venv`` is there and current."""
    venv = root / ".venv"
    wanted = fingerprint(root)
    if is_current(venv, wanted, groups):
        return 0
    try:
        with locked(root):
            if not is_current(venv, wanted, groups):
                build(root, venv, wanted, groups)
    except Failure as failure:
        if failure.words:
            say(without_passwords(failure.words.rstrip()))
        say(f"error: {failure}")
        if failure.hint:
            say(f"hint: {failure.hint}")
        return 1
    except OSError as exc:
        say(f"error: {venv} cannot be made: {exc}")
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


# --- what is there -------------------------------------------------------------------------------


def fingerprint(root: Path) -> str:
    """Return what an installation depends on: the project's metadata, this file, and the place."""
    # The place too: an editable install and the scripts in .venv/bin hold absolute paths.
    parts = [(root / "pyproject.toml").read_bytes(), Path(__file__).read_bytes(), os.fsencode(root)]
    return hashlib.sha256(b"\0".join(parts)).hexdigest()


def read_stamp(venv: Path) -> dict[str, object]:
    """Return what this script noted in the environment; empty without a note."""
    with contextlib.suppress(OSError, ValueError):
        return dict(json.loads((venv / STAMP).read_text(encoding="utf-8")))
    return {}


def is_current(venv: Path, wanted: str, groups: Sequence[str]) -> bool:
    """Whether the environment has the project as it is now, and the groups."""
    stamp = read_stamp(venv)
    installed = stamp.get("groups")
    return (
        stamp.get("fingerprint") == wanted
        and isinstance(installed, list)
        and set(groups) <= set(installed)
        and (venv / "bin" / "python").exists()
        and is_of_asked_python(venv)
    )


def is_of_asked_python(venv: Path) -> bool:
    """Whether it is of the Python that ``AENV_PYTHON`` asks for, and which then runs this."""
    if not os.environ.get("AENV_PYTHON"):
        return True
    return (venv / "bin" / "python").resolve() == Path(PYTHON).resolve()


@contextlib.contextmanager
def locked(root: Path) -> Iterator[None]:
    """Let one process at a time install; where the file system cannot lock, do without."""
    fd = os.open(root / "pyproject.toml", os.O_RDONLY | os.O_CLOEXEC)
    try:
        with contextlib.suppress(OSError):
            fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)


# --- making it -----------------------------------------------------------------------------------


def build(root: Path, venv: Path, wanted: str, groups: Sequence[str]) -> None:
    """Make the environment if need be and install into it."""
    if os.geteuid() == 0:
        os.umask(0o022)  # root's sandboxes run as nobody, who must be able to read what they import
    if not is_of_asked_python(venv) and works(venv):
        raise Failure(
            f"{venv} is of another Python than AENV_PYTHON={os.environ['AENV_PYTHON']}",
            "unset AENV_PYTHON to use it, or remove it to have it made from that Python",
        )
    stamp = read_stamp(venv)
    before = stamp.get("groups")
    # What was there stays: ./quickstart after ./test takes no test tool away.
    keep = sorted({*groups, *(before if isinstance(before, list) else [])})
    say(f"installing aenv-ray into {venv} (once, about a minute) …")
    if stamp.get("root") not in (None, str(root)) or not works(venv):
        clear(venv)
    requirements = ["--editable", str(root), *group_requirements(root, keep)]
    words = install_with_uv(root, venv, requirements)
    if words:
        say("uv failed, trying pip …")
        # Compiling all of Ray takes a third of the time; what is used is compiled afterwards.
        done = run([*make_with_pip(venv), "install", "--no-compile", *requirements], root)
        if done.returncode:
            raise Failure(
                "the project's requirements cannot be installed",
                "the lines above are the installer's own; is the package index reachable?",
                f"{words}\n{done.stdout}".strip(),
            )
    finish(venv, root, wanted, keep)


def finish(venv: Path, root: Path, wanted: str, groups: Sequence[str]) -> None:
    """Compile what is used, and write the stamp of a whole environment."""
    point_in_ascii(venv, root)
    run([str(venv / "bin" / "python"), str(root / "scripts" / "precompile.py")])
    note(venv, root, wanted, groups)


def point_in_ascii(venv: Path, root: Path) -> None:
    """Have every locale find a checkout below a directory whose name is not ASCII.

    Python reads path files in the locale's encoding: with ``LC_ALL=C`` no program of the
    environment would start, not even this script the next time.
    """
    if str(root).isascii():
        return
    for file in venv.glob("lib/python*/site-packages/*.pth"):
        if file.read_bytes().strip() == os.fsencode(root):
            # Python runs a line that begins so, as code.
            line = f"import sys; sys.path.append({str(root)!a})\n"
            file.write_text(line, encoding="ascii")


def note(venv: Path, root: Path, wanted: str, groups: Sequence[str]) -> None:
    """Write the stamp; with an empty fingerprint it only says who made the environment."""
    stamp = {"fingerprint": wanted, "groups": list(groups), "root": str(root)}
    partial = venv / f"{STAMP}.partial"
    partial.write_text(json.dumps(stamp) + "\n", encoding="utf-8")
    partial.replace(venv / STAMP)


def works(venv: Path) -> bool:
    """Whether the environment has an interpreter that runs and is new enough."""
    python = venv / "bin" / "python"
    if not python.exists():
        return False
    probe = "import sys; sys.exit(sys.version_info < (3, 11) or sys.prefix == sys.base_prefix)"
    return run([str(python), "-I", "-c", probe]).returncode == 0


def clear(venv: Path) -> None:
    """Remove a broken environment, and nothing that is none."""
    if not venv.exists() and not venv.is_symlink():
        return
    if venv.is_symlink() or not venv.is_dir():
        raise Failure(f"{venv} is in the way: it is no virtual environment", "move it away")
    if any(venv.iterdir()) and not (venv / "pyvenv.cfg").exists() and not read_stamp(venv):
        raise Failure(f"{venv} is in the way: it is no virtual environment", "move it away")
    shutil.rmtree(venv)


def group_requirements(root: Path, groups: Sequence[str]) -> list[str]:
    """Return the requirements of dependency groups (PEP 735); pip 25.1 is not everywhere yet."""
    with (root / "pyproject.toml").open("rb") as file:
        table = tomllib.load(file).get("dependency-groups", {})
    found: list[str] = []
    for group in groups:
        if group not in table:
            raise Failure(f"pyproject.toml has no dependency group {group!r}")
        for item in table[group]:
            if isinstance(item, str):
                found.append(item)
            else:
                found += group_requirements(root, [item["include-group"]])
    return found


def run(
    command: Sequence[str], cwd: Path | None = None, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Run a command without input and with more environment variables, its output collected."""
    environment = {**os.environ, "PIP_NO_INPUT": "1", "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    environment |= variables
    # Of an environment that is active in the caller's shell, or of the caller's own Python.
    for name in ("VIRTUAL_ENV", "PYTHONHOME", "PYTHONPATH", "PIP_REQUIRE_VIRTUALENV", "PIP_USER"):
        environment.pop(name, None)
    return subprocess.run(
        command, cwd=cwd, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, text=True, errors="replace", check=False,
    )  # fmt: skip


def install_with_uv(root: Path, venv: Path, requirements: Sequence[str]) -> str:
    """Make the environment and install with uv; return its words when it failed, else nothing."""
    uv = shutil.which("uv")
    if uv is None:
        pip = make_with_pip(venv)
        note(venv, root, "", [])
        uv = str(venv / "bin" / "uv")
        fetched = run([*pip, "install", "--no-compile", requirement_of_uv(root)])
        if fetched.returncode or not Path(uv).exists():
            return fetched.stdout or "pip install uv failed"
    elif not works(venv):
        made = run([uv, "venv", "--quiet", "--seed", "--python", PYTHON, str(venv)], root)
        if made.returncode:
            return made.stdout or "uv venv failed"
        note(venv, root, "", [])
    command = [uv, "pip", "install", "--quiet", "--python", str(venv / "bin" / "python")]
    done = run([*command, *uv_options(), *requirements], root, **uv_variables())
    return (done.stdout or "uv pip install failed") if done.returncode else ""


def requirement_of_uv(root: Path) -> str:
    """Return the project's own requirement: uv also installs the requirements of environments."""
    with (root / "pyproject.toml").open("rb") as file:
        requirements: list[str] = tomllib.load(file)["project"]["dependencies"]
    return next(one for one in requirements if re.match(r"uv\b", one))


def make_with_pip(venv: Path) -> list[str]:
    """Make the environment if need be; return the command that is its pip."""
    python = str(venv / "bin" / "python")
    if not works(venv):
        if importlib.util.find_spec("venv") is None:
            raise Failure("this Python comes without its venv module", VENV_HINT)
        # Debian and Ubuntu ship venv without ensurepip, which is in python3-venv.
        seed = [] if importlib.util.find_spec("ensurepip") else ["--without-pip"]
        made = run([PYTHON, "-I", "-m", "venv", *seed, str(venv)])
        if made.returncode and not seed:
            clear(venv)
            made = run([PYTHON, "-I", "-m", "venv", "--without-pip", str(venv)])
        if made.returncode:
            raise Failure(f"{venv} cannot be made", VENV_HINT, made.stdout)
    own = [python, "-m", "pip"]
    if run([*own, "--version"]).returncode == 0:
        return own
    system = [PYTHON, "-m", "pip", "--python", python]  # pip 22.3 and later
    if run([*system, "--version"]).returncode == 0:
        run([*system, "install", "pip"])
        return own if run([*own, "--version"]).returncode == 0 else system
    with tempfile.TemporaryDirectory() as directory:
        try:
            wheel = fetch_wheel(Path(directory))
        except OSError as exc:
            what = "this Python comes without pip, and it cannot be fetched"
            raise Failure(what, VENV_HINT, str(exc)) from exc
        # A wheel of pip can be run as it is, and installs itself.
        done = run([python, f"{wheel}/pip", "install", "--no-index", "--no-deps", str(wheel)])
    if done.returncode:
        raise Failure("pip cannot be installed", VENV_HINT, done.stdout)
    return own


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]).resolve(), sys.argv[2:]))
