"""What the codecs write they read again, whatever the values: properties, without a server."""

from __future__ import annotations

import contextlib
import json
import re

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from kindler.errors import DataError
from kindler.models.signature import Array, Signature, TensorSpec, fit, from_columns
from kindler.serve.http_errors import Problem, as_problem
from kindler.serve.protocols import Answer, Codec, InferRequest, RawRequest, Target
from kindler.serve.protocols.mlflow import Mlflow
from kindler.serve.protocols.omega import RAW, OmegaCodec
from kindler.serve.protocols.tables import ARROW, read_columns
from kindler.serve.protocols.tfserving import TfServing
from kindler.serve.protocols.v2 import LENGTH, V2

ANY = Signature((TensorSpec("x"),))
NET = Target("net")
NOTHING = RawRequest(b"", {}, {})
BINARY = InferRequest(inputs={}, params={"binary_data_output": True})
NUMBERS = st.sampled_from(
    ["bool", "int8", "int16", "int32", "int64", "uint8", "uint32", "uint64", "float32", "float64"]
)
SHAPES = hnp.array_shapes(min_dims=1, max_dims=3, max_side=4)
ARRAYS = NUMBERS.flatmap(lambda dtype: hnp.arrays(dtype, SHAPES))
FINITE = hnp.arrays("float64", SHAPES, elements=st.floats(allow_nan=False, allow_infinity=False))


def answer(array: Array) -> Answer:
    return Answer("net", 3, {"x": array}, len(array))


def again(codec: Codec, body: bytes, **headers: str) -> Array:
    (found,) = codec.decode(RawRequest(body, headers, {}), ANY, NET).inputs.values()
    return found


@given(ARRAYS)
def test_v2_in_binary_is_exact(array: Array) -> None:
    reply = V2().encode(answer(array), BINARY, NOTHING)
    length = int(dict(reply.headers)[LENGTH])
    told = json.loads(reply.body[:length])
    head = json.dumps({"inputs": told["outputs"]}).encode()

    found = again(V2(), head + reply.body[length:], **{LENGTH: str(len(head))})

    np.testing.assert_array_equal(found, array)
    assert found.dtype == array.dtype


@given(ARRAYS)
def test_v2_in_json_is_exact_where_json_has_the_values(array: Array) -> None:
    reply = V2().encode(answer(array), InferRequest(inputs={}), NOTHING)
    told = json.loads(reply.body)
    if array.dtype.kind == "f" and not np.isfinite(array).all():
        assert None in told["outputs"][0]["data"]
        return

    found = again(V2(), json.dumps({"inputs": told["outputs"]}).encode())

    np.testing.assert_array_equal(found, array)
    assert found.dtype == array.dtype


@given(st.lists(st.binary(max_size=9), min_size=1, max_size=5))
def test_v2_bytes_are_exact_in_binary(values: list[bytes]) -> None:
    array = np.array(values, dtype=object)
    reply = V2().encode(answer(array), BINARY, NOTHING)
    length = int(dict(reply.headers)[LENGTH])
    head = json.dumps({"inputs": json.loads(reply.body[:length])["outputs"]}).encode()

    assert again(V2(), head + reply.body[length:], **{LENGTH: str(len(head))}).tolist() == values


@given(hnp.arrays("float32", SHAPES), st.booleans())
def test_tensorflow_serving_keeps_every_float_nan_and_infinity_too(array: Array, rows: bool) -> None:
    codec, asked = TfServing(), InferRequest(inputs={}, params={"rows": rows})
    body = json.loads(codec.encode(answer(array), asked, NOTHING).body)
    words = ("predictions", "instances") if rows else ("outputs", "inputs")

    found = again(codec, json.dumps({words[1]: body[words[0]]}).encode())

    np.testing.assert_array_equal(found.astype("float32"), array)


@given(FINITE)
def test_mlflow_keeps_every_float(array: Array) -> None:
    codec = Mlflow()
    body = json.loads(codec.encode(answer(array), InferRequest(inputs={}), RawRequest(b"", {}, {})).body)
    sent = json.dumps({"inputs": body["predictions"]}).encode()

    np.testing.assert_array_equal(again(codec, sent, **{"content-type": "application/json"}), array)


@given(ARRAYS)
def test_raw_bytes_are_exact(array: Array) -> None:
    codec = OmegaCodec()
    reply = codec.encode(answer(array), InferRequest(inputs={}), RawRequest(b"", {"accept": RAW}, {}))
    headers = dict(reply.headers)
    sent = RawRequest(
        reply.body, {"content-type": RAW}, {"dtype": headers["x-dtype"], "shape": headers["x-shape"]}
    )

    (found,) = codec.decode(sent, ANY, NET).inputs.values()

    np.testing.assert_array_equal(found, array)


@given(ARRAYS)
def test_arrow_is_exact(array: Array) -> None:
    reply = OmegaCodec().encode(
        answer(array), InferRequest(inputs={}), RawRequest(b"", {"accept": ARROW}, {})
    )

    (found,) = read_columns(reply.body, ARROW).values()

    np.testing.assert_array_equal(found, array)
    assert found.dtype == array.dtype or array.ndim > 1


WORDS = [
    "inputs", "instances", "name", "shape", "datatype", "data", "parameters", "outputs", "columns", "b64",
    "dataframe_split", "dataframe_records", "binary_data_size", "id", "timeout",
]  # fmt: skip
BODIES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(WORDS), inner, max_size=3),
    max_leaves=12,
)
SIGNATURES = [
    Signature((TensorSpec("x", "float64", (None, 3)),), columns=("a", "b", "c")),
    Signature((TensorSpec("data", "int64", (None,)), TensorSpec("x", None, None))),
]


@pytest.mark.parametrize("codec", [V2(), TfServing(), Mlflow(), OmegaCodec()], ids=lambda codec: codec.name)
@settings(max_examples=200)
@given(body=BODIES, signature=st.sampled_from(SIGNATURES))
def test_a_body_is_read_or_refused_with_a_sentence(codec: Codec, body: object, signature: Signature) -> None:
    sent = RawRequest(json.dumps(body).encode(), {"content-type": "application/json"}, {})
    try:
        request = codec.decode(sent, signature, NET)
        fit(signature, from_columns(signature, request.inputs) if request.columns else request.inputs)
    except (Problem, DataError) as error:
        refused = as_problem(error)
    else:
        return
    assert refused is not None
    assert 400 <= refused.status < 500
    assert refused.message.endswith(".")


@given(st.binary(max_size=60), st.integers(0, 70))
@example(b"\x80\n", 0)
def test_bytes_that_are_no_request_are_refused(body: bytes, length: int) -> None:
    for codec, kind in ((V2(), ""), (Mlflow(), ARROW), (Mlflow(), "text/csv"), (OmegaCodec(), ARROW)):
        with contextlib.suppress(Problem):  # anything else fails the test
            codec.decode(RawRequest(body, {LENGTH: str(length), "content-type": kind}, {}), ANY, NET)


@pytest.mark.parametrize(
    ("array", "complaint"),
    [
        (np.zeros((2, 4)), "has the shape [2, 4]; the model takes [rows, 3]"),
        (np.array([["a", "b", "c"]], dtype=object), "is text, or has nulls, but the model takes float64"),
        (np.zeros((0, 3)), "there are no rows"),
        (np.float64(1), "has the shape []"),
    ],
)
def test_what_the_model_does_not_take_is_said(array: Array, complaint: str) -> None:
    with pytest.raises(DataError, match=re.escape(complaint)):
        fit(SIGNATURES[0], {"": array})


def test_whole_numbers_that_the_model_cannot_hold_are_refused_and_not_wrapped() -> None:
    narrow = Signature((TensorSpec("x", "int32", (None, 1)),))
    assert fit(narrow, {"": np.array([[7]], np.int64)})["x"].dtype == np.int32
    with pytest.raises(DataError, match=f"is int64 from {2**40} to {2**40}, but the model takes int32"):
        fit(narrow, {"": np.array([[2**40]], np.int64)})


def test_columns_are_found_by_name_where_the_model_has_names() -> None:
    columns = {name: np.array([number]) for number, name in enumerate("cba")}
    assert from_columns(SIGNATURES[0], columns)["x"].tolist() == [[2, 1, 0]]
    with pytest.raises(DataError, match="the columns b are missing"):
        from_columns(SIGNATURES[0], {"a": np.array([1]), "c": np.array([1])})
