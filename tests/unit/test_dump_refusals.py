# Copyright: the Relight authors
# SPDX-License-Identifier: Apache-2.0
"""Each server argument that would make wrong dumps is refused, by name, and nothing else is."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from relight.dump.refusals import ROWS, refusals

GOOD = {
    "dump_dir": "/dev/shm/relight",
    "dump_dir_error": None,
    "layers": "1,14,26",
    "dtype": None,
    "model_layers": 30,
    "patch_dir": None,
    "chunked_prefill_size": -1,
    "disable_radix_cache": True,
    "enable_mixed_chunk": False,
    "pp_size": 1,
    "attn_cp_size": 1,
    "dp_size": 1,
    "attn_dp_size": 1,
    "enable_dp_attention": False,
    "enable_lora": None,
    "lora_paths": None,
    "speculative_algorithm": None,
    "disaggregation_mode": "null",
    "tp_size": 8,
    "enable_single_batch_overlap": True,
    "disable_overlap_schedule": False,
}


def test_a_plain_server_is_served():
    assert refusals(SimpleNamespace(**GOOD)) == []


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"chunked_prefill_size": 8192}, "chunked_prefill_size is 8192"),
        ({"chunked_prefill_size": 1}, "chunked_prefill_size is 1,"),
        ({"chunked_prefill_size": None}, "chunked_prefill_size is None"),
        ({"disable_radix_cache": False}, "the radix cache is on"),
        ({"enable_mixed_chunk": True}, "enable_mixed_chunk"),
        ({"pp_size": 2}, "pp_size is 2"),
        ({"attn_cp_size": 4}, "attn_cp_size is 4"),
        ({"dcp_size": 2}, "dcp_size is 2"),
        ({"enable_prefill_cp": True}, "enable_prefill_cp"),
        ({"enable_nsa_prefill_context_parallel": True}, "enable_nsa_prefill_context_parallel"),
        ({"enable_dp_attention": True}, "enable_dp_attention is True: data-parallel attention"),
        ({"attn_dp_size": 8}, "attn_dp_size is 8"),
        ({"dp_size": 2}, "dp_size is 2: data parallelism"),
        ({"enable_two_batch_overlap": True}, "two-batch overlap"),
        ({"enable_layernorm_sp": True}, "layer-norm sequence parallelism"),
        ({"speculative_algorithm": "EAGLE3"}, "speculative_algorithm is EAGLE3"),
        ({"enable_return_aux_hidden_states": True}, "own capture of auxiliary states"),
        ({"enable_lora": True}, "enable_lora"),
        ({"lora_paths": ["a=/x"]}, "lora_paths"),
        ({"disaggregation_mode": "prefill"}, "disaggregation_mode is prefill"),
        ({"enable_pdmux": True}, "multiplexing"),
        ({"encoder_only": True}, "encoder_only"),
        ({"is_embedding": True}, "is_embedding"),
        ({"dllm_algorithm": "LowConfidence"}, "diffusion"),
        ({"use_ray": True}, "Ray"),
        ({"layers": ""}, "RELIGHT_DUMP_LAYERS"),
        ({"layers": None}, "RELIGHT_DUMP_LAYERS"),
        ({"layers": "1,14"}, "are 2, not 3"),
        ({"layers": "1,14,29"}, "the last layer, 29"),
        ({"layers": "1,14,30"}, "out of range"),
        ({"dtype": "int8"}, "RELIGHT_DUMP_DTYPE 'int8'"),
        ({"dump_dir_error": "Read-only file system"}, "/dev/shm/relight cannot be written (Read-only file system)"),
        ({"patch_dir": "/tmp/hs"}, "SGLANG_HS_DUMP_DIR is set too"),
    ],
)
def test_one_thing_wrong_is_one_sentence(change, says):
    (sentence,) = refusals(SimpleNamespace(**{**GOOD, **change}))
    assert says in sentence
    assert sentence.endswith(".")
    assert "\n" not in sentence


def test_everything_wrong_is_told_at_once():
    args = SimpleNamespace(**{**GOOD, "disable_radix_cache": False, "pp_size": 2, "layers": "1,2"})
    assert len(refusals(args)) == 3


def test_each_row_has_a_case_above():
    """A new row without a case would go untested."""
    source = open(__file__, encoding="utf-8").read()
    assert all(any(f'"{name}"' in source for name in names) for names, *_ in ROWS)


def test_an_argument_that_this_sglang_lacks_is_not_in_use():
    few = {k: GOOD[k] for k in ("dump_dir", "dump_dir_error", "layers", "model_layers", "chunked_prefill_size", "disable_radix_cache")}
    assert refusals(SimpleNamespace(**few)) == []
