"""Test of a pipeline against guarantee G1: a resumed run yields exactly what the uninterrupted run would have.

from midepoch.testing import assert_resumes_exactly

def test_my_pipeline():
    assert_resumes_exactly(lambda: my_dataset().shuffle(seed=1).map(augment).loader(batch_size=8))
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import islice
from typing import Any

import numpy as np

from midepoch._internal.hints import hinted
from midepoch._internal.values import integer

Make = Callable[[], Any]


@hinted()
def assert_resumes_exactly(
    make: Make,
    *,
    epochs: int = 2,
    resume_with: Sequence[Make] = (),
    steps: Iterable[int] | Mapping[int, int | None] | None = None,
    tail: int | None = None,
) -> int:
    """Save at every moment of ``epochs`` epochs, resume each state in a fresh object, and compare what follows.

    The moments are before the first item, after each item, and after the end of each epoch; what follows extends into
    one more epoch. Every state is converted to JSON and back, and every resume is resumed again one item later. Returns
    the number of resumes checked.

    - ``make`` returns a fresh loader or dataset (anything that iterates an epoch and has ``state_dict`` and
      ``load_state_dict``)
    - ``resume_with``: other makers that must continue in the same way (another ``num_workers``)
    - ``steps``: only these moments, counted over all epochs; a mapping gives each a ``tail`` of its own
    - ``tail``: compare only this many items after a resume
    """
    if not callable(make):
        raise TypeError(f"assert_resumes_exactly takes a function, as in lambda: ds.loader(8), got {make!r:.60}")
    if callable(resume_with):
        raise TypeError("resume_with takes a list of functions, as in [lambda: ds.loader(8, num_workers=2)]")
    if steps is not None and not isinstance(steps, Iterable):
        raise TypeError(f"steps takes numbers of moments, such as range(5), got {steps!r}")
    tail = tail if tail is None else integer(tail, "tail", 1)
    cuts, items = _uninterrupted(make, integer(epochs, "epochs", 1))
    wanted = range(len(cuts)) if steps is None else [step for step in steps if step < len(cuts)]
    if not wanted:
        raise ValueError(f"steps has no moment of these epochs: they are numbered from 0 to {len(cuts) - 1}.")
    checked = 0
    tails = steps if isinstance(steps, Mapping) else dict.fromkeys(wanted, tail)
    for step in wanted:
        (done, state, at_end), tail = cuts[step], tails[step]
        for number, other in enumerate((make, *resume_with)):
            expected = items[done:] if tail is None else items[done : done + tail]
            found = _resumed(other, state, len(expected), at_end)
            _compare(expected, found, f"resumed after {done} items with maker {number}")
            checked += 1
        again = _state_after_one(make, state)
        if again is not None:
            expected = items[done + 1 :] if tail is None else items[done + 1 : done + 1 + tail]
            found = _resumed(make, again, len(expected), at_end=True)
            _compare(expected, found, f"resumed after {done} items, then again one item later")
            checked += 1
    return checked


def _refuse_endless(source: Any) -> None:
    """Raise ValueError for a mix that never ends, of which there would be no last moment."""
    from midepoch.dataset import Dataset
    from midepoch.loader import Loader
    from midepoch.pipeline.lanes import is_endless

    passes = source.options.steps_per_epoch if isinstance(source, Loader) else None
    if isinstance(source, (Dataset, Loader)) and is_endless(source.pipeline.node) and not passes:
        raise ValueError('assert_resumes_exactly: the mix never ends. Use stop="all", or loader(…, steps_per_epoch=9).')


def _uninterrupted(make: Make, epochs: int) -> tuple[list[tuple[int, Any, bool]], list[Any]]:
    """Return (items before it, state, True at an end) of every moment to save, and the items, of one more epoch.

    The moments: before the first item, after each item, and after each StopIteration.
    """
    source = make()
    if not hasattr(source, "state_dict"):
        raise TypeError(f"the function must return a loader or dataset, as in lambda: ds.loader(8), got {source!r:.60}")
    _refuse_endless(source)
    cuts: list[tuple[int, Any, bool]] = [(0, _through_json(source.state_dict()), False)]
    items: list[Any] = []
    for epoch in range(epochs + 1):
        for item in source:
            items.append(item)
            if epoch < epochs:
                cuts.append((len(items), _through_json(source.state_dict()), False))
        if not items:
            raise AssertionError("the pipeline yields nothing: there is nothing to resume")
        if epoch < epochs:
            cuts[-1] = (*cuts[-1][:2], True)
            cuts.append((len(items), _through_json(source.state_dict()), False))
    _close(source)
    plain = make()
    if plain is source and hasattr(source, "close"):
        raise ValueError("the function must create a new loader or dataset at every call, not return the same one.")
    try:
        _compare(items, [item for _ in range(epochs + 1) for item in plain], "another run without a resume")
    except AssertionError as problem:
        raise AssertionError(
            f"{problem}\nTwo runs differ already, so this is not about resuming: is there a seed (shuffle(seed=1)), or "
            "a function with random numbers of its own (use map(with_generator=True)), or one that reads the time?"
        ) from None
    _close(plain)
    return cuts, items


def _resumed(make: Make, state: Any, count: int, at_end: bool) -> list[Any]:
    source = make()
    source.load_state_dict(state)
    found = list(islice(_passes(source, at_end), count)) if count else []
    _close(source)
    return found


def _state_after_one(make: Make, state: Any) -> Any:
    """Load, save immediately, load that, take one item, and save: the ways in which resumes of a resume go wrong."""
    first = make()
    first.load_state_dict(state)
    again = _through_json(first.state_dict())
    _close(first)
    source = make()
    source.load_state_dict(again)
    after = None
    for _ in source:
        after = _through_json(source.state_dict())
        break
    _close(source)
    return after


def _passes(source: Any, at_end: bool) -> Iterable[Any]:
    """Yield pass after pass. Only a state saved after the last item of an epoch may begin with an empty pass."""
    allowed = 1 if at_end else 0
    while True:
        empty = True
        for item in source:
            empty = False
            yield item
        if empty and not allowed:
            return
        allowed = 0


def _through_json(state: Any) -> Any:
    return json.loads(json.dumps(state))


def _close(source: Any) -> None:
    if hasattr(source, "close"):
        source.close()


def _compare(expected: Sequence[Any], found: Sequence[Any], when: str) -> None:
    for number, (a, b) in enumerate(zip(expected, found, strict=False)):
        if not same(a, b):
            raise AssertionError(
                f"{when}: item {number} of what follows differs.\n  expected: {a!r:.300}\n  found: {b!r:.300}"
            )
    if len(expected) != len(found):
        raise AssertionError(f"{when}: {len(found)} items follow, expected {len(expected)}.")


def same(a: Any, b: Any) -> bool:
    """Return True if two items have the same values, in arrays, tensors, Arrow data and nested containers."""
    if type(a) is not type(b):
        return False
    if isinstance(a, Mapping):
        return list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    if hasattr(a, "equals") and hasattr(a, "schema"):  # Arrow tables and batches
        return bool(a.equals(b))
    if "bfloat16" in str(getattr(a, "dtype", "")) and hasattr(a, "float"):  # numpy does not have it
        return bool(a.dtype == b.dtype) and same(a.float(), b.float())
    if hasattr(a, "__array__"):
        x, y = np.asarray(a), np.asarray(b)
        if x.dtype != y.dtype or x.shape != y.shape:
            return False
        if x.dtype == object:
            return all(map(same, x.ravel().tolist(), y.ravel().tolist()))
        return bool(np.array_equal(x, y, equal_nan=x.dtype.kind in "fc"))
    return bool(a == b) or (a != a and b != b)
