"""A server of objects on loopback that speaks the reading half of S3 and of Google Cloud Storage.

It logs the ranges that were asked for, and refuses, delays or fails where a test says so. The
protocols are those of the vendors' references: ListObjectsV2 and GetObject of S3 with addresses by
path, and `objects.list` and `objects.get` of Google's JSON API.
"""

import contextlib
import json
import re
import threading
import zlib
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

BUCKET = "models"


class Objects:
    """The objects of a server, and the requests that it has seen.

    Attributes:
      files: key → contents, of the one bucket.
      ranges: (key, start, stop) of every answer with content.
      failures: number of next requests that get 503.
      refuses: whether every request gets 403.
      silent: whether requests wait for `awake`.
    """

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}
        self.ranges: list[tuple[str, int, int]] = []
        self.failures = 0
        self.refuses = False
        self.silent = False
        self.awake = threading.Event()
        self.url = ""

    def upload(self, folder: Path, prefix: str) -> None:
        """The folder's files below a prefix."""
        for path in folder.rglob("*"):
            if path.is_file():
                self.files[f"{prefix}/{path.relative_to(folder)}"] = path.read_bytes()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    # Headers and body are two writes: the second would wait 40 ms for the first one's confirmation.
    disable_nagle_algorithm = True
    objects: Objects

    def do_GET(self) -> None:
        objects = self.objects
        if objects.silent:
            objects.awake.wait(30)
        if objects.failures:
            objects.failures -= 1
            return self._send(503, b"")
        url = urlsplit(self.path)
        query = {name: values[0] for name, values in parse_qs(url.query).items()}
        google = re.fullmatch(r"/storage/v1/b/([^/]+)/o(?:/(.+))?", url.path)
        bucket, _, key = unquote(url.path).strip("/").partition("/")
        if google:
            bucket, key = google[1], google[2] and unquote(google[2])
        if objects.refuses:
            return self._send(403, b"<Error><Code>AccessDenied</Code></Error>")
        if bucket != BUCKET:
            return self._send(404, b"<Error><Code>NoSuchBucket</Code></Error>")
        if key:
            return self._object(key, bool(google))
        if google:
            first, last = query.get("startOffset", ""), query.get("endOffset", "\x7f")
            items = [
                {"name": name, "generation": "1", "size": f"{len(data)}"}
                for name, data in sorted(objects.files.items())
                if first <= name < last
            ]
            return self._send(200, json.dumps({"items": items}).encode())
        prefix = query.get("prefix", "")
        found = "".join(
            f"<Contents><Key>{escape(name)}</Key><Size>{len(data)}</Size></Contents>"
            for name, data in sorted(objects.files.items())
            if name.startswith(prefix)
        )
        whole = f"<IsTruncated>false</IsTruncated>{found}"
        return self._send(200, f"<ListBucketResult>{whole}</ListBucketResult>".encode())

    def do_PUT(self) -> None:
        self._keep(urlsplit(self.path).path.removeprefix(f"/{BUCKET}/"))

    def do_POST(self) -> None:
        self._keep(parse_qs(urlsplit(self.path).query)["name"][0])

    def _keep(self, key: str) -> None:
        data = self.rfile.read(int(self.headers["Content-Length"]))
        if self.objects.silent:
            self.objects.awake.wait(30)
        self.objects.files[key] = data
        facts = dict.fromkeys(("id", "bucket", "size", "generation", "metageneration"), "1")
        facts |= dict.fromkeys(("timeCreated", "updated"), "2026-01-01T00:00:00Z") | {"name": key}
        self._send(200, json.dumps(facts).encode(), {"ETag": '"1"'})

    def do_DELETE(self) -> None:
        path = unquote(urlsplit(self.path).path)
        for prefix in (f"/storage/v1/b/{BUCKET}/o/", f"/{BUCKET}/"):
            self.objects.files.pop(path.removeprefix(prefix), None)
        self._send(204, b"")

    def _object(self, key: str, google: bool) -> None:
        data = self.objects.files.get(key)
        if data is None:
            return self._send(404, b"<Error><Code>NoSuchKey</Code></Error>")
        version = f"{zlib.crc32(data[-1000:]) + len(data)}"
        headers = {"x-goog-generation": version} if google else {"ETag": f'"{version}"'}
        asked = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        if asked is None:
            self.objects.ranges.append((key, 0, len(data)))
            return self._send(200, data, headers)
        start = int(asked[1])
        stop = min(int(asked[2]) + 1 if asked[2] else len(data), len(data))
        if start >= len(data):
            return self._send(416, b"")
        self.objects.ranges.append((key, start, stop))
        headers["Content-Range"] = f"bytes {start}-{stop - 1}/{len(data)}"
        return self._send(206, data[start:stop], headers)

    def _send(self, code: int, body: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(code)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Length", f"{len(body)}")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *arguments: object) -> None:
        """Says nothing."""


class _Server(ThreadingHTTPServer):
    # Of connections opened at once; those beyond the usual 5 wait for seconds.
    request_queue_size = 128


@contextlib.contextmanager
def serving() -> Iterator[Objects]:
    """A server for the time of the block."""
    objects = Objects()
    handler = type("Handler", (_Handler,), {"objects": objects})
    server = _Server(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    objects.url = f"http://127.0.0.1:{server.server_port}"
    try:
        yield objects
    finally:
        objects.awake.set()
        server.shutdown()
        thread.join()
        server.server_close()
