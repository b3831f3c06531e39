from jaxserve.link.pages.breaker import OPEN_SECONDS, Breaker


def test_after_the_pause_one_caller_tries():
    now = [100.0]
    breaker = Breaker(lambda: now[0])
    assert [breaker.blocked(), breaker.blocked()] == ["", ""]
    breaker.timed_out("silent for 5.0 s")
    now[0] += 4.0
    expected = "not tried for another 6 s, because it timed out: silent for 5.0 s"
    assert breaker.blocked() == expected
    now[0] += OPEN_SECONDS
    assert breaker.blocked() == ""
    assert breaker.blocked(), "the one that tries has not ended"
    breaker.worked()
    assert [breaker.blocked(), breaker.why] == ["", ""]
