"""The arguments of a function: their validator, their JSON Schema and their descriptions."""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Mapping
from typing import Any, get_type_hints

from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model
from pydantic.errors import PydanticInvalidForJsonSchema, PydanticSchemaGenerationError

from aenv_ray.runtime.faults import Fault

_CONFIG = ConfigDict(extra="forbid", arbitrary_types_allowed=False, protected_namespaces=())
_SECTION = re.compile(
    r"(args|arguments|parameters|params|returns?|yields?|raises|examples?|notes?|attributes)\s*:?",
    re.IGNORECASE,
)
_ARGUMENT_SECTION = re.compile(r"(args|arguments|parameters|params)\s*:?", re.IGNORECASE)
_GOOGLE_ARGUMENT = re.compile(r"\*{0,2}(\w+)\s*(?:\([^)]*\))?\s*:\s*(.*)")
_NUMPY_ARGUMENT = re.compile(r"\*{0,2}(\w+)\s*(?::\s*\S.*)?")
_SPHINX_ARGUMENT = re.compile(r":param\s+(?:[\w\[\], ]+\s+)?(\w+)\s*:\s*(.*)")


class Signature:
    """The validated parameters of one registered function.

    Args:
        function: Sync or async.

    Raises:
        TypeError: A parameter has a type without a JSON Schema, or cannot be passed by name.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self.description, argument_docs = describe(function)
        self.accepts_any = False
        fields: dict[str, Any] = {}
        self._names: dict[str, str] = {}
        hints = _type_hints(function)
        parameters = inspect.signature(function).parameters.values()
        passes_on = any(p.kind is p.VAR_KEYWORD for p in parameters)
        for parameter in parameters:
            if parameter.kind is parameter.VAR_KEYWORD:
                self.accepts_any = True
                continue
            if parameter.kind is parameter.VAR_POSITIONAL:
                if passes_on:
                    continue  # a wrapper that passes on all its arguments, which come by name
                raise TypeError(
                    f"{_label(function)}: arguments are passed by name, so *{parameter.name} would "
                    "always be empty; take a list instead"
                )
            if parameter.kind is parameter.POSITIONAL_ONLY:
                raise TypeError(
                    f"{_label(function)}: parameter {parameter.name!r} is positional-only; "
                    "arguments are passed by name"
                )
            annotation = hints.get(parameter.name, Any)
            default = ... if parameter.default is parameter.empty else parameter.default
            # A field must not start with an underscore or shadow an attribute of BaseModel.
            field = f"p_{parameter.name}"
            self._names[field] = parameter.name
            info = Field(default, alias=parameter.name)
            doc = argument_docs.get(parameter.name)
            if doc is not None:  # a description of None would override one in the type hint
                info = Field(default, alias=parameter.name, description=doc)
            fields[field] = (annotation, info)
        config = ConfigDict(**{**_CONFIG, "extra": "allow" if self.accepts_any else "forbid"})
        try:
            self._model: type[BaseModel] = create_model(
                f"{_label(function)}Arguments", __config__=config, **fields
            )
            self.schema = _clean(self._model.model_json_schema(by_alias=True))
        except (PydanticSchemaGenerationError, PydanticInvalidForJsonSchema) as exc:
            raise TypeError(f"{_label(function)}: {exc}") from exc

    @property
    def names(self) -> list[str]:
        """The parameters' names, in order."""
        return list(self._names.values())

    def bind(self, name: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Return validated keyword arguments.

        Args:
            name: Name of the function, for the error message.
            arguments: JSON data from the caller.

        Raises:
            Fault: ``tool_input_invalid``: names each wrong argument and the reason. Its
                ``argument`` is the one whose value does not fit, if nothing else is wrong; or
                empty.
        """
        try:
            model = self._model.model_validate(arguments)
        except ValidationError as exc:
            errors = exc.errors(include_url=False, include_input=False)
            problems = "; ".join(
                f"{'.'.join(str(part) for part in error['loc']) or 'arguments'}: {error['msg']}"
                for error in errors
            )
            wrong = {".".join(str(part) for part in error["loc"][:1]) for error in errors}
            only = wrong.pop() if len(wrong) == 1 else ""
            takes = ", ".join(self.names) or "no arguments"
            raise Fault(
                "tool_input_invalid",
                f"arguments of {name!r} do not fit its schema: {problems}",
                f"{name} takes {takes}",
                tool_name=name,
                argument=only if only in arguments and only in self.names else "",
            ) from None
        bound = {parameter: getattr(model, field) for field, parameter in self._names.items()}
        if self.accepts_any:
            bound.update(model.model_extra or {})
        return bound


def _label(function: Callable[..., Any]) -> str:
    """Return the name of a function, or of the class of another callable."""
    return str(getattr(function, "__name__", type(function).__name__))


def _type_hints(function: Callable[..., Any]) -> dict[str, Any]:
    if isinstance(function, functools.partial):
        return _type_hints(function.func)
    target = function if inspect.isroutine(function) else type(function).__call__
    try:
        return get_type_hints(target, include_extras=True)
    except NameError as exc:
        raise TypeError(f"{_label(function)}: its type hints do not resolve: {exc}") from exc


def _clean(schema: dict[str, Any]) -> dict[str, Any]:
    """Remove the generated class name, and titles that only repeat the name of a property."""
    schema.pop("title", None)
    for name, prop in schema.get("properties", {}).items():
        if prop.get("title", "").replace(" ", "_").lower() == name.lower().strip("_"):
            prop.pop("title")
    schema.setdefault("properties", {})
    return schema


# --- docstrings ---------------------------------------------------------------------------------


def describe(function: Callable[..., Any]) -> tuple[str | None, dict[str, str]]:
    """Return a docstring's text before its first section, and the text for each argument.

    Understands the Google, NumPy and Sphinx styles. The text is None without a docstring.
    """
    text = inspect.getdoc(function)
    if not text:
        return None, {}
    lines = text.splitlines()
    body: list[str] = []
    arguments: dict[str, str] = {}
    index = 0
    while index < len(lines):
        line = lines[index]
        sphinx = _SPHINX_ARGUMENT.match(line.strip())
        if sphinx:
            arguments[sphinx[1]] = sphinx[2].strip()
        elif _is_section(lines, index):
            end = _section_end(lines, index)
            if _ARGUMENT_SECTION.fullmatch(line.strip()):
                arguments.update(_arguments(lines[index + 1 : end]))
            index = end
            continue
        elif not line.strip().startswith((":return", ":rtype", ":raise")):
            body.append(line)
        index += 1
    return "\n".join(body).strip() or None, arguments


def _is_section(lines: list[str], index: int) -> bool:
    line = lines[index]
    if line.startswith((" ", "\t")) or not _SECTION.fullmatch(line.strip()):
        return False
    following = lines[index + 1] if index + 1 < len(lines) else ""
    return line.rstrip().endswith(":") or bool(re.fullmatch(r"-{3,}", following.strip()))


def _section_end(lines: list[str], start: int) -> int:
    underlined = start + 1 < len(lines) and re.fullmatch(r"-{3,}", lines[start + 1].strip())
    for index in range(start + 1, len(lines)):
        if _is_section(lines, index):
            return index
        flush_left = lines[index].strip() and not lines[index].startswith((" ", "\t"))
        if flush_left and not underlined:
            return index
    return len(lines)


def _arguments(lines: list[str]) -> dict[str, str]:
    numpy = bool(lines) and bool(re.fullmatch(r"-{3,}", lines[0].strip()))
    block = inspect.cleandoc("\n".join(lines[1:] if numpy else lines)).splitlines()
    found: dict[str, str] = {}
    name = ""
    for line in block:
        if not line.strip():
            continue
        indented = line.startswith((" ", "\t"))
        match = (
            None
            if indented
            else (_NUMPY_ARGUMENT if numpy else _GOOGLE_ARGUMENT).fullmatch(line.strip())
        )
        if match:
            name = match[1]
            found[name] = "" if numpy else match[2].strip()
        elif name:
            found[name] = f"{found[name]} {line.strip()}".strip()
    return {key: value for key, value in found.items() if value}
