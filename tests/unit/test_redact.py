# Copyright: the Relight authors
# SPDX-License-Identifier: Apache-2.0
"""No canary gets through, and nothing that an operator needs is masked."""

from __future__ import annotations

import pytest
from ansible_collections.relight.recovery.plugins.module_utils import redact

CANARY = "Zq7canary9Xw"


@pytest.mark.parametrize(
    "argv",
    [
        ["serve", "--api-key", CANARY],
        ["serve", f"--api-key={CANARY}"],
        ["serve", "--admin-api-key", CANARY],
        ["serve", "--ssl-keyfile-password", CANARY],
        ["serve", "-token", CANARY],
        ["serve", "--hf_token", f"{CANARY}"],
        ["env", f"HF_TOKEN={CANARY}", "python"],
        ["env", f"AWS_SECRET_ACCESS_KEY={CANARY}", "python"],
        ["env", f"PGPASSWORD={CANARY}", "psql"],
        ["env", f"clientSecret={CANARY}", "psql"],
        ["sh", "-c", f"export OPENAI_API_KEY={CANARY}; exec serve"],
        ["sh", "-c", f'DB_PASSWORD="a b {CANARY}" exec serve'],
        ["sh", "-c", f"serve --port 1 --api-key {CANARY} --tp 8"],
        ["sh", "-c", f"serve --api-key '{CANARY} x' --tp 8"],
        ["curl", "-H", f"Authorization: Bearer {CANARY}", "http://h/"],
        ["curl", "-H", f"x-api-key: {CANARY}", "http://h/"],
        ["curl", f"https://user:{CANARY}@host/path"],
        ["curl", f"https://host/path?token={CANARY}&x=1"],
        ["serve", f'{{"api_key": "{CANARY}", "x": 1}}'],
        ["sh", "-c", f"print('--api-key {CANARY}')"],
        ["sh", "-c", f"run(['serve', '--api-key', '{CANARY}'])"],
        ["serve", f"hf_{CANARY}"],
        ["serve", f"--x=sk-{CANARY}"],
    ],
)
def test_a_canary_is_masked(argv):
    line = redact.command(argv)
    assert CANARY not in line
    assert redact.MASK in line


def test_a_canary_in_a_line_of_text_is_masked():
    assert redact.text(f"ServerArgs(api_key='{CANARY}', tp_size=8)") == f"ServerArgs(api_key={redact.MASK}, tp_size=8)"


@pytest.mark.parametrize(
    "argv",
    [
        ["python", "-m", "sglang.launch_server", "--tokenizer-path", "/models/t", "--max-total-tokens", "4096", "--tp", "8"],
        ["vllm", "serve", "/models/m", "--port", "30000", "--skip-tokenizer-init", "--tensor-parallel-size", "8"],
        ["env", "CUDA_VISIBLE_DEVICES=0,1", "PATH=/bin:/usr/bin", "python", "author.py", "--keyring", "x"],
        ["--chunked-prefill-size=-1"],
    ],
)
def test_what_is_no_secret_stays(argv):
    assert redact.words(argv) == argv


def test_a_flag_without_a_value_hides_nothing_behind_it():
    assert redact.words(["serve", "--auth", "--port", "30000"]) == ["serve", "--auth", "--port", "30000"]


def test_a_long_line_is_cut_after_masking():
    line = redact.command(["x" * 300, "--api-key", CANARY], limit=100)
    assert len(line) == 100
    assert line.endswith("…")


def test_an_environment_is_read_by_allow_list():
    seen = {"NCCL_DEBUG": "INFO", "SGLANG_API_KEY": CANARY, "HOME": "/root", "RELIGHT_UNIT": "relight-sglang", "CUDA_X": f"hf_{CANARY}"}
    assert redact.environment(seen) == {
        "NCCL_DEBUG": "INFO",
        "SGLANG_API_KEY": redact.MASK,
        "RELIGHT_UNIT": "relight-sglang",
        "CUDA_X": redact.MASK,
    }
