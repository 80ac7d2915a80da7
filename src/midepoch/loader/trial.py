"""A trial of functions before they run in threads: which of them draw from global generators."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Hashable, Iterator, Sequence

import numpy as np

from midepoch.loader.collation import collated
from midepoch.loader.options import Options
from midepoch.pipeline.engine import Engine
from midepoch.pipeline.leaf import Leaf
from midepoch.transforms.generators import Snapshot

_ROWS = 8


def global_draws(leaves: Sequence[Leaf], options: Options) -> dict[Hashable, str]:
    """Run the functions on a few rows. Return those that draw from global generators.

    The value is the name of a generator that cannot be replaced by one of a thread, empty if there is none. torch's can
    be replaced in its random functions, but not inside of others, nor if a function seeds it.
    """
    found: dict[Hashable, str] = {}
    for leaf in leaves:
        if not leaf.has_functions and options.collate_fn is None:
            continue
        with _quiet():
            engine = Engine(leaf)
            _run(engine, leaf, options)
            drew = engine.generators.drew
            if not drew:
                continue
            before = Snapshot()
            _run(Engine(leaf, drawing=drew), leaf, options)
            left = before.drawn()
            before.restore()
        for function, names in drew.items():
            others = (names - {"torch"}) | (names & left)
            found[function] = min(others, default="")
    return found


def _run(engine: Engine, leaf: Leaf, options: Options) -> None:
    """Run all functions on the first rows, one by one. Errors are raised again in their turn, with the batch."""
    plain = options.collate_fn is None or options.collate_columns
    kind = leaf.format or ("torch" if plain else "python")
    for row in engine.chosen(0, np.arange(min(_ROWS, len(leaf.order)))):
        with contextlib.suppress(Exception, SystemExit, GeneratorExit):
            batch = engine.transform(0, engine.read(np.array([row])))
            if options.collate_fn is not None and len(batch):
                collated(batch, kind, options, engine.generators, 0)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Log nothing of rows that are skipped: they are skipped again in their turn."""
    log = logging.getLogger("midepoch")
    before, log.disabled = log.disabled, True
    try:
        yield
    finally:
        log.disabled = before
