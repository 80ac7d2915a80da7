"""Samples of a tar archive: consecutive files with the same key, exactly as the ``webdataset`` package groups them."""

from __future__ import annotations

import hashlib
import logging
import re

import pyarrow as pa

from midepoch.errors import FormatError
from midepoch.sources.formats.base import Scanned
from midepoch.sources.formats.tar_headers import Damage, TarMember
from midepoch.sources.formats.tar_tables import Sample, joined, packed

_log = logging.getLogger("midepoch")
BLOCK_BYTES = 8 << 20
KEY = "__key__"
LARGEST = (1 << 31) - 1
"""Bytes that 32-bit offsets can address."""
_SPLIT = re.compile(rb"((?:.*/)?[^.]+)\.([^/]*)").fullmatch
_META = re.compile(rb"__[^/]*__(?:$|/)").match
_RESERVED = (KEY, "__url__")
_BAD = "__bad__"
_MOST_COLUMNS = 1_000
_NAMED_SAMPLES = 10


class TarShard:
    """Samples of one archive, in blocks."""

    def __init__(self, name: str, skip_damage: bool) -> None:
        self._name, self._skip_damage = name, skip_damage
        self._extensions: dict[bytes, int] = {}
        self._columns: list[str] = []
        self._counts: list[int] = []
        self._largest: list[int] = []
        self._numbers: dict[str, int] = {}
        self._sample: Sample | None = None
        self._is_suspect = False
        """True after damage of a header: the missing file may belong to the sample before or to the one after it."""
        self._block: list[Sample] = []
        self._rows: list[int] = []
        self._tables: list[bytes] = []
        self._digest = hashlib.blake2b(digest_size=16)
        self._bytes = self._links = 0
        self._skipped: list[str] = []
        self.is_damaged = False

    def add(self, item: TarMember | Damage) -> None:
        """Add the next member of the archive."""
        if isinstance(item, Damage):
            self._pass_damage(item)
            return
        name = item.name
        if item.is_link:
            self._links += 1
            return
        split = _SPLIT(name)
        if split is None or (name.startswith(b"__") and _is_meta(name)):
            return
        key, extension = split.groups()
        column = self._extensions.get(extension)
        if column is None:
            column = self._new_extension(name, extension)
        sample = self._sample
        if sample is None or key != sample.key:
            self._finish()
            sample = self._sample = Sample(key, is_whole=not self._is_suspect)
        self._is_suspect = False
        if column in sample.columns or column < 0:
            self._refuse_duplicate(key, extension)
            return
        sample.columns.append(column)
        sample.offsets.append(item.offset)
        sample.sizes.append(item.size)
        sample.sparse.append(item.is_sparse)
        sample.contents.append(b"%d %b %d " % (len(extension), extension, item.size))
        sample.contents.append(item.ends)

    def _new_extension(self, name: bytes, extension: bytes) -> int:
        text = extension.decode(errors="backslashreplace").lower()
        number = -1 if text in _RESERVED else self._numbers.setdefault(text, len(self._columns))
        if number == len(self._columns):
            self._columns.append(text)
            self._counts.append(0)
            self._largest.append(0)
        if number > _MOST_COLUMNS:
            raise FormatError(
                f"{self._name}: its files have more than {_MOST_COLUMNS:,} different extensions, the last is {text!r} "
                f"of {_shown(name)}. An extension begins at the first dot: write names without dots before it."
            )
        self._extensions[extension] = number
        return number

    def _refuse_duplicate(self, key: bytes, extension: bytes) -> None:
        problem = f"sample {_shown(key)} has several files with the extension {_shown(extension)}"
        if not self._skip_damage:
            raise FormatError(
                f'{self._name}: {problem}. Write the shard again, or pass on_error="skip" to use the first of them.'
            )
        _log.warning("%s: %s, only the first is used", self._name, problem)

    def _pass_damage(self, damage: Damage) -> None:
        split = _SPLIT(damage.name) if damage.name else None
        before = self._sample.key if self._sample is not None else None
        if not self._skip_damage:
            place = (
                f"in sample {_shown(split[1])}"
                if split
                else f"after sample {_shown(before)}"
                if before
                else "at its beginning"
            )
            raise FormatError(
                f'{self._name}: damaged {place}: {damage.text}. Copy or download it again, or pass on_error="skip" '
                "to use the samples that can be read."
            )
        self.is_damaged = True
        _log.warning("%s: %s", self._name, damage.text)
        if split is None:
            self._is_suspect = True
        if self._sample is not None and (split is None or split[1] == before):
            self._sample.is_whole = False

    def _finish(self) -> None:
        """Add the current sample to the block, or start the next block with it."""
        sample, self._sample = self._sample, None
        if sample is None or not sample.columns or self._is_bad(sample):
            return
        if not sample.is_whole:
            self._skipped.append(_shown(sample.key))
            return
        if self._block and sample.stop - self._block[0].offsets[0] > BLOCK_BYTES:
            self._close_block()
        for column, size in zip(sample.columns, sample.sizes, strict=True):
            self._counts[column] += 1
            if size > self._largest[column]:
                self._largest[column] = size
        self._digest.update(b"%d %b %d " % (len(sample.key), sample.key, len(sample.columns)))
        self._digest.update(b"".join(sample.contents))
        self._bytes += sum(sample.sizes)
        self._block.append(sample)

    def _is_bad(self, sample: Sample) -> bool:
        """Return True for a sample with a file ``key.__bad__`` that is not empty: webdataset omits it."""
        number = self._numbers.get(_BAD)
        return number in sample.columns and sample.sizes[sample.columns.index(number)] > 0

    def _close_block(self) -> None:
        self._rows.append(len(self._block))
        self._tables.append(packed(self._block))
        self._block = []

    def finished(self) -> Scanned:
        """Return the result of the scan."""
        self._finish()
        if self._block:
            self._close_block()
        rows = sum(self._rows)
        if self._skipped:
            more = ", …" if len(self._skipped) > _NAMED_SAMPLES else ""
            listed = ", ".join(self._skipped[:_NAMED_SAMPLES])
            _log.warning("%s: skipped %d damaged samples: %s%s", self._name, len(self._skipped), listed, more)
        if self._links:
            _log.warning("%s: ignored %d links, which are not files", self._name, self._links)
        used = [number for number, count in enumerate(self._counts) if count]
        kinds = [pa.large_binary() if self._largest[number] > LARGEST else pa.binary() for number in used]
        fields = [pa.field(self._columns[number], kind) for number, kind in zip(used, kinds, strict=True)]
        return Scanned(
            pa.schema([pa.field(KEY, pa.string()), *fields]),
            list(range(len(self._rows))),
            self._rows,
            {(self._columns[number],) for number in used if self._counts[number] < rows},
            self._digest.hexdigest(),
            joined(self._columns, self._tables),
            decoded_bytes=float(self._bytes),
            complete=not self.is_damaged,
        )


def _is_meta(name: bytes) -> bool:
    return _META(name) is not None or (b"/" not in name and name.endswith(b"__"))


def _shown(name: bytes) -> str:
    return repr(name.decode(errors="backslashreplace"))
