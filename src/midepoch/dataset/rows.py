"""The selection of rows of a dataset, their order, and the shard of this process."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from midepoch._internal.values import integer
from midepoch.dataset.steps import Steps
from midepoch.distributed.runs import check_agreed, draw_seed
from midepoch.order import Selection, Shard, Shuffle, Weighted
from midepoch.order.bijection import Bijection, check_seed, derive
from midepoch.pipeline.leaf import Leaf
from midepoch.pipeline.node import Node, Slice, Window
from midepoch.pipeline.spec import PipelineSpec
from midepoch.sources.splits import apportion, bound_of, split_sizes

if TYPE_CHECKING:
    from typing_extensions import Self


class Rows(Steps):
    """The methods of a dataset that choose rows, order and shard. Every call returns a new dataset."""

    _default_scope: str | None = None

    @property
    def pipeline(self) -> PipelineSpec:
        """The frozen definition of this dataset."""
        raise NotImplementedError

    @property
    def _is_begun(self) -> bool:
        """True if a state was loaded that is not at the beginning of an epoch."""
        raise NotImplementedError

    def _derive(self, spec: PipelineSpec, *, same_positions: bool = True) -> Self:
        raise NotImplementedError

    def slice(self, start: int | str | None = None, stop: int | str | None = None, step: int | None = None) -> Self:
        """Keep only the rows ``[start:stop:step]``, chosen before any shuffle: no row moves from one slice to another.

        Bounds may be percentages: ``ds.slice(None, "80%")`` and ``ds.slice("80%")`` are two parts of a dataset. Slice
        before steps that change the number of rows.
        """
        chosen = self._selection("slice")
        first, last = (bound_of(bound, len(chosen)) for bound in (start, stop))
        return self._with_selection(chosen.slice(first, last, step))

    def take(self, n: int) -> Self:
        """Keep the first n rows, before any shuffle.

        After a step that changes the number of rows: the first n rows of every epoch's order, computed in one lane.
        """
        n = integer(n, "take")
        return self._sliced(0, n)

    def skip(self, n: int) -> Self:
        """Omit the first n rows, before any shuffle.

        After a step that changes the number of rows: omit the first n rows of every epoch's order, which are computed
        and discarded.
        """
        n = integer(n, "skip")
        return self._sliced(n, None)

    def _sliced(self, start: int, stop: int | None) -> Self:
        """Keep some rows by number, or outputs as they come if they have no numbers."""
        if self.pipeline.numbered is not None:
            return self.slice(start, stop)
        return self._with_stage(Slice(start, stop))

    def select(self, indices: Iterable[int]) -> Self:
        """Keep the rows with these numbers, in this order, before any shuffle."""
        return self._with_selection(self._selection("select").select(indices))

    def train_test_split(
        self,
        test_size: float | None = None,
        train_size: float | None = None,
        shuffle: bool = True,
        seed: int | None = 0,
        *,
        stratify_by_column: str | None = None,
    ) -> dict[str, Self]:
        """Return ``{"train": …, "test": …}``: two parts without a row in common, the same in every process and run.

        Sizes are shares (0.1) or numbers of rows; by default, a quarter of the rows are for the test. Rows are drawn at
        random by ``seed`` (None is 0) and stay in their order; ``shuffle=False`` takes the last rows for the test.
        Shuffle the training part: ``parts["train"].shuffle(seed=1)``.

        ``stratify_by_column``: both parts have the values of this column in the proportions of the data, rounded to
        rows. The column is read once.
        """
        chosen = self._selection("train_test_split")
        train, test = split_sizes(len(chosen), train_size, test_size)
        if stratify_by_column is not None:
            if not shuffle:
                raise ValueError("train_test_split: stratify_by_column draws rows at random. Omit shuffle=False.")
            drawn = Bijection(len(chosen), derive(check_seed(0 if seed is None else seed), 0, "split"))
            parts = stratified(drawn, self._strata(stratify_by_column, "train_test_split"), train, test)
            return {name: self._with_selection(chosen.select(rows)) for name, rows in parts.items()}
        if not shuffle:
            first, last = chosen.slice(0, train), chosen.slice(train, train + test)
        else:
            drawn = Bijection(len(chosen), derive(check_seed(0 if seed is None else seed), 0, "split"))
            rows = np.sort(drawn(np.arange(test, dtype=np.int64)))
            last, first = chosen.select(rows), chosen.without(rows)
            if train + test < len(chosen):
                others = drawn(np.arange(test + train, len(chosen), dtype=np.int64))
                first = chosen.without(np.sort(np.concatenate([rows, others])))
        return {"train": self._with_selection(first), "test": self._with_selection(last)}

    def _strata(self, column: str, what: str) -> npt.NDArray[np.int32]:
        """Return the class of each row, from 0: the number of its value in a column."""
        raise NotImplementedError

    def _selection(self, what: str) -> Selection:
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

    def _with_selection(self, selection: Selection) -> Self:
        leaf = self.pipeline.base
        return self._with_leaf(replace(leaf, order=replace(leaf.order, selection=selection)))

    def shuffle(self, seed: int | None = None, scope: str | None = None, window: int | None = None) -> Self:
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
            return self._shuffle_outputs(seed, scope, window)
        leaf = self.pipeline.base
        if isinstance(leaf.order.shuffle, Weighted):
            raise ValueError(
                "shuffle: rows are drawn by weights, which is a random order already. Omit shuffle(), or call it "
                "instead of weighted() or balanced()."
            )
        chosen, drawn, agreed = self._seed(seed)
        defaults = frozenset(name for name, value in (("scope", scope), ("window", window)) if value is None)
        scope = scope or self._default_scope or ("window" if leaf.source.fetched else "rows")
        aligned = leaf.source.fetched and scope == "window"
        window = leaf.source.window_in_cache if window is None else window
        order = replace(leaf.order, shuffle=Shuffle(chosen, scope, window, aligned))
        return self._with_leaf(replace(leaf, order=order, seed_drawn=drawn, seed_agreed=agreed, defaults=defaults))

    def _seed(self, seed: int | None) -> tuple[int, bool, bool]:
        """Return the seed of an order, drawn if None, with ``seed_drawn`` and ``seed_agreed`` of its leaf."""
        if seed is not None:
            return seed, False, False
        leaf = self.pipeline.base
        chosen, agreed = draw_seed(f"{leaf.source.fingerprint}/{leaf.order.selection.text}")
        check_agreed(not agreed, self.pipeline.shard.count)
        return chosen, True, agreed

    def _shuffle_outputs(self, seed: int | None, scope: str | None, window: int | None) -> Self:
        if seed is None or scope not in (None, "window"):
            raise ValueError(
                "shuffle after a step that changes the number of rows requires a seed and the scope 'window': "
                "shuffle(seed=0, window=10_000). Shuffle first to permute all rows."
            )
        size = 10_000 if window is None else integer(window, "shuffle(window=…)", 1)
        return self._with_stage(Window(size, check_seed(seed)))

    def with_lanes(self, lanes: int) -> Self:
        """Split every epoch into this number of lanes, which alternate.

        The order depends on the number of lanes. A cluster whose world size divides it reads and computes every row on
        one rank only, and its order is the same for all such sizes: choose a number that all your world sizes divide.
        By default, a loader chooses its world size if blocks have to be fetched or decoded, or if steps change the
        number of rows, and else 1.
        """
        lanes = integer(lanes, "with_lanes", 1)
        self._check_lanes(lanes, self.pipeline.node)
        return self._derive(replace(self.pipeline, lanes=lanes, lanes_chosen=True), same_positions=False)

    def _check_lanes(self, lanes: int, node: Node) -> None:
        if lanes > 1 and not node.cuts_alike:
            raise ValueError(
                "with_lanes: this dataset has one lane. After take() or skip(), and for a zip of datasets that are "
                "not the same number of unchanged rows, more lanes would mean other rows."
            )

    def shard(self, num_shards: int, index: int, mode: str = "auto") -> Self:
        """Return one of ``num_shards`` shards of every epoch, equal up to one row, without overlap or gap.

        - "example": every num_shards-th row
        - "file": consecutive complete files for each shard; a file at a boundary is read in part by both shards, so
          that all shards have the same length
        - "auto": "file" if there are at least as many files as shards

        The state is global: that of any shard restores all, on any number of shards. After steps that change the number
        of rows, each shard computes a lane of its own, and lanes have about the same size.
        """
        if mode not in ("auto", "file", "example"):
            raise ValueError(f"mode must be 'auto', 'file' or 'example', got {mode!r}")
        spec = self.pipeline
        if spec.shard.count > 1:
            raise ValueError(f"the dataset is already shard {spec.shard.index} of {spec.shard.count}")
        shard = Shard(index, num_shards)
        check_agreed(spec.seed_alone, num_shards)
        if spec.numbered is None:
            return self._derive(replace(spec, shard=shard))
        if num_shards > spec.numbered > 0:
            raise ValueError(f"{spec.numbered} rows cannot be split into {num_shards} shards")
        by_file = mode == "file" or (mode == "auto" and spec.files >= num_shards > 1)
        # A loaded position refers to the lanes of its state: they stay. So do lanes that were given.
        kept = self._is_begun or spec.lanes_chosen
        lanes = spec.lanes if kept else num_shards if by_file else 1
        return self._derive(replace(spec, lanes=lanes, shard=shard))

    def _with_leaf(self, leaf: Leaf) -> Self:
        return self._derive(replace(self.pipeline, node=Node(leaf)), same_positions=False)


def stratified(
    drawn: Bijection, classes: npt.NDArray[np.int32], train: int, test: int
) -> dict[str, npt.NDArray[np.int64]]:
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
    parts: dict[str, list[npt.NDArray[np.int64]]] = {"train": [], "test": []}
    for rows, first, last in zip(np.split(by_class, np.cumsum(counts)[:-1]), of_test, of_train, strict=True):
        parts["test"].append(rows[:first])
        parts["train"].append(rows[first : first + last])
    return {name: np.sort(np.concatenate(rows)) for name, rows in parts.items()}
