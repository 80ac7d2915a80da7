"""Starting the workers of a loader: processes or threads."""

from __future__ import annotations

import contextlib
import importlib
import multiprocessing
import sys
from collections.abc import Sequence

from midepoch.errors import MidepochError
from midepoch.loader.crew import Crew, Job
from midepoch.loader.options import Options
from midepoch.loader.processes import ProcessCrew
from midepoch.loader.thread_crew import ThreadCrew
from midepoch.loader.trial import global_draws
from midepoch.pipeline.leaf import Leaf
from midepoch.transforms.default_collate import ITEMS


def open_crew(job: Job, leaves: Sequence[Leaf], options: Options) -> Crew:
    """Start workers for a job: threads if they were requested, or if Python has no interpreter lock."""
    if options.worker_type == "thread" or (options.worker_type == "auto" and _suits_threads(options)):
        if any(leaf.format in (None, "torch", ITEMS) for leaf in leaves):
            with contextlib.suppress(ImportError):  # not while threads run, which would see a part of it
                importlib.import_module("torch")
        drawn = global_draws(leaves, options)
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
