# Copyright: the Relight authors
# SPDX-License-Identifier: Apache-2.0
"""The model's last norm applied and undone, and which models it is known of; which records a selection names."""

from __future__ import annotations

import json

import numpy as np
import pytest
import safetensors.numpy

from relight.extract import norms, selection
from relight.extract.config import BadInput
from relight.extract.states import to_float32, to_raw

HIDDEN = 16


def model(folder, weight=None, name="model.norm.weight", **config):
    folder.mkdir(exist_ok=True)
    weight = np.linspace(0.5, 2.5, HIDDEN, dtype="<f4") if weight is None else np.asarray(weight, "<f4")
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", "rms_norm_eps": 1e-5, **config}))
    safetensors.numpy.save_file({name: weight, "model.layers.0.input_layernorm.weight": weight}, folder / "model.safetensors")
    return str(folder)


def states(tokens=9, scale=50.0):
    return (np.random.default_rng(5).standard_normal((tokens, HIDDEN)) * scale).astype("<f4")


def test_the_norm_is_its_formula(tmp_path):
    norm = norms.load(model(tmp_path / "m"), HIDDEN)
    for scale in (50.0, 1e-3):  # the small number under the root counts for small states
        pre = states(scale=scale).astype("f8")
        want = pre / np.sqrt((pre**2).mean(axis=1, keepdims=True) + 1e-5) * np.linspace(0.5, 2.5, HIDDEN)
        assert np.abs(norm.apply(states(scale=scale)) - want).max() < 1e-5


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_a_surrogate_is_the_state_up_to_a_factor_a_token(tmp_path, dtype):
    norm = norms.load(model(tmp_path / "m"), HIDDEN)
    pre = states()
    post = to_float32(to_raw(norm.apply(pre), dtype), dtype).reshape(pre.shape)
    surrogate = norm.undo(post)
    factor = pre[:, :1] / surrogate[:, :1]
    assert np.abs(surrogate * factor / pre - 1).max() < {"float32": 1e-5, "float16": 3e-3, "bfloat16": 3e-2}[dtype]
    stored = to_float32(to_raw(surrogate, dtype), dtype).reshape(pre.shape)
    norm.judge_back(stored, post, dtype)
    with pytest.raises(ValueError, match="off by"):
        norm.judge_back(stored[::-1], post, dtype)


def test_a_weight_near_zero_cannot_be_undone(tmp_path):
    weight = np.ones(HIDDEN)
    weight[3] = 1e-6
    with pytest.raises(BadInput, match=r"1 weights of the model's last norm are near 0 \(at 3\)"):
        norms.load(model(tmp_path / "m", weight), HIDDEN).judge_undoable()
    norms.load(model(tmp_path / "n"), HIDDEN).judge_undoable()


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"model_type": "gemma2"}, "model of type 'gemma2' is not known"),
        ({"rms_norm_eps": None}, "not known to be an RMSNorm"),
        ({"name": "model.final.weight"}, "0 tensors could be"),
        ({"weight": np.ones(8)}, r"model.norm.weight is float32 \[8\], the samples are 16 wide"),
    ],
)
def test_other_models_are_refused(tmp_path, change, why):
    with pytest.raises(BadInput, match=why):
        norms.load(model(tmp_path / "m", **change), HIDDEN)
    with pytest.raises(BadInput, match="cannot read the model"):
        norms.load(str(tmp_path / "none"), HIDDEN)


def test_a_nested_text_model_is_found(tmp_path):
    folder = model(tmp_path / "m", name="language_model.model.norm.weight")
    config = {"model_type": "kimi_k25", "text_config": {"model_type": "deepseek_v3", "rms_norm_eps": 1e-6}}
    (tmp_path / "m" / "config.json").write_text(json.dumps(config))
    assert norms.load(folder, HIDDEN).eps == 1e-6
    index = {"weight_map": {"language_model.model.norm.weight": "model.safetensors"}}
    (tmp_path / "m" / "model.safetensors.index.json").write_text(json.dumps(index))
    assert norms.load(folder, HIDDEN).weight.tolist() == np.linspace(0.5, 2.5, HIDDEN, dtype="<f4").tolist()


def test_rounding_to_bfloat16_is_to_the_nearest_even():
    bits = np.array([0x3F808000, 0x3F818000, 0x3F808001, 0x3F807FFF, 0xBF818000, 0x7F7FFFFF, 0x7F800000], "<u4")
    assert np.frombuffer(to_raw(bits.view("<f4"), "bfloat16"), "<u2").tolist() == [0x3F80, 0x3F82, 0x3F81, 0x3F80, 0xBF82, 0x7F80, 0x7F80]
    assert np.isnan(to_float32(to_raw(np.array([np.nan], "<f4"), "bfloat16"), "bfloat16")).all()


def test_selections(tmp_path):
    assert selection.parse("3-5,9 , 7\n") == {3, 4, 5, 7, 9}
    for name, text in (("json", "[1, 5]"), ("words", "1\n5\n"), ("range", "1,5-5")):
        (tmp_path / name).write_text(text)
        assert selection.chosen(None, str(tmp_path / name)) == {1, 5}
    assert selection.chosen("2", str(tmp_path / "json")) == {1, 2, 5}
    assert selection.chosen(None, None) is None
    for bad in ("5-3", "a", "-1", "1-", "", "0-999999999"):
        with pytest.raises(BadInput, match="--only"):
            selection.parse(bad)
    (tmp_path / "bad").write_text("[1, true]")
    for name, why in (("bad", "other than indices"), ("none", "No such file")):
        with pytest.raises(BadInput, match=why):
            selection.read(str(tmp_path / name))
