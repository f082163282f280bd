"""JSON lines of logs name the instance, episode and owner that they are about."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator

import pytest

from aenv_ray import config, logs


@pytest.fixture
def ours() -> Iterator[logging.Logger]:
    """Our logger, restored after the test."""
    logger = logging.getLogger("aenv_ray")
    before = logger.handlers, logger.level, logger.propagate
    yield logger
    logger.handlers, logger.level, logger.propagate = before
    logs.events.setLevel(logging.WARNING)


@pytest.fixture
def as_json(monkeypatch: pytest.MonkeyPatch) -> None:
    found = config.Settings(log_format="json")
    monkeypatch.setattr(logs, "settings", lambda: found)


def lines(capsys: pytest.CaptureFixture[str]) -> list[dict[str, object]]:
    return [json.loads(line) for line in capsys.readouterr().err.splitlines()]


def test_a_line_has_the_fields_of_its_block_and_its_own(
    as_json: None, ours: logging.Logger, capsys: pytest.CaptureFixture[str]
) -> None:
    logs.configure("runner")
    with logs.about(episode=3, task="t\n1", owner="ann"):
        logging.getLogger("aenv_ray.sampling").warning(
            "a %s", "word", extra=logs.of_instance("x-1")
        )
    logs.events.info("after")
    first, second = lines(capsys)
    assert first.pop("time")
    assert first == {
        "level": "warning", "component": "runner", "logger": "aenv_ray.sampling",
        "message": "a word", "episode": 3, "task": "t\n1", "instance": "x-1",
        "owner": "ann",
    }  # fmt: skip
    assert "episode" not in second


def test_an_exception_is_in_its_line(
    as_json: None, ours: logging.Logger, capsys: pytest.CaptureFixture[str]
) -> None:
    logs.configure("host")
    try:
        raise ValueError("bad")
    except ValueError:
        ours.exception("failed")
    (line,) = lines(capsys)
    assert "Traceback" in str(line["error"])
    assert line["level"] == "error"


def test_text_logs_leave_the_loggers_alone(
    ours: logging.Logger, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = list(ours.handlers), ours.level
    monkeypatch.setattr(logs, "settings", config.Settings)
    logs.configure("host")
    assert (ours.handlers, ours.level) == before
    assert not logs.events.isEnabledFor(logging.INFO)  # episodes are many
