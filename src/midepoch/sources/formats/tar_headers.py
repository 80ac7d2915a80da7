"""Members of a tar archive, found by their headers, as Python's ``tarfile`` finds them.

POSIX (ustar, pax), GNU and V7 archives. The contents of members are not read, except for the 512 bytes at both ends.
"""

from __future__ import annotations

import logging
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import pyarrow as pa

from midepoch.errors import FormatError
from midepoch.sources.formats.compressed import compression, contents, damage_of
from midepoch.storage.stores import Entry, OpenFile, Store

_log = logging.getLogger("midepoch")
BLOCK = 512
_ZERO = bytes(BLOCK)
_REGULAR = b"0\x007S"
_WITHOUT_CONTENTS = b"123456"
_EXTENSIONS = b"LKxXg"
_LONGEST_EXTENSION = 1 << 20
_LARGEST = 1 << 60
_MODULUS = 65521  # of Adler-32, whose low half is a sum of bytes: 10 times faster than sum()


class TarMember(NamedTuple):
    """A regular file (or, with ``is_link``, a link) in an archive."""

    name: bytes
    offset: int
    size: int
    ends: bytes = b""
    """Its first and its last 512 bytes."""
    is_sparse: bool = False
    """True if the range contains the headers too, because they are needed to restore the holes."""
    is_link: bool = False


class Damage(NamedTuple):
    """A part of an archive that cannot be read. ``name``: the affected member, if it is known."""

    text: str
    name: bytes | None = None


class _DamageError(Exception):
    """Damage of the header at ``offset``."""

    def __init__(self, text: str, offset: int) -> None:
        super().__init__(f"{text} at byte {offset}")


class _Header(NamedTuple):
    name: bytes
    kind: int
    size: int
    offset: int
    """First byte after the header."""
    block: bytes


def members(reader: Reader, name: str) -> Iterator[TarMember | Damage]:
    """Yield the members of an archive in order. After damage, continue with the next header that is found."""
    offset: int | None = 0
    is_damaged = False
    while offset is not None:
        try:
            found = _member(reader, offset)
        except _DamageError as problem:
            is_damaged = True
            yield Damage(str(problem))
            offset = _next_header(reader, offset)
            continue
        if found is None:
            break
        member, following, is_complete = found
        if not is_complete:
            stop = member.offset + member.size
            yield Damage(f"a file in it ends at byte {stop}, which is after the end of the archive", member.name)
            return
        if member.name:
            yield member
        offset = following
    if reader.damage is not None:
        yield Damage(reader.damage)
    elif offset and not reader.at(offset - 1, 1):  # refused by tarfile, too
        yield Damage(f"the archive ends before byte {offset}, in the padding of its last file")
    elif offset is not None and not reader.at(offset, BLOCK):
        if not offset:
            yield Damage("it is empty")
        elif not is_damaged:
            _log.warning("%s has no end mark: if it was cut, its last sample is incomplete", name)


def _member(reader: Reader, start: int) -> tuple[TarMember, int, bool] | None:
    """Return the next member, the offset of the header after it, and True if all its bytes exist. None at the end."""
    header = _header(reader, start)
    if header is None:
        return None
    pax: dict[bytes, bytes] = {}
    while header.kind in _EXTENSIONS:  # the first of several extensions counts, as for tarfile
        pax = {**_extension(reader, header), **pax}
        header = _header(reader, header.offset + _padded(header.size))
        if header is None:
            raise _DamageError("a header is missing after the extended header", start)
    name, size, is_sparse = header.name, header.size, header.kind == ord("S")
    if pax:
        name = pax.get(b"GNU.sparse.name", pax.get(b"path", name))
        size = _pax_size(pax[b"size"], start) if b"size" in pax else size
        is_sparse = is_sparse or any(key.startswith(b"GNU.sparse.") for key in pax)
    is_folder = header.kind == 0 and _text(header.block[:100]).endswith(b"/")  # of V7 archives
    if header.kind in _WITHOUT_CONTENTS or is_folder:
        is_link = header.kind in b"12"
        return TarMember(name if is_link else b"", header.offset, 0, is_link=is_link), header.offset, True
    offset = _after_sparse_map(reader, header) if header.kind == ord("S") else header.offset
    ends, is_complete = _ends(reader, offset, size)
    following = offset + _padded(size)
    if header.kind not in _REGULAR:
        return TarMember(b"", offset, size), following, is_complete
    if is_sparse:
        return TarMember(name, start, offset + size - start, ends, is_sparse=True), following, is_complete
    return TarMember(name, offset, size, ends), following, is_complete


def _header(reader: Reader, offset: int) -> _Header | None:
    """Return the header at an offset. None at the end of the archive."""
    block = reader.at(offset, BLOCK)
    if not block or block == _ZERO:
        return None
    if len(block) < BLOCK:
        raise _DamageError(f"the archive ends in a header: {len(block)} of its {BLOCK} bytes are there,", offset)
    if not _is_checksum_right(block):
        raise _DamageError("the checksum is wrong in the header", offset)
    name, prefix, kind = _text(block[:100]), _text(block[345:500]), block[156]
    if prefix and kind not in _EXTENSIONS and kind != ord("S"):
        name = prefix + b"/" + name
    size = _number(block[124:136])
    if size is None or not 0 <= size <= _LARGEST:
        raise _DamageError("the size is not a number in the header", offset)
    return _Header(name, kind, size, offset + BLOCK, block)


def _is_checksum_right(block: bytes) -> bool:
    field = block[148:156]
    stated = _number(field)
    if stated is None:
        return False
    total = (zlib.adler32(block) & 0xFFFF) - (zlib.adler32(field) & 0xFFFF) + 8 * ord(" ")  # the field counts as spaces
    if (total - stated) % _MODULUS == 0:
        return True
    rest = block[:148] + block[156:]
    return stated in (sum(rest) + 256, sum(byte - 256 if byte > 127 else byte for byte in rest) + 256)


def _text(field: bytes) -> bytes:
    return field.partition(b"\0")[0]


def _number(field: bytes) -> int | None:
    """Return a number in octal digits or, for large ones, in base 256."""
    try:
        return int(field.rstrip(b"\0 "), 8)
    except ValueError:
        pass
    if field[0] & 0x80:
        value = int.from_bytes(field[1:], "big")
        return value if field[0] == 0x80 else -1
    try:
        return int(_text(field).strip() or b"0", 8)
    except ValueError:
        return None


def _padded(size: int) -> int:
    return -(-size // BLOCK) * BLOCK


def _extension(reader: Reader, header: _Header) -> dict[bytes, bytes]:
    """Return what an extended header says about the next member, with the keys of pax."""
    start = header.offset - BLOCK
    if header.size > _LONGEST_EXTENSION:
        raise _DamageError(f"the extended header has {header.size} bytes", start)
    data = reader.at(header.offset, header.size)
    if len(data) < header.size:
        raise _DamageError("the archive ends in the extended header", start)
    if header.kind in b"LK":
        return {b"path": _text(data)} if header.kind == ord("L") else {}
    records = _pax_records(data, start)
    if header.kind != ord("g"):
        return records
    if any(key in (b"path", b"size") or key.startswith(b"GNU.sparse.") for key in records):
        raise _DamageError("a name or a size for all members is in the extended header", start)
    return {}


def _pax_records(data: bytes, start: int) -> dict[bytes, bytes]:
    """Return the records of a pax header: ``length key=value\\n``."""
    records: dict[bytes, bytes] = {}
    at = 0
    while at < len(data) and data[at]:
        digits, _, _ = data[at : at + 20].partition(b" ")
        length = int(digits) if digits.isdigit() else 0
        key, equals, value = data[at + len(digits) + 1 : at + length].partition(b"=")
        if length < 5 or at + length > len(data) or not equals or not value.endswith(b"\n"):
            raise _DamageError("a record cannot be read in the extended header", start)
        records[key] = value[:-1].rstrip(b"/") if key == b"path" else value[:-1]
        at += length
    return records


def _pax_size(value: bytes, start: int) -> int:
    if not value.isdigit() or int(value) > _LARGEST:
        raise _DamageError("the size is not a number in the extended header", start)
    return int(value)


def _after_sparse_map(reader: Reader, header: _Header) -> int:
    """Return the offset of the contents of a sparse GNU member, whose map may take further blocks."""
    offset, block, flag = header.offset, header.block, 482
    while block[flag]:
        block, flag = reader.at(offset, BLOCK), 504
        if len(block) < BLOCK:
            raise _DamageError("the archive ends in the sparse map", header.offset - BLOCK)
        offset += BLOCK
    return offset


def _ends(reader: Reader, offset: int, size: int) -> tuple[bytes, bool]:
    """Return the first and the last bytes of contents, and True if all of them exist."""
    if size <= 2 * BLOCK:
        whole = reader.at(offset, size)
        return whole, len(whole) == size
    head = reader.at(offset, BLOCK)
    tail = reader.at(offset + size - BLOCK, BLOCK)
    return head + tail, len(tail) == BLOCK


def _next_header(reader: Reader, offset: int) -> int | None:
    """Return the offset of the first header after a damaged one, or None.

    The size in the damaged header is tried first: contents may be an archive themselves, with headers of their own.
    """
    block = reader.at(offset, BLOCK)
    if reader.seekable and len(block) == BLOCK and (size := _number(block[124:136])):
        following = offset + BLOCK + _padded(max(0, size))
        if _looks_like_header(reader.at(following, BLOCK)):
            return following
    while len(block) == BLOCK:
        offset += BLOCK
        block = reader.at(offset, BLOCK)
        if _looks_like_header(block):
            return offset
    return None


def _looks_like_header(block: bytes) -> bool:
    return len(block) == BLOCK and block[257:262] == b"ustar" and _is_checksum_right(block)


_LOCAL = (4 << 10, 32 << 10, 1 << 20)
_REMOTE = (64 << 10, 1 << 20, 8 << 20)
"""The smallest read, the gap that is worth a separate read, and the largest read. A request takes as long as 1 MB."""
_STREAM = 64 << 10  # a read that meets damage loses its bytes
_PACKED = {b"\x1f\x8b": ".gz", b"BZh": ".bz2", b"\x28\xb5\x2f\xfd": ".zst", b"\x04\x22\x4d\x18": ".lz4"}
_XZ = b"\xfd7zXZ"


class Ranges:
    """Reader that fetches more and more ahead, as long as no large gap is skipped."""

    seekable = True
    damage: str | None = None

    def __init__(self, file: OpenFile, *, local: bool) -> None:
        self._file = file
        self._least, self._far, self._most = _LOCAL if local else _REMOTE
        self._start, self._window, self._ahead = 0, b"", self._least

    def at(self, offset: int, size: int) -> bytes:
        first = offset - self._start
        if first < 0 or first + size > len(self._window):
            self._fetch(offset, size)
            first = 0
        return self._window[first : first + size]

    def _fetch(self, offset: int, size: int) -> None:
        gap = offset - self._start - len(self._window)
        self._ahead = min(2 * self._ahead, self._most) if abs(gap) < self._far else self._least
        self._window = self._file.read_at(max(size, self._ahead), offset)
        self._start = offset


class Stream:
    """Reader of decompressed contents, which can only be read from the beginning. ``damage`` stops it."""

    seekable = False

    def __init__(self, store: Store, entry: Entry, stream: Any) -> None:
        self._store, self._entry, self._stream = store, entry, stream
        self._start, self._window = 0, b""
        self.damage: str | None = None

    def at(self, offset: int, size: int) -> bytes:
        first = offset - self._start
        while first + size > len(self._window) and (data := self._more()):
            kept = self._window[max(0, first - BLOCK) :]
            self._start += len(self._window) - len(kept)
            self._window, first = kept + data, offset - self._start
        return self._window[first : first + size]

    def _more(self) -> bytes:
        if self.damage is not None:
            return b""
        try:
            return bytes(self._stream.read(_STREAM))
        except (OSError, pa.ArrowException) as problem:
            self.damage = damage_of(self._store, self._entry, problem)
            return b""


Reader = Ranges | Stream
"""Access to the bytes of an archive. ``at`` returns bytes from an offset on, fewer only at the end or after ``damage``.
If it is not ``seekable``, offsets must not decrease.
"""


@contextmanager
def opened(store: Store, entry: Entry) -> Iterator[tuple[Reader, str]]:
    """Yield a reader of an archive, and the ETag of its file."""
    with store.open(entry) as file:
        if compression(entry.path) is None:
            reader = Ranges(file, local=store.local)
            _refuse_packed(store.name(entry.path), reader.at(0, BLOCK))
            yield reader, file.etag
            return
        with contents(store, entry) as stream:
            yield Stream(store, entry, stream), file.etag


def _refuse_packed(name: str, head: bytes) -> None:
    if head.startswith(_XZ):
        raise FormatError(f"{name}: its contents are compressed by xz, which is not supported. Write it as .tar.zst.")
    for magic, suffix in _PACKED.items():
        if head.startswith(magic):
            raise FormatError(
                f"{name}: its contents are compressed, but its name does not say so. Rename it to .tar{suffix}."
            )
