"""Errors for calls and names that do not exist here: what was wrong, and the nearest equivalent.

Also which function opens an object in memory.
"""

from __future__ import annotations

import difflib
import functools
import inspect
import logging
import textwrap
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, TypeVar

_log = logging.getLogger("midepoch")

F = TypeVar("F", bound=Callable[..., Any])
C = TypeVar("C", bound=type)

Hints = Mapping[str, str]
"""Names that people know from other libraries, and what to do here instead.

``*``: any other name. ``too many``: more arguments by position than there are. ``NAME missing``, ``NAME twice``.
"""


def each_name(hints: Hints) -> dict[str, str]:
    """Return a table with an entry for each name, of one in which names with the same answer stand together: "a, b"."""
    return {name: hint for names, hint in hints.items() for name in names.split(", ")}


_warned: dict[tuple[str, ...], object] = {}


def warn_once(text: str, *args: str) -> None:
    """Log a warning, once in a process for the same words, whatever number of threads calls it."""
    own = object()
    if _warned.setdefault((text, *args), own) is own:
        _log.warning(text, *args)


def forget_warnings() -> None:
    """Let all warnings be logged once more."""
    _warned.clear()


def hinted(hints: Hints | None = None, name: str | None = None) -> Callable[[F], F]:
    """Return a decorator: a call with wrong arguments raises TypeError with a hint for each, and costs nothing else.

    ``name``: that of the function in messages; default: its own.
    """

    def decorate(function: F) -> F:
        called = name or function.__name__
        places = function.__code__.co_varnames[: function.__code__.co_argcount]
        simple = {key: kind for key, kind in function.__annotations__.items() if kind in ("bool", "float")}

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            if simple:
                for key, value in (*zip(places, args, strict=False), *kwargs.items()):
                    if key in simple and not _is_simple(value, simple[key]):
                        expected = "True or False" if simple[key] == "bool" else "a number"
                        hint = (hints or {}).get(key, "")
                        raise TypeError(f"{called}({key}=…) takes {expected}, got {value!r:.60}. {hint}".rstrip())
            try:
                return function(*args, **kwargs)
            except TypeError as problem:
                # With no frame but this one, the call itself failed: the arguments do not fit the signature.
                if problem.__traceback__ is None or problem.__traceback__.tb_next is not None:
                    raise
                text = explained(called, inspect.signature(function), args, kwargs, hints or {})
                if text is None:
                    raise
            raise TypeError(text)

        return call  # type: ignore[return-value]

    return decorate


def _is_simple(value: Any, kind: str) -> bool:
    if kind == "float":
        return hasattr(value, "__float__") and not isinstance(value, bool)
    return type(value).__name__ in ("bool", "bool_") or (isinstance(value, int) and value in (0, 1))


def hinted_methods(hints: Mapping[str, Hints], only: Collection[str] | None = None) -> Callable[[C], C]:
    """Return a decorator of a class: its public methods, inherited ones included, explain calls that do not fit.

    ``hints``: for each method. ``only``: these methods, if others are called at every step.
    """

    def decorate(cls: C) -> C:
        for name in dir(cls):
            if (name.startswith("_") and name != "__init__") or (only is not None and name not in only):
                continue
            method = inspect.getattr_static(cls, name)
            shown = cls.__name__ if name == "__init__" else f"{cls.__name__}.{name}"
            if inspect.isfunction(method) and method.__module__.partition(".")[0] == __name__.partition(".")[0]:
                setattr(cls, name, hinted(hints.get(name), shown)(method))
            elif isinstance(method, classmethod | staticmethod):
                setattr(cls, name, type(method)(hinted(hints.get(name), shown)(method.__func__)))
        return cls

    return decorate


def explained(
    name: str, signature: inspect.Signature, args: tuple[Any, ...], kwargs: Mapping[str, Any], hints: Hints
) -> str | None:
    """Return why a call does not fit a signature, and what does. None if it fits."""

    def answer(text: str, key: str, otherwise: str = "") -> str:
        hint = hints.get(key) or otherwise
        return f"{name}() {text}.{' ' * bool(hint)}{hint}"

    parameters = {key: each for key, each in signature.parameters.items() if key not in ("self", "cls")}
    given = len(args) - (len(signature.parameters) - len(parameters))
    kinds = {each.kind for each in parameters.values()}
    takes = f"It takes {', '.join(parameters) or 'no arguments'}."
    unknown = [key for key in kwargs if key not in parameters]
    if unknown and inspect.Parameter.VAR_KEYWORD not in kinds:
        near = nearest(unknown[0], parameters, "{}=")
        return answer(f"has no argument {unknown[0]!r}", unknown[0], near or hints.get("*") or takes)
    positional = [key for key, each in parameters.items() if each.kind is each.POSITIONAL_OR_KEYWORD]
    if given > len(positional) and inspect.Parameter.VAR_POSITIONAL not in kinds:
        keywords = [key for key, each in parameters.items() if each.kind is each.KEYWORD_ONLY]
        rest = [hints.get("too many", ""), f"Pass {', '.join(keywords)} by name." if keywords else takes]
        if positional and "Sequence[" in str(parameters[positional[-1]].annotation):
            rest.insert(0, "Pass several as a list.")
        count = f"{len(positional) or 'no'} argument{'s' * (len(positional) > 1)}"
        return f"{name}() takes {count} by position, got {given}. {' '.join(filter(None, rest))}"
    if twice := [key for key in positional[:given] if key in kwargs]:
        return answer(f"got {twice[0]!r} twice: by position and by name", f"{twice[0]} twice")
    bound = {*positional[:given], *kwargs}
    needed = [
        key
        for key, each in parameters.items()
        if each.default is each.empty and key not in bound and each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD)
    ]
    return answer(f"needs {', '.join(needed)}", f"{needed[0]} missing") if needed else None


def no_attribute(owner: str, name: str, names: Iterable[str], hints: Hints) -> AttributeError:
    """Return the error for an attribute that does not exist."""
    names = tuple(names)
    hint = hints.get(name) or ("" if name.startswith("_") else nearest(name, names, "{}") or _all(names))
    # Without an object, Python adds no suggestion of its own to a traceback.
    return AttributeError(f"{owner} has no attribute {name!r}.{' ' * bool(hint)}{hint}", name=name, obj=None)


def setter(owner: str, hints: Hints, remedy: str) -> Callable[[Any, str, Any], None]:
    """Return a ``__setattr__`` that refuses public names which would change nothing. Names of others are accepted."""

    def set_attribute(self: Any, name: str, value: Any) -> None:
        if not name.startswith("_"):
            known = inspect.getattr_static(type(self), name, None)
            fixed = known.fset is None if isinstance(known, property) else name in hints
            if fixed or (known is None and nearest(name, dir(type(self)), "{}")):
                raise AttributeError(f"{owner} does not change by {name} = …. {remedy}")
        object.__setattr__(self, name, value)

    return set_attribute


def fixed(owner: str, remedy: str) -> Callable[[C], C]:
    """Return a decorator of a class: setting a property that cannot be set raises AttributeError with the way out."""

    def refuse(name: str, *_: Any) -> None:
        raise AttributeError(f"{owner} does not change by {name} = …. {remedy}")

    def decorate(cls: C) -> C:
        for name, each in list(vars(cls).items()):
            if isinstance(each, property) and each.fset is None:
                setattr(cls, name, each.setter(functools.partial(refuse, name)))
        return cls

    return decorate


class Elsewhere:
    """Attribute of a class that does not exist there. Reading it raises AttributeError with a hint."""

    def __init__(self, owner: str, name: str, hint: str) -> None:
        self._owner, self._name, self._hint = owner, name, hint

    def __get__(self, instance: object, owner: type) -> Any:
        raise no_attribute(self._owner, self._name, (), {self._name: self._hint})


def nearest(name: str, names: Iterable[str], form: str) -> str:
    """Return "Did you mean …?" with the nearest of some names, or "" if none is near."""
    return _nearest(name, tuple(names), form)


# Frameworks call hasattr() with the same names again and again: 2 ms each without a cache.
@functools.lru_cache(maxsize=1024)
def _nearest(name: str, names: tuple[str, ...], form: str) -> str:
    public = [each for each in names if not each.startswith("_")]
    by_case = {each.lower(): each for each in public}
    found = difflib.get_close_matches(name.lower(), by_case, n=1, cutoff=0.7)
    found = found or [word for word in name.lower().split("_") if len(word) > 3 and word in by_case]
    return f"Did you mean {form.format(by_case[found[0]])}?" if found else ""


_OF_PROTOCOLS = {"check_state", "current_pass", "end_pass", "get_state", "set_state", "pipeline", "changes"}
"""Names that programs call rather than people."""


@functools.lru_cache(maxsize=16)
def _all(names: tuple[str, ...]) -> str:
    public = [name for name in names if not name.startswith("_") and name not in _OF_PROTOCOLS]
    return textwrap.shorten(f"It has {', '.join(public)}", 500, placeholder=" …") + "." if public else ""


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
        if given and is_dataset(next(iter(given.values()))):
            return None
        return f"{found} with one of them" if found and ".from_hf(" in found else "midepoch.from_dict(columns)"
    if isinstance(given, (list, tuple)) and given:
        if all(isinstance(row, Mapping) for row in given[:3]):
            return "midepoch.from_list(rows)"
        if isinstance(given[0], (str, bytes)):
            return None
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


def is_loader(given: Any) -> bool:
    """Return True for a loader, of midepoch or torch."""
    return hasattr(given, "dataset") and hasattr(given, "__iter__")


def is_array(given: Any) -> bool:
    """Return True for an array of numpy or a tensor of torch."""
    return type(given).__module__.partition(".")[0] in ("numpy", "torch") and hasattr(given, "ndim")


def name_of(given: Any) -> str:
    """Return the name of an object's class with its module."""
    return f"{type(given).__module__}.{type(given).__name__}".removeprefix("builtins.")


def instead(function: str, expected: str, given: Any) -> str:
    """Return the message for a wrong argument. It names the function that opens such an object."""
    if isinstance(given, type):
        return f"{function} takes {expected}, got the class {given.__name__}. Create it first: {given.__name__}(…)."
    listed = isinstance(given, (list, tuple)) and given
    kinds = list(dict.fromkeys(map(name_of, given))) if listed else []
    got = f"{name_of(given)} of {' and '.join(kinds)}" if kinds else name_of(given)
    remedy = "Give all of them one type." if len(kinds) > 1 else remedy_for(given, function)
    return f"{function} takes {expected}, got {got:.100}. {remedy}"


def remedy_for(given: Any, function: str = "") -> str:
    """Return the sentence that says how an object becomes a dataset, if it was not an argument for ``function``."""
    opener = opener_of(given)
    if isinstance(given, Mapping) and any(map(is_dataset, given.values())):
        return f"Pass one of its datasets: [{next(iter(given))!r}]."
    if isinstance(given, str) or hasattr(given, "__fspath__"):
        return "Call midepoch.from_files(path), or midepoch.load_dataset(name, split=…)."
    if is_dataset(given):
        return OPEN_ALREADY
    if is_loader(given):
        return "It is a loader: pass its dataset, loader.dataset."
    if isinstance(given, (list, tuple)) and given and isinstance(given[0], str):
        return "Call midepoch.from_list([{'text': text} for text in texts]), or midepoch.from_files(paths)."
    if opener is not None and (f".{function}(" not in opener or "'x'" in opener):
        return f"Call {opener}."
    return "Pass what .read() returns." if hasattr(given, "read") else "Pass such an object."


NAMES = each_name(
    {
        "DataLoader": "Use ds.loader(batch_size, num_workers=…).",
        "StatefulDataLoader": "Use ds.loader(batch_size, num_workers=…), which has state_dict and load_state_dict.",
        "IterableDataset": "Use midepoch.Dataset, which is iterable.",
        "DatasetDict": "Open one split: load_dataset(…, split='train').",
        "Features": "Use datasets.Features, or Arrow types with ds.cast(…).",
        "ClassLabel": "Use ds.class_encode_column(column).",
        "Value": "Use Arrow types with ds.cast({'label': 'int32'}).",
        "open": "Use load_dataset, load_from_disk or from_files.",
        "load": "Use midepoch.from_files(paths), or midepoch.load_dataset(name, split=…).",
        "read_parquet, from_parquet, scan_parquet": "Use midepoch.from_files('*.parquet').",
        "read_csv, from_csv": "Use midepoch.from_files('*.csv').",
        "read_json, from_json": "Use midepoch.from_files('*.jsonl').",
        "from_text, from_txt": "Use midepoch.from_files('*.txt').",
        "read_delta": "Use midepoch.from_delta(uri).",
        "read_lance": "Use midepoch.from_lance(uri).",
        "read_iceberg": "Use midepoch.from_iceberg('catalog.namespace.table').",
        "ImageFolder": "Use midepoch.from_files(folder), which names the classes by the folders.",
        "Stream": "Use midepoch.from_files(folder), and midepoch.mix({…}, weights) for several.",
        "StreamingDataset, from_mds, from_litdata": "Use midepoch.from_files(folder), which reads MDS shards and "
        "LitData chunks in place.",
        "WebDataset, from_webdataset": "Use midepoch.from_files('shards/{000000..000146}.tar').",
        "from_polars": "Use midepoch.from_pandas(frame), which also takes frames of polars.",
        "from_table": "Use midepoch.from_arrow(table).",
        "from_numpy, from_tensor_slices": "Use midepoch.from_dict({'x': array}).",
        "from_tensors, TensorDataset": "Use midepoch.from_dict({'x': tensor}), or midepoch.from_map_style(dataset).",
        "from_torch": "Use midepoch.from_map_style(dataset).",
        "MapDataset": "Use midepoch.from_map_style(items), or midepoch.from_files(paths).",
        "from_dataset": "Use midepoch.from_hf(ds) for Hugging Face, or midepoch.from_map_style(ds) for any ds[i].",
        "from_datasets, from_huggingface": "Use midepoch.from_hf(ds).",
        "from_spark": "Write the frame once: df.write.parquet(folder), and use midepoch.from_files(folder).",
        "from_sql": "Use midepoch.from_pandas(pandas.read_sql(…)), or midepoch.from_generator(function).",
        "loader": "It is a method of a dataset: ds.loader(batch_size, num_workers=…).",
        "shuffle": "It is a method of a dataset: ds.shuffle(seed=…).",
        "tokenize, pack": "It is a method of a dataset: ds.tokenize(tokenizer).pack(length, eos=…, pad=…).",
        "random_split": "Use ds.train_test_split(test_size=0.1, seed=0), or ds.slice(None, '90%') and ds.slice('90%').",
        "chain": "Use midepoch.concat([a, b]).",
        "interleave": "Use midepoch.mix([a, b], weights=…).",
        "Checkpoint": "Use midepoch.PipelineCheckpoint, or midepoch.checkpoint.",
    }
)
"""Names that do not exist in the package."""
