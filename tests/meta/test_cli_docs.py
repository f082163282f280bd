"""Every command of `aenv` explains itself: a summary, what each option does, an example."""

from __future__ import annotations

import itertools
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command

from aenv_ray.cli.main import COMMANDS, app, load_command, main


def all_commands() -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield every command with its words, sub-commands of nouns included."""

    def below(words: tuple[str, ...], command: Any) -> Iterator[tuple[tuple[str, ...], Any]]:
        yield words, command
        for name, nested in getattr(command, "commands", {}).items():
            yield from below((*words, name), nested)

    yield (), get_command(app)
    for name, target in COMMANDS.items():
        yield from below((name,), load_command(name, target))


EVERY = [pytest.param(w, c, id=" ".join(("aenv", *w))) for w, c in all_commands()]


@pytest.mark.parametrize(("words", "command"), EVERY)
def test_help_exits_0_and_shows_an_example_of_this_very_command(words, command, capsys):
    assert main([*words, "--help"]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert "Example:" in out
    assert f"\n    {' '.join(('aenv', *words))}" in out
    assert max(map(len, out.splitlines())) <= 80


@pytest.mark.parametrize(("words", "command"), EVERY[1:])
def test_the_summary_fits_the_list_of_commands(words, command):
    summary = command.help.splitlines()[0]
    assert summary.endswith(".")
    assert len(summary) <= 62


@pytest.mark.parametrize(("words", "command"), EVERY)
def test_every_parameter_says_what_it_does(words, command):
    for parameter in command.params:
        assert getattr(parameter, "help", None), f"{' '.join(words)}: {parameter.name}"


@pytest.mark.parametrize(("words", "command"), EVERY)
def test_an_example_uses_only_options_that_exist(words, command):
    example = command.help.partition("Example:")[2]
    lines = [line.strip() for line in example.splitlines() if line.strip().startswith("aenv ")]
    known = {option for p in command.params for option in (*p.opts, *p.secondary_opts)}
    for line in lines:
        parts = shlex.split(line)
        if tuple(parts[1 : 1 + len(words)]) == words:
            used = {p.partition("=")[0] for p in parts[1 + len(words) :] if p.startswith("-")}
            assert used <= known | {"--help"}, line


def test_the_root_help_lists_every_command(capsys):
    assert main(["--help"]) == 0
    out = capsys.readouterr().out
    for name in COMMANDS:
        assert f"\n  {name} " in out


ROWS = re.findall(
    r"^\| `(aenv [^`]+)` \| `(aenv [^`]+)` \|$",
    (Path(__file__).resolve().parents[2] / "docs" / "cli.md").read_text(encoding="utf-8"),
    re.MULTILINE,
)


def test_the_page_of_commands_has_every_command_once_with_an_example():
    leaves = {words for words, command in all_commands() if not getattr(command, "commands", None)}
    documented = [tuple(name.split()[1:]) for name, _ in ROWS]
    assert sorted(documented) == sorted(leaves - {()})


@pytest.mark.parametrize(("name", "example"), ROWS, ids=[name for name, _ in ROWS])
def test_an_example_of_the_page_uses_options_and_arguments_that_exist(name, example):
    words = tuple(name.split()[1:])
    given = shlex.split(example.replace("\\|", "|"))
    assert tuple(given[1 : 1 + len(words)]) == words
    command = dict(all_commands())[words]
    command.make_context(name, given[1 + len(words) :], resilient_parsing=False, obj=None)


PAGES = ("clusters-local.md", "clusters.md", "hub.md", "operations.md")
"""Pages with commands for operators, which nothing runs as they are: they need a cluster."""


def commands_of(page: str) -> Iterator[list[str]]:
    """Yield the words after `aenv` of each command in a page's blocks, also those inside others."""
    text = (Path(__file__).resolve().parents[2] / "docs" / page).read_text(encoding="utf-8")
    for block in re.findall(r"(?ms)^```(?:sh|bash)\n(.*?)^```", text):
        for line in block.splitlines():
            lexer = shlex.shlex(line, posix=True, punctuation_chars=True)
            lexer.whitespace_split = True
            for is_operator, words in itertools.groupby(lexer, lambda w: set(w) <= set("();<>|&")):
                command = list(words)
                inner = command[command.index("--") + 1 :] if "--" in command else []
                for one in (command, inner):
                    if not is_operator and one[:1] == ["aenv"]:
                        yield one[1:]


@pytest.mark.parametrize("page", PAGES)
def test_a_command_for_operators_uses_options_and_arguments_that_exist(page):
    known = dict(all_commands())
    found = list(commands_of(page))
    assert found
    for given in found:
        words = max((w for w in known if tuple(given[: len(w)]) == w), key=len)
        assert words, given
        known[words].make_context(
            " ".join(words), given[len(words) :], resilient_parsing=False, obj=None
        )


def test_every_command_takes_a_format():
    for words, command in all_commands():
        if words and not getattr(command, "commands", None):
            assert any("-o" in parameter.opts for parameter in command.params), words
