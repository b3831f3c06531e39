"""Where workers might be: addresses of the file, or names that a cluster's DNS answers for."""

import contextlib

from jaxserve.config.fleet_sections import Fleet, Prefill
from jaxserve.fleet import registry
from jaxserve.fleet.registry import Place, Registry
from jaxserve.link.session.channel import resolve
from tests.jaxserve.waiting import until


class Names:
    """A cluster's DNS, which returns the addresses of the ready pods of headless Services."""

    def __init__(self, **pods: list[str]):
        self.pods = pods
        self.asked: list[tuple[str, int]] = []

    def __call__(self, host: str, port: int) -> list[str]:
        self.asked.append((host, port))
        if host not in self.pods:
            raise OSError(f"{host}: not known")
        return [f"{pod}:{port}" for pod in self.pods[host]]


KUBERNETES = Fleet(prefill=["prefill:9100"], domains=["decode:9200"], registry="kubernetes")


def test_addresses_of_the_file_are_the_workers():
    fleet = Fleet(prefill=["a:1", "b:1", "c:1"], domains=["d:2", "e:2"], long_domains=1)
    assert Registry(fleet, Prefill(workers=3, long_workers=1), Names()).places() == [
        Place("a:1", "prefill"),
        Place("b:1", "prefill"),
        Place("c:1", "prefill", reserved=True),
        Place("d:2", "domain"),
        Place("e:2", "domain", reserved=True),
    ]


def test_ready_pods_of_a_service_are_the_workers():
    names = Names(prefill=["10.0.0.1", "10.0.0.2"], decode=["10.0.1.1"])
    with contextlib.closing(Registry(KUBERNETES, Prefill(), names)) as found:
        assert names.asked == [("prefill", 9100), ("decode", 9200)]
        expected = [Place(f"10.0.0.{n}:9100", "prefill") for n in (1, 2)]
        assert found.places() == [*expected, Place("10.0.1.1:9200", "domain")]
        names.pods = {"prefill": ["10.0.0.2", "10.0.0.3"], "decode": []}
        found.look()
        assert found.places() == [Place(f"10.0.0.{n}:9100", "prefill") for n in (2, 3)]


def test_a_registry_that_does_not_answer_changes_nothing():
    names = Names(prefill=["10.0.0.1"])
    with contextlib.closing(Registry(KUBERNETES, Prefill(), names)) as found:
        before = [Place("10.0.0.1:9100", "prefill")]
        assert found.places() == before, "and one that is not there yet has no workers"
        names.pods = {"decode": ["10.0.1.1"]}
        found.look()
        assert found.places() == [*before, Place("10.0.1.1:9200", "domain")]


def test_it_is_asked_again_all_the_time(monkeypatch):
    monkeypatch.setattr(registry, "LOOK_UP_SECONDS", 0.01)
    names = Names(prefill=[], decode=[])
    found = Registry(KUBERNETES, Prefill(), names)
    names.pods["decode"] = ["10.0.1.1"]
    until(found.places)
    found.close()


def test_names_as_this_system_resolves_them():
    assert "127.0.0.1:7" in resolve("localhost", 7)
    assert resolve("::1", 7) == ["[::1]:7"]
