"""One schema for files that may differ: the union of their columns, where nulls are, and how wide a row is."""

from __future__ import annotations

from collections.abc import Sequence

import pyarrow as pa
import pyarrow.types as pt

from midepoch.errors import FormatError
from midepoch.sources.dictionaries import plain_type, with_children
from midepoch.sources.formats import Scanned
from midepoch.sources.formats.inferred import widest
from midepoch.sources.partitions import Values
from midepoch.sources.stores import Entry, Store


def unified(
    store: Store, entries: Sequence[Entry], scans: Sequence[Scanned], added: pa.Schema | None, *, text: bool
) -> pa.Schema:
    """One schema for all files: the union of their columns."""
    if scans[0].inferred:
        schema = widest(store.name(entries[0].path), [scan.schema for scan in scans], text=text)
        schema = pa.schema([field.with_type(pa.string()) if field.type == pa.null() else field for field in schema])
    else:
        fields: dict[str, tuple[pa.Field, str]] = {}
        for entry, scan in zip(entries, scans, strict=True):
            for field in scan.schema:
                plain = field.with_type(_free(plain_type(field.type)))
                before, where = fields.setdefault(field.name, (plain, store.name(entry.path)))
                if before.type == pa.null():
                    fields[field.name] = (plain, store.name(entry.path))
                elif plain.type not in (before.type, pa.null()):
                    raise FormatError(
                        f"the files do not have one schema: column {field.name!r} is {before.type} in {where} but "
                        f"{plain.type} in {store.name(entry.path)}. Load them as separate datasets, or write one again."
                    )
        schema = pa.schema(
            [field.with_nullable(True) for field, _ in fields.values()], metadata=scans[0].schema.metadata
        )
    if added is not None:
        known = [field for field in schema if field.name not in added.names]
        schema = pa.schema([*known, *added], metadata=schema.metadata)
    if not len(schema):
        raise FormatError(f"{store.name(entries[0].path)}: no columns were found.")
    return schema


def _free(kind: pa.DataType) -> pa.DataType:
    """A type without promises that nothing inside is null: files differ in those."""
    if not (pt.is_struct(kind) or pt.is_list(kind) or pt.is_large_list(kind) or pt.is_fixed_size_list(kind)):
        return kind
    fields = [kind.field(i) for i in range(kind.num_fields)]
    return with_children(kind, [each.with_type(_free(each.type)).with_nullable(True) for each in fields])


def nullable_paths(
    scans: Sequence[Scanned], schema: pa.Schema, values: Sequence[Values], added: pa.Schema | None
) -> frozenset[tuple[str, ...]]:
    """Where any file has a null: also where it lacks the column, or its folder says null."""
    constant = set(added.names) if added is not None else set()
    found = {path for path in set().union(*(scan.nullable for scan in scans)) if path[0] not in constant}
    found.update((name,) for name in constant if any(dict(value)[name] is None for value in values))
    names = set(schema.names) - constant
    for scan in scans:
        found.update((name,) for name in names.difference(scan.schema.names))
    return frozenset(found)


def row_bytes(scans: Sequence[Scanned], schema: pa.Schema) -> float:
    """About how many bytes a row takes in memory: what files say, and at least the width of what has one."""
    told = sum(scan.decoded_bytes for scan in scans) / max(1, sum(sum(scan.rows) for scan in scans))
    return max(told, float(sum(_width(field.type) for field in schema)))


def _width(kind: pa.DataType) -> float:
    if isinstance(kind, pa.BaseExtensionType):
        return _width(kind.storage_type)
    if pa.types.is_fixed_size_list(kind):
        return float(kind.list_size) * _width(kind.value_type)
    if pa.types.is_struct(kind):
        return sum(_width(kind.field(i).type) for i in range(kind.num_fields))
    try:
        return float(kind.bit_width) / 8
    except ValueError:  # text and lists
        return 4.0
