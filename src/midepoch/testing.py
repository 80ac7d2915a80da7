"""Holding a pipeline to G1: a resumed run yields precisely what the uninterrupted run would have yielded.

    from midepoch.testing import assert_resumes_exactly

    def test_my_pipeline():
        assert_resumes_exactly(lambda: my_dataset().shuffle(seed=1).map(augment).loader(batch_size=8))
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from itertools import islice
from typing import Any

import numpy as np

Make = Callable[[], Any]


def assert_resumes_exactly(
    make: Make,
    *,
    epochs: int = 2,
    resume_with: Sequence[Make] = (),
    steps: Iterable[int] | None = None,
    tail: int | None = None,
) -> int:
    """Save at every step of ``epochs`` epochs, resume each state in a fresh object, and compare what follows.

    ``make`` returns a fresh loader or dataset (anything that iterates an epoch and has ``state_dict`` and
    ``load_state_dict``). ``resume_with`` are other makers that must go on in the same way (another ``num_workers``).
    ``steps``: only these, counted over all epochs. ``tail``: compare only so many items after a resume. Every state goes
    through JSON, and every resume is resumed again one item later. Returns the number of resumes checked.
    """
    states, items = _uninterrupted(make, epochs)
    wanted = range(len(states)) if steps is None else [step for step in steps if step < len(states)]
    checked = 0
    for step in wanted:
        for number, other in enumerate((make, *resume_with)):
            expected = items[step:] if tail is None else items[step : step + tail]
            found = _resumed(other, states[step], len(expected))
            _compare(expected, found, f"resumed at step {step} with maker {number}")
            checked += 1
        again = _state_after_one(make, states[step])
        if again is not None and step + 1 < len(items):
            expected = items[step + 1 :] if tail is None else items[step + 1 : step + 1 + tail]
            found = _resumed(make, again, len(expected))
            _compare(expected, found, f"resumed at step {step}, then again one item later")
            checked += 1
    return checked


def _uninterrupted(make: Make, epochs: int) -> tuple[list[Any], list[Any]]:
    """The state before each item (and behind the last), and the items, of a run that calls state_dict all the time."""
    source = make()
    states, items = [_through_json(source.state_dict())], []
    for _ in range(epochs):
        for item in source:
            items.append(item)
            states.append(_through_json(source.state_dict()))
    _close(source)
    if not items:
        raise AssertionError("the pipeline yields nothing: there is nothing to resume")
    plain = make()
    _compare(items, [item for _ in range(epochs) for item in plain], "a run whose state was never asked for")
    _close(plain)
    return states, items


def _resumed(make: Make, state: Any, count: int) -> list[Any]:
    source = make()
    source.load_state_dict(state)
    found = list(islice(_endless(source), count)) if count else []
    _close(source)
    return found


def _state_after_one(make: Make, state: Any) -> Any:
    """Load, save at once, load that, take one item, save: the ways in which resumes of a resume go wrong."""
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


def _endless(source: Any) -> Iterable[Any]:
    """Epoch after epoch; one empty pass is allowed, for a state that stands at the very end of an epoch."""
    empty = 0
    while empty < 2:
        empty += 1
        for item in source:
            empty = 0
            yield item


def _through_json(state: Any) -> Any:
    return json.loads(json.dumps(state))


def _close(source: Any) -> None:
    if hasattr(source, "close"):
        source.close()


def _compare(expected: Sequence[Any], found: Sequence[Any], when: str) -> None:
    for number, (a, b) in enumerate(zip(expected, found, strict=False)):
        if not same(a, b):
            raise AssertionError(f"{when}: item {number} of what follows differs.\n  expected: {a!r:.300}\n  found: {b!r:.300}")
    if len(expected) != len(found):
        raise AssertionError(f"{when}: {len(found)} items follow, expected {len(expected)}.")


def same(a: Any, b: Any) -> bool:
    """Whether two items hold the same values, in arrays, tensors, Arrow data and nested containers alike."""
    if type(a) is not type(b):
        return False
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    if hasattr(a, "equals") and hasattr(a, "schema"):  # Arrow tables and batches
        return bool(a.equals(b))
    if hasattr(a, "__array__"):
        x, y = np.asarray(a), np.asarray(b)
        if x.dtype != y.dtype or x.shape != y.shape:
            return False
        return bool(np.array_equal(x, y, equal_nan=x.dtype.kind in "fc"))
    return bool(a == b) or (a != a and b != b)
