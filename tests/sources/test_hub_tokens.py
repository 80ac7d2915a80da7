"""The token of this machine for the Hub: the first of several places, and tokens that are renewed."""

from __future__ import annotations

from pathlib import Path

import pytest

from forks import forked
from midepoch.sources import hub_api
from midepoch.sources.hub_api import machine_token


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Folder of ``hf auth login``, with a token in it."""
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HF_TOKEN_PATH", "HF_OIDC_RESOURCE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    (tmp_path / "token").write_text("hf_saved\n")
    return tmp_path


def test_the_environment_precedes_the_login(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert machine_token() == "hf_saved"
    (home / "other").write_text("hf_other")
    monkeypatch.setenv("HF_TOKEN_PATH", str(home / "other"))
    assert machine_token() == "hf_other"
    monkeypatch.setenv("HUGGING_FACE_HUB_TOKEN", "hf_old_name")
    assert machine_token() == "hf_old_name"
    monkeypatch.setenv("HF_TOKEN", " hf_given\n")
    assert machine_token() == "hf_given"
    monkeypatch.setenv("HF_TOKEN_PATH", str(home / "none"))
    monkeypatch.delenv("HF_TOKEN")
    monkeypatch.delenv("HUGGING_FACE_HUB_TOKEN")
    assert machine_token() is None


def test_a_token_that_expires_is_renewed_also_after_a_fork(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub = pytest.importorskip("huggingface_hub")
    monkeypatch.setattr(hub, "get_token", lambda: "hf_renewed")
    (home / "stored_tokens").write_text("[me]\nhf_token = hf_saved\nrefresh_token = hf_refresh\n")
    assert machine_token() == "hf_renewed"
    with hub_api._token_lock:  # as by another thread
        assert forked(lambda: machine_token() == "hf_renewed") == 0
