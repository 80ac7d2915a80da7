"""Options of object stores, under the names of pyarrow and under those of the readers of tables."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from midepoch._internal.address import Address
from midepoch.sources.addresses import native_options, s3_options

_NAMES = {
    "aws_endpoint_url": "endpoint_override",
    "aws_endpoint": "endpoint_override",
    "aws_default_region": "region",
    "aws_skip_signature": "anonymous",
    "skip_signature": "anonymous",
    "access_key_id": "access_key",
    "secret_access_key": "secret_key",
}
_DROPPED = ("allow_http", "aws_allow_http", "aws_s3_allow_unsafe_rename", "aws_conditional_put", "conditional_put")
_GIVEN = {
    "access_key": "aws_access_key_id",
    "secret_key": "aws_secret_access_key",
    "session_token": "aws_session_token",
    "region": "aws_region",
}


def store_options(uri: str, options: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """Return options as ``from_files`` takes them. Those of ``deltalake`` and ``lance`` are accepted, too."""
    if not options:
        return None
    if not uri.startswith("s3"):
        return dict(options)
    renamed = {_NAMES.get(name.lower(), name): value for name, value in options.items()}
    kept = {name: value for name, value in renamed.items() if name.lower() not in _DROPPED}
    if "anonymous" in kept:
        kept["anonymous"] = str(kept["anonymous"]).lower() in ("true", "1", "yes")
    return kept


def reader_options(uri: str, options: Mapping[str, Any] | None) -> tuple[str, dict[str, str]]:
    """Return the address without credentials, and the options of ``deltalake`` and ``lance`` to read it."""
    address = Address(uri)
    if "://" not in uri or not uri.startswith("s3://"):
        return uri, {name: str(value) for name, value in (options or {}).items()}
    inner, own = native_options(address.links[0])
    found = s3_options({**own, **(store_options(uri, options) or {})})
    given = {name: str(found[old]) for old, name in _GIVEN.items() if found.get(old)}
    if endpoint := found.get("endpoint_override"):
        scheme = found.get("scheme", "https")
        given |= {"aws_endpoint": f"{scheme}://{endpoint}"}
        given |= {"aws_allow_http": "true"} if scheme == "http" else {}
    if found.get("anonymous"):
        given["aws_skip_signature"] = "true"
    if found.get("force_virtual_addressing"):
        given["aws_virtual_hosted_style_request"] = "true"
    return f"s3://{inner}", given


_ICEBERG = {
    "access_key": "s3.access-key-id",
    "secret_key": "s3.secret-access-key",
    "session_token": "s3.session-token",
    "region": "s3.region",
}


def iceberg_properties(uri: str, options: Mapping[str, Any] | None) -> dict[str, str]:
    """Return options as properties of ``pyiceberg``, to read metadata in a store."""
    if not uri.startswith("s3://") and not options:
        return {}
    found = s3_options(store_options("s3://", options) or {})
    given = {name: str(found[own]) for own, name in _ICEBERG.items() if found.get(own)}
    if endpoint := found.get("endpoint_override"):
        given["s3.endpoint"] = f"{found.get('scheme', 'https')}://{endpoint}"
    return given | ({"s3.anonymous": "true"} if found.get("anonymous") else {})


def options_of_iceberg(location: str, properties: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the options of the store in which a table of ``pyiceberg`` is."""
    if not location.startswith(("s3://", "s3a://", "s3n://")):
        return None
    found = {own: properties[name] for own, name in _ICEBERG.items() if properties.get(name)}
    found |= {"endpoint_override": properties["s3.endpoint"]} if properties.get("s3.endpoint") else {}
    return found | ({"anonymous": True} if str(properties.get("s3.anonymous")).lower() == "true" else {})
