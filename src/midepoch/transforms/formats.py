"""Presenting a batch: as Python values, numpy, torch, JAX or Arrow.

Two stages, so that worker processes need neither torch nor JAX: ``present`` makes numpy where the format wants arrays,
``finish`` turns those into tensors in the process that hands the batch over.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa

from midepoch.errors import MapError, MidepochError
from midepoch.transforms.arrow_values import to_numpy, to_python
from midepoch.transforms.batch import Batch
from midepoch.transforms.features import Encoded

FORMATS = ("python", "numpy", "torch", "arrow", "jax")


def check_format(kind: str | None) -> str | None:
    if kind is not None and kind not in FORMATS:
        raise ValueError(f"format must be one of {', '.join(map(repr, FORMATS))} or None, got {kind!r}")
    return kind


def present(batch: Batch, kind: str) -> dict[str, Any] | pa.Table:
    """The columns in a format; for torch and JAX as numpy arrays, for ``finish`` to turn into tensors."""
    if kind == "arrow":
        arrays = [_arrow(name, column) for name, column in batch.columns.items()]
        return pa.Table.from_arrays(arrays, names=list(batch.columns))
    if kind == "python":
        return {name: _python(column) for name, column in batch.columns.items()}
    return {
        name: _array(column, kind, nullable=name in batch.nullable, owned=batch.owned)
        for name, column in batch.columns.items()
    }


def finish(presented: Any, kind: str) -> Any:
    """Numpy arrays to tensors of the format, in place of nothing else."""
    if kind == "torch":
        return _each_array(presented, _torch())
    if kind == "jax":
        return _each_array(presented, _jax())
    return presented


def _python(column: Any) -> list[Any]:
    if isinstance(column, pa.Array):
        return to_python(column)
    if isinstance(column, Encoded):
        return column.decode("python")  # type: ignore[no-any-return]
    if isinstance(column, np.ndarray):
        return list(column)
    return list(column)


def _arrow(name: str, column: Any) -> pa.Array:
    if isinstance(column, pa.Array):
        return column
    if isinstance(column, Encoded):
        return column.array
    try:
        if isinstance(column, np.ndarray) and column.ndim > 1:
            return pa.array(list(column))
        return pa.array(column)
    except (pa.ArrowException, TypeError, ValueError) as problem:
        raise MapError(f"column {name!r} made by a map cannot become an Arrow column: {problem}") from None


def _array(column: Any, kind: str, *, nullable: bool, owned: bool) -> Any:
    if isinstance(column, Encoded):
        return column.decode(kind)
    values = to_numpy(column, nullable=nullable, owned=owned) if isinstance(column, pa.Array) else _stack(column)
    if kind == "numpy" and isinstance(values, list):
        return _objects(values)
    return values


def _stack(values: Any) -> Any:
    """What a map returned for a column, as one array if it is numbers of one shape, else as a list."""
    if isinstance(values, (np.ndarray, dict)):
        return values
    if not isinstance(values, (list, tuple)):
        return np.asarray(values) if hasattr(values, "__array__") else list(values)
    first = next((value for value in values if value is not None), None)
    if first is None or isinstance(first, (str, bytes, dict)):
        return list(values)
    if hasattr(first, "__array__") or isinstance(first, (bool, int, float, np.generic)):
        arrays = [np.asarray(np.nan if value is None else value) for value in values]
        return np.stack(arrays) if len({array.shape for array in arrays}) == 1 else arrays
    if isinstance(first, (list, tuple)):
        try:
            arrays = [np.asarray(value) for value in values]
        except ValueError:  # ragged inside
            return list(values)
        if any(array.dtype.kind not in "biuf" for array in arrays):
            return list(values)
        return np.stack(arrays) if len({array.shape for array in arrays}) == 1 else arrays
    return list(values)


def _objects(values: list[Any]) -> Any:
    out = np.empty(len(values), dtype=object)
    out[:] = values
    return out


def _each_array(value: Any, convert: Any) -> Any:
    if isinstance(value, np.ndarray):
        return convert(value) if value.dtype.kind in "biuf" else value.tolist()
    if isinstance(value, dict):
        return {name: _each_array(inner, convert) for name, inner in value.items()}
    if isinstance(value, list) and value and any(isinstance(inner, np.ndarray) for inner in value):
        return [_each_array(inner, convert) for inner in value]
    return value


def _torch() -> Any:
    try:
        import torch
    except ImportError:
        raise MidepochError(
            "the torch format needs torch: `pip install midepoch[torch]`, or call with_format('numpy') first."
        ) from None

    def convert(array: Any) -> Any:
        if not array.flags.writeable:
            array = array.copy()
        return torch.from_numpy(array)

    return convert


def _jax() -> Any:
    try:
        import jax.numpy as jnp
    except ImportError:
        raise MidepochError("the jax format needs JAX: `pip install midepoch[jax]`.") from None
    return jnp.asarray
