"""The methods of a dataset that run a function of the user, or a tokenizer. Every call returns a new dataset."""

from __future__ import annotations

import inspect
import logging
import random
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from midepoch._internal.hints import nearest, warn_once
from midepoch._internal.values import integer, one_of
from midepoch.pipeline.leaf import ON_ERROR
from midepoch.pipeline.node import Mix, Rebatch
from midepoch.transforms import FilterExpression, FilterRows, FlatMap, Map
from midepoch.transforms.batch import check_columns
from midepoch.transforms.encode import NAME_COLUMNS, ClassCodes, OfItem, Tokenize, Transform, is_tokenizer
from midepoch.transforms.formats import ITEM, ITEMS
from midepoch.transforms.packing import TOKENIZE_FIRST

if TYPE_CHECKING:
    import pyarrow.compute as pc

    from midepoch.dataset.dataset import Dataset

D = TypeVar("D", bound="Dataset")
_log = logging.getLogger("midepoch")


def names_of(names: str | Sequence[str]) -> tuple[str, ...]:
    """Return a name, or several, as a tuple."""
    if isinstance(names, Mapping) or not isinstance(names, Iterable):
        raise TypeError(f"expected names of columns, got {names!r:.60}. To give columns new names, use rename_columns.")
    return (names,) if isinstance(names, str) else tuple(names)


def map(  # noqa: A001  (the name of the method)
    self: D,
    function: Callable[..., Any],
    batched: bool = False,
    batch_size: int = 1000,
    *,
    drop_last_batch: bool = False,
    one_to_one: bool = True,
    with_indices: bool = False,
    with_generator: bool | str = False,
    input_columns: str | Sequence[str] | None = None,
    remove_columns: str | Sequence[str] | None = None,
    fn_kwargs: Mapping[str, Any] | None = None,
    seed_globals: bool = True,
    on_error: str = "raise",
) -> D:
    """Apply a function to each row (or, ``batched``, to groups of rows), and update the row with its result.

    The function gets a dict (or the values of ``input_columns``), then, if requested, the row's number in the
    dataset before shuffling, then a generator that depends only on the seed, the epoch and the row (``batched``: a
    list of each). It must return one row for each row.

    - ``with_generator=True``: a ``numpy.random.Generator``; "torch": a ``torch.Generator`` on the CPU
    - ``seed_globals=False``: ``random``, ``numpy.random`` and torch are not seeded for each row. What
      the function draws from them then differs after a resume. Saves 9 µs for each call
    - ``one_to_one=False`` (``batched`` only): the function may return more or fewer rows, which replace its input
    - ``drop_last_batch`` (``batched`` only): a last group of less than ``batch_size`` rows is omitted, in each lane
    - ``on_error="skip"``: rows on which it raises are dropped

    After the first two, the number of rows is not known. After ``with_format("arrow")`` a function gets an Arrow
    table and may return one, whose columns replace all others.
    """
    if drop_last_batch and not batched:
        raise ValueError("drop_last_batch=True requires batched=True")
    if not one_to_one and not batched:
        raise ValueError("one_to_one=False requires batched=True. Use flat_map for a function of one row.")
    options = (with_indices, with_generator, input_columns, fn_kwargs, seed_globals, on_error)
    step = Map(
        **_arguments(self, "map", function, batched, batch_size, *options),
        remove_columns=names_of(remove_columns or ()),
        one_to_one=one_to_one,
        drop_last=drop_last_batch,
    )
    if self._columns is not None:
        check_columns(step.remove_columns, self._columns, f"map({step.name})")
    return self._with_step(step)


def filter(  # noqa: A001
    self: D,
    condition: Callable[..., Any] | pc.Expression,
    batched: bool = False,
    batch_size: int = 1000,
    *,
    with_indices: bool = False,
    with_generator: bool | str = False,
    input_columns: str | Sequence[str] | None = None,
    fn_kwargs: Mapping[str, Any] | None = None,
    seed_globals: bool = True,
    on_error: str = "raise",
) -> D:
    """Keep the rows for which a function of a row (see ``map``), or a pyarrow expression, is true.

    Expressions (``pyarrow.compute.field("n") > 3``) are evaluated for thousands of rows in one call. Null is not
    true.
    """
    compute = sys.modules.get("pyarrow.compute")  # an expression implies that it is imported: 50 ms
    if compute is not None and isinstance(condition, compute.Expression):
        return self._with_step(FilterExpression(condition))
    options = (with_indices, with_generator, input_columns, fn_kwargs, seed_globals, on_error)
    return self._with_step(FilterRows(**_arguments(self, "filter", condition, batched, batch_size, *options)))


def flat_map(
    self: D,
    function: Callable[..., Any],
    *,
    with_indices: bool = False,
    with_generator: bool | str = False,
    input_columns: str | Sequence[str] | None = None,
    fn_kwargs: Mapping[str, Any] | None = None,
    seed_globals: bool = True,
    on_error: str = "raise",
) -> D:
    """Replace each row by the rows that a function returns (a list of dicts, possibly empty)."""
    options = (with_indices, with_generator, input_columns, fn_kwargs, seed_globals, on_error)
    return self._with_step(FlatMap(**_arguments(self, "flat_map", function, False, 1, *options)))


def with_transform(
    self: D, transform: Callable[[dict[str, Any]], Any], columns: str | Sequence[str] | None = None
) -> D:
    """Apply a transform of ``datasets``: a function from a batch to a batch, whose columns replace all others.

    It gets batches of one row, so that its results are the same after any resume. ``columns``: the only columns to
    read. Use ``map`` for functions of single rows, and ``map(batched=True)`` for those that need many.
    """
    if not callable(transform):
        raise TypeError(f"with_transform takes a function, got {transform!r}")
    ds = self if columns is None else self.select_columns(columns)
    return ds._with_step(Map(**_arguments(ds, "with_transform", Transform(transform), False, 1)))


def tokenize(
    self: D,
    tokenizer: Any,
    column: str = "text",
    *,
    output: str = "input_ids",
    batch_size: int = 1000,
    **options: Any,
) -> D:
    """Tokenize a text column: ``column`` is replaced by ``output``, with a Hugging Face tokenizer.

    ``options`` are passed to the tokenizer (``add_special_tokens=False``, ``truncation=True`` …). ``padding=`` also
    gives the column ``attention_mask``. Workers tokenize in processes of their own, each with one thread.
    """
    if not isinstance(column, str):
        raise TypeError(f"tokenize takes the name of one column, got {column!r:.60}. Join several with map first.")
    known = dict.fromkeys(("columns", "text_column"), "Did you mean column=?")
    known["batched"] = "It runs on groups of batch_size= rows: omit it."
    for option in options.keys() & known:
        raise TypeError(f"tokenize() has no argument {option!r}. {known[option]}")
    unknown = sorted(options.keys() - {"add_special_tokens", "is_pretokenized"})
    if unknown and hasattr(tokenizer, "token_to_id"):
        raise TypeError(
            f"tokenize({', '.join(f'{option}=…' for option in unknown)}) is for a transformers tokenizer. Configure a "
            "tokenizers tokenizer itself: enable_truncation(128), enable_padding()."
        )
    made = _arguments(self, "tokenize", Tokenize(tokenizer, output, options), True, batch_size, input_columns=column)
    if not is_tokenizer(tokenizer):
        remedy = (
            f"Pass AutoTokenizer.from_pretrained({tokenizer!r})."
            if isinstance(tokenizer, str)
            else "With another one, use map(lambda row: {'input_ids': encode(row['text'])}, remove_columns='text')."
        )
        raise TypeError(f"tokenize takes a tokenizer of transformers or tokenizers, got {tokenizer!r:.60}. {remedy}")
    _check_options(tokenizer, options)
    removed = () if column == output else (column,)
    rowwise = not options.get("padding") and not made["function"].pads  # to the longest of a group
    return self._with_step(Map(**made, remove_columns=removed, rowwise=rowwise))


def with_classes(self: D, column: str, names: tuple[str, ...]) -> D:
    """Replace the names of classes in a column by their numbers."""
    codes = ClassCodes(column, names)
    made = _arguments(self, "class_encode_column", codes, True, input_columns=column, seed_globals=False)
    return self._with_step(Map(**made, rowwise=True))


_NO_LENGTH = 10**20


def _check_options(tokenizer: Any, options: Mapping[str, Any]) -> None:
    """Raise TypeError for an option that a tokenizer of transformers would ignore."""
    if not any(each.__name__ == "PreTrainedTokenizerBase" for each in type(tokenizer).__mro__):
        return
    known = inspect.signature(type(tokenizer).__call__).parameters
    if "return_tensors" in options:
        raise TypeError("tokenize() makes lists, which loader(…, layout='padded') pads. Omit return_tensors.")
    for name in options.keys() - known:
        hint = "Remove columns by ds.remove_columns(…)." if name == "remove_columns" else nearest(name, known, "{}=")
        raise TypeError(f"tokenize: the tokenizer has no argument {name!r}. {hint}".rstrip())
    endless = getattr(tokenizer, "model_max_length", 0) > _NO_LENGTH  # as transformers writes "none"
    if options.get("truncation") and options.get("max_length") is None and endless:
        _log.warning("tokenize(truncation=True): this tokenizer has no greatest length. Pass max_length=…, too.")


def _arguments(
    self: D,
    kind: str,
    function: Any,
    batched: bool,
    batch_size: int = 1000,
    with_indices: bool = False,
    with_generator: bool | str = False,
    input_columns: str | Sequence[str] | None = None,
    fn_kwargs: Mapping[str, Any] | None = None,
    seed_globals: bool = True,
    on_error: str = "raise",
) -> dict[str, Any]:
    """Check the arguments that maps and filters have in common. ``kind``: the method of the dataset."""
    if not isinstance(fn_kwargs, Mapping | None):
        raise TypeError(f"{kind}(fn_kwargs=…) takes a dict of arguments by name, got {fn_kwargs!r:.60}")
    if not callable(function):
        expression = " or a pyarrow expression, such as pyarrow.compute.field('x') > 3" if kind == "filter" else ""
        mask = kind == "filter" and hasattr(function, "dtype")
        remedy = ". For a mask of rows, use select(np.flatnonzero(mask))." if mask else ""
        if callable(getattr(function, "map", None)):
            remedy = f". Pass its method: {kind}({type(function).__name__}().map)"
        raise TypeError(f"{kind} takes a function{expression}, got {function!r:.60}{remedy}")
    called = function if inspect.isroutine(function) else getattr(function, "__call__", function)  # noqa: B004
    if inspect.iscoroutinefunction(called) or inspect.isasyncgenfunction(called):
        raise TypeError(f"{kind} calls a function and uses its result, but {_name(function)} is async. Use def.")
    if kind == "filter" and inspect.isgeneratorfunction(called):
        raise TypeError(f"filter needs True or False, but {_name(function)} is a generator function. Use return.")
    if input_columns is None and (code := getattr(called, "__code__", None)) is not None:
        first = next((name for name in code.co_varnames[: code.co_argcount] if name != "self"), "")
        of_batches = any(isinstance(stage, Rebatch) for stage in self.pipeline.node.stages)
        if first in (("row", "example") if batched else ("batch", "examples") if not of_batches else ()):
            gets = "lists. For one row, omit" if batched else "one row. For lists, pass"
            _log.warning("%s(%s): its argument %r gets %s batched=True.", kind, _name(function), first, gets)
    if batch_size is None or batch_size == -1:
        raise ValueError(
            f"{kind}(batch_size={batch_size}): groups have a fixed size, so that a resume makes the same ones. For "
            "one group of all rows of an epoch, pass batch_size=len(ds)."
        )
    if not batched and batch_size not in (1, 1000):
        _log.warning(
            "%s(batch_size=%s) has no effect on a function of one row. For lists, pass batched=True.", kind, batch_size
        )
    if not with_generator and (own := _own_generator(called)):
        warn_once(
            "%s(%s) draws from the generator %r, of which every worker has a copy: the numbers depend on the workers, "
            "and a resume repeats them. Use with_generator=True.", kind, _name(function), own,
        )  # fmt: skip
    given = self.pipeline.format
    if given == "arrow" and not batched and kind in ("map", "filter"):
        warn_once(
            "%s(%s) gets a table of one row after with_format('arrow'). For a dict, call with_format after it.",
            kind,
            _name(function),
        )
    used = None if input_columns is None else names_of(input_columns)
    if used is not None and self._columns is not None:
        remedy = "For a column of another name: tokenize(tokenizer, 'its name')." if kind == "tokenize" else ""
        check_used(self, used, _name(function) if kind == "tokenize" else f"{kind}({_name(function)})", remedy)
    if given == ITEMS:
        if batched or used is not None or kind not in ("map", "filter", "flat_map"):
            raise ValueError(f"{kind}: a row is an item here, without columns. {NAME_COLUMNS}")
        function, used = OfItem(function, kind), (ITEM,)
    return {
        "function": function,
        "number": self.pipeline.node.functions,
        "batched": batched,
        "batch_size": integer(batch_size, f"{kind}(batch_size=…)", 1),
        "with_indices": with_indices,
        "with_generator": one_of(with_generator, (True, False, "numpy", "torch"), "with_generator"),
        "input_columns": used,
        "fn_kwargs": dict(fn_kwargs or {}),
        "input_format": "python" if given in (None, ITEMS) else given,
        "seed_globals": seed_globals,
        "on_error": one_of(on_error, ON_ERROR, "on_error"),
    }


def _own_generator(function: Any) -> str | None:
    """Return the name by which a function uses a random generator of the script, or None."""
    try:
        used = inspect.getclosurevars(function)
    except (TypeError, ValueError):  # not of Python, or it uses a name that is not set yet
        return None
    kinds = (np.random.Generator, np.random.RandomState, random.Random)
    return next((name for name, value in {**used.globals, **used.nonlocals}.items() if isinstance(value, kinds)), None)


def check_used(self: Dataset, wanted: Sequence[str], what: str, remedy: str) -> None:
    """Raise ColumnError if columns are missing. If some sources of a mix have them, name one that has not."""
    present, base = self._columns or (), self.pipeline.node.base
    for name in wanted:
        if name in present or not isinstance(base, Mix):
            continue
        parts = [part.known_columns for part in base.parts]
        lacking = next((number for number, names in enumerate(parts) if names and name not in names), None)
        if lacking is not None and any(names and name in names for names in parts):
            named, present = base.names[lacking] if base.names else lacking, parts[lacking] or ()
            what = f"{what}: source {named!r} of the mix"
            if remedy == TOKENIZE_FIRST:
                remedy = f"Tokenize {named!r} before the mix, too, or the mix: mix(…).tokenize(tokenizer)."
            else:
                remedy = f"Rename one before the mix, for example rename_column({present[0]!r}, {name!r})."
            break
    check_columns(wanted, present, what, remedy)


def _name(function: Any) -> str:
    return getattr(function, "__name__", None) or type(function).__name__
