"""A node of the docker engine for tests: a base image, directories, and nothing left behind."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import signal
import subprocess
import tarfile
import tempfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

from uv import find_uv_bin

from aenv_ray.engines.docker.engine import DockerEngine
from aenv_ray.engines.docker.firewall import remove_rules
from aenv_ray.engines.docker.names import container_name
from aenv_ray.engines.node.docker_labels import SCOPE_LABEL
from aenv_ray.ids import HostId, InstanceId
from aenv_ray.testing.contract_bench import Bench
from tests.contract.processes import naming, none_after_a_while, signal_all

ADDRESS = os.environ.get("DOCKER_HOST", "unix:///var/run/docker.sock")
SUITE = "bookworm"
PACKAGES = ("python3",)
GRACE_S = 2.0
"""Shorter than in use, so that tests of hosts that stay away need not wait for half a minute."""


def docker(*arguments: str, check: bool = True) -> str:
    """Run the docker command and return its output."""
    done = subprocess.run(
        ["docker", "--host", ADDRESS, *arguments],
        capture_output=True, text=True, check=False, timeout=120,
    )  # fmt: skip
    assert not check or done.returncode == 0, f"docker {arguments}: {done.stderr}"
    return done.stdout.strip()


@contextlib.contextmanager
def _alone() -> Iterator[None]:
    """Keep other processes of the tests from making the same image."""
    with Path(tempfile.gettempdir(), f"aenv-test-base-{os.getuid()}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


@cache
def base_image() -> str:
    """Return an image with Python, made without a registry; once for each content."""
    content = json.dumps([SUITE, PACKAGES]).encode()
    name = f"aenv-test-base:{hashlib.sha256(content).hexdigest()[:12]}"
    with _alone():
        if docker("images", "--quiet", name):
            return name
        make = (
            f"mmdebstrap --variant=minbase --include={','.join(PACKAGES)} {SUITE} - "
            f"| docker --host {ADDRESS} import - {name}"
        )
        subprocess.run(
            ["bash", "-o", "pipefail", "-c", make], check=True, capture_output=True, timeout=600
        )
    return name


_SMALL = """
cd /
set -- bin/sh usr/bin/python3 usr/lib/python3* lib/*/libgcc_s.so.1 lib/*/librt.so.1 \\
    lib/*/libpthread.so.0 lib/*/libdl.so.2  # by what wheels are made of
loaded=$(ldd bin/sh usr/bin/python3 usr/lib/python3*/lib-dynload/*.so | grep -o '[[:space:]]/[^ ]*')
tar --create --dereference "$@" etc/passwd etc/group $(echo "$loaded" | cut -c 3- | sort -u)
"""


@cache
def small_image() -> str:
    """Return an image with the Python of `base_image`, a shell, and what they load: a quarter of
    its size, for tests that push or copy it."""
    content = json.dumps([base_image(), _SMALL]).encode()
    name = f"aenv-test-small:{hashlib.sha256(content).hexdigest()[:12]}"
    with _alone():
        if not docker("images", "--quiet", name):
            make = (
                f'docker --host {ADDRESS} run --rm {base_image()} sh -c "$SMALL" '
                f"| docker --host {ADDRESS} import - {name}"
            )
            subprocess.run(
                ["bash", "-o", "pipefail", "-c", make], check=True, capture_output=True,
                timeout=600, env={**os.environ, "SMALL": _SMALL},
            )  # fmt: skip
    return name


@cache
def shell_image() -> str:
    """Return an image that has a static busybox and nothing else: no Python, no C library."""
    name = f"aenv-test-shell:{SUITE}-1"
    if docker("images", "--quiet", name):
        return name
    with tempfile.TemporaryDirectory() as directory:
        root = Path(directory, "root.tar")
        subprocess.run(
            ["mmdebstrap", "--variant=extract", "--include=busybox-static", SUITE, str(root)],
            check=True, capture_output=True, timeout=600,
        )  # fmt: skip
        plain = Path(directory, "plain.tar")
        with tarfile.open(root) as source, tarfile.open(plain, "w") as target:
            member = next(m for m in source if m.name.endswith("/busybox") and m.isfile())
            program = source.extractfile(member)
            member.name = "bin/busybox"
            target.addfile(member, program)
            for applet in ("sh", "cat", "echo", "head", "id", "ls", "mkdir", "sleep", "wget", "nc"):
                link = tarfile.TarInfo(f"bin/{applet}")
                link.type, link.linkname, link.mode = tarfile.SYMTYPE, "busybox", 0o777
                target.addfile(link)
        change = "ENV PATH=/bin"
        docker("import", "--change", change, "--change", "WORKDIR /srv", str(plain), name)
    return name


def bare_project(bench: Bench, image: str, **container: Any) -> Path:
    """Return a project without code that runs in an image."""
    deploy = {"network": "none", "container": {"image": image, **container}}
    return bench.project({"notes.txt": ""}, {"deployConfig": deploy})


AENVIRONMENT = "aenvironment==0.1.7"
_AENVIRONMENT_FILE = """\
FROM {base}
COPY site /usr/local/lib/python3.11/dist-packages
WORKDIR /app
COPY tools.py /app/src/tools.py
ENV PYTHONPATH=/app/src
EXPOSE 8081
ENTRYPOINT ["python3", "-m", "aenv.main", "/app/src"]
"""


@cache
def aenvironment_image() -> str:
    """Return an image as AEnvironment makes them, with its published package, unmodified."""
    tools = Path(__file__).with_name("aenvironment_tools.py").read_bytes()
    content = json.dumps([base_image(), AENVIRONMENT, _AENVIRONMENT_FILE]).encode() + tools
    name = f"aenv-test-aenvironment:{hashlib.sha256(content).hexdigest()[:12]}"
    if docker("images", "--quiet", name):
        return name
    with tempfile.TemporaryDirectory() as directory:
        context = Path(directory)
        subprocess.run(
            [find_uv_bin(), "pip", "install", "--quiet", "--target", str(context / "site"),
             "--python-version", "3.11", "--only-binary", ":all:", AENVIRONMENT],
            check=True, capture_output=True, timeout=600,
        )  # fmt: skip
        (context / "tools.py").write_bytes(tools)
        (context / "Dockerfile").write_text(_AENVIRONMENT_FILE.format(base=base_image()))
        docker("build", "--quiet", "--tag", name, directory)
    return name


class DockerNode:
    """One directory of a node, and the engines on it."""

    def __init__(self) -> None:
        # Short: a socket's path holds 107 bytes.
        self.root = Path(tempfile.mkdtemp(prefix="ae-", dir="/tmp"))
        self.scope = self.root.name
        self.image = base_image()

    def engine(self, host_id: HostId, **options: Any) -> DockerEngine:
        """Return an engine; its janitor ends with this process."""
        settings: dict[str, Any] = {"image": self.image, "grace_s": GRACE_S, **options}
        return DockerEngine(
            host_id,
            runtime_dir=self.root / "r",
            data_dir=data_dir(),
            scope=self.scope,
            owner_pid=settings.pop("owner_pid", os.getpid()),
            address=ADDRESS,
            **settings,
        )

    @property
    def label(self) -> str:
        """The label of everything that this node makes."""
        return f"{SCOPE_LABEL}={self.scope}/docker"

    def container(self, instance_id: InstanceId) -> str:
        """Return the name of an instance's container."""
        return container_name(f"{self.scope}/docker", instance_id)

    def containers(self) -> list[str]:
        """Return the containers of this node, whatever their state."""
        listed = docker("ps", "--all", "--filter", f"label={self.label}", "--format", "{{.Names}}")
        return listed.split()

    def left_over(self) -> list[str]:
        """Return the containers and files of instances, by the daemon and the file system."""
        found = self.containers()
        found += docker("volume", "ls", "--quiet", "--filter", f"label={self.label}").split()
        for name in ("i", "d", "projects", "deadlines", "causes", "etc"):
            found += [str(path) for path in self.root.glob(f"r/*/{name}/*")]
        return found

    def janitor_pids(self) -> list[int]:
        """Return the pids of this directory's janitor; none or one."""
        return list(naming(f"aenv_ray.engines.docker.janitor {self.root}"))

    def end(self) -> None:
        """End the janitor and delete everything.

        Raises:
            AssertionError: Something was left.
        """
        left = none_after_a_while(self.left_over)
        signal_all(self.janitor_pids(), signal.SIGTERM)
        after = none_after_a_while(self.janitor_pids)
        for network in docker("network", "ls", "-q", "--filter", f"label={self.label}").split():
            docker("network", "rm", network)
        if os.geteuid() == 0:
            remove_rules(f"{self.scope}/docker")
        shutil.rmtree(self.root)
        assert left == [], "containers were left"
        assert after == [], "the janitor was left"


@cache
def data_dir() -> Path:
    """Return where bundles are kept for all tests: making one takes seconds."""
    path = Path(tempfile.gettempdir(), f"aenv-test-bundles-{os.getuid()}")
    path.mkdir(mode=0o700, exist_ok=True)
    return path
