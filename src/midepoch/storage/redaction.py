"""Removal of credentials from texts that are shown, such as error messages of stores.

``Secrets`` removes the credentials that were given for a store. ``redacted`` removes those that are recognised by their
place or their shape. ``Address`` shows a text that is one address.
"""

from __future__ import annotations

import base64
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import quote, quote_plus, unquote

from midepoch.storage.address import WITHOUT_PORTS, Address, Link, as_address

_MARK = "***"
_LEAST = 4
"""Characters. Shorter values occur in any text. Inside an address they are removed all the same."""

_IN_TEXT = re.compile(r"[A-Za-z][\w+.-]+:/{1,3}[^\s'\"<>`]+")
_NAME = re.compile(r"[\w.-]*")

_SECRET = re.compile(
    r"(?:.*_)?(?:secret|password|passwd|credentials?|connection_string|(?:api|secret|private|account)_?key"
    r"|access_key(?:_id)?|(?:access|auth|session|bearer|refresh|sas|hf)_token)"
)
"""Names of arguments whose values are credentials. ``token`` and ``key`` alone may belong to a text or a table."""

_SHAPES = re.compile(
    r"\bhf_[A-Za-z0-9]{30,}|\b(?:AKIA|ASIA)[A-Z0-9]{16}\b|\bAIza[\w-]{35}|(?<=\bBearer )[\w.~+/=-]{8,}"
)
"""Credentials that are recognised by their shape."""
_BASIC = re.compile(r"(?<=\bBasic )[A-Za-z0-9+/]{4,}=*")

_PUBLIC = re.compile(
    r"region|region_name|aws_region|scheme|account_name|protocol|target_protocol|project|host|port|repo|org|sha"
    r"|revision|repo_type|compression|mode|encoding|fo|path|cache_storage|signature_version|addressing_style"
    r"|endpoint_override|endpoint_url|endpoint"
)
"""Names of options whose values are public, except for the credentials of an address in them."""
_ENVIRONMENT = re.compile(
    r"(?:AWS|AZURE|GOOGLE|GCS|GCP|S3|R2|B2|OSS|MINIO|HF|HUGGING_?FACE|FSSPEC)_(?:.*_)?"
    r"(?:SECRET|TOKEN|PASSWORD|SAS|CONNECTION_STRING|KEY|KEY_ID|SECRET_KEY)"
)


def is_secret(name: str) -> bool:
    """Return True if a value of this name, such as ``api_key`` or ``password``, is a credential."""
    return _SECRET.fullmatch(name.lower().replace("-", "_")) is not None


def redacted(text: str) -> str:
    """Return a text without the credentials of addresses in it and without those recognised by their shape.

    >>> redacted("GET https://me:SECRET@host/a?sig=SECRET failed (see s3://bucket/a@b)")
    'GET https://host/a failed (see s3://bucket/a@b)'
    """
    if ":/" in text:
        text = _IN_TEXT.sub(_without_credentials, text)
    return _BASIC.sub(_without_user, _SHAPES.sub(_MARK, text))


@dataclass(frozen=True)
class Secrets:
    """Credentials that were given for a store."""

    values: tuple[str, ...] = field(default=(), repr=False)

    @classmethod
    def of(cls, *given: Any) -> Secrets:
        """Collect every value that may be secret from addresses and options, at any depth of nesting."""
        forms = {form for value in _values_in(given, "") for form in _forms(value) if len(form) >= _LEAST}
        return cls(tuple(sorted(forms, key=lambda form: (-len(form), form))))

    def clean(self, text: str) -> str:
        """Return a text without these credentials, those of the environment and those of any address."""
        for secret in (*self.values, *_of_environment()):
            text = text.replace(secret, _MARK)
        return redacted(text)


def _without_credentials(match: re.Match[str]) -> str:
    text = match[0]
    address = text.rstrip(").,;:]}")
    return Address(address).public + text[len(address) :]


def _without_user(match: re.Match[str]) -> str:
    """Return the mark for the user and password of a header. Any other word is returned unchanged."""
    encoded = match[0].rstrip("=")
    try:
        return _MARK if b":" in base64.b64decode(encoded + "=" * (-len(encoded) % 4)) else match[0]
    except ValueError:
        return match[0]


def _values_in(given: Any, name: str) -> Iterator[str]:
    if isinstance(given, Address):
        for link in given.links:
            yield from _of_link(link)
    elif isinstance(given, Mapping):
        for key, value in given.items():
            yield from _values_in(value, str(key).lower())
            if _NAME.fullmatch(str(key)) is None:  # a value without its name
                yield str(key)
    elif isinstance(given, (list, tuple, set, frozenset)):
        texts = [each for each in given if isinstance(each, str)]
        if isinstance(given, tuple) and len(texts) > 1:
            yield _basic(texts[0], texts[1])
        for value in given:
            yield from _values_in(value, name or "-")
    elif isinstance(given, bytes):
        yield given.decode("latin-1")
    elif isinstance(given, str):
        yield from _values_in(as_address(name, given), name)
        if _PUBLIC.fullmatch(name) is None:
            yield given
            yield given.rpartition(" ")[2]  # Bearer TOKEN


def _of_link(link: Link) -> Iterator[str]:
    name, password = link.user
    if link.userinfo:
        yield from (password, link.userinfo, _basic(name, password))
    if not password or len(name) >= 2 * _LEAST or link.scheme in WITHOUT_PORTS:  # a token, or the name of a key
        yield name
    if link.dubious:
        yield from (link.dubious.partition(":")[2], link.dubious.partition("/")[2])
    for each in link.suspects:
        yield from _values_in(as_address(each.name, each.value), "")
        if each.is_suspect:
            yield each.value


def _basic(name: str, password: str) -> str:
    return base64.b64encode(f"{name}:{password}".encode()).decode()


def _forms(value: str) -> Iterator[str]:
    """Yield the forms of a value in addresses, JSON and representations."""
    for plain in (value, unquote(value)):
        yield from (plain, repr(plain)[1:-1], plain.replace("/", "\\/"))
        for encoded in (quote(plain), quote(plain, safe=""), quote_plus(plain), quote(plain, safe="/+=@:!$&'()*,;~")):
            yield encoded
            yield re.sub("%..", lambda match: match[0].lower(), encoded)


def _of_environment() -> Iterator[str]:
    for name, value in os.environ.items():
        if len(value) >= 2 * _LEAST and _ENVIRONMENT.fullmatch(name):
            yield from _forms(value)
