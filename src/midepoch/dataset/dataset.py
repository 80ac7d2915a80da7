"""The Dataset: a frozen pipeline and a cursor. Every method returns a new one; only the cursor moves."""

from __future__ import annotations

import logging
import os
import sys
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

from midepoch._internal import html
from midepoch._internal.hints import Elsewhere, hinted_methods, instead, no_attribute, setter
from midepoch._internal.resumable import Resumable
from midepoch._internal.values import integer
from midepoch.dataset import functions, habits, reading, rows, steps
from midepoch.dataset.parts import cached
from midepoch.iteration.iterators import BatchIterator, RandomAccess, RowIterator
from midepoch.iteration.state import IterationState, is_registered, register_with_torch, warn_of_loops
from midepoch.pipeline.cursor import Cursor
from midepoch.pipeline.lanes import estimated_length, known_length
from midepoch.pipeline.leaf import Leaf
from midepoch.pipeline.node import Mix, Node, StageSpec
from midepoch.pipeline.spec import PipelineSpec
from midepoch.transforms import Decode, FilterExpression, Function, SelectColumns, Step
from midepoch.transforms.batch import check_columns
from midepoch.transforms.formats import ITEMS, check_format
from midepoch.transforms.packing import PackSpec

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    import pyarrow as pa
    from typing_extensions import Self

    from midepoch.loader import Loader
    from midepoch.order.schedule import Schedule


class _Unset:
    def __repr__(self) -> str:
        return "UNSET"


UNSET: Any = _Unset()
_SHOWN = 3
"""Rows of a dataset that notebooks show."""

_log = logging.getLogger("midepoch")


@hinted_methods(habits.METHODS)
class Dataset(Resumable):
    """Rows of one or several sources, in an order, after some steps; iterable and resumable.

    Iterating yields the rows of the current epoch (``set_epoch``), each a dict. ``iter()`` starts at the beginning of
    the epoch, or at the position of a loaded state; a ``break`` does not change where the next ``iter()`` starts.

    If every row of one source becomes one row, positions can be computed: the dataset has a length and can be indexed.
    After ``filter``, ``flat_map``, ``batch``, ``pack``, ``mix`` and similar steps it has neither, and ``estimated_len``
    estimates the length from the rows so far.
    """

    _iteration_type: type[IterationState] = IterationState
    _default_scope: str | None = None
    _access: RandomAccess | None
    _last_loader: weakref.ref[Loader] | None = None

    def __init__(self, spec: PipelineSpec, cursor: Cursor | None = None, *, named: bool = False) -> None:
        if not isinstance(spec, PipelineSpec):
            raise TypeError(instead("Dataset", "a pipeline that was opened", spec))
        self._iteration = self._iteration_type(spec, cursor or Cursor(), named)
        self._access = None
        register_with_torch(Dataset)

    if not TYPE_CHECKING:  # a type checker would allow every name

        def __getattr__(self, name: str) -> Any:
            if hasattr(type(self), name):  # a property that raised AttributeError: raise it again
                return object.__getattribute__(self, name)
            hints = habits.ATTRIBUTES
            if "_iteration" in self.__dict__ and name in (self._columns or ()):
                hints = {name: f"It is a column: use ds[{name!r}]."}
            raise no_attribute("a Dataset", name, dir(self), hints)

        __setattr__ = setter("a Dataset", habits.ATTRIBUTES, "Use a method: ds = ds.shuffle(seed=…), ds.loader(…).")

        def __setitem__(self, key: object, value: object) -> None:
            raise TypeError(f"a Dataset does not change in place. Use ds = ds.map(lambda row: {{{key!r}: …}}).")

        def __delitem__(self, key: object) -> None:
            raise TypeError(f"a Dataset does not change in place. Use ds = ds.remove_columns({key!r}).")

        def __contains__(self, item: object) -> bool:
            if isinstance(item, str):
                raise TypeError(
                    f"rows are dicts, and none of them is {item!r:.60}. Use {item!r:.60} in ds.column_names."
                )
            return any(row == item for row in self)

    def __dir__(self) -> list[str]:
        return sorted(name for name in dir(type(self)) if not name.startswith("_") and name not in habits.OPENERS)

    # The pipeline

    @property
    def pipeline(self) -> PipelineSpec:
        """The frozen definition of this dataset."""
        return self._iteration.spec

    def __len__(self) -> int:
        """Return the number of rows of an epoch (of this shard). Raises TypeError if it is not known before running."""
        spec = self.pipeline
        known = known_length(spec.node) if spec.numbered is None else spec.numbered
        if known is None or not (spec.state_is_global or spec.node.is_rows):
            raise TypeError(
                f"the length of this dataset is not known before it has run ({spec.node.text}). Use estimated_len, "
                "which estimates it from the rows so far."
            )
        return spec.shard.before(known)

    @property
    def estimated_len(self) -> int | None:
        """The approximate number of rows of an epoch (of this shard), or None before the first row.

        If ``len()`` is not known, it is that of the last epoch that was iterated to its end; before, an estimate from
        the rows so far. It is part of the state.
        """
        spec = self.pipeline
        if spec.numbered is not None:
            return len(self)
        found: float | None = spec.epoch_outputs or estimated_length(spec.node, self._iteration.cursor(), spec.lanes)
        return None if found is None else round(found / spec.shard.count)

    @property
    def epoch(self) -> int:
        """The epoch of ``iter()``. Setting it calls ``set_epoch``."""
        return self._iteration.shared.epoch

    @epoch.setter
    def epoch(self, epoch: int) -> None:
        self.set_epoch(epoch)

    @property
    def position(self) -> int:
        """The number of rows of the epoch that have been delivered to all shards together."""
        return self._iteration.cursor().position

    @property
    def changes(self) -> tuple[str, ...]:
        """Changes at resumes since the run began: fields that were allowed to differ, and weights of mixes."""
        return self.pipeline.changes

    @property
    def num_files(self) -> int:
        """The number of files of all sources. A folder of images, audio or videos counts as one."""
        return self.pipeline.files

    def __repr__(self) -> str:
        spec, base, at, of = self.pipeline, self.pipeline.node.base, self._iteration.cursor(), ""
        parts = [spec.node.text, spec.files_text]
        if spec.numbered is not None:
            parts[0], of = f"{len(self):,} rows", f" of {spec.numbered:,}"
        if not isinstance(base, Leaf):
            parts.append(f"{len(base.parts)} parts")
        elif base.order.shuffle is not None:
            parts.append(base.order.shuffle.text)
        if spec.lanes > 1 and spec.numbered is None:
            parts.append(f"{spec.lanes} lanes")
        if spec.shard.count > 1:
            parts.append(f"shard {spec.shard.index} of {spec.shard.count}")
        if names := [step.name for step in getattr(base, "steps", ()) if isinstance(step, (Function, Decode))]:
            parts.append(f"maps: {', '.join(names)}")
        parts.append(f"columns: {', '.join(self._columns)}" if self._columns is not None else "columns: from a map")
        if spec.format:
            parts.append(f"format={spec.format}")
        if at != Cursor():
            parts.append(f"at epoch {at.epoch}, position {at.position:,}{of}")
        return f"{type(self).__name__}({'; '.join(parts)})"

    def _repr_html_(self) -> str:
        spec, at, about = self.pipeline, self._iteration.cursor(), self.estimated_len
        shuffle = spec.node.base.order.shuffle if isinstance(spec.node.base, Leaf) else None
        fields = ", ".join(
            f"{field.name} ({self._feature(field.name) or field.type})" for field in reading.schema_before_running(self)
        )[:2000]
        rows_text = "any number" if about is None else f"{'' if spec.numbered is not None else 'about '}{about:,}"
        shown = {
            "rows": f"{rows_text} in {spec.files_text}",
            "order": shuffle.text if shuffle is not None else None,
            "steps": None if spec.node.text == "none" else spec.node.text,
            "at": None if at == Cursor() else f"epoch {at.epoch}, position {at.position:,}",
            "columns": fields,
        }
        share = min(1.0, at.position / about) if about and at.position else None
        texts = {name: text for name, text in shown.items() if text}
        return html.table(type(self).__name__, texts, share, html.preview(self._preview()))

    def _preview(self) -> list[dict[str, Any]]:
        """Return the first rows of the epoch as stored. None if that could take long: by functions, or from a store."""
        spec = self.pipeline
        remote = any(leaf.source.access and not leaf.source.access.store.local for leaf in spec.node.leaves)
        if spec.numbered is None or not len(self) or spec.node.functions or spec.format == ITEMS or remote:
            return []
        try:
            found: list[dict[str, Any]] = self.with_format("arrow")[: min(_SHOWN, len(self))].to_pylist()
        except Exception:  # a damaged file is reported when it is read, not when a notebook shows the dataset
            return []
        return found

    # Steps: a dataset is frozen, and each of these returns another one

    select_columns = steps.select_columns
    remove_columns = steps.remove_columns
    rename_columns = steps.rename_columns
    rename_column = steps.rename_column
    cast = steps.cast
    cast_column = steps.cast_column
    class_encode_column = reading.class_encode_column
    map = functions.map
    with_transform = functions.with_transform
    filter = functions.filter
    flat_map = functions.flat_map
    unbatch = steps.unbatch
    tokenize = functions.tokenize
    decode = steps.decode
    batch = steps.batch
    pack = steps.pack
    slice = rows.slice
    take = rows.take
    skip = rows.skip
    select = rows.select
    train_test_split = rows.train_test_split
    shuffle = rows.shuffle
    weighted = rows.weighted
    balanced = rows.balanced
    sort = rows.sort
    with_lanes = rows.with_lanes
    shard = rows.shard

    def _feature(self, column: str) -> str | None:
        found = [leaf.source.features.get(leaf.head.get(column, "")) for leaf in self.pipeline.node.leaves]
        return next((each["_type"] for each in found if isinstance(each, dict) and "_type" in each), None)

    @property
    def _columns(self) -> tuple[str, ...] | None:
        return self.pipeline.node.known_columns

    def with_format(self, type: str | None = None, columns: str | Sequence[str] | None = None) -> Self:
        """Choose the format of rows and batches: "python" (the default), "numpy", "torch", "arrow" or "jax".

        ``columns``: keep only these.
        """
        chosen = self._derive(replace(self.pipeline, format=check_format(type)))
        return chosen if columns is None else chosen.select_columns(columns)

    def cache(
        self, directory: str | os.PathLike[str] | None = None, *, num_workers: int = 0, key: str | None = None
    ) -> Self:
        """Run all steps so far once, write the rows to Arrow files, and return a dataset that reads them.

        For costly functions, and for a pipeline that is used by many runs. The rows then have positions and a length,
        also after ``filter`` and ``pack``. The files are found again by every process on the machine, as long as the
        data, the functions and what they use are the same; ranks wait for the first one. An interrupted call continues
        where it stopped. Random functions draw once: call ``cache`` before them, and before ``shuffle``.

        ``directory``: default: ``$MIDEPOCH_CACHE/cached``. Folders in it may be deleted at any time that no process
        reads them. ``num_workers``: worker processes to compute the rows. ``key``: a name for this version of the
        pipeline, to find the files by instead of by the functions and their ``fn_kwargs``.
        """
        return type(self)(cached(cast("Dataset", self), directory, num_workers, key), Cursor(self.epoch))

    def _with_step(self, step: Step) -> Self:
        node = self.pipeline.node
        if isinstance(step, FilterExpression) and isinstance(node.base, Leaf) and not (node.base.tail or node.stages):
            step.columns(reading.schema_before_running(self))
        return self._with_node(node.with_step(step))

    def _with_stage(self, stage: StageSpec) -> Self:
        node, base = self.pipeline.node, self.pipeline.node.base
        if isinstance(stage, PackSpec):
            base = node.using(SelectColumns(tuple(stage.pads), "pack")).base
        if isinstance(stage, PackSpec) and isinstance(base, Mix) and base.schedule is not None and base.tokens is None:
            counted = (stage.column, int(stage.eos is not None)) if base.schedule.unit == "tokens" else None
            base = replace(base, tokens=counted)
        return self._with_node(Node(base, (*node.stages, stage)))

    def _with_node(self, node: Node) -> Self:
        _ = node.known_columns  # an unknown column is an error here, not in an hour
        spec = self.pipeline
        lanes = spec.lanes if spec.lanes_chosen or node.has_positions else 1  # not the lanes that shard() chose
        if spec.lanes_chosen:
            rows.check_lanes(lanes, node)
        keeps = spec.numbered is not None and node.has_positions
        return self._derive(replace(spec, node=node, lanes=lanes), same_positions=keeps)

    def _derive(self, spec: PipelineSpec, *, same_positions: bool = True) -> Self:
        """Return a dataset at the same epoch and position. Raise ValueError if later rows would change."""
        start = self._iteration.start
        if start.begun and not same_positions:
            raise ValueError(
                f"a state was loaded (position {start.position:,}), and this would change the rows that follow. "
                "Slice, shuffle and add steps first, then load the state."
            )
        return type(self)(spec, start._replace(epoch=self.epoch), named=self._iteration.shared.named)

    # Reading

    unique = reading.unique
    lengths = reading.lengths
    to_pandas = reading.to_pandas

    @property
    def num_rows(self) -> int:
        """The number of rows, as ``len()`` returns it."""
        return len(self)

    @property
    def num_columns(self) -> int:
        """The number of columns."""
        return len(self.column_names)

    @property
    def shape(self) -> tuple[int, int]:
        """The numbers of rows and of columns."""
        return len(self), self.num_columns

    @property
    def column_names(self) -> list[str]:
        """The columns of a row. If they are known only after a function has run, this runs the first rows."""
        return reading.column_names(self)

    @property
    def schema(self) -> pa.Schema:
        """The Arrow schema of a row. If it is known only after a function has run, this runs the first rows."""
        return reading.schema(self)

    @property
    def features(self) -> Any:
        """The ``datasets.Features`` of a row. Columns that keep their type keep their feature (class names, …)."""
        return reading.features_of(self, self.schema)

    def __getitem__(self, key: Any) -> Any:
        """Return row i of this epoch's order, equal to ``list(ds)[i]``.

        A slice or list of numbers returns columns. The name of a column returns that column, read when it is used.
        """
        if isinstance(key, str):
            is_split = key in ("train", "test", "validation")
            remedy = "It is one dataset, without splits: omit it, or use ds.train_test_split()." if is_split else ""
            check_columns([key], self._columns or [key], f"ds[{key!r}]", remedy)
            return reading.Column(self, key)
        if self.pipeline.numbered is None:
            raise TypeError(
                f"this dataset has no positions to index by ({self.pipeline.node.text}), and its length is only "
                "estimated (estimated_len). Iterate it, or index the dataset that it was made from."
            )
        return reading.by_number(self).get(key, self.epoch, len(self))

    def __getitems__(self, keys: Sequence[int]) -> Any:
        """Raise TypeError: torch requests batches of a map-style dataset in this way, and this one is iterable."""
        if is_registered(type(self)):
            raise TypeError(
                "torch's Subset and random_split make a map-style dataset of this one, which cannot be resumed. Use "
                "ds.train_test_split(test_size=0.1), ds.slice('90%') or ds.select(indices), and ds.loader(batch_size)."
            )
        raise TypeError(
            "DataLoader treats this dataset as map-style, because torch was imported after it was created. Import "
            "torch first, or use ds.loader(batch_size, num_workers=…)."
        )

    # Iteration

    def __add__(self, other: Any) -> Any:
        raise TypeError("datasets are concatenated with midepoch.concat([a, b]), and mixed with midepoch.mix([a, b]).")

    def __iter__(self) -> Iterator[Any]:
        here, self._pass = self._iteration, None
        warn_of_loops(sys._getframe(1), self.pipeline.shard)
        return here.follow(RowIterator(here.start_from(here.begin()), here))

    def iter(self, batch_size: int, drop_last_batch: bool = False) -> Iterator[Any]:
        """Iterate batches of the current epoch as columns. The state follows as for rows."""
        here, size = self._iteration, integer(batch_size, "iter", 1)
        return here.follow(BatchIterator(here.start_from(here.begin()), here, size, drop_last_batch))

    # The cursor

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch to iterate. The epoch of a loaded state resumes; any other starts at its beginning."""
        self._iteration.set_epoch(integer(epoch, "set_epoch"))
        self._pass = None

    def state_dict(self) -> dict[str, Any]:
        """Return the state after the last row delivered: flat, small and JSON-able."""
        loader = self._loader_beside()
        if loader is not None and loader.position and not self.position:
            self._last_loader = None  # once
            _log.warning(
                "this is the state of the dataset, which is at its beginning: its loader is at position %s. Save "
                "loader.state_dict().",
                f"{loader.position:,}",
            )
        return self._iteration.save()

    def load_state_dict(self, state: Any, *, allow: Collection[str] = ()) -> None:
        """Continue from a state, or from the list of the states of all shards.

        Raises CheckpointMismatchError, and changes nothing, if the state belongs to other data, another order or
        pipeline. ``allow=["pipeline"]`` permits a field to differ, which is recorded in ``changes`` and in the state.
        The weights of a mix may be changed, and sources may be added or removed: the others continue at their
        positions.
        """
        self._iteration.load(state, allow)
        loader = self._loader_beside()
        if loader is not None and self.position and not loader.position:
            _log.warning(
                "the state was loaded into the dataset, and a loader that was made before begins at its own position. "
                "Load the state into the loader."
            )
        self._access = self._pass = None

    def _loader_beside(self) -> Loader | None:
        """Return the last loader of this dataset, if it is still used: it has a cursor of its own."""
        return None if self._last_loader is None else self._last_loader()

    def check_state(self, state: Any) -> None:
        """Raise the error that ``load_state_dict`` would raise for a state that does not fit. Change nothing."""
        self._iteration.check(state)

    @property
    def state_is_global(self) -> bool:
        """True if the state of one shard restores all shards. False if each skips rows, or runs lanes, of its own."""
        return self.pipeline.state_is_global and not self.pipeline.skips_rows

    @property
    def takes_states_of_all_ranks(self) -> bool:
        """True if the list of the states of all shards restores any number of them."""
        return self.pipeline.unit == "outputs"

    # Pickling: the spec and the cursor, never the engine

    def __getstate__(self) -> dict[str, Any]:
        return {"iteration": self._iteration}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._iteration, self._access = state["iteration"], None
        register_with_torch(Dataset)

    def loader(
        self,
        batch_size: int | Mapping[int, int] | Schedule | None = UNSET,
        num_workers: int = 0,
        drop_last: bool = False,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        *,
        prefetch: int | None = None,
        pin_memory: bool = False,
        persistent_workers: bool = False,
        rank: int | None = None,
        world_size: int | None = None,
        data_parallel: Any = None,
        last_batch: str | None = None,
        audit: Any = None,
        multiprocessing_context: str | None = None,
        collate_columns: bool = False,
        worker_type: str = "auto",
        device: Any = None,
        prefetch_factor: int | None = None,
        worker_init_fn: Callable[[int], Any] | None = None,
        timeout: float = 0,
        max_tokens: int | None = None,
        length: str | Sequence[int] | npt.NDArray[np.integer[Any]] | Callable[[Any], int] | None = None,
        layout: str | None = None,
        pad_to_multiple_of: int | None = None,
        pad_values: Mapping[str, float | None] | None = None,
        bucket_window: int | None = None,
        balance: str | Callable[[Any], float] | None = None,
        context_parallel: Any = None,
        cp_layout: str | None = None,
        steps_per_epoch: int | None = None,
        provenance: bool = False,
    ) -> Loader:
        """Return a loader: batches of every epoch, prepared ahead by threads or worker processes, with its own cursor.

        ``batch_size``: rows for each rank, or sizes by the first step at which they apply, as in ``{0: 8, 1000: 16}``;
        None delivers single rows. Default: the sizes of the schedule, if the data is mixed by one. A batch is a dict
        of columns, as torch tensors unless ``with_format`` chose otherwise.

        Rank and world size are those of the shard, or given, or detected (``torch.distributed``, JAX, Ray Train, the
        launcher). ``data_parallel``: the ranks that shard the data, if not all of them do (tensor, context, pipeline
        parallelism): a process group, ``mesh["dp"]``, or ``(mesh, names)``.

        ``last_batch``: the treatment of the last global batch if it is not full:

        - "drop" (or ``drop_last=True``): omitted
        - "pad": filled with rows that are marked in a column ``is_padding``
        - "uneven": delivered as it is, possibly without a row for some ranks
        - default: delivered as it is, but an error if a rank that trains together with others would have no batch

        ``collate_fn`` gets a list of rows or, with ``collate_columns``, the columns of a batch. ``prefetch``: batches
        that each worker makes ahead; default: 2 to 8, by their size (``prefetch_factor`` is the same). ``audit``: a
        folder (or ``midepoch.audit.Ledger``) in which deliveries are recorded, for ``midepoch audit``.

        ``device``: "cuda", "cuda:1" or another torch device, or a JAX device or sharding. The next batches are copied
        there while the model computes. ``pin_memory``: batches in page-locked memory, for copies of your own.
        ``worker_type``: "process", "thread" (less memory, for up to about 4 workers and functions that release the
        interpreter lock), or "auto": threads if Python has no such lock. Batches are the same.

        ``worker_init_fn`` is called in each worker, with its number, before its first batch. ``timeout``: seconds after
        which a worker that delivers nothing is an error. A thread cannot be stopped, so the error waits for its batch.

        ``max_tokens``: batches of rows of similar lengths instead, whose number times the longest (with
        ``layout="varlen"``: whose sum) is at most this; ``batch_size`` is then the most rows. ``length``: a column of
        lists ("input_ids" by default) or of numbers, a function of a row, or a number for each row. Rows go together
        within ``bucket_window`` positions (10,000). ``balance``: "tokens", "quadratic" or a function of the lengths of
        a batch; batches of ranks in one step then have about the same cost.

        ``layout``: "padded" to [rows, longest] with an attention mask, the default with ``max_tokens``, or "varlen":
        one row after the other, with ``cu_seqlens``, ``position_ids`` and ``segment_ids``. ``pad_to_multiple_of``
        rounds up; ``pad_values`` by column, default: -100 for labels, else 0; None leaves a column as it is.
        ``context_parallel``: (rank, size), a process group or ``mesh["cp"]``; this rank gets its part of every
        sequence, by ``cp_layout``: "contiguous", "head_tail" or "per_document". Give ``data_parallel``, too.

        ``steps_per_epoch``: a pass has this number of batches, and continues where the last one stopped.

        ``provenance``: batches have ``doc_ids``, a dict with the ``source`` (an index into ``loader.sources``) and the
        ``row`` (its number in that source, before any shuffle) that each row is made of. For packed sequences it has an
        entry for each piece of a document, ``start`` (the offset of its first token in the document), and ``cu_docs``:
        the pieces of sequence k are ``cu_docs[k]`` to ``cu_docs[k + 1]``. With ``audit``, the documents of each step
        are also recorded.

        Workers run all steps up to the first ``batch``, ``pack``, ``take``, later ``shuffle``, ``mix``, ``concat`` or
        ``zip``; the main process runs the steps that follow, and ``collate_fn`` after such steps or after batched
        functions.
        """
        arguments = {**locals()}  # of this method, by their names
        from midepoch.loader.make import make_loader

        if batch_size is UNSET and self.pipeline.node.schedule is None and max_tokens is None:
            raise TypeError("Dataset.loader() needs batch_size, or max_tokens. For example ds.loader(batch_size=32).")
        if batch_size is UNSET:
            arguments["batch_size"] = self.pipeline.node.schedule
        start, shared = self._iteration.start, self._iteration.shared
        made = make_loader(arguments.pop("self"), start._replace(epoch=self.epoch), shared.named, **arguments)
        self._last_loader = weakref.ref(made)
        return made


for _name, _hint in habits.OPENERS.items():
    setattr(Dataset, _name, Elsewhere("the class Dataset", _name, _hint))
