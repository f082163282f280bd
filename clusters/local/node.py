#!/usr/bin/env python3
"""Makes this machine a node of an aenv-ray cluster: `ray start` with what aenv-ray needs.

    python clusters/local/node.py head              # the first machine
    python clusters/local/node.py worker HOST:PORT  # each further one
    python clusters/local/node.py status
    python clusters/local/node.py stop

Run it with the Python that aenv-ray is installed in; it needs nothing else. Running it again
changes nothing if the node is up, and restarts the node if a part of it has died. With
`--foreground` it runs until the node ends, for systemd. Its settings are the variables listed in
`node.env`. Ray's processes inherit all of them.

With `AENV_REDIS_URL` the head stores its state in that Redis, as the hub does: if the head is lost,
start it again, and workers, instances and the hub continue. Without it, the cluster ends with its
head.
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
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NoReturn
from urllib.parse import unquote, urlsplit

NOT_INHERITED = ("RAY_ADDRESS", "NOTIFY_SOCKET")
"""Variables for this script only, or between it and systemd."""
MARK = "AENV_CLUSTER_NODE"
"""Variable that identifies the processes of a node; they all inherit it."""
GCS_PORT = 6380
"""Ray's default, 6379, is the port of Redis."""
RECONNECT_S = 600
"""How long workers wait for a lost head; Ray's default of 60 s is too short for a reboot."""
START_S = 180.0
ATTEMPTS = 5
SLOW = "timed out during startup"
"""Ray's message if its processes did not start within half a minute; a second start is faster."""
LEAVE_S = 10.0
"""A raylet ends within tenths of a second, unless its head is unreachable."""
TERM_S = 20.0
"""Time for Ray's processes to end; then the launcher notices and ends the sandboxes."""
KILL_S = 20.0
LOOK_S = 0.1
IDLE_WORKERS_MS = 600_000
"""How long idle Ray workers are kept: an actor starts on one in 0.4 s, else in several seconds."""


class Failure(Exception):
    """An error for the user; its message says what to do."""


def say(text: str) -> None:
    """Print a line and flush it."""
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code."""
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").split("\n")[0],
        epilog="example: python clusters/local/node.py head",
    )
    parser.add_argument(
        "--name", default="node", help="name of the node, if a machine has several (default: node)"
    )
    commands = parser.add_subparsers(dest="command", required=True)
    head = commands.add_parser("head", help="make this machine the head")
    worker = commands.add_parser("worker", help="join a cluster")
    worker.add_argument("address", help="HOST:PORT of the head")
    for command in (head, worker):
        command.add_argument("--foreground", action="store_true", help="run until the node ends")
    commands.add_parser("stop", help="stop this node and its instances")
    commands.add_parser("status", help="show whether this node is up")
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
    """Start the node unless it is up; as a head if `address` is None."""
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
    """Start the node unless it is up; the caller holds the lock."""
    if is_up(name, is_head=address is None):
        say(f"{name} is already up")
        return
    if is_up(name, is_head=None):
        role = "worker" if address is None else "head"
        raise Failure(f"{name} is up as a {role}: stop it first, or choose another --name")
    if processes(name):
        say(f"a part of {name} has died: stopping the rest")
        stop(name)
    environment = node_environment(name, is_head=address is None)
    if address is None:
        forget_address(environment, port)
    log = runtime_directory() / f"{name}.log"
    end_on_signals(name)  # leave no half-started node
    for attempt in range(1, ATTEMPTS + 1):
        words = start_ray(ray_command(address, port, environment), environment, log)
        if words is None and is_up(name, is_head=address is None):
            break
        stop(name)
        if attempt == ATTEMPTS or SLOW not in (words or ""):
            raise Failure(f"Ray did not start: {reason(words or '')}; the whole output is in {log}")
        say("Ray started too slowly; trying again")
    say(f"{name} is up")


def reason(words: str) -> str:
    """Return the last error in Ray's output, or else its last lines."""
    lines = words.strip().splitlines() or ["it ended without output"]
    errors = [line for line in lines if re.match(r"[\w.]*(Error|Exception): ", line)]
    return errors[-1] if errors else " | ".join(lines[-4:])


def check_address(address: str) -> None:
    """Check that an address has the form HOST:PORT."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal():
        raise Failure(
            f"invalid address of the head {address!r}: expected HOST:PORT, as `node.py head` "
            "prints it (under systemd: AENV_HEAD in node.env)"
        )


@contextlib.contextmanager
def locked(name: str) -> Iterator[None]:
    """Exclude concurrent starts, which would take a starting node for a broken one."""
    with (runtime_directory() / f"{name}.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def forget_address(environment: Mapping[str, str], port: int) -> None:
    """Remove the stale address of a lost head, to which Ray would connect otherwise."""
    note = Path(environment.get("RAY_TMPDIR") or "/tmp/ray", "ray_current_cluster")
    if note.is_file() and note.read_text().strip().endswith(f":{port}"):
        note.unlink()


def start_ray(command: Sequence[str], environment: Mapping[str, str], log: Path) -> str | None:
    """Run `ray start`; return None, or its output if it failed."""
    with log.open("wb") as output:
        try:
            done = subprocess.run(
                command, env=environment, cwd="/", stdin=subprocess.DEVNULL, stdout=output,
                stderr=subprocess.STDOUT, timeout=START_S, check=False, start_new_session=True,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            return f"it did not start within {START_S:g} s"
    return log.read_text(errors="replace") if done.returncode else None


def ray_command(address: str | None, port: int, environment: Mapping[str, str]) -> list[str]:
    """Return the command that starts Ray on this machine."""
    command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--disable-usage-stats"]
    if address is None:
        command += ["--head", "--no-monitor", f"--port={port}"]  # nodes are added by hand
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
    # Ray's agents write their titles over their variables, and so would lose the mark. They would
    # outlive a killed node by up to RECONNECT_S.
    environment["SPT_NOENV"] = "1"
    environment["RAY_AUTH_MODE"] = "token"
    environment["RAY_AUTH_TOKEN_PATH"] = str(ensure_token(may_make=is_head))
    environment.setdefault("RAY_gcs_rpc_server_reconnect_timeout_s", str(RECONNECT_S))
    redis = os.environ.get("AENV_REDIS_URL")
    if is_head and redis:
        parts = urlsplit(redis)
        if parts.scheme not in ("redis", "rediss") or not parts.hostname:
            raise Failure(
                "AENV_REDIS_URL is not redis://… or rediss://…, which Ray's head requires; "
                "unset it to keep no state"
            )
        scheme = "rediss://" if parts.scheme == "rediss" else ""
        environment["RAY_REDIS_ADDRESS"] = f"{scheme}{parts.hostname}:{parts.port or 6379}"
        prefix = os.environ.get("AENV_REDIS_PREFIX") or "aenv"
        environment.setdefault("RAY_external_storage_namespace", f"{prefix}-ray")
    return environment


def redis_login() -> tuple[str, str]:
    """Return user and password of `AENV_REDIS_URL`; "" for those it does not have."""
    parts = urlsplit(os.environ.get("AENV_REDIS_URL") or "")
    return unquote(parts.username or ""), unquote(parts.password or "")


def ensure_token(*, may_make: bool) -> Path:
    """Return the file with Ray's token; on the head it is created if it is missing."""
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
    """Return the private directory for locks and the output of `ray start`."""
    shared = "/dev/shm" if os.access("/dev/shm", os.W_OK | os.X_OK) else "/tmp"
    path = Path(os.environ.get("AENV_RUNTIME_DIR") or f"{shared}/aenv-{os.getuid()}")
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    return path


def own_address() -> str:
    """Return the address under which other machines reach this one."""
    if given := os.environ.get("AENV_NODE_IP"):
        return given
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock, contextlib.suppress(OSError):
        sock.connect(("192.0.2.1", 9))  # sends nothing, but chooses an interface
        return str(sock.getsockname()[0])
    return "127.0.0.1"


def say_next(address: str, *, is_head: bool) -> None:
    """Print what to do next."""
    token = ensure_token(may_make=False)
    if is_head:
        if not os.environ.get("AENV_REDIS_URL"):
            say("to keep its state if this machine is lost, set AENV_REDIS_URL (compose.yaml)")
        say("\non every other machine:")
        say(f"  copy {token} there, readable only by you")
        say(f"  python clusters/local/node.py worker {address}")
    say("\nto use the cluster:")
    say(f"  export RAY_ADDRESS={address} RAY_AUTH_MODE=token RAY_AUTH_TOKEN_PATH={token}")
    say("  aenv up      # hub and gateway, once")
    say("  aenv doctor")


# --- processes -----------------------------------------------------------------------------------


def mark(name: str) -> str:
    """Return the value of `MARK` for a node of this user."""
    return f"{os.getuid()}/{name}"


def processes(name: str) -> dict[int, str]:
    """Return the commands of this node's processes, by pid."""
    wanted = f"{MARK}={mark(name)}".encode()
    found = {}
    for entry in os.listdir("/proc"):
        if not entry.isdigit() or int(entry) == os.getpid():
            continue
        with contextlib.suppress(OSError):
            command = Path("/proc", entry, "cmdline").read_bytes()
            # A zombie has no command.
            if command and wanted in Path("/proc", entry, "environ").read_bytes().split(b"\0"):
                found[int(entry)] = command.replace(b"\0", b" ").decode(errors="replace")
    return found


def is_up(name: str, *, is_head: bool | None) -> bool:
    """Return whether the essential processes run; with `is_head` None, of a head or a worker.

    A head's control plane ends if its Redis is lost, while its raylet goes on.
    """
    commands = processes(name).values()
    if lost_control(commands):
        return False
    return any(map(is_raylet, commands)) and (
        is_head is None or any(map(is_control_plane, commands)) == is_head
    )


def lost_control(commands: Collection[str]) -> bool:
    """Return whether these are the processes of a head whose control plane has ended."""
    is_head = any(is_raylet(command) and "--head" in command.split() for command in commands)
    return is_head and not any(map(is_control_plane, commands))


def status(name: str) -> int:
    """Print whether the node is up, and return the exit code: 0 if it is."""
    found = processes(name)
    if not is_up(name, is_head=None):
        say(f"{name} is not up" + (f"; {len(found)} of its processes are left" if found else ""))
        return 1
    say(f"{name} is up, with {len(found)} processes")
    return 0


def stop(name: str) -> None:
    """Stop the node and its sandboxes."""
    # A raylet signs off at the head and waits for a response, so the head's own raylet must end
    # before the rest of the head. If the control plane has ended, it would wait in vain, and Ray's
    # agents with it.
    ending = signal.SIGKILL if lost_control(processes(name).values()) else signal.SIGTERM
    steps = (
        (ending, is_raylet, is_raylet, LEAVE_S),
        (ending, is_rays, bool, TERM_S),
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
    raise Failure(f"processes {', '.join(map(str, processes(name)))} did not end")


def is_raylet(command: str) -> bool:
    """Return whether a command is a raylet, Ray's process for a node."""
    return command.split(maxsplit=1)[0].endswith("/raylet")


def is_control_plane(command: str) -> bool:
    """Return whether a command is the control plane, which the head alone has."""
    return command.split(maxsplit=1)[0].endswith("/gcs_server")


def is_rays(command: str) -> bool:
    """Return whether a command is Ray's; ours end the sandboxes and themselves after the raylet."""
    return "aenv_ray" not in command


def tell_systemd() -> None:
    """Notify systemd, if it runs this, that the node is up (``Type=notify``)."""
    path = os.environ.get("NOTIFY_SOCKET")
    if path:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
            sock.connect(f"\0{path[1:]}" if path.startswith("@") else path)
            sock.send(b"READY=1")


def end_on_signals(name: str) -> None:
    """From now on, stop the node before SIGTERM or SIGINT ends this process."""

    def end(number: int, _: object) -> NoReturn:
        stop(name)
        raise SystemExit(0 if number == signal.SIGTERM else 130)

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, end)


def wait_until_it_ends(name: str) -> None:
    """Wait for the end of the node.

    Raises:
        Failure: It has ended.
    """
    end_on_signals(name)
    while is_up(name, is_head=None):
        time.sleep(1.0)
    stop(name)
    raise Failure(f"{name} has ended unexpectedly")


if __name__ == "__main__":
    sys.exit(main())
