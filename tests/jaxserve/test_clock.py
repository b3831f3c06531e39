from jaxserve.clock import AwakeClock


def test_long_pauses_are_left_out() -> None:
    times = iter([100.0, 100.5, 160.0, 160.25])
    clock = AwakeClock(longest=1.0, clock=lambda: next(times))
    assert clock.now == 0.0
    assert [clock.tick(), clock.tick(), clock.tick()] == [0.5, 1.5, 1.75]
    assert clock.now == 1.75
