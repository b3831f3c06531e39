"""A deployment's speed from counts: arithmetic by hand, and the committed counts of Step-3."""

import msgspec
import pytest

from jaxserve.config.load import load_deployment
from jaxserve.config.shipped import CONFIGS
from jaxserve.errors import ConfigError
from jaxserve.fleet.joining import HOSTS_EACH
from jaxserve.plan import main
from jaxserve.planner import estimate, estimate_command, stages
from jaxserve.planner.estimate_command import COMMITTED
from jaxserve.planner.hardware import read_json
from jaxserve.planner.measurements import (
    Measurement,
    calibration,
    estimated,
    joined,
    read_measurements,
)
from jaxserve.planner.models import model_config, model_folder
from jaxserve.roles.layout import Bucket
from pallas_kernels.estimate.assumptions import assumed, assuming
from tests import golden


def program(instructions, size, *, layers=2, arguments=0, **more):
    counted = {"layers": layers, "instructions": instructions, "bytes": size}
    return estimate.ProgramCounts(**counted, arguments=arguments, **more)


COUNTS = read_json(golden.FOLDER / "planner" / "counts.json", estimate.Counts)


def counts_with(**changes):
    """`COUNTS` with these of its ffn program."""
    one = msgspec.structs.replace(COUNTS.programs["ffn_moe"], **changes)
    return msgspec.structs.replace(COUNTS, programs=COUNTS.programs | {"ffn_moe": one})


def test_stages():
    """Launches of 1.7 µs, bytes at 4.3 TB/s, and what kernels take beyond them."""
    found = estimate.stages(COUNTS)
    assert found["attend_moe"].seconds == pytest.approx(17e-6 + 1e-6 + 10e-6 + 10e-6)
    assert found["ffn_moe"].seconds == pytest.approx(34e-6 + 100e-6 + 10e-6 + 20e-6)


def test_bytes_that_take_no_time():
    """What collectives move, and rows of experts that are elsewhere."""
    counts = counts_with(exchanging=43_000_000, absent=86_000_000)
    found = estimate.stages(counts)["ffn_moe"].seconds
    assert found == pytest.approx(34e-6 + 70e-6 + 10e-6 + 20e-6)
    assert estimate.bounds(estimate.every_byte(counts)) == estimate.bounds(COUNTS)


def test_sorts_take_longer_than_a_launch():
    """11 µs each, of which the launch of 1.7 is among the program's."""
    counts = msgspec.structs.replace(COUNTS, sorts=2)
    assert estimate.stages(counts)["ffn_moe"].seconds == pytest.approx(164e-6 + 2 * 9.3e-6)


def test_the_figure_charges_everything_and_the_range_spans_what_is_unknown():
    """The ffn's 164 µs, and the host's 156. Best: launches are 20 x 1.3 µs slower, a collective 5,
    and the 43 MB that collectives move are free: 185. Worst: so are launches, a collective is 10
    slower, and receiving takes the network's 20. A message takes 39 or 79 µs more of the host."""
    counts = counts_with(exchanging=43_000_000)
    assert estimate.figure(counts)[1:] == (pytest.approx(164e-6), "ffn")
    assert estimate.best(counts)[1:] == (pytest.approx(195.4e-6), "host")
    assert estimate.worst(counts)[1:] == (pytest.approx(235.4e-6), "host")
    with assuming({"host.launch": 0}):
        assert estimate.best(counts)[1:] == (pytest.approx(185e-6), "ffn")
        assert estimate.worst(counts)[1:] == (pytest.approx(220e-6), "ffn")
    # A message that waits for a wave of attention's blocks is attention's time.
    slow = msgspec.structs.replace(COUNTS, kernels={"attend": 110e-6, "ffn": 20e-6})
    slow = estimate.case("", estimate.every_byte(slow), serial=True, waits=True)
    assert slow[1:] == (pytest.approx((138 + 20 + 63) * 1e-6), "attention")
    _, first, second, *_ = estimate.lines(counts)
    assert first.startswith("762195 tokens/s a GPU, 3000 sequences with a token every 1.0 ms")
    assert second == "range 531011 to 639713 tokens/s a GPU; between"


def test_the_longest_sets_the_pace():
    found = estimate.bounds(COUNTS)
    assert found.attention == pytest.approx(38e-6)
    assert found.ffn == pytest.approx(164e-6)
    assert found.network == pytest.approx(20e-6)
    assert found.host == pytest.approx(sum(estimate.host_parts(COUNTS).values()))
    assert found.longest() == "ffn"
    # A lane's 1,000 tokens in 2 layers of 164 µs, on 2 devices.
    assert estimate.Case("", 164e-6, "").speed(COUNTS) == pytest.approx(1000 / 328e-6 / 4)


def test_the_host_of_a_process():
    """A call with its arguments, the kernels' launches, a message with its answer, and of the one
    that leads a step's plan to the others: `COUNTS` with 2 layers, in processes of one device, all
    in one, and with two instances, which get a message each. Step-3 on 4 hosts: what ffn launches;
    without those the process that leads has 3 hosts and 7 neighbours to send to."""
    step3 = read_json(COMMITTED, estimate.Counts)
    idle = {
        name: msgspec.structs.replace(one, instructions=0, arguments=0)
        if name.startswith("ffn")
        else one
        for name, one in step3.programs.items()
    }
    two = msgspec.structs.replace(COUNTS, instances=2)
    leading = msgspec.structs.replace(step3, programs=idle)
    fours, eights = (
        msgspec.structs.replace(each, process_devices=devices)
        for each, devices in ((COUNTS, 4), (step3, 8))
    )
    cases = [COUNTS, fours, two, step3, eights, leading]
    found = [estimate.host_parts(case) for case in cases]
    in_microseconds = [{key: round(1e6 * value, 2) for key, value in one.items()} for one in found]
    golden.check("planner/host_parts.json", in_microseconds)
    assert estimate.bounds(two).network == pytest.approx(2 * estimate.bounds(COUNTS).network)
    assert assumed("host.hosts_each") == HOSTS_EACH == stages.HOSTS_EACH


@pytest.mark.parametrize(
    ("name", "seconds"),
    [
        ("all-gather", 10e-6 + 160e6 * 15 / 16 / 8 / 50e9),
        ("all-gather over ep tp", 10e-6 + 160e6 * 15 / 16 / 8 / 50e9),
        ("all-to-all over tp", 10e-6 + 160e6 * 7 / 8 / 450e9),
        ("all-to-all over ep", 10e-6 + 160e6 / 2 / 50e9),
        ("all-to-all over 8 neighbours", 10e-6 + 160e6 * 7 / 8 / 450e9),
        ("all-to-all over 16 neighbours", 10e-6 + 160e6 / 2 / 50e9),
        ("all-to-all over 6 neighbours", 10e-6 + 160e6 * 5 / 6 / 50e9),
    ],
)
def test_where_a_collective_goes(name, seconds):
    """Two hosts of 8: all devices, those of a host, and one on each, over a NIC of its own."""
    one = program(0, 0, layers=1, exchanged={name: 160_000_000})
    assert estimate.program_seconds(one, 2, 8) == (0.0, pytest.approx(seconds))


def beside(name, size, **counts):
    each = estimate.Beside(collective=name, size=size, **counts)
    exchanging = counts["exchanging"]
    one = program(
        counts["instructions"],
        counts["bytes"] + exchanging,
        layers=1,
        exchanging=exchanging,
        exchanged={name: size},
        beside=[each],
    )
    return sum(estimate.program_seconds(one, 2, 8)), estimate.hidden_seconds(one, 2, 8)


def test_kernels_beside_a_collective():
    """Two hosts of 8. A gather of 64 MB takes 160 µs, its own 86 MB of memory 20; kernels have 108
    of 132 multiprocessors and take 2 launches of 1.7 µs and 43 MB, 10 µs."""
    gather = 10e-6 + 64e6 * 15 / 16 / 8 / 50e9
    sizes = {"instructions": 2, "bytes": 43_000_000, "exchanging": 86_000_000}
    alone, hidden = beside("all-gather over ep tp", 64_000_000, **sizes)
    assert alone == pytest.approx(gather + 13.4e-6)
    assert hidden == pytest.approx(13.4e-6)
    # Of 1,290 MB, 300 µs, the gather is hidden, but for what it takes of units and memory.
    alone, hidden = beside("all-gather over ep tp", 64_000_000, **sizes | {"bytes": 1_290_000_000})
    assert alone - hidden == pytest.approx(3.4e-6 + 300e-6 * 132 / 108 + 20e-6)
    assert 0 < hidden < gather


def test_what_is_beside_is_in_the_stage():
    window = estimate.Beside("all-gather over tp", size=0, exchanging=0, instructions=2, bytes=4300)
    counts = counts_with(beside=[window])
    found = estimate.stages(counts)["ffn_moe"].seconds
    assert found == pytest.approx(164e-6 - 2 * 1.7e-6 - 1e-9)
    assert estimate.bounds(estimate.every_byte(counts)) == estimate.bounds(COUNTS)


def test_the_shared_experts_kernels_are_beside_the_last_collectives():
    """Three take 10 µs each, and beside each is a launch; gate and up take 12 µs beyond 1 of bytes,
    down 3 beyond 1."""
    window = estimate.Beside(
        collective="all-gather over tp", size=0, exchanging=0, instructions=1, bytes=4_300_000
    )
    names = ("all-gather over tp", "2. all-gather over tp", "3. x over tp")
    counts = counts_with(exchanged=dict.fromkeys(names, 0), beside=[window] * 3)
    kernels = COUNTS.kernels | {"shared gate and up": 12e-6, "shared down": 3e-6}
    counts = msgspec.structs.replace(counts, kernels=kernels)
    # The first and the last hide what is beside them, the second is hidden.
    gate_and_up = 1.7e-6 + 13e-6 * 132 / 108
    windows = 10e-6 + gate_and_up + 10e-6
    expected = 34e-6 - 3 * 1.7e-6 + 100e-6 - 3e-6 + 20e-6 + windows
    assert estimate.stages(counts)["ffn_moe"].seconds == pytest.approx(expected)
    # With nothing hidden all of it is charged.
    alone = estimate.stages(estimate.every_byte(counts))["ffn_moe"].seconds
    assert alone == pytest.approx(34e-6 + 100e-6 + 20e-6 + 15e-6 + 30e-6)


def test_committed_counts(tmp_path, capsys):
    """They are read, shown as what they are, and taken for a calibration."""
    written = tmp_path / "stages.json"
    assert main(["estimate", "--write", str(written)]) == 0
    assert capsys.readouterr().out.startswith("ESTIMATE of step3 on h200:4x8 at 4096")
    found = read_measurements(written)
    assert {one.op for one in found} == {"attend", "ffn", "leave"}
    assert all(one.source == "estimate" for one in found)
    assert estimated(found) == "3 of 3 stages are ESTIMATES from compiled programs, not measured"
    assert len(calibration(found).fits) == 3
    counts = read_json(COMMITTED, estimate.Counts)
    assert (counts.tokens, sum(counts.devices.values())) == (2048, 32)
    assert counts.programs["attend_moe"].layers + counts.programs["attend_dense"].layers + 1 == 61


def test_counts_of_deployments(capsys):
    """Step-3's in full and a line for each of the others, or one deployment alone."""
    assert main(["estimate"]) == 0
    golden.check("planner/estimate.txt", capsys.readouterr().out)
    assert main(["estimate", "--config", "step3-alltoall"]) == 0
    first, second, third, *_ = capsys.readouterr().out.splitlines()
    assert first.startswith("ESTIMATE of step3-alltoall on h200:4x8 at 4096, read from")
    assert second.startswith("3490 tokens/s a GPU, 6144 sequences with a token every 55.0 ms")
    assert third == "range 2666 to 4683 tokens/s a GPU; between"


def shared_kernels(tokens, overrides=()):
    """Seconds beyond their bytes, of a deployment like the shipped one."""
    deployment = load_deployment(CONFIGS / "step3-alltoall.yaml", overrides)
    config = model_config(model_folder(deployment.model, CONFIGS))
    return estimate_command._shared_kernels(config, deployment, Bucket(tokens, 64))


def test_kernels_of_the_shared_expert():
    """Half of its width for 256 rows of a device was counted, and for 384. Of all of it, with one
    instance, nothing was; other rows are refused."""
    assert sum(shared_kernels(128).values()) == pytest.approx(17e-6, abs=1e-6)
    assert sum(shared_kernels(192).values()) == pytest.approx(25e-6, abs=1e-6)
    assert shared_kernels(128, ["ffn.instances=1"]) == {}
    with pytest.raises(ConfigError, match="no counts of 'step3_half_shared fp8_block_rows 128'"):
        shared_kernels(64)


def test_what_was_measured_replaces_estimates():
    guess = Measurement(
        device_kind="NVIDIA H200", op="attend", model="step3", batch=64, context=4096, format="fp8",
        seconds=1.0, source="estimate",
    )  # fmt: skip
    real = msgspec.structs.replace(guess, seconds=2e-4, source="measured")
    other = msgspec.structs.replace(guess, batch=32)
    assert joined([[real], [guess]]) == [real]
    assert joined([[guess], [real]]) == [real]
    (fit,) = calibration([guess, real, other]).fits.values()
    assert fit.points == 1
    assert estimated([real]) == ""


def test_a_file_that_is_none(tmp_path):
    path = tmp_path / "counts.json"
    with pytest.raises(ConfigError, match="No such file"):
        read_json(path, estimate.Counts)
    path.write_text("{}")
    with pytest.raises(ConfigError, match="missing required field"):
        read_json(path, estimate.Counts)


def test_measured_stages_take_the_place_of_counted_ones():
    """Attention's layer takes 1 ms here: 1,000 tokens in 2 ms on four devices."""
    own = next(one for one in estimate.measurements(COUNTS) if one.op == "attend")
    slow = msgspec.structs.replace(own, seconds=1e-3, source="measured", dp=1)
    stage, figure = estimate.measured_lines(COUNTS, [slow])
    assert stage.endswith("measured 1000.0 on NVIDIA H200")
    assert figure == "125000, bound by attention: the figure with measured stages"
    assert estimate.measured_lines(COUNTS, [own]) == []
