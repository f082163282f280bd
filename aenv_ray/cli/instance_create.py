"""``aenv instance create``: instances that live as long as this command, or on after it."""

from __future__ import annotations

import contextlib
import secrets
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from aenv_ray.cli.terminal import console
from aenv_ray.cli.terminal.options import (
    ApiKey,
    EnvironmentHere,
    Output,
    SystemUrl,
    gateway,
    reference_here,
    variables,
)
from aenv_ray.cli.terminal.output import show
from aenv_ray.errors import (
    AenvError,
    DeadlineExceeded,
    FabricUnavailable,
    SandboxStartFailed,
)

if TYPE_CHECKING:
    from aenv_ray.client.gateway import Gateway
    from aenv_ray.client.gateway_records import InstanceAnswer

_PAUSE_S: Final = 2.0
"""After a gateway did not answer."""
_HEALTHY: Final = frozenset({"healthy", "success", "ok"})


def create(  # noqa: PLR0913, PLR0917  # each is an option
    environment: EnvironmentHere = None,
    datasource: Annotated[
        str, typer.Option("--datasource", "-d", help="Given to it as AENV_DATASOURCE.")
    ] = "",
    ttl: Annotated[
        str | None, typer.Option("--ttl", "-t", help="30m, 2h. Default: the project's, else 30m.")
    ] = None,
    idle_timeout: Annotated[
        str | None, typer.Option("--idle-timeout", help="Ends it when nobody calls it this long.")
    ] = None,
    env: Annotated[
        list[str] | None, typer.Option("--env", "-e", help="KEY=VALUE, repeatable.")
    ] = None,
    arg: Annotated[
        list[str] | None, typer.Option("--arg", "-a", help="An argument of its code, repeatable.")
    ] = None,
    label: Annotated[
        list[str] | None, typer.Option("--label", "-l", help="KEY=VALUE, repeatable.")
    ] = None,
    engine: Annotated[
        str | None,
        typer.Option("--engine", help="process, docker, kubernetes. Default: the project's."),
    ] = None,
    count: Annotated[int, typer.Option("--count", "-n", min=1, help="All of them or none.")] = 1,
    owner: Annotated[
        str | None, typer.Option("--owner", help="Default: the config file's, else the token's.")
    ] = None,
    keep_alive: Annotated[
        bool, typer.Option("--keep-alive", help="Leave it running when this command ends.")
    ] = False,
    skip_health: Annotated[
        bool, typer.Option("--skip-health", help="Do not ask whether it is healthy.")
    ] = False,
    timeout: Annotated[
        float, typer.Option("--timeout", min=0.1, help="Seconds for one answer.")
    ] = 60.0,
    startup_timeout: Annotated[
        float, typer.Option("--startup-timeout", min=0.1, help="Seconds until it must run.")
    ] = 500.0,
    max_retries: Annotated[
        int, typer.Option("--max-retries", min=0, help="When the gateway is away or full.")
    ] = 10,
    output: Output = None,
    system_url: SystemUrl = None,
    api_key: ApiKey = None,
) -> None:
    """Make an instance; hold it until Ctrl-C or its TTL.

    Prints it once it runs. With --keep-alive it lives on until its TTL or
    `aenv instance delete`.

    Example:
      aenv instance create mini-terminal --ttl 10m
      aenv instance create todo@1.0.0 --keep-alive -o json
    """
    from aenv_ray.cli.terminal import config_file

    options = {
        "ttl": ttl or "",
        "idle_timeout": idle_timeout,
        "environment_variables": variables(env or [], "--env"),
        "arguments": list(arg or []),
        "labels": variables(label or [], "--label"),
        "owner": owner or config_file.find().values.owner,
        "engine": engine,
        "datasource": datasource,
        "count": count,
    }
    wanted = {key: value for key, value in options.items() if value is not None}
    name = environment or reference_here("instance")
    with gateway(system_url, api_key, timeout) as door, _interrupts():
        maker = _Maker(door, name, wanted, startup_timeout, max_retries)
        made = maker.make(None if skip_health else _expect_healthy)
        # Ctrl-C is how a held instance is meant to end, from the moment that it is shown.
        end = contextlib.nullcontext() if keep_alive else contextlib.suppress(KeyboardInterrupt)
        with _released(door, [] if keep_alive else made), end:
            shown = [one.shown() for one in made]
            if count == 1:
                show(shown[0], output, made[0].id)
            else:
                show(shown, output, "\n".join(one.id for one in made))
            if not keep_alive:
                console.say("held until Ctrl-C or its TTL; --keep-alive leaves it running")
                _hold(door, made)


class _Maker:
    """Makes instances once, whatever becomes of the answer.

    Args:
        door: The gateway.
        environment: ``name@version`` or ``name``.
        options: Of the create.
        deadline_s: Until they must run.
        retries: Attempts beyond the first, when the gateway is away or full.
    """

    def __init__(
        self,
        door: Gateway,
        environment: str,
        options: dict[str, Any],
        deadline_s: float,
        retries: int,
    ) -> None:
        self._door = door
        self._environment = environment
        self._options = options
        self._deadline_s = deadline_s
        self._retries = retries
        self._key = secrets.token_hex(16)

    def make(self, check: Callable[[Gateway, InstanceAnswer], None] | None) -> list[InstanceAnswer]:
        """Return the instances once they run and `check` passed; else none is left.

        Raises:
            AenvError: What the gateway answered.
        """
        try:
            made = self._ask(self._retries + 1)
        except (KeyboardInterrupt, DeadlineExceeded):
            # It may have been made. The same key names it, made or not, and it is ended.
            console.say("undoing the create …")
            with _deaf():
                _end(self._door, self._ask(1))
            raise
        try:
            for one in made:
                if check is not None:
                    check(self._door, one)
        except BaseException:
            with _deaf():
                _end(self._door, made)
            raise
        return made

    def _ask(self, attempts: int) -> list[InstanceAnswer]:
        ends = time.monotonic() + self._deadline_s
        pause_s = 0.2
        while True:
            attempts -= 1
            left_s = max(ends - time.monotonic(), 1.0)
            try:
                return self._door.create(
                    self._environment, self._options, key=self._key, timeout_s=left_s, attempts=1
                )
            except AenvError as exc:
                retry_s = max(pause_s, getattr(exc, "retry_after_s", 0.0))
                if not exc.retryable or not attempts or time.monotonic() + retry_s > ends:
                    raise
            time.sleep(retry_s)
            pause_s = min(2 * pause_s, 5.0)


def _expect_healthy(door: Gateway, made: InstanceAnswer) -> None:
    found = door.check_health(made.id)
    if str(found.get("status")) not in _HEALTHY:
        raise SandboxStartFailed(
            f"{made.id} is {found.get('status')}: {found.get('message', '')}",
            instance_id=made.id,
            hint="its health function says so; --skip-health does not ask",
        )


def _hold(door: Gateway, held: Sequence[InstanceAnswer]) -> None:
    """Return once all have ended."""
    for one in held:
        while (last := _followed(door, one.id)) is None:
            time.sleep(_PAUSE_S)
        console.say(f"{one.id} ended{f': {last}' if last else ''}")


def _followed(door: Gateway, instance_id: str) -> str | None:
    """Return why an instance ended, once it has; None: the gateway went away before that."""
    from aenv_ray.client.gateway import GONE

    reason = ""
    try:
        for now in door.follow(instance_id):
            reason = now.reason or ""
    except GONE as exc:
        return exc.message
    except (FabricUnavailable, DeadlineExceeded) as exc:
        console.say(f"{exc.message}; trying again")
        return None
    return reason


@contextlib.contextmanager
def _released(door: Gateway, made: Sequence[InstanceAnswer]) -> Iterator[None]:
    """End instances when the block is left, however it is."""
    try:
        yield
    finally:
        if made:
            with _deaf():
                _end(door, made)
            _say("released " + ", ".join(one.id for one in made))


def _end(door: Gateway, made: Sequence[InstanceAnswer]) -> None:
    """End instances; one that has ended is no error.

    Raises:
        FabricUnavailable: The gateway does not answer; their TTL ends them.
    """
    from aenv_ray.client.gateway import GONE

    for one in made:
        try:
            door.delete(one.id)
        except GONE:
            continue
        except FabricUnavailable as exc:
            raise FabricUnavailable(
                f"{one.id} is not released: {exc.message}", hint="its TTL ends it"
            ) from exc


def _say(text: str) -> None:
    with contextlib.suppress(OSError):  # the terminal may be what has gone
        console.say(text)


@contextlib.contextmanager
def _interrupts() -> Iterator[None]:
    """Make every signal that asks us to end a KeyboardInterrupt, also where a shell ignores it."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        del number, frame
        raise KeyboardInterrupt

    numbers = [signal.SIGINT, signal.SIGTERM]
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # else nohup wants us to stay
        numbers.append(signal.SIGHUP)
    with _handled(numbers, interrupt):
        yield


@contextlib.contextmanager
def _deaf() -> Iterator[None]:
    """Let nothing but SIGKILL, or a third Ctrl-C, come between."""
    left = 2

    def ignore(number: int, frame: FrameType | None) -> None:
        nonlocal left
        del number, frame
        left -= 1
        if not left:
            raise KeyboardInterrupt

    with _handled([signal.SIGINT, signal.SIGTERM, signal.SIGHUP], ignore):
        yield


@contextlib.contextmanager
def _handled(numbers: Sequence[signal.Signals], handler: Any) -> Iterator[None]:
    before = [(number, signal.signal(number, handler)) for number in numbers]
    try:
        yield
    finally:
        for number, old in before:
            signal.signal(number, old)
