# Copyright: the Relight authors
# SPDX-License-Identifier: Apache-2.0
"""`make demo`: a real extraction dies in a real disaster on this machine and comes back, with proof.

    python -m demo [--keep] [--fresh-reference] [--thorough]

A real SGLang server on CPUs, a real small model and real text; see README.md for what a GPU host changes. Everything is made
under build/demo and nothing outside of it is touched. Exit 0 only if every claim of the proof holds.

RELIGHT_DEMO_PORT and RELIGHT_DEMO_RECORDS change the server's port and the number of records (168).
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import json
import os
import re
import secrets
import shlex
import shutil
import socket
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from demo import host, proof, show

CHECKOUT = host.CHECKOUT
BUILD = CHECKOUT / "build" / "demo"
HOST = host.ROOT
REPORT = BUILD / "report"
LOGS = BUILD / "log"
DRILL = BUILD / "drill.json"
MODEL = BUILD / "model"
DATASET = BUILD / "dataset.json"
SERVER_LOG = HOST / "log" / "relight-sglang.log"
STATE = HOST / "var" / "relight"
PROGRESS = STATE / "progress.json"
SGLANG_PYTHON = CHECKOUT / ".venv" / "sglang" / "bin" / "python"
FORGOTTEN = "embedder"
STEPS = 12
# The disaster comes when this part of the samples is there.
HALF = 0.45


class DemoError(Exception):
    """Something did not hold. The message says what, and where to read on."""


@dataclass
class Demo:
    """One run of the demo."""

    steps: show.Steps
    secret: str = field(default_factory=lambda: f"sk-canary-{secrets.token_hex(12)}")
    thorough: bool = False
    runs: int = 0

    def run(self, command: Sequence[str | Path], name: str, *, expect: int | None = 0, **environment: str) -> show.Run:
        """Run a command to its end. Its exit code must be `expect` (None: anything but 0). Raises DemoError."""
        self.runs += 1
        log = LOGS / f"{self.runs:02}-{name}.log"
        started = time.time()
        running = show.Run([str(word) for word in command], log, {**environment_of_tools(), **environment}, CHECKOUT)

        def status(task: str) -> str:
            # Ansible names a task when its first host is done with it; the journal names a step when it begins.
            step = show.journal_line(STATE / "journal.jsonl", started)
            more = show.server_line(SERVER_LOG) if step.startswith("ready") else show.progress_line(PROGRESS, started)
            return " | ".join(word for word in (step or task, more) if word)

        try:
            code = running.finish(self.steps, status)
        except BaseException:
            running.process.terminate()
            running.process.wait(timeout=30)
            raise
        if code != expect and not (expect is None and code):
            raise DemoError(f"{name} ended with exit code {code}. The end of {log}:\n{running.tail()}")
        return running

    def play(self, playbook: str, name: str, *, expect: int | None = 0, arguments: Sequence[str] = (), **environment: str) -> show.Run:
        """Run a playbook on the embedded host."""
        return self.run(["ansible-playbook", "-i", "inventory/demo", playbook, *arguments], name, expect=expect, **environment)

    def wait_for_half(self) -> None:
        """Wait until the extraction is about half done. Raises DemoError when it is past that or dead."""
        while True:
            told = json.loads(PROGRESS.read_text())
            if told["phase"] in ("failed", "stopped", "done"):
                raise DemoError(f"the extraction is {told['phase']} before the disaster could come: {told.get('error')}")
            if told["done"] >= HALF * told["total"]:
                self.steps.say(f"{told['done']} of {told['total']} samples are there, {told['tokens_per_s']:.0f} tokens/s")
                return
            self.steps.wait(show.progress_line(PROGRESS))
            time.sleep(0.5)  # progress.json is replaced once a second


def environment_of_tools() -> dict[str, str]:
    """The caller's environment with our virtual environment first and plain output."""
    own = {
        "PATH": f"{CHECKOUT / '.venv' / 'bin'}:{os.environ.get('PATH', os.defpath)}",
        "PYTHONPATH": f"{CHECKOUT / 'collections'}:{CHECKOUT}",
        "PYTHONUNBUFFERED": "1",
        "ANSIBLE_NOCOLOR": "1",
        "ANSIBLE_FORCE_COLOR": "0",
        "ANSIBLE_LOCALHOST_WARNING": "0",
    }
    return {**os.environ, **own}


@contextmanager
def only_one() -> Iterator[None]:
    """Two demos would share one host."""
    BUILD.mkdir(parents=True, exist_ok=True)
    with open(BUILD / "lock", "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise DemoError(f"another demo runs in {BUILD}: wait for it, or end it") from None
        yield


def server_port() -> int:
    """The port of the inventory."""
    return int(os.environ.get("RELIGHT_DEMO_PORT") or re.findall(r"RELIGHT_DEMO_PORT', default='(\d+)'", _inventory().read_text())[0])


def _inventory() -> Path:
    return CHECKOUT / "inventory" / "demo" / "group_vars" / "relight" / "main.yml"


def check_port() -> None:
    """The server's port must be free before the demo's own disaster takes it. Raises DemoError."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", server_port()))
        except OSError as error:
            raise DemoError(f"port {server_port()}: {error.strerror}; set RELIGHT_DEMO_PORT to a free one") from None


def reference_key() -> str:
    """What the undisturbed run's samples depend on: data, model, how they are served, and the code that makes them."""
    files = [DATASET, MODEL / "relight-model.json", _inventory(), CHECKOUT / "demo" / "requirements-sglang.txt"]
    files += [*sorted((CHECKOUT / "relight" / "dump").glob("*.py")), CHECKOUT / "plugins" / "module_utils" / "ckpt.py"]
    digest = hashlib.blake2b(digest_size=8)
    for path in files:
        digest.update(hashlib.blake2b(path.read_bytes()).digest())
    return digest.hexdigest()


def recap(output: str) -> dict[str, int]:
    """The counts of the embedded host in a play's recap."""
    line = re.findall(r"^embedded +: (.*)$", output, re.MULTILINE)[-1]
    return {name: int(count) for name, count in re.findall(r"(\w+)=(\d+)", line)}


def report() -> dict[str, Any]:
    """The last run's report."""
    value: dict[str, Any] = json.loads((REPORT / "report.json").read_text())
    return value


def allowed() -> tuple[str, ...]:
    """The verdicts that are an all-clear: with warnings only on a machine that does not let the host be one of its own."""
    return ("clear",) if host.status(HOST).sees_only_itself else ("clear", "clear-with-warnings")


def log_bytes() -> int:
    """How long the server's log is now."""
    return SERVER_LOG.stat().st_size if SERVER_LOG.exists() else 0


def undisturbed(demo: Demo) -> Path:
    """The store of a run that never met a disaster: from the cache, or made now by the same server. Raises DemoError."""
    folder = BUILD / "reference" / reference_key()
    store_dir = folder / "hidden_states"
    if (folder / "whole").exists():
        demo.steps.say(f"there already, made by an earlier demo of the same data, model and code: {folder.relative_to(CHECKOUT)}")
        return store_dir
    shutil.rmtree(folder.parent, ignore_errors=True)
    folder.mkdir(parents=True)
    variables = {"relight_store_dir": str(store_dir), "relight_wait": "finished", "relight_report_dir": str(folder / "report")}
    demo.play("recover.yml", "reference", arguments=["-e", json.dumps(variables)])
    verdict = json.loads((folder / "report" / "report.json").read_text())["verdict"]
    if verdict not in ("clear", "clear-with-warnings"):
        raise DemoError(f"the run without a disaster is {verdict}: see {folder / 'report'}")
    (folder / "whole").touch()
    return store_dir


def prepare(demo: Demo) -> int:
    """Model, data, wheels and the host itself. Returns the number of records."""
    demo.steps.step("Model: SmolLM2-135M-Instruct, de-quantized into five shards")
    demo.run([SGLANG_PYTHON, "demo/model.py", MODEL], "model")
    demo.steps.step("Training data: chats in the words of CPython's documentation")
    records = os.environ.get("RELIGHT_DEMO_RECORDS", "168")
    made = json.loads(demo.run([SGLANG_PYTHON, "demo/dataset.py", MODEL, DATASET, "--records", records], "dataset").tail(1))
    words = "{records} records, {tokens} tokens, {shortest} to {longest} each"
    demo.steps.say(words.format(**made))
    demo.steps.step("Wheels for a host that reaches no registry")
    demo.run([sys.executable, "-m", "relight", "wheelhouse", BUILD / "wheelhouse"], "wheelhouse")
    demo.steps.step("The embedded host: a machine in a folder")
    host.stop(HOST)
    shutil.rmtree(HOST, ignore_errors=True)
    shutil.rmtree(REPORT, ignore_errors=True)
    DRILL.unlink(missing_ok=True)
    check_port()
    seen = host.start(HOST)
    if seen.mode == "plain":
        raise DemoError("this machine allows neither user namespaces nor, without root, mounts: the data volume cannot be filled here")
    demo.steps.say(f"namespaces of its own: {seen.mode}; its service manager is process {seen.supervisord}")
    if not seen.sees_only_itself:
        demo.steps.say("it sees this machine's other processes and may not look into them: gates will warn of that")
    return int(made["records"])


def disaster(demo: Demo) -> dict[str, Any]:
    """Stage it by drill.yml and say what was broken."""
    demo.play("drill.yml", "drill", RELIGHT_DRILL_SECRET=demo.secret)
    drill: dict[str, Any] = json.loads(DRILL.read_text())
    in_flight = drill["fill"]["progress"]["in_flight"]
    if not in_flight:
        raise DemoError("no sample was being written when the volume filled: run the demo again")
    demo.steps.say(
        f"the data volume is full ({drill['fill']['bytes'] / 1e6:.0f} MB in drill.fill), records {in_flight} were being written\n"
        f"killed -9: server, client and service manager, {len(drill['killed'])} processes\n"
        f"half written: {', '.join(drill['torn'])}; bytes flipped: {', '.join(drill['flipped'])}\n"
        f"wiped: {', '.join(drill['wiped']['names'])}; stale segments: {len(drill['segments'])}\n"
        f"back with the boot: vllm on the server's port, and {FORGOTTEN}, which nobody remembers"
    )
    return drill


def stopped_recovery(demo: Demo, drill: dict[str, Any]) -> str:
    """The first recovery must change nothing and name both consents. Returns the line to paste."""
    done = demo.play("recover.yml", "recover-stops", expect=None)
    told = report()
    wanted = {f"disable:unit:{FORGOTTEN}", f"remove:{drill['fill']['file']}"}
    if told["verdict"] != "not-clear" or set(told["consents_needed"]) != wanted:
        raise DemoError(f"the first recovery says {told['verdict']} and asks for {told['consents_needed']}, not for {sorted(wanted)}")
    if recap(done.tail())["changed"]:
        raise DemoError(f"the first recovery changed something before it had consent: {done.log}")
    demo.steps.say(f"stopped, nothing changed, verdict not-clear. It says to paste:\n  {told['paste']}")
    return str(told["paste"])


def digest_of_host() -> dict[str, str]:
    """Each file of the host with its digest, the service manager's processes, and what shared memory holds.

    Left out is what observes: state directory, logs, and the caches of Python.
    """
    found = {}
    inside = Path(f"/proc/{host.status(HOST).anchor}/root")
    for top in (inside / HOST.relative_to("/"), inside / "dev/shm"):
        for path in sorted(top.rglob("*")):
            name = path.relative_to(inside)
            observed = any(name.is_relative_to(folder.relative_to("/")) for folder in (STATE, HOST / "log"))
            if not observed and "__pycache__" not in name.parts and path.is_file() and not path.is_symlink():
                found[str(name)] = hashlib.blake2b(path.read_bytes(), digest_size=16).hexdigest()
    found["processes"] = str(host.status(HOST).processes)
    return found


def rehearse(demo: Demo, paste: str) -> list[str]:
    """The same with --check: it must change nothing, and list what the real run then does. Returns the planned actions."""
    before = digest_of_host()
    demo.run([*shlex.split(paste), "--check"], "recover-check")
    after = digest_of_host()
    changed = sorted(name for name in before.keys() | after.keys() if before.get(name) != after.get(name))
    if changed:
        raise DemoError(f"a run with --check changed {', '.join(changed[:10])}")
    told = json.loads((REPORT / "check" / "report.json").read_text())
    actions: list[str] = next(iter(told["hosts"].values()))["actions"]
    demo.steps.say(f"--check changes nothing and plans {len(actions)} actions")
    return actions


def prove(demo: Demo, reference: Path, records: int, drill: dict[str, Any], marks: dict[str, int]) -> None:
    """Every claim of the all-clear, by means that are not Relight's own. Raises DemoError."""
    faults = []
    inside = Path(f"/proc/{host.status(HOST).anchor}/root{HOST}/data/hidden_states")
    compared = proof.compare(inside, reference, records)
    demo.steps.say(
        f"samples equal to those of the undisturbed run: {len(compared.errors)} of {records}, largest relative error {compared.worst:.1e}"
        f" (1e-4 allowed)"
    )
    faults += compared.faults
    if len(compared.tokens) == records:
        seen = proof.requests(SERVER_LOG, marks["begin"])
        clients = proof.client_pids(STATE / "journal.jsonl")
        result = proof.account(seen, clients, compared.tokens, drill, proof.quarantined(inside))
        demo.steps.say(proof.table(result))
        faults += result.faults
        (BUILD / "proof.json").write_text(json.dumps({**vars(result), "largest_relative_error": compared.worst}, indent=1))
    second = proof.requests(SERVER_LOG, marks["second"])
    extracted = [rid for rid in (*(rid for rid, _ in second.finished), *second.dropped) if proof.OURS.fullmatch(rid)]
    demo.steps.say(f"requests of the second recovery: {len(second.finished)}, all of them probes" if not extracted else f"{extracted}")
    if extracted:
        faults.append(f"the second recovery extracted {extracted}")
    placed = [Path(drill[f"rogue_{FORGOTTEN}"]["conf"])]
    placed += [path for path in placed[0].parent.glob(f"{FORGOTTEN}.conf*") if path.exists()]
    leaked = proof.files_with(demo.secret, [HOST / "var", HOST / "log", HOST / "etc", REPORT, LOGS, inside], placed)
    demo.steps.say(f"files that hold the canary secret of {FORGOTTEN}: {len(leaked)}")
    faults += [f"the canary secret is in {path}" for path in leaked]
    verdict = report()["verdict"]
    if verdict not in allowed():
        faults.append(f"the report's verdict is {verdict}")
    if faults:
        raise DemoError("the proof fails:\n" + "\n".join(faults))


def story(demo: Demo) -> None:
    """From nothing to the all-clear. Raises DemoError, host.HostError."""
    steps = demo.steps
    records = prepare(demo)
    steps.step("A run that never meets a disaster, for comparison: recover.yml from nothing, to the end")
    reference = undisturbed(demo)
    marks = {"begin": log_bytes()}
    steps.step("The run: recover.yml on the healthy host, until the first samples are there")
    demo.play("recover.yml", "first-extraction", arguments=["-e", "relight_wait=first_samples"])
    steps.step("Extraction, to about half")
    demo.wait_for_half()
    steps.step("DISASTER: volume full, power cut, torn and corrupt samples, scripts gone, wrong services back")
    drill = disaster(demo)
    steps.step("Recovery, first: ansible-playbook recover.yml")
    paste = stopped_recovery(demo, drill)
    planned = rehearse(demo, paste) if demo.thorough else None
    steps.step("Recovery, with exactly that consent, to the end of the extraction")
    demo.run(shlex.split(paste), "recover")
    told = report()
    done = next(iter(told["hosts"].values()))["actions"]
    if planned is not None and planned != done:
        raise DemoError("--check planned other actions than were taken:\n" + "\n".join(["planned:", *planned, "taken:", *done]))
    samples = next(iter(told["hosts"].values()))["samples"]
    steps.say(f"verdict {told['verdict']}; samples: {json.dumps(samples)}")
    steps.step("Recovery once more: it must find nothing to do")
    marks["second"] = log_bytes()
    shutil.copytree(REPORT, BUILD / "report-of-recovery", dirs_exist_ok=True)
    again = demo.play("recover.yml", "recover-again")
    counts = recap(again.tail())
    steps.say(f"changed={counts['changed']}, failed={counts['failed']}, verdict {report()['verdict']}")
    if counts["changed"] or counts["failed"] or report()["verdict"] not in allowed():
        raise DemoError(f"the second recovery found something to do: {again.log}")
    shutil.rmtree(REPORT)  # the report that is kept is that of the recovery, with what was found before and after
    shutil.move(BUILD / "report-of-recovery", REPORT)
    steps.step("The proof")
    prove(demo, reference, records, drill, marks)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m demo", description="A real extraction, a real disaster, a proven recovery.")
    parser.add_argument("--keep", action="store_true", help="leave the embedded host running; `python -m demo.host stop` ends it")
    parser.add_argument("--fresh-reference", action="store_true", help="make the undisturbed run anew instead of taking it from the cache")
    parser.add_argument("--thorough", action="store_true", help="also rehearse the recovery with --check, and compare plan and deed")
    wanted = parser.parse_args()
    demo = Demo(show.Steps(STEPS), thorough=wanted.thorough)
    try:
        with only_one():
            if wanted.fresh_reference:
                shutil.rmtree(BUILD / "reference", ignore_errors=True)
            shutil.rmtree(LOGS, ignore_errors=True)
            try:
                story(demo)
            finally:
                if not wanted.keep:
                    demo.steps.wait("the embedded host is being stopped")
                    host.stop(HOST)
    except (DemoError, host.HostError) as error:
        demo.steps.say(f"\nTHE DEMO FAILED: {error}\n\nLogs: {LOGS}   Report: {REPORT}")
        return 1
    except KeyboardInterrupt:
        demo.steps.say("\nended by Ctrl-C; the embedded host is stopped")
        return 130
    took = show.clock(time.monotonic() - demo.steps.begun)
    demo.steps.say(f"\nALL CLEAR, and proven, after {took}.\nThe report: {REPORT / 'report.html'}")
    if wanted.keep:
        demo.steps.say("The host is kept. To type at it: source .venv/bin/activate. To end it: python -m demo.host stop")
    return 0


if __name__ == "__main__":
    sys.exit(main())
