"""Episodes as Arrow tables: one column per field, with free-form values as JSON text.

The columns follow from `Episode` and `Step`, so a field that is added there is a column here. They
never depend on the data, so all shards of all runs have the same schema.
"""

from __future__ import annotations

import importlib
import json
import types
import typing
from collections.abc import Iterable, Sequence
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from pydantic import BaseModel, ValidationError

from aenv_ray.errors import ConfigError
from aenv_ray.files import replacing
from aenv_ray.trajectories.export import STEP_COLUMNS
from aenv_ray.trajectories.schema import Episode, Step, check_version

if TYPE_CHECKING:
    import pyarrow as pa

_SCALARS: Final = {str: "string", int: "int64", float: "float64", bool: "bool_"}


def optional(module: str, what: str, extra: str) -> Any:
    """Import a module of an optional extra.

    Raises:
        ConfigError: It is not installed.
    """
    try:
        return importlib.import_module(module)
    except ImportError as exc:
        raise ConfigError(
            f"{what} requires {module}, which cannot be imported: {exc}",
            hint=f"pip install 'aenv-ray[{extra}]'",
        ) from exc


def pyarrow(module: str = "pyarrow") -> Any:
    """Return pyarrow, or a module of it.

    Raises:
        ConfigError: It is not installed.
    """
    return optional(module, "Parquet", "parquet")


def arrow_schema() -> pa.Schema:
    """Return the Arrow schema of episodes."""
    return pyarrow().schema([pyarrow().field(n, t) for n, t in _columns(Episode).items()])


def to_table(episodes: Iterable[Episode]) -> pa.Table:
    """Return episodes as an Arrow table.

    Raises:
        ConfigError: A value does not fit its column, such as a seed of more than 64 bits.
    """
    rows = [_row(Episode, episode.model_dump(mode="json")) for episode in episodes]
    return _table(rows, arrow_schema(), "use JSON Lines")


def write_parquet(episodes: Iterable[Episode], path: Path, *, mode: int | None = None) -> None:
    """Write one Parquet file.

    Args:
        episodes: The episodes.
        path: The file.
        mode: Its permissions, see `replacing`.

    Raises:
        OSError: It cannot be written; what was there is unchanged.
        ConfigError: See `to_table`; likewise.
    """
    _write_table(to_table(episodes), path, compression="zstd", mode=mode)


def write_steps(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """Write the rows of `step_rows` as one Parquet file.

    Raises:
        OSError: It cannot be written; what was there is unchanged.
        ConfigError: A value does not fit its column; likewise.
    """
    types = _columns(Episode) | _columns(Step) | {"step": pyarrow().int64()}
    schema = pyarrow().schema([(name, types[name]) for name in STEP_COLUMNS])
    _write_table(_table(rows, schema, "use CSV"), path, compression="snappy")


def _write_table(table: Any, path: Path, *, compression: str, mode: int | None = None) -> None:
    """Write a Parquet file in one step."""
    parquet = pyarrow("pyarrow.parquet")
    with replacing(path, mode=mode) as descriptor, open(descriptor, "wb", closefd=False) as file:
        parquet.write_table(table, file, compression=compression)


def _table(rows: Sequence[dict[str, Any]], schema: pa.Schema, hint: str) -> pa.Table:
    """Return rows as an Arrow table.

    Raises:
        ConfigError: A value does not fit its column.
    """
    try:
        return pyarrow().Table.from_pylist(rows, schema=schema)
    except (OverflowError, ValueError) as exc:
        raise ConfigError(f"an episode has a value that fits no column: {exc}", hint=hint) from exc


def read_parquet(path: Path) -> list[Episode]:
    """Return the episodes of a Parquet file.

    Raises:
        ConfigError: It cannot be read, or holds something else, or records of a newer version.
    """
    arrow = pyarrow()
    try:
        rows = pyarrow("pyarrow.parquet").read_table(path, partitioning=None).to_pylist()
        episodes = [Episode.model_validate(_record(Episode, row)) for row in rows]
    except (
        OSError, arrow.ArrowException, ValidationError, ValueError, TypeError, AttributeError,
        RecursionError,
    ) as exc:  # fmt: skip
        raise _not_episodes(path, exc) from exc
    for number, episode in enumerate(episodes):
        check_version(episode.schema_version, f"{path}, row {number}")
    return episodes


def has_episodes(path: Path) -> bool:
    """Whether a file is a Parquet file with the columns that every episode has.

    Raises:
        ConfigError: pyarrow is not installed.
    """
    arrow = pyarrow()
    try:
        names = pyarrow("pyarrow.parquet").read_schema(path).names
    except (OSError, arrow.ArrowException):
        return False
    return {name for name, one in Episode.model_fields.items() if one.is_required()} <= {*names}


def count_rows(path: Path) -> int:
    """Return the number of episodes in a Parquet file, without reading them.

    Raises:
        ConfigError: It cannot be read.
    """
    arrow = pyarrow()
    try:
        rows: int = pyarrow("pyarrow.parquet").read_metadata(path).num_rows
    except (OSError, arrow.ArrowException) as exc:
        raise _not_episodes(path, exc) from exc
    return rows


def _not_episodes(path: Path, cause: Exception) -> ConfigError:
    return ConfigError(
        f"{path}: not a Parquet file of episodes: {cause}",
        hint="give a file that aenv-ray wrote, or JSON Lines of episodes",
    )


def _is_scalar(annotation: Any) -> str | None:
    """Return the Arrow type of a scalar field; None if the field has free-form values."""
    union = isinstance(annotation, types.UnionType) or typing.get_origin(annotation) is typing.Union
    choices = typing.get_args(annotation) if union else (annotation,)
    plain = [one for one in choices if one is not type(None)]
    if len(plain) != 1 or not isinstance(plain[0], type):
        return None
    return "string" if issubclass(plain[0], Enum) else _SCALARS.get(plain[0])


def _columns(model: type[BaseModel]) -> dict[str, Any]:
    arrow = pyarrow()
    columns: dict[str, Any] = {}
    for name, field in model.model_fields.items():
        if field.annotation == tuple[Step, ...]:
            columns[name] = arrow.list_(arrow.struct(list(_columns(Step).items())))
        else:
            columns[name] = getattr(arrow, _is_scalar(field.annotation) or "string")()
    return columns


def _row(model: type[BaseModel], record: dict[str, Any]) -> dict[str, Any]:
    row: dict[str, Any] = {}
    for name, field in model.model_fields.items():
        value = record[name]
        if field.annotation == tuple[Step, ...]:
            row[name] = [_row(Step, step) for step in value]
        elif _is_scalar(field.annotation) or value is None:
            row[name] = value
        else:
            row[name] = json.dumps(value)
    return row


def _record(model: type[BaseModel], row: dict[str, Any]) -> dict[str, Any]:
    record: dict[str, Any] = {}
    for name, value in row.items():
        field = model.model_fields.get(name)
        if field is None:
            continue
        if field.annotation == tuple[Step, ...]:
            record[name] = [_record(Step, step) for step in value]
        elif value is not None and not _is_scalar(field.annotation):
            record[name] = json.loads(value)
        else:
            record[name] = value
    return record
