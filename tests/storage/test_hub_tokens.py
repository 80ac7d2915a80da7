"""The token that is sent to the Hub: the first of several places, and tokens that are renewed."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from forks import forked
from hub import use_settings
from midepoch.errors import FetchError
from midepoch.storage.hub import Hub

ENDPOINT = "http://hub.example"


def token(given: str | bool | None = None) -> str | None:
    return Hub(ENDPOINT, given)._token_now()


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Folder of ``hf auth login``, with a token in it."""
    pytest.importorskip("huggingface_hub")
    use_settings(monkeypatch, tmp_path)
    (tmp_path / "token").write_text("hf_saved\n")
    return tmp_path


def test_the_environment_precedes_the_login(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert token() == token(True) == "hf_saved"
    assert (token(" hf_own\n"), token(False)) == ("hf_own", None)
    monkeypatch.setenv("HUGGING_FACE_HUB_TOKEN", "hf_old_name")
    assert token() == "hf_old_name"
    monkeypatch.setenv("HF_TOKEN", " hf_given\n")
    assert token() == "hf_given"
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DISABLE_IMPLICIT_TOKEN", True)
    assert (token(), token(True)) == (None, "hf_given")


def test_no_token(home: Path) -> None:
    (home / "token").unlink()
    assert token() is None
    with pytest.raises(FetchError, match="this machine, which has none. Set HF_TOKEN, or log in"):
        token(True)


def test_a_token_that_expires_is_renewed_also_after_a_fork(monkeypatch: pytest.MonkeyPatch) -> None:
    """huggingface_hub renews it under a lock, which a thread may hold when the process is forked."""
    lock, renewing, proceed = threading.Lock(), threading.Event(), threading.Event()

    def renewed() -> str:
        with lock:
            renewing.set()
            proceed.wait(20)
            return "hf_renewed"

    monkeypatch.setattr("huggingface_hub.utils._headers.get_token", renewed)
    thread = threading.Thread(target=token)
    thread.start()
    renewing.wait(20)
    threading.Timer(0.2, proceed.set).start()
    assert forked(lambda: token() == "hf_renewed") == 0
    thread.join()
