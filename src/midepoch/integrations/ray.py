"""Ray: making the index of very many files on a cluster. Needs ``pip install "midepoch[ray]"``.

Loaders need nothing of this in a train loop: they find their rank in Ray Train by themselves (examples/ray_train.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from midepoch._internal.values import reason
from midepoch.errors import WorkerError
from midepoch.open import from_files
from midepoch.sources.files import PathLike
from midepoch.sources.index import spread_over, threads

T = TypeVar("T")

_TASKS_PER_CPU = 8
_MOST_FILES = 256
_RETRIES = 8
"""Of a task whose worker or machine dies. What is wrong with a file is not tried again: it stays wrong."""


def build_index(paths: PathLike | Iterable[PathLike], **options: Any) -> Path:
    """Create the index of files on a Ray cluster, and return its path. It is the same, byte for byte, as without Ray.

    Footers and rows are read by Ray tasks on all machines. The others take over from a worker or machine that dies.
    ``options`` are those of ``from_files``, which opens the data immediately afterwards if it gets the same ones.
    All machines must see the files under the same paths, and have midepoch installed. The index is written by this
    process, to its cache or ``index_dir``.
    """
    with spread_over(_by_tasks):
        dataset = from_files(paths, **{"force_reindex": True, **options})
    index = dataset.pipeline.source.index
    if index.path is None:
        raise OSError(f"the index cannot be written to {options.get('index_dir') or 'the cache folder'}")
    return Path(index.path)


def _by_tasks(action: Callable[[Any], T], items: Sequence[Any], done: Callable[[int], None]) -> list[T]:
    """As ``midepoch.sources.lake.Spread`` asks for, by tasks of some files each."""
    import ray

    if not ray.is_initialized():
        ray.init(log_to_driver=False)
    cpus = max(1, int(ray.cluster_resources().get("CPU", 1)))
    size = min(_MOST_FILES, max(1, -(-len(items) // (cpus * _TASKS_PER_CPU))))
    task = ray.remote(num_cpus=1, max_retries=_RETRIES)(_some)
    shared = ray.put(action)
    starts = range(0, len(items), size)
    tasks = {task.remote(shared, list(items[start : start + size])): start for start in starts}
    results: dict[int, list[T]] = {}
    left, number = list(tasks), 0
    try:
        while left:
            ready, left = ray.wait(left, num_returns=1)
            for finished in ready:
                found = ray.get(finished)
                results[tasks[finished]] = found
                number += len(found)
                done(number)
    except ray.exceptions.RayTaskError as problem:
        raise problem.cause from None
    except ray.exceptions.RayError as problem:
        raise WorkerError(
            f"indexing on Ray failed, after {_RETRIES} retries of what died: {reason(problem)}"
        ) from problem
    finally:
        for waiting in left:
            ray.cancel(waiting, force=False)
    return [result for start in starts for result in results[start]]


def _some(action: Callable[[Any], T], items: list[Any]) -> list[T]:
    """In a Ray worker."""
    return threads(action, items, lambda _: None)
