"""Dataset.loader: the arguments of a loader."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from midepoch.dataset.sampling import Sampling

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from midepoch.loader import Loader
    from midepoch.order.schedule import Schedule

UNSET: Any = object()


class Loading(Sampling):
    """The method of a dataset that makes batches."""

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

        ``provenance``: batches have columns ``source`` (an index into ``loader.sources``) and ``row`` (the number of
        the row in that source, before any shuffle; the first one of an output of several rows). Packed sequences have
        ``doc_ids`` instead, with ``source``, ``row`` and ``start`` (the offset of its first token in the document) for
        each piece of a document. The pieces of sequence k are ``cu_docs[k]`` to ``cu_docs[k + 1]``. With ``audit``, the
        documents of each step are also recorded.

        Workers run all steps up to the first ``batch``, ``pack``, ``take``, later ``shuffle``, ``mix``, ``concat`` or
        ``zip``; the main process runs the steps that follow, and ``collate_fn`` after such steps or after batched
        functions.
        """
        from midepoch.loader.batching import Batching
        from midepoch.loader.make import make_loader

        if batch_size is UNSET and self.pipeline.node.schedule is not None:
            batch_size = self.pipeline.node.schedule
        if batch_size is UNSET and max_tokens is None:
            raise TypeError("Dataset.loader() needs batch_size, or max_tokens. For example ds.loader(batch_size=32).")
        if prefetch is not None and prefetch_factor is not None:
            raise ValueError("prefetch and prefetch_factor are two names of one setting. Omit one of them.")
        here = self._iteration
        return make_loader(
            self.pipeline,
            here.start._replace(epoch=self.epoch),
            named=here.shared.named,
            batch_size=None if batch_size is UNSET else batch_size,
            num_workers=num_workers,
            drop_last=drop_last,
            collate_fn=collate_fn,
            prefetch=prefetch_factor if prefetch is None else prefetch,
            pin_memory=pin_memory,
            persistent_workers=persistent_workers,
            rank=rank,
            world_size=world_size,
            data_parallel=data_parallel,
            last_batch=last_batch,
            audit=audit,
            multiprocessing_context=multiprocessing_context,
            collate_columns=collate_columns,
            worker_type=worker_type,
            device=device,
            worker_init_fn=worker_init_fn,
            timeout=timeout,
            provenance=provenance,
            dataset=self,
            batching=Batching(
                max_tokens,
                length,
                layout,
                pad_to_multiple_of,
                pad_values,
                bucket_window,
                balance,
                context_parallel,
                cp_layout,
                steps_per_epoch,
            ),
        )
