"""Tasks in the tables of other libraries: pandas, Arrow, Hugging Face `datasets`, Ray Data."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final

from aenv_ray.errors import ConfigError
from aenv_ray.sampling.tasks.files import table_row
from aenv_ray.trajectories.arrow import optional

HUGGING_FACE: Final = "hf:"
"""Prefix of the name of a data set on the Hugging Face Hub."""


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
            return list(_rows(source.to_pylist()))
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
