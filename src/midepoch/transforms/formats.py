"""Formats of a batch: Python values, numpy, torch, JAX or Arrow.

There are two stages, so that worker processes need neither torch nor JAX. ``present`` makes numpy arrays. ``finish``
converts them to tensors in the process that delivers the batch.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache, reduce
from typing import Any

import numpy as np
import pyarrow as pa

from midepoch._internal.recycled import empty
from midepoch._internal.values import loaded
from midepoch.errors import ColumnError, CorruptBlockError, MapError, MidepochError
from midepoch.storage.damage import is_damage
from midepoch.transforms.arrow_values import plain_values, to_numpy, to_python
from midepoch.transforms.batch import Batch, Encoded, as_rows

_log = logging.getLogger("midepoch")
ITEMS = "items"
"""Format of map-style datasets: a row is an item of any type, and batches are those of torch's ``default_collate``."""
ITEM = "item"
"""The column of such items. A row with other columns beside it is a dict."""


def default_collated(rows: list[Any]) -> Any:
    """Return a batch of items, as torch's ``default_collate`` makes it."""
    try:
        from torch.utils.data import default_collate
    except ImportError:
        raise MidepochError(
            "batches of a map-style dataset are made by torch's default_collate: `pip install midepoch[torch]`, or "
            "pass collate_fn."
        ) from None
    try:
        return default_collate(rows)
    except (TypeError, RuntimeError, ValueError, AttributeError) as problem:
        raise MapError(
            f"torch's default_collate cannot make a batch of {len(rows)} items like {rows[0]!r:.60}: "
            f"{str(problem).rstrip('.')}. Return tensors of one shape, numbers or texts from "
            "the dataset, or pass collate_fn."
        ) from problem


Allocate = Callable[[tuple[int, ...], np.dtype[Any]], "np.ndarray[Any, Any] | None"]
"""Returns an uninitialised array in the memory in which a batch is sent, or None if there is no room."""


def room(shape: tuple[int, ...], dtype: np.dtype[Any], allocate: Allocate | None) -> Any:
    """Return an uninitialised array, in the given memory if it has room."""
    found = None if allocate is None else allocate(shape, dtype)
    return empty(shape, dtype) if found is None else found


FORMATS = ("python", "numpy", "torch", "arrow", "jax")


_ALIASES = {"np": "numpy", "pt": "torch", "pytorch": "torch", "pa": "arrow", "pyarrow": "arrow"}
"""Short names of the formats in Hugging Face datasets."""


def check_format(kind: str | None) -> str | None:
    """Return the name of a format. Raise ValueError for others."""
    kind = kind if kind is None or isinstance(kind, str) else repr(kind)
    name = kind if kind is None or kind in FORMATS else _ALIASES.get(kind)
    if name is None and kind is not None:
        ways = {"pandas": "batch.to_pandas(), or ds.to_pandas()", "polars": "polars.from_arrow(batch)"}
        way = ways.get({"pd": "pandas", "pl": "polars"}.get(kind, kind))
        hint = f". Use with_format('arrow') and {way}." if way else ""
        raise ValueError(f"format must be one of {', '.join(map(repr, FORMATS))} or None, got {kind!r}{hint}")
    return name


def present(batch: Batch, kind: str, allocate: Allocate | None = None) -> dict[str, Any] | pa.Table:
    """Return the columns in a format. For torch and JAX they are numpy arrays, which ``finish`` converts to tensors.

    ``allocate``: where to put what is assembled of the values that functions returned.
    """
    if kind == "arrow":
        arrays = [arrow_column(name, column) for name, column in batch.columns.items()]
        return pa.Table.from_arrays(arrays, names=list(batch.columns))
    if kind == ITEMS:
        return default_collated(present_rows(batch, kind))
    if kind == "python":
        return {name: _python(name, column, batch) for name, column in batch.columns.items()}
    return {name: _array(name, column, kind, batch, allocate) for name, column in batch.columns.items()}


def present_rows(batch: Batch, kind: str) -> list[Any]:
    """Return one finished object per row. Columns of a map are converted row by row: no type depends on another row."""
    if kind == "arrow":
        table: Any = present(batch, kind)
        return [table.slice(i, 1) for i in range(len(batch))]
    if kind == ITEMS and list(batch.columns) == [ITEM]:
        return _python(ITEM, batch.columns[ITEM], batch)
    if kind not in ("python", ITEMS):
        made = {name: column for name, column in batch.columns.items() if isinstance(column, (list, tuple))}
        read = present(batch.with_columns({n: c for n, c in batch.columns.items() if n not in made}), kind)
        shown = {n: [_single(value) for value in made[n]] if n in made else read[n] for n in batch.columns}
        return as_rows(finish(shown, kind), len(batch))
    return as_rows(present(batch, "python"), len(batch))


def unshared(batch: Batch) -> Batch:
    """Return the batch with copies of columns that a map returned, so that writes do not affect a second attempt."""
    made = {name: own_copy(c) for name, c in batch.columns.items() if not isinstance(c, (pa.Array, Encoded))}
    return replace(batch, columns={**batch.columns, **made}) if made else batch


def can_repeat(batch: Batch) -> bool:
    """Return True if a function can be called again for these rows, because its writes do not change them."""
    return all(
        isinstance(column, (pa.Array, Encoded))  # every call gets new values
        or (type(column) is list and set(map(type, column)) <= _FIXED_TYPES)
        for column in batch.columns.values()
    )


_FIXED = (str, bytes, int, float, bool, complex, type(None))
_FIXED_TYPES = frozenset(_FIXED)


def own_copy(value: Any) -> Any:
    """Return a copy of a mutable value."""
    if type(value) is list:
        # Lists usually have values of one type. Long lists of numbers or texts need no deep copy.
        first = next((inner for inner in value if inner is not None), None)
        return value[:] if isinstance(first, _FIXED) else [own_copy(inner) for inner in value]
    if type(value) is dict:
        return {name: own_copy(inner) for name, inner in value.items()}
    if type(value) is tuple:
        return tuple(own_copy(inner) for inner in value)
    if isinstance(value, _FIXED):
        return value
    try:
        return copy.deepcopy(value)
    except Exception:  # cannot be copied: a generator, a tensor inside an autograd graph
        return value


def _single(value: Any) -> Any:
    """Return one value of a map, as a numpy array or scalar if it is numeric."""
    if isinstance(value, (bool, int, float, np.generic)):
        return np.asarray(value)[()]
    return array_of(value) if isinstance(value, (list, tuple)) else value


def array_of(value: Any) -> Any:
    """Return a list of numbers as an array, anything else unchanged."""
    try:
        array = np.asarray(value)
    except ValueError:  # ragged
        return value
    if array.size and array.dtype.kind == "f" and all(type(number) is int for number in value):
        return value  # too large for numpy's integers: floats would change the values
    return array if array.dtype.kind in "biufc" else value


def prepare(kind: str) -> None:
    """Import torch if a format needs it: 1.7 s. Not JAX, since processes that have imported it do not fork workers."""
    if kind == "torch":
        _torch()


def finish(presented: Any, kind: str) -> Any:
    """Convert numpy arrays to tensors of the format. Everything else is unchanged."""
    if kind not in ("torch", "jax"):
        return presented
    return _each_array(presented, _torch() if kind == "torch" else _jax())


def as_tensor(array: Any) -> Any:
    """Return an array as a tensor of torch."""
    return _torch()(array)


def _python(name: str, column: Any, batch: Batch) -> list[Any]:
    if isinstance(column, dict):  # a struct that a map made of columns
        return as_rows({key: _python(name, inner, batch) for key, inner in column.items()}, len(batch))
    if isinstance(column, Encoded):
        return _decoded(name, column, "python", batch)  # type: ignore[no-any-return]
    if not isinstance(column, pa.Array):
        return list(column)
    return _checked(name, column, batch, to_python)  # type: ignore[no-any-return]


def _checked(name: str, column: pa.Array, batch: Batch, convert: Callable[[pa.Array], Any]) -> Any:
    """Convert a column. Raise CorruptBlockError if it contains bytes that are invalid for its type."""
    try:
        return convert(column)
    except OverflowError as problem:
        raise ColumnError(
            f"column {name!r} has a time that Python cannot represent ({problem}). Leave the column out, or use "
            'with_format("numpy") or with_format("arrow").'
        ) from None
    except (UnicodeDecodeError, pa.ArrowException) as problem:
        raise _unreadable(name, batch, lambda i: readable(column.slice(i, 1)), problem) from None


def _decoded(name: str, column: Encoded, kind: str, batch: Batch) -> Any:
    try:
        return column.decode(kind)
    except Exception as problem:
        if isinstance(problem, MidepochError) or not is_damage(problem, of_row=True):
            raise
        raise _unreadable(name, batch, column.decodes, problem) from problem


class UnreadableError(CorruptBlockError):
    """A value of a row cannot be read. ``row``: its number in the dataset, from which the engine finds the file."""

    def __init__(self, text: str, row: int | None = None) -> None:
        super().__init__(text)
        self.row = row


def _unreadable(name: str, batch: Batch, is_good: Callable[[int], bool], problem: Exception) -> UnreadableError:
    row = int(batch.rows[next((i for i in range(len(batch)) if not is_good(i)), 0)])
    return UnreadableError(
        f"column {name!r} of row {row} of the dataset cannot be read: {type(problem).__name__}: {problem}. "
        'Restore the file, or open it with on_error="skip" to continue without such rows.',
        row,
    )


def readable(column: pa.Array) -> bool:
    """Return True if all values are valid for their type: text is UTF-8, offsets are in range."""
    try:
        column.validate(full=True)
    except pa.ArrowException as problem:
        if not is_damage(problem):
            raise
        return False
    return True


def arrow_column(name: str, column: Any) -> pa.Array:
    if isinstance(column, pa.Array):
        return column
    if isinstance(column, Encoded):
        return column.array
    if isinstance(column, dict):
        return pa.StructArray.from_arrays([arrow_column(name, inner) for inner in column.values()], names=list(column))
    try:
        return pa.array(plain_values(column))
    except (pa.ArrowException, TypeError, ValueError) as problem:
        raise MapError(
            f"column {name!r} made by a map cannot become an Arrow column: {problem}. Return numbers, texts, bytes, or "
            "lists, arrays and dicts of them, such as numpy.asarray(image)."
        ) from None


def _array(name: str, column: Any, kind: str, batch: Batch, allocate: Allocate | None = None) -> Any:
    if isinstance(column, Encoded):
        return _decoded(name, column, kind, batch)
    if not isinstance(column, pa.Array):
        values = _stack(column, kind, allocate)
        if isinstance(values, list) and name not in _unlike:
            _note_unlike(name, values)
    else:
        paths, times = batch.nullable.get(name, frozenset()), kind == "numpy"
        values = _checked(name, column, batch, lambda found: to_numpy(found, paths, owned=batch.owned, times=times))
    return _objects(values) if kind == "numpy" and isinstance(values, list) else values


def _note_unlike(name: str, values: list[Any]) -> None:
    """Log, once for each column, that arrays have different shapes, or that values are texts and numbers."""
    first = values[0] if values else None
    if getattr(first, "ndim", 0) > 1:
        shapes = sorted({tuple(value.shape) for value in values if hasattr(value, "shape")})
        if len(shapes) > 1:
            _unlike.add(name)
            _log.warning(
                "column %r has values of different shapes, such as %s and %s: batches have a list of them. Resize "
                "images, decode(%r, size=224), or pass a collate_fn.",
                name,
                *map(list, shapes[:2]),
                name,
            )
    elif isinstance(first, (str, int, float)):
        types = {type(value) for value in values}
        if str in types and types & {int, float, bool}:
            _unlike.add(name)
            _log.warning(
                "column %r has values of different types (%s): batches have a list of them. Return one "
                "type for every row.",
                name,
                ", ".join(sorted(each.__name__ for each in types)),
            )


_unlike: set[str] = set()
"""The columns for which this was logged."""


def _stack(values: Any, kind: str, allocate: Allocate | None = None) -> Any:
    """Return a column of a map as one array if it contains numbers of one shape, else as a list."""
    if isinstance(values, (np.ndarray, dict)):
        return values
    torch = loaded("torch")
    if torch is not None and isinstance(values, torch.Tensor):
        return values.detach() if kind == "torch" else values.detach().cpu().numpy()
    if not isinstance(values, (list, tuple)):
        return np.asarray(values) if hasattr(values, "__array__") else list(values)
    first = next((value for value in values if value is not None), None)
    if first is None or isinstance(first, (str, bytes, dict)):
        return list(values)
    if torch is not None and isinstance(first, torch.Tensor):
        return _stack_tensors(values, kind, torch, allocate)
    if isinstance(first, (bool, int, float, complex, np.generic)):
        return _stack_numbers(values, kind)
    if isinstance(first, (list, tuple)):
        values = [array_of(value) for value in values]
    elif hasattr(first, "__array__"):
        values = [value if value is None else np.asarray(value) for value in values]
    arrays = [value for value in values if isinstance(value, np.ndarray)]
    if len(arrays) != len(values) or len({a.shape for a in arrays}) > 1:
        return list(values)
    out = None
    if allocate is not None and len({a.dtype for a in arrays}) == 1 and arrays[0].dtype.isnative:
        out = allocate((len(arrays), *arrays[0].shape), arrays[0].dtype)
    return np.stack(arrays, out=out)


def _stack_numbers(values: Any, kind: str) -> Any:
    """Return one array of numbers with NaN for None, or the unchanged list if that would change a value."""
    if not all(
        value is None or isinstance(value, (bool, int, float, complex, np.number, np.bool_)) for value in values
    ):
        torch = loaded("torch")
        mixed = torch is not None and any(isinstance(value, torch.Tensor) for value in values)
        return _stack_tensors(values, kind, torch) if mixed else list(values)
    array = np.array([np.nan if value is None else value for value in values])
    integers = all(isinstance(value, (bool, int, np.integer, np.bool_)) for value in values)
    return array if array.dtype.kind in ("biu" if integers else "biufc") else list(values)


def _stack_tensors(values: Any, kind: str, torch: Any, allocate: Allocate | None = None) -> Any:
    tensors: list[Any] = [value if value is None else torch.as_tensor(value).detach() for value in values]
    if any(value is None for value in tensors) or len({value.shape for value in tensors}) > 1:
        return tensors
    wide = reduce(torch.promote_types, (value.dtype for value in tensors))
    stacked = _stacked([value.to(wide) for value in tensors], torch, allocate)
    return stacked if kind == "torch" else stacked.cpu().numpy()


def _stacked(tensors: list[Any], torch: Any, allocate: Allocate | None) -> Any:
    """Return ``torch.stack(tensors)``. For transposed tensors, such as decoded images, numpy takes 220 µs instead of
    490 µs for each of 500 × 400.
    """
    if not all(tensor.device.type == "cpu" and tensor.layout == torch.strided and tensor.ndim for tensor in tensors):
        return torch.stack(tensors)
    try:
        arrays = [tensor.numpy() for tensor in tensors]
    except (TypeError, RuntimeError):  # numpy has no bfloat16
        return torch.stack(tensors)
    shape, dtype = (len(arrays), *arrays[0].shape), arrays[0].dtype
    out = torch.from_numpy(room(shape, dtype, allocate))
    if all(tensor.stride(-1) == 1 for tensor in tensors):
        return torch.stack(tensors, out=out)
    np.stack(arrays, out=out.numpy())
    return out


def _objects(values: list[Any]) -> Any:
    out = np.empty(len(values), dtype=object)
    out[:] = values
    return out


def _each_array(value: Any, convert: Any) -> Any:
    if isinstance(value, (np.ndarray, np.generic)):
        if value.dtype.kind in "biufc":
            return convert(np.asarray(value))
        # Times of a map become Python objects, since tensors cannot hold them. Those have no nanoseconds.
        kind, _, unit = value.dtype.name.partition("[")
        return (value.astype(f"{kind}[us]") if unit in ("ns]", "ps]", "fs]", "as]") else value).tolist()
    if isinstance(value, dict):
        return {name: _each_array(inner, convert) for name, inner in value.items()}
    if isinstance(value, list) and any(isinstance(inner, (np.ndarray, np.generic, list)) for inner in value):
        return [_each_array(inner, convert) for inner in value]
    return value


@lru_cache(maxsize=1)
def _torch() -> Any:
    try:
        import torch
    except ImportError:
        raise MidepochError(
            "the torch format needs torch: `pip install midepoch[torch]`, or call with_format('numpy') first."
        ) from None

    from_numpy = torch.from_numpy

    def convert(array: Any) -> Any:
        flags = array.flags
        if flags.carray and array.dtype.isnative:  # the common case
            return from_numpy(array)
        backwards = not flags.c_contiguous and any(stride < 0 for stride in array.strides)
        if not flags.writeable or not array.dtype.isnative or backwards:
            array = np.array(array, dtype=array.dtype.newbyteorder("="), order="C")
        return from_numpy(array)

    return convert


def _jax() -> Any:
    try:
        import jax.numpy as jnp
    except ImportError:
        raise MidepochError("the jax format needs JAX: `pip install midepoch[jax]`.") from None

    def convert(array: Any) -> Any:
        check_fits_jax(array)
        return jnp.asarray(array)

    return convert


def check_fits_jax(array: Any) -> None:
    """Raise MidepochError if JAX would change integers, because its types are smaller."""
    from jax.dtypes import canonicalize_dtype

    kept = canonicalize_dtype(array.dtype)
    if kept != array.dtype and array.dtype.kind in "iu" and array.size:
        bounds = np.iinfo(kept)
        if array.min() < bounds.min or array.max() > bounds.max:
            raise MidepochError(
                f"JAX would convert {array.dtype} values to {kept}, which cannot hold all of them. "
                'Call jax.config.update("jax_enable_x64", True), or use with_format("numpy").'
            )
