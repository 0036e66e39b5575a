"""Header rules of safetensors and the reader of dumps, held against files that the real library writes."""

import json
import struct

import numpy
import pytest
from ansible_collections.relight.recovery.plugins.module_utils import dumpfile, safetensors
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import save, save_file

IDS = (5, 17, 2, 9)
WIDTH = 8
GOOD = dumpfile.asked("relight-abc-1-0", IDS, (1, 2, 3), WIDTH, "feed")


def write(path, header, data=b"", length=None):
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(raw) if length is None else length) + raw + data)
    return str(path)


def entry(dtype="F32", shape=(2,), offsets=(0, 8)):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


def test_a_file_of_the_real_library_is_read_as_it_is(tmp_path):
    path = tmp_path / "a.safetensors"
    save_file({"b": numpy.zeros((3, 4), numpy.float16), "a": numpy.arange(5)}, path, metadata={"k": "v"})
    header = safetensors.read_header(str(path))
    assert {name: (t.dtype, t.shape) for name, t in header.tensors.items()} == {"a": ("I64", (5,)), "b": ("F16", (3, 4))}
    assert header.metadata == {"k": "v"}
    begin = header.data_offset + header.tensors["a"].begin
    assert numpy.frombuffer(path.read_bytes()[begin : begin + 40], numpy.int64).tolist() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(
    ("header", "data", "length", "kind"),
    [
        ({"a": entry()}, b"x" * 7, None, "torn"),
        ({"a": entry()}, b"x" * 9, None, "extended"),
        ({"a": entry()}, b"x" * 8, 5000, "torn"),
        (b"{}", b"", 100_000_001, "invalid"),
        (b" {}", b"", None, "invalid"),
        (b"{", b"", None, "invalid"),
        (b'{"a":\xff}', b"", None, "invalid"),
        (b'{"a":1,"a":2}', b"", None, "invalid"),
        ({"a": entry(), "b": entry(offsets=(12, 20))}, b"x" * 20, None, "invalid"),  # a hole
        ({"a": entry(), "b": entry(offsets=(4, 12))}, b"x" * 12, None, "invalid"),  # an overlap
        ({"a": entry(offsets=(4, 12))}, b"x" * 12, None, "invalid"),
        ({"a": entry(shape=(3,))}, b"x" * 8, None, "invalid"),
        ({"a": entry("F4", (3,), (0, 2))}, b"x" * 2, None, "invalid"),  # half a byte
        ({"a": entry("F33")}, b"x" * 8, None, "invalid"),
        ({"a": entry(shape=(-1, -2))}, b"x" * 8, None, "invalid"),
        ({"a": {"dtype": "F32", "shape": [2]}}, b"x" * 8, None, "invalid"),
        ({"__metadata__": {"a": 1}}, b"", None, "invalid"),
    ],
)
def test_each_broken_rule_is_found(tmp_path, header, data, length, kind):
    with pytest.raises(safetensors.BadFile) as caught:
        safetensors.read_header(write(tmp_path / "a", header, data, length))
    assert caught.value.kind == kind


def test_four_bits_that_fill_a_byte_are_right(tmp_path):
    assert safetensors.read_header(write(tmp_path / "a", {"a": entry("F4", (4,), (0, 2))}, b"xx")).file_bytes > 0


@settings(max_examples=60, deadline=None)
@given(cut=st.integers(0, 200), more=st.binary(max_size=3))
def test_any_other_length_is_refused(tmp_path_factory, cut, more):
    whole = save({"a": numpy.ones((4, 4), numpy.float32)})
    torn = whole[: max(0, len(whole) - cut)] + more
    path = tmp_path_factory.mktemp("s") / "a"
    path.write_bytes(torn)
    if len(torn) == len(whole):  # other values under the right length: no header tells of that
        assert safetensors.read_header(str(path)).file_bytes == len(whole)
    else:
        with pytest.raises(safetensors.BadFile):
            safetensors.read_header(str(path))


def dump(path, dtype=numpy.float32, tensors=None, **metadata):
    rng = numpy.random.default_rng(7)
    content = {
        "input_ids": numpy.array(IDS, numpy.int64),
        "hidden_state": rng.normal(size=(1, 4, WIDTH)).astype(dtype),
        "aux_hidden_state": rng.normal(size=(1, 4, 3 * WIDTH)).astype(dtype),
        **(tensors or {}),
    }
    told = {
        "format": "relight-dump-1",
        "rid": GOOD.rid,
        "tokens": "4",
        "token_digest": dumpfile.token_digest(IDS),
        "layers": "[1, 2, 3]",
        "norm": "post",
        "instance": "feed",
        **metadata,
    }
    save_file({k: v for k, v in content.items() if v is not None}, path, metadata=told)
    return str(path)


def test_a_right_dump_has_no_fault(tmp_path):
    assert dumpfile.faults(dump(tmp_path / "d"), GOOD) == []
    assert dumpfile.faults(dump(tmp_path / "h", numpy.float16), GOOD) == []


def test_token_digest_is_over_little_endian_words():
    import hashlib

    expected = hashlib.blake2b(numpy.array(IDS, "<i8").tobytes(), digest_size=16).hexdigest()
    assert dumpfile.token_digest(IDS) == expected


NAN = numpy.full((1, 4, WIDTH), numpy.nan, numpy.float32)


@pytest.mark.parametrize(
    ("tensors", "metadata", "sentence"),
    [
        ({}, {"rid": "relight-other"}, "rid is 'relight-other', not 'relight-abc-1-0'"),
        ({}, {"layers": "[2, 3, 4]"}, "layers are '[2, 3, 4]', not [1, 2, 3]"),
        ({}, {"layers": "nonsense"}, "layers are 'nonsense', not [1, 2, 3]"),
        ({}, {"norm": "pre"}, "norm is 'pre', not 'post'"),
        ({}, {"instance": "dead"}, "instance is 'dead', not 'feed'"),
        ({"input_ids": numpy.array([5, 17, 2, 8], numpy.int64)}, {}, "input_ids are not those of the request"),
        ({"input_ids": numpy.array([5, 17, 2], numpy.int64)}, {}, "input_ids has the shape [3], not [4]"),
        ({"hidden_state": None}, {}, "it holds no hidden_state"),
        ({"hidden_state": numpy.ones((1, 3, WIDTH), numpy.float32)}, {}, "hidden_state has the shape [1, 3, 8], not [1, 4, 8]"),
        ({"hidden_state": NAN}, {}, "hidden_state holds 32 values that are not finite"),
        (
            {"hidden_state": NAN.astype(numpy.float16), "aux_hidden_state": numpy.ones((1, 4, 3 * WIDTH), numpy.float16)},
            {},
            "hidden_state holds 32 values that are not finite",
        ),
        ({"hidden_state": NAN.astype(numpy.float16)}, {}, "the states are float16 and float32"),
        ({"aux_hidden_state": numpy.zeros((1, 4, 3 * WIDTH), numpy.float32)}, {}, "aux_hidden_state is all zeros"),
    ],
)
def test_each_wrong_dump_is_told(tmp_path, tensors, metadata, sentence):
    assert dumpfile.faults(dump(tmp_path / "d", tensors=tensors, **metadata), GOOD) == [sentence]


def test_a_torn_dump_is_told(tmp_path):
    path = tmp_path / "d"
    dump(path)
    path.write_bytes(path.read_bytes()[:-1])
    assert dumpfile.faults(str(path), GOOD) == ["the dump is torn: it is 1 bytes short"]


def test_bfloat16_infinity_is_not_finite():
    assert dumpfile.value_fault(struct.pack("<HHH", 0x3F80, 0x7F80, 0x7F7F), "bfloat16") == "holds 1 values that are not finite"
