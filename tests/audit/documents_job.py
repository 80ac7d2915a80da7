"""A packed, filtered mix with a ledger, killed after some batches. What each batch said of its documents is on disk before."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import midepoch
from midepoch.audit import Ledger


def keeps(row: dict[str, Any]) -> bool:
    return bool(row["id"] % 3)


def mixed(a: str, b: str) -> midepoch.Dataset:
    first, second = midepoch.from_files(a).shuffle(seed=1).filter(keeps), midepoch.from_files(b).shuffle(seed=2)
    return midepoch.mix({"web": first, "code": second}, [2, 1], seed=3, stop="all").pack(32, column="tokens", eos=999)


def said(batch: Any) -> list[list[Any]]:
    """The documents of a batch: sequence, source, row, first token, token after the last, and where it begins."""
    docs, found = batch["doc_ids"], []
    for k, segments in enumerate(batch["segment_ids"]):
        first, stop = docs["cu_docs"][k : k + 2].tolist()
        offset = 0
        for number, place in enumerate(range(first, stop), 1):
            length, start = int((segments == number).sum()), int(docs["start"][place])
            found.append([k, int(docs["source"][place]), int(docs["row"][place]), start, start + length, offset])
            offset += length
    return found


def main(folder: Path, attempt: str, steps: int, a: str, b: str) -> None:
    """Run some steps from the saved state on. A batch after the last state is lost in the crash."""
    loader = mixed(a, b).loader(3, provenance=True, audit=Ledger(folder / "run", attempt=attempt))
    saved = folder / "state.json"
    seen: list[list[list[Any]]] = []
    if saved.exists():
        state, seen = json.loads(saved.read_text())
        loader.load_state_dict(state)
    for number, batch in enumerate(loader):
        seen.append(said(batch))
        if number == steps - 2:
            saved.write_text(json.dumps([loader.state_dict(), seen]))
        if number == steps - 1:
            (folder / "last.json").write_text(json.dumps(seen))
            os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), *sys.argv[4:])
