"""Objects are read as they are, and what goes wrong is said in one line."""

import pytest

from jaxserve.errors import CheckpointError
from jaxserve.storage import bucket
from jaxserve.storage.bucket import ByteSpan, StorageBucket, is_url, kvstore


def test_urls():
    assert is_url("s3://models/step3")
    assert is_url("gs://models")
    assert not is_url("/models/step3")
    assert not is_url("s3:/models")
    assert not is_url("https://models/step3")
    assert kvstore("gs://models/a/b/") == {"driver": "gcs", "bucket": "models", "path": "a/b/"}
    assert kvstore("gs://models") == {"driver": "gcs", "bucket": "models", "path": ""}


@pytest.mark.parametrize("url", ["s3://", "s3:///path", "gs://x", "s3://UPPER/path"])
def test_no_bucket(url):
    with pytest.raises(CheckpointError, match=r"expected ..://BUCKET/PATH"):
        StorageBucket(url)


@pytest.mark.parametrize("scheme", ["s3", "gs"])
def test_spans(scheme, objects):
    objects.files |= {"m/a": bytes(range(100)), "m/b/c": b"x", "other": b"y"}
    found = StorageBucket(f"{scheme}://models/m")
    assert found.names() == ["a", "b/c"]
    parts = found.read(
        [ByteSpan("a", 10, 14), ByteSpan("b/c"), ByteSpan("none"), ByteSpan("a", 99, 100)]
    )
    assert [part and part.data for part in parts] == [bytes([10, 11, 12, 13]), b"x", None, b"c"]
    assert parts[0].generation == parts[3].generation != parts[1].generation
    assert ("m/a", 10, 14) in objects.ranges


def test_beyond_the_end(objects):
    objects.files["m/a"] = bytes(10)
    with pytest.raises(CheckpointError, match=r"^s3://models/m/a is shorter than it was, or trunc"):
        StorageBucket("s3://models/m").read([ByteSpan("a", 8, 12)])


def test_no_such_bucket(objects):
    with pytest.raises(CheckpointError, match=r"^s3://absent/m: there is no bucket absent"):
        StorageBucket("s3://absent/m").names()


@pytest.mark.parametrize(("scheme", "what"), [("s3", "AWS_ACCESS_KEY_ID"), ("gs", "gcloud auth")])
def test_no_permission(scheme, what, objects):
    objects.refuses = True
    with pytest.raises(CheckpointError, match=rf"^{scheme}://models/m: no permission .*{what}"):
        StorageBucket(f"{scheme}://models/m").names()


def test_tried_again(objects):
    objects.files["m/a"] = b"there"
    objects.failures = 2
    (part,) = StorageBucket("s3://models/m").read([ByteSpan("a")])
    assert part.data == b"there"
    objects.failures = 10
    with pytest.raises(CheckpointError, match=r"s3://models/m/a cannot be read: .*3 retry"):
        StorageBucket("s3://models/m").read([ByteSpan("a")])


def test_no_answer(objects, monkeypatch):
    monkeypatch.setattr(bucket, "ANSWER_SECONDS", 0.2)
    objects.silent = True
    with pytest.raises(CheckpointError, match=r"s3://models/m/a: no answer within 0.2 s"):
        StorageBucket("s3://models/m").read([ByteSpan("a")])
