"""The first program of a pod's container, which runs before the pod has any of our code.

Its source is in the pod's command. It runs on the image's Python, of any version 3, needs only the
standard library, and accepts nothing from a peer without the secret.

What the host sends is unpacked by another container of the pod
(`aenv_ray.engines.kubernetes.unpacker`), because this one has the files on read-only mounts.

Until the host connects, a second Python imports what the instance's process needs of the standard
library; `aenv_ray.runtime.container.pod` then tells it what to run. It starts without any secret.
"""

import hashlib
import json
import os
import platform
import re
import signal
import socket
import sys
import time
import types

UNPACKER_S = 60  # for its container to start


def take(sock: socket.socket, size: int) -> bytes:
    """Return exactly `size` bytes."""
    data = bytearray()
    while len(data) < size:
        piece = sock.recv(min(size - len(data), 1 << 20))
        if not piece:
            raise OSError("the peer closed")
        data += piece
    return bytes(data)


PREPARE = """
import importlib, json, os, resource, socket, sys

def take(sock, size):
    data = b""
    while len(data) < size:
        piece = sock.recv(size - len(data))
        if not piece:
            os._exit(0)
        data += piece
    return data

def prepare(link):
    for name in (
        "asyncio ctypes dataclasses decimal fractions gc hmac importlib.metadata ipaddress logging "
        "pathlib shutil tempfile traceback typing urllib.parse uuid zoneinfo"
    ).split():
        importlib.import_module(name)
    sock = socket.socket(fileno=os.dup(link))
    order = json.loads(take(sock, int.from_bytes(take(sock, 8), "big")))
    sock.close()
    before, after = dict(os.environ), order["variables"]
    if order["file_bytes"]:
        resource.setrlimit(resource.RLIMIT_FSIZE, (order["file_bytes"],) * 2)
    words = [*order["command"], "-c", order["code"], *order["arguments"]]
    # Python, the loader and the C library read these only when a process starts.
    early = ("GLIBC_", "LANG", "LC_", "LD_", "MALLOC_", "OPENSSL_", "PYTHON", "SSL_", "TZ")
    changed = {name for name, _ in set(before.items()) ^ set(after.items())}
    if any(name.startswith(early) for name in changed):
        os.execvpe(words[0], words, after)
    os.environ.clear()
    os.environ.update(after)
    sys.argv[:] = ["-c", *order["arguments"]]
    return order["code"]

exec(prepare(int(sys.argv[1])), {"__name__": "__main__"})
"""


def own_words() -> "list[str]":
    """Return the command of this process."""
    with open("/proc/self/cmdline", "rb") as file:
        return [word.decode() for word in file.read().rstrip(b"\0").split(b"\0")]


def leave_variables_of_image() -> None:
    """As in `aenv_ray.runtime.system.carried_python`, which gets what is left out."""
    words = own_words()
    loading = re.compile("LD_(?!LIBRARY_PATH$).*|GLIBC_TUNABLES|GCONV_PATH|LOCPATH|OPENSSL_.*")
    found = {name: value for name, value in os.environ.items() if loading.fullmatch(name)}
    if found and "-I" in words[: words.index("-c")]:  # a Python that we uploaded
        others = {name: value for name, value in os.environ.items() if name not in found}
        os.execve(words[0], words, {**others, "AENV_IMAGE_VARIABLES": json.dumps(found)})


def prepare_instance() -> "dict[str, object]":
    """Start the Python of the instance; return its pid and how to reach it."""
    words = own_words()
    command = words[: words.index("-c")]
    if "-I" not in command:  # with -I, it is a Python that we uploaded
        command.append("-P")  # the current directory is not on its path
    link, other = socket.socketpair()
    out, into = os.pipe()
    pid = os.fork()
    if pid == 0:
        null = os.open("/dev/null", os.O_RDONLY)
        for fd, target in ((null, 0), (into, 1), (into, 2)):
            os.dup2(fd, target)
        os.set_inheritable(other.fileno(), True)
        words = [*command, "-c", PREPARE, str(other.fileno())]
        usual = {
            "LANG": "C.UTF-8",
            "PYTHONDONTWRITEBYTECODE": "1",
        }  # nearly all instances have these
        os.execvpe(words[0], words, {**os.environ, **usual})
    os.close(into)
    found = {"pid": pid, "link": link, "link_fd": other.fileno(), "out": out, "command": command}
    other.close()
    return found


def unpack(order: "dict[str, str]", content: bytes, address: "tuple[str, int]") -> socket.socket:
    """Have the unpacker write an archive to the volumes; return the connection to it.

    Raises:
        OSError: It did not.
    """
    head = json.dumps(order).encode()
    ends = time.monotonic() + UNPACKER_S
    while True:
        sock = socket.socket(socket.AF_INET6 if ":" in address[0] else socket.AF_INET)
        sock.bind((address[0], 0))  # it hears this pod only
        try:
            sock.connect(address)
            break
        except ConnectionRefusedError:  # its container starts after this one
            sock.close()
            if time.monotonic() > ends:
                raise
            time.sleep(0.01)
    for piece in (len(head).to_bytes(8, "big"), head, len(content).to_bytes(8, "big"), content):
        sock.sendall(piece)
    with sock.makefile("rb") as lines:
        answer = json.loads(lines.readline() or b"{}")
    if "ok" not in answer:
        sock.close()
        raise OSError(answer.get("failed", "the container that unpacks them has ended"))
    return sock


def bootstrap(digest: str, port: int, unpacker_port: int) -> None:
    """Wait for the host, receive the runtime from it, and run that."""
    leave_variables_of_image()
    signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
    address = os.environ["AENV_POD_IP"]
    listener = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind((address, port))
    listener.listen(64)
    listener.settimeout(1200)  # hosts give up waiting for the images of all containers before
    instance = prepare_instance() if sys.version_info >= (3, 11) else {}  # the host refuses others
    libc = "glibc" if platform.libc_ver()[0] == "glibc" else "musl"
    facts = {"python": sys.version_info[:2], "machine": platform.machine(), "libc": libc}
    while True:
        sock, _ = listener.accept()
        try:
            sock.settimeout(5)
            if hashlib.sha256(take(sock, 32)).hexdigest() != digest:
                continue
            sock.settimeout(60)
            sock.sendall(json.dumps(facts).encode() + b"\n")
            order = json.loads(take(sock, int.from_bytes(take(sock, 8), "big")))
            content = take(sock, int.from_bytes(take(sock, 8), "big"))
        except (OSError, ValueError):
            sock.close()
            continue
        break
    listener.settimeout(None)
    sock.settimeout(None)
    try:
        instance["unpacker"] = unpack(order["unpack"], content, (address, unpacker_port))
    except OSError as exc:
        report = {"failed": "its files cannot be unpacked: " + str(exc)}
        sock.sendall(json.dumps(report).encode() + b"\n")
        raise
    del content
    for name in ("aenv_ray", "aenv_ray.runtime"):  # bare: their own imports are missing here
        package = types.ModuleType(name)
        package.__path__ = [order["home"] + "/runtime/" + name.replace(".", "/")]
        sys.modules[name] = package
    from aenv_ray.runtime.container.pod import main

    main(listener, sock, order, instance)


if __name__ == "__main__":
    bootstrap(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
