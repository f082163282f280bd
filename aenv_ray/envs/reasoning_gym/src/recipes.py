"""How a task is generated, and how its data travel as JSON."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any, Final

from pydantic import BaseModel, ConfigDict, Field, ValidationError

DEFAULT_SIZE: Final = 500
"""Size of a data set, as in the package. Items of a few data sets depend on it."""


class Recipe(BaseModel):
    """Identifies one item of a generated data set."""

    model_config = ConfigDict(frozen=True, strict=True)

    dataset: str
    """Name in the package, such as ``chain_sum``."""
    seed: int = Field(default=0, ge=0)
    """Seed of the data set."""
    index: int = Field(default=0, ge=0)
    """Number of the item, from 0."""
    size: int = Field(default=DEFAULT_SIZE, ge=1)
    """Number of items in the data set."""
    config: dict[str, Any] = Field(default_factory=dict)
    """Fields of the data set's configuration class, without ``seed`` and ``size``."""

    @property
    def task_id(self) -> str:
        """Id of the task: data set, seed and index, and a digest of what differs from defaults."""
        name = f"{self.dataset}-{self.seed}-{self.index}"
        if not self.config and self.size == DEFAULT_SIZE:
            return name
        other = json.dumps([self.size, self.config], sort_keys=True).encode()
        return f"{name}-{hashlib.sha256(other).hexdigest()[:8]}"


def recipe_of(task: Any, seed: int | None = None) -> Recipe:
    """Return the recipe in a task's fields.

    Args:
        task: The task's JSON.
        seed: Used if the task has none.

    Raises:
        ValueError: A field is missing or invalid, or `index` is not below `size`.
    """
    if not isinstance(task, Mapping):
        raise ValueError("a task is an object with the fields dataset, seed, index, size, config")
    name = f"task {task.get('id', '')!r}"
    fields = {key: task[key] for key in Recipe.model_fields if task.get(key) is not None}
    if "dataset" not in fields:
        raise ValueError(
            f'{name} names no data set; give {{"dataset": "chain_sum", "seed": 1, "index": 0}}'
        )
    if seed is not None:
        fields.setdefault("seed", seed)
    try:
        recipe = Recipe.model_validate(fields)
    except ValidationError as exc:
        first = exc.errors()[0]
        place = ".".join(str(part) for part in first["loc"])
        raise ValueError(f"{name}: {place}: {first['msg']}") from None
    reserved = {"seed", "size"} & recipe.config.keys()
    if reserved:
        raise ValueError(f"{name}: config has {sorted(reserved)}; make them fields of the task")
    if recipe.index >= recipe.size:
        raise ValueError(
            f"{name}: index {recipe.index} is not below size {recipe.size}; give a larger size"
        )
    return recipe


def encode(value: Any) -> Any:
    """Return `value` as JSON data; `decode` restores its tuples, and keys that are not text."""
    if isinstance(value, tuple):
        return {"$tuple": [encode(item) for item in value]}
    if isinstance(value, list):
        return [encode(item) for item in value]
    if isinstance(value, Mapping):
        if all(isinstance(key, str) and not key.startswith("$") for key in value):
            return {key: encode(item) for key, item in value.items()}
        return {"$items": [[encode(key), encode(item)] for key, item in value.items()]}
    return value


def decode(data: Any) -> Any:
    """Return the value that `encode` has encoded."""
    if isinstance(data, list):
        return [decode(item) for item in data]
    if not isinstance(data, Mapping):
        return data
    if data.keys() == {"$tuple"}:
        return tuple(decode(item) for item in data["$tuple"])
    if data.keys() == {"$items"}:
        return {decode(key): decode(item) for key, item in data["$items"]}
    return {key: decode(item) for key, item in data.items()}
