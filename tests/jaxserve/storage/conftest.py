import pytest

from jaxserve.storage import bucket, files, mirror
from tests.jaxserve.storage.object_server import serving


@pytest.fixture
def objects(monkeypatch, tmp_path):
    """A server that `s3://models/` means, and `gs://models/` once it is asked for first."""
    with serving() as made:
        monkeypatch.setenv("AWS_ENDPOINT_URL_S3", made.url)
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "nobody")
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "nothing")
        monkeypatch.setenv("TENSORSTORE_GCS_HTTP_URL", made.url)
        monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", "")
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
        monkeypatch.setattr(bucket, "_RETRIES", {"max_retries": 3, "initial_delay": "10ms"})
        for cached in (bucket.context, files.bucket_of, mirror._mirrored):
            cached.cache_clear()
        yield made
        for cached in (bucket.context, files.bucket_of, mirror._mirrored):
            cached.cache_clear()
