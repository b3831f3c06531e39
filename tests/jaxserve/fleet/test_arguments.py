import argparse
import os
import re
from typing import Any

import pytest

from jaxserve.errors import ConfigError
from jaxserve.fleet.arguments import ProcessArguments, add_arguments, from_arguments
from tests import golden

TOKEN = "a long s3cret here"
SECRET = {"JAXSERVE_CLUSTER_TOKEN": TOKEN}


def parse(*flags: str, **environment: str) -> ProcessArguments:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return from_arguments(parser.parse_args(flags), environment)


def second(coordinator: str, control: str, **more: Any) -> ProcessArguments:
    """The second of two processes."""
    where = {"coordinator": coordinator, "control_address": control}
    return ProcessArguments(process_id=1, processes=2, token=TOKEN, **where, **more)


def test_flags_come_before_the_environment() -> None:
    expected = second("a:1", "a:2")
    flags = "--process-id 1 --processes 2 --coordinator a:1 --control a:2"
    assert parse(*flags.split(), **SECRET, JAXSERVE_PROCESS_ID="7") == expected
    environment = {"PROCESS_ID": "1", "PROCESSES": "2", "COORDINATOR": "a:1", "CONTROL": "a:2"}
    found = parse(**SECRET, **{f"JAXSERVE_{name}": text for name, text in environment.items()})
    assert found == expected
    assert not expected.is_leader
    assert parse() == ProcessArguments(process_id=0, processes=1)
    assert parse().is_leader


def test_the_token_is_not_shown() -> None:
    arguments = ProcessArguments(processes=2, token="a long s3cret here")
    assert repr(arguments) == "ProcessArguments(processes=2, token='…')"


@golden.table("fleet/missing_options.yaml")
def test_what_is_missing_is_named(flags: str, environment: dict[str, str], expected: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(expected)):
        parse(*flags.split(), **environment)


def test_slurm_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    step = {"STEP_NODELIST": "node[007-008]", "STEP_NUM_NODES": "2", "NTASKS": "2"}
    for name, value in (step | {"JOB_ID": "4097", "PROCID": "1", "LOCALID": "0"}).items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    expected = second("node007:61441", "node007:61442", local_device_ids=(0,))
    assert parse("--distributed", **SECRET) == expected


POD = {
    "TPU_WORKER_ID": "1",
    "TPU_WORKER_HOSTNAMES": "serve-0-0.serve,serve-0-1.serve",
    "TPU_SKIP_MDS_QUERY": "true",
}


def test_a_pod_of_a_tpu_slice_is_detected() -> None:
    expected = second("serve-0-0.serve:9001", "serve-0-0.serve:9002")
    assert parse("--distributed", **SECRET, **POD) == expected
    found = parse(*["--distributed", "--coordinator", "a:7", "--process-id", "0"], **SECRET, **POD)
    assert (found.process_id, found.coordinator, found.control_address) == (0, "a:7", "a:8")
    newer = POD | {"TPU_PROCESS_ADDRESSES": "10.0.0.1:8471,10.0.0.2:8471,10.0.0.3:8471"}
    found = parse("--distributed", **SECRET, **newer)
    assert (found.processes, found.coordinator) == (3, "10.0.0.1:9001")


def test_a_pod_of_several_slices_is_detected() -> None:
    slices = {"MEGASCALE_SLICE_ID": "2", "MEGASCALE_NUM_SLICES": "3"}
    slices["MEGASCALE_COORDINATOR_ADDRESS"] = "serve-slice-0-0.serve:8080"
    found = parse("--distributed", **SECRET, **POD, **slices)
    assert (found.process_id, found.processes) == (5, 6)
    assert found.coordinator == "serve-slice-0-0.serve:9001"
    with pytest.raises(ConfigError, match="TPU_WORKER_ID 2 of 2 hosts, slice 2 of 3"):
        parse("--distributed", **SECRET, **POD | slices | {"TPU_WORKER_ID": "2"})
    with pytest.raises(ConfigError, match="MEGASCALE_SLICE_ID = 'two'"):
        parse("--distributed", **SECRET, **POD | slices | {"MEGASCALE_SLICE_ID": "two"})


def test_no_cluster_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith(("SLURM_", "OMPI_"))]:
        monkeypatch.delenv(name)
    with pytest.raises(ConfigError, match="--distributed: no cluster found"):
        parse("--distributed", **SECRET)


def test_a_process_of_a_slice_counts_within_it() -> None:
    flags = "--processes 6 --process-id 1 --slices 3 --coordinator a:1 --control a:2"
    assert parse(*flags.split(), **SECRET, JAXSERVE_SLICE="2").process_id == 5
    assert parse(*flags.split(), **SECRET).process_id == 1


@golden.table("fleet/wrong_slices.yaml")
def test_a_slice_that_is_not_there_is_refused(flags: str, expected: str) -> None:
    with pytest.raises(ConfigError, match=expected):
        parse(*flags.split(), **SECRET)
