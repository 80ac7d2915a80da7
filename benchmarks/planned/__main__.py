"""Batches by a budget of tokens: `python -m benchmarks.planned`, or `--only padding,planning,rates,first,peers`."""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

from benchmarks import machine
from benchmarks.planned import data, first, peers, plans

PARTS = ("padding", "planning", "rates", "first", "peers")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default=",".join(PARTS), help="parts, separated by commas")
    parser.add_argument("--rows", type=int, default=100_000)
    parser.add_argument("--first-rows", default="1000000,10000000", help="rows of the epochs that are resumed at 90 %%")
    parser.add_argument("--contender", default="", help="peers: only those whose names begin like this")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=3.0, help="of each measurement of a rate")
    parser.add_argument("--dir", type=Path, help="folder for files of up to 1 GB, which are removed")
    args = parser.parse_args()
    chosen = args.only.split(",")
    if unknown := set(chosen) - set(PARTS):
        parser.error(f"unknown parts: {', '.join(sorted(unknown))}")
    print(machine.describe())
    with tempfile.TemporaryDirectory(dir=args.dir) as made:
        folder = Path(made)
        if "padding" in chosen:
            plans.measure(folder, args.rows)
        if "planning" in chosen or "rates" in chosen:
            _tokens(folder, chosen, args)
        if "first" in chosen:
            for rows in map(int, args.first_rows.split(",")):
                first.measure(folder, rows, args.rounds)
        if "peers" in chosen:
            peers.measure(folder, args.rows, args.contender)


def _tokens(folder: Path, chosen: list[str], args: argparse.Namespace) -> None:
    from benchmarks.planned import rates  # needs torch

    path, lengths = folder / "tokens.arrow", data.lengths_of(args.rows)
    data.write_tokens(path, lengths)
    if "planning" in chosen:
        rates.measure_planning(path, lengths, args.rounds)
    if "rates" in chosen:
        for workers in (0, 2):
            rates.measure_rates(path, lengths, workers, args.rounds, args.seconds)


if __name__ == "__main__":
    main()
