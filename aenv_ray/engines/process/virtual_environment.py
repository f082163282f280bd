"""Virtual environments of projects with requirements: built by uv, once for each content.

An environment is named by a hash of its requirements: their lines, the contents of the project's
own files that they name, the package sources, and the interpreter. Projects of all publishers
with the same requirements share it; the first one decides which versions an unpinned line
installs. It is built under a lock in its final place, because scripts in it hold its absolute
path.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import shutil
import stat
import sys
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Final

from aenv_ray.config import settings
from aenv_ray.engines.node import caches
from aenv_ray.engines.node.installer import PackageSources, package_sources, run_installer
from aenv_ray.engines.process.install_jail import BUILD, NO_JAIL, InstallOrder
from aenv_ray.engines.process.interpreters import Interpreter, running
from aenv_ray.engines.process.plan import NO_NAMESPACES_HINT
from aenv_ray.engines.process.requirements import Requirements, read_requirements
from aenv_ray.errors import AenvError, ConfigError, DeadlineExceeded, SandboxStartFailed
from aenv_ray.files import FileLock
from aenv_ray.runtime.fork.jail_spec import JailUnavailable

logger = logging.getLogger(__name__)

RUNTIME_REQUIREMENTS: Final = ("pydantic>=2.12,<3",)
"""What `aenv_ray.runtime` needs; the public door also needs fastmcp and is not started there."""
BUILD_DEADLINE_S: Final = 1800.0
LOCK_DEADLINE_S: Final = 2 * BUILD_DEADLINE_S
"""Longer than another process takes to build the same environment: one `uv venv`, one install."""


def may_be_installing(project_dir: Path) -> bool:
    """Return whether a project has requirements that a node may have to install first."""
    try:
        return bool(read_requirements(project_dir))
    except AenvError:
        return False  # the start reports it


async def ensure(
    project_dir: Path,
    cache_dir: Path,
    isolation: str = "auto",
    interpreter: Interpreter | None = None,
) -> Path | None:
    """Return the interpreter of the project's virtual environment, built if it is missing.

    It is built in a sandbox, see `aenv_ray.engines.process.install_jail`.

    Args:
        project_dir: Unpacked project.
        cache_dir: The directory of all environments.
        isolation: ``required``; ``auto``: build it without a sandbox if the kernel allows none, and
            log that; ``none``: without one.
        interpreter: Its Python. None: the running one.

    Returns:
        None for a project without requirements that the running Python serves.

    Raises:
        SandboxStartFailed: The installer failed; the message ends with its output. Or a sandbox is
            required, and the kernel allows none.
        ConfigError: ``requirements.txt``, or a file that it includes, cannot be used. Or another
            user can write to the cache.
        DeadlineExceeded: Another process held the environment's lock for too long, or the
            installer took too long.

    Cancelling ends the installer and releases the lock.
    """
    requirements = Requirements()
    if (project_dir / "requirements.txt").exists():  # whose author may have made it long
        requirements = await asyncio.to_thread(read_requirements, project_dir)
    interpreter = interpreter or running()
    if not requirements and interpreter == running():
        return None
    _check_cache(cache_dir)
    kinds = {"required": (True,), "none": (False,)}.get(isolation, (True, False))
    for is_jailed in kinds:
        make = partial(
            Build, project_dir, cache_dir, requirements, isolation, interpreter, is_jailed=is_jailed
        )
        # The contents of the project's own files are part of the key.
        build = await asyncio.to_thread(make) if requirements.files else make()
        try:
            return await build.ensure()
        except JailUnavailable as exc:
            if isolation == "required":
                raise SandboxStartFailed(
                    "the project's requirements are not installed: a sandbox is required for it, "
                    f"but: {exc}",
                    hint=NO_NAMESPACES_HINT,
                ) from None
            logger.warning("requirements of %s are installed without a sandbox: %s",
                           project_dir.name, exc)  # fmt: skip
    raise AssertionError("an environment that needs no sandbox can be built")


class Build:
    """One environment: where it is, and how it is built.

    Args:
        project_dir: Unpacked project.
        cache_dir: The directory of all environments.
        requirements: The project's requirements.
        isolation: As for `ensure`.
        interpreter: Its Python.
        is_jailed: Build it in a sandbox. Environments that were not are never used as if they were.
    """

    def __init__(
        self,
        project_dir: Path,
        cache_dir: Path,
        requirements: Requirements,
        isolation: str,
        interpreter: Interpreter,
        *,
        is_jailed: bool,
    ) -> None:
        self._project_dir = project_dir
        self._interpreter = interpreter
        self._requirements = requirements
        self._is_jailed = is_jailed
        self._sources = package_sources(settings().package_hosts)
        self._may_compile = _may_compile(isolation, self._sources)
        key = requirements.key(
            *RUNTIME_REQUIREMENTS, interpreter.prefix, interpreter.version,
            f"jailed={is_jailed} compiled={self._may_compile}", *self._sources.addresses,
        )  # fmt: skip
        self.target = cache_dir / key
        self.lock = cache_dir / f"{key}.lock"
        self._done = cache_dir / f"{key}.done"  # not where what is installed could write it

    async def ensure(self) -> Path:
        """Return the interpreter; raises as `ensure`, and JailUnavailable."""
        is_new = False
        if not self._done.exists():
            with await _lock(self.lock):
                if not self._done.exists():
                    await self._build()
                    is_new = True
        caches.note_use(self.target)  # until its template locks it
        if is_new:
            limits = settings().cache_limits
            await asyncio.to_thread(caches.collect, self.target.parent, *limits)
        return self.target / "bin" / "python"

    async def _build(self) -> None:
        count = len(self._requirements.packages)
        logger.info("installing %d requirements of project %s", count, self._project_dir.name)
        shutil.rmtree(self.target, ignore_errors=True)
        own = self.target / BUILD
        try:
            (own / "tmp").mkdir(parents=True)
            lists = await asyncio.to_thread(self._write_lists, own)
            variables = self._variables(own)
            # Nothing of the project: it needs no sandbox, which could change what is linked.
            await self._run(self._creation(), variables)
            link = os.readlink(self.target / "bin" / "python")
            await self._install(self._installation(lists), variables)
            self._check_python(link)
            self._done.touch()
        except BaseException:
            shutil.rmtree(self.target, ignore_errors=True)
            raise
        shutil.rmtree(own, ignore_errors=True)

    def _creation(self) -> list[str]:
        return [find_uv(), "venv", "--quiet", "--no-project", "--allow-existing",
                "--python", self._interpreter.path, str(self.target)]  # fmt: skip

    def _installation(self, lists: list[str]) -> list[str]:
        python = str(self.target / "bin" / "python")
        options = [*lists, *self._sources.options]
        if not self._may_compile:
            options += ["--only-binary", ":all:"]
        return [find_uv(), "pip", "install", "--quiet", "--python", python, *options]

    def _check_python(self, link: str) -> None:
        """Check that the interpreter is still a link to what it was created for.

        Where it leads decides which directories of the node its sandboxes show.

        Raises:
            SandboxStartFailed: Something that was installed has replaced it.
        """
        directory = self.target / "bin"
        python = directory / "python"
        is_same = python.is_symlink() and os.readlink(python) == link
        if directory.is_symlink() or not is_same:
            raise SandboxStartFailed(
                "the project's requirements cannot be installed: a package replaces bin/python, "
                "the interpreter of the virtual environment",
                hint="remove that package from requirements.txt, or use the docker engine",
            )

    def _write_lists(self, directory: Path) -> list[str]:
        """Write what to install, and return the installer's options for it."""
        files = []
        for number, (path, rest) in enumerate(self._requirements.files.items()):
            copy = directory / str(number) / path.name  # a build may write to it
            copy.parent.mkdir()
            if path.is_dir():
                shutil.copytree(path, copy, symlinks=True)
            else:
                shutil.copyfile(path, copy)
            files.append(f"{copy}{rest}")
        packages = [*self._requirements.packages, *files, *RUNTIME_REQUIREMENTS]
        options = []
        for option, lines in (("-r", packages), ("-c", self._requirements.constraints)):
            if lines:
                file = directory / f"requirements{option}.txt"
                file.write_text("\n".join(lines), encoding="utf-8")
                options += [option, str(file)]
        return options

    def _variables(self, own: Path) -> dict[str, str]:
        return {
            "PATH": f"{Path(sys.executable).parent}:/usr/local/bin:/usr/bin:/bin",
            "HOME": str(own), "TMPDIR": str(own / "tmp"), "LANG": "C.UTF-8", "NO_COLOR": "1",
            "UV_CACHE_DIR": str(own / "cache"), "UV_NO_CONFIG": "1", "UV_PYTHON_DOWNLOADS": "never",
            **self._sources.variables,
        }  # fmt: skip

    async def _run(self, command: list[str], variables: dict[str, str]) -> None:
        # A sandbox must be able to read it. Ray's uvloop has no `umask` argument.
        readable = ["/bin/sh", "-c", 'umask 022 && exec "$@"', "sh", *command]
        await self._installed(readable, {**variables, **self._sources.proxies})

    async def _install(self, command: list[str], variables: dict[str, str]) -> None:
        if not self._is_jailed:
            await self._run(command, variables)
            return
        order = InstallOrder(
            target=str(self.target), command=command, variables=variables,
            hosts=self._sources.hosts,
            shown=[*self._sources.paths, find_uv(), self._interpreter.prefix],
        )  # fmt: skip
        jailed = [sys.executable, "-P", "-m", "aenv_ray.engines.process.install_jail"]
        await self._installed(jailed, {"PYTHONPATH": _package_parent()}, order)

    async def _installed(
        self, command: list[str], variables: dict[str, str], order: InstallOrder | None = None
    ) -> None:
        data = b"" if order is None else json.dumps(asdict(order)).encode()
        try:
            status, output = await run_installer(
                command, deadline_s=BUILD_DEADLINE_S, variables=variables, data=data
            )
        except TimeoutError as exc:
            raise DeadlineExceeded(
                f"installing the project's requirements took more than {BUILD_DEADLINE_S:g} s",
                hint="pin versions, use wheels, or build an image and use the docker engine",
            ) from exc
        if order is not None and status == NO_JAIL:
            raise JailUnavailable(output)
        if status != 0:
            hint = "correct requirements.txt; the lines above are the installer's output"
            if not self._may_compile:
                hint += (
                    ". Only wheels are installed, unless the operator sets AENV_SOURCE_BUILDS=yes"
                )
            raise SandboxStartFailed(
                f"the project's requirements cannot be installed:\n{output}", hint=hint
            )


def _may_compile(isolation: str, sources: PackageSources) -> bool:
    """Whether packages without a wheel are built; their code then runs in the installer's sandbox.

    Raises:
        ConfigError: The operator wants it, but that code would see the password of an index.
    """
    wish = settings().source_builds
    if wish == "yes" and isolation == "required" and sources.has_password:
        raise ConfigError(
            "AENV_SOURCE_BUILDS=yes would show the password of the package index to every package "
            "that is built",
            hint="use an index without a password, or AENV_SOURCE_BUILDS=no",
        )
    return wish == "yes" or (wish == "auto" and isolation != "required")


def _package_parent() -> str:
    return str(Path(__file__).resolve().parents[3])


def _check_cache(directory: Path) -> None:
    """Create the cache if it is missing, and check that nobody else puts environments into it.

    Raises:
        ConfigError: Another user can write to it, or it cannot be created.
    """
    try:
        directory.mkdir(mode=0o755, parents=True, exist_ok=True)
        status = directory.stat()
    except OSError as exc:
        raise ConfigError(
            f"the cache of requirements, {directory}, cannot be used: {exc.strerror}",
            hint="set AENV_REQUIREMENTS_CACHE or AENV_DATA_DIR to a directory that you can write",
        ) from exc
    if status.st_uid not in (0, os.geteuid()) or stat.S_IMODE(status.st_mode) & 0o022:
        raise ConfigError(
            f"the cache of requirements, {directory}, is not used: other users can write to it",
            hint="set AENV_REQUIREMENTS_CACHE to a directory that only you can write to",
        )


async def _lock(path: Path) -> FileLock:
    try:
        return await FileLock.acquire_async(path, LOCK_DEADLINE_S)
    except TimeoutError as exc:
        raise DeadlineExceeded(
            f"waited {LOCK_DEADLINE_S:g} s for the lock {path}: another process builds this "
            "virtual environment",
            hint="end the process that holds the lock; `fuser` names it",
        ) from exc


def find_uv() -> str:
    """Return the path of uv: the one installed with this package, or the first on ``PATH``.

    Raises:
        SandboxStartFailed: There is none.
    """
    with contextlib.suppress(ImportError, FileNotFoundError):
        from uv import find_uv_bin

        return find_uv_bin()
    found = shutil.which("uv")
    if found is None:
        raise SandboxStartFailed(
            "uv is not installed, and installing the project's requirements needs it",
            hint="pip install uv",
        )
    return found
