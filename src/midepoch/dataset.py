"""The Dataset: a frozen pipeline and a cursor. Every method returns a new one; only the cursor moves."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

import pyarrow as pa

from midepoch import html
from midepoch.checks import whole
from midepoch.flow.lanes import Place
from midepoch.flow.schema import known_of
from midepoch.flow.spec import Spec, StageSpec
from midepoch.flow.standing import What
from midepoch.iterate import BatchIterator, RowIterator
from midepoch.order import Cut, Selection, Shuffle
from midepoch.pipeline import Pipeline, is_one_to_one
from midepoch.random_access import RandomAccess
from midepoch.read.blocks import plain_schema
from midepoch.resumable import Resumable
from midepoch.seeds import check_agreed, draw_seed
from midepoch.sources.splits import bound_of
from midepoch.stages import Stages
from midepoch.standing import Standing, register_with_torch
from midepoch.state import Cursor
from midepoch.steps import functions_in
from midepoch.stream import Stream
from midepoch.transforms import FilterExpression, Function, Step
from midepoch.transforms.features import import_datasets
from midepoch.transforms.formats import check_format

if TYPE_CHECKING:
    from midepoch.loader import Loader

Self = TypeVar("Self", bound="Dataset")

_LOOK = 64
"""Rows to look at for the columns that a map makes: the first ones may be skipped."""


class Dataset(Stages, Resumable):
    """Rows of a source, in an order, through some steps; iterable, indexable, resumable.

    Iterating yields the rows of the current epoch (``set_epoch``), each a dict. ``iter()`` starts at the beginning of
    the epoch, or where a loaded state left off; a ``break`` moves nothing.
    """

    def __init__(self, pipeline: Pipeline, cursor: Cursor | None = None, *, asked: bool = False) -> None:
        self._standing = self._standing_type(pipeline, cursor or Cursor(), asked)
        self._access: RandomAccess | None = None
        register_with_torch(Dataset)

    _standing_type: type[Standing] = Standing

    # What it is

    @property
    def pipeline(self) -> Pipeline:
        """The frozen description of this dataset."""
        return self._standing.pipeline

    def __len__(self) -> int:
        """Rows of an epoch (of this shard)."""
        return self.pipeline.cut.before(self.pipeline.rows)

    @property
    def schema(self) -> pa.Schema:
        """The Arrow schema of the data as it lies, without the columns that are never read."""
        schema = plain_schema(self.pipeline.source.schema)
        fields = [schema.field(old).with_name(new) for new, old in self.pipeline.head.items()]
        return pa.schema(fields, metadata=schema.metadata)

    @property
    def features(self) -> Any:
        """The ``datasets.Features`` of the data as it lies."""
        datasets = import_datasets("features are a thing of Hugging Face's")
        features = datasets.Features.from_arrow_schema(plain_schema(self.pipeline.source.schema))
        return datasets.Features({new: features[old] for new, old in self.pipeline.head.items()})

    @property
    def column_names(self) -> list[str]:
        """The columns of a row. After a map this runs it on the first row."""
        known = self.pipeline.known_columns
        if known is not None:
            return list(known)
        return self._by_number().columns(self.epoch, min(len(self), _LOOK))

    @property
    def epoch(self) -> int:
        """The epoch that ``iter()`` will go through. Setting it is ``set_epoch``."""
        return self._standing.shared.epoch

    @epoch.setter
    def epoch(self, epoch: int) -> None:
        self.set_epoch(epoch)

    @property
    def position(self) -> int:
        """How many rows of the epoch all shards together have been handed."""
        return self._standing.cursor().position

    @property
    def num_files(self) -> int:
        return len(self.pipeline.source.files)

    def __repr__(self) -> str:
        p, shuffle = self.pipeline, self.pipeline.order.shuffle
        parts = [f"{len(self):,} rows", f"{self.num_files} file{'s' * (self.num_files != 1)}"]
        if shuffle is not None:
            window = f", window={shuffle.window}" if shuffle.scope == "window" else ""
            parts.append(f"shuffled by {shuffle.scope} (seed={shuffle.seed}{window})")
        if p.cut.count > 1:
            parts.append(f"shard {p.cut.index} of {p.cut.count}")
        if p.has_map:
            parts.append(f"maps: {', '.join(step.name for step in p.steps if isinstance(step, Function))}")
        parts.append(f"columns: {', '.join(p.known_columns)}" if p.known_columns is not None else "columns: from a map")
        if p.format:
            parts.append(f"format={p.format}")
        at = self._standing.cursor()
        if at != Cursor():
            parts.append(f"at epoch {at.epoch}, position {at.position:,} of {p.rows:,}")
        return f"{type(self).__name__}({'; '.join(parts)})"

    def _repr_html_(self) -> str:
        p, shuffle, at = self.pipeline, self.pipeline.order.shuffle, self._standing.cursor()
        about = {
            "rows": f"{len(self):,} in {self.num_files:,} files",
            "order": "as they lie" if shuffle is None else f"shuffled by {shuffle.scope}, seed {shuffle.seed}",
            "maps": ", ".join(step.name for step in p.steps if isinstance(step, Function)) or None,
            "at": None if at == Cursor() else f"epoch {at.epoch}, position {at.position:,}",
            "columns": ", ".join(f"{field.name} ({field.type})" for field in self.schema)[:2000],
        }
        share = at.position / max(1, p.rows) if at.position else None
        return html.table(type(self).__name__, {name: text for name, text in about.items() if text}, share)

    # Which rows

    def slice(
        self: Self, start: int | str | None = None, stop: int | str | None = None, step: int | None = None
    ) -> Self:
        """The rows ``[start:stop:step]``, chosen before any shuffle, so that no row moves from one slice to another.

        Bounds may be percentages: ``ds.slice(None, "80%")`` and ``ds.slice("80%")`` are two parts of a dataset.
        """
        chosen = self.pipeline.order.selection
        first, last = (bound_of(bound, len(chosen)) for bound in (start, stop))
        return self._with_selection(chosen.slice(first, last, step))

    def take(self: Self, n: int) -> Self:
        """The first n rows (before any shuffle)."""
        return self.slice(0, whole(n, "take"))

    def skip(self: Self, n: int) -> Self:
        """All but the first n rows (before any shuffle)."""
        return self.slice(whole(n, "skip"), None)

    def select(self: Self, indices: Iterable[int]) -> Self:
        """The rows with these numbers, in this order (before any shuffle)."""
        return self._with_selection(self.pipeline.order.selection.select(indices))

    def _with_selection(self: Self, selection: Selection) -> Self:
        order = replace(self.pipeline.order, selection=selection)
        return self._derive(replace(self.pipeline, order=order), same_positions=False)

    # In which order, and whose

    def shuffle(self: Self, seed: int | None = None, scope: str | None = None, window: int | None = None) -> Self:
        """Shuffled anew in every epoch, by a permutation that is computed and never stored.

        ``scope``: "rows" permutes all rows; "window" permutes blocks, then rows within windows of ``window`` blocks;
        "files" permutes whole files. The default is "rows" where files are mapped, and "window" where blocks have to be
        fetched or decoded, each of which then is read once an epoch; windows then take 256 MB in memory, or less if
        ``cache_bytes`` is small. Without a seed one is drawn. Whatever was not given is taken over from the state on
        resume.
        """
        source, drawn, agreed = self.pipeline.source, seed is None, False
        if seed is None:
            seed, agreed = draw_seed(f"{source.fingerprint}/{self.pipeline.order.selection.text}")
        check_agreed(drawn and not agreed, self.pipeline.cut.count)
        defaults = frozenset(name for name, value in (("scope", scope), ("window", window)) if value is None)
        scope = scope or self._default_scope or ("window" if source.fetched else "rows")
        aligned = source.fetched and scope == "window"
        window = source.window_in_cache if window is None else window
        shuffle = Shuffle(seed, scope, window, aligned)
        order = replace(self.pipeline.order, shuffle=shuffle)
        pipeline = replace(self.pipeline, order=order, seed_drawn=drawn, seed_agreed=agreed, defaults=defaults)
        return self._derive(pipeline, same_positions=False)

    _default_scope: str | None = None

    def with_lanes(self: Self, lanes: int) -> Self:
        """Cut every epoch into this many lanes, which are gone through side by side: position p is of lane p mod lanes.

        A cluster whose world size divides it reads every block on one machine only, and its order is the same for all
        such sizes. A loader over files that have to be fetched takes its world size if nothing else is said.
        """
        order = replace(self.pipeline.order, lanes=whole(lanes, "with_lanes", 1))
        return self._derive(replace(self.pipeline, order=order, lanes_given=True), same_positions=False)

    def shard(self: Self, num_shards: int, index: int, mode: str = "auto") -> Self:
        """One of ``num_shards`` equal parts (by one row at most) of every epoch, without overlap or gap.

        "example": every num_shards-th row. "file": a run of whole files for each shard; where the cut falls into a
        file, its two neighbours read a part of it each, so that all shards stay equally long. "auto": "file" where
        there are at least as many files as shards. The state stays global: any shard's restores all, on any number of
        shards.
        """
        if mode not in ("auto", "file", "example"):
            raise ValueError(f"mode must be 'auto', 'file' or 'example', got {mode!r}")
        if self.pipeline.cut.count > 1:
            raise ValueError(f"the dataset is already shard {self.pipeline.cut.index} of {self.pipeline.cut.count}")
        cut = Cut(index, num_shards)
        check_agreed(self.pipeline.seed_alone, num_shards)
        if num_shards > self.pipeline.rows > 0:
            raise ValueError(f"{self.pipeline.rows} rows cannot be cut into {num_shards} shards")
        by_file = mode == "file" or (mode == "auto" and self.num_files >= num_shards > 1)
        # A position that a state was loaded for is one of that state's lanes: they stay. So do lanes that were given.
        chosen = self._standing.start or self.pipeline.lanes_given or self.pipeline.lanes_kept
        lanes = self.pipeline.order.lanes if chosen else num_shards if by_file else 1
        order = replace(self.pipeline.order, lanes=lanes)
        return self._derive(replace(self.pipeline, order=order, cut=cut))

    # What is in a row: the steps of HasSteps and Stages

    @property
    def _functions(self) -> int:
        return functions_in(self.pipeline.steps)

    @property
    def _input_format(self) -> str:
        return self.pipeline.format or "python"

    @property
    def _lists(self) -> tuple[str, ...] | None:
        return known_of(self.pipeline).lists

    @property
    def _columns(self) -> tuple[str, ...] | None:
        return self.pipeline.known_columns

    @property
    def what(self) -> What:
        """The dataset as a stream: what ``filter``, ``pack``, ``mix`` and the like are made of."""
        pipeline = self.pipeline
        chosen = pipeline.lanes_given or pipeline.lanes_kept
        return What(Spec(pipeline), pipeline.format, pipeline.cut, pipeline.order.lanes if chosen else 1, chosen)

    def with_format(self: Self, kind: str | None) -> Self:
        """Rows and batches as "python" (the default), "numpy", "torch", "arrow" or "jax"."""
        return self._derive(replace(self.pipeline, format=check_format(kind)))

    def _with_step(self, step: Step) -> Any:
        pipeline = replace(self.pipeline, steps=(*self.pipeline.steps, step))
        _ = pipeline.known_columns  # a wrong column is an error here, not in an hour
        if is_one_to_one(step):
            return self._derive(pipeline)
        if isinstance(step, FilterExpression) and not self.pipeline.tail:
            step.columns(self.schema)
        return self._stream(replace(self.what, spec=Spec(self.pipeline).with_step(step)))

    def _with_stage(self, stage: StageSpec) -> Stream:
        return self._stream(replace(self.what, spec=Spec(self.pipeline, (stage,))))

    def _stream(self, what: What) -> Stream:
        if self._standing.start:
            raise ValueError(
                f"a state was loaded (position {self._standing.start:,}), and this would change what comes next. Add "
                "steps first, then load the state."
            )
        return Stream(what, Place(self.epoch), asked=self._standing.shared.asked)

    def _derive(self: Self, pipeline: Pipeline, *, same_positions: bool = True) -> Self:
        """A new dataset at the same epoch and position; an error where a loaded position would mean other rows."""
        if self._standing.start and not same_positions:
            raise ValueError(
                f"a state was loaded (position {self._standing.start:,}), and this would change which rows come next. "
                "Slice and shuffle first, then load the state."
            )
        return type(self)(pipeline, Cursor(self.epoch, self._standing.start), asked=self._standing.shared.asked)

    # Reading

    def __getitem__(self, key: Any) -> Any:
        """Row i of this epoch's order as ``list(ds)[i]`` would give it; a slice or list gives columns."""
        return self._by_number().get(key, self.epoch, len(self))

    def _by_number(self) -> RandomAccess:
        self._access = self._access or RandomAccess(self._standing.seeded)
        return self._access

    def __getitems__(self, keys: Sequence[int]) -> Any:
        """torch asks a map-style dataset for batches in this way; this one is iterable and must not be asked."""
        raise TypeError(
            "DataLoader took this dataset for a map-style one, because torch was imported after it was made. "
            "Import torch first, or use ds.loader(batch_size, num_workers=…)."
        )

    def __iter__(self) -> Iterator[Any]:
        here, self._pass = self._standing, None
        return here.follow(RowIterator(here.start_from(here.begin()), here))

    def iter(self, batch_size: int, drop_last_batch: bool = False) -> Iterator[Any]:
        """Batches of the current epoch as columns; the state follows as for rows."""
        size = whole(batch_size, "iter", 1)
        here = self._standing
        return here.follow(BatchIterator(here.start_from(here.begin()), here, size, drop_last_batch))

    def loader(
        self,
        batch_size: int,
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
        ends: str | None = None,
        audit: Any = None,
        multiprocessing_context: str | None = None,
        collate_columns: bool = False,
    ) -> Loader:
        """Batches of every epoch, prepared ahead by threads or worker processes; owns its own cursor.

        ``batch_size`` rows for each rank. Rank and world size come from the shard, are given, or found: from
        ``torch.distributed``, JAX, Ray Train or the launcher. Where only some ranks cut the data (tensor, context,
        pipeline parallelism), ``data_parallel`` says which: a process group, ``mesh["dp"]``, or ``(mesh, names)``.

        ``ends``: the last global batch, if it is not whole, is left out ("drop", as ``drop_last=True``), filled up with
        rows marked by a column ``is_padding`` ("pad"), or handed out as it is, to some ranks maybe not at all
        ("uneven"). By default it is handed out as it is, but ranks that train together are never left without a batch:
        that is an error which asks for a choice.

        A batch is a dict of columns, as torch tensors unless ``with_format`` chose otherwise; ``collate_fn`` gets a
        list of rows instead, or with ``collate_columns`` such a batch. ``prefetch`` batches are made ahead by each
        worker: 2 to 8, by their size, unless given. ``audit``: a folder (or ``midepoch.audit.Ledger``) to record in
        what was handed over, for ``midepoch audit``.
        """
        from midepoch.loader.make import make_loader

        return make_loader(
            self.pipeline,
            Cursor(self.epoch, self._standing.start),
            asked=self._standing.shared.asked,
            batch_size=batch_size,
            num_workers=num_workers,
            drop_last=drop_last,
            collate_fn=collate_fn,
            prefetch=prefetch,
            pin_memory=pin_memory,
            persistent_workers=persistent_workers,
            rank=rank,
            world_size=world_size,
            data_parallel=data_parallel,
            ends=ends,
            audit=audit,
            multiprocessing_context=multiprocessing_context,
            collate_columns=collate_columns,
        )

    # The cursor

    def set_epoch(self, epoch: int) -> None:
        """Go to an epoch. The one a loaded state is in is gone on with where it was left; any other starts anew."""
        self._standing.set_epoch(whole(epoch, "set_epoch"))
        self._pass = None

    def state_dict(self) -> dict[str, Any]:
        """Where the iteration stands, just behind the last row handed over: small, flat, JSON-able."""
        return self._standing.save()

    def load_state_dict(self, state: Mapping[str, Any], *, allow: Collection[str] = ()) -> None:
        """Go on from a state, saved on any shard of any number of them.

        Raises CheckpointMismatchError, and changes nothing, if it belongs to other data, another order or pipeline;
        ``allow=["pipeline"]`` lets a field differ all the same, which is recorded in ``changes`` and in the state.
        """
        self._standing.load(state, allow)
        self._access = self._pass = None

    def check_state(self, state: Mapping[str, Any]) -> None:
        """Raise what ``load_state_dict`` would raise for a state that does not belong here. Changes nothing."""
        self._standing.check(state)

    @property
    def changes(self) -> tuple[str, ...]:
        """What was allowed to differ at resumes since the run began."""
        return self.pipeline.changes

    @property
    def state_is_global(self) -> bool:
        """Whether the state of one shard restores every shard: not if each skips rows of its own."""
        return not (self.pipeline.cut.count > 1 and self.pipeline.can_skip)

    # Pickling: the spec and the cursor, never the engine

    def __getstate__(self) -> dict[str, Any]:
        return {"standing": self._standing}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._standing, self._access = state["standing"], None
        register_with_torch(Dataset)
