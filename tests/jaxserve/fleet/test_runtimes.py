"""Attention and ffn in runtimes that share nothing, as `launch.local --runtimes` starts them, and
several attention workers on one ffn worker: the tokens of one runtime, also where workers are
killed or stopped in the middle."""

import contextlib
import json
import os
import re
import signal
import time

import pytest

from jaxserve.launch.local.members import Member, runtime_of
from jaxserve.ports import free_port
from tests import golden
from tests.jaxserve import layouts
from tests.jaxserve import test_deepseek_v4 as v4
from tests.jaxserve.fleet.launched import REPOSITORY, Launched, started
from tests.jaxserve.test_fuzz import WRITERS

pytestmark = [pytest.mark.multihost, pytest.mark.unoptimised]

SECONDS = 240


def command_of(model, overrides, *options):
    """The command that starts runtimes of a model in processes of their own."""
    command = ["-m", "jaxserve.launch.local", "--runtimes", *options, "--model", str(model)]
    command += ["--module", "tests.jaxserve.fleet.runtime_process"]
    return command + [f"--set={key}={value}" for key, value in overrides.items()]


def check_rounds(run, reference, rounds):
    """Compares the tokens that every round printed."""
    for number in range(rounds):
        found = re.search(rf"^\[0\] round {number}: (.*)$", run.output, re.MULTILINE)
        assert found, run.output
        assert layouts.differences(reference, json.loads(found[1])) == []


def test_ffn_workers_are_killed_and_every_request_gets_its_tokens(tiny_model, reference, tmp_path):
    """Round 1 loses the worker in use, and the standby takes over; round 2 loses that one, too,
    and the first, which was started again, takes over. Both are lost while experts move. What is
    started again has its weights from the other one, whose experts move."""
    overrides = layouts.LIMITS | {"lanes": 3, "attention.dp": 3, "ffn.ep": 2}
    overrides |= {"ffn.redundant_slots": 1, "experts.move_gb_per_second": 1e-4}
    command = command_of(tiny_model, overrides, "--standbys", "1", "--peers")
    environment = {"JAX_PLATFORMS": "cpu", "ROUNDS": "3", "MOVES": "yes", "TOLD": str(tmp_path)}
    with started(command, environment) as run:
        (tmp_path / "0").touch()
        for victim in (1, 2):
            # The standby is ready: in round 2 that is the first worker, for the second time.
            again = r"(.*\[1\] ready)" if victim == 2 else ""
            run.wait_for(rf"(?s)\[{3 - victim}\] ready  role=ffn{again}", SECONDS)
            (tmp_path / str(victim)).touch()
            run.wait_for(rf"^\[0\] round {victim} begins", SECONDS)
            kill(run, victim)
        assert run.end(SECONDS) == 0, run.output
    check_rounds(run, reference, 3)
    moving = re.findall(r"^\[0\] moving (\d+)$", run.output, re.MULTILINE)
    assert len(moving) == 2, run.output
    assert min(map(int, moving)) > 2, run.output
    again = run.output.partition("ended with")[2]
    assert re.search(r"(?s)\[1\] \S+ \S+ .* weights: from weights .*\[1\] ready", again), again
    assert "from storage" not in again
    assert "come from elsewhere" not in again
    assert "[0] compilations 0" in run.output
    assert int(re.search(r"\[0\] resends (\d+)", run.output)[1]) >= 2, run.output


def kill(run, process):
    """Kills a process of an ffn worker in the middle of a round."""
    time.sleep(0.2)
    (pid,) = re.findall(rf"process {process}: role ffn, .*pid (\d+)", run.output)
    os.kill(int(pid), signal.SIGKILL)


@golden.table("fleet/missing_runtimes.yaml")
def test_what_is_missing_is_named(arguments, message):
    settings = ["attention.runtime=a", "ffn.runtime=f", "server.grpc_port=0", "server.http_port=-1"]
    settings += ["link.transport=pull", "link.addresses=['127.0.0.1:1']"]
    command = ["-m", "jaxserve.serve", "--model", "configs/demo", *arguments]
    command += [word for one in settings for word in ("--set", one)]
    run = Launched(command, {"JAX_PLATFORMS": "cpu"})
    assert run.end(SECONDS) == 2, run.output
    assert message in run.output


@golden.table("fleet/killed_processes.yaml")
def test_roles_of_several_processes_give_the_tokens_of_one(
    tiny_model, reference, tmp_path, layout, victim
):
    """A process of the ffn worker is killed in the middle of round 1."""
    command = command_of(tiny_model, layouts.LIMITS | {"lanes": 2} | layout)
    command += ["--set=cluster.step_seconds=120", "--set=link.absent_seconds=240"]
    environment = {"JAX_PLATFORMS": "cpu", "ROUNDS": "2", "TOLD": str(tmp_path)}
    with started(command, environment) as run:
        for number in range(2):
            (tmp_path / str(number)).touch()
        run.wait_for(r"^\[0\] round 1 begins", SECONDS)
        kill(run, victim)
        assert run.end(SECONDS) == 0, run.output
    check_rounds(run, reference, 2)
    assert "[0] compilations 0" in run.output
    assert int(re.search(r"\[0\] resends (\d+)", run.output)[1]) >= 1, run.output


@pytest.mark.nightly
@golden.table("fleet/shared_passes.yaml")
def test_attention_workers_that_share_passes_outlive_each_other_and_the_ffn_worker(
    batching, ranks, family, form, other, tiny_model, reference, tmp_path
):
    """Round 1 stops the last of three until the others have ended it, round 2 kills the ffn worker,
    and round 3 kills the last. Requests to the models of 2026, whose caches have 8 bits, share
    prefixes. The role `other` has the JAX in the folder that `JAXSERVE_OTHER_JAX` names."""
    if other and not os.environ.get("JAXSERVE_OTHER_JAX"):
        pytest.skip("JAXSERVE_OTHER_JAX names no folder with another version of JAX")
    model, limits, prompts, expected = tiny_model, layouts.LIMITS, layouts.PROMPTS, reference.tokens
    if family:
        model, prompts = WRITERS[family](tmp_path / "model"), 2 * v4.sharing()
        limits = v4.LIMITS | {"cache.format": form}
        with layouts.running(model, limits) as engine:
            expected = layouts.generate(engine, prompts)
    settings = limits | {"lanes": 2, "domains": 3, "ffn.ep": ranks, "ffn.runtime": "ffn"}
    settings |= {"link.transport": "pull", "link.batching": batching, "attention.runtime": "a"}
    settings |= {"link.absent_seconds": SECONDS, "mode": "afd"}
    settings["ffn.processes"] = processes = ranks if batching == "cohort" else 1
    settings["link.addresses"] = [f"127.0.0.1:{free_port()}" for _ in range(processes)]
    environment = {"JAX_PLATFORMS": "cpu", "ROUNDS": "4", "TOLD": str(tmp_path)}
    environment["JAXSERVE_CLUSTER_TOKEN"] = "a secret of 16 or more"
    environment["PROMPTS"] = json.dumps(prompts)

    with contextlib.ExitStack() as stack:

        def start(role, devices, count=1):
            command = ["-m", "tests.jaxserve.fleet.runtime_process", "--role", role]
            command += ["--model", str(model)]
            command += [f"--set={key}={value}" for key, value in settings.items()]
            own = environment | {"JAX_NUM_CPU_DEVICES": str(devices)}
            if role == other:
                own["PYTHONPATH"] = f"{os.environ['JAXSERVE_OTHER_JAX']}:{REPOSITORY}"
            made = [own | one.environment for one in runtime_of(count, Member("", [], 0))]
            return [stack.enter_context(started(command, one)) for one in made]

        ffn = start("ffn", ranks // processes, processes)
        workers = [*start("attention", 1), *start("attention", 1), *start("attention", 1)]
        for number in range(4):
            (tmp_path / str(number)).touch()
            for worker in workers:
                worker.wait_for(rf"^round {number} begins", SECONDS)
            if number == 1:
                workers[2].process.send_signal(signal.SIGSTOP)
            elif number == 2:
                for one in ffn:
                    one.process.kill()
                start("ffn", ranks // processes, processes)
            elif number == 3:
                workers.pop().process.kill()
            for place, worker in enumerate(workers):
                if (number, place) == (1, 2):
                    worker.process.send_signal(signal.SIGCONT)
                found = worker.wait_for(rf"^round {number}: (.*)$", SECONDS)
                assert json.loads(found[1]) == expected
        for worker in workers:
            assert worker.end(SECONDS) == 0, worker.output
            assert "compilations 0" in worker.output
            passes, messages = re.search(r"passes (\d+) of (\d+)", worker.output).groups()
            assert (int(passes) < int(messages)) == (batching != "rotation")
            assert "is down: the connection closed" in worker.output, worker.output
        said = "".join(one.output for one in (*ffn, *workers))
        assert len(set(re.findall(r"'jax': '(\S+)'", said))) == 1 + bool(other), said
