"""KV pages in files: whole or not found, whatever happens to writers, readers and the folder."""

import errno
import os
import random
import subprocess
import sys
import time
from collections import defaultdict
from pathlib import Path

import numpy as np
import pytest

from jaxserve.engine.disk_pages import CHECKSUM, DiskPages
from jaxserve.engine.host_pages import PageName

ROWS = 4096
NAMES = [PageName(bytes([n]) * 24, bytes([n // 10]) * 24) for n in range(30)]


def rows_of(name: PageName) -> np.ndarray:
    return np.frombuffer(name.key * (ROWS // 24) + name.key[:16], np.uint8)


def opened(folder, files=1000, identity="0123456789abcdef") -> DiskPages:
    return DiskPages(Path(folder), files * (CHECKSUM + ROWS), identity, ROWS, defaultdict(float))


def keep(disk: DiskPages, *numbers: int) -> None:
    """Writes pages, one after the other, and waits for it."""
    for number in numbers:
        disk.keep(NAMES[number], rows_of(NAMES[number]))
        disk._writer.submit(int).result(30)
        time.sleep(0.01)  # file systems count time in steps of up to 4 ms


def held(disk: DiskPages) -> list[int]:
    disk._writer.submit(int).result(30)
    return [number for number, name in enumerate(NAMES) if name in disk]


def test_workers_share_a_folder(tmp_path):
    disk, other, foreign = opened(tmp_path), opened(tmp_path), opened(tmp_path, 9, "f" * 16)
    keep(disk, 3, 1, 12)
    for each, found in ((other, [1, 3, 12]), (foreign, [])):
        assert (each.get(NAMES[1]), held(each)) == (None, [])  # too early to look again
        each._listed = 0
        assert (each.get(NAMES[1]), held(each)) == (None, found)
    keep(other, 1)
    assert other._counters["storage_bytes_written"] == 0
    disk.condemn(NAMES[1].root)
    keep(disk, 2, 13)
    assert held(disk) == held(opened(tmp_path)) == [12, 13]
    assert (other.read(NAMES[3]), held(other)) == (None, [1, 12])


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
        assert disk.read(NAMES[1]) is None
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


def test_the_least_recently_used_leave(tmp_path):
    disk = opened(tmp_path, 5)
    keep(disk, 9, 1, 2, 3, 1)
    assert disk.read(NAMES[2]) is not None
    keep(disk, 4, 5)  # six, of which 4.5 may stay
    assert held(disk) == held(opened(tmp_path)) == [1, 2, 4, 5]


def write_forever(folder: str) -> None:
    """A writer that is killed. There is room for two thirds of its pages."""
    disk = opened(folder, 20)
    while True:
        keep(disk, random.randrange(30))


def test_writers_that_are_killed(tmp_path):
    """Eight write and delete the same pages at the same time, until SIGKILL."""
    call = "from tests.jaxserve.engine import test_disk_pages as t; t.write_forever(%r)"
    command = [sys.executable, "-c", call % str(tmp_path)]
    writers = [subprocess.Popen(command) for _ in range(8)]
    read, end = 0, time.monotonic() + 60
    while writers:
        assert time.monotonic() < end
        reader = opened(tmp_path)
        for number in held(reader):
            if (rows := reader.read(NAMES[number])) is not None:
                assert np.array_equal(rows, rows_of(NAMES[number]))
                read += 1
        assert reader._counters["storage_errors"] == 0
        if read > 60 * (9 - len(writers)):
            writer = writers.pop()
            assert writer.poll() is None
            writer.kill()
            writer.wait(10)
    assert len(os.listdir(tmp_path)) - len(held(opened(tmp_path))) <= 8
