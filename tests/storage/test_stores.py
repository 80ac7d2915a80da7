from __future__ import annotations

import pyarrow.fs as fs
import pytest

from midepoch.errors import FetchError
from midepoch.storage.stores import Retry, Store


def attempts_at(text: str, path: str = "bucket/a.parquet") -> int:
    """How often a store is asked that answers with an error of this text."""
    store = Store(fs.SubTreeFileSystem("/", fs.LocalFileSystem()), retry=Retry(attempts=3, first_pause=0.0))
    count = 0

    def ask() -> None:
        nonlocal count
        count += 1
        raise OSError(text)

    with pytest.raises(FetchError):
        store.persist(path, "read", ask)
    return count


@pytest.mark.parametrize(
    "text",
    [
        "When reading information for key 'a': AWS Error SIGNATURE_DOES_NOT_MATCH during HeadObject operation: …",
        "AWS Error INVALID_ACCESS_KEY_ID during ListObjectsV2 operation: …",
        "AWS Error ACCESS_DENIED during HeadObject operation: No response body.",
        "AWS Error UNRECOGNIZED_CLIENT during GetObject operation",
        "AWS Error UNKNOWN (HTTP status 403) during HeadObject operation",
        "An error occurred (ExpiredToken) when calling the GetObject operation",
        "The specified signature is wrong. ErrorCode: AuthenticationFailed",
        "google::cloud::Status(PERMISSION_DENIED: Permanent error GetObjectMetadata)",
        "403, message='Forbidden', url='https://host/a'",
    ],
)
def test_a_refusal_is_not_tried_again(text: str) -> None:
    assert attempts_at(text) == 1


@pytest.mark.parametrize(
    "text", ["AWS Error SLOW_DOWN during GetObject operation", "curlCode: 28, Timeout was reached", "HTTP status 503"]
)
def test_a_failure_that_may_pass_is_tried_again(text: str) -> None:
    assert attempts_at(text) == 3


def test_a_path_is_no_refusal() -> None:
    path = "bucket/forbidden/a.parquet"
    assert attempts_at(f"{path}: AWS Error SLOW_DOWN during GetObject operation", path) == 3
