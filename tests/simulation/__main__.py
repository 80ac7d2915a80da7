"""``python -m simulation SEED`` replays a history; ``--count N --from SEED`` runs many."""

from __future__ import annotations

import argparse
import sys
import time

from simulation.running import Simulator, shrink


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts/simulate", description=__doc__)
    parser.add_argument("seed", nargs="?", type=int)
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--from", dest="first", type=int, default=0)
    parser.add_argument("--most", type=int, default=20, help="findings after which it stops")
    given = parser.parse_args()
    with Simulator() as simulator:
        if given.seed is not None:
            outcome = simulator.run(given.seed)
            print(outcome.report())
            if outcome.finding:
                print("\nshrunk:\n" + shrink(simulator, outcome).report())
            return bool(outcome.finding)
        return bool(_run(simulator, range(given.first, given.first + given.count), given.most))


def _run(simulator: Simulator, seeds: range, most: int) -> int:
    """Run many histories, and return the number of findings. What came so far is printed now and then."""
    began, used, findings, struck = time.monotonic(), time.process_time(), 0, 0
    for number, seed in enumerate(seeds, 1):
        outcome = simulator.run(seed)
        struck += outcome.struck
        if outcome.finding:
            findings += 1
            print(f"seed {seed}: {outcome.finding}", flush=True)
        if number % 500 == 0 or number == len(seeds) or findings == most:
            cpu = time.process_time() - used
            print(
                f"{number} histories, {struck} with a fault, {findings} findings, {time.monotonic() - began:.0f} s; "
                f"{struck / cpu * 3600:,.0f} with a fault per hour of one core",
                flush=True,
            )
        if findings == most:
            break
    return findings


sys.exit(main())
