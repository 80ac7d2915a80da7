"""What users give, as the rest works with it."""

from __future__ import annotations

from collections.abc import Mapping
from os import PathLike
from typing import Any
from urllib.parse import unquote

from midepoch.address import refuse_lost_slash
from midepoch.checkpoint.arrays import is_array
from midepoch.checkpoint.directory import Directory
from midepoch.checkpoint.local import LocalDirectory
from midepoch.checkpoint.restoring import Wanted


def wanted_of(pipeline: Any, model: Any, optimizer: Any, extra: Mapping[str, Any] | None, with_rng: bool) -> Wanted:
    """What to restore into."""
    return Wanted(pipeline, given_models(model, optimizer), extra or {}, with_rng)


def given_models(model: Any, optimizer: Any) -> dict[str, Any]:
    """Those of the two that were given, by name."""
    return {name: thing for name, thing in (("model", model), ("optimizer", optimizer)) if thing is not None}


def open_directory(directory: str | PathLike[str], storage_options: Mapping[str, Any] | None) -> Directory:
    """The folder or the object store that is meant."""
    refuse_lost_slash(directory)
    address = str(directory)
    if "://" in address and not address.startswith("file://"):
        from midepoch.checkpoint.remote import RemoteDirectory

        return RemoteDirectory(address, storage_options)
    if storage_options:
        raise ValueError(f"storage_options were given, but {address!r} is a local folder")
    return LocalDirectory(unquote(address.removeprefix("file://")) if address.startswith("file://") else directory)


def plain_metadata(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Metadata as JSON: numbers of any library become Python's. TypeError that names what cannot be kept."""

    def convert(value: Any, where: str) -> Any:
        if is_array(value) and not getattr(value, "ndim", 0):
            value = value.item()
        if isinstance(value, float) and (value != value or value in (float("inf"), float("-inf"))):
            return str(value)
        if value is None or isinstance(value, (bool, int, float, str)):
            return value
        if isinstance(value, Mapping):
            return {str(key): convert(inner, f"{where}.{key}") for key, inner in value.items()}
        if isinstance(value, (list, tuple)):
            return [convert(inner, f"{where}.{number}") for number, inner in enumerate(value)]
        if isinstance(value, PathLike):
            return str(value)
        raise TypeError(f"{where}: metadata is plain JSON, got a {type(value).__qualname__}; use extra for arrays")

    if not isinstance(metadata, Mapping):
        raise TypeError(f"metadata is a dict, got a {type(metadata).__qualname__}")
    found: dict[str, Any] = convert(metadata, "metadata")
    return found
