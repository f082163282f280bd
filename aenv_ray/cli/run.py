"""``aenv run``: serve a project on this machine, for its author."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from aenv_ray.addresses import is_loopback
from aenv_ray.cli.local.signals import interrupts
from aenv_ray.cli.terminal import console
from aenv_ray.cli.terminal.options import (
    DataFormatOption,
    ProjectArgument,
    VariablesOption,
    WorkDirOption,
    project_of,
    variables,
)
from aenv_ray.errors import AenvError, ConfigError

if TYPE_CHECKING:
    from aenv_ray.cli.local.local_server import LocalServer
    from aenv_ray.cli.terminal.output import Format
    from aenv_ray.project.project import Project

_POLL_S: Final = 0.5
"""How often the project is checked for changes."""


def run(
    context: typer.Context,
    path: ProjectArgument = Path(),
    work_dir: WorkDirOption = Path(),
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[
        int, typer.Option("--port", "-p", min=0, max=65535, help="0 chooses a free port.")
    ] = 8081,
    quiet: Annotated[bool, typer.Option("--quiet", help="Print only errors.")] = False,
    reload: Annotated[
        bool, typer.Option("--reload", help="Restart when a file of the project changes.")
    ] = False,
    inspector: Annotated[
        bool, typer.Option("--inspector/--no-inspector", help="Also start the MCP inspector (npx).")
    ] = False,
    inspector_port: Annotated[
        int, typer.Option(min=1, max=65535, help="Port of the inspector.")
    ] = 6274,
    env: VariablesOption = None,
    output: DataFormatOption = None,
) -> None:
    """Serve a project on this machine until Ctrl-C.

    The server has the routes of an instance: /mcp for tools, /task/reward, /functions/* and
    /health, but runs without Ray and without isolation. Its variables are those of config.json and
    of -e. It runs in the project's directory; with --reload, files that it writes there also
    restart it. With -o json or yaml, its address is printed once it answers; everything else goes
    to standard error.

    Example:
      aenv run ./todo --reload
      DUMMY_INSTANCE_IP=http://127.0.0.1:8081 python train.py
    """
    extra = variables(env or [], "--env")
    loaded = project_of(work_dir, path)
    npx = _find_npx() if inspector else None
    runner = _Runner(
        project=loaded,
        host=host,
        port=port,
        quiet=quiet,
        reload=reload,
        npx=npx,
        inspector_port=inspector_port,
        variables=extra,
        log_level="DEBUG" if context.obj.debug else "INFO",
        output=output,
    )
    with interrupts():
        try:
            code = runner.run()
        except KeyboardInterrupt:
            code = 0
        finally:
            runner.stop()
    if code == 0 and not quiet:
        console.say("stopped")
    raise typer.Exit(code)


def _find_npx() -> str:
    npx = shutil.which("npx")
    if npx is None:
        raise ConfigError(
            "--inspector needs npx, which is not on PATH",
            hint="install Node.js, or run without --inspector and connect an MCP client to /mcp",
        )
    return npx


@dataclass
class _Runner:
    """Runs the server of one project, restarts it, and reports to its author."""

    project: Project
    host: str
    port: int
    quiet: bool
    reload: bool
    npx: str | None
    inspector_port: int
    variables: dict[str, str]
    log_level: str
    output: Format | None = None
    """Format for the address on standard output; None prints none."""
    _server: LocalServer | None = None
    _announced: bool = False
    _inspector: subprocess.Popen[bytes] | None = None
    _seen: str = ""
    """The project when the server was started: its digest, or the error of loading it."""
    _looked_at: float = 0.0

    def run(self) -> int:
        """Serve until the server ends; with `reload` until KeyboardInterrupt.

        Returns:
            The exit code of ``aenv run``: the server's, or 1 if the server ended with 0.
        """
        self._seen = self.project.digest
        self._start()
        while True:
            code = self._pump()
            if code is not None:
                self._report_end(code)
                if not self.reload:
                    return abs(code) + 128 if code < 0 else code or 1
                self._end_server()
                console.say("waiting for the project to change")
            if self.reload:
                self._restart_if_changed()

    def stop(self) -> None:
        """Stop the server and the inspector."""
        try:
            self._end_server()
        finally:
            if self._inspector is not None:
                from aenv_ray.cli.local import local_server

                local_server.stop(self._inspector)

    def _start(self) -> None:
        from aenv_ray.cli.local.local_server import LocalServer

        self._say(f"starting {self.project.reference}")
        environment = {**os.environ, **self.project.config.deploy.variables, **self.variables}
        self._announced = False
        self._server = LocalServer(
            self.project.path,
            host=self.host,
            port=self.port,
            environment=environment,
            log_level=self.log_level,
            quiet=self.quiet,
        )

    def _end_server(self) -> None:
        if self._server is not None:
            self._server.stop()
            self._server = None

    def _pump(self) -> int | None:
        """Pass on output for half a second; return the server's exit code if it ended."""
        if self._server is None:
            time.sleep(_POLL_S)
            return None
        code = self._server.pump(_POLL_S)
        if self._server.url is not None and not self._announced:
            self._announced = True
            self.port = self._server.port  # a restart uses the same port
            self._announce(self._server, self._server.url)
            self._print_address(self._server, self._server.url)
        return code

    def _print_address(self, server: LocalServer, url: str) -> None:
        """Print the address as data, once: a restart keeps it."""
        from aenv_ray.cli.terminal.output import Format, show

        if self.output not in {None, Format.TABLE}:
            facts = {"environment": self.project.reference, "url": url, "mcp_url": f"{url}/mcp"}
            show(facts | {"tools": server.tools()}, self.output)
            self.output = None

    def _announce(self, server: LocalServer, url: str) -> None:
        if not self.quiet:
            rows: Sequence[tuple[str, str]] = (
                ("tools", ", ".join(server.tools()) or "none"),
                ("MCP", f"{url}/mcp"),
                ("client", f"DUMMY_INSTANCE_IP={url}"),
                ("stop", "Ctrl-C"),
            )
            console.say(f"{console.strong(self.project.reference)} is served at {url}")
            for name, value in rows:
                console.say(f"  {name:<8}{value}")
            if not is_loopback(self.host):
                console.say("  anyone who can reach this machine can call it without a token")
        if self.npx is not None and self._inspector is None:
            self._start_inspector(self.npx)

    def _start_inspector(self, npx: str) -> None:
        from aenv_ray.cli.local import local_server

        ports = {
            "CLIENT_PORT": str(self.inspector_port),
            "SERVER_PORT": str(self.inspector_port + 3),  # its own default distance
        }
        self._inspector = local_server.spawn(
            [npx, "--yes", "@modelcontextprotocol/inspector"],
            environment={**os.environ, **ports},
            cwd=self.project.path,
            output=sys.stderr.fileno(),
        )

    def _report_end(self, code: int) -> None:
        server = self._server
        output = server.kept_output() if server else ""
        if self.quiet:
            sys.stderr.write(output)
        hint = None
        if "cannot listen on" in output and not self._announced:
            hint = "choose another port, or a free one with --port 0"
        how = f"was killed by signal {-code}" if code < 0 else f"ended with code {code}"
        console.error(f"the server of {self.project.reference} {how}", hint)

    def _restart_if_changed(self) -> None:
        from aenv_ray.project import project

        now = time.monotonic()
        if now - self._looked_at < _POLL_S:
            return
        self._looked_at = now
        try:
            loaded = project.load(self.project.path)
        except AenvError as exc:
            if exc.message != self._seen:
                self._seen = exc.message
                self._end_server()
                console.error(exc.message, exc.hint)
                console.say("waiting for the project to change")
            return
        except OSError:
            return  # a file was removed while it was read; check again later
        if loaded.digest != self._seen:
            self.project, self._seen = loaded, loaded.digest
            self._say("the project changed")
            self._end_server()
            self._start()

    def _say(self, text: str) -> None:
        if not self.quiet:
            console.say(text)
