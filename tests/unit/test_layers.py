# Copyright: the Relight authors
# SPDX-License-Identifier: Apache-2.0
"""Layer ids: the shift that SGLang makes, by family and version, undone."""

from __future__ import annotations

import pytest
from ansible_collections.relight.recovery.plugins.module_utils.layers import (
    BadLayers,
    Shape,
    check,
    ids_to_pass,
    inside,
    is_known,
    parse,
    shape,
    version_numbers,
)

LLAMA = Shape("LlamaForCausalLM", 30, 576, "float32")
KIMI = Shape("KimiK25ForConditionalGeneration", 61, 7168, "bfloat16", text="DeepseekV3ForCausalLM")
DEEPSEEK = Shape("DeepseekV3ForCausalLM", 61, 7168, "bfloat16")
WRAPPED = Shape("SomeVisionModel", 61, 7168, "bfloat16", text="DeepseekV3ForCausalLM")


def as_sglang_does(ids, version):
    """deepseek_v2's setter: what ends in layers_to_capture."""
    always = version_numbers(version) < (0, 5, 13)
    return [k + 1 for k in ids] if always or ids[0] == 1 else list(ids)


@pytest.mark.parametrize("version", ["0.5.11", "0.5.12.post1", "0.5.13", "0.5.23", "0.6.0"])
@pytest.mark.parametrize("model", [KIMI, DEEPSEEK, WRAPPED])
@pytest.mark.parametrize("outputs", [(1, 29, 57), (2, 30, 58), (3, 31, 59)])
def test_deepseek_captures_the_outputs_whatever_the_version(outputs, model, version):
    assert as_sglang_does(ids_to_pass(outputs, model, version), version) == inside(outputs)


@pytest.mark.parametrize(
    ("outputs", "model", "version", "passed"),
    [
        ((1, 14, 26), LLAMA, "0.5.23", [1, 14, 26]),
        ((0, 14, 26), LLAMA, "0.5.23", [0, 14, 26]),
        ((2, 30, 58), KIMI, "0.5.12", [2, 30, 58]),
        ((2, 30, 58), KIMI, "0.5.13", [3, 31, 59]),
        ((1, 29, 57), KIMI, "0.5.23", [1, 29, 57]),
        ((0, 29, 57), KIMI, "0.5.12", [0, 29, 57]),
    ],
)
def test_ids_to_pass(outputs, model, version, passed):
    assert ids_to_pass(outputs, model, version) == passed


def test_layer_0_of_deepseek_is_refused_where_it_would_shift():
    with pytest.raises(BadLayers, match="cannot capture layer 0"):
        ids_to_pass((0, 29, 57), DEEPSEEK, "0.5.23")


@pytest.mark.parametrize(
    ("outputs", "layers", "says"),
    [
        ((1, 14, 26), 30, None),
        ((0, 1, 28), 30, None),
        ((1, 14, 400), None, None),  # the model is not known yet
        ((1, 14), 30, "are 2, not 3"),
        ((1, 14, 20, 26), 30, "are 4, not 3"),
        ((1, 26, 14), 30, "do not rise"),
        ((1, 14, 14), None, "do not rise"),
        ((1, 14, 30), 30, "out of range: this model has the layer outputs 0 to 29"),
        ((1, 14, 29), 30, "the last layer, 29"),
    ],
)
def test_check(outputs, layers, says):
    if says is None:
        check(outputs, layers)
    else:
        with pytest.raises(BadLayers, match=says):
            check(outputs, layers)


@pytest.mark.parametrize("text", ["", "1,,3", "1;14;26", "a,b,c", "-1,2,3", "1.5,2,3"])
def test_parse_refuses(text):
    with pytest.raises(BadLayers):
        parse(text)


def test_parse():
    assert parse(" 1, 14,26 ") == (1, 14, 26)


def test_shape_looks_under_text_config():
    nested = {
        "architectures": ["KimiK25ForConditionalGeneration"],
        "text_config": {
            "architectures": ["DeepseekV3ForCausalLM"],
            "num_hidden_layers": 61,
            "hidden_size": 7168,
            "torch_dtype": "bfloat16",
        },
        "num_hidden_layers": 27,  # of the vision tower
    }
    assert shape(nested) == KIMI
    plain = {"architectures": ["LlamaForCausalLM"], "num_hidden_layers": 30, "hidden_size": 576, "dtype": "float32"}
    assert shape(plain) == LLAMA
    with pytest.raises(BadLayers, match="num_hidden_layers"):
        shape({"architectures": ["LlamaForCausalLM"]})


def test_known_families():
    assert is_known(LLAMA)
    assert is_known(WRAPPED)
    assert not is_known(Shape("BrandNewForCausalLM", 4, 8, ""))
