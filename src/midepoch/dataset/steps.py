"""The methods of a dataset that run a function or combine rows. Every call returns a new dataset."""

from __future__ import annotations

import inspect
import logging
import random
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import CellType
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from midepoch._internal.hints import nearest, warn_once
from midepoch._internal.values import integer
from midepoch.errors import ColumnError
from midepoch.order.schedule import Schedule
from midepoch.pipeline.node import Mix, Node, Rebatch
from midepoch.transforms import (
    Cast,
    Decode,
    FilterExpression,
    FilterRows,
    FlatMap,
    Map,
    RemoveColumns,
    RenameColumns,
    SelectColumns,
    Unbatch,
)
from midepoch.transforms.batch import check_columns
from midepoch.transforms.columns import inside, types_by_name
from midepoch.transforms.encode import NAME_COLUMNS, ClassCodes, OfItem, Tokenize, Transform, is_tokenizer
from midepoch.transforms.formats import ITEM
from midepoch.transforms.media import decoder_of
from midepoch.transforms.packing import IGNORED, LABELS, TOKENIZE_FIRST, PackSpec

if TYPE_CHECKING:
    import pyarrow as pa
    import pyarrow.compute as pc

    from midepoch.dataset.dataset import Dataset

D = TypeVar("D", bound="Dataset")
_log = logging.getLogger("midepoch")


def names_of(names: str | Sequence[str]) -> tuple[str, ...]:
    """Return a name, or several, as a tuple."""
    if isinstance(names, Mapping) or not isinstance(names, Iterable):
        raise TypeError(f"expected names of columns, got {names!r:.60}. To give columns new names, use rename_columns.")
    return (names,) if isinstance(names, str) else tuple(names)


def select_columns(self: D, column_names: str | Sequence[str]) -> D:
    """Keep only these columns. The others are not read."""
    return self._with_step(SelectColumns(names_of(column_names)))


def remove_columns(self: D, column_names: str | Sequence[str]) -> D:
    """Remove these columns."""
    return self._with_step(RemoveColumns(names_of(column_names)))


def rename_columns(self: D, column_mapping: Mapping[str, str]) -> D:
    """Rename columns."""
    if not isinstance(column_mapping, Mapping):
        raise TypeError(f"rename_columns takes {{old: new}}, got {column_mapping!r:.60}")
    if wrong := [name for name in column_mapping.values() if not isinstance(name, str) or not name]:
        raise TypeError(f"rename_columns: a name of a column is a text that is not empty, got {wrong[0]!r:.60}")
    return self._with_step(RenameColumns(tuple(column_mapping.items())))


def rename_column(self: D, original_column_name: str, new_column_name: str) -> D:
    """Rename one column."""
    if original_column_name not in (known := self._columns or (original_column_name,)) and new_column_name in known:
        raise ColumnError(
            f"rename_column: there is no column {original_column_name!r}. The old name comes first: "
            f"rename_column({new_column_name!r}, {original_column_name!r})."
        )
    return self.rename_columns({original_column_name: new_column_name})


def cast(self: D, columns: Mapping[str, Any] | pa.Schema) -> D:
    """Convert columns to these Arrow types: ``cast({"label": "int32", "ids": pa.list_(pa.int32())})``.

    The type of a number converts the items of a column of lists. Results of functions have the types of their
    values, which may differ between batches. A cast makes them equal.
    """
    types = types_by_name(columns)
    if self._columns is not None:
        check_columns([name for name, _ in types], self._columns, "cast")
    known = self.pipeline.node.known
    if known.certain:
        types = tuple((name, inside(known.columns[name].kind, kind)) for name, kind in types)
    return self._with_step(Cast(types))


def cast_column(self: D, column: str, feature: Any) -> D:
    """Convert one column to an Arrow type, or to that of a Hugging Face feature (``Value``, ``List``, …).

    A ``ClassLabel`` replaces the names of classes by their numbers.
    """
    if type(feature).__name__ == "ClassLabel" and getattr(feature, "names", None):
        return with_classes(self, column, tuple(feature.names))
    return self.cast({column: feature})


def with_classes(self: D, column: str, names: tuple[str, ...]) -> D:
    """Replace the names of classes in a column by their numbers."""
    made = function_arguments(self, ClassCodes(column, names), "class_encode_column", True, 1000, False, False, column)
    return self._with_step(Map(**made, rowwise=True, seed_globals=False))


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
    step = Map(
        **function_arguments(
            self, function, "map", batched, batch_size, with_indices, with_generator, input_columns, fn_kwargs
        ),
        remove_columns=names_of(remove_columns or ()),
        seed_globals=seed_globals,
        on_error=_on_error(on_error),
        one_to_one=one_to_one,
        drop_last=drop_last_batch,
    )
    if self._columns is not None:
        check_columns(step.remove_columns, self._columns, f"map({step.name})")
    return self._with_step(step)


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
    return ds._with_step(
        Map(**function_arguments(ds, Transform(transform), "with_transform", False, 1, False, False, None))
    )


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
    step = FilterRows(
        **function_arguments(
            self, condition, "filter", batched, batch_size, with_indices, with_generator, input_columns, fn_kwargs
        ),
        seed_globals=seed_globals,
        on_error=_on_error(on_error),
    )
    return self._with_step(step)


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
    step = FlatMap(
        **function_arguments(
            self, function, "flat_map", False, 1, with_indices, with_generator, input_columns, fn_kwargs
        ),
        seed_globals=seed_globals,
        on_error=_on_error(on_error),
    )
    return self._with_step(step)


def unbatch(self: D, columns: str | Sequence[str] | None = None) -> D:
    """Make a row for each element of lists, in all columns that contain lists or in these.

    Other columns are repeated. After a map, which may return lists in any column, name the columns.
    """
    if columns is not None:
        names = names_of(columns)
        if self._columns is not None:
            check_columns(names, self._columns, "unbatch")
        return self._with_step(Unbatch(names))
    lists = self._lists
    if lists is None:
        raise ColumnError(
            "unbatch: the columns that contain lists are not known before a map has run. Name them: "
            "unbatch(['tokens'])."
        )
    if not lists:
        raise ColumnError(f"unbatch: none of the columns {', '.join(self._columns or ())} contains lists.")
    return self._with_step(Unbatch(lists, given=False))


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

    ``options`` are passed to the tokenizer (``add_special_tokens=False``, ``truncation=True`` …). Workers tokenize
    in processes of their own, each with one thread.
    """
    if not isinstance(column, str):
        raise TypeError(f"tokenize takes the name of one column, got {column!r:.60}. Join several with map first.")
    for option in ("columns", "text_column", "batched"):
        if option in options:
            hint = "It runs on groups of batch_size= rows: omit it." if option == "batched" else "Did you mean column=?"
            raise TypeError(f"tokenize() has no argument {option!r}. {hint}")
    unknown = sorted(options.keys() - {"add_special_tokens", "is_pretokenized"})
    if unknown and hasattr(tokenizer, "token_to_id"):
        raise TypeError(
            f"tokenize({', '.join(f'{option}=…' for option in unknown)}) is for a transformers tokenizer. Configure a "
            "tokenizers tokenizer itself: enable_truncation(128), enable_padding()."
        )
    made = function_arguments(
        self, Tokenize(tokenizer, output, options), "tokenize", True, batch_size, False, False, column
    )
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


_NO_LENGTH = 10**20


def _check_options(tokenizer: Any, options: Mapping[str, Any]) -> None:
    """Raise TypeError for an option that a tokenizer of transformers would ignore."""
    if not any(each.__name__ == "PreTrainedTokenizerBase" for each in type(tokenizer).__mro__):
        return
    known = inspect.signature(type(tokenizer).__call__).parameters
    if "return_tensors" in options:
        raise TypeError("tokenize() makes lists, which loader(…, layout='padded') pads. Omit return_tensors.")
    for name in options:
        if name not in known:
            hint = (
                "Columns are removed by ds.remove_columns(…)."
                if name == "remove_columns"
                else nearest(name, known, "{}=")
            )
            raise TypeError(f"tokenize: the tokenizer has no argument {name!r}. {hint}".rstrip())
    endless = getattr(tokenizer, "model_max_length", 0) > _NO_LENGTH  # as transformers writes "none"
    if options.get("truncation") and options.get("max_length") is None and endless:
        _log.warning("tokenize(truncation=True): this tokenizer has no greatest length. Pass max_length=…, too.")


def decode(
    self: D,
    column: str,
    kind: str | None = None,
    *,
    size: int | tuple[int, int] | None = None,
    fit: str = "crop",
    mode: str = "RGB",
    layout: str = "CHW",
    shrink: bool = True,
    frames: int | None = None,
    sampling_rate: int | None = None,
    channels: int | None = None,
    root: str | None = None,
    on_error: str | None = None,
) -> D:
    """Decode the image, audio or video files in a column: bytes, paths, or a Hugging Face feature.

    ``kind`` is "image", "audio" or "video"; default: that of the feature, otherwise "image". Results are torch
    tensors, or numpy arrays after ``with_format("numpy")`` (or any format but torch), and without torch.

    Images are uint8 (channels, height, width), videos uint8 (frames, channels, height, width):

    - ``size``: a number, or (height, width). Batches are then one tensor. ``fit="crop"`` scales and crops at the
      center, "stretch" ignores the aspect ratio, "shorter" scales the shorter side to ``size`` and crops nothing
    - ``shrink``: large JPEGs are decoded at 1/2, 1/4 or 1/8, as long as that is not smaller than ``size``
    - ``mode`` is "RGB" or "L" (grey), ``layout`` is "CHW" or "HWC"
    - ``frames`` of a video: this many, evenly spaced; default: all

    Audio is float32 (channels, samples), with another ``sampling_rate`` if given. ``channels=1`` is the mean.

    Paths are relative to ``root``. ``on_error="skip"`` drops rows whose file is damaged or missing; default: the
    ``on_error`` with which the data was opened.
    """
    if self._columns is not None:
        remedy = "The first argument is a column: decode('image')." if column in ("pil", "rgb", "torchrgb") else ""
        check_columns([column], self._columns, "decode", remedy)
    features = {"Image": "image", "Audio": "audio", "Video": "video"}
    options = {"size": size, "fit": fit, "mode": mode, "layout": layout, "shrink": shrink, "frames": frames}
    options |= {"sampling_rate": sampling_rate, "channels": channels}
    decoder = decoder_of(kind or features.get(self._feature(column) or "", "image"), options)
    skip = _on_error(on_error or ("skip" if self._skips else "raise"))
    return self._with_step(Decode(column, decoder, None if root is None else str(root), self._tensors, skip))


def batch(self: D, size: int, drop_last: bool = False) -> D:
    """Combine each ``size`` rows into one row with a list for every column."""
    return self._with_stage(Rebatch(integer(size, "batch", 1), drop_last))


def pack(
    self: D,
    length: int | None = None,
    column: str = "input_ids",
    strategy: str = "concat",
    eos: int | None = None,
    *,
    pad: int = 0,
    labels: bool = False,
    mask_first: bool = False,
    extra: Mapping[str, int] | None = None,
    drop_remainder: bool = False,
    cu_seqlens: bool = False,
    window: int = 1024,
    dtype: str | None = None,
) -> D:
    """Pack documents (lists of tokens) into sequences of ``length``. No token is lost or repeated.

    Without ``length``, sequences have the lengths of the schedule of the mix. When a phase ends, the next tokens
    are cut into sequences of the next length.

    - ``strategy="concat"`` concatenates and splits them; the last sequence of each lane is padded
    - ``strategy="best_fit"`` keeps documents complete if possible: each ``window`` of them is packed into as few
      sequences as best-fit-decreasing finds, each padded
    - ``eos`` is appended to every document, and ``pad`` fills sequences that are not full
    - ``labels`` adds a column ``labels`` for the loss: the tokens, and -100 for padding. ``mask_first``: also -100
      for the first token of every document, which the document before it does not predict
    - ``extra``: other columns with a value for each token, and their padding values; ``{"labels": -100}`` for
      labels of your own
    - ``drop_remainder`` omits sequences that are not full, with their tokens
    - ``dtype`` of the tokens; default: unchanged

    A row has ``column``, ``position_ids`` (from 0 in every document), ``segment_ids`` (1, 2, … for the documents, 0
    for padding), the ``extra`` columns and, if requested, ``cu_seqlens`` (the bounds of the documents).
    """
    hint = "The length comes first: pack(128, column='input_ids')." if isinstance(length, str) else ""
    length = None if length is None else integer(length, "pack(length=…)", 1, hint)
    if not isinstance(column, str):
        raise TypeError(f"pack takes the name of one column, got {column!r:.60}. Others go into extra={{name: pad}}.")
    node, schedule = self.pipeline.node, None
    before = [step for part in (*node.leaves, *node.stages) for step in getattr(part, "steps", ())]
    grouped = [step.function for step in before if isinstance(step, Map) and not step.rowwise]
    if any(isinstance(one, Tokenize) and one.options.get("padding") != "do_not_pad" for one in grouped):
        _log.warning("pack: tokenize() pads, and its padding is packed as if it were text. Omit padding=… there.")
    if length is None:
        schedule = _lengths_of(node, strategy)
        length = max(one.sequence_length or 0 for one in schedule.plan)
    spec = PackSpec(
        length,
        column,
        strategy,
        None if eos is None else integer(eos, "pack(eos=…)", hint="Pass its number: tokenizer.eos_token_id."),
        _pad(pad, column),
        _extra(extra),
        drop_remainder,
        cu_seqlens,
        integer(window, "pack(window=…)", 1),
        None if dtype is None else _dtype(dtype),
        labels,
        mask_first,
        schedule,
    )
    if drop_remainder and strategy == "best_fit":
        _log.warning(
            'pack(drop_remainder=True, strategy="best_fit") drops every sequence that is not exactly full, and these '
            "are most. Omit drop_remainder: pad fills them."
        )
    if self._columns is not None:
        check_used(self, list(spec.pads), "pack", TOKENIZE_FIRST)
        masks = [name for name in self._columns if re.search("mask|labels", name) and name not in spec.pads]
        if masks := [name for name in masks if name not in ("attention_mask", "special_tokens_mask")]:
            _log.warning(
                "pack: the column %r is left out. To pack it, too: extra={%r: %d}.",
                masks[0],
                masks[0],
                -100 if masks[0] == LABELS else 0,
            )
        if labels and LABELS in self._columns:
            raise ValueError(
                "pack(labels=True): the rows have a column 'labels' of their own. Pack it with "
                "extra={'labels': -100}, or remove it with remove_columns('labels')."
            )
    return self._with_stage(spec)


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
            remedy = f"Rename one before the mix, for example rename_column({present[0]!r}, {name!r})."
            if what.startswith("pack"):
                remedy = f"Tokenize {named!r} before the mix, too, or the mix: mix(…).tokenize(tokenizer)."
            break
    check_columns(wanted, present, what, remedy)


def function_arguments(
    self: D,
    function: Any,
    kind: str,
    batched: bool,
    batch_size: int,
    with_indices: bool,
    with_generator: bool | str,
    input_columns: str | Sequence[str] | None,
    fn_kwargs: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Check the arguments that maps and filters have in common."""
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
    if not with_generator and (own := _own_generator(called)):
        warn_once(
            "%s(%s) draws from the generator %r, of which every worker has a copy: the numbers depend on the workers, "
            "and a resume repeats them. Use with_generator=True.", kind, _name(function), own,
        )  # fmt: skip
    if self._input_format == "arrow" and not batched and kind in ("map", "filter"):
        warn_once(
            "%s(%s) gets a table of one row after with_format('arrow'). For a dict, call with_format after it.",
            kind,
            _name(function),
        )
    used = None if input_columns is None else names_of(input_columns)
    if used is not None and self._columns is not None:
        remedy = "For a column of another name: tokenize(tokenizer, 'its name')." if kind == "tokenize" else ""
        check_used(self, used, _name(function) if kind == "tokenize" else f"{kind}({_name(function)})", remedy)
    if self._has_items:
        if batched or used is not None or kind not in ("map", "filter", "flat_map"):
            raise ValueError(f"{kind}: a row is an item here, without columns. {NAME_COLUMNS}")
        function, used = OfItem(function, kind), (ITEM,)
    return {
        "function": function,
        "number": self._functions,
        "batched": batched,
        "batch_size": integer(batch_size, f"{kind}(batch_size=…)", 1),
        "with_indices": with_indices,
        "with_generator": _generator(with_generator),
        "input_columns": used,
        "fn_kwargs": dict(fn_kwargs or {}),
        "input_format": self._input_format,
    }


def _own_generator(function: Any) -> str | None:
    """Return the name by which a function uses a generator of random numbers of the script, or None."""
    code = getattr(function, "__code__", None)
    if code is None:
        return None
    cells = [cell.cell_contents for cell in function.__closure__ or () if cell != CellType()]
    used = {name: function.__globals__.get(name) for name in code.co_names}
    used.update(zip(code.co_freevars, cells, strict=False))
    kinds = (np.random.Generator, np.random.RandomState, random.Random)
    return next((name for name, value in used.items() if isinstance(value, kinds)), None)


def _on_error(given: str) -> str:
    if given not in ("raise", "skip"):
        raise ValueError(f"on_error must be 'raise' or 'skip', got {given!r}")
    return given


def _generator(given: bool | str) -> bool | str:
    if given not in (True, False, "numpy", "torch"):
        raise ValueError(f"with_generator must be True, False, 'numpy' or 'torch', got {given!r}")
    return given


def _extra(given: Any) -> dict[str, int]:
    if given is None:
        return {}
    if not isinstance(given, Mapping):
        names = [given] if isinstance(given, str) else given if isinstance(given, (list, tuple, set)) else [LABELS]
        example = ", ".join(f"{name!r}: {-100 if name == LABELS else 0}" for name in names)
        raise TypeError(f"pack(extra=…) takes columns and their padding values, extra={{{example}}}, got {given!r:.60}")
    return {name: _integer(value, f"extra {name}") for name, value in given.items()}


def _dtype(given: Any) -> str:
    try:
        return str(np.dtype(given).name)
    except TypeError:
        raise TypeError(f"pack(dtype=…) takes a type of integers, such as 'int32', got {given!r:.60}") from None


def _integer(value: Any, what: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"pack({what}=…) must be an integer, got {value!r}")
    return value


def _pad(value: Any, column: str) -> int:
    if isinstance(value, str):
        raise TypeError(f"pack(pad=…) must be an integer, got {value!r:.60}. Pass its number: tokenizer.pad_token_id.")
    if value == IGNORED and column == "input_ids":
        raise ValueError(
            f"pack(pad={IGNORED}) would be a token of {column!r}. {IGNORED} is for labels, which labels=True adds. "
            "Pass pad=tokenizer.pad_token_id."
        )
    return _integer(value, "pad")


def _lengths_of(node: Node, strategy: str) -> Schedule:
    """Return the schedule that gives the lengths of packed sequences. Raise TypeError if there is none."""
    schedule = node.schedule
    if schedule is None or not schedule.plan[0].sequence_length:
        what = (
            "the data is not mixed by a schedule"
            if schedule is None
            else "the phases of the schedule have no sequence_length"
        )
        raise TypeError(f"pack() needs length, as in pack(4096, eos=2, pad=0): {what}.")
    if strategy != "concat":
        raise ValueError(f"pack(strategy={strategy!r}): sequence lengths of a schedule need strategy='concat'.")
    if not node.follows_schedule:
        raise ValueError(
            f"pack() by a schedule cannot follow steps that change the number of rows ({node.text}): its phases would "
            "end at other tokens. Filter, map and batch the sources before they are mixed."
        )
    return schedule


def _name(function: Any) -> str:
    return getattr(function, "__name__", None) or type(function).__name__
