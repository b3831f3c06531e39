import ast
import operator
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxserve.config.deployment import Deployment
from jaxserve.config.load import deployment_of, known_keys, load_deployment
from jaxserve.config.sections import AttentionRole
from jaxserve.errors import ConfigError
from tests import golden

HERE = Path(__file__).parent
"""A folder that stands for a model: all keys have their defaults."""


@pytest.fixture
def write(tmp_path):
    def write(text: str | bytes) -> Path:
        path = tmp_path / "deployment.yaml"
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return path

    return write


class TestFile:
    def test_a_model_is_found_beside_the_file(self, write, tmp_path):
        """The table of docs/keys.md has the defaults of the other keys."""
        deployment = load_deployment(write("model: demo\n"))
        assert deployment.model == str(tmp_path / "demo")
        assert deployment.attention == AttentionRole()

    def test_no_file(self, tmp_path):
        with pytest.raises(ConfigError, match=r"none\.yaml: No such file or directory"):
            load_deployment(tmp_path / "none.yaml")


class TestOverrides:
    @golden.table("config/dict_or_list.yaml")
    def test_as_a_dict_or_a_list(self, write, overrides):
        deployment = load_deployment(write("model: x\nlanes: 4\n"), overrides)
        assert (deployment.lanes, deployment.dtype) == (2, "float32")
        assert deployment.attention == AttentionRole(dp=3)

    def test_the_rest_of_a_section_stays_unless_it_is_given_whole(self, write):
        path = write("model: x\nattention: {dp: 2, tp: 2}\n")
        assert load_deployment(path, ["attention.tp=4"]).attention == AttentionRole(dp=2, tp=4)
        assert load_deployment(path, {"attention": {"tp": 4}}).attention == AttentionRole(1, 4)

    def test_values_are_yaml(self):
        overrides = ["scheduler.token_buckets=[16, 64]", "scheduler.token_budget=64"]
        overrides += ["server.host=::1", "server.drain_seconds=0.5"]
        deployment = load_deployment(HERE, overrides)
        assert deployment.scheduler.token_buckets == [16, 64]
        assert (deployment.server.host, deployment.server.drain_seconds) == ("::1", 0.5)

    def test_of_the_model_is_as_given(self, write):
        assert load_deployment(write("model: x\n"), {"model": "y"}).model == "y"

    @given(st.text(max_size=30))
    def test_any_text_is_applied_or_a_config_error(self, text):
        try:
            deployment = load_deployment(HERE, [text])
        except ConfigError:
            return
        assert isinstance(deployment, Deployment)


def test_known_keys_are_dotted():
    keys = known_keys()
    assert {"model", "lanes", "attention.dp", "cluster.step_seconds"} <= set(keys)
    assert "attention" not in keys


@golden.table("config/ranks_that_fit.yaml")
def test_ranks_and_instances_that_fit(fits):
    load_deployment(HERE, fits.split())


class TestBuckets:
    def load(self, **overrides):
        overrides = {f"scheduler.{key}": value for key, value in overrides.items()}
        limits = load_deployment(HERE, overrides).scheduler
        return limits.token_buckets, limits.page_buckets

    def test_are_completed_or_taken_as_they_are(self):
        assert self.load() == ([8, 128], [16, 64])
        assert self.load(slots=4, token_budget=32, max_length=100) == ([4, 32], [2, 7])
        assert self.load(slots=8, token_budget=8, max_length=16) == ([8], [1])
        assert self.load(token_buckets=[8, 32, 128], page_buckets=[64]) == ([8, 32, 128], [64])

    @given(
        slots=st.integers(1, 64),
        budget=st.integers(1, 512),
        max_length=st.integers(2, 5000),
        page_size=st.integers(1, 64),
    )
    def test_always_ascend_and_cover(self, slots, budget, max_length, page_size):
        overrides = {
            "scheduler.slots": slots,
            "scheduler.token_budget": max(budget, slots),
            "scheduler.max_length": max_length,
            "cache.page_size": page_size,
            "cache.pages": 5000,
        }
        limits = load_deployment(HERE, overrides).scheduler
        for buckets in (limits.token_buckets, limits.page_buckets):
            assert buckets == sorted(set(buckets))
            assert buckets[0] >= 1
        assert limits.token_buckets[-1] == max(budget, slots)
        assert limits.page_buckets[-1] * page_size >= max_length
        assert (limits.page_buckets[-1] - 1) * page_size < max_length


class TestDerived:
    @pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
    def test_formats_of_messages(self, dtype):
        made = load_deployment(HERE, {"dtype": dtype})
        assert made.dispatch_format == made.combine_format == made.cache_format == dtype
        made = load_deployment(HERE, ["link.dispatch=fp8", "link.combine=int8", f"dtype={dtype}"])
        assert (made.dispatch_format, made.combine_format) == ("fp8", "int8")

    def test_devices(self):
        layout = {"attention.dp": 3, "attention.tp": 2, "ffn.ep": 5, "ffn.tp": 7}
        assert load_deployment(HERE, layout).devices == 3 * 2 + 5 * 7
        assert load_deployment(HERE, layout | {"mode": "colocated"}).devices == 3 * 2

    def test_survives_the_wire(self):
        deployment = load_deployment(HERE, {"attention.dp": 3})
        data = msgspec.msgpack.encode(deployment)
        assert msgspec.msgpack.decode(data, type=Deployment) == deployment


@pytest.fixture
def read(write):
    """Reads a deployment of a model and this text."""
    return lambda text, overrides=(): load_deployment(write(f"model: m\n{text}"), overrides)


class TestRoles:
    """`roles:` and `links:`, which the short form's sections expand to and from."""

    @golden.table("config/forms.yaml")
    def test_both_forms_say_the_same(self, read, long, short, found):
        made = read(long)
        assert made == read(short)
        assert {key: operator.attrgetter(key)(made) for key in found} == found

    def test_overrides_reach_both(self, read):
        made = read(
            "roles: {attention: {dp: 2}, ffn: {}}",
            {"roles.attention.dp": 3, "links.ffn.dispatch": "fp8"},
        )
        assert (made.attention.dp, made.link.dispatch) == (3, "fp8")

    def test_colocated(self, read):
        made = read("roles: {colocated: {dp: 4, tp: 2}}")
        assert (made.mode, made.attention.dp, made.attention.tp) == ("colocated", 4, 2)


class TestFleet:
    """Prefill workers, domains, the hand-off of pages, the router."""

    def test_a_prefill_worker_has_what_differs(self, read):
        made = read(
            "lanes: 3\nattention: {dp: 4, weights: int8}\ncache: {format: fp8, page_size: 32}\n"
            "scheduler: {slots: 16, token_budget: 64, token_buckets: [8, 16, 64]}\n"
            "fleet: {prefill: ['p:1'], domains: ['d:1']}\n"
            "prefill: {workers: 1, mode: colocated, lanes: 2, attention: {dp: 1, tp: 2}, "
            "cache: {page_size: 16}, scheduler: {token_budget: 512}}"
        )
        worker = deployment_of(made, "prefill")
        assert (worker.mode, worker.lanes, worker.domains) == ("colocated", 2, 1)
        attention = worker.attention
        assert (attention.dp, attention.tp, attention.weights) == (1, 2, "int8")
        assert (worker.cache.page_size, worker.cache.format) == (16, "fp8")
        assert worker.scheduler.token_buckets == [16, 512]
        assert worker.scheduler.page_buckets == [16, 64]
        assert (worker.prefill.workers, worker.fleet.domains) == (0, [])
        assert deployment_of(made, "attention") is made

    def test_buckets_that_still_fit_stay(self, read):
        made = read(
            "scheduler: {slots: 16, token_budget: 64, token_buckets: [8, 16, 64]}\n"
            "prefill: {workers: 1, cache: {pages: 99}}"
        )
        worker = deployment_of(made, "prefill")
        assert (worker.scheduler.token_buckets, worker.cache.pages) == ([8, 16, 64], 99)

    def test_a_service_name_stands_for_any_number_of_workers(self, read):
        fleet = "{registry: kubernetes, prefill: ['prefill:9100'], domains: ['decode:9100']}"
        read(f"prefill: {{workers: 4}}\nmode: colocated\ndomains: 3\nfleet: {fleet}")


class TestMistakes:
    """`golden/config` has what is said of each, and lists those in overrides and in texts."""

    def test_in_files(self, write, tmp_path):
        def read(content: str) -> None:
            load_deployment(write(ast.literal_eval(content)))

        golden.check_refused("config/files.txt", ConfigError, read, tmp_path)

    def test_in_overrides(self):
        def read(line: str) -> None:
            load_deployment(HERE, line.split())

        golden.check_refused("config/overrides.txt", ConfigError, read)

    def test_in_keys_that_do_not_go_together(self, read):
        golden.check_refused("config/texts.txt", ConfigError, read)
