"""``aenv instance``: create, inspect, use and end instances."""

from __future__ import annotations

import base64
import contextlib
import secrets
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from aenv_ray.cli.local.signals import interrupts, uninterrupted
from aenv_ray.cli.terminal import console
from aenv_ray.cli.terminal.options import (
    DataFormatOption,
    EngineOption,
    EnvironmentArgument,
    GatewayOptions,
    OutputOption,
    VariablesOption,
    YesOption,
    confirm,
    reference,
    reference_here,
    variables,
    with_gateway,
)
from aenv_ray.cli.terminal.output import Columns, Format, chosen, moment, show, show_rows
from aenv_ray.errors import (
    GONE,
    AenvError,
    CapacityExceeded,
    DeadlineExceeded,
    FabricUnavailable,
    RateLimited,
)

if TYPE_CHECKING:
    from aenv_ray.actors.fabric.fabric import Fabric
    from aenv_ray.client.gateway import Gateway
    from aenv_ray.client.gateway_records import InstanceAnswer

instance = typer.Typer(
    add_completion=False, rich_markup_mode=None, no_args_is_help=True,
    help="Create, use and end instances.\n\n"
    "Example:\n  aenv instance create mini-terminal",
)  # fmt: skip

InstanceIdArgument = Annotated[str, typer.Argument(metavar="ID", help="Instance id.")]

_PAUSE_S: Final = 2.0
"""Pause before a gateway that did not answer is asked again."""
_UNDO_S: Final = 60.0
"""How long the instances of an interrupted create are asked for: it may not be admitted yet."""
_COLUMNS: Final[Columns] = {
    "ID": lambda i: i["id"],
    "ENVIRONMENT": lambda i: i["environment"],
    "STATUS": lambda i: i.get("status"),
    "OWNER": lambda i: i.get("owner"),
    "ENGINE": lambda i: i.get("engine"),
    "CREATED": lambda i: moment(i.get("created_at")),
    "ENDS": lambda i: moment(i.get("deadline")),
}


@instance.command()
@with_gateway
def create(  # noqa: PLR0913, PLR0917  # each is an option
    gateway: GatewayOptions,
    environment: EnvironmentArgument = None,
    datasource: Annotated[
        str, typer.Option("--datasource", "-d", help="Set in the instance as AENV_DATASOURCE.")
    ] = "",
    ttl: Annotated[
        str | None,
        typer.Option(
            "--ttl", "-t", help="Time to live: 30m, 2h. Default: the project's, else 30m."
        ),
    ] = None,
    idle_timeout: Annotated[
        str | None, typer.Option("--idle-timeout", help="End it after this long without a call.")
    ] = None,
    env: VariablesOption = None,
    arg: Annotated[
        list[str] | None, typer.Option("--arg", "-a", help="Argument for its code, repeatable.")
    ] = None,
    label: Annotated[
        list[str] | None, typer.Option("--label", "-l", help="KEY=VALUE, repeatable.")
    ] = None,
    engine: EngineOption = None,
    count: Annotated[
        int, typer.Option("--count", "-n", min=1, help="Create this many, or none on failure.")
    ] = 1,
    owner: Annotated[
        str | None, typer.Option("--owner", help="Default: config file, else the token's owner.")
    ] = None,
    keep_alive: Annotated[
        bool, typer.Option("--keep-alive", help="Keep it running when this command ends.")
    ] = False,
    skip_health: Annotated[
        bool, typer.Option("--skip-health", help="Skip the health check.")
    ] = False,
    timeout: Annotated[
        float, typer.Option("--timeout", min=0.1, help="Seconds for one response.")
    ] = 60.0,
    startup_timeout: Annotated[
        float, typer.Option("--startup-timeout", min=0.1, help="Seconds until it must be running.")
    ] = 500.0,
    max_retries: Annotated[
        int,
        typer.Option("--max-retries", min=0, help="Retries if the fabric is full or unreachable."),
    ] = 10,
    output: OutputOption = None,
) -> None:
    """Create an instance and keep it until Ctrl-C or its TTL.

    Prints the instance once it runs. With --keep-alive it continues to run
    after this command, until its TTL or `aenv instance delete`.

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
    client = gateway.connect(timeout)
    with interrupts():
        create_request = _IdempotentCreate(client, name, wanted, startup_timeout, max_retries)
        made = create_request.send(None if skip_health else _expect_healthy)
        if engine is None:
            console.say(f"engine: {', '.join(sorted({one.engine for one in made}))}")
        # Once the instance is shown, Ctrl-C is the regular way to end the command.
        end = contextlib.nullcontext() if keep_alive else contextlib.suppress(KeyboardInterrupt)
        with _released(client, [] if keep_alive else made), end:
            shown = [one.shown() for one in made]
            if count == 1:
                show(shown[0], output, made[0].id)
            else:
                show(shown, output, "\n".join(one.id for one in made))
            if not keep_alive:
                console.say("running until Ctrl-C or its TTL; use --keep-alive to leave it running")
                _follow_all(client, made)


@instance.command("list")
@with_gateway
def list_(
    gateway: GatewayOptions,
    name: Annotated[
        str | None, typer.Option("--name", "-n", help="Only this NAME[@VERSION].")
    ] = None,
    version: Annotated[
        str | None, typer.Option("--version", help="Only this version; requires --name.")
    ] = None,
    owner: Annotated[str | None, typer.Option("--owner", help="Only this owner.")] = None,
    label: Annotated[
        str | None, typer.Option("--label", "-l", help="Only with this KEY=VALUE.")
    ] = None,
    status: Annotated[
        str | None, typer.Option("--status", help="Only this status, for example Running.")
    ] = None,
    limit: Annotated[int, typer.Option("--limit", min=1, help="Maximum number of rows.")] = 1000,
    output: OutputOption = None,
) -> None:
    """List instances, the newest first.

    Example:
      aenv instance list --name mini-terminal
      aenv instance list -o json
    """
    if version is not None and name is None:
        raise typer.BadParameter("requires --name", param_hint="--version")
    variables([label] if label else [], "--label")
    env = None
    if name is not None:
        bare, one = reference(name, version)
        env = bare if one is None else f"{bare}@{one}"
    filters = {"env": env, "owner": owner, "label": label, "status": status}
    found = gateway.connect().instances(limit, **filters)
    of = f" of {env}" if env else ""
    show_rows([_data(one) for one in found], output, _COLUMNS, empty=f"no instances{of}")


@instance.command()
@with_gateway
def get(
    gateway: GatewayOptions,
    instance_id: InstanceIdArgument,
    output: OutputOption = None,
) -> None:
    """Show one instance.

    Example:
      aenv instance get mini-terminal-abc12345 -o json
    """
    found = gateway.connect().instance(instance_id)
    show(found.shown(), output, _lines(found))


@instance.command()
@with_gateway
def info(
    gateway: GatewayOptions,
    instance_id: InstanceIdArgument,
    output: OutputOption = None,
) -> None:
    """Show one instance with its health and what it offers.

    Example:
      aenv instance info mini-terminal-abc12345
    """
    client = gateway.connect()
    found = client.instance(instance_id)
    health = client.check_health(instance_id)
    tools, functions = client.tools(instance_id), client.functions_of(instance_id)
    resources, prompts = client.resources(instance_id), client.prompts(instance_id)
    lines = _lines(found) | {
        "health": health.get("status"),
        "tools": [tool.get("name") for tool in tools],
        "resources": [one.get("uri") or one.get("uriTemplate") for one in resources],
        "prompts": [prompt.get("name") for prompt in prompts],
        "functions": [function.get("name") for function in functions],
    }
    offers = {"tools": tools, "resources": resources, "prompts": prompts, "functions": functions}
    more = {"health": health, **offers}
    show(found.shown() | more, output, lines)


@instance.command()
@with_gateway
def delete(
    gateway: GatewayOptions,
    instance_ids: Annotated[list[str], typer.Argument(metavar="ID...", help="Instance ids.")],
    yes: YesOption = False,
    output: OutputOption = None,
) -> None:
    """End instances.

    Example:
      aenv instance delete mini-terminal-abc12345 --yes
    """
    client = gateway.connect()
    confirm(f"End {', '.join(instance_ids)}?", yes)
    for instance_id in instance_ids:
        client.delete(instance_id)
        console.say(f"ended {instance_id}")
    rows = [{"id": instance_id, "deleted": True} for instance_id in instance_ids]
    show(rows, output, "\n".join(instance_ids))


@instance.command(context_settings={"allow_interspersed_args": False})
@with_gateway
def exec(
    gateway: GatewayOptions,
    instance_id: InstanceIdArgument,
    command: Annotated[
        list[str],
        typer.Argument(metavar="COMMAND...", help="A single word is run by the shell."),
    ],
    timeout: Annotated[
        float, typer.Option("--timeout", min=0.1, help="Seconds until the command is stopped.")
    ] = 60.0,
    output: OutputOption = None,
) -> None:
    """Run a command in an instance and exit with its exit code.

    Options of aenv go before ID; everything after ID belongs to the command.
    With -o json or yaml the result is printed as data, and the exit code is 0.

    Example:
      aenv instance exec mini-terminal-abc12345 ls /
      aenv instance exec mini-terminal-abc12345 "ls | wc -l"
    """
    if command[0] == "--":  # as for ssh, docker exec and kubectl exec
        command = command[1:]
    if not command:
        raise typer.BadParameter("name a command after --", param_hint="COMMAND")
    words = command[0] if len(command) == 1 else command
    done = gateway.connect().exec(instance_id, words, timeout)
    if chosen(output) is not Format.TABLE:
        show(done, output)
        return
    for stream, name in ((sys.stdout, "stdout"), (sys.stderr, "stderr")):
        stream.buffer.write(_output(done, name))
        stream.flush()
    if done.get("truncated"):
        console.say("aenv: output over 10 MiB was truncated; redirect it to a file in the instance")
    raise typer.Exit(int(done.get("exit_code", 1)))


@instance.command()
@with_gateway
def renew(
    gateway: GatewayOptions,
    instance_id: InstanceIdArgument,
    ttl: Annotated[
        str, typer.Argument(metavar="TTL", help="New time to live, from now: 30m or 2h.")
    ],
    output: OutputOption = None,
) -> None:
    """Move the deadline of an instance to TTL from now.

    If the deadline is already later, it does not change.

    Example:
      aenv instance renew mini-terminal-abc12345 2h
    """
    found = gateway.connect().renew(instance_id, ttl)
    show(found.shown(), output, f"{found.id} ends {moment(found.deadline)}")


@instance.command()
@with_gateway
def logs(
    gateway: GatewayOptions,
    instance_id: InstanceIdArgument,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Continue until it ends, or Ctrl-C.")
    ] = False,
    tail: Annotated[
        int | None,
        typer.Option("--tail", min=0, help="Only this many last lines. Default: all stored."),
    ] = None,
    output: DataFormatOption = None,
) -> None:
    """Print the output of an instance.

    Without a gateway, the instance is looked up on the Ray cluster that
    RAY_ADDRESS names, or on the Ray that runs on this machine.

    Example:
      aenv instance logs mini-terminal-abc12345
      aenv instance logs mini-terminal-abc12345 -f --tail 10
    """
    as_data = None if output is Format.TABLE else output
    if follow and as_data is not None:
        raise typer.BadParameter("cannot be combined with -o", param_hint="--follow")
    if not gateway.is_known():
        _print(_logs_over_ray(instance_id, tail, follow), instance_id, as_data)
        return
    _print(gateway.connect().logs(instance_id, tail, follow), instance_id, as_data)


def _print(pieces: Iterator[str], instance_id: str, as_data: Format | None) -> None:
    with contextlib.closing(pieces):  # type: ignore[type-var]  # both are generators
        if as_data is not None:
            show({"id": instance_id, "text": "".join(pieces)}, as_data)
            return
        for piece in pieces:
            sys.stdout.write(piece)
            sys.stdout.flush()


def _logs_over_ray(instance_id: str, tail: int | None, follow: bool) -> Iterator[str]:
    from aenv_ray.actors.fabric import driver_api
    from aenv_ray.actors.ray_shell import ray_api

    # Ray prints warnings on standard output, which is for the log.
    with contextlib.redirect_stdout(sys.stderr):
        connection = _join()
    try:
        pieces = connection.get(instance_id).logs.remote(tail, follow)
        try:
            for piece in pieces:
                yield connection.wait(piece, f"the log of {instance_id}")
        finally:
            ray_api.cancel(pieces)
    finally:
        driver_api.shutdown()


def _join() -> Fabric:
    """Connect to a running Ray; a new one would have no instances."""
    from aenv_ray.actors.fabric import driver_api
    from aenv_ray.config import settings

    address = settings().ray_address
    try:
        return driver_api.init(address or "auto")
    except FabricUnavailable as exc:
        if address is not None:
            raise
        raise FabricUnavailable(
            "no Ray runs on this machine", hint="set RAY_ADDRESS to the cluster's address"
        ) from exc


def _data(found: InstanceAnswer) -> dict[str, Any]:
    return found.shown() | {"environment": found.environment}


def _lines(found: InstanceAnswer) -> dict[str, Any]:
    return {
        "id": found.id,
        "environment": found.environment,
        "status": found.status,
        "reason": found.reason,
        "owner": found.owner,
        "labels": found.labels,
        "engine": found.engine,
        "created": moment(found.created_at),
        "ends": moment(found.deadline),
        "MCP": found.mcp_url,
    }


def _output(done: dict[str, Any], name: str) -> bytes:
    text = str(done.get(name) or "")
    if done.get("encoding") == "base64":
        return base64.b64decode(text)
    return text.encode(errors="surrogateescape")


# --- create ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _IdempotentCreate:
    """Creates instances exactly once, even if a response is lost.

    It retries itself, because `--max-retries` and `--startup-timeout` also cover a full fabric; the
    client sends each request once.
    """

    client: Gateway
    environment: str
    options: dict[str, Any]
    deadline_s: float
    retries: int
    key: str = field(default_factory=lambda: secrets.token_hex(16))

    def send(self, check: Callable[[Gateway, InstanceAnswer], None] | None) -> list[InstanceAnswer]:
        """Return the instances once they run and `check` passed; otherwise none is left.

        Raises:
            AenvError: The gateway's error.
        """
        try:
            made = self._attempt(self.retries + 1, self.deadline_s)
        except (KeyboardInterrupt, DeadlineExceeded):
            console.say("undoing the create …")
            with uninterrupted():
                self._undo()
            raise
        try:
            for one in made:
                if check is not None:
                    check(self.client, one)
        except BaseException:
            with uninterrupted():
                _end(self.client, made)
            raise
        return made

    def _undo(self) -> None:
        """End the instances that may exist: a request with the same key returns the same ones.

        Raises:
            FabricUnavailable: The gateway could not say which they are, or does not answer.
        """
        try:
            made = self._attempt(sys.maxsize, _UNDO_S, wait=False)
        except CapacityExceeded:
            return  # refused now, so nothing was created before
        except FabricUnavailable as exc:
            raise FabricUnavailable(
                f"the create could not be undone: {exc.message}",
                hint="if it has created instances, they run until their TTL ends; "
                "aenv instance list shows them",
            ) from exc
        _end(self.client, made)

    def _attempt(
        self, attempts: int, within_s: float, *, wait: bool = True
    ) -> list[InstanceAnswer]:
        """Return the instances once they run; without `wait`, also those that wait for room."""
        options = self.options if wait else {**self.options, "wait": False}
        ends = time.monotonic() + within_s
        pause_s = 0.2
        while True:
            attempts -= 1
            left_s = max(ends - time.monotonic(), 1.0)
            try:
                return self.client.create(
                    self.environment, options, key=self.key, timeout_s=left_s, attempts=1
                )
            except AenvError as exc:
                retry_s = max(pause_s, getattr(exc, "retry_after_s", 0.0))
                is_full = isinstance(exc, CapacityExceeded) and not isinstance(exc, RateLimited)
                is_last = not attempts or time.monotonic() + retry_s > ends
                if not exc.retryable or is_last or (is_full and not wait):
                    raise
            time.sleep(retry_s)
            pause_s = min(2 * pause_s, 5.0)


def _expect_healthy(client: Gateway, made: InstanceAnswer) -> None:
    from aenv_ray.client.waiting import expect_healthy

    hint = "fix its health check, or skip it with --skip-health"
    expect_healthy(client.check_health(made.id), made.id, hint=hint)


def _follow_all(client: Gateway, made: Sequence[InstanceAnswer]) -> None:
    """Return when all instances have ended."""
    for one in made:
        while (last := _followed(client, one.id)) is None:
            time.sleep(_PAUSE_S)
        console.say(f"{one.id} ended{f': {last}' if last else ''}")


def _followed(client: Gateway, instance_id: str) -> str | None:
    """Wait for the end of an instance and return its reason; None if the connection broke."""
    reason = ""
    try:
        for now in client.follow(instance_id):
            reason = now.reason or ""
    except GONE as exc:
        return exc.message
    except (FabricUnavailable, DeadlineExceeded) as exc:
        console.say(f"{exc.message}; trying again")
        return None
    return reason


@contextlib.contextmanager
def _released(client: Gateway, made: Sequence[InstanceAnswer]) -> Iterator[None]:
    """End instances when the block is left."""
    try:
        yield
    finally:
        if made:
            with uninterrupted():
                _end(client, made)
            _say("released " + ", ".join(one.id for one in made))


def _end(client: Gateway, made: Sequence[InstanceAnswer]) -> None:
    """End instances; ignore those that have ended.

    Raises:
        FabricUnavailable: The gateway does not answer; the TTL will end the instances.
    """
    for one in made:
        try:
            client.delete(one.id)
        except GONE:
            continue
        except FabricUnavailable as exc:
            raise FabricUnavailable(
                f"{one.id} could not be released: {exc.message}", hint="its TTL will end it"
            ) from exc


def _say(text: str) -> None:
    with contextlib.suppress(OSError):  # the terminal may be closed
        console.say(text)
