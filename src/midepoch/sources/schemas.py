"""Common schema of files that may differ: the union of their columns, the nullable paths, and the row width."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

import pyarrow as pa
import pyarrow.types as pt

from midepoch.errors import FormatError
from midepoch.sources.dictionaries import children, plain_type, undecodable, with_children, without_views
from midepoch.sources.formats import Scanned
from midepoch.sources.formats.arrow_ipc import nodes
from midepoch.sources.formats.base import Values
from midepoch.sources.formats.lines import widest


def usable(file: str, schema: pa.Schema) -> None:
    """Raise FormatError for columns that cannot be read, or told apart: columns or fields of a struct with one name."""
    paths = Counter(path for path, _ in nodes(schema))
    if twice := sorted({repr(".".join(path)) for path, count in paths.items() if count > 1}):
        raise FormatError(f"{file}: several columns are named {', '.join(twice)}. Rename them in the file.")
    for column in schema:
        if (inner := undecodable(column.type)) is not None:
            raise FormatError(
                f"{file}: column {column.name!r} contains dictionary-encoded values inside a {inner}, which cannot be "
                "read. Write them as plain values."
            )


def difference(files: Sequence[str], schemas: Sequence[pa.Schema]) -> str | None:
    """Return sentences about two files with different columns, or None if all have the same ones."""
    expected = schemas[0]
    for file, schema in zip(files, schemas, strict=True):
        if expected.equals(schema):
            continue
        types, others = (dict(zip(each.names, each.types, strict=True)) for each in (expected, schema))
        for name in {**types, **others}:
            a, b = types.get(name, "missing"), others.get(name, "missing")
            if a != b:
                return (
                    f"the files do not have one schema: column {name!r} is {a} in {files[0]} but {b} in {file}. "
                    "Load them as separate datasets, or write one of them again."
                )
        if expected.names != schema.names:
            return f"the files list their columns in different orders: {files[0]} and {file}."
    return None


def unified(files: Sequence[str], scans: Sequence[Scanned], added: pa.Schema | None, *, text: bool) -> pa.Schema:
    """Return one schema for all files: the union of their columns."""
    if scans[0].inferred:
        schema = widest(files[0], [scan.schema for scan in scans], text=text)
        schema = pa.schema([field.with_type(pa.string()) if field.type == pa.null() else field for field in schema])
    else:
        schema = _joined(files, [scan.schema for scan in scans])
    if added is not None:
        known = [field for field in schema if field.name not in added.names]
        schema = pa.schema([*known, *added], metadata=schema.metadata)
    if not len(schema):
        raise FormatError(f"{files[0]}: no columns were found: is it empty? Check the program that wrote it.")
    return schema


def _joined(files: Sequence[str], schemas: Sequence[pa.Schema]) -> pa.Schema:
    """Return the union of the columns of these files, each with a type that holds the values of all."""
    fields: dict[str, tuple[pa.Field, str]] = {}
    for i, (file, schema) in enumerate(zip(files, schemas, strict=True)):
        if i and schema.equals(schemas[i - 1]):
            continue
        usable(file, schema)
        for field in schema:
            plain = field.with_type(_free(plain_type(field.type)))
            before, where = fields.setdefault(field.name, (plain, file))
            if before.type == plain.type:
                continue
            kind = _common(before.type, plain.type)
            if kind is None:
                raise FormatError(
                    f"the files do not have one schema: column {field.name!r} is {before.type} in {where} but "
                    f"{plain.type} in {file}. Load them as separate datasets, or write one again."
                )
            fields[field.name] = (before.with_type(kind), file if before.type == pa.null() else where)
    return pa.schema([field.with_nullable(True) for field, _ in fields.values()], metadata=schemas[0].metadata)


def _common(first: pa.DataType, second: pa.DataType) -> pa.DataType | None:
    """Return the type that holds values of both, as pyarrow promotes them: the wider number, the larger offsets, the
    fields of both structs. None if there is none.
    """
    for a, b in ((first, second), (without_views(first), without_views(second))):
        try:
            schemas = [pa.schema([pa.field("", kind)]) for kind in (a, b)]
            return _free(pa.unify_schemas(schemas, promote_options="permissive").field(0).type)
        except pa.ArrowException:
            continue
    return None


def _free(kind: pa.DataType) -> pa.DataType:
    """Return a type in which every inner field is nullable: files differ in this."""
    if not _is_nested(kind):
        return kind
    return with_children(kind, [each.with_type(_free(each.type)).with_nullable(True) for each in children(kind)])


def _is_nested(kind: pa.DataType) -> bool:
    return bool(pt.is_struct(kind) or pt.is_list(kind) or pt.is_large_list(kind) or pt.is_fixed_size_list(kind))


def nullable_paths(
    scans: Sequence[Scanned], schema: pa.Schema, values: Sequence[Values], added: pa.Schema | None
) -> frozenset[tuple[str, ...]]:
    """Return the paths at which any file has a null.

    A file that lacks a column or a field has nulls there, and so has a folder whose partition value is null.
    """
    constant = set(added.names) if added is not None else set()
    types = {field.name: field.type for field in schema if field.name not in constant}
    paths: set[tuple[str, ...]] = {(n,) for n in constant if any(dict(value)[n] is None for value in values)}
    for scan in scans:
        own = dict(zip(scan.schema.names, scan.schema.types, strict=True))
        paths.update((name,) for name in types.keys() - own.keys())
        other = {n for n, kind in own.items() if n in types and not kind.equals(types[n], check_metadata=True)}
        for name, *inner in scan.nullable:
            if name in types:
                paths.add((name, *(_renamed(inner, types[name]) if name in other else inner)))
        for name in other:
            paths.update(_lacking((name,), plain_type(own[name]), types[name]))
    return frozenset(paths)


def _renamed(path: Sequence[str], kind: pa.DataType) -> list[str]:
    """Return a path inside a column with the names of the common type: writers name the values of lists differently."""
    if isinstance(kind, pa.BaseExtensionType):
        return _renamed(path, kind.storage_type)
    if not path or not kind.num_fields:
        return list(path)
    inner = kind.field(path[0]) if pt.is_struct(kind) else kind.field(0)
    return [inner.name, *_renamed(path[1:], inner.type)]


def _lacking(path: tuple[str, ...], own: pa.DataType, common: pa.DataType) -> Iterator[tuple[str, ...]]:
    """Yield the paths of struct fields that a file does not have."""
    if not (_is_nested(own) and _is_nested(common)):
        return
    if not pt.is_struct(common):
        yield from _lacking((*path, common.field(0).name), own.field(0).type, common.field(0).type)
        return
    theirs = {field.name: field.type for field in children(own)}
    for field in children(common):
        inner = (*path, field.name)
        if field.name in theirs:
            yield from _lacking(inner, theirs[field.name], field.type)
        else:
            yield inner


def row_bytes(scans: Sequence[Scanned], schema: pa.Schema) -> float:
    """Return the approximate bytes of a row in memory: the size that files report, and at least the fixed widths."""
    reported = sum(scan.decoded_bytes for scan in scans) / max(1, sum(sum(scan.rows) for scan in scans))
    return max(reported, float(sum(_width(field.type) for field in schema)))


def _width(kind: pa.DataType) -> float:
    if isinstance(kind, pa.BaseExtensionType):
        return _width(kind.storage_type)
    if pt.is_fixed_size_list(kind):
        return float(kind.list_size) * _width(kind.value_type)
    if pt.is_struct(kind):
        return sum(_width(kind.field(i).type) for i in range(kind.num_fields))
    try:
        return float(kind.bit_width) / 8
    except ValueError:  # text and lists
        return 4.0
