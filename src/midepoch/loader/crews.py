"""Starting the workers of a loader: processes or threads."""

from __future__ import annotations

import contextlib
import importlib
import logging
import multiprocessing
import sys
from collections.abc import Hashable, Iterator, Sequence

import numpy as np

from midepoch.errors import MidepochError
from midepoch.loader.collation import collated
from midepoch.loader.crew import Crew, Job
from midepoch.loader.options import Options
from midepoch.loader.processes import ProcessCrew
from midepoch.loader.thread_crew import ThreadCrew
from midepoch.pipeline.engine import Engine
from midepoch.pipeline.leaf import Leaf
from midepoch.transforms.generators import Snapshot

_TRIAL_ROWS = 8


def open_crew(job: Job, leaves: Sequence[Leaf], options: Options) -> Crew:
    """Start workers for a job: threads if they were requested, or if Python has no interpreter lock."""
    if options.worker_type == "thread" or (options.worker_type == "auto" and _suits_threads(options)):
        if any(leaf.format in (None, "torch") for leaf in leaves):
            with contextlib.suppress(ImportError):  # not while threads run, which would see a part of it
                importlib.import_module("torch")
        with _quiet():
            drawn = _draws(leaves, options)
        if not any(drawn.values()):
            return ThreadCrew(job.in_threads(tuple(drawn)), options.num_workers)
        if options.worker_type == "thread":
            function, generator = next((function, name) for function, name in drawn.items() if name)
            raise MidepochError(
                f"{getattr(function, 'call', function)} draws from the global generator of {generator}, which all "
                'threads share: its values would not be reproducible. Use with_generator=True (or "torch"), or '
                'worker_type="process".'
            )
    method = options.multiprocessing_context or _start_method(leaves)
    return ProcessCrew(job, options.num_workers, options.prefetch, method)


def _suits_threads(options: Options) -> bool:
    """Return True if threads do not wait for each other. With an interpreter lock, more than four of them do."""
    return options.multiprocessing_context is None and not getattr(sys, "_is_gil_enabled", lambda: True)()


def _draws(leaves: Sequence[Leaf], options: Options) -> dict[Hashable, str]:
    """Try the functions on a few rows. Return those that draw from global generators.

    The value is the name of a generator that cannot be replaced by one of a thread, empty if there is none. torch's can
    be replaced in its random functions, but not inside of others, nor if a function seeds it.
    """
    found: dict[Hashable, str] = {}
    for leaf in leaves:
        if not leaf.has_functions and options.collate_fn is None:
            continue
        engine = Engine(leaf)
        _try(engine, leaf, options)
        drew = engine.generators.drew
        found |= {function: min(names - {"torch"}, default="") for function, names in drew.items()}
        for function in drew:
            if not found[function]:
                before = Snapshot()
                _try(Engine(leaf, drawing=drew), leaf, options)
                found[function] = "torch" if before.changed() else ""
                before.restore()
    return found


def _try(engine: Engine, leaf: Leaf, options: Options) -> None:
    """Run all functions on the first rows, one by one. Errors are raised again in their turn, with the batch."""
    plain = options.collate_fn is None or options.collate_columns
    kind = leaf.format or ("torch" if plain else "python")
    for row in engine.chosen(0, np.arange(min(_TRIAL_ROWS, len(leaf.order.selection)))):
        with contextlib.suppress(Exception, SystemExit, GeneratorExit):
            batch = engine.transform(0, engine.read(np.array([row])))
            if options.collate_fn is not None and len(batch):
                collated(batch, kind, options, engine.generators, 0)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Say nothing of rows that are skipped: they are skipped again in their turn."""
    log = logging.getLogger("midepoch")
    before, log.disabled = log.disabled, True
    try:
        yield
    finally:
        log.disabled = before


def _start_method(leaves: Sequence[Leaf]) -> str | None:
    """Return the platform's start method, but never "fork" if this process has threads of JAX or an object store.

    They would deadlock the child. A server that has imported midepoch once forks workers faster than each can import
    it: 8 workers in 0.9 s instead of 6.6 s, on 2 cores.
    """
    accesses = [leaf.source.access for leaf in leaves]
    remote = any(access is not None and access.store.forked_is_fatal for access in accesses)
    if not remote and "jax" not in sys.modules:
        return None
    return "forkserver" if "forkserver" in multiprocessing.get_all_start_methods() else "spawn"
