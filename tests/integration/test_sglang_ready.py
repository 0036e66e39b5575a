"""sglang_ready on real processes, sockets, logs and dumps: each way to be ready, and each not to be."""

import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.harness import ROOT, run_module

CASES = ROOT / "tests" / "cases" / "sglang"
FIRED = "The server is fired up and ready to roll!"


def stamp(seconds=None):
    return time.strftime("[%Y-%m-%d %H:%M:%S]", time.localtime(seconds))


def free_port():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return taken.getsockname()[1]


class Bench:
    """A server that can be told how to behave, with its log, its dump directory and what it was asked."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.port = free_port()
        self.log = path / "server.log"
        self.dumps = path / "dumps"
        self.dumps.mkdir()
        (path / "sglang").mkdir()
        run = f"import runpy\nrunpy.run_path({str(ROOT / 'tests/ready_server.py')!r}, run_name='__main__')\n"
        (path / "sglang" / "launch_server.py").write_text(run)  # so that its command line is a server's
        self.children = []
        self.behave()

    def behave(self, **how):
        (self.path / "new.json").write_text(json.dumps(how))
        (self.path / "new.json").rename(self.path / "behaviour.json")

    def start(self, *flags, until="listening"):
        command = [sys.executable, "-m", "sglang.launch_server", str(self.path), "--port", str(self.port), *flags]
        env = {**os.environ, "PYTHONPATH": f"{self.path}:{ROOT / 'collections'}:{ROOT}"}
        server = self.child(command, env=env)
        assert server.stdout.readline().strip() == until
        return server

    def child(self, command, **more):
        child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, **more)
        self.children.append(child)
        return child

    def write(self, *lines):
        with self.log.open("a") as handle:
            handle.writelines(f"{line}\n" for line in lines)

    def fire_up(self):
        self.write(f"{stamp()} server_args={{'tp_size': 1}}", f"{stamp()} Load weight end. elapsed=1", f"{stamp()} {FIRED}")

    def poll(self, server, check=False, **options):
        given = {"pid": server.pid, "port": self.port, "log": str(self.log), "state_dir": str(self.path / "state"), "probe": True}
        given.update(dump_dir=str(self.dumps), layers=[1, 2, 3], generation_seconds=10.0, dump_seconds=5.0)
        return run_module("sglang_ready", check=check, **{**given, **options})

    def asked(self):
        try:
            return [json.loads(line) for line in (self.path / "requests.jsonl").read_text().splitlines()]
        except FileNotFoundError:
            return []

    def paths(self):
        return [request[0] for request in self.asked()]


@pytest.fixture
def bench(tmp_path):
    made = Bench(tmp_path)
    yield made
    for child in made.children:
        child.kill()
        child.wait()
        child.stdin.close()
        child.stdout.close()


def codes(result):
    return [problem["code"] for problem in result["gate"]["problems"]]


def test_a_ready_server_is_proven_once_for_each_instance(bench):
    server = bench.start()
    bench.fire_up()
    first = bench.poll(server)
    assert (first["gate"]["verdict"], first["settled"], first["changed"]) == ("pass", True, False)
    assert bench.paths() == ["/health", "/generate", "/generate"]
    generation, dump = [request[1] for request in bench.asked() if request[0] == "/generate"]
    assert generation["sampling_params"]["max_new_tokens"] == 1
    assert not generation["rid"].startswith("relight-")
    assert dump["rid"].startswith("relight-probe-")
    evidence = first["gate"]["evidence"]
    assert evidence["probe_tokens"] == len(generation["input_ids"]) + len(dump["input_ids"])
    assert (evidence["stage"], evidence["instance"], evidence["port_held_by"]) == ("dump", "feed" * 8, "ours")
    assert [name for name in os.listdir(bench.dumps) if name != "server.json"] == []

    second = bench.poll(server)
    assert (second["gate"]["verdict"], second["settled"]) == ("pass", True)
    assert bench.paths()[3:] == ["/health"]
    totals = second["gate"]["evidence"]
    assert (totals["probe_tokens"], totals["probe_tokens_total"], totals["health_requests_total"]) == (0, evidence["probe_tokens"], 2)
    assert bench.poll(server, check=True)["gate"]["verdict"] == "pass"
    assert bench.poll(server, probe=False)["gate"]["verdict"] == "pass"
    assert bench.poll(server, reprobe=True)["gate"]["verdict"] == "pass"
    assert bench.paths().count("/generate") == 4


def test_another_process_must_prove_itself_again(bench):
    server = bench.start()
    bench.fire_up()
    bench.poll(server)
    server.kill()
    server.wait()
    bench.log.write_text("")
    other = bench.start()
    bench.fire_up()
    assert bench.poll(other)["gate"]["verdict"] == "pass"
    assert bench.paths().count("/generate") == 4


def test_check_mode_sends_no_probe_and_leaves_nothing(bench):
    server = bench.start()
    bench.fire_up()
    result = bench.poll(server, check=True)
    assert (codes(result), result["gate"]["verdict"], result["settled"]) == (["server-unproven"], "unknown", True)
    assert bench.paths() == ["/health"]
    assert not (bench.path / "state").exists()


def test_in_check_mode_a_server_that_is_not_there_is_of_the_plan(bench):
    result = run_module("sglang_ready", check=True, manager="none", port=bench.port)
    assert (codes(result), result["gate"]["verdict"], result["settled"]) == (["depends-on-planned-act"], "unknown", True)
    assert codes(run_module("sglang_ready", manager="none", port=bench.port)) == ["server-absent"]


def test_a_late_port_is_waited_for(bench):
    server = bench.start("--late", until="waiting")
    bench.write(f"{stamp()} server_args={{'tp_size': 1}}", f"{stamp()} Load weight begin.")
    with bench.log.open("a") as handle:
        handle.write("\rMulti-thread loading shards:  60% Completed | 3/5 [00:00]")
    first = bench.poll(server)
    assert (codes(first), first["settled"]) == (["server-starting"], False)
    assert first["progress"] == "loading weights 3/5"
    assert bench.paths() == []
    bench.write("", f"{stamp()} Load weight end. elapsed=1", f"{stamp()} {FIRED}")
    assert bench.poll(server)["settled"] is False
    server.stdin.write("\n")
    server.stdin.flush()
    server.stdout.readline()
    last = bench.poll(server)
    assert (last["gate"]["verdict"], last["settled"]) == ("pass", True)


def test_a_wedged_engine_under_a_good_health_is_caught(bench):
    server = bench.start()
    bench.fire_up()
    bench.behave(wedged=True)
    result = bench.poll(server, generation_seconds=0.7)
    assert (codes(result), result["gate"]["verdict"], result["settled"]) == (["server-wedged"], "fail", True)
    assert bench.paths() == ["/health", "/generate", "/abort_request"]
    assert bench.asked()[1][1]["rid"] == bench.asked()[2][1]["rid"]


def test_a_busy_engine_is_not_called_wedged(bench):
    server = bench.start()
    bench.fire_up()
    bench.behave(wedged=True, batches=str(bench.log))
    result = bench.poll(server, generation_seconds=0.7)
    assert (codes(result), result["settled"]) == (["server-busy"], False)


def test_a_stall_fails_and_slowness_does_not(bench):
    server = bench.start()
    bench.behave(health=503)
    bench.write(f"{stamp()} server_args={{'tp_size': 1}}", f"{stamp()} Load weight begin.")
    assert codes(bench.poll(server, stall_seconds=0.5)) == ["server-starting"]
    time.sleep(0.6)  # the stall itself
    bench.write("Loading safetensors checkpoint shards:   3% Completed | 2/64 [00:01]")
    moved = bench.poll(server, stall_seconds=0.5)
    assert (codes(moved), moved["settled"]) == (["server-starting"], False)
    time.sleep(0.6)
    bench.write('INFO:     127.0.0.1:41118 - "GET /health HTTP/1.1" 503 Service Unavailable')  # our own knock is no progress
    stalled = bench.poll(server, stall_seconds=0.5)
    assert (codes(stalled), stalled["gate"]["verdict"], stalled["settled"]) == (["server-stalled"], "fail", True)
    assert "loading weights 2/64" in stalled["gate"]["problems"][0]["what"]


def test_a_dead_server_is_told_at_once_with_its_first_cause(bench):
    server = bench.start()
    now = stamp()
    recorded = (CASES / "0.5.17-h200-dies-in-warmup.log").read_text()
    bench.log.write_text("".join(now + line[21:] if line.startswith("[2026-") else line for line in recorded.splitlines(True)))
    server.kill()
    server.wait()
    result = bench.poll(server)
    assert (codes(result), result["gate"]["verdict"], result["settled"]) == (["server-fatal"], "fail", True)
    assert result["gate"]["problems"][0]["what"] == 'the server died of "NotImplementedError: stubbed call: flashinfer.norm.rmsnorm"'


def test_a_server_that_dies_without_a_word(bench):
    server = bench.start()
    bench.write(f"{stamp()} server_args={{'tp_size': 1}}", f"{stamp()} Load weight begin. avail mem=3 GB")
    server.kill()
    server.wait()
    result = bench.poll(server)
    assert codes(result) == ["server-dead"]
    assert "Load weight begin" in result["gate"]["problems"][0]["what"]


def test_our_own_refusal_is_quoted_while_the_process_still_falls(bench):
    server = bench.start()
    bench.write(f"{stamp()} server_args={{'tp_size': 1}}", "Relight refuses to start: chunked prefill is on")
    result = bench.poll(server)
    assert (codes(result), result["settled"]) == (["server-fatal"], True)
    assert "Relight refuses to start: chunked prefill is on" in result["gate"]["summary"]
    assert bench.paths() == []


def test_what_an_older_start_left_in_the_log_does_not_count(bench):
    old = time.time() - 3600
    bench.write(f"{stamp(old)} server_args={{'tp_size': 1}}", f"{stamp(old)} Load weight end.", f"{stamp(old)} {FIRED}")
    bench.behave(health=503)
    server = bench.start()
    result = bench.poll(server)
    assert (codes(result), result["settled"]) == (["server-starting"], False)
    evidence = result["gate"]["evidence"]
    assert (evidence["log_says"], evidence["stage_seconds"], evidence["ranks_loaded"]) == ("unknown", {}, 0)


def test_a_silent_log_leaves_the_proof_to_the_probes(bench):
    server = bench.start()
    bench.write("a line that tells of no stage")
    assert bench.poll(server)["gate"]["verdict"] == "pass"


def test_health_before_the_warm_up_ended_is_not_believed(bench):
    server = bench.start()
    bench.write(f"{stamp()} server_args={{'tp_size': 1}}", f"{stamp()} INFO:     Uvicorn running on http://127.0.0.1:1")
    result = bench.poll(server)
    assert (codes(result), result["progress"], result["settled"]) == (["server-starting"], "warming up", False)
    assert bench.paths() == ["/health"]


def test_the_port_of_somebody_else(bench):
    other = bench.start()
    ours = bench.child([sys.executable, "-c", "input()"])
    result = bench.poll(ours)
    assert (codes(result), result["gate"]["verdict"], result["settled"]) == (["port-taken"], "fail", True)
    assert f"pid {other.pid} (" in result["gate"]["problems"][0]["what"]
    assert bench.paths() == []


def test_a_shell_around_a_dead_server_is_no_server(bench):
    wrapper = bench.child(["bash", "-c", ": python -m sglang.launch_server --port 1; echo up; read line; true"])
    wrapper.stdout.readline()
    result = bench.poll(wrapper)
    assert (codes(result), result["settled"]) == (["server-starting"], False)
    assert result["progress"] == "no server process yet"


@pytest.mark.parametrize(
    ("behaviour", "code", "words"),
    [
        ({"dump": "none"}, "dump-missing", "no dump of a marked request came within 0.3 s"),
        ({"dump": "none", "announce": False}, "dump-missing", "no dump plugin of this server announced itself"),
        ({"dump": "error"}, "dump-refused", "no room in the dump directory"),
        ({"dump": "short"}, "dump-wrong", "tokens is '4', not '5'"),
        ({"dump": "torn"}, "dump-wrong", "the dump is torn: it is 3 bytes short"),
        ({"layers": [2, 3, 4]}, "dump-wrong", "layers are '[2, 3, 4]', not [1, 2, 3]"),
        ({"generate": 500}, "generation-failed", "/generate answers 500"),
    ],
)
def test_each_way_to_fail_the_probes(bench, behaviour, code, words):
    bench.behave(**behaviour)
    server = bench.start()
    bench.fire_up()
    result = bench.poll(server, dump_seconds=0.3)
    assert (codes(result), result["gate"]["verdict"], result["settled"]) == ([code], "fail", True)
    assert words in result["gate"]["problems"][0]["what"]
    assert [name for name in os.listdir(bench.dumps) if name.startswith("relight-")] == []
    bench.behave()
    before = bench.paths().count("/generate")
    assert bench.poll(server)["gate"]["verdict"] == "pass"
    assert bench.paths().count("/generate") == before + 2  # nothing of the failure was remembered as proof


def test_a_missing_log_leaves_the_proof_to_the_probes(bench):
    server = bench.start()
    result = bench.poll(server, log=str(bench.path / "none.log"))
    assert result["gate"]["verdict"] == "pass"
    assert "No such file" in result["gate"]["evidence"]["log_says"]


def test_a_service_manager_that_does_not_answer_is_unknown(bench):
    result = run_module("sglang_ready", manager="supervisord", supervisor_socket=str(bench.path / "none.sock"), port=bench.port)
    assert (codes(result), result["gate"]["verdict"], result["settled"]) == (["manager-unreachable"], "unknown", True)
