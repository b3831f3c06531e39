"""The progress line: in place on a terminal, seldom in a log."""

import io
import logging

import pytest

from jaxserve.progress import Progress
from tests.jaxserve.waiting import Clock


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_line_updates_in_place_and_ends_once() -> None:
    clock, terminal = Clock(100.0), Terminal()
    with Progress("compile", 3, stream=terminal, clock=clock) as progress:
        for name in ("enter", "attend", "ffn"):
            clock.now += 0.5
            progress.advance(note=name)
    assert terminal.getvalue() == (
        "\r\x1b[2Kcompile: 1 of 3, enter"
        "\r\x1b[2Kcompile: 2 of 3, attend"
        "\r\x1b[2Kcompile: 3 of 3, ffn"
        "\r\x1b[2Kcompile: 3 of 3, in 1.5 s\n"
    )


def test_a_terminal_is_not_redrawn_for_every_item() -> None:
    clock, terminal = Clock(100.0), Terminal()
    with Progress("load", 1000, stream=terminal, clock=clock) as progress:
        for _ in range(1000):
            clock.now += 0.001
            progress.advance()
    assert terminal.getvalue().count("\r") <= 11


@pytest.mark.parametrize(("process", "stream"), [(0, io.StringIO()), (1, Terminal())])
def test_elsewhere_a_log_line_every_two_seconds_and_one_at_the_end(process, stream, caplog):
    clock = Clock(100.0)
    with caplog.at_level(logging.INFO, "jaxserve.progress"):
        with Progress(
            "load", 5, total_bytes=5_000_000_000, process=process, stream=stream, clock=clock
        ) as progress:
            for _ in range(5):
                clock.now += 1.0
                progress.advance(size=1_000_000_000, note="model.safetensors")
    assert stream.getvalue() == ""
    assert caplog.messages == [
        "load: 2 of 5, 2.00 of 5.00 GB, 1.00 GB/s, 3 s left, model.safetensors",
        "load: 4 of 5, 4.00 of 5.00 GB, 1.00 GB/s, 1 s left, model.safetensors",
        "load: 5 of 5, 5.00 of 5.00 GB, 1.00 GB/s, in 5.0 s",
    ]


def test_an_error_leaves_a_line_that_says_where_it_stopped(caplog):
    caplog.set_level(logging.INFO, "jaxserve.progress")
    progress = Progress("load", 7, stream=io.StringIO(), clock=Clock(100.0))

    def fail() -> None:
        with progress:
            progress.advance(2)
            raise OSError("disk")

    with pytest.raises(OSError, match="disk"):
        fail()
    assert caplog.messages == ["load: 2 of 7, stopped"]


def test_no_time_left_is_claimed_before_anything_arrived(caplog):
    caplog.set_level(logging.INFO, "jaxserve.progress")
    clock = Clock(100.0)
    with Progress("load", 2, total_bytes=15_700_000, stream=io.StringIO(), clock=clock) as progress:
        clock.now += 3.0
        progress.advance(0)
    assert caplog.messages[0] == "load: 0 of 2, 0.00 of 15.70 MB, 0.00 MB/s"


def test_the_time_left_follows_from_the_blocks_of_this_process(caplog):
    """The process reads a quarter of the files, a share unknown in advance."""
    caplog.set_level(logging.INFO, "jaxserve.progress")
    clock = Clock(100.0)
    with Progress("load", 4, stream=io.StringIO(), clock=clock) as progress:
        for count in (0, 1, 1, 2):
            clock.now += 2.0
            progress.advance(count, size=500_000_000)
    assert caplog.messages[:3] == [
        "load: 0 of 4, 0.50 GB, 0.25 GB/s",
        "load: 1 of 4, 1.00 of 4.00 GB, 0.25 GB/s, 12 s left",
        "load: 2 of 4, 1.50 of 3.00 GB, 0.25 GB/s, 6 s left",
    ]


def test_a_load_ends_at_what_it_read() -> None:
    """The files hold more than this process needed."""
    clock, terminal = Clock(100.0), Terminal()
    with Progress("load", 1, total_bytes=9_000_000, stream=terminal, clock=clock) as progress:
        clock.now += 2.0
        progress.advance(size=4_000_000)
    assert terminal.getvalue().endswith("load: 1 of 1, 4.00 of 4.00 MB, 2.00 MB/s, in 2.0 s\n")
