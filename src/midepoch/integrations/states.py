"""Helpers of integrations: states of all ranks, data-parallel ranks, passes of one epoch, next-token labels."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import WeakKeyDictionary

from midepoch.checkpoint.local import make_folder, sync
from midepoch.errors import CheckpointDamagedError, CheckpointNotFoundError, WorldError
from midepoch.loader import Loader
from midepoch.storage.cache_files import atomic_write

if TYPE_CHECKING:
    from torch import Tensor


def for_all_ranks(loader: Loader, state: Any, group: Any = None) -> Any:
    """Return the state that restores every rank. All ranks (of a process group that has all data ranks) must call it,
    because they may have to exchange their states.
    """
    if loader.state_is_global or loader.shard.count == 1:
        return state
    import torch.distributed as dist

    if not dist.is_initialized():
        raise WorldError(
            f"the state of rank {loader.shard.index} does not restore the other {loader.shard.count - 1} ranks, and "
            "there is no process group to exchange states. Initialise torch.distributed, or use with_lanes(1)."
        )
    gathered: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(gathered, (loader.shard.index, state), group)
    states = dict(gathered)  # ranks that share a data rank have the same state
    return [states[index] for index in range(loader.shard.count)]


def write_state(path: Path, state: Any) -> None:
    """Write a state atomically and durably."""
    make_folder(path.parent)
    atomic_write(path, json.dumps(state).encode())
    sync(path.parent)


def read_state(path: Path) -> Any:
    """Read a state. Raise CheckpointNotFoundError if there is none: resuming without it would repeat or lose rows."""
    try:
        return json.loads(path.read_text())
    except FileNotFoundError:
        raise CheckpointNotFoundError(
            f"{path} does not exist: the checkpoint does not contain the position in the data, and rows would be lost "
            "or repeated. It was written without midepoch, or its save was interrupted. Try an earlier one."
        ) from None
    except ValueError as problem:
        raise CheckpointDamagedError(f"{path} cannot be read: {problem}") from None


def check_same_steps(saved: int, now: int, what: str) -> None:
    """Raise ValueError if a step has another number of rows than when a state was saved: loops that count steps would
    stop too early or too late.
    """
    if saved != now:
        raise ValueError(
            f"a step had {saved} rows over all ranks when this was saved, and has {now} now: {what} counts steps and "
            "would skip or repeat rows at the end. Keep ranks × batch size × accumulated batches as they were. (The "
            "loader itself resumes with any: your own loops may change it.)"
        )


def check_equal_epochs(loader: Loader, what: str, otherwise: str) -> None:
    """Raise ValueError if epochs have different numbers of batches, for loops that take the first number for all."""
    options = loader.options
    if options.planning is not None and not options.steps_per_epoch:
        also = f", {otherwise}" if otherwise else ""
        raise ValueError(
            f"batches by max_tokens: epochs have different numbers of them, but {what} counts those of one epoch for "
            f"all, and would stop too early or too late. Pass steps_per_epoch=… to the loader{also}."
        )


_groups: WeakKeyDictionary[Any, dict[tuple[int, ...], Any]] = WeakKeyDictionary()
"""The groups of each world, by the data-parallel ranks of its processes. They end with ``destroy_process_group``."""


def arguments_for(rank: int, ranks: int) -> dict[str, Any]:
    """Return the arguments of ``Dataset.loader`` for a data-parallel rank. All processes must call it together.

    With tensor, context or pipeline parallelism, several processes have the same data-parallel rank. Then these are
    connected to those of the other data-parallel ranks, because ranks with lanes of their own agree on their last step.
    """
    import torch.distributed as dist

    if not dist.is_initialized() or dist.get_world_size() == ranks:
        return {"rank": rank, "world_size": ranks}
    stated: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(stated, rank)
    groups = _groups.setdefault(dist.group.WORLD, {})
    if (group := groups.get(tuple(stated))) is None:
        replicas: Counter[int] = Counter()
        columns: dict[int, list[int]] = {}  # in each, one process for each data-parallel rank
        for process, data_rank in enumerate(stated):
            columns.setdefault(replicas[data_rank], []).append(process)
            replicas[data_rank] += 1
        group, _ = dist.new_subgroups_by_enumeration(list(columns.values()), backend="gloo")
        groups[tuple(stated)] = group
    if dist.get_rank(group) != rank:
        raise RuntimeError(f"data-parallel ranks must ascend with the ranks of processes, got {stated}")
    return {"data_parallel": group}


def length_of(loader: Loader) -> int | None:
    """Return the batches of an epoch, or None if the number is unknown."""
    try:
        return len(loader)
    except TypeError:
        return None


def rest_or_next(loader: Loader) -> Iterator[Any]:
    """Yield the rest of the loader's current epoch, or the next epoch if nothing is left.

    ``iter(loader)`` would restart its last pass: a loop that takes the last batch without requesting the end looks like
    one that was left by a ``break``. This continues where the loop stopped.
    """
    ends = 0
    while ends < 2:
        for batch in loader.current_pass():  # not next(): an interrupt on its return would lose the batch
            ends = 1
            yield batch
            break  # the loader may be in another pass by now
        else:
            loader.end_pass()
            ends += 1


IGNORED = -100
"""The label of a token that does not count in the loss."""

_TOKENS, _POSITIONS = ("input", "input_ids", "tokens"), ("positions", "position_ids")


class Sequences(NamedTuple):
    """Tokens, the token that follows each of them, and their positions in the document: [rows, length] each."""

    tokens: Tensor
    labels: Tensor
    positions: Tensor


def next_tokens(batch: Mapping[str, Any], length: int | None = None) -> Sequences:
    """Return the tokens of a batch and their next tokens.

    Tokens are column ``input``, ``input_ids`` or ``tokens``. A column ``labels`` must hold the next tokens already.
    Without it, sequences must have ``length + 1`` tokens: all but the last, and all but the first. Positions are column
    ``positions`` or ``position_ids``, or counted from the first token of the sequence.
    """
    import torch

    name = next((each for each in _TOKENS if each in batch), None)
    if name is None:
        raise ValueError(f"a batch must have a column {', '.join(_TOKENS[:-1])} or tokens, got {sorted(batch)}")
    tokens = torch.as_tensor(batch[name]).long()
    positions = next((torch.as_tensor(batch[each]).long() for each in _POSITIONS if each in batch), None)
    if positions is None:
        positions = torch.arange(tokens.shape[-1]).expand_as(tokens)
    if tokens.ndim != 2:
        raise ValueError(
            f"{name} must be [rows, length], got {list(tokens.shape)}. Use pack for sequences of one length."
        )
    if "labels" not in batch:
        _check_length(tokens.shape[1] - 1, length, name, "one token more than the sequence length, or a column labels")
        return Sequences(tokens[:, :-1], tokens[:, 1:], positions[:, :-1])
    labels = torch.as_tensor(batch["labels"]).long()
    _check_length(tokens.shape[1], length, name, "as many tokens as the sequence length, because there are labels")
    check_shifted(tokens, labels)
    return Sequences(tokens, labels, positions)


def _check_length(found: int, length: int | None, name: str, needs: str) -> None:
    if length is not None and found != length:
        raise ValueError(f"expected sequences of {length} tokens, got {found}: {name} must have {needs}.")


def check_shifted(tokens: Tensor, labels: Tensor) -> None:
    """Raise ValueError for labels that are the tokens themselves: a model would learn to copy its input."""
    counted = labels != IGNORED
    if (
        bool(counted.any())
        and bool((labels == tokens)[counted].all())
        and bool((tokens[:, 1:] != tokens[:, :-1]).any())
    ):
        raise ValueError(
            "labels are equal to the tokens, but this loss does not shift them: labels[i] must be the token after "
            "tokens[i]. Omit labels and pack sequences of one token more, or shift them before pack."
        )
