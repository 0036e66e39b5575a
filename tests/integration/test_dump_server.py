# Copyright: the Relight authors
# SPDX-License-Identifier: Apache-2.0
"""The dump plugin in a real SGLang server: equal to Hugging Face's states, only for marked requests, never in the way."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from ansible_collections.relight.recovery.plugins.module_utils.journal import boot_id
from ansible_collections.relight.recovery.plugins.module_utils.records import token_digest

from tests.integration import sglang_server
from tests.integration.sglang_server import PYTHON, RIGHT, Server, wait_for

pytestmark = [
    pytest.mark.sglang,
    pytest.mark.slow,
    pytest.mark.timeout(400),
    pytest.mark.skipif(not PYTHON.exists(), reason="no SGLang environment in .venv/sglang"),
]

LAYERS = (1, 14, 26)
MAX_ERROR = 1e-4
BUDGET = 64 << 20
TOKEN_BYTES = 4 * 576 * 4
NEW_TOKENS = re.compile(r"Prefill batch.*?#new-token: (\d+)")

# Four heads, which two ranks can share; random weights.
TINY = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_act": "silu",
    "hidden_size": 64,
    "intermediate_size": 128,
    "max_position_embeddings": 2048,
    "num_attention_heads": 4,
    "num_hidden_layers": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
    "vocab_size": 1024,
    "bos_token_id": 1,
    "eos_token_id": 2,
}

# Runs in the SGLang environment: the largest relative error (L2, of any token) of each part of each dump.
COMPARE = """
import json, sys, torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM
model_path, folder, layers = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32, local_files_only=True).eval()
worst = {}
for rid, ids in json.load(sys.stdin).items():
    with safe_open(f"{folder}/{rid}", "pt") as f:
        got = {k: f.get_tensor(k) for k in f.keys()}
    assert got["input_ids"].dtype is torch.int64 and got["input_ids"].tolist() == ids, rid
    with torch.no_grad():
        states = model(torch.tensor([ids]), output_hidden_states=True).hidden_states
    want = {"hidden_state": states[-1], "aux_hidden_state": torch.cat([states[k + 1] for k in layers], dim=-1)}
    size = states[-1].shape[-1]
    for name, tensor in want.items():
        assert got[name].shape == tensor.shape and got[name].dtype is torch.float32, (rid, name, got[name].shape)
        for a, b in zip(got[name].split(size, -1), tensor.split(size, -1)):
            errors = ((a - b).norm(dim=-1) / b.norm(dim=-1)).flatten().tolist()
            worst[rid] = max([worst.get(rid, 0.0), *(e if e == e else 1e9 for e in errors)])
print(json.dumps(worst))
"""

# Real English from every Python, in the model's own tokens. (Random ids do not do: on some pairs of them this model's first
# tokens carry so large an activation that float32 itself is 2e-4 away from float64, whoever computes it.)
TOKENIZE = """
import json, sys
from pydoc_data.topics import topics
from tokenizers import Tokenizer
tokenizer = Tokenizer.from_file(sys.argv[1] + "/tokenizer.json")
print(json.dumps(tokenizer.encode("".join(topics[name] for name in sorted(topics))[:40000]).ids))
"""


def child(code: str, *args: str, given: str = "") -> str:
    """What `code` prints last, run by the interpreter that serves."""
    done = subprocess.run(
        [str(PYTHON), "-c", code, *args],
        input=given,
        capture_output=True,
        text=True,
        timeout=200,
        env={k: v for k, v in os.environ.items() if k != "PYTHONPATH"},
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout.splitlines()[-1]


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    sglang_server.make_model()
    folder = tmp_path_factory.mktemp("server")
    dumps = folder / "dumps"  # the plugin makes it
    env = sglang_server.environment(
        sglang_server.entry_point(folder / "plugins"),
        RELIGHT_DUMP_DIR=str(dumps),
        RELIGHT_DUMP_LAYERS=",".join(map(str, LAYERS)),
        RELIGHT_DUMP_BUDGET_BYTES=str(BUDGET),
    )
    server = Server(folder / "log", env, *RIGHT)
    server.dumps = dumps
    try:
        server.wait_ready()
        yield server
    finally:
        server.stop()


def names(server) -> set[str]:
    return {name for name in os.listdir(server.dumps) if not name.startswith(".")}


def tokens_prefilled(server) -> int:
    return sum(int(n) for n in NEW_TOKENS.findall(server.text()))


def send(server, rid: str, ids: list[int], new_tokens: int = 0) -> tuple[int, str]:
    return server.post({"rid": rid, "input_ids": ids, "sampling_params": {"max_new_tokens": new_tokens, "temperature": 0}})


def metadata(path: Path) -> dict[str, str]:
    data = path.read_bytes()
    return json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])["__metadata__"]


def test_it_announces_itself(server):
    about = json.loads((server.dumps / "server.json").read_text())
    assert about["layers"] == list(LAYERS)
    assert (about["schema"], about["hidden_size"], about["dtype"], about["tp"]) == (1, 576, "float32", 1)
    assert about["boot_id"] == boot_id()
    assert about["model_path"] == str(sglang_server.MODEL)
    stat = Path(f"/proc/{about['pid']}/stat").read_text().rpartition(")")[2].split()
    assert int(stat[19]) == about["start_time"]
    line = f"instance {about['instance']}, layers [1, 14, 26] as layer outputs, directory {server.dumps}"
    assert server.text().count(line) == 1


def test_dumps_equal_hugging_face(server, capsys):
    rnd = random.Random(7)
    lengths = [1, 3, 17, 40, 64, 65, 97, 130, 180, 333]
    text = json.loads(child(TOKENIZE, str(sglang_server.MODEL)))

    def prompt(length: int) -> list[int]:
        begin = rnd.randrange(len(text) - length)
        return text[begin : begin + length]

    prompts = {f"relight-0000abcd-{i}-1": prompt(n) for i, n in enumerate(lengths)}
    others = {f"other-{i}": prompt(n) for i, n in enumerate(lengths[:6])}
    mixed = [*prompts.items(), *others.items()]
    rnd.shuffle(mixed)
    before, had = tokens_prefilled(server), names(server)
    with ThreadPoolExecutor(len(mixed)) as pool:
        answers = list(pool.map(lambda job: send(server, *job, new_tokens=rnd.choice((0, 1))), mixed))
    assert [status for status, _ in answers] == [200] * len(mixed), answers
    wait_for(lambda: names(server) - had >= set(prompts), 20, f"only {sorted(names(server))}")
    assert names(server) - had == set(prompts)

    errors = json.loads(child(COMPARE, str(sglang_server.MODEL), str(server.dumps), json.dumps(LAYERS), given=json.dumps(prompts)))
    with capsys.disabled():
        print(f"\nlargest relative error of {len(errors)} dumps against Hugging Face: {max(errors.values()):.2e}")
    assert set(errors) == set(prompts)
    assert max(errors.values()) <= MAX_ERROR

    about = json.loads((server.dumps / "server.json").read_text())
    for rid, ids in prompts.items():
        told = metadata(server.dumps / rid)
        assert told["token_digest"] == token_digest(ids)
        assert (told["format"], told["rid"], told["tokens"], told["norm"]) == ("relight-dump-1", rid, str(len(ids)), "post")
        assert (told["layers"], told["instance"], told["dtype"], told["tp"]) == ("[1, 14, 26]", about["instance"], "float32", "1")
        assert {"sglang", "plugin", "torch"} <= set(told)

    # The server's own count of what it prefilled, which the log keeps through a kill: to the token.
    sent = sum(len(ids) for _, ids in mixed)
    wait_for(lambda: tokens_prefilled(server) - before >= sent, 10, "the log lags")
    assert tokens_prefilled(server) - before == sent


def test_a_health_check_leaves_no_file_and_counts_one_token(server):
    had, before = names(server), tokens_prefilled(server)
    assert server.get("/health") == 200
    assert send(server, "HEALTH_CHECK_relight-x", [5, 6, 7])[0] == 200
    assert send(server, "relight-", [5, 6, 7])[0] == 200  # the mark without a name
    assert send(server, "relight-0000abcd-last-1", [5, 6, 7])[0] == 200  # comes after them through the same writers
    wait_for(lambda: "relight-0000abcd-last-1" in names(server), 20, "no dump")
    assert names(server) - had == {"relight-0000abcd-last-1"}
    wait_for(lambda: tokens_prefilled(server) - before >= 10, 10, "the log lags")
    assert tokens_prefilled(server) - before == 10


def test_a_dump_that_cannot_be_put_in_place_gets_its_error_file(server):
    rid = "relight-0000abcd-taken-1"
    (server.dumps / rid).mkdir()  # a directory in the place of the file: the rename fails
    assert send(server, rid, [5, 6, 7])[0] == 200
    error = server.dumps / f"{rid}.error"
    wait_for(error.exists, 20, "no error file")
    assert "IsADirectoryError" in json.loads(error.read_text())["error"]
    assert not [name for name in os.listdir(server.dumps) if name.endswith(".tmp")]


def test_a_request_beyond_the_budget_is_refused_before_a_rank_sees_it(server):
    lying = sum(path.stat().st_size for path in server.dumps.iterdir() if path.name != "server.json" and path.is_file())
    filler, before = server.dumps / "filler", tokens_prefilled(server)
    with filler.open("wb") as handle:
        handle.truncate(BUDGET + BUDGET // 16 - lying - 250 * TOKEN_BYTES)
    rids = [f"relight-0000abcd-budget{n}-1" for n in range(4)]
    ids = list(range(1000, 1100))
    try:
        answers = [send(server, rid, ids) for rid in rids]
        assert [status for status, _ in answers] == [200, 200, 503, 503]
        assert "budget of 67108864 bytes is used up" in answers[2][1]
        assert send(server, "other", ids)[0] == 200
    finally:
        filler.unlink()
    assert send(server, rids[3], ids)[0] == 200
    wait_for((server.dumps / rids[3]).exists, 20, "no dump once there was room")
    assert {name for name in names(server) if "budget" in name} == {rids[0], rids[1], rids[3]}
    wait_for(lambda: tokens_prefilled(server) - before >= 400, 10, "the log lags")
    assert tokens_prefilled(server) - before == 400


def test_two_ranks_agree_while_the_budget_comes_and_goes(tmp_path):
    model, dumps = tmp_path / "model", tmp_path / "dumps"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(TINY))
    env = sglang_server.environment(
        sglang_server.entry_point(tmp_path / "plugins"),
        RELIGHT_DUMP_DIR=str(dumps),
        RELIGHT_DUMP_LAYERS="0,1,2",
        RELIGHT_DUMP_BUDGET_BYTES=str(BUDGET),
        SGLANG_CPU_OMP_THREADS_BIND="0|1",
    )
    more = ("--model-path", str(model), "--load-format", "dummy", "--skip-tokenizer-init", "--tp-size", "2")
    server = Server(tmp_path / "log", env, *RIGHT, *more)
    server.dumps, filler, end = dumps, dumps / "filler", threading.Event()

    def flap() -> None:
        while not end.wait(0.03):
            if filler.exists():
                filler.unlink()
            else:
                with filler.open("wb") as handle:
                    handle.truncate(BUDGET * 2)

    flapping, rnd, told, lock = threading.Thread(target=flap), random.Random(3), {}, threading.Lock()

    def ask(number: int) -> None:
        with lock:
            ids = [rnd.randrange(1000) for _ in range(rnd.randrange(2, 200))]
        status = send(server, f"relight-0000abcd-flap{number}-1", ids)[0]
        with lock:
            told[number] = (status, ids)

    try:
        server.wait_ready()
        flapping.start()
        for begin in range(0, 400, 8):
            with ThreadPoolExecutor(8) as pool:
                list(pool.map(ask, range(begin, begin + 8)))
            counts = [sum(status == wanted for status, _ids in told.values()) for wanted in (200, 503)]
            if min(counts) >= 10:
                break
        end.set()
        flapping.join()
        filler.unlink(missing_ok=True)
        assert sum(counts) == len(told)
        assert min(counts) >= 10, f"{counts[0]} let in, {counts[1]} refused"
        assert send(server, "relight-0000abcd-last-1", [5, 6, 7])[0] == 200
        taken = {f"relight-0000abcd-flap{number}-1": ids for number, (status, ids) in told.items() if status == 200}
        wait_for(lambda: names(server) >= {*taken, "relight-0000abcd-last-1"}, 20, f"only {sorted(names(server))}")
        assert names(server) == {*taken, "relight-0000abcd-last-1", "server.json"}
        for rid, ids in taken.items():
            assert metadata(dumps / rid)["token_digest"] == token_digest(ids)
            assert metadata(dumps / rid)["tp"] == "2"
    finally:
        end.set()
        server.stop()


def test_the_server_outlives_its_dump_directory(server):
    away = server.dumps.with_name("away")
    server.dumps.rename(away)
    try:
        assert send(server, "relight-0000abcd-gone-1", [5, 6, 7])[0] == 200
        wait_for(lambda: "the error file of request relight-0000abcd-gone-1 cannot be written" in server.text(), 20, "nothing in the log")
    finally:
        away.rename(server.dumps)
    assert send(server, "relight-0000abcd-back-1", [5, 6, 7])[0] == 200
    wait_for((server.dumps / "relight-0000abcd-back-1").exists, 20, "no dump after the directory came back")
    assert server.process.poll() is None


def test_what_was_captured_is_written_before_a_rank_ends(server):
    """SIGTERM to the rank itself, as a service manager sends it to a whole control group, right after the last answer."""
    pid = json.loads((server.dumps / "server.json").read_text())["pid"]
    rids = {f"relight-0000abcd-end{n}-1" for n in range(8)}
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda rid: send(server, rid, list(range(1000, 1200))), rids))
    os.kill(pid, signal.SIGTERM)
    assert [status for status, _ in answers] == [200] * 8
    wait_for(lambda: not Path(f"/proc/{pid}").exists() or "Z (zombie)" in Path(f"/proc/{pid}/status").read_text(), 30, "the rank lives on")
    assert names(server) >= rids
    assert not [name for name in os.listdir(server.dumps) if name.endswith(".tmp")]
    assert "requests answered; at most" in server.text()


def test_a_launch_that_would_dump_wrongly_ends_with_one_sentence_each(tmp_path):
    sglang_server.make_model()
    env = sglang_server.environment(
        sglang_server.entry_point(tmp_path / "plugins"), RELIGHT_DUMP_DIR=str(tmp_path / "dumps"), RELIGHT_DUMP_LAYERS="1,14,29"
    )
    launch = Server(tmp_path / "log", env, "--chunked-prefill-size", "512")
    try:
        assert launch.process.wait(110) == 78, launch.text()[-3000:]
    finally:
        launch.stop()
    said = [line for line in launch.text().splitlines() if "refuses to start" in line]
    assert len(said) == 3
    assert "the last layer, 29" in said[0]
    assert "chunked_prefill_size is 512" in said[1]
    assert "radix cache is on" in said[2]
    assert "Traceback" not in launch.text()
    assert "Load weight begin" not in launch.text()
    assert not (tmp_path / "dumps" / "server.json").exists()


def test_without_the_variable_the_plugin_does_nothing(tmp_path):
    """The same wrong flags start nothing of ours: activate() returns before it touches SGLang."""
    code = "import sys; from relight.dump.plugin import activate; activate(); print('sglang' in sys.modules, 'torch' in sys.modules)"
    done = subprocess.run(
        [str(PYTHON), "-c", code], env=sglang_server.environment(tmp_path), capture_output=True, text=True, timeout=60, check=False
    )
    assert done.stdout.split() == ["False", "False"], done.stderr
