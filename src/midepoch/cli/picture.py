"""A picture of the shares of sources over a run, in characters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.text import Text

from midepoch.cli.common import printable

if TYPE_CHECKING:
    from midepoch.tools.schedule_plan import SchedulePlan

_STYLES = ("cyan", "magenta", "yellow", "green", "blue", "red")
_FILLS, _ASCII_FILLS = "█▒░▓▚▤▥▦", "#.+=o*x%"
_HEIGHT, _WIDEST, _MARGIN = 10, 100, 7


def style_of(source: int) -> str:
    """Return the colour of a source, by its number."""
    return _STYLES[source % len(_STYLES)]


def drawn(plan: SchedulePlan, names: Sequence[str], width: int, ascii_only: bool) -> list[Text]:
    """Return the lines of a picture: stacked shares of the rows from left to right, phases below them, and a legend.

    Every phase is wide enough for its name, if there is room. Otherwise widths are in proportion to lengths.
    """
    fills = _ASCII_FILLS if ascii_only else _FILLS
    bar, corner, dash, cross = "|+-+" if ascii_only else "│└─┴"
    widths = phase_widths(plan, max(len(plan.phases), min(width, _WIDEST) - _MARGIN))
    columns = [
        _stacked(_shares_at(plan, number, (column + 0.5) / size))
        for number, size in enumerate(widths)
        for column in range(size)
    ]
    lines = [Text("share of rows over the run", "italic")]
    for row in range(_HEIGHT):
        label = {0: "100 %", _HEIGHT // 2: "50 %"}.get(row, "")
        line = Text(f"{label:>{_MARGIN - 2}} {bar}")
        for column in columns:
            source = column[_HEIGHT - 1 - row]
            line.append(*(" ", "") if source is None else (fills[source % len(fills)], style_of(source)))
        lines.append(line)
    axis = "".join(dash * (size - 1) + cross for size in widths)
    lines.append(Text(f"{'0 %':>{_MARGIN - 2}} {corner}{axis[:-1]}{dash}"))
    shown = [printable(phase.name)[: size - 1].ljust(size) for phase, size in zip(plan.phases, widths, strict=True)]
    lines.append(Text(" " * _MARGIN + "".join(shown).rstrip()))
    legend = Text(" " * _MARGIN)
    for number, name in enumerate(names):
        legend.append(fills[number % len(fills)] * 2, style_of(number))
        legend.append(f" {printable(name)}   ")
    legend.rstrip()
    lines.append(legend)
    return lines


def phase_widths(plan: SchedulePlan, width: int) -> list[int]:
    """Return the columns of each phase. A phase without an end is as long as the mean of the others."""
    known = [phase.stop - phase.start for phase in plan.phases if phase.stop is not None]
    usual = max(1, sum(known) // len(known)) if known else 1
    lengths = [usual if phase.stop is None else phase.stop - phase.start for phase in plan.phases]
    least = [len(phase.name) + 1 for phase in plan.phases]
    if sum(least) > width:
        least = [1] * len(lengths)
    free, total = width - sum(least), sum(lengths)
    # The widest phases give way to names: what is left over is shared by those that need more than their name.
    wanted = [max(0.0, width * length / total - size) for length, size in zip(lengths, least, strict=True)]
    scale = free / sum(wanted) if sum(wanted) else 0.0
    return [size + int(more * scale) for size, more in zip(least, wanted, strict=True)]


def _shares_at(plan: SchedulePlan, phase: int, part: float) -> Sequence[float]:
    """Return the shares at a part of a phase, or none after the end of the run."""
    about = plan.phases[phase]
    stretches = [one for one in plan.stretches if one.phase == phase]
    if not stretches:
        return ()
    end = about.stop
    if end is None:  # the part without an end is half of the phase
        last = stretches[-1]
        end = last.stop if last.stop is not None else max(2 * last.start - about.start, last.start + 1)
    position = about.start + part * (end - about.start)
    return next((one.shares for one in stretches if one.stop is None or position < one.stop), ())


def _stacked(shares: Sequence[float]) -> list[int | None]:
    """Return the source of each cell of a column, from the bottom."""
    cells: list[int | None] = []
    total = 0.0
    for source, share in enumerate(shares):
        total += share
        cells += [source] * (round(total * _HEIGHT) - len(cells))
    return cells + [None] * (_HEIGHT - len(cells))
