"""Every error survives pickling, the wire and Ray's wrapper, and says what to do about it."""

from __future__ import annotations

import ast
import builtins
import inspect
import pickle
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from aenv_ray import errors
from aenv_ray.errors import ERRORS, INFRASTRUCTURE, AenvError, boundary, from_wire, to_wire

CONTEXT: dict[str, Any] = {
    "hint": "do this", "instance_id": "env-1", "tool_name": "echo", "retry_after_s": 7.5,
}  # fmt: skip
ROOT = Path(__file__).resolve().parents[2]
EVERY = pytest.mark.parametrize("cls", ERRORS, ids=lambda cls: cls.__name__)


def full(cls: type[AenvError]) -> AenvError:
    """Return an error with every context field of its class."""
    names = inspect.signature(cls.__init__).parameters.keys() & CONTEXT.keys()
    return cls("what went wrong: ü\n", **{name: CONTEXT[name] for name in names})


@EVERY
def test_pickle_keeps_everything(cls: type[AenvError]) -> None:
    error = full(cls)
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        again = pickle.loads(pickle.dumps(error, protocol))  # what Ray does
        assert type(again) is cls
        assert again.args == error.args
        assert vars(again) == vars(error)


@EVERY
def test_the_wire_keeps_everything(cls: type[AenvError]) -> None:
    error = full(cls)
    again = from_wire(to_wire(error))
    assert type(again) is cls
    assert vars(again) == vars(error)
    assert again.message == error.message
    bare = from_wire(to_wire(cls("only a message")))
    assert type(bare) is cls
    assert bare.hint == cls.way_out


@EVERY
def test_rays_wrapper_keeps_everything(cls: type[AenvError]) -> None:
    """Ray raises a subclass of its class and ours; it must have the instance's attributes."""
    ray_exceptions = pytest.importorskip("ray.exceptions")
    error = full(cls)
    wrapper = ray_exceptions.RayTaskError("f", "traceback", error)
    dual = wrapper.make_dual_exception_instance()
    assert isinstance(dual, cls)
    for name, value in vars(error).items():
        assert getattr(dual, name) == value, name
    assert (dual.code, dual.http_status, dual.retryable) == (
        cls.code, cls.http_status, cls.retryable,
    )  # fmt: skip


@EVERY
def test_only_the_message_is_positional_and_context_has_defaults(cls: type[AenvError]) -> None:
    _, message, *context = inspect.signature(cls.__init__).parameters.values()
    assert message.name == "message"
    for parameter in context:
        assert parameter.kind is parameter.KEYWORD_ONLY
        assert parameter.default is not parameter.empty
        assert parameter.name not in vars(cls), "Ray's wrapper would read the class's value"


@EVERY
def test_every_error_says_what_it_means(cls: type[AenvError]) -> None:
    assert cls.__doc__
    assert 400 <= cls.http_status < 600
    assert cls.__name__ in (errors.__doc__ or "")
    assert not hasattr(builtins, cls.__name__), "it would hide a built-in exception"


def test_the_list_is_complete_and_codes_are_unique() -> None:
    defined = {
        value for value in vars(errors).values()
        if isinstance(value, type) and issubclass(value, AenvError)
    }  # fmt: skip
    assert defined == set(ERRORS)
    assert len({cls.code for cls in ERRORS}) == len(ERRORS)
    for cls in ERRORS:
        assert "code" in vars(cls)


def test_the_tree_is_drawn_as_it_is() -> None:
    """The codes and marks in the drawing match the classes."""
    drawing = errors.__doc__ or ""
    for cls in ERRORS:
        line = next((row for row in drawing.splitlines() if f" {cls.__name__} " in row), "")
        if line.rstrip()[-3:].isdigit():
            assert int(line.rstrip()[-3:]) == cls.http_status, cls
        if line:
            assert ("retryable" in line.split("code")[0]) == cls.retryable, cls


def test_a_foreign_or_damaged_message_is_an_internal_error() -> None:
    for data in ({}, {"code": "os.system"}, {"code": None, "message": None}, {"message": 3}):
        assert type(from_wire(data)) is errors.InternalError


def test_an_instance_error_without_an_id_gets_the_one_it_is_about() -> None:
    lost = from_wire({"code": "sandbox_lost", "message": "m"}, instance_id="env-9")
    assert vars(lost)["instance_id"] == "env-9"
    named = from_wire({"code": "sandbox_lost", "instance_id": "env-1"}, instance_id="env-9")
    assert vars(named)["instance_id"] == "env-1"


def test_timeouts_are_also_pythons() -> None:
    assert issubclass(errors.ToolTimeout, TimeoutError)
    assert issubclass(errors.DeadlineExceeded, TimeoutError)


def test_failures_of_the_infrastructure_are_not_failures_of_a_tool() -> None:
    """Invariant 2."""
    assert not any(issubclass(cls, errors.ToolError) for cls in INFRASTRUCTURE)
    assert not any(issubclass(cls, errors.ConfigError) for cls in INFRASTRUCTURE)


def through(raised: BaseException) -> None:
    """Raise through a boundary."""
    with boundary(errors.FabricUnavailable, "redis"):
        raise raised


def test_a_boundary_attributes_foreign_exceptions_and_passes_ours() -> None:
    with pytest.raises(errors.FabricUnavailable, match=r"redis: OSError: no route") as raised:
        through(OSError("no route"))
    assert isinstance(raised.value.__cause__, OSError)
    for passes in (errors.SandboxLost("gone"), KeyboardInterrupt()):
        with pytest.raises(type(passes)):
            through(passes)


# --- the way out ----------------------------------------------------------------------------------

CORRECTABLE = (
    errors.ConfigError, errors.CatalogConflict, errors.EnvironmentNotFound, errors.ServiceNotFound,
    errors.Unauthorized, errors.Forbidden, errors.SandboxStartFailed, errors.EndpointUnavailable,
)  # fmt: skip
"""What the reader of the message can correct."""
WAY_OUT = re.compile(r"\b(expected|must be|at least)\b")
"""In a message that states the valid values itself."""
ADDED_LATER = {
    "aenv_ray/cluster/kustomize.py": "`_Kustomization.objects` names the file, and kubectl",
    "aenv_ray/client/gateway_http.py": "`_with_hint` names the ways to pass a token",
}


def without_way_out(path: Path) -> Iterator[str]:
    """Yield where a file makes a correctable error with neither a hint nor the valid values."""
    correctable = {cls.__name__ for cls in ERRORS if issubclass(cls, CORRECTABLE)}
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if not isinstance(node, ast.Call) or not node.args:
            continue
        name = ast.unparse(node.func).rpartition(".")[2]
        hinted = any(keyword.arg == "hint" for keyword in node.keywords)
        if name in correctable and not hinted and not WAY_OUT.search(ast.unparse(node.args[0])):
            yield f"{path.relative_to(ROOT)}:{node.lineno}: {ast.unparse(node)}"


def test_errors_that_a_reader_can_correct_say_how() -> None:
    found = {
        str(path.relative_to(ROOT)): rows
        for path in sorted(ROOT.glob("aenv_ray/**/*.py"))
        if (rows := list(without_way_out(path)))
    }
    for name in ADDED_LATER:
        assert found.pop(name, None), f"{name} needs no exception any more"
    assert not found, "\n".join(row for rows in found.values() for row in rows)
