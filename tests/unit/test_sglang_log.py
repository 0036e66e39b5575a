"""What a server's log tells, on recorded logs of real servers and on lines of each kind of death."""

import time
from pathlib import Path

import pytest
from ansible_collections.relight.recovery.plugins.module_utils import readiness
from ansible_collections.relight.recovery.plugins.module_utils.readiness import Seen, Target, judge
from ansible_collections.relight.recovery.plugins.module_utils.sglang_log import Log, Position, feed, follow, from_plain

CASES = Path(__file__).resolve().parents[1] / "cases" / "sglang"
RMSNORM = "NotImplementedError: stubbed call: flashinfer.norm.rmsnorm"


def read(name, until=None):
    log = Log()
    for line in (CASES / name).read_text(errors="replace").split("\n"):
        if until and until in line:
            break
        log = feed(log, line)
    return log


def told(*lines, since=None):
    log = Log(since=since)
    for line in lines:
        log = feed(log, line)
    return log


def stamp(seconds):
    return time.strftime("[%Y-%m-%d %H:%M:%S]", time.localtime(seconds))


@pytest.mark.parametrize(
    ("name", "until", "says", "ranks", "cause"),
    [
        ("0.5.23-cpu-tp1-ready-then-sigterm.log", "SIGTERM", "ready", 1, None),
        ("0.5.23-cpu-tp1-ready-then-sigterm.log", None, "stopped", 1, None),
        ("0.5.23-cpu-tp2-ready.log", "SIGTERM", "ready", 2, None),
        ("0.5.23-cpu-tp2-ready.log", None, "stopped", 2, None),
        ("0.5.17-h200-ready.log", None, "ready", 1, None),
        ("0.5.17-h200-ready.log", "fired up", "starting", 1, None),
        ("0.5.17-h200-prefill-graphs-ready-then-sigterm.log", "SIGTERM", "ready", 1, None),
        ("0.5.17-h200-prefill-graphs-ready-then-sigterm.log", None, "stopped", 1, None),
        ("0.5.17-h200-dies-in-warmup.log", None, "fatal", 1, RMSNORM),
        ("sglang_extraction2.tail.log", None, "unknown", 0, None),
    ],
)
def test_recorded_logs(name, until, says, ranks, cause):
    log = read(name, until)
    assert (log.says(), len(log.loaded_ranks), log.cause) == (says, ranks, cause)


def test_stages_and_times_of_a_real_start():
    log = read("0.5.17-h200-ready.log")
    begin = log.times["args"]
    assert {name: at - begin for name, at in log.times.items()} == {
        "args": 0, "init": 25, "loading": 28, "loaded": 28, "kv": 28, "warmup": 29, "fired-up": 87,
    }  # fmt: skip
    assert log.batches > 0
    assert read("0.5.17-h200-dies-in-warmup.log").stage == "warmup"


def test_one_rank_of_two_is_still_loading():
    log = read("0.5.23-cpu-tp2-ready.log", "TP1] Load weight end")
    assert (log.loading, log.loaded_ranks, log.ranks, log.stage) == ((1, 1), ["TP0"], 2, "loading")


def test_the_story_is_unknown_and_not_settled():
    command = (CASES / "ps.txt").read_text().split(None, 10)
    serving = readiness.is_server(command[10].split()[0], command[10])
    judged = judge(Seen(alive=True, serving=serving, log=read("sglang_extraction2.tail.log")), Target())
    assert (serving, judged.settled, judged.gate.verdict.word) == (False, False, "unknown")
    assert [p.code for p in judged.gate.problems] == ["log-cut"]


@pytest.mark.parametrize(
    ("name", "until", "alive", "code", "settled"),
    [
        ("0.5.23-cpu-tp1-ready-then-sigterm.log", None, False, "server-stopped", True),
        ("0.5.23-cpu-tp2-ready.log", "SIGTERM", False, "server-dead", True),
        ("0.5.23-cpu-tp2-ready.log", "SIGTERM", True, "server-starting", False),
        ("0.5.17-h200-dies-in-warmup.log", None, False, "server-fatal", True),
        ("0.5.17-h200-dies-in-warmup.log", None, True, "server-fatal", True),
        ("0.5.17-h200-dies-in-warmup.log", "Traceback", True, "server-starting", False),
    ],
)
def test_recorded_logs_are_judged(name, until, alive, code, settled):
    judged = judge(Seen(alive=alive, serving=alive, log=read(name, until)), Target())
    assert ([p.code for p in judged.gate.problems], judged.settled) == ([code], settled)
    assert judged.gate.verdict.word != "pass"
    if code == "server-fatal":
        assert RMSNORM in judged.gate.problems[0].what


def test_a_ready_log_passes_once_all_was_proven():
    good = readiness.Answer(200)
    seen = Seen(alive=True, serving=True, holder="ours", log=read("0.5.17-h200-ready.log"), health=good)
    assert [p.code for p in judge(seen, Target()).gate.problems] == ["server-unproven"]
    done = readiness._with(seen, generation=good)
    assert judge(done, Target()).gate.verdict.word == "pass"
    assert judge(done, Target(dump_dir="/d")).gate.verdict.word != "pass"
    assert judge(readiness._with(done, dump=readiness.Dump()), Target(dump_dir="/d")).gate.verdict.word == "pass"


HEAD = "[2026-12-01 13:00:00] server_args=ServerArgs(model_path='m', tp_size=4, pp_size=2, dp_size=1, nnodes=2)"
TRACE = "Traceback (most recent call last):"
FIRED = "[2026-12-01 13:00:09] The server is fired up and ready to roll!"
CHAIN = "During handling of the above exception, another exception occurred:"
FRAME = '  File "x.py", line 1, in f'


@pytest.mark.parametrize(
    ("lines", "cause"),
    [
        (["[2026-12-01 13:00:01 TP0] Scheduler hit an exception: " + TRACE, FRAME, "ValueError: no", ""], "ValueError: no"),
        (["ERROR: [Errno 98] error while binding"], "ERROR: [Errno 98] error while binding"),
        (["Relight refuses to start: chunked prefill is on"], "Relight refuses to start: chunked prefill is on"),
        ([TRACE, FRAME, "SystemExit: Relight refuses to start: lora"], "Relight refuses to start: lora"),
        (
            ["x Scheduler hit an exception: " + TRACE, FRAME, "RuntimeError: Relight dump plugin 0.1.0 refuses to start: LoRA is on."],
            "Relight dump plugin 0.1.0 refuses to start: LoRA is on.",
        ),
        (["[2026-12-01 13:00:01 TP1] torch.OutOfMemoryError: CUDA out of memory."], "torch.OutOfMemoryError: CUDA out of memory."),
        (["NCCL error: unhandled system error"], "NCCL error: unhandled system error"),
        (["Child process died with exit code -7"], "Child process died with exit code -7"),
        (["CUDA error: an illegal memory access was encountered"], "CUDA error: an illegal memory access was encountered"),
        ([TRACE, FRAME, "safetensors_rust.SafetensorError: incomplete"], "safetensors_rust.SafetensorError: incomplete"),
        (["launch_server.py: error: unrecognized arguments: --x"], "launch_server.py: error: unrecognized arguments: --x"),
        (
            ["x Scheduler hit an exception: " + TRACE, FRAME, "OSError: no shard", "", CHAIN, "", TRACE, FRAME, "ValueError: y"],
            "OSError: no shard (then ValueError: y)",
        ),
        (["x hit an exception: " + TRACE, FRAME, "KeyError: 1", "NCCL error: after", "[Errno 98] after"], "KeyError: 1"),
        (["NCCL error: early", "x hit an exception: " + TRACE, FRAME, "KeyError: 'sure'"], "KeyError: 'sure'"),
    ],
)  # fmt: skip
def test_each_kind_of_death_is_quoted(lines, cause):
    log = told(HEAD, *lines, "[2026-12-01 13:00:02] SIGQUIT received. signum=None", "kill_process_tree called")
    assert (log.says(), log.cause) == ("fatal", cause)


@pytest.mark.parametrize(
    "line",
    [
        "[2026-12-01 13:00:01] Ignore import error when loading sglang.srt.models.grok: No module named 'cutlass'",
        "[rank0]:[W1201 13:26:16] ProcessGroupNCCL.cpp Warning: destroy_process_group() was not called, NCCL error may follow",
        "[2026-12-01 13:00:01] API disabled: init failed (ModuleNotFoundError: No module named 'openai_harmony')",
    ],
)
def test_noise_is_not_fatal(line):
    assert told(HEAD, line).says() == "starting"


def test_a_caught_exception_of_a_request_is_not_fatal():
    log = told(
        HEAD,
        "[2026-12-01 13:00:09] The server is fired up and ready to roll!",
        "ERROR: Exception in ASGI application",
        TRACE,
        FRAME,
        "KeyError: 1",
    )
    assert log.says() == "ready"
    assert log.cause == "KeyError: 1"  # quoted only where the process is gone


def test_what_falls_after_sigterm_is_no_cause():
    log = told(
        HEAD, "[2026-12-01 13:00:09] SIGTERM received. signum=None", TRACE, FRAME, "CancelledError", "NCCL error: gone", "SIGQUIT received."
    )
    assert (log.says(), log.causes) == ("stopped", [])


def test_a_start_that_was_refused_after_one_that_was_stopped():
    stopped = [HEAD, FIRED, "[2026-12-01 13:00:09] SIGTERM received. signum=None"]
    refused = told(
        *stopped, "Relight dump plugin 0.1.0 refuses to start: LoRA is on.", "Relight dump plugin 0.1.0 refuses to start: so is DP."
    )
    assert (refused.says(), refused.was_ready) == ("fatal", False)
    assert refused.cause == "Relight dump plugin 0.1.0 refuses to start: LoRA is on. Relight dump plugin 0.1.0 refuses to start: so is DP."
    wrong = told(*stopped, "usage: launch_server.py [-h]", "launch_server.py: error: unrecognized arguments: --x")
    assert (wrong.says(), wrong.cause) == ("fatal", "launch_server.py: error: unrecognized arguments: --x")
    missing = told(*stopped, TRACE, FRAME, "CancelledError")
    assert (missing.says(), missing.causes) == ("stopped", [])


def test_a_rank_that_writes_behind_the_bar_of_another_is_counted():
    bar = "\rMulti-thread loading shards:  60% Completed | 3/5 [00:01<00:00,  2.10it/s]"
    log = told(HEAD, *(f"{bar}[2026-12-01 13:00:05 TP{rank}] Load weight end. elapsed=1" for rank in range(4)))
    assert (log.loaded_ranks, log.loading, log.stage) == (["TP0", "TP1", "TP2", "TP3"], (3, 5), "loaded")


def test_ranks_of_this_host():
    assert told(HEAD).ranks == 4
    assert told("[2026-12-01 13:00:00] server_args={'tp_size': 8, 'dp_size': 8, 'enable_dp_attention': True}").ranks == 8
    assert told("[2026-12-01 13:00:00] server_args={'tp_size': 2, 'dp_size': 3}").ranks == 6


def test_an_older_start_in_the_same_log_is_passed_over():
    now = time.time()
    fired = "The server is fired up and ready to roll!"
    old = [f"{stamp(now - 500)} server_args=x", f"{stamp(now - 400)} {fired}", "NCCL error: of the old one"]
    assert told(*old, f"{stamp(now - 300)} kill_process_tree", since=now).times == {}
    assert told(*old, f"{stamp(now)} server_args={{'tp_size': 2}}").says() == "starting"
    assert told(*old[:2], since=now - 501).says() == "ready"


def test_secrets_are_not_kept(tmp_path):
    (tmp_path / "log").write_text(HEAD + "\nRelight refuses to start: --api-key sk-canary-0123456789 is set\n")
    log, _ = follow(str(tmp_path / "log"), Log(), Position())
    assert log.cause == "Relight refuses to start: --api-key [redacted] is set"
    assert "canary" not in str(log.plain())


def test_following_a_growing_torn_and_truncated_log(tmp_path):
    path = tmp_path / "log"
    path.write_text(HEAD + "\n[2026-12-01 13:00:01] Load weight begin. av")
    log, at = follow(str(path), Log(), Position())
    assert (log.stage, at.offset) == ("args", len(HEAD) + 1)
    with path.open("a") as handle:
        handle.write("ail mem\n" + "".join(f"\rLoading safetensors checkpoint shards:   2% Completed | {n}/64 [00:01]" for n in (1, 2)))
    log, at = follow(str(path), from_plain(log.plain()), at)
    assert (log.stage, log.loading, log.cut) == ("loading", (2, 64), False)
    path.write_text("[2026-12-01 13:00:05] Load weight end. elapsed\n")  # truncated under our feet: what was read still counts
    log, at = follow(str(path), from_plain(log.plain()), at)
    assert (log.stage, log.loaded_ranks) == ("loading", [""])
    assert at.offset == path.stat().st_size
