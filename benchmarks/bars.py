"""The speed bars of the project, judged from measured rates. A bar that is missed says so."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

OURS = "midepoch"

Best = Mapping[str, Mapping[str, float]]  # workload → contender → rows/s by its fastest route


@dataclass(frozen=True)
class Verdict:
    """One bar: what was asked, what was measured, and whether it holds (None: it could not be measured)."""

    bar: str
    wanted: float
    measured: float | None

    @property
    def passed(self) -> bool | None:
        return None if self.measured is None else self.measured >= self.wanted


def speed_bars(best: Best, plain: Best, peers: tuple[str, ...]) -> list[Verdict]:
    """All throughput bars. `best` holds the fastest route, `plain` the plain one; ours always counts as `plain`."""
    verdicts = []
    for workload, of_limit, of_peers in (
        ("text_in_order", 0.8, 1.0),
        ("text_shuffled", 0.8, 1.5),
        ("tokens_shuffled_w0", 0.8, 2.0),
        ("tokens_shuffled_w2", None, 3.0),
    ):
        ours = plain.get(workload, {}).get(OURS)
        rates = best.get(workload, {})
        if of_limit is not None:
            verdicts.append(_ratio(f"{workload}: ≥ {of_limit} × limit", of_limit, ours, rates.get("limit")))
        if workload == "text_in_order":
            iterable = plain.get(workload, {}).get("hf_iterable")
            verdicts.append(_ratio(f"{workload}: ≥ 15 × datasets IterableDataset, plain", 15, ours, iterable))
        for peer in peers:
            if peer in rates:
                bar = f"{workload}: ≥ {of_peers:g} × {peer}, fastest route"
                verdicts.append(_ratio(bar, of_peers, ours, rates[peer]))
    # Two workers decode in parallel, but they are held to the one process that reads the Parquet files in order.
    limit = best.get("parquet_window_w0", {}).get("limit")
    for workload in ("parquet_window_w0", "parquet_window_w2"):
        ours = plain.get(workload, {}).get(OURS)
        verdicts.append(_ratio(f"{workload}: ≥ 0.6 × limit of 0 workers", 0.6, ours, limit))
        for peer in peers:
            if peer in best.get(workload, {}):
                verdicts.append(_ratio(f"{workload}: ≥ 1 × {peer}, fastest route", 1.0, ours, best[workload][peer]))
    mapped = plain.get("tokens_map1ms_w2", {}).get(OURS)
    alone = plain.get("tokens_map1ms_w0", {}).get(OURS)
    verdicts.append(_ratio("tokens, map of 1 ms a batch: 2 workers ≥ 1 × none", 1.0, mapped, alone))
    return verdicts


def _ratio(bar: str, wanted: float, ours: float | None, other: float | None) -> Verdict:
    return Verdict(bar, wanted, ours / other if ours and other else None)
