"""Text without credentials: the one place where addresses, and what stores say about them, become text.

An address may hold a key (``s3://KEY:SECRET@bucket``), a signature (``?X-Amz-Signature=…``) or a token, also in each
part of a chain (``zip://a::https://user:password@host/b.zip``). ``Address`` shows none of them, so that data keeps its
name when they are rotated. ``Secrets`` removes those that it knows from any other text.
"""

from __future__ import annotations

import base64
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple
from urllib.parse import quote, quote_plus, unquote

_MARK = "***"
_LEAST = 4
"""Characters. Shorter values are words of every text; where they stand in an address they are removed all the same."""

_LINKS = re.compile(r"::(?=[A-Za-z][\w+.-]*(?::/|::))")
_SCHEME = re.compile(r"([A-Za-z][\w+.-]+):(/{1,3})(.*)", re.DOTALL)
_IN_TEXT = re.compile(r"[A-Za-z][\w+.-]+:/{1,3}[^\s'\"<>`]+")
_ADDRESS = re.compile(r"(?:s3a?|gc?s|az|abfss?|https?|hf|s?ftp|smb|memory):/", re.IGNORECASE)
_AUTHORITY_ENDS = re.compile(r"/|\?[\w.-]+=")
_PIECES = re.compile(r"(?=[?&#;])")
_NAME = re.compile(r"[\w.-]*")
_PORT = re.compile(r"[^:]*:\d*|\[[^\]]*\](?::\d*)?")
_NAMES_BEFORE_AT = {"github", "git"}  # org:repo@revision
_CONTAINERS_BEFORE_AT = {"az", "abfs", "abfss", "wasb", "wasbs"}  # container@account, no password
_WITHOUT_PORTS = {"s3", "s3a", "gs", "gcs", "az", "abfs", "abfss"}

_CREDENTIAL = re.compile(
    r"(?:.*_)?(?:secret|password|passwd|pwd|token|signature|sig|sas|credentials?|auth|authorization|jwt"
    r"|(?:api|access|account|secret|private|shared|signing|encryption)_?key(?:_?id)?|awsaccesskeyid|googleaccessid"
    r"|connection_?string)|key|x_(?:amz|goog|oss)_.*"
)
"""Names of parameters of an address whose values are credentials, in lower case and with ``_`` for ``-``."""
_SIGNED = re.compile(r"(?:x_(?:amz|goog|oss)_)?sig(?:nature)?")
_OF_SIGNATURES = re.compile(
    r"expires|policy|key_pair_id|x_id"
    r"|s[veptri]|ss|srt|spr|sip|sdd|ses|skoid|sktid|skt|ske|sks|skv|saoid|suoid|scid"  # of Azure
)
"""Parameters that change with the signature of an address, and say nothing about the data."""

_SECRET = re.compile(
    r"(?:.*_)?(?:secret|password|passwd|credentials?|connection_string|(?:api|secret|private|account)_?key"
    r"|access_key(?:_id)?|(?:access|auth|session|bearer|refresh|sas|hf)_token)"
)
"""Names of arguments whose values are credentials; ``token`` and ``key`` alone may be those of a text or a table."""

_SHAPES = re.compile(
    r"\bhf_[A-Za-z0-9]{30,}|\b(?:AKIA|ASIA)[A-Z0-9]{16}\b|\bAIza[\w-]{35}|(?<=\bBearer )[\w.~+/=-]{8,}"
    r"|(?<=\bBasic )[A-Za-z0-9+/]{8,}=*"
)
"""Credentials that are known by their shape."""

_PUBLIC = re.compile(
    r"region|region_name|aws_region|scheme|account_name|protocol|target_protocol|project|host|port|repo|org|sha"
    r"|revision|repo_type|compression|mode|encoding|fo|path|cache_storage|signature_version|addressing_style"
    r"|endpoint_override|endpoint_url|endpoint"
)
"""Names of options whose values are no secrets, but for the credentials of an address in them."""
_ENVIRONMENT = re.compile(
    r"(?:AWS|AZURE|GOOGLE|GCS|GCP|S3|R2|B2|OSS|MINIO|HF|HUGGING_?FACE|FSSPEC)_(?:.*_)?"
    r"(?:SECRET|TOKEN|PASSWORD|SAS|CONNECTION_STRING|KEY|KEY_ID|SECRET_KEY)"
)


class Link(NamedTuple):
    """One part of an address: ``scheme://place``, with the credentials that stood in it."""

    scheme: str
    place: str
    userinfo: str = ""
    path: str = ""
    """The place without parameters."""
    parameters: tuple[tuple[str, str], ...] = ()
    """All of the query, decoded; ``place`` holds those of them that are no credentials."""

    @property
    def user(self) -> tuple[str, str]:
        """The name and the password before the ``@``, decoded."""
        name, _, password = self.userinfo.partition(":")
        return unquote(name), unquote(password)

    @property
    def signature(self) -> dict[str, str]:
        """The parameters that are credentials."""
        return {name: value for name, value in self.parameters if _is_credential(name, self._signed)}

    @property
    def _signed(self) -> bool:
        return any(_SIGNED.fullmatch(_spelt(name)) for name, _ in self.parameters)


@dataclass(frozen=True, repr=False)
class Address:
    """A path or URL that is shown without its credentials; ``reveal`` is for whoever opens it.

    >>> Address("s3://KEY:SECRET@bucket/run?secret_key=SECRET")
    's3://bucket/run'
    >>> str(Address("zip://a.csv::https://me:SECRET@host/b.zip?X-Amz-Signature=SECRET&X-Amz-Expires=60"))
    'zip://a.csv::https://host/b.zip'
    """

    raw: str

    def reveal(self) -> str:
        """The address as it was given."""
        return self.raw

    @cached_property
    def public(self) -> str:
        """The address without its credentials: the same, whatever they are."""
        return "::".join(map(_public, _LINKS.split(self.raw)))

    @cached_property
    def parts(self) -> tuple[Address, ...]:
        """The addresses that a chain is made of."""
        return tuple(map(Address, _LINKS.split(self.raw)))

    @cached_property
    def links(self) -> tuple[Link, ...]:
        """The parts of the address that have a scheme."""
        return tuple(link for part in _LINKS.split(self.raw) if (link := _parsed(part)) is not None)

    def __str__(self) -> str:
        return self.public

    def __repr__(self) -> str:
        return repr(self.public)


def is_address(path: str | os.PathLike[str]) -> bool:
    """Whether a path is an address, also one that pathlib took a slash from."""
    return _ADDRESS.match(os.fsdecode(path)) is not None


def refuse_lost_slash(path: object) -> None:
    """Raise ValueError for an address that pathlib has made a local path of, which would show its credentials.

    >>> from pathlib import Path
    >>> refuse_lost_slash(Path("s3://KEY:SECRET@bucket/run"))
    Traceback (most recent call last):
    ValueError: s3:/bucket/run is an address that pathlib took a slash from. Pass it as a text.
    """
    if isinstance(path, os.PathLike) and is_address(path):
        address = Address(os.fsdecode(path))
        raise ValueError(f"{address} is an address that pathlib took a slash from. Pass it as a text.")


def is_secret(name: str) -> bool:
    """Whether a value of this name, such as ``api_key`` or ``password``, is a credential."""
    return _SECRET.fullmatch(_spelt(name)) is not None


def redacted(text: str) -> str:
    """A text without the credentials of the addresses in it, and without any that are known by their shape.

    >>> redacted("GET https://me:SECRET@host/a?sig=SECRET failed (see s3://bucket/a@b)")
    'GET https://host/a failed (see s3://bucket/a@b)'
    """
    if ":/" in text:
        text = _IN_TEXT.sub(_without_credentials, text)
    return _SHAPES.sub(_MARK, text)


@dataclass(frozen=True)
class Secrets:
    """The credentials that were given for a store."""

    values: tuple[str, ...] = field(default=(), repr=False)

    @classmethod
    def of(cls, *given: Any) -> Secrets:
        """All that may be secret in addresses and in options, however they are nested."""
        forms = {form for value in _values_in(given, "") for form in _forms(value) if len(form) >= _LEAST}
        return cls(tuple(sorted(forms, key=lambda form: (-len(form), form))))

    def clean(self, text: str) -> str:
        """A text without them, without those in the environment, and without the credentials of any address."""
        for secret in (*self.values, *_of_environment()):
            text = text.replace(secret, _MARK)
        return redacted(text)


def _public(part: str) -> str:
    link, match = _parsed(part), _SCHEME.fullmatch(part)
    return part if link is None or match is None else f"{match[1]}:{match[2]}{link.place}"


def _parsed(part: str) -> Link | None:
    if (match := _SCHEME.fullmatch(part)) is None:
        return None
    scheme = match[1].lower()
    if scheme == "file":
        return Link(scheme, match[3], path=match[3])
    userinfo, rest = _split_user(scheme, match[3])
    path, *pieces = _PIECES.split(rest)
    plain = path + "".join(piece for piece in pieces if "=" not in piece)
    link = Link(scheme, plain, userinfo, plain, tuple(_pair(piece) for piece in pieces if "=" in piece))
    hidden = link.signature
    kept = [_shown(piece) for piece in pieces if "=" not in piece or _pair(piece)[0] not in hidden]
    if kept and kept[0].startswith("&"):
        kept[0] = "?" + kept[0][1:]
    return link._replace(place=path + "".join(kept))


def _split_user(scheme: str, rest: str) -> tuple[str, str]:
    """What stands before the ``@`` that ends the credentials, and what comes after it."""
    authority = _AUTHORITY_ENDS.split(rest, maxsplit=1)[0]
    if scheme in _NAMES_BEFORE_AT or (scheme in _CONTAINERS_BEFORE_AT and ":" not in authority):
        return "", rest
    if "@" in authority:
        userinfo, _, host = authority.rpartition("@")
        return userinfo, host + rest[len(authority) :]
    has_port = scheme not in _WITHOUT_PORTS and _PORT.fullmatch(authority) is not None
    if ":" in authority and not has_port and "@" in rest:  # a password with a "/" that was not encoded
        userinfo, _, place = rest.rpartition("@")
        return userinfo, place
    return "", rest


def _pair(piece: str) -> tuple[str, str]:
    name, _, value = piece[1:].partition("=")
    return unquote(name), unquote(value)


def _shown(piece: str) -> str:
    """A parameter, without the credentials of an address that is its value."""
    name, value = _pair(piece) if "=" in piece else ("", "")
    public = _as_address(name, value).public
    return piece if public == value or f"https://{value}" == public else f"{piece[0]}{name}={quote(public, safe='/:')}"


def _as_address(name: str, value: str) -> Address:
    return Address(value if "://" in value or "endpoint" not in name else f"https://{value}")


def _is_credential(name: str, signed: bool) -> bool:
    spelt = _spelt(name)
    return _CREDENTIAL.fullmatch(spelt) is not None or (signed and _OF_SIGNATURES.fullmatch(spelt) is not None)


def _spelt(name: str) -> str:
    return name.lower().replace("-", "_")


def _without_credentials(match: re.Match[str]) -> str:
    text = match[0]
    address = text.rstrip(").,;:]}")
    return Address(address).public + text[len(address) :]


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
        yield from _values_in(_as_address(name, given), name)
        if _PUBLIC.fullmatch(name) is None:
            yield given
            yield given.rpartition(" ")[2]  # Bearer TOKEN


def _of_link(link: Link) -> Iterator[str]:
    name, password = link.user
    if link.userinfo:
        yield from (password, link.userinfo, _basic(name, password))
    if not password or len(name) >= 2 * _LEAST or link.scheme in _WITHOUT_PORTS:  # a token, or the name of a key
        yield name
    for parameter, value in link.parameters:
        yield from _values_in(_as_address(parameter, value), parameter)
    yield from link.signature.values()


def _basic(name: str, password: str) -> str:
    return base64.b64encode(f"{name}:{password}".encode()).decode()


def _forms(value: str) -> Iterator[str]:
    """A value as it may stand in an address, in JSON or in a representation."""
    for plain in (value, unquote(value)):
        yield from (plain, repr(plain)[1:-1], plain.replace("/", "\\/"))
        for encoded in (quote(plain), quote(plain, safe=""), quote_plus(plain), quote(plain, safe="/+=@:!$&'()*,;~")):
            yield encoded
            yield re.sub("%..", lambda match: match[0].lower(), encoded)


def _of_environment() -> Iterator[str]:
    for name, value in os.environ.items():
        if len(value) >= 2 * _LEAST and _ENVIRONMENT.fullmatch(name):
            yield from _forms(value)
