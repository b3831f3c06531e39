"""Resources held by processes, read and compared."""

import os
import subprocess

from jaxserve.bench.report import missed
from jaxserve.chaos.deployment import Process
from jaxserve.chaos.resources import Census, ProcessLife, Sample, at_age, held, sample
from tests import golden


def one(age, memory=100.0, files=20, threads=10):
    return Sample(age, memory, memory + 50.0, files, threads)


def life(pid, *samples, role="domain"):
    return ProcessLife(pid, role, f"{role} 0", list(samples))


def test_a_process_is_read():
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(["cat"], **pipes, stderr=subprocess.DEVNULL) as child:
        child.stdin.write(b"loaded\n")  # before that it has its libraries open
        child.stdin.flush()
        assert child.stdout.readline() == b"loaded\n"
        found = sample(child.pid)
        assert (found.files, found.threads) == (3, 1)
        assert 0.0 < found.memory <= found.resident < 50.0
        assert 0.0 <= found.age < 3600.0


def test_samples_of_a_process_are_one_life_and_ended_processes_are_left_out():
    me = Process(0, "router", "router", os.getpid())
    other = Process(1, "domain", "domain 0", os.getppid())
    gone = Process(2, "domain", "domain 1", 2**22 + 1)
    found = iter([[me], [me, other, gone]])
    census = Census(lambda: next(found))
    census.take()
    census.take()
    assert [(life.name, len(life.samples)) for life in census.lives] == [
        *(("router", 2), ("domain 0", 1))
    ]
    assert len(census.loads) == 2


def test_a_survivor_may_not_grow():
    before = [life(1, one(30))]
    assert missed([held(before, [life(1, one(90, 114, 24, 18))], [])]) == []
    grown = missed([held(before, [life(1, one(90, 116, 25, 19))], [])])
    golden.check("chaos/grown.txt", "\n".join(grown) + "\n")


@golden.table("chaos/leaks.yaml")
def test_a_leak_is_in_the_share_and_in_the_whole(before, after, grown):
    memories = zip((before, after), (30, 90), strict=True)
    samples = [[life(1, Sample(age, *memory, 9, 9))] for memory, age in memories]
    part = held(*samples, [])
    assert [m.value for m in part.measures if "both" in m.name] == [grown] * 2
    assert bool(missed([part])) == (grown == 25.0)


def test_successors_are_compared_at_the_same_age():
    first = life(1, one(5, 10), one(30, 100), one(60, 200))
    young = life(2, one(10, 900))  # did not live long enough
    last = life(3, one(30, 110), one(35, 140))
    assert at_age(first, 35).memory == 100
    found = held([life(1, one(20))], [life(3, one(36))], [first, young, last])
    values = {measure.name: measure.value for measure in found.measures}
    assert values["domain 0, 2th at 35 s: PSS (100)"] == 125.0, "the median of its last samples"
    assert "domain 0, lived on: PSS (100)" not in values
    assert missed([found]) == ["held: domain 0, 2th at 35 s: grown in both"]
