"""The steps that look at several rows at once: what follows is a stream, whatever they follow."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from midepoch.checks import whole
from midepoch.flow.spec import Rebatch, StageSpec
from midepoch.steps import HasSteps
from midepoch.transforms.columns import check_columns
from midepoch.transforms.packing import PackSpec

if TYPE_CHECKING:
    from midepoch.stream import Stream


class Stages(HasSteps):
    """The steps that make a stream of whatever they follow."""

    def _with_stage(self, stage: StageSpec) -> Stream:
        raise NotImplementedError

    def batch(self, size: int, drop_last: bool = False) -> Stream:
        """Each ``size`` rows as one row that holds a list of every column."""
        return self._with_stage(Rebatch(whole(size, "batch", 1), drop_last))

    def pack(
        self,
        length: int,
        column: str = "input_ids",
        strategy: str = "concat",
        eos: int | None = None,
        *,
        pad: int = 0,
        extra: Mapping[str, int] | None = None,
        drop_remainder: bool = False,
        cu_seqlens: bool = False,
        window: int = 1024,
        dtype: str | None = None,
    ) -> Stream:
        """Pack documents (lists of tokens) into sequences of ``length``. No token is lost or repeated.

        "concat" puts them one after the other and cuts; the last sequence of each lane is padded. "best_fit" keeps
        documents whole where it can: each ``window`` of them goes into as few sequences as best-fit-decreasing finds,
        each padded. ``eos`` is put behind every document. ``extra``: other columns with a value for each token, and
        what they are padded with. ``drop_remainder`` leaves out sequences that are not full, with their tokens.
        ``dtype`` of the tokens: as they come, unless given.

        A row has ``column``, ``position_ids`` (from 0 in every piece), ``segment_ids`` (1, 2, … for the pieces, 0 for
        padding), the ``extra`` columns and, if asked for, ``cu_seqlens`` (the bounds of the pieces).
        """
        spec = PackSpec(
            whole(length, "pack(length=…)", 1),
            column,
            strategy,
            None if eos is None else whole(eos, "pack(eos=…)"),
            _integer(pad, "pad"),
            {name: _integer(value, f"extra {name}") for name, value in (extra or {}).items()},
            drop_remainder,
            cu_seqlens,
            whole(window, "pack(window=…)", 1),
            None if dtype is None else np.dtype(dtype).name,
        )
        if self._columns is not None:
            check_columns(list(spec.pads), self._columns, "pack")
        return self._with_stage(spec)


def _integer(value: Any, what: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"pack({what}=…) must be a whole number, got {value!r}")
    return value
