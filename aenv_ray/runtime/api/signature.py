"""From a Python function to a validator of its arguments and a JSON Schema of them."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any, get_type_hints

from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model
from pydantic.errors import PydanticInvalidForJsonSchema, PydanticSchemaGenerationError

from aenv_ray.runtime.api.docstrings import describe
from aenv_ray.runtime.faults import Fault

_CONFIG = ConfigDict(extra="forbid", arbitrary_types_allowed=False, protected_namespaces=())


class Signature:
    """The validated parameters of one registered function.

    Args:
        function: What was registered; sync or async.

    Raises:
        TypeError: A parameter has a type that JSON cannot carry, or takes no name.
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
                    continue  # a wrapper, which passes on what it is given: by name, all of it
                raise TypeError(
                    f"{_label(function)}: arguments come by name, so *{parameter.name} would "
                    "always be empty; take a list instead"
                )
            if parameter.kind is parameter.POSITIONAL_ONLY:
                raise TypeError(
                    f"{_label(function)}: parameter {parameter.name!r} is positional-only; "
                    "arguments come by name"
                )
            annotation = hints.get(parameter.name, Any)
            default = ... if parameter.default is parameter.empty else parameter.default
            # A field may not start with an underscore nor shadow BaseModel's own names.
            field = f"p_{parameter.name}"
            self._names[field] = parameter.name
            info = Field(default, alias=parameter.name)
            doc = argument_docs.get(parameter.name)
            if doc is not None:  # given as None it would take the place of one in the hint
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
            name: What to call the function in the message.
            arguments: JSON data from the caller.

        Raises:
            Fault: ``tool_input_invalid``, naming each argument and what is wrong with it.
        """
        try:
            model = self._model.model_validate(arguments)
        except ValidationError as exc:
            problems = "; ".join(
                f"{'.'.join(str(part) for part in error['loc']) or 'arguments'}: {error['msg']}"
                for error in exc.errors(include_url=False, include_input=False)
            )
            takes = ", ".join(self.names) or "no arguments"
            raise Fault(
                "tool_input_invalid",
                f"arguments of {name!r} do not fit its schema: {problems}",
                f"{name} takes {takes}",
                tool_name=name,
            ) from None
        bound = {parameter: getattr(model, field) for field, parameter in self._names.items()}
        if self.accepts_any:
            bound.update(model.model_extra or {})
        return bound


def _label(function: Callable[..., Any]) -> str:
    """Return a function's name, or that of the class of another callable."""
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
    """Drop the generated class name and the titles that only repeat a property's name."""
    schema.pop("title", None)
    for name, prop in schema.get("properties", {}).items():
        if prop.get("title", "").replace(" ", "_").lower() == name.lower().strip("_"):
            prop.pop("title")
    schema.setdefault("properties", {})
    return schema
