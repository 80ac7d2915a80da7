"""The function that opens an object in memory, for messages."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

OPEN_ALREADY = "It is a dataset already: use it as it is."


def opener_of(given: Any) -> str | None:
    """Return the call that opens an object, or None if there is none."""
    package, kind = type(given).__module__.partition(".")[0], type(given).__name__
    if package == "midepoch":
        return None
    if package == "datasets" and kind.startswith("Iterable"):
        return "midepoch.from_hf(ds) with a dataset that was loaded without streaming=True"
    if package == "datasets":
        return "midepoch.from_hf(ds, split='train')" if "Dict" in kind else "midepoch.from_hf(ds)"
    if package in ("pandas", "polars") and kind.endswith("Frame"):
        return "midepoch.from_pandas(frame)"
    if is_array(given) or (package in ("pandas", "polars", "pyarrow") and kind.endswith(("Series", "Array"))):
        return "midepoch.from_dict({'x': array})"
    if package == "pyarrow" or hasattr(given, "__arrow_c_stream__"):
        return "midepoch.from_arrow(table)"
    if isinstance(given, Mapping):
        found = opener_of(next(iter(given.values()), None))
        return f"{found} with one of them" if found and ".from_hf(" in found else "midepoch.from_dict(columns)"
    if isinstance(given, (list, tuple)) and given and all(isinstance(row, Mapping) for row in given[:3]):
        return "midepoch.from_list(rows)"
    if isinstance(given, (list, tuple)) and given and isinstance(given[0], (str, bytes)):
        return None
    if isinstance(given, (list, tuple)) and given:
        found = None if is_array(given[0]) else opener_of(given[0])
        return found if found is not None and "from_map" not in found else "midepoch.from_map_style(items)"
    if inspect.isgenerator(given) or inspect.isroutine(given):
        return "midepoch.from_generator(function), with the function that yields the rows"
    if hasattr(given, "__len__") and hasattr(given, "__getitem__") and not isinstance(given, (str, bytes, type)):
        return "midepoch.from_map_style(ds)"
    return None


def is_dataset(given: Any) -> bool:
    """Return True for a dataset of midepoch, without an import of it."""
    return any(
        f"{each.__module__}.{each.__name__}" == "midepoch.dataset.dataset.Dataset" for each in type(given).__mro__
    )


def is_array(given: Any) -> bool:
    """Return True for an array of numpy or a tensor of torch."""
    return type(given).__module__.partition(".")[0] in ("numpy", "torch") and hasattr(given, "ndim")


def name_of(given: Any) -> str:
    """Return the name of an object's class with its module."""
    return f"{type(given).__module__}.{type(given).__name__}".removeprefix("builtins.")


def instead(function: str, expected: str, given: Any) -> str:
    """Return the message for a wrong argument. It names the function that opens such an object."""
    opener = opener_of(given)
    if isinstance(given, str) or hasattr(given, "__fspath__"):
        remedy = "Call midepoch.from_files(path), or midepoch.load_dataset(name, split=…)."
    elif is_dataset(given):
        remedy = OPEN_ALREADY
    elif opener is not None and (f".{function}(" not in opener or "'x'" in opener):
        remedy = f"Call {opener}."
    else:
        remedy = "Pass such an object."
    return f"{function} takes {expected}, got {name_of(given)}. {remedy}"
