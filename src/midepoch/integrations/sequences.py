"""Batches of token sequences for models that predict the next token and do not shift labels themselves."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from torch import Tensor

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
