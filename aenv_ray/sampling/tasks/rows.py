"""Rows of task files, and of the tables of other libraries.

Files are JSON Lines, also compressed by gzip, JSON, CSV and Parquet. Tables are those of pandas,
Arrow, Hugging Face `datasets` and Ray Data.
"""

from __future__ import annotations

import csv
import gzip
import json
import sys
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final, TextIO

from aenv_ray.errors import ConfigError
from aenv_ray.trajectories.arrow import optional, pyarrow

LocatedRow = tuple[str, Any]
"""Where a row stands, for messages, and its data."""

NESTED: Final = ("setup", "reward", "submission", "reference", "wrong", "instance")
"""Fields of a task that are objects or lists; a table's column may hold them as JSON text."""
HUGGING_FACE: Final = "hf:"
"""Prefix of the name of a data set on the Hugging Face Hub."""


def file_rows(path: Path) -> Iterator[LocatedRow]:
    """Yield the rows of a task file, whose format is told by its suffix; JSON Lines if by none.

    Raises:
        ConfigError: The file cannot be read, or a line is malformed; the message names the line.
    """
    read = _READERS.get(path.suffix.lower(), _json_lines)
    try:
        yield from read(path)
    except FileNotFoundError:
        raise ConfigError(
            f"there is no task file {path}",
            hint="name a file, a directory of tasks, or hf:NAME:SPLIT for a data set of the Hub",
        ) from None
    except (OSError, EOFError, UnicodeDecodeError, zlib.error) as exc:
        raise ConfigError(
            f"task file {path} cannot be read: {exc}",
            hint="give a readable file: .jsonl, .jsonl.gz, .json, .csv or .parquet",
        ) from exc


def table_row(row: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Return a table's row as a task: empty fields are absent, nested ones may be JSON text.

    Raises:
        ConfigError: A nested field is text, but not JSON.
    """
    given = {name: value for name, value in row.items() if value is not None and value != ""}
    for name in NESTED:
        value = given.get(name)
        if isinstance(value, str):
            given[name] = parsed(value, f"{where}: {name}")
        elif name in given:
            given[name] = _without_nulls(value)
    return given


def parsed(text: str, where: str) -> Any:
    """Return JSON data.

    Raises:
        ConfigError: The text is not JSON.
    """
    try:
        return json.loads(text)
    except ValueError as exc:
        said = str(exc)
        if isinstance(exc, json.JSONDecodeError) and "\n" not in text.strip():
            said = f"{exc.msg}: column {exc.colno}"  # `where` names the line
        raise ConfigError(f"{where}: {said}", hint="correct the JSON there") from None
    except RecursionError:
        raise ConfigError(
            f"{where}: nested too deeply",
            hint="flatten the data, or store it as JSON text in a string",
        ) from None


def _without_nulls(value: Any) -> Any:
    """Return a value without the nulls that a table adds so that all its rows have one type."""
    if isinstance(value, Mapping):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [_without_nulls(item) for item in value]
    return value


def _arrow_rows(table: Any) -> Iterator[dict[str, Any]]:
    """Yield the rows of an Arrow table or batch, with maps as dicts."""
    maps = {field.name: field.type for field in table.schema if _has_maps(field.type)}
    for row in table.to_pylist():
        yield row | {name: _with_dicts(row[name], kind) for name, kind in maps.items()}


def _has_maps(kind: Any) -> bool:
    inner = (kind.field(number).type for number in range(kind.num_fields))
    return pyarrow("pyarrow.types").is_map(kind) or any(map(_has_maps, inner))


def _with_dicts(value: Any, kind: Any) -> Any:
    """Return a value of an Arrow type, which has the items of a map as pairs, with dicts."""
    types = pyarrow("pyarrow.types")
    if value is None or not _has_maps(kind):
        return value
    if types.is_map(kind):
        return {key: _with_dicts(item, kind.item_type) for key, item in value}
    if types.is_struct(kind):
        fields = (kind.field(number) for number in range(kind.num_fields))
        return {field.name: _with_dicts(value[field.name], field.type) for field in fields}
    return [_with_dicts(item, kind.value_type) for item in value]


def _text_of(path: Path) -> TextIO:
    if path.suffix.lower() == ".gz":
        return gzip.open(path, "rt", encoding="utf-8-sig", newline="\n")
    return path.open(encoding="utf-8-sig", newline="\n")


def _json_lines(path: Path) -> Iterator[LocatedRow]:
    with _text_of(path) as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                where = f"{path}, line {number}"
                yield where, parsed(line, where)


def _json(path: Path) -> Iterator[LocatedRow]:
    """Read a list of tasks; a file with one task in each line is accepted too."""
    if not path.read_text(encoding="utf-8-sig").lstrip().startswith("["):
        yield from _json_lines(path)
        return
    for number, data in enumerate(parsed(path.read_text(encoding="utf-8-sig"), str(path))):
        yield f"{path}, task {number}", data


def _csv(path: Path) -> Iterator[LocatedRow]:
    csv.field_size_limit(sys.maxsize)  # setups and references are long
    with path.open(encoding="utf-8-sig", newline="") as file:
        reader = csv.DictReader(file, strict=True)
        first = 1  # line of the row that is being read, which may have several
        try:
            for row in reader:
                where = f"{path}, line {max(first, 2)}"
                if None in row:
                    raise ConfigError(
                        f"{where}: more fields than the header has",
                        hint="put text with commas or line breaks in double quotes",
                    )
                yield where, table_row(row, where)
                first = reader.line_num + 1
        except csv.Error as exc:
            raise ConfigError(
                f"{path}, line {first}: {exc}",
                hint="quote text that has commas, quotes or line breaks",
            ) from None


def _parquet(path: Path) -> Iterator[LocatedRow]:
    arrow, parquet = pyarrow(), pyarrow("pyarrow.parquet")
    number = 0
    try:
        with parquet.ParquetFile(path) as file:
            for batch in file.iter_batches():
                for row in _arrow_rows(batch):
                    where = f"{path}, row {number}"
                    number += 1
                    yield where, table_row(row, where)
    except arrow.ArrowException as exc:
        raise ConfigError(
            f"task file {path} cannot be read: {exc}", hint="write it again with pyarrow or pandas"
        ) from exc


_READERS: Final[Mapping[str, Callable[[Path], Iterator[LocatedRow]]]] = {
    ".json": _json,
    ".csv": _csv,
    ".parquet": _parquet,
}


# --- tables ---------------------------------------------------------------------------------------


def table_of(source: Any) -> Iterable[dict[str, Any]] | None:
    """Return the rows of a table as tasks; None if `source` is not a table.

    A table in memory gives a list. A stream, such as an ``IterableDataset`` or a Ray Dataset, gives
    an iterator that reads as it is iterated.

    Raises:
        ConfigError: It is a group of tables, or a row is malformed.
    """
    library, kind = type(source).__module__.partition(".")[0], type(source).__name__
    match library, kind:
        case "datasets", "DatasetDict" | "IterableDatasetDict":
            raise ConfigError(
                f"the tasks are a {kind} with the splits {', '.join(source)}",
                hint='give one of them, such as tasks["train"]',
            )
        case "pandas", "DataFrame":
            return list(_rows(source.astype(object).where(source.notna(), None).to_dict("records")))
        case "pyarrow", "Table":
            return list(_rows(_arrow_rows(source)))
        case "datasets", "Dataset":
            return list(_rows(source))
        case "datasets", "IterableDataset":
            return _rows(source)
        case "ray", "Dataset" | "MaterializedDataset":
            return _rows(source.iter_rows())
    return None


def from_hugging_face(name: str) -> Any:
    """Return a data set of the Hugging Face Hub, or of a directory.

    Args:
        name: ``NAME``, ``NAME:SPLIT`` or ``NAME@CONFIGURATION:SPLIT``; the default split is train.

    Raises:
        ConfigError: It cannot be loaded.
    """
    datasets = optional("datasets", f"{HUGGING_FACE}{name}", "data")
    path, _, split = name.partition(":")
    path, _, configuration = path.partition("@")
    try:
        return datasets.load_dataset(path, configuration or None, split=split or "train")
    except Exception as exc:
        raise ConfigError(
            f"data set {HUGGING_FACE}{name} cannot be loaded: {type(exc).__name__}: {exc}",
            hint="write it as hf:NAME:SPLIT or hf:NAME@CONFIGURATION:SPLIT; on a machine that does "
            "not reach the Hub, give a downloaded file",
        ) from exc


def _rows(rows: Iterable[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    for number, row in enumerate(rows):
        yield table_row({str(name): _plain(value) for name, value in row.items()}, f"row {number}")


def _plain(value: Any) -> Any:
    """Return a value with Python's own types in place of numpy's."""
    if isinstance(value, Mapping):
        return {name: _plain(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value.tolist() if type(value).__module__ == "numpy" else value
