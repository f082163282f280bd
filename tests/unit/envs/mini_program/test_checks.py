"""Checks: their shapes, their random values, and those that need no browser."""

from __future__ import annotations

import importlib.util
import json
import random
from pathlib import Path
from typing import Any

import pytest
from webapp import browser, checks
from webapp.server import AppServer, answer

PROJECT = Path(__file__).parents[4] / "aenv_ray" / "envs" / "mini_program"


def test_the_tasks_are_built_from_their_directories_and_their_checks_are_well_formed() -> None:
    spec = importlib.util.spec_from_file_location("build", PROJECT / "tasks" / "build.py")
    assert spec is not None
    assert spec.loader is not None
    build = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(build)
    text = (PROJECT / "tasks.jsonl").read_text(encoding="utf-8")
    assert text == build.lines(), "run python tasks/build.py"
    for row in map(json.loads, text.splitlines()):
        rewards = row["reward"]["arguments"]
        assert checks.structures(rewards["structure"])
        for check in checks.behaviours(rewards.get("behaviour", [])):
            checks.draw(check.let, random.Random(1))
        app = {c["arguments"]["path"]: c["arguments"]["content"].encode() for c in row["reference"]}
        for check in checks.structures(rewards["structure"]):
            assert checks.check_structure(check, app).passed, (row["id"], check.name)
            wrong = checks.check_structure(check, {"index.html": b"<p>"})
            assert check.max == 0 or not wrong.passed


@pytest.mark.parametrize(
    ("behaviour", "message"),
    [
        ({"name": "x", "steps": []}, "behaviour.0.steps"),
        ({"name": "x", "steps": [{"clik": "#a"}]}, r"steps\.0\.page"),
        ({"name": "x", "steps": [{}]}, "an empty step"),
        ({"name": "x", "steps": [{"fill": "#a"}]}, r"steps\.0\.fill\.text"),
        ({"name": "x", "steps": [{"expect": "#a", "txt": "b"}]}, r"expect\.txt"),
        ({"steps": [{"no_errors": True}]}, "name"),
    ],
)
def test_malformed_checks_are_named(behaviour: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        checks.behaviours([behaviour])


def test_structure_checks_that_expect_nothing_are_refused() -> None:
    with pytest.raises(ValueError, match="expects nothing"):
        checks.structures([{"name": "x"}])


def test_values_are_random_and_formulas_use_them() -> None:
    let = {
        "a": (2, 9),
        "w": "word",
        "b": "=a * 10 + 5",
        "c": "=(a + a) / 4",
        "d": "=7 // 2 - a % 1",
    }
    drawn = [checks.draw(let, random.Random(seed)) for seed in range(30)]
    assert len({one["a"] for one in drawn}) > 4
    assert len({one["w"] for one in drawn}) == 30
    for one in drawn:
        assert one["b"] == int(one["a"]) * 10 + 5
        assert float(one["c"]) == int(one["a"]) / 2
        assert one["d"] == 3


@pytest.mark.parametrize("rule", ["=a", "=__import__('os')", "=1 +", "=1 / 0", "=2 ** 9", "text"])
def test_formulas_are_arithmetic_only(rule: str) -> None:
    with pytest.raises(ValueError, match=r"formula|variable"):
        checks.draw({"x": rule}, random.Random(1))


def test_structure_verdicts_say_what_is_wrong() -> None:
    files = {"index.html": b"<!doctype html><html lang=en><title>x</title><h1>a</h1><h1>b</h1>"}
    for check, reason in (
        ({"file": "style.css"}, "style.css does not exist"),
        ({"selector": "h1", "max": 1}, "2 elements match h1, not at least 1 and at most 1"),
        ({"selector": "main"}, "0 elements match main, not at least 1"),
    ):
        (parsed,) = checks.structures([{"name": "n", **check}])
        assert checks.check_structure(parsed, files) == checks.CheckResult(
            "n", "structure", False, reason
        )


def test_the_server_answers_with_files_and_nothing_else() -> None:
    files = {"index.html": b"<p>", "a b.js": b"1"}
    assert answer(files.get, "/?x=1") == (200, "text/html; charset=utf-8", b"<p>")
    assert answer(files.get, "/a%20b.js")[1] == "text/javascript; charset=utf-8"
    assert answer(files.get, "/favicon.ico")[0] == 204
    for target in ("/../etc/passwd", "/%2e%2e/etc/passwd", "/none", "//etc/passwd"):
        assert answer(files.get, target)[0] == 404


def test_a_port_in_use_is_an_error() -> None:
    server = AppServer({}.get)
    try:
        with pytest.raises(OSError, match="in use"):
            AppServer({}.get, server.port)
    finally:
        server.close()


def test_a_missing_browser_is_an_error_that_names_the_way_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(browser.VARIABLE, "/nonexistent/chromium")
    with pytest.raises(browser.NoBrowser, match="install the package chromium"):
        browser.Browser()


class _SlowPage:
    """A page that needs ten looks, on a node where each of them takes long."""

    looks = 0
    now = 0.0

    def run(self, *arguments: Any) -> dict[str, Any]:
        self.looks += 1
        self.now += 10.0
        return {"x": 1, "y": 2} if self.looks == 10 else {"problem": "it is not there yet"}

    def wait(self, seconds: float) -> None:
        self.now += seconds


def test_a_busy_node_does_not_make_an_honest_page_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    page = _SlowPage()
    monkeypatch.setattr(checks.time, "monotonic", lambda: page.now)
    assert checks._aim(page, "#button", 0, {}) == (1, 2)
    page.looks = 10
    with pytest.raises(checks.Failed, match="not there yet"):
        checks._aim(page, "#button", 0, {})
    assert page.looks == 10 + checks.MIN_LOOKS


def test_a_page_cannot_hide_its_errors_behind_other_messages() -> None:
    page: Any = browser.Page(None, "", "", "")  # type: ignore[arg-type]
    for number in range(2 * browser.MAX_MESSAGES):
        page._note(browser.Message("log", f"{number}"))
    page._note(browser.Message("exception", "boom"))
    assert page.dropped == browser.MAX_MESSAGES
    with pytest.raises(checks.Failed, match="boom"):
        checks._expect_page(page, checks.ExpectPage(no_errors=True), {})
