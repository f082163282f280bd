"""What runs in a container attacks its host, its node and its neighbours."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import pytest

import aenv_ray
from aenv_ray.engines.base import Sandbox
from aenv_ray.engines.images import runtime_bundle
from aenv_ray.engines.images.node_images import BUNDLES
from aenv_ray.engines.images.runtime_bundle import ImagePython
from aenv_ray.errors import SandboxLost
from aenv_ray.testing.contract_bench import Bench, execute, request, value_of
from tests.attacks.container_probes import SCRIPT
from tests.contract.docker.docker_node import DockerNode, base_image, data_dir, docker
from tests.contract.engines import new_host

pytestmark = pytest.mark.docker

ROOT = {"container": {"user": "root"}}
IMPOSTOR = """
import os, socket, subprocess, sys
run, done = "/.aenv/run", []
def attempt(name, function):
    try:
        function()
    except OSError:
        return
    done.append(name)
attempt("rename", lambda: os.rename(f"{run}/door", f"{run}/other"))
attempt("rename the directory", lambda: os.rename(run, "/.aenv/other"))
attempt("remove", lambda: os.unlink(f"{run}/door"))
attempt("write", lambda: open(f"{run}/file", "w"))
attempt("listen", lambda: socket.socket(socket.AF_UNIX).bind(f"{run}/door"))
attempt("boot", lambda: socket.socket(socket.AF_UNIX).connect(f"{run}/boot"))
for number in range(16):
    attempt("steal", lambda: open(f"/proc/1/fd/{number}"))
print(done)
"""
WRITABLE = """
import json, os
rows = [line.split(" - ") for line in open("/proc/self/mountinfo")]
found = {}
for left, right in rows:
    path, kind = left.split()[4], right.split()[0]
    if kind in ("proc", "sysfs", "cgroup", "cgroup2", "devpts", "mqueue"):
        continue
    try:
        if os.path.isdir(path):
            file = os.path.join(path, "attack")
            open(file, "wb").close()
            os.unlink(file)
        elif os.path.isfile(path):
            open(path, "ab").close()
        else:
            continue
    except OSError:
        continue
    facts = os.statvfs(path)
    found[path] = [kind, facts.f_blocks * facts.f_frsize, facts.f_files]
print(json.dumps(found))
"""


async def run_python(sandbox: Sandbox, script: str) -> str:
    done = await execute(sandbox, ["python3", "-c", script])
    assert done.exit_code == 0, done.stderr
    return done.text()


@pytest.mark.parametrize("user", ["root", "65534:65534"])
async def test_probes_of_a_container_get_nothing(dockered: Bench, user: str) -> None:
    """Invariant 7: capabilities, devices, /proc, mounts, namespaces, daemons, socket families."""
    project = dockered.contract_project({"network": "none", "container": {"user": user}})
    sandbox = await dockered.start(project)
    report = json.loads(await run_python(sandbox, SCRIPT))
    assert report["count"] > 238
    assert report["held"] == {}


# --- the door ------------------------------------------------------------------------------------


async def test_a_command_cannot_answer_for_the_runtime_after_a_host_restart(
    docker_node: DockerNode, tmp_path: Path
) -> None:
    """Invariant 14: a reward is never what a process of the agent says."""
    host = new_host()
    engine = docker_node.engine(host)
    bench = Bench(engine, tmp_path)
    sandbox = await bench.start(bench.contract_project({"network": "none", **ROOT}))
    done = await run_python(sandbox, IMPOSTOR)
    await engine.close()
    again = docker_node.engine(host)
    try:
        attached = await again.attach(sandbox.instance_id)
        assert await value_of(attached, "echo", text="the runtime") == "the runtime"
        assert done == "[]\n"
    finally:
        await again.stop([sandbox.instance_id])
        await again.close()


async def test_the_door_of_a_container_is_out_of_its_sight(
    dockered: Bench, docker_node: DockerNode
) -> None:
    """Invariant 14: and no other user of the node can connect to it."""
    sandbox = await dockered.start()
    (door,) = docker_node.root.glob("r/*/d/*")
    assert door.parent.stat().st_mode & 0o077 == 0
    assert door.stat().st_mode & 0o077 == 0
    name = docker_node.container(sandbox.instance_id)
    mounts = json.loads(docker("inspect", name))[0]["Mounts"]
    assert not any(door.is_relative_to(mount["Source"]) for mount in mounts)


# --- writes --------------------------------------------------------------------------------------


@pytest.mark.parametrize("network", ["none", "host"])
@pytest.mark.parametrize("is_read_only", [True, False])
async def test_everything_writable_has_a_size(
    dockered: Bench, network: str, is_read_only: bool
) -> None:
    """Invariant 7: nothing that a container can write to is an unlimited part of the node."""
    deploy = {
        "network": network,
        "ephemeralStorage": "64M",
        "container": {"user": "root", "readOnlyRoot": is_read_only},
    }
    sandbox = await dockered.start(dockered.contract_project(deploy))
    found: dict[str, Any] = json.loads(await run_python(sandbox, WRITABLE))
    overlay = found.pop("/", None)
    assert (overlay is None) == is_read_only
    assert {kind for kind, _, _ in found.values()} == {"tmpfs"}
    assert found.pop("/dev")[1] <= 64 << 20
    assert set(found) == {"/dev/shm", "/home/agent"} | ({"/tmp"} if is_read_only else set())
    assert all(size <= 64 << 20 and inodes <= 16_385 for _, size, inodes in found.values())


def image_with_volume() -> str:
    """Return an image with a file in a directory that is a volume."""
    name = f"{base_image()}-volume"
    if not docker("images", "--quiet", name):
        with tempfile.TemporaryDirectory() as directory:
            text = f"FROM {base_image()}\nRUN mkdir /data && echo kept >/data/file\nVOLUME /data\n"
            Path(directory, "Dockerfile").write_text(text)
            docker("build", "--quiet", "--tag", name, directory)
    return name


@pytest.mark.parametrize("is_read_only", [True, False])
async def test_volumes_of_an_image_count_as_its_directories(
    dockered: Bench, is_read_only: bool
) -> None:
    """Invariant 7: the daemon keeps them outside the container's own layer, without a limit."""
    container = {"image": image_with_volume(), "user": "root", "readOnlyRoot": is_read_only}
    deploy = {"network": "none", "ephemeralStorage": "64M", "container": container}
    sandbox = await dockered.start(dockered.contract_project(deploy))
    assert (await execute(sandbox, "cat /data/file")).text() == "kept\n"
    fill = "for i in 1 2 3 4; do head -c 40M /dev/zero >/data/$i; done; sleep 60"
    with pytest.raises(SandboxLost, match=r"it wrote \d+ MiB .*ephemeralStorage"):
        await execute(sandbox, fill, timeout_s=60.0)


# --- neighbours on a bridge ----------------------------------------------------------------------

ASK = """
import json, socket, struct, sys
def answers(name):
    query = struct.pack(">6H", 7, 0x100, 1, 0, 0, 0)
    query += b"".join(bytes([len(p)]) + p.encode() for p in name.split(".")) + b"\\0\\0\\1\\0\\1"
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        sock.settimeout(1)
        try:
            sock.sendto(query, ("127.0.0.11", 53))
            return struct.unpack(">H", sock.recv(512)[6:8])[0]
        except OSError:
            return 0
def connects(address, port):
    with socket.socket() as sock:
        sock.settimeout(1)
        return sock.connect_ex((address, port)) == 0
name, address, port = sys.argv[1:]
print(json.dumps([answers(name), connects(address, int(port))]))
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="the rules of the packet filter need root")
async def test_neighbours_on_a_bridge_neither_find_nor_reach_each_other(
    dockered: Bench, docker_node: DockerNode
) -> None:
    """Invariant 7: the daemon's resolver answers for all containers of its bridge."""
    project = dockered.contract_project({"network": "internet"})
    victim, attacker = await dockered.start(project), await dockered.start(project)
    port = await value_of(victim, "listen")
    address = docker(
        "inspect", "--format", "{{range .NetworkSettings.Networks}}{{.IPAddress}}{{end}}",
        docker_node.container(victim.instance_id),
    )  # fmt: skip
    asked = ["python3", "-c", ASK, str(victim.instance_id), address, str(port)]
    assert json.loads((await execute(attacker, asked)).text()) == [0, False]


# --- images --------------------------------------------------------------------------------------

HOSTILE = """FROM {base}
RUN rm /usr/bin/python3 && printf '{script}' >/usr/bin/python3 && chmod 755 /usr/bin/python3
"""
SCRIPT_OF_IMAGE = (
    "#!/bin/sh\\nfor d in /bundle/runtime /bundle /.aenv/runtime; do\\n"
    "ln -s / $d/planted; echo x >>$d/aenv_ray/__init__.py; done 2>/dev/null\\n"
    'exec /usr/bin/python3.11 "$@"\\n'
)


async def test_an_image_cannot_write_to_what_other_images_run(
    dockered: Bench, docker_node: DockerNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Invariant 13: it compiles the runtime for itself alone, and sees it read-only.

    Its ``python3`` writes wherever it can, as it is inspected, compiles, and begins to run.
    """
    hostile = f"{base_image()}-hostile"
    if not docker("images", "--quiet", hostile):
        with tempfile.TemporaryDirectory() as directory:
            text = HOSTILE.format(base=base_image(), script=SCRIPT_OF_IMAGE)
            Path(directory, "Dockerfile").write_text(text)
            docker("build", "--quiet", "--tag", hostile, directory)
    image_id = docker("images", "--quiet", "--no-trunc", hostile).removeprefix("sha256:")
    bundles = data_dir() / "docker" / BUNDLES
    for bundle in bundles.glob(f"*{image_id}"):
        shutil.rmtree(bundle)

    async def install(_: ImagePython, target: Path) -> None:
        await asyncio.to_thread(runtime_bundle._copy_libraries, target)

    # As if the node had another version, so that it cannot compile for this Python itself.
    monkeypatch.setattr(ImagePython, "is_ours", False)
    monkeypatch.setattr(runtime_bundle, "_install_libraries", install)
    container = {"image": hostile, "user": "root"}
    project = dockered.contract_project({"network": "none", "container": container})
    sandbox = await dockered.start(project)
    (bundle,) = bundles.glob(f"*{image_id}")
    name = docker_node.container(sandbox.instance_id)
    mounted = {
        Path(mount["Source"]).parent: mount["RW"]
        for mount in json.loads(docker("inspect", name))[0]["Mounts"]
        if mount["Destination"] in ("/.aenv/runtime", "/.aenv/lib")
    }
    assert mounted == {bundle: False}
    assert list(bundle.rglob("__pycache__/*.pyc")), "it was compiled"
    assert list(bundles.rglob("planted")) == []
    own = Path(aenv_ray.__file__).read_bytes()
    assert (bundle / "runtime" / "aenv_ray" / "__init__.py").read_bytes() == own


# --- processes -----------------------------------------------------------------------------------


SURVIVES = """
setsid python3 -IS -c "
import os, time
os.setgid(65534), os.setuid(65534)
while True: time.sleep(0.1)
" >/dev/null 2>&1 </dev/null & sleep 1
"""
COUNTS = """
from aenv_ray.runtime import register_reward, register_tool, sidecar


@register_tool
def run(command: str) -> str:
    return sidecar.exec(command).text()


@register_reward
def graded() -> float:
    count = "cat /proc/[0-9]*/status | grep -c '^Uid:.65534'"
    return float(sidecar.exec(count).text())
"""


async def test_a_process_of_another_user_does_not_survive(dockered: Bench) -> None:
    """Invariant 14: one that may change its user; else it would still run beside the reward."""
    deploy = {
        "podTemplate": "DualContainer",
        "network": "none",
        "container": {"sidecarCapAdd": ["SETUID", "SETGID"]},
    }
    project = dockered.project({"tools.py": COUNTS}, {"deployConfig": deploy})
    sandbox = await dockered.start(project, datasource=base_image())
    await value_of(sandbox, "run", command=SURVIVES)
    assert float(await request(sandbox, "aenv/reward", {})) == 0.0


_BEHIND_ANOTHER_USER = """
import os

if os.fork() == 0:
    os.setgid(65534)
    os.setuid(65534)
    os.execvp("sh", ["sh", "-c", "read line < /tmp/orders; exec sleep 600"])
"""
_OBEYS = f"""
from aenv_ray.runtime import register_function, register_reward, register_tool, sidecar


@register_function
def serve() -> int:
    made = "mkfifo /tmp/orders && chmod 666 /tmp/orders"
    sidecar.exec(made)
    return sidecar.exec(["python3", "-c", {_BEHIND_ANOTHER_USER!r}]).exit_code


@register_tool
def order() -> None:
    wait = "until grep -q sleep /proc/[0-9]*/comm; do sleep 0.01; done"
    sidecar.exec("echo go > /tmp/orders; " + wait)


@register_reward
def graded() -> float:
    return float(sidecar.exec("cat /proc/[0-9]*/comm | grep -cx sleep").text())


@register_reward(name="watching", keep_processes=True)
def watching() -> float:
    return graded()
"""


async def test_a_program_that_replaces_one_of_another_user_ends_before_a_reward(
    dockered: Bench,
) -> None:
    """Invariant 14: a process that the runtime may not examine is told by its name."""
    deploy = {
        "podTemplate": "DualContainer",
        "network": "none",
        "container": {"sidecarCapAdd": ["SETUID", "SETGID"]},
    }
    project = dockered.project({"tools.py": _OBEYS}, {"deployConfig": deploy})
    sandbox = await dockered.start(project, datasource=base_image())
    assert await request(sandbox, "aenv/function", {"name": "serve"}) == 0
    await value_of(sandbox, "order")
    assert float(await request(sandbox, "aenv/reward", {"name": "watching"})) == 1.0
    assert float(await request(sandbox, "aenv/reward", {})) == 0.0
