"""The methods of a dataset that choose rows, their order, and the shard of this process."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar, cast

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from midepoch._internal.hints import warn_once
from midepoch._internal.progress import shown
from midepoch._internal.values import integer, one_of
from midepoch.dataset.reading import column_values, in_order, strata
from midepoch.distributed.keyvalue import check_agreed, draw_seed
from midepoch.errors import ColumnError
from midepoch.order import Selection, Shard, Shuffle, Weighted
from midepoch.order.bijection import Bijection, check_seed, derive
from midepoch.order.weights import checked
from midepoch.pipeline.leaf import Leaf
from midepoch.pipeline.node import Concat, Node, Slice, Window
from midepoch.sources.splits import apportion, bound_of, split_sizes
from midepoch.transforms.formats import ITEMS

if TYPE_CHECKING:
    from midepoch.dataset.dataset import Dataset

D = TypeVar("D", bound="Dataset")
_log = logging.getLogger("midepoch")


def slice(  # noqa: A001  (the name of the method)
    self: D, start: int | str | None = None, stop: int | str | None = None, step: int | None = None
) -> D:
    """Keep only the rows ``[start:stop:step]``, chosen before any shuffle: no row moves from one slice to another.

    Bounds may be percentages: ``ds.slice(None, "80%")`` and ``ds.slice("80%")`` are two parts of a dataset. Slice
    before steps that change the number of rows.
    """
    chosen = selection_of(self, "slice")
    _note_order(self)
    if step is not None and (not hasattr(step, "__index__") or step == 0):
        raise ValueError(f"slice(step=…) takes an integer that is not 0, got {step!r:.60}. Omit it for all rows.")
    first, last = (bound_of(bound, len(chosen)) for bound in (start, stop))
    return with_selection(self, chosen.slice(first, last, step))


_PART = "For a part of the rows: ds.slice({})."


def take(self: D, n: int) -> D:
    """Keep the first n rows, before any shuffle.

    After a step that changes the number of rows: the first n rows of every epoch's order, computed in one lane.
    """
    return _sliced(self, 0, integer(n, "take", hint=_PART.format("None, '10%'")))


def skip(self: D, n: int) -> D:
    """Omit the first n rows, before any shuffle.

    After a step that changes the number of rows: omit the first n rows of every epoch's order, which are computed
    and discarded.
    """
    return _sliced(self, integer(n, "skip", hint=_PART.format("'10%'")), None)


def _sliced(self: D, start: int, stop: int | None) -> D:
    """Keep some rows by number, or outputs as they come if they have no numbers."""
    if self.pipeline.numbered is not None:
        return self.slice(start, stop)
    return self._with_stage(Slice(start, stop))


def select(self: D, indices: Iterable[int]) -> D:
    """Keep the rows with these numbers, in this order, before any shuffle."""
    chosen = selection_of(self, "select")
    _note_order(self)
    return with_selection(self, chosen.select(indices))


def _note_order(ds: Dataset) -> None:
    """Log that a shuffle does not choose the rows that a step after it keeps."""
    if isinstance(ds.pipeline.base.order.shuffle, Shuffle):
        warn_once(
            "select, slice, take and skip after shuffle() choose rows in the order of the data, and these are "
            "shuffled. For rows at random, use ds.train_test_split(test_size=100, seed=0)['test']. For the first "
            "ones, call them before shuffle()."
        )


def train_test_split(
    self: D,
    test_size: float | None = None,
    train_size: float | None = None,
    shuffle: bool = True,
    seed: int | None = 0,
    *,
    stratify_by_column: str | None = None,
) -> dict[str, D]:
    """Return ``{"train": …, "test": …}``: two parts without a row in common, the same in every process and run.

    Sizes are shares (0.1) or numbers of rows; by default, a quarter of the rows are for the test. Rows are drawn at
    random by ``seed`` (None is 0) and stay in their order; ``shuffle=False`` takes the last rows for the test.
    Shuffle the training part: ``parts["train"].shuffle(seed=1)``.

    ``stratify_by_column``: both parts have the values of this column in the proportions of the data, rounded to
    rows. The column is read once.
    """
    chosen = selection_of(self, "train_test_split")
    if stratify_by_column is not None and not shuffle:
        raise ValueError("train_test_split: stratify_by_column draws rows at random. Omit shuffle=False.")
    train, test = split_sizes(len(chosen), train_size, test_size)
    drawn = Bijection(len(chosen), derive(check_seed(0 if seed is None else seed), 0, "split"))
    if stratify_by_column is not None:
        rows = stratified(drawn, strata(self, stratify_by_column, "train_test_split"), train, test)
        first, last = map(chosen.select, rows)
    elif not shuffle:
        first, last = chosen.slice(0, train), chosen.slice(train, train + test)
    else:
        # The rows of the test, then those of neither part, then those for training, which may be too many to list.
        tested = np.sort(drawn(np.arange(test, dtype=np.int64)))
        others = drawn(np.arange(test + train, len(chosen), dtype=np.int64))
        first, last = chosen.without(np.sort(np.concatenate([tested, others]))), chosen.select(tested)
    return SplitDict({SplitName("train"): with_selection(self, first), SplitName("test"): with_selection(self, last)})


class SplitDict(dict[str, Any]):
    """The parts of a dataset by their names."""

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"a dict of splits has no attribute {name!r}. Use one of them: parts['train'].")

    def __missing__(self, name: object) -> Any:
        raise KeyError(f"there is no split {name!r}. There are: {', '.join(self)}. For 3 parts, split twice.")


class SplitName(str):
    """Name of a split. ``train, test = ds.train_test_split()`` gives names: the first use of one shows the way out."""

    __slots__ = ()

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"{self!r} is the name of a split. Use its dataset: ds.train_test_split(…)[{self!r}].")


def selection_of(self: D, what: str) -> Selection:
    """Return the rows that are selected. Raise if they have no numbers, or are drawn."""
    if self.pipeline.numbered is None:
        raise TypeError(
            f"{what}: the rows of this dataset have no numbers before it has run ({self.pipeline.node.text}). "
            f"Call {what}() before the steps that change the number of rows, or cache() the rows, which numbers "
            "them. take() and skip() also work without."
        )
    order = self.pipeline.base.order
    if isinstance(order.shuffle, Weighted):
        raise ValueError(
            f"{what}: rows are drawn by weights, one for each row. Call {what}() before weighted() or balanced(). "
            "num_samples= sets the number of draws."
        )
    return order.selection


def with_selection(self: D, selection: Selection) -> D:
    """Keep only these rows of the source."""
    leaf = self.pipeline.base
    return with_leaf(self, replace(leaf, order=replace(leaf.order, selection=selection)))


def shuffle(self: D, seed: int | None = None, scope: str | None = None, window: int | None = None) -> D:
    """Shuffle, in another order every epoch, by a permutation that is computed and never stored.

    ``scope``:

    - "rows" permutes all rows
    - "window" permutes blocks, then rows within windows of ``window`` blocks
    - "files" permutes complete files

    The default is "rows" if files are mapped, and "window" if blocks have to be fetched or decoded, so that each is
    read once an epoch. Default windows are all blocks if these take up to 256 MB in memory, otherwise up to 64 that
    do, or less if ``cache_bytes`` is small. Without a seed one is drawn. Arguments that
    were not given are adopted from the state on resume.

    After a step that changes the number of rows, rows are shuffled within windows of ``window`` rows (10,000), and
    a resume recomputes one window. Shuffling first permutes all rows and costs nothing on resume.
    """
    if self.pipeline.numbered is None:
        return _shuffle_outputs(self, seed, scope, window)
    leaf = self.pipeline.base
    if isinstance(leaf.order.shuffle, Weighted):
        raise ValueError(
            "shuffle: rows are drawn by weights, which is a random order already. Omit shuffle(), or call it "
            "instead of weighted() or balanced()."
        )
    defaults = frozenset(name for name, value in (("scope", scope), ("window", window)) if value is None)
    scope = scope or self._default_scope or ("window" if leaf.source.fetched else "rows")
    aligned = leaf.source.fetched and scope == "window"
    if window is None:
        window = leaf.source.window_in_cache
        if scope == "window":  # a random split cuts blocks into many runs: a window has the rows of as many blocks
            blocks = leaf.source.layout.block_starts
            window = max(window, window * (len(leaf.order.selection.boundaries(blocks)) - 1) // max(1, len(blocks) - 1))
    return _ordered(self, seed, lambda seed: Shuffle(seed, scope, window, aligned), defaults)


def _ordered(
    self: D, seed: int | None, shuffle: Callable[[int], Shuffle | Weighted], defaults: frozenset[str] = frozenset()
) -> D:
    """Return the dataset in an order by a seed, which is drawn if None."""
    leaf, drawn, agreed = self.pipeline.base, seed is None, False
    if seed is None:
        seed, agreed = draw_seed(f"{leaf.source.fingerprint}/{leaf.order.selection.text}")
        check_agreed(not agreed, self.pipeline.shard.count)
    order = replace(leaf.order, shuffle=shuffle(seed))
    return with_leaf(self, replace(leaf, order=order, seed_drawn=drawn, seed_agreed=agreed, defaults=defaults))


def _shuffle_outputs(self: D, seed: int | None, scope: str | None, window: int | None) -> D:
    if seed is None or scope not in (None, "window"):
        raise ValueError(
            "shuffle after a step that changes the number of rows requires a seed and the scope 'window': "
            "shuffle(seed=0, window=10_000). Shuffle before that step to permute all rows."
        )
    size = 10_000 if window is None else integer(window, "shuffle(window=…)", 1)
    base = self.pipeline.node.base
    if window is None and isinstance(base, Concat) and sum(leaf.rows for leaf in self.pipeline.node.leaves) > size:
        warn_once(
            "shuffle after concat shuffles within windows of %s rows, so that the parts stay one after the other. To "
            "interleave them, use mix([a.shuffle(seed=1), b.shuffle(seed=2)], weights=[len(a), len(b)]).", f"{size:,}",
        )  # fmt: skip
    return self._with_stage(Window(size, check_seed(seed)))


def with_lanes(self: D, lanes: int) -> D:
    """Split every epoch into this number of lanes, which alternate.

    The order depends on the number of lanes. A cluster whose world size divides it reads and computes every row on
    one rank only, and its order is the same for all such sizes: choose a number that all your world sizes divide.
    By default, a loader chooses its world size if blocks have to be fetched or decoded, or if steps change the
    number of rows, and else 1.
    """
    lanes = integer(lanes, "with_lanes", 1)
    check_lanes(lanes, self.pipeline.node)
    return self._derive(replace(self.pipeline, lanes=lanes, lanes_chosen=True), same_positions=False)


def check_lanes(lanes: int, node: Node) -> None:
    """Raise ValueError if a pipeline cannot have several lanes."""
    if lanes > 1 and not node.cuts_alike:
        raise ValueError(
            "with_lanes: this dataset has one lane. After take() or skip(), and for a zip of datasets that are "
            "not the same number of unchanged rows, more lanes would mean other rows."
        )


def shard(self: D, num_shards: int, index: int, mode: str = "auto") -> D:
    """Return one of ``num_shards`` shards of every epoch, equal up to one row, without overlap or gap.

    - "example": every num_shards-th row
    - "file": consecutive complete files for each shard; a file at a boundary is read in part by both shards, so
      that all shards have the same length
    - "auto": "file" if there are at least as many files as shards

    The state is global: that of any shard restores all, on any number of shards. After steps that change the number
    of rows, each shard computes a lane of its own, and lanes have about the same size.
    """
    one_of(mode, ("auto", "file", "example"), "mode")
    spec = self.pipeline
    if spec.shard.count > 1:
        raise ValueError(f"the dataset is already shard {spec.shard.index} of {spec.shard.count}")
    shard = Shard(integer(index, "shard(index=…)"), integer(num_shards, "shard(num_shards=…)", 1))
    check_agreed(spec.seed_alone, num_shards)
    if spec.numbered is None:
        return self._derive(replace(spec, shard=shard))
    if num_shards > spec.numbered > 0:
        raise ValueError(f"{spec.numbered} rows cannot be split into {num_shards} shards. Use at most {spec.numbered}.")
    by_file = mode == "file" or (mode == "auto" and spec.files >= num_shards > 1)
    # A loaded position refers to the lanes of its state: they stay. So do lanes that were given.
    kept = self._iteration.start.begun or spec.lanes_chosen
    lanes = spec.lanes if kept else num_shards if by_file else 1
    return self._derive(replace(spec, lanes=lanes, shard=shard))


def with_leaf(self: D, leaf: Leaf) -> D:
    return self._derive(replace(self.pipeline, node=Node(leaf)), same_positions=False)


def weighted(
    self: D,
    weights: str | Sequence[float] | npt.NDArray[Any],
    *,
    num_samples: int | None = None,
    replacement: bool = True,
    seed: int | None = None,
) -> D:
    """Draw rows at random, in proportion to their weights: other draws every epoch.

    ``weights``: a number of at least 0 for each row, or the name of a column of numbers, which is read once. An
    epoch has ``num_samples`` draws. By default it has as many as there are rows or, without replacement, rows with
    a positive weight.

    ``replacement=False``: a row comes at most once an epoch, and heavier rows tend to come earlier.

    It takes the place of ``shuffle()``. A draw is computed from the seed, the epoch and the position, so a resume
    is exact on any number of ranks and workers. The state contains a digest of the weights.
    """
    selection_of(self, "weighted")
    values = _numbers(column_values(self, weights, "weighted"), weights) if isinstance(weights, str) else weights
    return _drawn(self, values, num_samples, replacement, seed)


def balanced(self: D, column: str, *, num_samples: int | None = None, seed: int | None = None) -> D:
    """Draw rows at random, so that all values of a column come equally often.

    Every row has the weight 1 / (number of rows with its value), see ``weighted``. The column is read once.
    """
    selection_of(self, "balanced")
    classes = strata(self, column, "balanced")
    if (rows := len(classes)) > 20 and 2 * (values := int(classes.max()) + 1) > rows:
        _log.warning(
            "balanced: column %r has %s values in %s rows, so that most rows are classes of their own. Map it to "
            "classes, or use weighted().",
            column,
            f"{values:,}",
            f"{rows:,}",
        )
    return _drawn(self, 1 / np.bincount(classes)[classes], num_samples, True, seed)


def sort(self: D, by: str | Callable[[dict[str, Any]], Any], *, reverse: bool = False, length: bool = False) -> D:
    """Order the rows by the values of a column, or by what a function returns for each row. Read once.

    Rows of equal values keep their order, and null and NaN come last. ``length=True`` sorts by the lengths of the
    texts or lists of a column. The order is the same in every epoch. An earlier ``shuffle()`` is removed, and a
    later one has its effect.
    """
    selection = selection_of(self, "sort")
    values = column_values(self, by, "sort") if isinstance(by, str) else _results(self, by)
    if length:
        values = _lengths(values, by)
    if values.type.num_fields:
        remedy = "Use length=True for the number of values."
        if pa.types.is_struct(values.type) and isinstance(by, str):
            remedy = f"Use a function: ds.sort(lambda row: row[{by!r}][{values.type.field(0).name!r}])."
        raise ColumnError(f"sort: {_named(by)} contains {values.type}, which has no order. {remedy}")
    import pyarrow.compute as pc

    rows = pc.sort_indices(values, sort_keys=[("", "descending" if reverse else "ascending")])
    leaf = self.pipeline.base
    order = replace(leaf.order, selection=selection.select(rows.to_numpy().astype(np.int64)), shuffle=None)
    leaf = replace(leaf, order=order, seed_drawn=False, seed_agreed=False, defaults=frozenset())
    return with_leaf(self, leaf)


def _drawn(self: D, weights: Any, num_samples: int | None, replacement: bool, seed: int | None) -> D:
    values = checked(weights)
    if len(values) != (rows := len(self.pipeline.base.order.selection)):
        raise ValueError(
            f"expected {rows} weights, one for each row, got {len(values)}. For a weight of each class: "
            "np.array(weights)[np.asarray(ds['label'])], or ds.balanced('label', seed=0)."
        )
    most = rows if replacement else int(np.count_nonzero(values))
    samples = most if num_samples is None else integer(num_samples, "num_samples", 1)
    return _ordered(self, seed, lambda seed: Weighted(values, seed, samples, bool(replacement)))


def _results(self: D, function: Callable[[dict[str, Any]], Any]) -> pa.ChunkedArray:
    """Return what a function returns for each row, by their numbers."""
    if not callable(function):
        raise TypeError(
            f"sort: expected the name of a column or a function of a row, got {function!r:.60}. To sort by several "
            "columns, sort by the last one first: rows of equal values keep their order. For values of your own, one "
            "for each row: ds.select(np.argsort(values))."
        )
    ds = in_order(self, ITEMS if self.pipeline.format == ITEMS else "python")
    values = []
    with shown("sorting", "rows") as report:
        for row in cast(Iterable[dict[str, Any]], ds):
            values.append(function(row))
            report(len(values), len(ds))
    if len(values) != len(ds):
        raise ColumnError(f"sort: {len(values)} of {len(ds)} rows can be read, and all are needed.")
    if values and all(value is None for value in values):
        _log.warning("sort: the function returned None for every row, which keeps their order. Return the value.")
    try:
        return pa.chunked_array([pa.array(values)])
    except (pa.ArrowException, TypeError, OverflowError) as problem:
        raise ColumnError(f"sort: the function must return values of one type: {problem}.") from None


def stratified(
    drawn: Bijection, classes: npt.NDArray[np.int32], train: int, test: int
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Return sorted rows for training and for the test, with the proportions of the classes of all rows.

    Raises ValueError unless every class can be in both.
    """
    counts = np.bincount(classes).tolist()
    if min(counts) < 2 or min(train, test) < len(counts):
        least = f"one class has {min(counts)} row" if min(counts) < 2 else f"the sizes are {train:,} and {test:,}"
        raise ValueError(
            f"train_test_split: stratify_by_column needs a row of each of {len(counts):,} classes in both parts, but "
            f"{least}. Choose larger parts, or a column with fewer values."
        )
    of_test = apportion(counts, test)
    of_train = apportion([count - taken for count, taken in zip(counts, of_test, strict=True)], train)
    order = drawn(np.arange(len(classes), dtype=np.int64))
    by_class = order[np.argsort(classes[order], kind="stable")]
    # Of each class, its first rows are for the test, and the next ones for training.
    place = np.arange(len(classes)) - np.repeat(np.cumsum(counts) - counts, counts)
    tests, both = np.repeat(of_test, counts), np.repeat(np.add(of_test, of_train), counts)
    return np.sort(by_class[(tests <= place) & (place < both)]), np.sort(by_class[place < tests])


def _numbers(values: pa.ChunkedArray, column: str) -> npt.NDArray[np.float64]:
    """Return the values of a column as numbers. Raise ColumnError for any that is not."""
    kind = values.type
    if not (pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind)):
        remedy = f"To draw every class equally often, use ds.balanced({column!r})."
        if kind.num_fields:
            remedy = f"For weights by their lengths, use ds.weighted(np.asarray(ds.lengths({column!r})))."
        raise ColumnError(f"weighted: column {column!r} contains {kind}, expected numbers. {remedy}")
    if values.null_count:
        raise ColumnError(f"weighted: column {column!r} is null in {values.null_count} rows. Weight 0 is never drawn.")
    return np.asarray(values.to_numpy(), dtype=np.float64)


def _lengths(values: pa.ChunkedArray, by: Any) -> pa.ChunkedArray:
    import pyarrow.compute as pc

    kind = values.type
    if pa.types.is_string(kind) or pa.types.is_large_string(kind):
        return pc.utf8_length(values)
    if pa.types.is_binary(kind) or pa.types.is_large_binary(kind):
        return pc.binary_length(values)
    if pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind):
        return pc.list_value_length(values)
    raise ColumnError(f"sort: {_named(by)} contains {kind}, which has no length. Omit length=True.")


def _named(by: Any) -> str:
    return f"column {by!r}" if isinstance(by, str) else "the result of the function"
