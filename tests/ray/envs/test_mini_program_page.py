"""The page of examples/mini_program in a real browser: prompt, files, problems, live preview."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import httpx
import pytest

from tests.conftest import require
from tests.emulators.model_endpoint import completion, serving, tool_call
from tests.ray.cluster import Cluster

ROOT: Final = Path(__file__).parents[3]
TURN_S: Final = 60.0
BROKEN: Final = (
    '<!doctype html><html lang="en"><head><title>x</title><meta name="viewport" content="x">'
    "</head><body><h1>Hello</h1>\n<script>missing();</script></body></html>"
)


@pytest.fixture
def page_url(cluster: Cluster) -> Iterator[str]:
    """Start the example with a model, and return the address of its page."""
    answers = (
        completion(None, tool_call("write_file", {"path": "index.html", "content": BROKEN})),
        completion("It says hello."),
        completion(None, tool_call("write_file", {"path": "style.css", "content": "p { top: 0 }"})),
        completion("It is only a style."),
    )
    with serving(*answers) as model, contextlib.ExitStack() as ending:
        server = subprocess.Popen(
            [sys.executable, ROOT / "examples" / "mini_program" / "server.py", "--port", "0",
             "--model", "tiny", "--base-url", model.url],
            env={**os.environ, "RAY_ADDRESS": cluster.address},
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        ending.callback(server.wait, 30)
        ending.callback(server.terminate)
        assert server.stdout is not None
        with server.stdout:
            said = server.stdout.readline()
            assert said.startswith("open http://"), said
            yield said.split()[1]
    assert [message["role"] for message in model.requests[0]["messages"]] == ["system", "user"]
    assert "write_file" in {tool["function"]["name"] for tool in model.requests[0]["tools"]}


@pytest.mark.browser
@pytest.mark.timeout(300)
def test_a_model_and_the_script_build_applications_on_the_page(page_url: str) -> None:
    require("browser", shutil.which("chromium") is not None, "no Chromium on PATH")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "aenv_ray" / "envs" / "mini_program" / "src"))
        from webapp import browser, checks

        def play(page: Any, *steps: dict[str, Any]) -> None:
            checks.play(page, checks.steps(list(steps)), {})

        def within_turn(page: Any, step: dict[str, Any]) -> None:
            deadline = time.monotonic() + TURN_S
            while True:
                try:
                    return play(page, step)
                except checks.Failed:
                    if time.monotonic() >= deadline:
                        raise

        with browser.Browser() as program:
            page = program.page(1200, 800)
            page.load(f"{page_url}/")
            play(
                page,
                {"expect": "#agent", "value": "tiny"},
                {"click": "#tab-problems"},
                {"expect": "#problems-panel", "contains": "Nothing has been checked"},
                {"click": "#tab-preview"},
                {"fill": "#text", "text": "Say <b>hello</b>"},
                {"press": "Enter"},
                {"expect": ".said.user", "text": "Say <b>hello</b>"},
            )
            within_turn(page, {"expect": ".verdict.bad", "text": "1 problem"})
            play(
                page,
                {"expect": ".call", "text": "write file index.html"},
                {"expect": ".said.agent", "text": "It says hello."},
                {"click": "#tab-problems"},
                {"expect": ".row .text", "contains": "missing is not defined"},
                {"expect": ".row .place", "text": "index.html:2:9"},
                {"click": "#clear"},
                {"expect": "#welcome", "count": 1},
                {"fill": "#text", "text": "A style"},
                {"click": "#send"},
            )
            within_turn(page, {"expect": ".verdict.bad", "text": "1 problem"})
            play(
                page,
                {"expect": ".row .text", "contains": "index.html: No such file"},
                {"reload": True},
                {"expect": ".verdict.bad", "text": "1 problem"},
                {"click": "#clear"},
                {"expect": "#welcome", "count": 1},
                {"wait": 0.5},
                {"expect": "#nothing", "text": "The preview appears here."},
                {"select": "#agent", "option": "scripted"},
                {"fill": "#text", "text": "I want a counter"},
                {"click": "#send"},
            )
            within_turn(page, {"expect": ".verdict", "contains": "valid, and no errors in Chrome"})
            play(
                page,
                {"click": "#tab-files"},
                {"expect": "#files button", "count": 3},
                {"expect": "#source", "contains": '<output id="count">0</output>'},
                {"click": "#tab-preview"},
                {"expect": "#preview", "count": 1},
                {"resize": [380, 800]},
                {"fits": True},
            )
            preview = page.run("function () { return document.querySelector('#open').href; }")
            play(page, {"fill": "#text", "text": "Tell a joke"}, {"click": "#send"})
            nothing = "nothing was built: no file was changed"
            within_turn(page, {"expect": ".verdict.warn", "text": nothing})
            play(page, {"expect": ".verdict", "count": 2}, {"expect": "#preview", "count": 1})
            application = program.page()
            application.load(preview)
            play(
                application,
                {"click": "#increment", "times": 2},
                {"expect": "#count", "text": "2"},
                {"no_errors": True},
            )
    other_page = httpx.post(f"{page_url}/prompt", json={"text": "x", "agent": "scripted"})
    assert other_page.status_code == 403
    other_name = httpx.get(f"{page_url}/about", headers={"Host": "example.org"})
    assert other_name.status_code == 400


def test_the_way_out_of_a_missing_key_is_an_option_of_the_example() -> None:
    command = [sys.executable, ROOT / "examples" / "mini_program" / "server.py"]
    done = subprocess.run(
        [*command, "--model", "tiny", "--api-key-env", "NO_SUCH_KEY"],
        capture_output=True, text=True, check=False, timeout=TURN_S,
    )  # fmt: skip
    assert done.returncode == 1
    assert "no API key in the environment variable NO_SUCH_KEY" in done.stderr
    told = re.findall(r"--[a-z-]+", done.stderr)
    known = subprocess.run(
        [*command, "--help"], capture_output=True, text=True, check=True, timeout=TURN_S
    ).stdout
    assert told, done.stderr
    assert [option for option in told if option not in known] == []
