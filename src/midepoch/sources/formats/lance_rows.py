"""Rows of a Lance table, read by the package ``lance``: a block is a range of the rows of a fragment.

Deleted rows are not counted. The address and the version of the table, and the number of the fragment, are saved as the
footer of a file.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Sequence
from contextlib import AbstractContextManager
from functools import lru_cache
from typing import Any

import pyarrow as pa

from midepoch.errors import CorruptBlockError, FetchError, MidepochError
from midepoch.sources.dictionaries import plain_type
from midepoch.sources.formats.base import Block, Format, table_of
from midepoch.sources.table_folders import expired, refusals
from midepoch.storage.fsspec_files import options_of
from midepoch.storage.stores import Store

_GONE = re.compile(r"not found|NoSuchKey|does not exist", re.IGNORECASE)
_NETWORK = re.compile(r"request|connect|timed? ?out|HTTP|status|denied|credential", re.IGNORECASE)
_S3 = {
    "access_key": "aws_access_key_id",
    "secret_key": "aws_secret_access_key",
    "session_token": "aws_session_token",
    "region": "aws_region",
}


def lance_package() -> Any:
    """Return the package. Raise MidepochError if it is not installed."""
    try:
        import lance
    except ImportError:
        raise MidepochError("Lance tables are read with the package pylance: `pip install midepoch[lance]`.") from None
    return lance


def lance_table(store: Store, path: str, version: int, manifest: str) -> Any:
    """Return a Lance table at a version. ``manifest``: text that differs for a table that was created again."""
    _ = store.filesystem  # refused in a forked process, in which the threads of lance do not run
    return _table(store.scheme + path, version, manifest, tuple(sorted(reader_options(store).items())), os.getpid())


def reader_options(store: Store) -> dict[str, str]:
    """Return the options of a store under the names of ``lance`` and ``deltalake``."""
    if store.local or store.given.type_name != "s3":
        return {}
    options = options_of(store.given)
    found = {name: str(options[own]) for own, name in _S3.items() if options.get(own)}
    if endpoint := options.get("endpoint_override"):
        scheme = options.get("scheme") or "https"
        found["aws_endpoint"] = f"{scheme}://{endpoint}"
        found |= {"allow_http": "true"} if scheme == "http" else {}
    if options.get("anonymous"):
        found["aws_skip_signature"] = "true"
    if options.get("force_virtual_addressing"):
        found["aws_virtual_hosted_style_request"] = "true"
    return found


@lru_cache(maxsize=8)
def _table(uri: str, version: int, manifest: str, options: tuple[tuple[str, str], ...], process: int) -> Any:  # noqa: ARG001
    return lance_package().dataset(uri, version=version, storage_options=dict(options) or None)


def refusing(store: Store, name: str) -> AbstractContextManager[None]:
    """Return a context that converts errors of ``lance``."""

    def failure(_problem: BaseException, text: str) -> MidepochError:
        if _GONE.search(text):
            return expired(name)
        if not store.local and _NETWORK.search(text):
            return FetchError(f"{name} could not be read: {text}")
        return CorruptBlockError(f"{name} cannot be read: {text}")

    return refusals(store.secrets.clean, failure)


def plain_field(field: pa.Field) -> pa.Field:
    """Return a field without metadata, and with the stored values of types that only ``lance`` knows."""
    kind = field.type
    if isinstance(kind, pa.ExtensionType):
        kind = kind.storage_type
    return pa.field(field.name, plain_type(kind))


def read_rows(fragment: Any, columns: Sequence[str], start: int, stop: int) -> pa.Table:
    """Return columns of a range of the rows of a fragment that are not deleted. Blobs are returned as bytes."""
    return fragment.scanner(
        columns=list(columns), offset=start, limit=stop - start, batch_size=stop - start, blob_handling="all_binary"
    ).to_table()


class LanceFormat(Format):
    """Format whose blocks are ranges of rows of a fragment. ``sources.tables.lance`` scans them with their table."""

    def decode(self, store: Store, block: Block, schema: pa.Schema, columns: Sequence[str]) -> pa.Table:
        about = json.loads(block.footer)
        assert block.end is not None
        name = f"fragment {about['fragment']} of {store.name(about['table'])}"
        with refusing(store, name):
            fragment = lance_table(store, about["table"], about["version"], about["manifest"]).get_fragment(
                about["fragment"]
            )
            if fragment is None:
                raise CorruptBlockError(f"{name} is missing in version {about['version']}.")
            if not columns:
                return table_of([], [], block.end - block.offset)
            table = read_rows(fragment, columns, block.offset, block.end)
        arrays = [_stored(column) for column in table.columns]
        return pa.table(dict(zip(table.schema.names, arrays, strict=True)))


def _stored(column: pa.ChunkedArray) -> pa.ChunkedArray:
    if not isinstance(column.type, pa.ExtensionType):
        return column
    return pa.chunked_array([chunk.storage for chunk in column.chunks], column.type.storage_type)
