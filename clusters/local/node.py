#!/usr/bin/env python3
"""Makes this machine a node of an aenv-ray cluster: `ray start` with what aenv-ray needs.

    python clusters/local/node.py head              # the first machine
    python clusters/local/node.py worker HOST:PORT  # each further one
    python clusters/local/node.py status
    python clusters/local/node.py stop

Run it with the Python that aenv-ray is installed in; it needs nothing else. Run again it changes
nothing where the node is up, and starts it anew where part of it has died. `--foreground` stays
until the node ends, for systemd. All values that one may change are variables, listed in
`node.env`; Ray's processes, and so the instances on this node, get all of them.

With `AENV_REDIS_URL` the head keeps its state there, next to the hub's: after the loss of a head,
start it again, and workers, instances and the hub go on. Without, the head is the cluster.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import json
import os
import re
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NoReturn
from urllib.parse import unquote, urlsplit

NOT_INHERITED = ("RAY_ADDRESS", "NOTIFY_SOCKET")
"""What steers this script, or is between it and systemd."""
MARK = "AENV_CLUSTER_NODE"
"""Variable that all processes of a node inherit, and by which they are found."""
GCS_PORT = 6380
"""Not Ray's 6379, which is Redis's."""
RECONNECT_S = 600
"""Workers wait this long for a head that is lost; Ray's own 60 s is short for a machine."""
START_S = 180.0
ATTEMPTS = 5
SLOW = "timed out during startup"
"""What Ray says when its processes needed more than its half minute; the next time is faster."""
LEAVE_S = 10.0
"""A raylet needs some tenths of a second, unless its head is away."""
TERM_S = 20.0
"""Ray's processes end within this; then the sandboxes' launcher sees it and ends them too."""
KILL_S = 20.0
LOOK_S = 0.1
IDLE_WORKERS_MS = 600_000
"""Started workers are kept so long: an actor on one takes 0.4 s, a cold one several."""


class Failure(Exception):
    """It cannot be done; the message is for the user and names the way out."""


def say(text: str) -> None:
    """Write a line for people."""
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def main(arguments: Sequence[str] | None = None) -> int:
    """Do what the command line says, and return the exit code."""
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").split("\n")[0],
        epilog="example: python clusters/local/node.py head",
    )
    parser.add_argument(
        "--name", default="node", help="of this node, where a machine has several (default: node)"
    )
    commands = parser.add_subparsers(dest="command", required=True)
    head = commands.add_parser("head", help="be the first machine")
    worker = commands.add_parser("worker", help="join a cluster")
    worker.add_argument("address", help="HOST:PORT of the head")
    for command in (head, worker):
        command.add_argument("--foreground", action="store_true", help="stay until the node ends")
    commands.add_parser("stop", help="end this node, with all instances on it")
    commands.add_parser("status", help="say whether this node is up")
    given = parser.parse_args(arguments)
    try:
        if given.command == "stop":
            stop(given.name)
        elif given.command == "status":
            return status(given.name)
        else:
            address = given.address if given.command == "worker" else None
            start(given.name, address, foreground=given.foreground)
    except Failure as exc:
        sys.stderr.write(f"error: {exc}\n")
        return 1
    return 0


# --- starting ------------------------------------------------------------------------------------


def start(name: str, address: str | None, *, foreground: bool) -> None:
    """Have the node run; a head where `address` is None."""
    port = int(os.environ.get("AENV_CLUSTER_PORT") or GCS_PORT)
    if address is not None:
        check_address(address)
    with locked(name):
        bring_up(name, address, port)
    tell_systemd()
    if foreground:
        wait_until_it_ends(name)
    else:
        say_next(address or f"{own_address()}:{port}", is_head=address is None)


def bring_up(name: str, address: str | None, port: int) -> None:
    """Start the node where it is not up; nobody else does meanwhile."""
    if is_up(name, is_head=address is None):
        say(f"{name} is up already")
        return
    if is_up(name, is_head=None):
        role = "worker" if address is None else "head"
        raise Failure(f"{name} is up as a {role}: end it first (stop), or give this one a --name")
    if processes(name):
        say(f"{name} is up in part: ending the rest of it")
        stop(name)
    environment = node_environment(name, is_head=address is None)
    if address is None:
        forget_address(environment, port)
    log = runtime_directory() / f"{name}.log"
    end_on_signals(name)  # half a node would be left
    for attempt in range(1, ATTEMPTS + 1):
        words = start_ray(ray_command(address, port, environment), environment, log)
        if words is None and is_up(name, is_head=address is None):
            break
        stop(name)
        if attempt == ATTEMPTS or SLOW not in (words or ""):
            raise Failure(f"Ray did not start: {reason(words or '')}; all of it is in {log}")
        say("the machine is slow: once more")
    say(f"{name} is up")


def reason(words: str) -> str:
    """Return what tells most of what Ray said: its last error, which need not be its last line."""
    lines = words.strip().splitlines() or ["it ended at once"]
    errors = [line for line in lines if re.match(r"[\w.]*(Error|Exception): ", line)]
    return errors[-1] if errors else " | ".join(lines[-4:])


def check_address(address: str) -> None:
    """Refuse what is no address of a head."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal():
        raise Failure(
            f"{address!r} is not HOST:PORT of a head: its `node.py head` prints it "
            "(AENV_HEAD in node.env, under systemd)"
        )


@contextlib.contextmanager
def locked(name: str) -> Iterator[None]:
    """Keep others who start this node waiting: what is half up would look like remains to them."""
    with (runtime_directory() / f"{name}.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def forget_address(environment: Mapping[str, str], port: int) -> None:
    """Remove the note of a head that was lost: beside a worker of its own, Ray believes it."""
    note = Path(environment.get("RAY_TMPDIR") or "/tmp/ray", "ray_current_cluster")
    if note.is_file() and note.read_text().strip().endswith(f":{port}"):
        note.unlink()


def start_ray(command: Sequence[str], environment: Mapping[str, str], log: Path) -> str | None:
    """Run `ray start`; return what it said where it failed, else None."""
    with log.open("wb") as output:
        try:
            done = subprocess.run(
                command, env=environment, cwd="/", stdin=subprocess.DEVNULL, stdout=output,
                stderr=subprocess.STDOUT, timeout=START_S, check=False, start_new_session=True,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            return f"it did not come up within {START_S:g} s"
    return log.read_text(errors="replace") if done.returncode else None


def ray_command(address: str | None, port: int, environment: Mapping[str, str]) -> list[str]:
    """Return the command that starts Ray on this machine."""
    command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--disable-usage-stats"]
    if address is None:
        command += ["--head", "--no-monitor", f"--port={port}"]  # nodes come by hand
        command.append(f"--dashboard-port={environment.get('AENV_DASHBOARD_PORT') or 8265}")
        dashboard = environment.get("AENV_DASHBOARD", "1") not in ("0", "false")
        command.append(f"--include-dashboard={str(dashboard).lower()}")
        command.append(f"--ray-client-server-port={environment.get('AENV_CLIENT_PORT') or 10001}")
        settings = {"idle_worker_killing_time_threshold_ms": IDLE_WORKERS_MS}
        command.append(f"--system-config={json.dumps(settings)}")
        if environment.get("RAY_TMPDIR"):
            command.append(f"--temp-dir={environment['RAY_TMPDIR']}")
        user, password = redis_login()
        command += [f"--redis-username={user}"] * bool(user)
        command += [f"--redis-password={password}"] * bool(password)
    else:
        command.append(f"--address={address}")
    if environment.get("AENV_NODE_IP"):
        command.append(f"--node-ip-address={environment['AENV_NODE_IP']}")
    if environment.get("AENV_CPUS"):
        command.append(f"--num-cpus={environment['AENV_CPUS']}")
    if environment.get("AENV_SLOTS"):
        slots = {"env_slot": int(environment["AENV_SLOTS"])}
        command.append(f"--resources={json.dumps(slots)}")
    return command


def node_environment(name: str, *, is_head: bool) -> dict[str, str]:
    """Return the variables of Ray's processes on this node."""
    environment = {k: v for k, v in os.environ.items() if k not in NOT_INHERITED}
    environment[MARK] = mark(name)
    environment["RAY_AUTH_MODE"] = "token"
    environment["RAY_AUTH_TOKEN_PATH"] = str(ensure_token(may_make=is_head))
    environment.setdefault("RAY_gcs_rpc_server_reconnect_timeout_s", str(RECONNECT_S))
    redis = os.environ.get("AENV_REDIS_URL")
    if is_head and redis:
        parts = urlsplit(redis)
        if parts.scheme not in ("redis", "rediss") or not parts.hostname:
            raise Failure(
                "AENV_REDIS_URL is not redis://… or rediss://…, which is what Ray's head can use; "
                "unset it to have a head that keeps nothing"
            )
        scheme = "rediss://" if parts.scheme == "rediss" else ""
        environment["RAY_REDIS_ADDRESS"] = f"{scheme}{parts.hostname}:{parts.port or 6379}"
        prefix = os.environ.get("AENV_REDIS_PREFIX") or "aenv"
        environment.setdefault("RAY_external_storage_namespace", f"{prefix}-ray")
    return environment


def redis_login() -> tuple[str, str]:
    """Return user and password of `AENV_REDIS_URL`; empty where it has none."""
    parts = urlsplit(os.environ.get("AENV_REDIS_URL") or "")
    return unquote(parts.username or ""), unquote(parts.password or "")


def ensure_token(*, may_make: bool) -> Path:
    """Return the file with the token by which the cluster knows its own, made on the head."""
    path = Path(os.environ.get("RAY_AUTH_TOKEN_PATH") or Path.home() / ".ray" / "auth_token")
    if path.is_file():
        return path
    if not may_make:
        raise Failure(f"there is no token in {path}: copy that file from the head to this machine")
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
    with contextlib.suppress(FileExistsError), open(os.open(path, flags, 0o600), "w") as file:
        file.write(secrets.token_hex(32))
    return path


def runtime_directory() -> Path:
    """Return where the words of `ray start` are kept: private, and gone with the machine."""
    shared = "/dev/shm" if os.access("/dev/shm", os.W_OK | os.X_OK) else "/tmp"
    path = Path(os.environ.get("AENV_RUNTIME_DIR") or f"{shared}/aenv-{os.getuid()}")
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    return path


def own_address() -> str:
    """Return the address of this machine as others see it."""
    if given := os.environ.get("AENV_NODE_IP"):
        return given
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock, contextlib.suppress(OSError):
        sock.connect(("192.0.2.1", 9))  # sends nothing: it only asks for the way there
        return str(sock.getsockname()[0])
    return "127.0.0.1"


def say_next(address: str, *, is_head: bool) -> None:
    """Print what to do next."""
    token = ensure_token(may_make=False)
    if is_head:
        if not os.environ.get("AENV_REDIS_URL"):
            say("it keeps its state in memory; set AENV_REDIS_URL to outlive it (compose.yaml)")
        say("\non each other machine:")
        say(f"  copy {token} there, readable by you alone")
        say(f"  python clusters/local/node.py worker {address}")
    say("\nto use the cluster:")
    say(f"  export RAY_ADDRESS={address} RAY_AUTH_MODE=token RAY_AUTH_TOKEN_PATH={token}")
    say("  aenv up      # hub and gateway, once")
    say("  aenv doctor")


# --- what runs -----------------------------------------------------------------------------------


def mark(name: str) -> str:
    """Return what a node's processes are marked with: other users' nodes are not ours."""
    return f"{os.getuid()}/{name}"


def processes(name: str) -> dict[int, str]:
    """Return the processes of this node, by pid with their commands."""
    wanted = f"{MARK}={mark(name)}".encode()
    found = {}
    for entry in os.listdir("/proc"):
        if not entry.isdigit() or int(entry) == os.getpid():
            continue
        with contextlib.suppress(OSError):
            command = Path("/proc", entry, "cmdline").read_bytes()
            # An empty command is a zombie's.
            if command and wanted in Path("/proc", entry, "environ").read_bytes().split(b"\0"):
                found[int(entry)] = command.replace(b"\0", b" ").decode(errors="replace")
    return found


def is_up(name: str, *, is_head: bool | None) -> bool:
    """Whether what a node cannot do without runs; None: head or worker."""
    commands = processes(name).values()
    has_gcs = any(command.split()[0].endswith("/gcs_server") for command in commands)
    return any(map(is_raylet, commands)) and (is_head is None or has_gcs == is_head)


def status(name: str) -> int:
    """Say whether the node is up; 0 when it is."""
    found = processes(name)
    if not is_up(name, is_head=None):
        say(f"{name} is not up" + (f"; {len(found)} processes are left of it" if found else ""))
        return 1
    say(f"{name} is up, with {len(found)} processes")
    return 0


def stop(name: str) -> None:
    """End the node; its sandboxes end with it."""
    # A raylet takes its leave of the head and waits for the answer: on the head's own machine the
    # one that gives it must not be asked to end at the same time.
    steps = (
        (signal.SIGTERM, is_raylet, is_raylet, LEAVE_S),
        (signal.SIGTERM, is_rays, bool, TERM_S),
        (signal.SIGKILL, bool, bool, KILL_S),
    )
    for number, is_told, is_awaited, deadline_s in steps:
        for pid, command in processes(name).items():
            if is_told(command):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, number)
        ends = time.monotonic() + deadline_s
        while any(map(is_awaited, processes(name).values())) and time.monotonic() < ends:
            time.sleep(LOOK_S)
        if not processes(name):
            say(f"{name} is down")
            return
    raise Failure(f"processes {', '.join(map(str, processes(name)))} do not end")


def is_raylet(command: str) -> bool:
    """Whether a command is that of Ray's own process for this node."""
    return command.split(maxsplit=1)[0].endswith("/raylet")


def is_rays(command: str) -> bool:
    """Whether it is none of ours, which end sandboxes and themselves after the raylet."""
    return "aenv_ray" not in command


def tell_systemd() -> None:
    """Say that the node is up, where systemd waits for that (Type=notify)."""
    path = os.environ.get("NOTIFY_SOCKET")
    if path:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
            sock.connect(f"\0{path[1:]}" if path.startswith("@") else path)
            sock.send(b"READY=1")


def end_on_signals(name: str) -> None:
    """From now on, a signal to end this process ends the node first."""

    def end(number: int, _: object) -> NoReturn:
        stop(name)
        raise SystemExit(0 if number == signal.SIGTERM else 130)

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, end)


def wait_until_it_ends(name: str) -> None:
    """Return when the node has ended; a signal to end ends it.

    Raises:
        Failure: It ended by itself.
    """
    end_on_signals(name)
    while is_up(name, is_head=None):
        time.sleep(1.0)
    stop(name)
    raise Failure(f"{name} has ended by itself")


if __name__ == "__main__":
    sys.exit(main())
