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
        began, used, findings, struck = time.monotonic(), time.process_time(), 0, 0
        for number in range(given.count):
            outcome = simulator.run(given.first + number)
            struck += outcome.struck
            if outcome.finding:
                findings += 1
                print(f"seed {outcome.plan.seed}: {outcome.finding}", flush=True)
                if findings == given.most:
                    break
        count, cpu = number + 1, time.process_time() - used
        print(
            f"{count} histories, {struck} with a fault, {findings} findings, {time.monotonic() - began:.0f} s; "
            f"{struck / cpu * 3600:,.0f} with a fault per hour of one core"
        )
        return bool(findings)


sys.exit(main())
