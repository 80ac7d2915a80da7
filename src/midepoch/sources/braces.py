"""Brace notation in paths, as in a shell: ``shard-{000..146}.tar``, ``{train,extra}/*.tar``."""

from __future__ import annotations

import re
from itertools import product

_RANGE = re.compile(r"(-?\d+)\.\.(-?\d+)(?:\.\.(-?\d+))?")
_LETTERS = re.compile(r"([A-Za-z])\.\.([A-Za-z])(?:\.\.(-?\d+))?")
_MOST = 10_000_000


def spelled_out(path: str, folder: str = "") -> list[str] | None:
    """Return all paths that the braces stand for, in order. None if there are none: ``{x}`` is an ordinary name.

    ``folder``: the beginning of the path, in which braces are part of the names.
    """
    pieces = [[folder], *_pieces(path[len(folder) :])]
    count = 1
    for alternatives in pieces:
        count *= len(alternatives)
    if count > _MOST:
        raise ValueError(f"{path!r} expands to {count:,} paths. Check the numbers in its braces.")
    paths = list(map("".join, product(*pieces)))
    return None if paths == [path] else paths


def _pieces(path: str) -> list[list[str]]:
    """Return the alternatives for each part of a path, in order."""
    pieces: list[list[str]] = []
    at = 0
    while at < len(path):
        start = path.find("{", at)
        stop = _closing(path, start) if start >= 0 else -1
        if stop < 0:
            end = len(path) if start < 0 else start + 1
            pieces.append([path[at:end]])
            at = end
            continue
        if start > at:
            pieces.append([path[at:start]])
        pieces.append(_alternatives(path[start + 1 : stop]))
        at = stop + 1
    return pieces


def _closing(path: str, start: int) -> int:
    """Return the position of the brace that closes the one at ``start``, or -1."""
    depth = 0
    for position in range(start, len(path)):
        depth += {"{": 1, "}": -1}.get(path[position], 0)
        if not depth:
            return position
    return -1


def _alternatives(inner: str) -> list[str]:
    if match := _RANGE.fullmatch(inner):
        first, last, step = match[1], match[2], int(match[3] or 1)
        is_padded = any(re.match(r"-?0\d", number) for number in (first, last))
        width = max(len(first), len(last)) if is_padded else 0
        return [f"{number:0{width}d}" for number in _numbers(int(first), int(last), step)]
    if match := _LETTERS.fullmatch(inner):
        return [chr(number) for number in _numbers(ord(match[1]), ord(match[2]), int(match[3] or 1))]
    parts = _parts(inner)
    if len(parts) == 1:  # no list: the braces are part of the name, but there may be others inside
        return [f"{{{each}}}" for each in _all(inner)]
    return [each for part in parts for each in _all(part)]


def _numbers(first: int, last: int, step: int) -> range:
    step = max(1, abs(step))
    if abs(last - first) // step >= _MOST:
        raise ValueError(f"{{{first}..{last}}} expands to {abs(last - first) + 1:,} numbers. Check the path.")
    return range(first, last + 1, step) if first <= last else range(first, last - 1, -step)


def _all(text: str) -> list[str]:
    return list(map("".join, product(*_pieces(text))))


def _parts(inner: str) -> list[str]:
    """Return the parts between the commas outside of inner braces."""
    parts, depth = [""], 0
    for sign in inner:
        depth += {"{": 1, "}": -1}.get(sign, 0)
        if sign == "," and not depth:
            parts.append("")
        else:
            parts[-1] += sign
    return parts
