"""The methods of a dataset that change its columns, or combine rows. Every call returns a new dataset."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from midepoch._internal.values import LARGEST, integer, one_of
from midepoch.dataset.functions import check_used, names_of, with_classes
from midepoch.errors import ColumnError
from midepoch.order.schedule import Schedule
from midepoch.pipeline.leaf import ON_ERROR
from midepoch.pipeline.node import Node, Rebatch
from midepoch.transforms import (
    Cast,
    Decode,
    RemoveColumns,
    RenameColumns,
    SelectColumns,
    Unbatch,
)
from midepoch.transforms.batch import check_columns
from midepoch.transforms.columns import inside, types_by_name
from midepoch.transforms.encode import Tokenize
from midepoch.transforms.media import decoder_of
from midepoch.transforms.media.images import installed
from midepoch.transforms.packing import IGNORED, LABELS, OWN_LABELS, TOKENIZE_FIRST, PackSpec

if TYPE_CHECKING:
    import pyarrow as pa

    from midepoch.dataset.dataset import Dataset

D = TypeVar("D", bound="Dataset")
_log = logging.getLogger("midepoch")


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


def unbatch(self: D, columns: str | Sequence[str] | None = None) -> D:
    """Make a row for each element of lists, in all columns that contain lists or in these.

    Other columns are repeated. After a map, which may return lists in any column, name the columns.
    """
    if columns is not None:
        names = names_of(columns)
        if self._columns is not None:
            check_columns(names, self._columns, "unbatch")
        return self._with_step(Unbatch(names))
    lists = self.pipeline.node.known.lists
    if lists is None:
        raise ColumnError(
            "unbatch: the columns that contain lists are not known before a map has run. Name them: "
            "unbatch(['tokens'])."
        )
    if not lists:
        raise ColumnError(f"unbatch: none of the columns {', '.join(self._columns or ())} contains lists.")
    return self._with_step(Unbatch(lists, given=False))


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
    skips = any(leaf.on_error == "skip" for leaf in self.pipeline.node.leaves)
    on_error = one_of(on_error or ("skip" if skips else "raise"), ON_ERROR, "on_error")
    tensors = self.pipeline.format in (None, "torch") and installed("torch")
    return self._with_step(Decode(column, decoder, None if root is None else str(root), tensors, on_error))


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
    tokenized = [(step.function, step.rowwise) for step in before if isinstance(getattr(step, "function", 0), Tokenize)]
    if any(not rowwise and each.options.get("padding") != "do_not_pad" for each, rowwise in tokenized):
        _log.warning("pack: tokenize() pads, and its padding is packed as if it were text. Omit padding=… there.")
    pads = [getattr(each.tokenizer, "pad_token_id", None) for each, _ in tokenized]
    if not (pad or drop_remainder) and pads and pads[-1]:
        _log.warning("pack fills sequences with token 0, and the tokenizer pads with %s: pass pad=….", pads[-1])
    if length is None:
        schedule = _lengths_of(node, strategy)
        length = max(one.sequence_length or 0 for one in schedule.plan)
    eos = None if eos is None else integer(eos, "pack(eos=…)", hint="Pass its number: tokenizer.eos_token_id.")
    pad, extra, window = _pad(pad, column), _extra(extra), integer(window, "pack(window=…)", 1)
    options = (drop_remainder, cu_seqlens, window, _dtype(dtype), labels, mask_first, schedule)
    spec = PackSpec(length, column, strategy, eos, pad, extra, *options)
    if drop_remainder and strategy == "best_fit":
        _log.warning(
            'pack(drop_remainder=True, strategy="best_fit") drops every sequence that is not exactly full, and these '
            "are most. Omit drop_remainder: pad fills them."
        )
    if self._columns is not None:
        check_used(self, list(spec.pads), "pack", TOKENIZE_FIRST)
        packed = {*spec.pads, "attention_mask", "special_tokens_mask"}
        if left := [name for name in self._columns if re.search("mask|labels", name) and name not in packed]:
            pad_of = IGNORED if left[0] == LABELS else 0
            _log.warning("pack: the column %r is left out. To pack it, too: extra={%r: %d}.", left[0], left[0], pad_of)
        if labels and LABELS in self._columns:
            raise ColumnError(OWN_LABELS)
    return self._with_stage(spec)


def _extra(given: Any) -> dict[str, int]:
    if given is None:
        return {}
    if not isinstance(given, Mapping):
        names = [given] if isinstance(given, str) else given if isinstance(given, (list, tuple, set)) else [LABELS]
        example = ", ".join(f"{name!r}: {-100 if name == LABELS else 0}" for name in names)
        raise TypeError(f"pack(extra=…) takes columns and their padding values, extra={{{example}}}, got {given!r:.60}")
    return {name: integer(value, f"pack(extra=…) of {name!r}", -LARGEST) for name, value in given.items()}


def _dtype(given: Any) -> str | None:
    try:
        return None if given is None else str(np.dtype(given).name)
    except TypeError:
        raise TypeError(f"pack(dtype=…) takes a type of integers, such as 'int32', got {given!r:.60}") from None


def _pad(value: Any, column: str) -> int:
    if value == IGNORED and column == "input_ids":
        raise ValueError(
            f"pack(pad={IGNORED}) would be a token of {column!r}. {IGNORED} is for labels, which labels=True adds. "
            "Pass pad=tokenizer.pad_token_id."
        )
    hint = "Pass its number: tokenizer.pad_token_id." if isinstance(value, str) else ""
    if value is None:
        hint = "The tokenizer has no token for padding: pass pad=tokenizer.eos_token_id, or omit it for 0."
    return integer(value, "pack(pad=…)", -LARGEST, hint)


def _lengths_of(node: Node, strategy: str) -> Schedule:
    """Return the schedule that gives the lengths of packed sequences. Raise TypeError if there is none."""
    schedule = node.schedule
    if schedule is None or not schedule.plan[0].sequence_length:
        what = "the data is not mixed by a schedule" if schedule is None else "its phases have no sequence_length"
        raise TypeError(f"pack() needs length, as in pack(4096, eos=2, pad=0): {what}.")
    if strategy != "concat":
        raise ValueError(f"pack(strategy={strategy!r}): sequence lengths of a schedule need strategy='concat'.")
    if not node.follows_schedule:
        raise ValueError(
            f"pack() by a schedule cannot follow steps that change the number of rows ({node.text}): its phases would "
            "end at other tokens. Filter, map and batch the sources before they are mixed."
        )
    return schedule
