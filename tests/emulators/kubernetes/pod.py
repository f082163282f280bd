"""Runs the pods of the emulated cluster as processes of this machine: ``python -m … SOCKET``.

Each container has mount, pid, ipc and uts namespaces, and a root built from this machine's
directories. All pods share this machine's network, where each has a loopback address. They share
its users as well, so the kernel counts the threads of a uid across pods, as it does on a real node
without user namespaces.

Every connection to the Unix socket is for one pod. It sends a JSON order and receives JSON lines:
``{"pod": host pid}``, ``{"started": name, "pid": host pid}`` and
``{"ended": name, "code": n, "message": …}``.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import sys
from pathlib import Path
from typing import Any, Final, NoReturn

from aenv_ray.runtime.system import linux

_SYSTEM: Final = ("usr", "bin", "sbin", "lib", "lib32", "lib64", "libx32", "etc", "opt")
_DEVICES: Final = ("null", "zero", "full", "random", "urandom", "tty")
_SHELL_TOOLS: Final = ("sh", "cat", "ls", "echo", "id", "mkdir", "sleep", "test")
START_ERROR: Final = "start error: "


_peer: socket.socket | None = None


def main() -> None:
    """Run a pod for each connection, until the parent ends."""
    global _peer
    linux.die_with_parent()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps pods
    server = os.getpid()
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(sys.argv[1])
        listener.listen(64)
        os.write(1, b"ready\n")
        while True:
            _peer, _ = listener.accept()
            if os.fork() == 0:
                break
            _peer.close()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    _die_with(server)
    _tell({"pod": os.getpid()})
    with _peer.makefile() as lines:
        run_pod(json.loads(lines.readline()))


def run_pod(order: dict[str, Any]) -> None:
    """Run the containers of one pod, init containers first."""
    root = Path(order["directory"])
    if os.geteuid() != 0:
        uid, gid = os.geteuid(), os.getegid()
        linux.unshare(linux.CLONE_NEWUSER | linux.CLONE_NEWNS)
        maps = {"setgroups": "deny", "uid_map": f"0 {uid} 1", "gid_map": f"0 {gid} 1"}
        for name, text in maps.items():
            Path("/proc/self", name).write_text(text)
    else:
        linux.unshare(linux.CLONE_NEWNS)
    linux.mount(None, "/", None, linux.MS_REC | linux.MS_PRIVATE)
    linux.mount("tmpfs", str(root), "tmpfs", 0, "mode=755")
    _make_volumes(root, order["volumes"])
    for container in order["init"]:
        pid = _start(root, order, container)
        if _await(pid, container) != 0:
            return
    running = {_start(root, order, container): container for container in order["containers"]}
    while running:
        pid, status = os.wait()
        container = running.pop(pid)
        _tell_end(container, status)


def _make_volumes(root: Path, volumes: dict[str, dict[str, Any]]) -> None:
    for name, volume in volumes.items():
        path = root / "volumes" / name
        path.mkdir(parents=True)
        if volume.get("medium") == "Memory":
            size = f"mode=777,size={volume['sizeLimit']}"
            linux.mount("tmpfs", str(path), "tmpfs", linux.MS_NOSUID | linux.MS_NODEV, size)
        elif "claimed" in volume:
            linux.mount(volume["claimed"], str(path), None, linux.MS_BIND)
        path.chmod(0o777)


def _start(root: Path, order: dict[str, Any], container: dict[str, Any]) -> int:
    """Start a container; return the pid of its supervisor."""
    pod = os.getpid()
    pid = os.fork()
    if pid == 0:
        _die_with(pod)
        _supervise(root, order, container)
    return pid


def _die_with(parent: int) -> None:
    """End when the parent ends, even if it ended before the kernel was told.

    A process left over from a pod would keep the connection open and hide the pod's end.
    """
    linux.die_with_parent()
    if os.getppid() != parent:
        os._exit(1)


def _await(pid: int, container: dict[str, Any]) -> int:
    _, status = os.waitpid(pid, 0)
    _tell_end(container, status)
    return status


def _supervise(root: Path, order: dict[str, Any], container: dict[str, Any]) -> NoReturn:
    """Start a container's process 1, and exit with its exit code."""
    linux.unshare(linux.CLONE_NEWPID | linux.CLONE_NEWNS | linux.CLONE_NEWIPC | linux.CLONE_NEWUTS)
    heard, begun = os.pipe()  # closed by the exec of the container's program
    first = os.fork()
    if first == 0:
        os.close(heard)
        try:
            _become(root, order, container, begun)
        except BaseException as exc:  # noqa: BLE001  # as a container runtime reports it
            Path(container["message_path"]).write_text(f"{START_ERROR}{exc}")
            os._exit(128)
    os.close(begun)
    if not os.read(heard, 1):
        _tell({"started": container["name"], "pid": first})
    _, status = os.waitpid(first, 0)
    if os.WIFSIGNALED(status):
        os._exit(128 + os.WTERMSIG(status))
    os._exit(os.waitstatus_to_exitcode(status))


def _become(root: Path, order: dict[str, Any], container: dict[str, Any], begun: int) -> NoReturn:
    linux.die_with_parent()
    os.setsid()
    linux.set_hostname(order["hostname"])
    log = os.open(container["log_path"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    null = os.open("/dev/null", os.O_RDONLY)
    path = _build_root(root, container)
    os.chroot(path)
    os.chdir(container["directory"])
    for fd, target in ((null, 0), (log, 1), (log, 2)):
        os.dup2(fd, target)
    if container["gid"] and order["is_root"]:
        os.setgroups([])
        os.setresgid(container["gid"], container["gid"], container["gid"])
    if container["uid"] and order["is_root"]:
        os.setresuid(container["uid"], container["uid"], container["uid"])
    linux.die_with_parent()  # a change of user forgets it
    _end_without_reader(begun)
    if container["drops_capabilities"]:
        linux.drop_capabilities()
    linux.prctl(linux.PR_SET_NO_NEW_PRIVS, 1)  # so that root does not get them back
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGPIPE):
        signal.signal(number, signal.SIG_DFL)
    words = container["command"]
    try:
        os.execvpe(words[0], words, container["environment"])
    except FileNotFoundError:
        text = f'{START_ERROR}exec: "{words[0]}": executable file not found in $PATH'
        Path("/dev/termination-log").write_text(text)
        os.write(begun, b"x")
        os._exit(128)


def _end_without_reader(pipe: int) -> None:
    """End if the parent is gone, which process 1 of a pid namespace cannot see by pid."""
    poll = select.poll()
    poll.register(pipe, 0)
    if poll.poll(0):
        os._exit(1)


def _build_root(root: Path, container: dict[str, Any]) -> str:
    path = root / "roots" / container["name"]
    path.mkdir(parents=True)
    linux.mount("tmpfs", str(path), "tmpfs", linux.MS_NOSUID, "mode=755")
    for name in _SYSTEM:
        source = Path("/", name)
        if source.is_symlink():
            (path / name).symlink_to(os.readlink(source))
        elif source.is_dir():
            _show(path, str(source))
    for shown in container["shown"]:
        _show(path, shown)
    for name in ("tmp", "proc", "dev", "tools"):
        (path / name).mkdir(exist_ok=True)
    for tool in _SHELL_TOOLS:
        (path / "tools" / tool).symlink_to(f"/bin/{tool}")
    (path / "tmp").chmod(0o1777)
    linux.mount("proc", str(path / "proc"), "proc")
    for name in _DEVICES:
        (path / "dev" / name).touch()
        linux.mount(f"/dev/{name}", str(path / "dev" / name), None, linux.MS_BIND)
    (path / "dev" / "fd").symlink_to("/proc/self/fd")
    (path / "dev" / "pts").mkdir()
    linux.mount(
        "devpts", str(path / "dev" / "pts"), "devpts", 0, "newinstance,ptmxmode=0666,mode=620"
    )
    (path / "dev" / "ptmx").symlink_to("pts/ptmx")
    message = path / "dev" / "termination-log"
    message.touch()
    linux.mount(container["message_path"], str(message), None, linux.MS_BIND)
    for where, source in container["image_volumes"].items():
        (path / where.strip("/")).mkdir()
        linux.mount(source, str(path / where.strip("/")), None, linux.MS_BIND)
    for mount in container["mounts"]:
        target = path / mount["path"].strip("/")
        target.mkdir(parents=True, exist_ok=True)
        linux.mount(str(root / "volumes" / mount["name"]), str(target), None, linux.MS_BIND)
        if mount["read_only"]:
            linux.make_read_only(str(target))
    return str(path)


def _show(root: Path, source: str) -> None:
    target = root / source.strip("/")
    if target.exists():
        return  # inside a directory that is mounted already
    target.mkdir(parents=True)
    linux.mount(source, str(target), None, linux.MS_BIND | linux.MS_REC)
    with contextlib.suppress(OSError):  # an old kernel
        linux.make_read_only(str(target))


def _tell_end(container: dict[str, Any], status: int) -> None:
    message = Path(container["message_path"]).read_text(errors="replace")[:4096]
    code = os.waitstatus_to_exitcode(status)
    code = code if code >= 0 else 128 - code
    _tell({"ended": container["name"], "code": code, "message": message})


def _tell(message: dict[str, Any]) -> None:
    if _peer is not None:
        _peer.sendall(json.dumps(message).encode() + b"\n")


if __name__ == "__main__":
    main()
