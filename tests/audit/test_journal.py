"""Journals: what is missing at the end of a file, and what a process that was killed left out."""

from __future__ import annotations

import errno
from contextlib import suppress
from pathlib import Path

import pytest

import midepoch
from midepoch.audit import Ledger, read_run
from midepoch.audit.journal import ENDED, Journal, is_cut, records_in
from midepoch.errors import DataNotFoundError, StateError


@pytest.mark.parametrize("is_killed", [False, True])
def test_a_ledger_that_was_cut_can_be_told_from_that_of_a_killed_run(is_killed: bool, tmp_path: Path) -> None:
    loader = midepoch.from_dict({"id": list(range(40))}).shuffle(seed=1).loader(4, audit=tmp_path)
    list(loader)
    next(loader)
    (path,) = tmp_path.glob("*.ledger")
    if is_killed:
        whole = path.read_bytes()  # what a process leaves that dies now
    loader.close()
    loader._ledger._close()  # as at the end of the process
    if not is_killed:
        whole = path.read_bytes()
        assert list(records_in(whole))[-1].kind == ENDED
    path.write_bytes(whole)
    assert read_run(tmp_path).exact and not read_run(tmp_path).problems
    records = list(records_in(whole))
    ends = [record.place + 16 + -(-len(record.content) // 8) * 8 for record in records]
    for end in [*ends[:-1], *ends[-1:] * is_killed, ends[-2] + 5, ends[-2] - 3]:
        path.write_bytes(whole[:end])
        with suppress(DataNotFoundError):  # without a step there is no run
            problems = read_run(tmp_path).problems
            assert any("is missing: the file was cut" in problem for problem in problems), (end, problems)
            assert not read_run(tmp_path).exact


@pytest.mark.parametrize("is_mapped", [True, False])
def test_a_journal_in_use_is_longer_than_its_records(
    is_mapped: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not is_mapped:
        monkeypatch.delattr("os.posix_fallocate", raising=False)
    journal = Journal(tmp_path / "x")
    for size in (0, 1, 8, 4000, 4048, 4056, 4064, 4072, 4080, 9000):
        journal.append(b"some", bytes([1]) * size)
        data = (tmp_path / "x").read_bytes()
        assert not is_cut(data) and len(list(records_in(data))[-1].content) == size
        assert is_cut(data.rstrip(b"\0")) or not size
    journal.close()
    assert is_cut((tmp_path / "x").read_bytes())


def test_a_ledger_without_a_record_hides_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a full disk, a file may have its end only: the order of the rows could not be stored before its first record."""

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    ds = midepoch.from_dict({"id": list(range(40))}).shuffle(seed=1)
    list(ds.loader(4, audit=Ledger(tmp_path, attempt="first")))
    with monkeypatch.context() as patches:
        patches.setattr("midepoch.audit.ledger.save_order", full)
        list(ds.loader(4, audit=Ledger(tmp_path, attempt="second")))
    assert len(list(tmp_path.glob("*.ledger"))) == 2
    assert read_run(tmp_path).exact


@pytest.mark.parametrize("fails", ["write", "replace"])
def test_an_order_that_cannot_be_written_leaves_nothing(
    fails: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("os.fsync" if fails == "write" else "os.replace", full)
    list(midepoch.from_dict({"id": list(range(40))}).shuffle(seed=1).loader(4, audit=tmp_path))
    assert not list(tmp_path.glob(".*"))


def test_damaged_orders(tmp_path: Path) -> None:
    list(midepoch.from_dict({"id": list(range(40))}).shuffle(seed=1).filter(_odd).loader(4, audit=tmp_path))
    (path,) = tmp_path.glob("*.order")
    whole, refused = path.read_bytes(), 0
    for place in [*range(0, len(whole), 5), *range(len(whole) - 22, len(whole))]:
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 7]) + whole[place + 1 :])
        try:
            assert read_run(tmp_path).epochs
        except StateError:
            refused += 1
    assert refused > 5


def _odd(row: dict[str, int]) -> bool:
    return row["id"] % 2 == 1
