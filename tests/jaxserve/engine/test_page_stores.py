"""KV pages in files: whole or not found, whatever happens to writers, readers and the folder."""

import errno
import os
import random
import subprocess
import sys
import threading
import time
from collections import defaultdict
from pathlib import Path

import numpy as np
import pytest

from jaxserve.engine import page_stores
from jaxserve.engine.page_stores import CHECKSUM, BucketPages, DiskPages, HostPage, PageName
from tests.jaxserve.storage.conftest import objects as objects
from tests.jaxserve.storage.object_server import BUCKET

ROWS = 4096
NAMES = [PageName(bytes([n]) * 24, bytes([n // 10]) * 24) for n in range(30)]


def rows_of(name: PageName) -> np.ndarray:
    return np.frombuffer(name.key * (ROWS // 24) + name.key[:16], np.uint8)


def opened(folder, files=1000, identity="0123456789abcdef") -> DiskPages:
    return DiskPages(Path(folder), files * (CHECKSUM + ROWS), identity, defaultdict(float))


def keep(disk: DiskPages, *numbers: int) -> None:
    """Writes pages, one after the other, and waits for it."""
    for number in numbers:
        disk.keep(NAMES[number], rows_of(NAMES[number]))
        disk._writer.submit(int).result(30)
        time.sleep(0.01)  # file systems count time in steps of up to 4 ms


def read(disk: DiskPages, *numbers: int) -> list[int]:
    """Reads pages together; those that came, each with its own content."""
    pages = [HostPage(NAMES[number], ROWS) for number in numbers]
    disk.read(pages)
    for page in pages:
        assert page.rows is None or np.array_equal(page.rows, rows_of(page.name))
    return [n for n, page in zip(numbers, pages, strict=True) if page.rows is not None]


def held(disk: DiskPages) -> list[int]:
    disk._writer.submit(int).result(30)
    return [number for number, name in enumerate(NAMES) if name in disk]


def test_workers_share_a_folder(tmp_path):
    disk, other, foreign = opened(tmp_path), opened(tmp_path), opened(tmp_path, 9, "f" * 16)
    keep(disk, 3, 1, 12)
    for each, found in ((other, [1, 3, 12]), (foreign, [])):
        each.look()
        assert held(each) == []  # too early to look again
        each._listed = 0
        each.look()
        assert held(each) == found
    assert read(other, *range(20)) == [1, 3, 12]
    keep(other, 1)
    assert other._counters["storage_bytes_written"] == 0
    disk.condemn(NAMES[1].root)
    keep(disk, 2, 13)
    assert held(disk) == held(opened(tmp_path)) == [12, 13]
    assert (read(other, 3), held(other)) == ([], [1, 12])


@pytest.mark.parametrize("damage", ["bit", "short", "empty", "name"])
def test_a_damaged_file_is_a_miss_and_goes(tmp_path, damage):
    disk = opened(tmp_path)
    keep(disk, 1, 2)
    file, other = (tmp_path / disk._file(NAMES[n]) for n in (1, 2))
    whole = bytearray(file.read_bytes())
    whole[999] ^= 4
    found = {
        "bit": whole,
        "short": file.read_bytes()[:-1],
        "empty": b"",
        "name": other.read_bytes(),
    }
    file.write_bytes(found[damage])
    for _ in range(2):
        assert read(disk, 1, 2) == [2]
        assert (file.exists(), held(disk), disk._counters["storage_errors"]) == (False, [2], 1)


def test_a_full_disk_is_told_once(tmp_path, monkeypatch, caplog):
    disk = opened(tmp_path)
    with monkeypatch.context() as patch:
        error = OSError(errno.ENOSPC, "No space left on device")
        patch.setattr(Path, "replace", lambda *_: (_ for _ in ()).throw(error))
        keep(disk, 1, 2, 3)
    assert (held(disk), os.listdir(tmp_path), disk._counters["storage_errors"]) == ([], [], 3)
    assert caplog.text.count("No space left on device") == 1
    keep(disk, 1)
    assert held(disk) == [1]


def test_the_least_recently_used_leave(tmp_path, monkeypatch):
    """A file that cannot be deleted keeps none from its turn, and no reader waits long."""
    disk, unlink = opened(tmp_path, 5), Path.unlink
    keep(disk, 9, 1, 2, 3, 1)
    assert read(disk, 2) == [2]
    keep(disk, 4, 5)  # six, of which 4.5 may stay
    assert held(disk) == held(opened(tmp_path)) == [1, 2, 4, 5]
    stuck = disk._file(NAMES[1])

    def refuse(path, **options):
        if path.name == stuck:
            raise PermissionError(errno.EPERM, "Operation not permitted")
        unlink(path, **options)

    monkeypatch.setattr(Path, "unlink", refuse)
    keep(disk, 6, 7)
    assert (held(disk), disk._counters["storage_errors"]) == ([1, 4, 5, 6, 7], 1)
    monkeypatch.setattr(page_stores, "READ_SECONDS", 0.05)
    gate, utime = threading.Event(), os.utime
    monkeypatch.setattr(os, "utime", lambda path: gate.wait(30) and utime(path))
    assert (read(disk, 4, 5), held(disk)) == ([], [])
    gate.set()
    disk._list()
    monkeypatch.undo()
    assert read(disk, *held(disk)) == [1, 4, 5, 6, 7]


@pytest.mark.parametrize("scheme", ["gs", "s3"])
def test_a_bucket(scheme, objects, monkeypatch):
    """Workers find what others wrote, but no damaged object; nothing waits for a dead bucket."""
    folder = f"{scheme}://{BUCKET}/m/kv"
    first, second = (BucketPages(folder, 1, "0" * 16, defaultdict(float)) for _ in range(2))
    keep(first, 3, 1, 12, 3)
    assert first._counters["storage_bytes_written"] == 3 * (CHECKSUM + ROWS)
    second._listed = 0
    second.look()
    assert (held(second), read(second, *range(20))) == ([1, 3, 12], [1, 3, 12])
    objects.files[f"m/kv/{first._file(NAMES[1])}"] = b"damaged"
    del objects.files[f"m/kv/{first._file(NAMES[3])}"]
    assert (read(second, 1, 3, 12), second._counters["storage_errors"]) == ([12], 1)
    second.condemn(NAMES[12].root)
    keep(second, 4, 13)
    assert [*objects.files] == [f"m/kv/{first._file(NAMES[4])}"]
    objects.silent = True
    monkeypatch.setattr(second._bucket, "_seconds", 1.0)
    start = time.monotonic()
    keep(second, *range(5, 10))
    assert (read(second, 4), held(second), time.monotonic() - start < 5) == ([], [], True)
    assert second._counters["storage_errors"] == 7


def write_forever(folder: str) -> None:
    """A writer, until it is killed or the test is. There is room for two thirds of its pages."""
    disk, test = opened(folder, 20), os.getppid()
    while os.getppid() == test:
        keep(disk, random.randrange(30))


def test_writers_that_are_killed(tmp_path):
    """Eight write and delete the same pages at the same time, until SIGKILL."""
    call = "from tests.jaxserve.engine import test_page_stores as t; t.write_forever(%r)"
    command = [sys.executable, "-c", call % str(tmp_path)]
    writers = [subprocess.Popen(command) for _ in range(8)]
    count, end = 0, time.monotonic() + 60
    while writers:
        assert time.monotonic() < end
        reader = opened(tmp_path)
        count += len(read(reader, *held(reader)))
        assert reader._counters["storage_errors"] == 0
        if count > 60 * (9 - len(writers)):
            writer = writers.pop()
            assert writer.poll() is None
            writer.kill()
            writer.wait(10)
    assert len(os.listdir(tmp_path)) - len(held(opened(tmp_path))) <= 8
