"""The rule for the fingerprint of a file. A state is refused if the fingerprint of its data differs.

A fingerprint covers what describes the rows (footers, headers, entries of manifests), the size, and contents:

- all contents of text, which the index reads completely, and its syntax
- all contents of other files of up to 256 KiB
- otherwise 16 pieces of 16 KiB, evenly spaced from the first byte to the last
- of Arrow files also: every header, three pieces of each buffer of up to 64 record batches, which covers every
  column, and pieces of up to 64 dictionaries
- of tar archives: both ends of every file in them
- of shards that their manifest calls compressed: the first 256 KiB, because the plain and the compressed file are the
  same data, and only the beginning of both is cheap to read
- of folders of media: the names and sizes of all files, and the fingerprints of 256 of them, evenly spaced

The pieces of a file take at most 16 reads and 256 KiB, whatever its size. A change between them that keeps all sizes is
not detected.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from midepoch.sources.formats.arrow_ipc import Message, Read

BEGINNING = 256 << 10
"""Size up to which contents are covered completely."""
SKIPPED = "skipped"
"""Fingerprint of a damaged file that is left out. A state is refused after such a file was restored or added."""
_PIECES = 16
_PIECE = BEGINNING // _PIECES
_BLOCKS = 64
_OF_BUFFER = 256


def fingerprint(about: bytes, read: Read, size: int) -> str:
    """Return the fingerprint of contents of ``size`` bytes. ``about`` describes how they are read."""
    digest = hashlib.blake2b(f"{size} {len(about)} ".encode() + about, digest_size=16)
    sample(digest, read, 0, size)
    return digest.hexdigest()


def sample(digest: hashlib.blake2b, read: Read, start: int, size: int) -> None:
    """Hash contents of ``size`` bytes: all of them, or pieces."""
    if size <= BEGINNING:
        digest.update(read(size, start))
        return
    for place in spaced(size - _PIECE):
        digest.update(read(_PIECE, start + place))


def spaced(last: int, count: int = _PIECES) -> list[int]:
    """Return up to ``count`` different numbers, evenly spaced from 0 to ``last``."""
    return list(dict.fromkeys(number * last // (count - 1) for number in range(count)))


def sample_buffers(digest: hashlib.blake2b, read: Read, batches: Sequence[Message]) -> None:
    """Hash the start, the middle and the end of every buffer of up to 64 record batches.

    More would cost minutes of random reads for a large file.
    """
    for message in _some(batches):
        for offset, length in message.buffers:
            first, last = message.body + offset, message.body + offset + length
            if length <= 3 * _OF_BUFFER:
                digest.update(read(length, first))
                continue
            for at in (first, first + length // 2, last - _OF_BUFFER):
                digest.update(read(_OF_BUFFER, at))


def sample_bodies(digest: hashlib.blake2b, read: Read, dictionaries: Sequence[Message]) -> None:
    """Hash the contents of up to 64 dictionaries, or pieces of them."""
    for message in _some(dictionaries):
        sample(digest, read, message.body, message.end - message.body)


def _some(messages: Sequence[Message]) -> list[Message]:
    step = max(1, -(-len(messages) // _BLOCKS))
    return [*messages[::step], *messages[-1:]]
