"""``python -m aenv_ray.runtime <project>``: serve one environment by HTTP.

The flags are those of AEnvironment's ``python -m aenv.main``.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import signal
import socket
import stat
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import FrameType

from aenv_ray.runtime.api.loader import load_project
from aenv_ray.runtime.api.registry import get_registry
from aenv_ray.runtime.door import door
from aenv_ray.runtime.door.calls import retry_lost_interrupts
from aenv_ray.runtime.door.dispatch import Dispatcher
from aenv_ray.runtime.faults import ProjectLoadError

_TERMINATED = 128 + signal.SIGTERM


class StartError(Exception):
    """The server cannot start; the message says why."""


def main(argv: Sequence[str] | None = None) -> int:
    """Serve until SIGINT or SIGTERM.

    Returns:
        0 after a signal; 1 when the server could not start.
    """
    args = _parser().parse_args(argv)
    level = logging.getLevelName(args.log_level)
    logging.basicConfig(level=level, format="%(asctime)s %(name)s %(levelname)s: %(message)s")
    if level > logging.DEBUG:
        for library in ("mcp", "sse_starlette", "fastmcp", "asyncio"):
            logging.getLogger(library).setLevel(logging.WARNING)  # they log every request
    # Process 1 of a container ignores signals without a handler.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(_TERMINATED))
    try:
        if not args.project.exists():
            raise StartError(f"{args.project}: no such project directory or .py file")
        # Bound first, so that a taken port is reported before the project's code runs.
        listener = _bind(args.host, args.port)
        dispatcher = _load(args.project, strict=args.strict)
        with _fast_door(args.socket, dispatcher):
            _serve(dispatcher, listener, args)
    except StartError as exc:
        print(f"error: {exc}", file=sys.stderr)  # noqa: T201  # the program's message
        return 1
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m aenv_ray.runtime",
        description="Serve one environment: /mcp, /functions/*, /task/reward, /health.",
    )
    parser.add_argument("project", type=Path, help="project directory, or one .py file")
    parser.add_argument("--host", default="0.0.0.0", help="address to listen on (%(default)s)")
    parser.add_argument("--port", type=_port, default=8081, help="0: any free port (%(default)s)")
    parser.add_argument("--name", default="aenv-server", help="MCP server name (%(default)s)")
    parser.add_argument(
        "--log-level",
        type=str.upper,
        choices=["DEBUG", "INFO", "WARNING", "ERROR"],
        default="INFO",
        help="DEBUG also logs every request (%(default)s)",
    )
    parser.add_argument(
        "--log-dir", help=argparse.SUPPRESS
    )  # accepted for AEnvironment, which ignores it too
    parser.add_argument("--socket", type=Path, help="also serve the fast door on this Unix socket")
    parser.add_argument("--strict", action="store_true", help="exit if the project does not load")
    parser.add_argument(
        "--body-limit-mib", type=int, default=64, help="largest request body (%(default)s)"
    )
    return parser


def _port(text: str) -> int:
    port = int(text)
    if not 0 <= port <= 65535:
        raise argparse.ArgumentTypeError(f"invalid port {port}: expected 0 to 65535")
    return port


def _bind(host: str, port: int) -> socket.socket:
    """Return a bound socket that does not listen yet.

    Raises:
        StartError: The address is taken, or does not belong to this machine.
    """
    try:
        found = socket.getaddrinfo(
            host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
        # "localhost" has two addresses; clients try 127.0.0.1.
        family, kind, protocol, _, address = min(found, key=lambda f: f[0] != socket.AF_INET)
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except OSError as exc:
        reason = exc.strerror or str(exc)
        raise StartError(f"cannot listen on {host} port {port}: {reason}") from exc
    return listener


def _load(project: Path, *, strict: bool) -> Dispatcher:
    """Load the project; without `strict`, ``/health`` reports a failure.

    Raises:
        StartError: It does not load, and `strict` is set.
    """
    try:
        return Dispatcher(load_project(project))
    except ProjectLoadError as exc:
        if strict:
            raise StartError(str(exc)) from exc
        print(f"the project does not load; /health says so\n{exc}", file=sys.stderr)  # noqa: T201
        return Dispatcher(get_registry(), load_error=str(exc))


@contextlib.contextmanager
def _fast_door(path: Path | None, dispatcher: Dispatcher) -> Iterator[None]:
    """Serve the fast door on a Unix socket that only this user can open.

    Raises:
        StartError: The path is taken, or cannot be created.
    """
    if path is None:
        yield
        return
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        _remove_dead_socket(path)
        before = os.umask(0o177)
        try:
            listener.bind(str(path))
        finally:
            os.umask(before)
        listener.listen(128)
    except OSError as exc:
        raise StartError(f"cannot listen on socket {path}: {exc.strerror or exc}") from exc
    threading.Thread(
        target=door.serve,
        args=(lambda: listener.accept()[0], dispatcher),
        name="aenv-fast-door",
        daemon=True,
    ).start()
    try:
        yield
    finally:
        listener.close()
        path.unlink(missing_ok=True)


def _remove_dead_socket(path: Path) -> None:
    """Remove the socket of a killed server; a socket in use stays."""
    if not path.exists() or not stat.S_ISSOCK(path.stat().st_mode):
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            path.unlink()


def _serve(dispatcher: Dispatcher, listener: socket.socket, args: argparse.Namespace) -> None:
    """Serve until a signal.

    Raises:
        StartError: Libraries are missing, or another process took the address meanwhile.
    """
    try:
        from aenv_ray.runtime.public import server as public  # imports the HTTP libraries
    except ImportError as exc:
        raise StartError(f"{exc}; the public door needs fastmcp, starlette and uvicorn") from exc
    retry_lost_interrupts()
    limit_bytes = args.body_limit_mib * 1024 * 1024
    app = public.build_app(dispatcher, name=args.name, body_limit_bytes=limit_bytes)
    url = _url(listener, args.host)
    server = public.Server(
        app,
        listener,
        lambda: print(f"environment server listening on {url}", file=sys.stderr, flush=True),  # noqa: T201
        access_log=args.log_level == "DEBUG",
    )

    def stop(number: int, frame: FrameType | None) -> None:
        del number, frame
        server.should_exit = True

    # While it runs, the server handles both signals; at its end it raises them again.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, stop)
    try:
        server.run_until_stopped()
    except OSError as exc:
        raise StartError(f"cannot listen on {url}: {exc.strerror or exc}") from exc


def _url(listener: socket.socket, host: str) -> str:
    port = listener.getsockname()[1]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


if __name__ == "__main__":
    sys.exit(main())
