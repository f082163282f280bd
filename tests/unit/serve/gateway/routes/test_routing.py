"""Bodies of requests are parsed or refused."""

from __future__ import annotations

import contextlib
import json
from typing import TypeVar

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel

from aenv_ray.errors import ConfigError
from aenv_ray.serve.gateway.routes.routing import parse_json_object, validated
from aenv_ray.serve.gateway.routes.schemas import CreateManyRequest, CreateRequest

M = TypeVar("M", bound=BaseModel)


def parse_body(model: type[M], raw: bytes) -> M:
    return validated(model, parse_json_object(raw))


@given(st.binary(max_size=200))
def test_any_body_is_parsed_or_refused(raw: bytes) -> None:
    for model in (CreateRequest, CreateManyRequest):
        with contextlib.suppress(ConfigError):
            assert isinstance(parse_body(model, raw), model)


@given(st.text(max_size=20))
def test_any_ttl_is_a_duration_or_refused(text: str) -> None:
    raw = json.dumps({"envName": "probe", "ttl": text}).encode()
    with contextlib.suppress(ConfigError):
        assert parse_body(CreateRequest, raw).ttl in (None, text)


def test_an_error_about_a_body_repeats_none_of_its_values() -> None:
    """Invariant 10: variables are secrets."""
    with pytest.raises(ConfigError) as caught:
        parse_body(CreateRequest, b'{"envName": "e", "environment_variables": {"A": ["hunter2"]}}')
    assert "environment_variables" in caught.value.message
    assert "hunter2" not in caught.value.message
