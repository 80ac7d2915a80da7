"""``fast_hf_loader_simple``: instant loading of Hugging Face datasets, with its documented names and state."""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

import numpy as np

from midepoch._internal.hints import hinted
from midepoch.dataset import Dataset
from midepoch.errors import CheckpointMismatchError, StateError
from midepoch.iteration.state import IterationState
from midepoch.open import from_files, load_dataset
from midepoch.order import Shard
from midepoch.order.shuffle import Shuffle, UnitShuffle
from midepoch.pipeline.cursor import Cursor, LaneCursor
from midepoch.pipeline.node import Node
from midepoch.pipeline.spec import PipelineSpec
from midepoch.state.format import KEY
from midepoch.state.saved import save

_log = logging.getLogger("midepoch")

_DOCUMENTED = (
    "current_file_index",
    "current_example_index",
    "shuffle_seed",
    "shard_config",
    "arrow_files",
    "shuffled_files",
)
_FORGATHER = ("split_start_idx", "split_end_idx", "shard_start_idx", "shard_end_idx")
"""Keys in every state that forgather writes, beside the documented ones."""
_FORGATHER_LENGTHS = ("file_lengths", "shuffled_lengths")


class _DocumentedIteration(IterationState):
    """Iteration state that saves the documented keys, accepts the documented form, and assigns files to workers."""

    def worker_lanes(self, shares: int) -> int:
        return shares if len(self.spec.source.files) >= shares else self.spec.lanes

    def save_at(self, cursor: Cursor, round_: int = 0, batch: int = 0) -> dict[str, Any]:
        shuffle, cut = self.spec.order.shuffle, self.spec.shard
        file, example = self._place(cursor)
        return {
            "current_file_index": file,
            "current_example_index": example,
            "shuffle_seed": shuffle.seed if shuffle else None,
            "shard_config": (cut.count, cut.index) if cut.count > 1 else None,
            "arrow_files": _digest(_arrow_files(self.spec)),
            "shuffled_files": _digest(_shuffled(self.spec, cursor.epoch)) if shuffle else None,
            **super().save_at(cursor, round_, batch),
        }

    def _place(self, cursor: Cursor) -> tuple[int, int]:
        """Return file and example of the last row that was delivered to this shard before a cursor."""
        cut = self.share()[0]
        taken = cut.before(cursor.position)
        if not taken:
            return 0, -1
        order = self.spec.order.at(cursor.epoch, self.spec.source.layout)
        at = int(order.sequence(cut.locals(taken - 1, taken))[0])
        starts, _ = _file_places(self.spec, cursor.epoch)
        place = int(np.searchsorted(starts, at, side="right")) - 1
        return place, at - int(starts[place])

    def state_in(self, state: Any, example_index: str | None = None) -> Any:
        """Convert the documented form, with lists of files and without the core's fields, to a state of the core.

        ``example_index``: "last" or "next", the example that the state counts.
        """
        if not isinstance(state, Mapping) or KEY in state or "current_file_index" not in state:
            return state
        counts_next = _check_keys(state, example_index)
        place, example = state["current_file_index"], state["current_example_index"] - counts_next
        try:
            shards, shard = map(int, state["shard_config"][:2]) if state["shard_config"] else (1, 0)
            share = Shard(shard, shards)
        except (TypeError, ValueError, IndexError) as problem:
            raise StateError(f"this is not a state of fast_hf_loader_simple: {problem!r}.") from None
        if shards != self.spec.shard.count:
            cause = "the documented form does not contain the boundaries of shards: it requires the same number of them"
            raise CheckpointMismatchError("shard_config", shards, self.spec.shard.count, cause)
        pipeline, epoch = self._with_seed(state["shuffle_seed"]), self.shared.epoch
        self._check_files("arrow_files", state["arrow_files"], _arrow_files(self.spec))
        lengths = np.diff(self.spec.source.layout.file_starts).tolist()
        if (saved := state.get("file_lengths")) not in (None, lengths):
            before, now = next((pair for pair in zip(saved, lengths, strict=False) if pair[0] != pair[1]), (None, None))
            cause = "a file has another number of rows than when the state was saved"
            raise CheckpointMismatchError("file_lengths", before, now, cause)
        if pipeline.order.shuffle is not None:
            self._check_files("shuffled_files", state["shuffled_files"], _shuffled(pipeline, epoch))
        starts, _ = _file_places(pipeline, epoch)
        at = _row_before(starts, place, example, counts_next)
        if example >= 0 and not counts_next and example_index is None:
            raise StateError(
                f"the state has the six documented keys only, and current_example_index={example} has two readings: "
                "the last example that was delivered, as documented, or the next one, as the first version of "
                'forgather counts. Pass load_state_dict(state, example_index="last") or "next".'
            )
        taken = pipeline.order.at(epoch, pipeline.source.layout).position(at) // shards + 1 if at >= 0 else 0
        over = taken >= share.before(pipeline.rows)  # of this shard: others may have one more row
        _log.warning("this state contains the names of its files but no fingerprints: only the names were compared.")
        return save(pipeline, Cursor.at_row(epoch, LaneCursor(pipeline.rows if over else taken * shards)))

    def _with_seed(self, saved: Any) -> PipelineSpec:
        """Return the pipeline with the seed of a state if its own was drawn. Raise a mismatch if the user chose
        another.
        """
        leaf = self.spec.base
        order = leaf.order
        current = order.shuffle.seed if order.shuffle else None
        if saved == current:
            return self.spec
        if order.shuffle is None or not leaf.seed_drawn or not isinstance(saved, int):
            raise CheckpointMismatchError("shuffle_seed", saved, current, "shuffle() differs")
        order = replace(order, shuffle=replace(order.shuffle, seed=saved))
        return replace(self.spec, node=Node(replace(leaf, order=order)))

    def _check_files(self, name: str, saved: Any, current: list[str]) -> None:
        """Compare files by name, not by folder: data that has only moved is the same data."""
        if saved == _digest(current):
            return
        listed = isinstance(saved, Sequence) and not isinstance(saved, str)
        if not listed or [*map(_name, saved)] != [*map(_name, current)]:
            shown = f"{len(saved)} files" if listed else saved
            raise CheckpointMismatchError(
                name, shown, f"{len(current)} files", "files were added, removed or reordered"
            )


def _check_keys(state: Mapping[str, Any], example_index: str | None) -> bool:
    """Raise unless a state has the documented keys, or those of forgather. Return True if it counts the next example.

    The documented state has six keys, and its example is the last one delivered. States of forgather have additional
    keys, except those of its first version, which only the caller can distinguish.
    """
    if example_index not in (None, "last", "next"):
        raise ValueError(f'example_index must be "last" or "next", got {example_index!r}.')
    for key in _DOCUMENTED:
        if key not in state or (key == "arrow_files" and state[key] is None):
            cause = "the state was saved by another program: it does not identify its data or its position"
            raise CheckpointMismatchError(key, None, "required", cause)
    for key in ("current_file_index", "current_example_index"):
        if isinstance(state[key], bool) or not isinstance(state[key], int):
            raise StateError(f"the state is damaged: {key!r} is {state[key]!r:.40}, expected an integer.")
    forgather = all(key in state for key in _FORGATHER)
    known = {*_DOCUMENTED, *_FORGATHER, *_FORGATHER_LENGTHS} if forgather else set(_DOCUMENTED)
    unknown = sorted(map(str, state.keys() - known))
    if unknown:
        cause = "the state was saved by another program, or by a version that counts in an unknown way"
        raise CheckpointMismatchError(unknown[0], state[unknown[0]], "not a key of this state", cause)
    counts_next = forgather or example_index == "next"
    if counts_next:
        used = next((key for key in ("shard_config", *_FORGATHER) if state.get(key) is not None), None)
        if used is not None:
            cause = "forgather divides shards and splits differently from midepoch"
            raise CheckpointMismatchError(used, state[used], None, cause)
    return counts_next


def _row_before(starts: Any, place: int, example: int, counts_next: bool) -> int:
    """Return the number of the last delivered row, in the epoch's order of files. -1 if there was none."""
    files = len(starts) - 1
    if counts_next and place == files and example == -1:
        return int(starts[files]) - 1
    if not 0 <= place < files or not -1 <= example < starts[place + 1] - starts[place]:
        raise StateError(f"the state is damaged: there is no example {example} in file number {place}.")
    return int(starts[place]) + example


class SimpleArrowIterableDataset(Dataset):
    """The core's dataset with files as the unit of shuffling and sharding, and the documented state.

    ``state_dict()`` has the six documented keys and those of the core. ``current_file_index`` counts in the epoch's
    order of files. ``current_example_index`` is the last delivered example (-1: none yet of the first file).
    """

    _default_scope = "files"
    _iteration_type = _DocumentedIteration

    def __init__(
        self, data: PipelineSpec | str | Sequence[str], cursor: Cursor | None = None, *, named: bool = False
    ) -> None:
        super().__init__(data if isinstance(data, PipelineSpec) else from_files(data).pipeline, cursor, named=named)

    def load_state_dict(
        self, state: Any, *, allow: Collection[str] = (), example_index: Literal["last", "next"] | None = None
    ) -> None:
        """Continue from a state, or from the list of the states of all shards. See ``Dataset.load_state_dict``.

        ``example_index``: the meaning of ``current_example_index`` in a state with the six documented keys only.
        "last": the last example that was delivered, as documented. "next": the next one, as in forgather's first
        version.
        """
        iteration = self._iteration
        assert isinstance(iteration, _DocumentedIteration)
        given = state if isinstance(state, (list, tuple)) else [state]
        converted = [iteration.state_in(each, example_index) for each in given]
        super().load_state_dict(converted if given is state else converted[0], allow=allow)

    @property
    def arrow_files(self) -> list[str]:
        """The files, in the given order."""
        return _arrow_files(self.pipeline)

    @property
    def shuffled_files(self) -> list[str]:
        """The files in the order of the current epoch."""
        return _shuffled(self.pipeline, self.epoch)


@hinted()
def fast_load_iterable_dataset(
    path: str,
    name: str | None = None,
    split: str = "train",
    data_files: Any = None,
    revision: str | None = None,
    force_reindex: bool = False,
    num_proc: int | None = None,
    index_dir: str | None = None,
    **load_dataset_kwargs: Any,
) -> SimpleArrowIterableDataset:
    """Load a Hugging Face dataset: instantly, except for the first time, when ``datasets`` prepares it."""
    dataset = load_dataset(
        path,
        name,
        split=split,
        data_files=data_files,
        revision=revision,
        force_reindex=force_reindex,
        num_proc=num_proc,
        index_dir=index_dir,
        **load_dataset_kwargs,
    )
    return SimpleArrowIterableDataset(dataset.pipeline)


def _file_places(pipeline: PipelineSpec, epoch: int) -> tuple[Any, Any]:
    """Return the sequence index at which the file at each place of the epoch begins, and the number of that file."""
    order, layout = pipeline.order, pipeline.source.layout
    bounds = order.selection.boundaries(layout.file_starts)
    owners = np.searchsorted(layout.file_starts, order.selection.source_rows(bounds[:-1]), side="right") - 1
    if not isinstance(order.shuffle, Shuffle) or order.shuffle.scope != "files":
        return bounds, owners
    units = UnitShuffle(order.shuffle, epoch, bounds, "files")
    return units.starts, owners[units.permuted]


def _arrow_files(pipeline: PipelineSpec) -> list[str]:
    return [file.path for file in pipeline.source.files]


def _shuffled(pipeline: PipelineSpec, epoch: int) -> list[str]:
    files = _arrow_files(pipeline)
    return [files[i] for i in _file_places(pipeline, epoch)[1]]


def _name(path: Any) -> str:
    return os.path.basename(str(path))


def _digest(files: Sequence[str]) -> str:
    """Return a short digest of the names of files, in order."""
    names = "\n".join(_name(file) for file in files)
    return f"{len(files)} files {hashlib.blake2b(names.encode(), digest_size=8).hexdigest()}"
