"""The ``aenv`` entry point: the table of commands, and the only place that prints errors.

    exit code   meaning
    0           success
    1           failure
    2           wrong usage: unknown command or option, invalid value
    3           wrong settings, arguments or project files (`ConfigError`)
    130         Ctrl-C

Each command is a function, or a Typer application with sub-commands, in its own module. `COMMANDS`
names it, and it is imported when it is used, so that ``aenv version`` does not load Ray.
"""

from __future__ import annotations

import difflib
import importlib
import logging
import os
import re
import sys
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Final

import typer
from typer.core import TyperGroup
from typer.main import get_command

from aenv_ray.cli.terminal import console
from aenv_ray.errors import AenvError, ConfigError

COMMANDS: Final[Mapping[str, str]] = {
    "quickstart": "aenv_ray.cli.quickstart:quickstart",
    "init": "aenv_ray.cli.init:init",
    "test": "aenv_ray.cli.test:run_tests",
    "run": "aenv_ray.cli.run:run",
    "build": "aenv_ray.cli.build:build",
    "up": "aenv_ray.cli.up:up",
    "down": "aenv_ray.cli.up:down",
    "doctor": "aenv_ray.cli.doctor:doctor",
    "status": "aenv_ray.cli.status:status",
    "sample": "aenv_ray.cli.sampling.sample:sample",
    "eval": "aenv_ray.cli.sampling.eval:evaluate",
    "trajectories": "aenv_ray.cli.sampling.trajectories:trajectories",
    "replay": "aenv_ray.cli.sampling.replay:replay",
    "rescore": "aenv_ray.cli.sampling.replay:rescore",
    "synthesize": "aenv_ray.cli.sampling.synthesize:synthesize",
    "push": "aenv_ray.cli.publish:push",
    "pull": "aenv_ray.cli.publish:pull",
    "list": "aenv_ray.cli.environments:list_",
    "search": "aenv_ray.cli.environments:search",
    "get": "aenv_ray.cli.environments:get",
    "release": "aenv_ray.cli.environments:release",
    "delete": "aenv_ray.cli.environments:delete",
    "instance": "aenv_ray.cli.instance:instance",
    "service": "aenv_ray.cli.service:service",
    "pool": "aenv_ray.cli.environments:pool",
    "token": "aenv_ray.cli.token:token",
    "grant": "aenv_ray.cli.environments:grant",
    "hub": "aenv_ray.cli.hub:hub",
    "cluster": "aenv_ray.cli.cluster:cluster",
    "config": "aenv_ray.cli.config:config",
    "version": "aenv_ray.cli.status:version",
}
"""Name → ``module:attribute``, in the order of ``aenv --help``.

The attribute is a function with Typer annotations, or a `typer.Typer` for a noun with sub-commands.
"""

_EXAMPLE = re.compile(r"(?m)^(Examples?:)$")
_INTERRUPTED: Final = 130
_SUMMARY_LENGTH: Final = 300
_LOG_FORMAT: Final = "%(levelname)s %(name)s: %(message)s"


@dataclass
class Verbosity:
    """The verbosity that the user chose; ``obj`` of the root context."""

    verbose: bool = False
    debug: bool = False

    @property
    def tracebacks(self) -> bool:
        """Whether errors are printed with their traceback."""
        return self.verbose or self.debug


class CommandTable(TyperGroup):
    """The root group; imports the module of a command when it is used or listed."""

    def list_commands(self, ctx: Any) -> list[str]:  # noqa: D102
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:  # noqa: D102
        target = COMMANDS.get(cmd_name)
        if target is None:
            return None
        if cmd_name not in self.commands:
            self.commands[cmd_name] = load_command(cmd_name, target)
        return self.commands[cmd_name]

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:  # noqa: D102
        name = args[0]
        if name not in COMMANDS and not name.startswith("-") and not ctx.resilient_parsing:
            close = difflib.get_close_matches(name, COMMANDS, n=1)
            suggestion = f", did you mean {close[0]!r}?" if close else ""
            ctx.fail(f"no such command {name!r}{suggestion}")
        return super().resolve_command(ctx, args)


def load_command(name: str, target: str) -> Any:
    """Import ``module:attribute`` and return it as a command called `name`."""
    module, _, attribute = target.partition(":")
    noun = getattr(importlib.import_module(module), attribute)
    if not isinstance(noun, typer.Typer):
        function = noun
        noun = typer.Typer(add_completion=False, rich_markup_mode=None)
        noun.command(name)(function)
    command = get_command(noun)
    command.name = name
    _keep_examples(command)
    return command


def _keep_examples(command: Any) -> None:
    """Mark the examples in a command's help as preformatted, so that they can be copied."""
    command.help = _EXAMPLE.sub("\b\n\\1", command.help or "")
    for nested in getattr(command, "commands", {}).values():
        _keep_examples(nested)


app = typer.Typer(
    name="aenv",
    cls=CommandTable,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.callback()
def root(
    context: typer.Context,
    verbose: Annotated[
        bool, typer.Option("--verbose", "-v", help="Print more, with tracebacks.")
    ] = False,
    debug: Annotated[
        bool, typer.Option("--debug", help="Log everything, with tracebacks.")
    ] = False,
) -> None:
    """Create, test and run environments for agentic reinforcement learning.

    Example:
      aenv init todo
      aenv test todo
      aenv run todo
    """
    verbosity = context.ensure_object(Verbosity)
    verbosity.verbose, verbosity.debug = verbose, debug
    if verbosity.tracebacks:
        level = logging.DEBUG if debug else logging.INFO
        logging.basicConfig(level=level, format=_LOG_FORMAT, stream=sys.stderr)


def main(argv: Sequence[str] | None = None) -> int:
    """Run ``aenv`` and return its exit code.

    Args:
        argv: Arguments after the program name. None: those of this process.
    """
    _open_closed_streams()
    try:
        code = _run(list(sys.argv[1:] if argv is None else argv))
        sys.stdout.flush()
    except BrokenPipeError:
        return _leave_broken_pipe()
    return code


def _run(arguments: list[str]) -> int:
    """Run a command, print its errors, and return an exit code.

    Raises:
        BrokenPipeError: The reader of the output has ended.
    """
    verbosity = Verbosity()
    command = get_command(app)
    _keep_examples(command)
    try:
        code = command.main(
            arguments or ["--help"], prog_name="aenv", standalone_mode=False, obj=verbosity
        )
    except BrokenPipeError:
        raise
    except KeyboardInterrupt:
        code = _INTERRUPTED
    except typer.Abort:
        console.error("aborted")
        return 1
    except typer.TyperException as exc:
        return _usage_error(exc)
    except AenvError as exc:
        console.error(exc.message, exc.hint)
        if verbosity.tracebacks:
            traceback.print_exception(exc)
        return 3 if isinstance(exc, ConfigError) else 1
    except Exception as exc:  # noqa: BLE001  # the last handler
        return _unexpected(exc, verbosity)
    if code == _INTERRUPTED:
        console.say("interrupted")
    return code if isinstance(code, int) else 0


def _usage_error(exc: typer.TyperException) -> int:
    """Print a usage error, or the help of a noun without a sub-command."""
    context = getattr(exc, "ctx", None)
    if type(exc).__name__ == "NoArgsIsHelpError":
        console.say(exc.format_message())
        return exc.exit_code
    path = context.command_path if context is not None else "aenv"
    message = exc.format_message().strip().removesuffix(".").replace("Value error, ", "")
    hint = f"see: {path} --help"
    wrong = getattr(exc, "param", None)
    options = () if context is None else context.command.params
    has_out = any("--out" in option.opts for option in options)
    if has_out and wrong is not None and "--output" in wrong.opts:
        hint = "--output is the format of what is printed; name a file with --out"
    console.error(message[:1].lower() + message[1:], hint)
    return exc.exit_code


def _unexpected(exc: Exception, verbosity: Verbosity) -> int:
    summary = " ".join(f"{type(exc).__name__}: {exc}".split())
    if len(summary) > _SUMMARY_LENGTH and not verbosity.tracebacks:
        # The message of a Ray error has a whole remote traceback.
        summary = f"{summary[:_SUMMARY_LENGTH]} …"
    if verbosity.tracebacks:
        traceback.print_exception(exc)
        console.error(f"unexpected {summary}; please report it")
    else:
        console.error(
            f"unexpected {summary}; please report it",
            "for the traceback run: aenv --verbose COMMAND …",
        )
    return 1


def _open_closed_streams() -> None:
    """Replace closed standard streams (``aenv … >&-``), so that no file gets their descriptors."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            nothing = Path(os.devnull).open(mode, encoding="utf-8")  # noqa: SIM115  # stays open
            setattr(sys, name, nothing)


def _leave_broken_pipe() -> int:
    """Discard what the interpreter flushes at exit: the reader of the output has ended."""
    nothing = os.open(os.devnull, os.O_WRONLY)
    for stream in (sys.stdout, sys.stderr):
        os.dup2(nothing, stream.fileno())
    return 1


if __name__ == "__main__":
    sys.exit(main())
