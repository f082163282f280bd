"""Compile the modules that aenv-ray's and Ray's processes import.

    .venv/bin/python scripts/precompile.py

The bootstrap tells installers not to compile, because compiling all of Ray takes half a minute. A
local Ray is a dozen processes with the same imports. Without cached bytecode, for example under
``PYTHONDONTWRITEBYTECODE``, each would spend most of its start on compiling them.
"""

from __future__ import annotations

import os
import subprocess
import sys

RAY = (
    "ray.serve", "ray.serve._private.controller", "ray.serve._private.replica",
    "ray.dashboard.dashboard", "ray.dashboard.agent", "ray._private.log_monitor",
    "ray._private.runtime_env.agent.main", "ray._private.workers.default_worker",
    "ray.autoscaler._private.monitor", "ray.util.client.server",
)  # fmt: skip
OURS = (
    "aenv_ray.cli.quickstart", "aenv_ray.actors.controller.controller",
    "aenv_ray.actors.host.host_actor", "aenv_ray.actors.controller.orphan_cleanup",
    "aenv_ray.engines.process.launcher", "aenv_ray.engines.docker.engine",
    "aenv_ray.runtime.fork.jailer", "aenv_ray.runtime.fork.template",
    "aenv_ray.runtime.public.mcp", "aenv_ray.hub.hub_actor",
    "aenv_ray.serve.gateway.deployment", "aenv_ray.client", "rich.progress", "rich.table",
    "fastmcp.server.http", "redis.asyncio", "uvicorn.protocols.http.httptools_impl", "pytest",
)  # fmt: skip
_IMPORT = """
import contextlib, importlib, sys
for name in sys.argv[1:]:
    with contextlib.suppress(Exception):  # its importer will report why
        importlib.import_module(name)
"""


def main() -> None:
    """Import everything once, in two processes."""
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    command = [sys.executable, "-W", "ignore", "-c", _IMPORT]
    started = [
        subprocess.Popen(
            [*command, *names], env=environment, stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )
        for names in (RAY, OURS)
    ]  # fmt: skip
    for process in started:
        process.wait()


if __name__ == "__main__":
    main()
