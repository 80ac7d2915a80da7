"""Figures of a pass beside its steps, in integers: rows, tokens, and milliseconds of work by stage.

A mark of the ledger, ``@1500,20;``, is followed by them in brackets: ``[320,,4096,12,3,5,,8,8]``. They are sums on this
rank in the pass; an empty field is not known. Fields are only ever added at the end: readers take
a missing one as not known, and ignore those that they do not know.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol


class Figures(NamedTuple):
    """Sums of one rank in a pass. None if not known.

    Rows, tokens, slots and blocks are counted from the first batch on, as the time is; work from before it.
    """

    rows: int | None = None
    """Delivered rows, or outputs."""
    tokens: int | None = None
    """Tokens in them, without padding."""
    slots: int | None = None
    """Places for tokens in them, with padding."""
    read: int | None = None
    """Milliseconds of work, over all workers: finding, fetching, decoding and gathering rows."""
    map: int | None = None
    """Running the user's maps and filters."""
    combine: int | None = None
    """Mixing, packing and grouping rows, and reading them if that is not measured apart. Not known with workers."""
    collate: int | None = None
    """Assembling batches."""
    transport: int | None = None
    """Sending batches from workers. Not known without workers."""
    blocks: int | None = None
    """Requested blocks that have to be fetched or decoded."""
    ready: int | None = None
    """Number of those that were ready when requested."""
    packed: int | None = None
    """Tokens in the packed sequences that were made. Not known without packing."""
    places: int | None = None
    """Places for tokens in those."""

    def minus(self, other: Figures) -> Figures:
        """Return the increase of each figure since earlier ones."""
        return Figures(*(None if a is None else max(0, a - (b or 0)) for a, b in zip(self, other, strict=True)))

    def plus(self, other: Figures) -> Figures:
        """Return the sums, of figures that are known in one of them."""
        pairs = zip(self, other, strict=True)
        return Figures(*(None if a is None and b is None else (a or 0) + (b or 0) for a, b in pairs))

    def counted_from(self, delivered: Figures) -> Figures:
        """Return these as a base, but with the rows, tokens, slots and blocks of later ones."""
        names = ("rows", "tokens", "slots", "blocks", "ready")  # the first block is never ready
        return self._replace(**{name: getattr(delivered, name) for name in names})

    def record(self) -> bytes:
        """Return the bytes to write after a mark."""
        return b"[%b]" % ",".join("" if value is None else str(value) for value in self).encode()


def read_figures(text: bytes) -> Figures:
    """Return the figures between the brackets."""
    values = [int(value) if value else None for value in text.split(b",")]
    return Figures(*values[: len(Figures._fields)])


class Measured(Protocol):
    """The measurements of a loader, as far as the ledger records them."""

    @property
    def all_waited(self) -> float:
        """Seconds that the model has waited for data since the loader was created."""

    def figures(self) -> Figures:
        """Return the sums since the loader was created."""


class Mark(NamedTuple):
    """An occasional record of a pass: steps so far, milliseconds since its first batch, milliseconds waited."""

    steps: int
    elapsed: int
    waited: int
    figures: Figures | None = None
    """None in ledgers of older versions."""
