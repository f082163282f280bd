"""Results on standard output: valid JSON and YAML whatever they hold, tables that fit."""

from __future__ import annotations

import io
import json
import sys
from types import SimpleNamespace

import pytest
import yaml
from hypothesis import example, given
from hypothesis import strategies as st

from aenv_ray.cli.sampling import rollouts
from aenv_ray.cli.terminal import console, output
from aenv_ray.cli.terminal.output import Format
from aenv_ray.sampling import Episode

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(codec="utf-8")),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.text(st.characters(codec="utf-8")), inner, max_size=4)
    ),
    max_leaves=10,
)  # fmt: skip


@given(JSON)
def test_json_is_read_back_as_it_was(data):
    assert json.loads(output.as_text(data, Format.JSON)) == data


@given(JSON)
@example({"\x85": None})
def test_yaml_is_read_back_as_it_was(data):
    assert yaml.safe_load(output.as_text(data, Format.YAML)) == data


def test_yaml_takes_what_json_takes():
    data = {"verdict": Format.TABLE, "names": ("a", "b"), 1: None}
    read = {"verdict": "table", "names": ["a", "b"], "1": None}
    assert json.loads(output.as_text(data, Format.JSON)) == read
    assert yaml.safe_load(output.as_text(data, Format.YAML)) == read


@pytest.mark.parametrize("encoding", ["utf-8", "ascii", "latin-1"])
def test_json_is_valid_in_every_encoding(encoding, monkeypatch):
    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, encoding))
    output.show({"text": "中文 é \ud800"}, Format.JSON)
    assert json.loads(raw.getvalue().decode(encoding)) == {"text": "中文 é \ud800"}


def test_an_empty_list_is_data_for_programs_and_a_sentence_for_people(capsys):
    output.show_rows([], Format.JSON, {})
    assert capsys.readouterr() == ("[]\n", "")
    output.show_rows([], Format.TABLE, {}, empty="nothing here")
    assert capsys.readouterr() == ("", "nothing here\n")


def test_a_table_aligns_wide_characters_and_shows_no_control_character(capsys):
    rows = [
        {"a": "中文", "b": "x"},
        {"a": "one", "b": "\x1b[31mred\x07\n  two"},
        {"a": None, "b": []},
    ]
    output.show_rows(rows, Format.TABLE, {"A": lambda r: r["a"], "B": lambda r: r["b"]})
    out = capsys.readouterr().out
    assert "\x1b" not in out
    assert "\x07" not in out
    assert out.splitlines()[:2] == ["A     B", "中文  x"]
    assert out.splitlines()[3] == "-     -"


@given(st.lists(st.integers(1, 200), min_size=1, max_size=8), st.integers(20, 200))
def test_a_table_fits_its_terminal_as_far_as_columns_stay_readable(widths, available):
    fitted = output.fitted(widths, available)
    assert all(narrow <= wide for narrow, wide in zip(fitted, widths, strict=True))
    assert all(n == w or n >= 8 for n, w in zip(fitted, widths, strict=True))
    total = sum(fitted) + 2 * (len(widths) - 1)
    assert total <= available or all(n <= 8 for n in fitted[1:])
    assert fitted[0] == widths[0], "it names the row, for further commands"


def test_a_column_may_be_cut_before_others():
    widths = [14, 5, 14, 26, 4]
    assert output.fitted(widths, 60, 3) == [14, 5, 14, 15, 4]
    assert output.fitted(widths, 50, 3) == [14, 5, 11, 8, 4]
    assert output.fitted(widths, 80, 3) == widths


def test_moments_and_sizes_are_for_people():
    assert output.moment(None) == "-"
    assert output.moment("not a time") == "not a time"
    assert output.moment(0.0)[:2] in {"19"}
    assert output.moment("2026-11-21T10:00:00Z").startswith("2026-11-2")
    assert [output.size(n) for n in (0, 1023, 2048, 3 << 20, 5 << 30)] == [
        "0 B", "1023 B", "2.0 KiB", "3.0 MiB", "5.0 GiB",
    ]  # fmt: skip


def test_the_first_errors_of_episodes_are_said_on_stderr(capsys):
    class Sampled:
        output_failure = None
        total = 6
        episodes = ()

        def __iter__(self):
            for index in range(6):
                error = f"sandbox_lost: no {index}" if index else None
                yield Episode(index=index, task_id=f"t{index}", status="completed", reward=None,
                              error=error)  # fmt: skip

        def summary(self):
            return "summary"

    assert rollouts.run_all(Sampled(), quiet=True) == "summary"
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.splitlines() == [
        *(f"t{index}: sandbox_lost: no {index}" for index in (1, 2, 3)),
        "and 2 more episodes with an error",
    ]


def test_a_line_for_people_is_written_in_one_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    """A signal between a text and its end of line would put what its handler says behind it."""
    pieces: list[str] = []
    monkeypatch.setattr(sys, "stderr", SimpleNamespace(write=pieces.append, flush=lambda: None))
    console.say("one")
    console.say()
    assert pieces == ["one\n", "\n"]
