import math
import re
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxserve.config.deployment import (
    AttentionRole,
    Cache,
    Deployment,
)
from jaxserve.config.load import deployment_of, known_keys, load_deployment
from jaxserve.errors import ConfigError

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
        """The table of configs/README.md has the defaults of the other keys."""
        deployment = load_deployment(write("model: demo\n"))
        assert deployment.model == str(tmp_path / "demo")
        assert deployment.attention == AttentionRole()

    def test_sections(self, write):
        deployment = load_deployment(
            write(
                "model: /models/step3\nmode: colocated\nlanes: 3\nattention: {dp: 2, tp: 4}\n"
                "cache:\n  page_size: 32\n"
            )
        )
        assert deployment.model == "/models/step3"
        assert (deployment.mode, deployment.lanes) == ("colocated", 3)
        assert deployment.attention == AttentionRole(dp=2, tp=4)
        assert deployment.cache == Cache(page_size=32, pages=512)

    def test_a_model_folder_stands_for_all_defaults(self, tmp_path):
        deployment = load_deployment(tmp_path, {"lanes": 2})
        assert deployment.model == str(tmp_path)
        assert deployment.lanes == 2
        assert deployment.attention == AttentionRole()

    @pytest.mark.parametrize(
        ("text", "message"),
        [
            ("", "deployment: Object missing required field `model`"),
            ("- a\n", "expected keys, got list"),
            ("just words\n", "expected keys, got str"),
            ("model: [\n", "is no YAML"),
            ("model: x\x00\n", "is no YAML"),
            (b"model: \xff\xfe\n", "deployment.yaml is no text"),
            ("model: 3\n", "Expected `str`, got `int` - at `$.model`"),
            ("model:\n", "Expected `str`, got `null` - at `$.model`"),
            ("model: x\nattention:\n", "attention: expected a section, got None"),
            ("model: x\nattention: 3\n", "attention: expected a section, got 3"),
            ("model: x\n1: 2\n", "unknown key 1"),
            ("model: x\nattention: {1: 2}\n", "unknown key attention.1"),
            (
                "model: x\nscheduler:\n  slots: 2\nlanes: 1\nscheduler:\n  max_length: 9\n",
                "deployment.yaml, line 5: key 'scheduler' is in line 2 already",
            ),
            ("model: x\nscheduler: {slots: 2,\n slots: 3}\n", "line 3: key 'slots' is in line 2"),
        ],
    )
    def test_bad_files(self, write, text, message):
        with pytest.raises(ConfigError, match=re.escape(message)):
            load_deployment(write(text))

    def test_no_file(self, tmp_path):
        with pytest.raises(ConfigError, match=r"none\.yaml: No such file or directory"):
            load_deployment(tmp_path / "none.yaml")


class TestOverrides:
    @pytest.mark.parametrize(
        "overrides",
        [
            {"attention.dp": 3, "lanes": 2, "dtype": "float32"},
            ["attention.dp=3", "lanes=2", "dtype=float32"],
            ["attention.dp=3", "lanes=3", "lanes=2", "dtype=float32"],  # the last one wins
        ],
    )
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

    @pytest.mark.parametrize(
        ("override", "message"),
        [
            ("lanes", "--set 'lanes': expected key=value, as in attention.dp=3"),
            ("=3", "--set '=3': expected key=value"),
            ("lanes=[", "--set 'lanes=[': '[' is no YAML: while parsing"),
            ("lanes.more=3", "override lanes.more: lanes is a value, not a section"),
            ("attention=3", "attention: expected a section, got 3"),
            ("attention=", "attention: expected a section, got None"),
        ],
    )
    def test_bad_ones(self, write, override, message):
        with pytest.raises(ConfigError, match=re.escape(message)):
            load_deployment(write("model: x\nlanes: 1\n"), [override])

    @given(st.text(max_size=30))
    def test_any_text_is_applied_or_a_config_error(self, text):
        try:
            deployment = load_deployment(HERE, [text])
        except ConfigError:
            return
        assert isinstance(deployment, Deployment)


class TestUnknownKeys:
    @pytest.mark.parametrize(
        ("key", "nearest"),
        [
            ("lane", "lanes"),
            ("attention.dpp", "attention.dp"),
            ("scheduler.slot", "scheduler.slots"),
            ("page_size", "cache.page_size"),
            ("attention.dp_size", "attention.dp"),
        ],
    )
    def test_name_the_nearest_known_one(self, key, nearest):
        with pytest.raises(ConfigError) as error:
            load_deployment(HERE, {key: 1})
        assert str(error.value) == f"unknown key {key}; did you mean '{nearest}'?"

    def test_or_all_of_the_section(self):
        with pytest.raises(ConfigError, match="unknown key zzz; known: model, ignored_model_keys"):
            load_deployment(HERE, {"zzz": 1})

    def test_in_the_file(self, write):
        with pytest.raises(ConfigError, match=r"unknown key cache\.page; did you mean 'cache\.pag"):
            load_deployment(write("model: x\ncache: {page: 3}\n"))

    def test_known_keys_are_dotted(self):
        keys = known_keys()
        assert {"model", "lanes", "attention.dp", "cluster.step_seconds"} <= set(keys)
        assert "attention" not in keys


class TestRanges:
    @pytest.mark.parametrize(
        ("key", "values"),
        [
            ("lanes", [0, 5, 1.5, "two", True, None]),
            *(("mode", ["both"]), ("dtype", ["float16"])),
            *(("attention.dp", [0]), ("attention.tp", [-1]), ("ffn.ep", [0]), ("ffn.tp", [65537])),
            *(("link.dispatch", ["fp4"]), ("link.combine", ["fp8"])),
            *(("link.route", ["pigeon"]), ("link.transport", ["push"])),
            *(("cache.page_size", [0]), ("cache.pages", [0])),
            *(("scheduler.slots", [0]), ("scheduler.max_length", [1])),
            *(("scheduler.token_buckets", [[0], 3]), ("scheduler.max_waiting", [0])),
            *(("server.grpc_port", [65536]), ("server.http_port", [-2])),
            *(("server.admin_port", [65536]), ("server.request_seconds", [0])),
            *(("server.drain_seconds", [0]), ("cluster.step_seconds", [0, math.nan, math.inf])),
        ],
    )
    def test_name_the_field(self, key, values):
        for value in values:
            with pytest.raises(ConfigError, match=re.escape(f"$.{key}")):
                load_deployment(HERE, {key: value})


def test_ranks_of_the_shared_expert_leave_some_for_the_others():
    message = "of {} ranks leave none for the routed experts"
    for overrides, ranks in (
        ({"ffn.ep": 4}, "ffn.ep = 4"),
        ({"mode": "colocated", "attention.dp": 4, "ffn.ep": 9}, "attention.dp = 4"),
    ):
        load_deployment(HERE, overrides | {"ffn.shared_ranks": 3})
        with pytest.raises(ConfigError, match=f"shared_ranks = 4 {message.format(ranks)}"):
            load_deployment(HERE, overrides | {"ffn.shared_ranks": 4})
    with pytest.raises(ConfigError, match="whole_shared = true, but with"):
        load_deployment(HERE, {"ffn.ep": 4, "ffn.shared_ranks": 2, "ffn.whole_shared": True})


@pytest.mark.parametrize(
    ("overrides", "ranks"),
    [
        ({"ffn.ep": 5, "ffn.shared_ranks": 1}, 4),
        ({"ffn.ep": 2}, 2),
        ({"mode": "colocated", "attention.dp": 4}, 4),
    ],
    ids=str,
)
def test_nodes_divide_the_ranks_of_routed_experts(overrides, ranks):
    load_deployment(HERE, overrides | {"experts.nodes": 2})
    message = f"experts.nodes = 3 does not divide the {ranks} ranks of routed experts"
    with pytest.raises(ConfigError, match=message):
        load_deployment(HERE, overrides | {"experts.nodes": 3})


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"ffn.instances": 3}, "ffn.instances = 3 does not divide ffn.ep = 4"),
        ({"ffn.tp": 2}, "attention's 4 devices are no multiple of the ffn role's 8"),
        ({"ffn.shared_ranks": 2}, "with ffn.shared_ranks = 2 ranks take turns"),
        (
            {"link.transport": "pull", "ffn.runtime": "other", "link.addresses": ["here:1"]},
            "ffn.instances = 2: not over link.transport = pull",
        ),
    ],
)
def test_where_the_ffn_role_has_no_instances(more, message):
    fits = {"attention.dp": 4, "ffn.ep": 4, "ffn.instances": 2}
    assert load_deployment(HERE, fits).ffn.instances == 2
    with pytest.raises(ConfigError, match=message):
        load_deployment(HERE, fits | more)


class TestBuckets:
    def load(self, **overrides):
        overrides = {f"scheduler.{key}": value for key, value in overrides.items()}
        limits = load_deployment(HERE, overrides).scheduler
        return limits.token_buckets, limits.page_buckets

    def test_are_completed(self):
        assert self.load() == ([8, 128], [16, 64])
        assert self.load(slots=4, token_budget=32, max_length=100) == ([4, 32], [2, 7])
        assert self.load(slots=8, token_budget=8, max_length=16) == ([8], [1])

    def test_or_taken_as_they_are(self):
        assert self.load(token_buckets=[8, 32, 128], page_buckets=[64]) == ([8, 32, 128], [64])

    @pytest.mark.parametrize(
        ("limits", "message"),
        [
            ({"token_buckets": [8, 64]}, "token_buckets = [8, 64]: must ascend and end at"),
            ({"token_buckets": [64, 8, 128]}, "token_buckets = [64, 8, 128]: must"),
            ({"token_buckets": [8, 8, 128]}, "token_buckets = [8, 8, 128]: must"),
            ({"page_buckets": [16, 65]}, "page_buckets = [16, 65]: must ascend and end at ceil("),
            ({"token_budget": 7}, "token_budget = 7 is below scheduler.slots = 8"),
            (
                {"max_length": 8193},
                "scheduler.max_length = 8193 tokens: that takes 513 pages of 16",
            ),
        ],
    )
    def test_that_do_not_fit(self, limits, message):
        with pytest.raises(ConfigError, match=re.escape(message)):
            self.load(**limits)

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


def test_int4_keys_and_values_are_refused_with_what_there_is():
    message = r"cache\.format = int4: .*TPUs.*GPUs.*CPUs; int8 is the smallest on all"
    with pytest.raises(ConfigError, match=f"^{message}"):
        load_deployment(HERE, {"cache.format": "int4"})
    prefill = {"prefill.workers": 1, "prefill.cache.format": "int4"}
    with pytest.raises(ConfigError, match=f"^prefill: {message}"):
        load_deployment(HERE, prefill)


def test_prefill_workers_keep_rotated_parts_as_domains_do():
    keys = {"cache.format": "int8", "cache.rope": "bfloat16", "prefill.workers": 1}
    with pytest.raises(ConfigError, match=r"prefill\.cache\.rope = auto, but cache\.rope = bfl"):
        load_deployment(HERE, keys | {"prefill.cache.rope": "auto"})


class TestDerived:
    def test_dispatch_format(self):
        def format_of(dtype, dispatch):
            overrides = {"dtype": dtype, "link.dispatch": dispatch}
            return load_deployment(HERE, overrides).dispatch_format

        assert format_of("bfloat16", "auto") == "bfloat16"
        assert format_of("float32", "auto") == "float32"
        assert format_of("float32", "fp8") == "fp8"

    def test_combine_format(self):
        dtype = {"dtype": "float32"}
        assert load_deployment(HERE, dtype).combine_format == "float32"
        assert load_deployment(HERE, dtype | {"link.combine": "int8"}).combine_format == "int8"

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


PULL = "link: {transport: pull, addresses: ['h:1']}"


class TestRoles:
    """`roles:` and `links:`, which the short form's sections expand to and from."""

    LONG = """
roles:
  attention: {dp: 2, runtime: a}
  ffn: {ep: 4, runtime: f, hardware: h200}
links:
  ffn: {transport: pull, addresses: ["10.0.0.1:5000", "10.0.0.2:5000"], dispatch: int8}
"""

    def test_both_forms_say_the_same(self, read):
        short = """
attention: {dp: 2, runtime: a}
ffn: {ep: 4, runtime: f, hardware: h200}
link: {transport: pull, addresses: ["10.0.0.1:5000", "10.0.0.2:5000"], dispatch: int8}
"""
        assert read(self.LONG) == read(short)

    def test_overrides_reach_both(self, read):
        made = read(self.LONG, {"roles.attention.dp": 3, "links.ffn.dispatch": "fp8"})
        assert (made.attention.dp, made.link.dispatch) == (3, "fp8")

    def test_colocated(self, read):
        made = read("roles: {colocated: {dp: 4, tp: 2}}")
        assert (made.mode, made.attention.dp, made.attention.tp) == ("colocated", 4, 2)

    @pytest.mark.parametrize(
        ("text", "message"),
        [
            ("roles: {prefil: {}}", "unknown key roles.prefil; known: attention, ffn, colocated"),
            ("links: {kv: {}}", "unknown key links.kv; known: ffn, pages"),
            ("roles: {attention: {dp: 2}}", "roles: ffn is missing"),
            ("roles: [attention]", "roles: expected sections, got ['attention']"),
            ("roles: {attention: {}, colocated: {}}", "two ways to hold attention"),
            ("mode: afd\nroles: {colocated: {}}", "mode = afd, but roles: "),
            ("attention: {}\nroles: {attention: {}, ffn: {}}", "attention: is there twice"),
            ("link: {}\nlinks: {ffn: {}}", "link: is there twice"),
            ("attention: {dp: 4, processes: 3}", "attention.processes = 3 does not divide"),
            (
                "roles: {attention: {runtime: a}, ffn: {runtime: f}}",
                "attention.runtime = a and ffn.runtime = f, but link.transport = device_put",
            ),
            (PULL, "attention.runtime = main and ffn.runtime = main, but link.transport = pull"),
            ("ffn: {runtime: f}\nlink: {transport: pull}", "link.addresses: empty"),
            ("link: {addresses: ['h:1']}", "link.addresses: only with pull, not with device_put"),
            ("weights: {peers: [h]}", "weights.peers[0] = 'h': expected host:port"),
            ("experts: {source: peer}", "experts.source = peer, but weights.peers is empty"),
            (
                "ffn: {runtime: f}\nlink: {transport: pull, addresses: ['h:0']}",
                "link.addresses[0] = 'h:0': expected host:port",
            ),
            (
                "ffn: {runtime: f}\nlink: {transport: pull, addresses: ['h:1', 'h:1']}",
                "link.addresses[1] = h:1: is there twice",
            ),
            (
                f"attention: {{dp: 2, processes: 2}}\nffn: {{runtime: f}}\n{PULL}",
                "attention.processes = 2: over link.transport = pull",
            ),
            (
                "link: {route: broadcast}\nffn: {exchange: alltoall}",
                "link.route = broadcast brings every token to every ffn device",
            ),
            (f"mode: colocated\n{PULL}", "link.transport = pull: mode colocated has no link"),
        ],
    )
    def test_mistakes_are_named(self, text, message, read):
        with pytest.raises(ConfigError, match=re.escape(message)):
            read(text)


class TestFleet:
    """Prefill workers, domains, the hand-off of pages, the router."""

    def test_both_forms_say_the_same(self, read):
        long = read(
            "roles: {colocated: {dp: 2}, prefill: {workers: 4, attention: {tp: 8}}}\n"
            "links: {pages: {lease_seconds: 10}}",
        )
        short = read(
            "mode: colocated\nattention: {dp: 2}\nprefill: {workers: 4, attention: {tp: 8}}\n"
            "pages: {lease_seconds: 10}",
        )
        assert long == short
        assert (long.prefill.workers, long.pages.lease_seconds, long.mode) == (4, 10, "colocated")

    def test_a_prefill_worker_has_what_differs(self, read):
        made = read(
            "lanes: 3\nattention: {dp: 4, weights: int8}\ncache: {format: fp8, page_size: 32}\n"
            "scheduler: {slots: 16, token_budget: 64, token_buckets: [8, 16, 64]}\n"
            "fleet: {prefill: ['p:1'], domains: ['d:1']}\n"
            "prefill: {workers: 1, mode: colocated, lanes: 2, attention: {dp: 1, tp: 2}, "
            "cache: {page_size: 16}, scheduler: {token_budget: 512}}",
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
            "prefill: {workers: 1, cache: {pages: 99}}",
        )
        worker = deployment_of(made, "prefill")
        assert (worker.scheduler.token_buckets, worker.cache.pages) == ([8, 16, 64], 99)

    def test_a_service_name_stands_for_any_number_of_workers(self, read):
        text = (
            "prefill: {workers: 4}\nmode: colocated\ndomains: 3\nfleet: {registry: %s, prefill: ["
        )
        text += "'prefill.jaxserve:9100'], domains: ['decode.jaxserve:9100']}"
        assert read(text % "kubernetes").fleet.registry == "kubernetes"
        with pytest.raises(ConfigError, match=r"1 addresses, but prefill\.workers = 4"):
            read(text % "static")

    @pytest.mark.parametrize(
        ("text", "message"),
        [
            ("prefill: {workers: 2, long_workers: 1}", "prefill.long_tokens = 0 and prefill.long"),
            (
                "prefill: {workers: 2, long_workers: 2, long_tokens: 9}",
                "prefill.long_workers = 2 of prefill.workers = 2",
            ),
            (
                "prefill: {workers: 2}\ncache: {prefix: false}",
                "prefill.workers = 2, but cache.prefix = false",
            ),
            (
                "pages: {on_failure: fail, recompute_tokens: 10}",
                "pages.recompute_tokens = 10, but pages.on_failure = fail",
            ),
            ("fleet: {late: refuse}", "fleet.late = refuse, but fleet.ttft_seconds = 0 and fleet"),
            ("fleet: {domains: ['d']}", "fleet.domains[0] = 'd': expected host:port"),
            (
                "prefill: {workers: 1}\nfleet: {domains: ['d:1'], prefill: ['d:1']}",
                "fleet.domains[0] = d:1: is in fleet.prefill, too",
            ),
            ("prefill: {workers: 2}\nfleet: {prefill: ['p:1', 'p:2']}", "fleet.domains: empty"),
            (
                "prefill: {workers: 2}\nfleet: {prefill: ['p:1'], domains: ['d:1']}",
                "fleet.prefill: 1 addresses, but prefill.workers = 2",
            ),
            (
                "mode: colocated\ndomains: 3\nfleet: {domains: ['d:1', 'd:2']}",
                "fleet.domains: 2 addresses, but domains = 3",
            ),
            ("prefill: {workers: 1, attention: {dq: 2}}", "prefill: unknown key attention.dq;"),
            ("prefill: {workers: 1, attention: {dp: 0}}", "prefill: Expected `int` >= 1"),
            ("prefill: {workers: 1, cache: {pages: 5}}", "prefill: cache.pages = 5 cannot hold"),
            (
                f"attention: {{runtime: a}}\nffn: {{runtime: f}}\n{PULL}\n"
                "prefill: {workers: 1, attention: {runtime: f}}",
                "prefill: attention.runtime = f and ffn.runtime = f, but link.transport = pull",
            ),
        ],
    )
    def test_mistakes_are_named(self, text, message, read):
        with pytest.raises(ConfigError, match=re.escape(message)):
            read(text)
