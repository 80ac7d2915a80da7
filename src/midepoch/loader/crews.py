"""Starting the workers of a loader: processes or threads."""

from __future__ import annotations

import contextlib
import importlib
import multiprocessing
import sys
from collections.abc import Hashable, Sequence

import numpy as np

from midepoch.errors import MidepochError
from midepoch.loader.crew import Crew, Job
from midepoch.loader.options import Options
from midepoch.loader.processes import ProcessCrew
from midepoch.loader.thread_crew import ThreadCrew
from midepoch.pipeline.engine import Engine
from midepoch.pipeline.leaf import Leaf

_TRIAL_ROWS = 8


def open_crew(job: Job, leaves: Sequence[Leaf], options: Options) -> Crew:
    """Start workers for a job: threads if they were requested, or if Python has no interpreter lock."""
    if options.worker_type == "thread" or (options.worker_type == "auto" and _suits_threads(options)):
        if any(leaf.format in (None, "torch") for leaf in leaves):
            with contextlib.suppress(ImportError):  # not while threads run, which would see a part of it
                importlib.import_module("torch")
        drawn = _draws(leaves)
        shared = [(function, names - {"torch"}) for function, names in drawn.items() if names - {"torch"}]
        if not shared:
            return ThreadCrew(job.in_threads(tuple(drawn)), options.num_workers)
        if options.worker_type == "thread":
            function, names = shared[0]
            raise MidepochError(
                f"{getattr(function, 'call', function)} draws from the global generator of {min(names)}, which all "
                'threads share: its values would not be reproducible. Use with_generator=True (or "torch"), or '
                'worker_type="process".'
            )
    method = options.multiprocessing_context or _start_method(leaves)
    return ProcessCrew(job, options.num_workers, options.prefetch, method)


def _suits_threads(options: Options) -> bool:
    """Return True if threads do not wait for each other. With an interpreter lock, more than four of them do."""
    return options.multiprocessing_context is None and not getattr(sys, "_is_gil_enabled", lambda: True)()


def _draws(leaves: Sequence[Leaf]) -> dict[Hashable, frozenset[str]]:
    """Try the functions on a few rows. Return those that draw from global generators, and from which."""
    found: dict[Hashable, frozenset[str]] = {}
    for leaf in leaves:
        if not leaf.tail:
            continue
        engine = Engine(leaf)
        chosen = engine.chosen(0, np.arange(min(_TRIAL_ROWS, len(leaf.order.selection))))
        with contextlib.suppress(Exception):  # raised again in its turn, with the batch of the row
            engine.transform(0, engine.read(chosen))
        found |= engine.generators.drew
    return found


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
