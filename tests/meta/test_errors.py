"""The error tree: complete, drawn, and the same on both sides of every boundary."""

from __future__ import annotations

import builtins
import copy
import json
import pickle
from typing import Any

import pytest

from aenv_ray import errors
from aenv_ray.errors import (
    ERRORS,
    INFRASTRUCTURE,
    AenvError,
    CapacityExceeded,
    InstanceError,
    InternalError,
    ToolError,
    from_wire,
    to_wire,
)

each_error = pytest.mark.parametrize("cls", ERRORS, ids=lambda cls: cls.__name__)


def make(cls: type[AenvError]) -> AenvError:
    """Return an error with all the context that its class has."""
    context: dict[str, Any] = {"hint": "do that"}
    if issubclass(cls, InstanceError):
        context["instance_id"] = "env-abc"
    if issubclass(cls, ToolError):
        context["tool_name"] = "echo"
    if issubclass(cls, CapacityExceeded):
        context["retry_after_s"] = 7.5
    return cls("what went wrong: ä", **context)


def facts(error: AenvError) -> tuple[Any, ...]:
    return (error.code, error.http_status, error.retryable, error.message, vars(error))


def test_the_list_of_errors_is_complete() -> None:
    defined = {
        value
        for value in vars(errors).values()
        if isinstance(value, type) and issubclass(value, AenvError)
    }
    assert set(ERRORS) == defined
    assert len(ERRORS) == len(defined)


def test_codes_are_unique_and_each_class_has_its_own() -> None:
    assert len({cls.code for cls in ERRORS}) == len(ERRORS)
    assert all("code" in vars(cls) for cls in ERRORS)


@each_error
def test_no_error_hides_a_builtin(cls: type[AenvError]) -> None:
    assert not hasattr(builtins, cls.__name__)


@each_error
def test_the_tree_in_the_docstring_has_each_class_with_its_status(cls: type[AenvError]) -> None:
    lines = (errors.__doc__ or "").splitlines()
    drawn = [line.replace("│", " ").split() for line in lines if cls.__name__ in line]
    (words,) = [w for w in drawn if w[0] == cls.__name__ or w[1:2] == [cls.__name__]]
    if cls not in (AenvError, InstanceError, ToolError):
        assert words[-1] == str(cls.http_status)
        assert ("retryable" in words) == cls.retryable


@each_error
def test_the_tree_is_drawn_under_the_right_base(cls: type[AenvError]) -> None:
    (line,) = [
        text
        for text in (errors.__doc__ or "").splitlines()
        if cls.__name__ in text.replace("│", " ").replace("├─", " ").replace("└─", " ").split()[:1]
    ]
    depth = 0 if cls is AenvError else 1 if cls.__bases__[0] is AenvError else 2
    assert line.index(cls.__name__) == 4 + 3 * depth


@each_error
def test_pickling_keeps_everything(cls: type[AenvError]) -> None:
    error = make(cls)
    for copied in (pickle.loads(pickle.dumps(error)), copy.copy(error), copy.deepcopy(error)):
        assert type(copied) is cls
        assert facts(copied) == facts(error)


@each_error
def test_the_wire_keeps_everything(cls: type[AenvError]) -> None:
    error = make(cls)
    back = from_wire(json.loads(json.dumps(to_wire(error))))
    assert type(back) is cls
    assert facts(back) == facts(error)


@each_error
def test_a_bare_error_has_no_invented_context(cls: type[AenvError]) -> None:
    wire = to_wire(cls("m"))
    assert wire.pop("retry_after_s", 1.0) == 1.0
    assert wire == {"code": cls.code, "message": "m"}
    assert facts(from_wire(wire)) == facts(cls("m"))


@each_error
def test_ray_hands_over_the_same_error(cls: type[AenvError]) -> None:
    """Design D14: Ray wraps it into a class that is both its own and ours."""
    from ray import exceptions as ray_exceptions

    error = make(cls)
    task_error: Any = ray_exceptions.RayTaskError("f", "traceback", error)  # type: ignore[no-untyped-call]
    arrived = pickle.loads(pickle.dumps(task_error)).as_instanceof_cause()
    assert isinstance(arrived, cls)
    assert isinstance(arrived, ray_exceptions.RayTaskError)
    for name, value in vars(error).items():
        assert getattr(arrived, name) == value
    assert (arrived.code, arrived.http_status) == (error.code, error.http_status)
    assert facts(arrived.cause) == facts(error)


def test_timeouts_are_pythons_too() -> None:
    named = {cls.__name__ for cls in ERRORS if issubclass(cls, TimeoutError)}
    assert named == {"ToolTimeout", "DeadlineExceeded"}


def test_no_error_of_a_tool_is_of_the_infrastructure() -> None:
    """Invariant 2, from the other side: what a tool does never voids an episode."""
    assert set(INFRASTRUCTURE) <= set(ERRORS)
    assert not any(issubclass(cls, ToolError) for cls in INFRASTRUCTURE)
    assert all(cls in INFRASTRUCTURE for cls in ERRORS if cls.retryable)


@pytest.mark.parametrize("data", [{}, {"code": "no_such"}, {"code": None}, {"code": "__init__"}])
def test_an_unknown_code_is_an_internal_error(data: dict[str, Any]) -> None:
    assert type(from_wire(data)) is InternalError


def test_the_caller_fills_in_the_instance_where_the_wire_names_none() -> None:
    wire = {"code": "sandbox_lost", "message": "gone"}
    assert vars(from_wire(wire, instance_id="env-a"))["instance_id"] == "env-a"
    named = {**wire, "instance_id": "env-b"}
    assert vars(from_wire(named, instance_id="env-a"))["instance_id"] == "env-b"


def test_a_boundary_attributes_foreign_errors_and_passes_ours() -> None:
    with (
        pytest.raises(CapacityExceeded, match="asking the node: OSError: no") as caught,
        errors.boundary(CapacityExceeded, "asking the node"),
    ):
        raise OSError("no")
    assert isinstance(caught.value.__cause__, OSError)
    ours = make(ToolError)
    with pytest.raises(ToolError) as passed, errors.boundary(CapacityExceeded, "asking"):
        raise ours
    assert passed.value is ours
    with pytest.raises(KeyboardInterrupt), errors.boundary(CapacityExceeded, "asking"):
        raise KeyboardInterrupt
