"""The jailer: isolates a template before any code of its project runs.

``python -m aenv_ray.runtime.fork.jailer FD`` is started by the launcher with the node's own
interpreter and fixed variables. It reads the setup from the socket FD
(`aenv_ray.runtime.fork.template` describes its messages), builds the jail, reports how it isolates,
and executes the template in it, with the interpreter and the variables of the project: from there
on nothing is trusted.

Three processes result. The first two stay outside of the jail and run no code of the project:

1. The first only waits for the second.
2. The second is process 1 of a pid namespace. It builds the root directory and enters another user
   namespace, so that the kernel locks all mounts. Then it forks the third, and creates network
   namespaces for it.
3. The third becomes the template. It is in another pid namespace, in which it cannot see the
   second. It keeps only the two capabilities that it needs to isolate its forks, and its system
   calls are filtered.
"""

from __future__ import annotations

import json
import os
import socket
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final, NoReturn

from aenv_ray.runtime.fork import jail
from aenv_ray.runtime.fork.jail_spec import (
    JailSpec,
    JailUnavailable,
    StorageUnavailable,
    facts,
)
from aenv_ray.runtime.fork.namespaces import serve_networks
from aenv_ray.runtime.system import linux

_OOM_SCORE: Final = 900
"""Score of a template. Instances have a higher one, so the kernel kills them first: the end of a
template ends all its instances."""
_PACKET_BYTES: Final = 1 << 20


class Jailer:
    """Isolates one template and becomes it.

    Args:
        control: The socket to the launcher.
        setup: The first message of the launcher.
    """

    def __init__(self, control: socket.socket, setup: dict[str, Any]) -> None:
        self._control = control
        self._setup = setup
        self._spec = JailSpec(**setup["jail"])
        self._networks: socket.socket | None = None

    def run(self) -> None:
        """Isolate this process, report, and execute the template."""
        linux.die_with_parent()
        # As root, this is also the lowest score that the sandboxes can give themselves.
        linux.set_oom_score(_OOM_SCORE)
        jail.limit_all_sandboxes()
        os.umask(0o022)  # the sandbox may run as another user, and must read these files
        try:
            if self._setup["isolated"]:
                self._isolate()
        except JailUnavailable as exc:
            self._send({"jail_unavailable": str(exc)})
            return
        except StorageUnavailable as exc:
            self._send({"failed": str(exc), "env_reads": []})
            return
        isolation = facts(self._spec, jailed=self._setup["isolated"], reason=self._setup["reason"])
        self._send({"isolation": isolation.data()})
        try:
            self._execute()
        except (OSError, ValueError) as exc:  # variables too long, interpreter missing
            self._send({"failed": f"its template cannot be started: {exc}", "env_reads": []})

    def _isolate(self) -> None:
        scratch, python = Path(self._setup["scratch"]), self._setup["python"][0]
        hostname = self._setup["env"]["envNAME"]
        self._spec = jail.enter_root(scratch, self._spec, python, hostname)
        try:
            self._enter()
        except OSError as exc:
            raise JailUnavailable(str(exc)) from exc

    def _enter(self) -> None:
        """Fork the template. Return in the fork only; the parent serves it until it ends."""
        proc = os.open("/proc", os.O_PATH | os.O_DIRECTORY)  # before the template covers it
        outside, inside = socket.socketpair()
        linux.unshare(linux.CLONE_NEWPID)
        if (pid := os.fork()) != 0:
            inside.close()
            self._control.close()
            serve_networks(outside, proc)
            jail.exit_like(pid)
        outside.close()
        os.close(proc)
        jail.mount_proc()
        jail.lock_template(self._spec)
        linux.die_with_parent()
        self._networks = inside

    def _execute(self) -> NoReturn:
        """Execute the template; only from here on the project's variables apply.

        Raises:
            OSError: The interpreter is missing, or the variables are too long.
            ValueError: A variable contains a null character.
        """
        inherited = [self._control.fileno()]
        if self._networks is not None:
            inherited.append(self._networks.fileno())
        for fd in inherited:
            os.set_inheritable(fd, True)
        order = {
            "jail": asdict(self._spec),
            "preload": self._setup["preload"],
            "jailed": self._setup["isolated"],
        }
        python = self._setup["python"]
        os.execve(
            python[0],
            [
                *python,
                "-m",
                "aenv_ray.runtime.fork.template",
                json.dumps(order),
                *map(str, inherited),
            ],
            self._setup["env"],
        )

    def _send(self, message: dict[str, Any]) -> None:
        self._control.send(json.dumps(message).encode())


def main() -> None:
    """Run the jailer on the socket whose descriptor is the argument."""
    control = socket.socket(fileno=int(sys.argv[1]))
    control.set_inheritable(False)
    data = control.recv(_PACKET_BYTES)
    if data:
        Jailer(control, json.loads(data)["setup"]).run()


if __name__ == "__main__":
    main()
