"""Create the checkout's virtual environment, `.venv`, with the project and dependency groups.

    python -I scripts/bootstrap.py ROOT [GROUP]...

It uses the standard library only, because it runs before anything is installed, and works with a
Python that has neither ``ensurepip`` nor pip. It installs with uv, which takes a fifth of pip's
time: the uv on PATH, or one that pip installs first. If uv fails it installs with pip: the pip of
``venv``, the system's, or one fetched from the package index. It prints one line, and the
installer's output if something fails.
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

# In isolated mode Python searches neither the script's directory nor the project.
sys.path.insert(0, str(Path(__file__).parent))
sys.path.append(str(Path(__file__).parents[1]))

from package_index import fetch_wheel

from aenv_ray.engines.node.installer import uv_options, uv_variables, without_passwords

STAMP = "aenv-bootstrap.json"
# The base interpreter, even if this runs inside a virtual environment.
PYTHON = getattr(sys, "_base_executable", None) or sys.executable
VENV_HINT = "sudo apt-get install python3-venv, then run this again"


class Failure(Exception):
    """The environment cannot be created; `hint` tells the user what to do."""

    def __init__(self, message: str, hint: str = "", words: str = "") -> None:
        super().__init__(message)
        self.hint = hint
        self.words = words


def say(text: str) -> None:
    """Write a line to standard error; standard output belongs to the program started next."""
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()


def main(root: Path, groups: Sequence[str]) -> int:
    """Create or update ``ROOT/.venv`` if necessary."""
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
        say(f"error: {venv} cannot be created: {exc}")
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


# --- the existing environment --------------------------------------------------------------------


def fingerprint(root: Path) -> str:
    """Return a hash of what an installation depends on: metadata, this file, the directory."""
    # The directory too: editable installs and the scripts in .venv/bin hold absolute paths.
    parts = [(root / "pyproject.toml").read_bytes(), Path(__file__).read_bytes(), os.fsencode(root)]
    return hashlib.sha256(b"\0".join(parts)).hexdigest()


def read_stamp(venv: Path) -> dict[str, object]:
    """Return the stamp that this script left in the environment; empty if there is none."""
    with contextlib.suppress(OSError, ValueError):
        return dict(json.loads((venv / STAMP).read_text(encoding="utf-8")))
    return {}


def is_current(venv: Path, wanted: str, groups: Sequence[str]) -> bool:
    """Return whether the environment has the current project and the groups."""
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
    """Return whether the environment uses the Python that ``AENV_PYTHON`` names."""
    if not os.environ.get("AENV_PYTHON"):
        return True
    return (venv / "bin" / "python").resolve() == Path(PYTHON).resolve()


@contextlib.contextmanager
def locked(root: Path) -> Iterator[None]:
    """Let one process at a time install; without a lock if the file system has none."""
    fd = os.open(root / "pyproject.toml", os.O_RDONLY | os.O_CLOEXEC)
    try:
        with contextlib.suppress(OSError):
            fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)


# --- creating it ---------------------------------------------------------------------------------


def build(root: Path, venv: Path, wanted: str, groups: Sequence[str]) -> None:
    """Create the environment if necessary and install into it."""
    if os.geteuid() == 0:
        os.umask(0o022)  # root's sandboxes run as nobody, who must be able to read the packages
    if not is_of_asked_python(venv) and works(venv):
        raise Failure(
            f"{venv} does not use AENV_PYTHON={os.environ['AENV_PYTHON']}",
            "unset AENV_PYTHON to use it, or remove it to create it with that Python",
        )
    stamp = read_stamp(venv)
    before = stamp.get("groups")
    # Keep installed groups: ./quickstart after ./test removes no test tool.
    keep = sorted({*groups, *(before if isinstance(before, list) else [])})
    say(f"installing aenv-ray into {venv} (once, about a minute) …")
    if stamp.get("root") not in (None, str(root)) or not works(venv):
        clear(venv)
    requirements = ["--editable", str(root), *group_requirements(root, keep)]
    words = install_with_uv(root, venv, requirements)
    if words:
        say("uv failed, trying pip …")
        # Compiling all of Ray takes a third of the time; `finish` compiles what is used.
        done = run([*make_with_pip(venv), "install", "--no-compile", *requirements], root)
        if done.returncode:
            raise Failure(
                "the project's requirements cannot be installed",
                "the lines above are the installer's own; is the package index reachable?",
                f"{words}\n{done.stdout}".strip(),
            )
    finish(venv, root, wanted, keep)


def finish(venv: Path, root: Path, wanted: str, groups: Sequence[str]) -> None:
    """Compile the modules that are used, and write the stamp."""
    point_in_ascii(venv, root)
    run([str(venv / "bin" / "python"), str(root / "scripts" / "precompile.py")])
    note(venv, root, wanted, groups)


def point_in_ascii(venv: Path, root: Path) -> None:
    """Make a checkout below a non-ASCII directory importable in every locale.

    Python reads ``.pth`` files in the locale's encoding: with ``LC_ALL=C`` no program of the
    environment would start.
    """
    if str(root).isascii():
        return
    for file in venv.glob("lib/python*/site-packages/*.pth"):
        if file.read_bytes().strip() == os.fsencode(root):
            # Python executes a line that begins with "import".
            line = f"import sys; sys.path.append({str(root)!a})\n"
            file.write_text(line, encoding="ascii")


def note(venv: Path, root: Path, wanted: str, groups: Sequence[str]) -> None:
    """Write the stamp; an empty fingerprint marks an incomplete environment of ours."""
    stamp = {"fingerprint": wanted, "groups": list(groups), "root": str(root)}
    partial = venv / f"{STAMP}.partial"
    partial.write_text(json.dumps(stamp) + "\n", encoding="utf-8")
    partial.replace(venv / STAMP)


def works(venv: Path) -> bool:
    """Return whether the environment has a working, recent interpreter."""
    python = venv / "bin" / "python"
    if not python.exists():
        return False
    probe = "import sys; sys.exit(sys.version_info < (3, 11) or sys.prefix == sys.base_prefix)"
    return run([str(python), "-I", "-c", probe]).returncode == 0


def clear(venv: Path) -> None:
    """Remove a broken environment; refuse to remove anything else."""
    if not venv.exists() and not venv.is_symlink():
        return
    if venv.is_symlink() or not venv.is_dir():
        raise Failure(f"{venv} is not a virtual environment and is in the way", "move it away")
    if any(venv.iterdir()) and not (venv / "pyvenv.cfg").exists() and not read_stamp(venv):
        raise Failure(f"{venv} is in the way: it is not a virtual environment", "move it away")
    shutil.rmtree(venv)


def group_requirements(root: Path, groups: Sequence[str]) -> list[str]:
    """Return the requirements of dependency groups (PEP 735), which pip before 25.1 cannot read."""
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
    """Run a command without input and collect its output; `variables` extend the environment."""
    environment = {**os.environ, "PIP_NO_INPUT": "1", "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    environment |= variables
    # They may describe an environment that is active in the caller's shell.
    for name in ("VIRTUAL_ENV", "PYTHONHOME", "PYTHONPATH", "PIP_REQUIRE_VIRTUALENV", "PIP_USER"):
        environment.pop(name, None)
    return subprocess.run(
        command, cwd=cwd, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, text=True, errors="replace", check=False,
    )  # fmt: skip


def install_with_uv(root: Path, venv: Path, requirements: Sequence[str]) -> str:
    """Create the environment and install with uv; return its output if it failed, else nothing."""
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
    """Return the project's requirement of uv, which it also needs at run time."""
    with (root / "pyproject.toml").open("rb") as file:
        requirements: list[str] = tomllib.load(file)["project"]["dependencies"]
    return next(one for one in requirements if re.match(r"uv\b", one))


def make_with_pip(venv: Path) -> list[str]:
    """Create the environment if necessary; return the command that runs its pip."""
    python = str(venv / "bin" / "python")
    if not works(venv):
        if importlib.util.find_spec("venv") is None:
            raise Failure("this Python has no venv module", VENV_HINT)
        # On Debian and Ubuntu ensurepip is in the package python3-venv.
        seed = [] if importlib.util.find_spec("ensurepip") else ["--without-pip"]
        made = run([PYTHON, "-I", "-m", "venv", *seed, str(venv)])
        if made.returncode and not seed:
            clear(venv)
            made = run([PYTHON, "-I", "-m", "venv", "--without-pip", str(venv)])
        if made.returncode:
            raise Failure(f"{venv} cannot be created", VENV_HINT, made.stdout)
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
            what = "this Python has no pip, and it cannot be downloaded"
            raise Failure(what, VENV_HINT, str(exc)) from exc
        # A wheel of pip can be executed, and installs itself.
        done = run([python, f"{wheel}/pip", "install", "--no-index", "--no-deps", str(wheel)])
    if done.returncode:
        raise Failure("pip cannot be installed", VENV_HINT, done.stdout)
    return own


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]).resolve(), sys.argv[2:]))
