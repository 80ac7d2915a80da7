"""Addresses of data, the credentials in them, and the three texts derived from an address.

An address may hold a key (``s3://KEY:SECRET@bucket``), a signature (``?X-Amz-Signature=…``) or a token, also in each
part of a chain (``zip://a::https://user:password@host/b.zip``). Each purpose has its own text:

- ``Link.target`` is opened. Keys of object stores may contain any character. Therefore only the user is removed, and a
  query after the last ``?`` if all of its names are options or credentials.
- ``Address.identity`` is compared and hashed. Only parts that are certainly credentials are removed.
- ``Address.public`` is shown. All parts that may be credentials are removed.

Other texts that are shown, such as error messages, contain no credentials either: ``Secrets`` removes those that were
given for a store, and ``redacted`` those that are recognised by their place or their shape.
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

URL_OPTIONS = {"endpoint_override", "scheme", "region", "access_key", "secret_key", "session_token", "anonymous"}
"""Options of a store that the query of its address may contain."""
WITHOUT_PORTS = {"s3", "s3a", "gs", "gcs", "az", "abfs", "abfss"}
_WEB = {"http", "https"}
_WITHOUT_HOSTS = {"file", "local", "memory", "hf", "zip", "tar", "libarchive", "data"}
_NAMES_BEFORE_AT = {"github", "git"}  # org:repo@revision
_CONTAINERS_BEFORE_AT = {"az", "abfs", "abfss", "wasb", "wasbs"}  # container@account, no password

_LINKS = re.compile(r"::(?=[A-Za-z][\w+.-]*(?::/|::))")
_SCHEME = re.compile(r"([A-Za-z][\w+.-]+):(/{1,3})(.*)", re.DOTALL)
_KNOWN = r"(?:s3a?|gc?s|az|abfss?|https?|hf|s?ftp|smb|memory)"
_ADDRESS = re.compile(rf"{_KNOWN}:/", re.IGNORECASE)
_MISTYPED = re.compile(rf"\A((?:{_KNOWN}:)?//|{_KNOWN}:)([^\s/@]*:[^\s@]*)@(.*)\Z", re.IGNORECASE | re.DOTALL)
_AUTHORITY_ENDS = re.compile(r"/|\?[\w.-]+=")
_PORT = re.compile(r"([^:]*):\d*|\[[^\]]*\](?::\d*)?")
_WEB_QUERY = re.compile(r"\?(?=[^?#]*=)|#(?=[^#]*=)")
_QUERY = re.compile(r"\?(?=[\w.-]+=)")
_PIECES = re.compile(r"(?=[&#]|[?;][\w.-]+=)")

_CREDENTIAL = re.compile(
    r"(?:.*_)?(?:secret|password|passwd|pwd|token|signature|sig|sas|credentials?|auth|authorization|jwt"
    r"|(?:api|access|account|secret|private|shared|signing|encryption)_?key(?:_?id)?|awsaccesskeyid|googleaccessid"
    r"|connection_?string)|x_(?:amz|goog|oss)_.*"
)
"""Names of query parameters whose values are credentials, in lower case and with ``_`` for ``-``."""
_SIGNED = re.compile(r"(?:x_(?:amz|goog|oss)_)?sig(?:nature)?")
_OF_SIGNATURES = re.compile(
    r"expires|policy|key_pair_id|x_id"
    r"|s[veptri]|ss|srt|spr|sip|sdd|ses|skoid|sktid|skt|ske|sks|skv|saoid|suoid|scid"  # of Azure
)
"""Parameters that change with the signature of an address and do not identify the data."""


class Parameter(NamedTuple):
    """One parameter of a query, decoded."""

    text: str
    """As written, with its leading character."""
    name: str
    value: str
    is_credential: bool
    """True if its value is certainly a credential."""
    is_suspect: bool
    """True if its value may be a credential."""


class Link(NamedTuple):
    """One part of an address: ``scheme://user:password@path?query``, or a path without a scheme."""

    text: str
    """As given."""
    head: str
    """The scheme as written, with its slashes. Empty without one; then nothing but the path is set."""
    userinfo: str
    path: str
    query: str = ""
    """With its leading character."""
    dubious: str = ""
    """The beginning of the path up to an ``@``: a host, a port and a name, or a user and a password with a ``/``."""

    @property
    def scheme(self) -> str:
        return self.head.partition(":")[0].lower()

    @property
    def user(self) -> tuple[str, str]:
        """The name and the password before the ``@``, decoded."""
        name, _, password = self.userinfo.partition(":")
        return unquote(name), unquote(password)

    @property
    def parameters(self) -> tuple[Parameter, ...]:
        """All parameters of the query."""
        return _parameters(self.query)

    @property
    def target(self) -> str:
        """The address without user and query, byte for byte."""
        return self.head + self.path

    @property
    def shown(self) -> tuple[str, tuple[Parameter, ...]]:
        """The path, and all parameters of the part that may be a query."""
        text = self.path + self.query
        pattern = _WEB_QUERY if self.scheme in _WEB else _QUERY
        start = None if self.scheme in ("", "file") else pattern.search(text)
        return (text, ()) if start is None else (text[: start.start()], _parameters(text[start.start() :]))

    @property
    def holds_credentials(self) -> bool:
        """True if the path that is opened contains credentials."""
        return not self.query and any(each.is_credential for each in self.shown[1])

    @property
    def public(self) -> str:
        """The link without parts that may be credentials."""
        if not self.head:
            return _MISTYPED.sub(r"\1\3", self.path)
        path, parameters = self.shown
        path = f"***{path[len(self.dubious) :]}" if self.dubious else path
        return f"{self.head}{path}{_joined([each for each in parameters if not each.is_suspect], 'public')}"

    @property
    def identity(self) -> str:
        """The link without parts that are certainly credentials."""
        if not self.head.endswith("//"):
            return self.text
        certain = ":" in self.userinfo and not re.search(r"\s", self.userinfo)
        user = "" if certain or not self.userinfo else f"{self.userinfo}@"
        kept = [each for each in self.parameters if not each.is_credential]
        return f"{self.head}{user}{self.path}{_joined(kept, 'identity')}"


@dataclass(frozen=True, repr=False)
class Address:
    """A path or URL that is shown without its credentials.

    >>> Address("s3://KEY:SECRET@bucket/run?secret_key=SECRET")
    's3://bucket/run'
    >>> str(Address("zip://a.csv::https://me:SECRET@host/b.zip?X-Amz-Signature=SECRET&X-Amz-Expires=60"))
    'zip://a.csv::https://host/b.zip'
    """

    raw: str
    """The address as given."""

    @cached_property
    def links(self) -> tuple[Link, ...]:
        """The parts of a chain. Most addresses have one."""
        return tuple(map(_parsed, _LINKS.split(self.raw)))

    @cached_property
    def public(self) -> str:
        """The address for display, without parts that may be credentials."""
        return "::".join(link.public for link in self.links)

    @cached_property
    def identity(self) -> str:
        """The address without its credentials, equal for all credentials. Without any, the unchanged text."""
        return "::".join(link.identity for link in self.links)

    def __str__(self) -> str:
        return self.public

    def __repr__(self) -> str:
        return repr(self.public)


def is_address(path: str | os.PathLike[str]) -> bool:
    """Return True for an address, including one from which pathlib removed a slash."""
    return _ADDRESS.match(os.fsdecode(path)) is not None


def advice_on(path: str) -> str:
    """Return the sentence about variables in a path, or about a scheme without "://". Empty if it has neither.

    >>> advice_on("s3:bucket/run")
    'For an address, write s3://….'
    """
    if "$" in path or re.search(r"\{\w*\}", path):
        return "Variables are not filled in: use os.path.expandvars(path), or f'{folder}/a.parquet'."
    scheme = re.match(r"(s3|gs|gcs|az|abfs|hf|https?)(?::/*|//)", path)
    return f"For an address, write {scheme[1]}://…." if scheme and "://" not in path else ""


def check_folder(given: str | os.PathLike[str]) -> None:
    """Raise ValueError for the name of a folder to be written that is one by mistake."""
    refuse_lost_slash(given)
    text = os.fsdecode(given)
    if "://" not in text and (advice := advice_on(text)) and not os.path.exists(text):
        raise ValueError(f"{Address(text)} would be the name of a new local folder. {advice}")


def is_mistyped(path: str) -> bool:
    """Return True for an address with a password whose scheme or slashes are missing: ``//me:SECRET@host/a``."""
    return "://" not in path and _MISTYPED.fullmatch(path) is not None


def refuse_lost_slash(path: object) -> None:
    """Raise ValueError for an address that pathlib turned into a local path, which would show its credentials.

    >>> from pathlib import Path
    >>> refuse_lost_slash(Path("s3://KEY:SECRET@bucket/run"))
    Traceback (most recent call last):
    ValueError: s3:/bucket/run is an address from which pathlib removed a slash. Pass it as a string.
    """
    if isinstance(path, os.PathLike) and is_address(path):
        address = Address(os.fsdecode(path))
        raise ValueError(f"{address} is an address from which pathlib removed a slash. Pass it as a string.")


def as_address(name: str, value: str) -> Address:
    """Return the address that is the value of the option ``name``. Endpoints may lack a scheme."""
    return Address(value if "://" in value or "endpoint" not in name else f"https://{value}")


def _parsed(part: str) -> Link:
    if (match := _SCHEME.fullmatch(part)) is None:
        return Link(part, "", "", part)
    head, scheme = f"{match[1]}:{match[2]}", match[1].lower()
    if scheme in _WITHOUT_HOSTS or (match[2] == "/" and not is_address(part)):
        userinfo, rest, dubious = "", match[3], ""
    else:
        userinfo, rest, dubious = _split_user(scheme, match[3])
    path, query = rest, ""
    if scheme in _WEB:
        if start := _WEB_QUERY.search(rest):  # a "?" without "=" belongs to a glob pattern
            path, query = rest[: start.start()], rest[start.start() :]
    elif scheme != "file":
        before, mark, after = rest.rpartition("?")
        names = [unquote(piece.partition("=")[0]) for piece in after.split("&")]
        known = all(name in URL_OPTIONS or certain for name, certain in zip(names, _certain(names), strict=True))
        if mark and "=" in after and known:
            path, query = before, mark + after
    return Link(part, head, userinfo, path, query, dubious)


def _split_user(scheme: str, rest: str) -> tuple[str, str, str]:
    """Return the credentials before the ``@``, the text after it, and the dubious part of that text."""
    authority = _AUTHORITY_ENDS.split(rest, maxsplit=1)[0]
    if scheme in _NAMES_BEFORE_AT or (scheme in _CONTAINERS_BEFORE_AT and ":" not in authority):
        return "", rest, ""
    if "@" in authority:
        userinfo, _, host = authority.rpartition("@")
        return (userinfo, host + rest[len(authority) :], "") if userinfo else ("", rest, "")
    if ":" not in authority or "@" not in rest or authority.startswith("arn:"):
        return "", rest, ""
    userinfo, _, place = rest.rpartition("@")
    port = None if scheme in WITHOUT_PORTS else _PORT.fullmatch(authority)
    if port is None:  # a password with a "/" that was not encoded
        return userinfo, place, ""
    is_host = port[1] is None or "." in port[1] or port[1].lower() == "localhost"
    return "", rest, "" if is_host else userinfo


def _parameters(query: str) -> tuple[Parameter, ...]:
    pieces = [piece for piece in _PIECES.split(query) if piece]
    pairs = [tuple(map(unquote, piece[1:].partition("="))) for piece in pieces]
    certain = _certain([name for name, *_ in pairs])
    return tuple(
        Parameter(piece, name, value, sure, sure or name.lower() == "key")
        if mark
        else Parameter(piece, name, name, sure, piece.startswith("&"))
        for piece, (name, mark, value), sure in zip(pieces, pairs, certain, strict=True)
    )


def _certain(names: list[str]) -> list[bool]:
    """Return for each name of a query whether its value is certainly a credential."""
    spelt = [name.lower().replace("-", "_") for name in names]
    signed = any(map(_SIGNED.fullmatch, spelt))
    return [bool(_CREDENTIAL.fullmatch(name) or (signed and _OF_SIGNATURES.fullmatch(name))) for name in spelt]


def _joined(kept: list[Parameter], kind: str) -> str:
    """Return a query of some parameters. ``kind``: the text of addresses that are their values, public or identity."""
    texts = []
    for each in kept:
        address = as_address(each.name, each.value if "=" in each.text else "")
        text = getattr(address, kind)
        texts.append(each.text if text == address.raw else f"{each.text[0]}{each.name}={quote(text, safe='/:')}")
    joined = "".join(texts)
    return f"?{joined[1:]}" if joined.startswith(("&", ";")) else joined


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
    r"region|region_name|aws_region|aws_default_region|scheme|account_name|protocol|target_protocol|project|host|port"
    r"|repo|org|sha|anon|anonymous|skip_signature|aws_skip_signature"
    r"|revision|repo_type|compression|mode|encoding|fo|path|cache_storage|signature_version|addressing_style"
    r"|endpoint_override|endpoint_url|endpoint|aws_endpoint|aws_endpoint_url"
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
    return _BASIC.sub(lambda word: _MARK if _is_user(word[0]) else word[0], _SHAPES.sub(_MARK, text))


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


def _is_user(word: str) -> bool:
    """Return True for the user and password of a header, in Base64."""
    encoded = word.rstrip("=")
    try:
        return b":" in base64.b64decode(encoded + "=" * (-len(encoded) % 4))
    except ValueError:
        return False


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
    for each in link.shown[1]:
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
