"""gRPC: NVIDIA's own client, unmodified; the official wire format; keys, limits and errors."""

from __future__ import annotations

import asyncio
import os
import queue
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import httpx
import numpy as np
import psutil
import pytest
import tritonclient.grpc as triton
import tritonclient.http as triton_http
from google.protobuf import descriptor_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase
from tritonclient.grpc import model_config_pb2, service_pb2

from kindler import Store
from kindler.serve.grpc_api.messages import (
    INFERENCE,
    InferMessage,
    descriptors,
    message,
    request_from,
)
from kindler.serve.http_errors import Problem
from kindler.serve.protocols import InferRequest
from kindler.store.keys import Keys
from tests.serve.served import Served, constant, expected, linear, serving

ROWS = [[1.0, 2.0, 3.0], [0.5, 0.0, -1.0]]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("grpc") / "store"
    om = Store(folder)
    om.models.put(constant(1.0), "net")
    om.models.put(linear(), "net", tag="prod")
    om.models.put(constant(7.0), "team/other")
    om["side"].models.put(constant(9.0), "net")
    om.close()
    with serving(folder, "--grpc-port", "0", "--body-bytes", "1000000") as made:
        yield made


@pytest.fixture(scope="module")
def client(served: Served) -> Iterator[triton.InferenceServerClient]:
    with triton.InferenceServerClient(served.grpc) as made:
        yield made


def tensor(rows: Any, dtype: str = "FP64", name: str = "x") -> triton.InferInput:
    array = np.asarray(rows)
    made = triton.InferInput(name, list(array.shape), dtype)
    made.set_data_from_numpy(array)
    return made


def test_predictions_are_those_of_the_model_by_name_version_alias_and_bucket(client: Any) -> None:
    def asked(name: str, version: str = "", **options: Any) -> Any:
        return client.infer(name, [tensor(ROWS)], model_version=version, **options)

    reply = asked("net", request_id="42")
    assert np.allclose(reply.as_numpy("predict"), expected(ROWS))
    assert reply.get_response().id == "42"
    assert reply.get_response().model_version == "2"
    assert asked("net", "1").as_numpy("predict").tolist() == [1.0, 1.0]
    assert np.allclose(asked("net", "prod").as_numpy("predict"), expected(ROWS))
    assert asked("team/other").as_numpy("predict").tolist() == [7.0, 7.0]
    assert asked("net", headers={"bucket": "side"}).as_numpy("predict").tolist() == [9.0, 9.0]


def test_metadata_configuration_and_readiness_are_as_over_http(client: Any, served: Served) -> None:
    assert client.is_server_live()
    assert client.is_server_ready()
    assert client.is_model_ready("net")
    web = httpx.Client(base_url=served.url, timeout=30)
    assert client.get_server_metadata(as_json=True) == web.get("/v2").json()
    told = client.get_model_metadata("net", as_json=True)
    assert told["inputs"] == [{"name": "x", "datatype": "FP64", "shape": ["-1", "3"]}]
    assert told["versions"] == ["1", "2"]
    config = client.get_model_config("net", as_json=True)["config"]
    assert config["input"] == [{"name": "x", "data_type": "TYPE_FP64", "dims": ["3"]}]
    over_http = triton_http.InferenceServerClient(served.url.removeprefix("http://"))
    config = over_http.get_model_config("net")
    assert config["input"] == [{"name": "x", "data_type": "TYPE_FP64", "dims": [3]}]
    assert config["max_batch_size"] == 100_000
    over_http.close()
    web.close()


def test_statistics_count_rows_and_failures_of_each_version(client: Any, served: Served) -> None:
    def counted(number: str) -> dict[str, Any]:
        found = client.get_inference_statistics("team/other", as_json=True).get("model_stats", [])
        return next((one for one in found if one["version"] == number), {})

    client.infer("team/other", [tensor(ROWS)])
    before = counted("1")
    client.infer("team/other", [tensor(ROWS)])
    with pytest.raises(triton.InferenceServerException, match="shape"):
        client.infer("team/other", [tensor([[1.0, 2.0]])])
    after = counted("1")
    assert int(after["inference_count"]) == int(before["inference_count"]) + 2
    stats = after["inference_stats"]
    assert int(stats["success"]["count"]) == int(before["inference_stats"]["success"]["count"]) + 1
    assert int(stats["fail"]["count"]) == 1
    over_http = triton_http.InferenceServerClient(served.url.removeprefix("http://"))
    told = over_http.get_inference_statistics("team/other", "1")["model_stats"]
    assert told[0]["inference_stats"]["fail"]["count"] == 1
    assert "team/other" in {one["name"] for one in over_http.get_inference_statistics()["model_stats"]}
    with pytest.raises(triton_http.InferenceServerException, match="nothing"):
        over_http.get_inference_statistics("nothing")
    over_http.close()


@pytest.mark.parametrize("protocol", ["grpc", "http"])
def test_an_unloaded_model_answers_nobody_until_it_is_loaded(
    client: Any, served: Served, protocol: str
) -> None:
    used = client if protocol == "grpc" else triton_http.InferenceServerClient(served.url[7:])
    used.unload_model("team/other")
    index = client.get_model_repository_index(as_json=True)["models"]
    assert {"name": "team/other", "version": "1", "state": "UNAVAILABLE", "reason": "unloaded"} in index
    assert not used.is_model_ready("team/other")
    with pytest.raises(triton.InferenceServerException, match="unloaded"):
        client.infer("team/other", [tensor(ROWS)])
    with pytest.raises(Exception, match="parameters"):
        used.load_model("team/other", config="{}")
    used.load_model("team/other")
    assert used.is_model_ready("team/other")
    with pytest.raises(Exception, match="nothing"):
        used.unload_model("nothing")


def test_a_stream_goes_on_after_a_request_that_fails(client: Any) -> None:
    answers: queue.Queue[Any] = queue.Queue()
    client.start_stream(lambda result, error: answers.put(error or result))
    for name in ("net", "nothing", "net"):
        client.async_stream_infer(name, [tensor(ROWS)])
    found = [answers.get(timeout=30) for _ in range(3)]
    client.stop_stream()
    assert [isinstance(one, triton.InferenceServerException) for one in found] == [False, True, False]
    assert np.allclose(found[2].as_numpy("predict"), expected(ROWS))


def test_errors_have_grpc_codes_and_the_request_id(served: Served) -> None:
    def called(name: str, request: Any, metadata: Any = ()) -> grpc.RpcError:
        sending = channel.unary_unary(
            f"/{INFERENCE}/{name}", request_serializer=lambda m: m.SerializeToString()
        )
        with pytest.raises(grpc.RpcError) as caught:
            sending(request, metadata=metadata, timeout=30)
        return caught.value

    infer = message("inference.ModelInferRequest")
    with grpc.insecure_channel(served.grpc) as channel:
        error = called("ModelInfer", infer(model_name="nothing"), [("x-request-id", "mine")])
        assert error.code() == grpc.StatusCode.NOT_FOUND
        assert ("x-request-id", "mine") in [tuple(pair) for pair in error.trailing_metadata()]
        assert called("ModelInfer", infer(model_name="net")).code() == grpc.StatusCode.INVALID_ARGUMENT
        large = infer(model_name="net", raw_input_contents=[b"x" * 3_000_000])
        assert called("ModelInfer", large).code() == grpc.StatusCode.RESOURCE_EXHAUSTED
        assert called("TraceSetting", infer()).code() == grpc.StatusCode.UNIMPLEMENTED
        health = channel.unary_unary(
            "/grpc.health.v1.Health/Check",
            request_serializer=lambda m: m.SerializeToString(),
            response_deserializer=health_pb2.HealthCheckResponse.FromString,
        )
        assert health(health_pb2.HealthCheckRequest(), timeout=30).status == 1


def test_every_message_has_the_numbers_and_types_of_the_official_protocol() -> None:
    ours = [descriptors().FindFileByName("inference.proto")]
    official = [model_config_pb2.DESCRIPTOR, service_pb2.DESCRIPTOR]
    known = _fields(official)
    for name, fields in _fields(ours).items():
        assert fields.items() <= known[name].items(), name
    theirs = service_pb2.DESCRIPTOR.services_by_name["GRPCInferenceService"].methods_by_name
    for name, method in descriptors().FindServiceByName(INFERENCE).methods_by_name.items():
        assert method.input_type.full_name == theirs[name].input_type.full_name
        assert method.output_type.full_name == theirs[name].output_type.full_name


def _fields(files: list[Any]) -> dict[str, dict[int, Any]]:
    found: dict[str, dict[int, Any]] = {}

    def add(prefix: str, described: Any) -> None:
        name = f"{prefix}.{described.name}"
        found[name] = {
            field.number: (field.name, field.type, field.label, field.type_name) for field in described.field
        }
        for nested in described.nested_type:
            add(name, nested)

    for file in files:
        proto = descriptor_pb2.FileDescriptorProto()
        file.CopyToProto(proto)
        for described in proto.message_type:
            add(f".{proto.package}", described)
    return found


def request(datatype: str, shape: list[int], *, raw: bytes | None = None, **contents: Any) -> Any:
    made = message("inference.ModelInferRequest")()
    made.inputs.add(name="x", datatype=datatype, shape=shape)
    if contents:
        filled = message("inference.InferTensorContents")(**contents)
        made.inputs[0].contents.CopyFrom(filled)
    if raw is not None:
        made.raw_input_contents.append(raw)
    return made


def asked(made: Any) -> InferRequest:
    """What the server makes of a message's bytes."""
    sent = InferMessage(made.SerializeToString())
    return request_from(sent.parsed(), sent.raw)


def test_tensors_as_values_and_as_bytes_are_the_same_arrays() -> None:
    for datatype, field, dtype in [
        ("INT8", "int_contents", "int8"),
        ("UINT16", "uint_contents", "uint16"),
        ("INT64", "int64_contents", "int64"),
        ("UINT64", "uint64_contents", "uint64"),
        ("FP32", "fp32_contents", "float32"),
        ("FP64", "fp64_contents", "float64"),
    ]:
        array = np.array([[1, 2], [3, 4]], dtype)
        by_value = asked(request(datatype, [2, 2], **{field: array.ravel().tolist()}))
        by_bytes = asked(request(datatype, [2, 2], raw=array.tobytes()))
        for made in (by_value, by_bytes):
            assert made.inputs["x"].dtype == array.dtype
            assert np.array_equal(made.inputs["x"], array)
    texts = asked(request("BYTES", [2], bytes_contents=[b"a", b"bc"]))
    assert texts.inputs["x"].tolist() == [b"a", b"bc"]


@pytest.mark.parametrize(
    ("made", "told"),
    [
        (request("FP16", [1], fp32_contents=[1.0]), "raw_input_contents"),
        (request("FP32", [2], fp32_contents=[1.0]), "1 values"),
        (request("FP32", [3], raw=b"1234"), "1 values"),
        (request("FP32", [1], raw=b"123"), "whole number"),
        (request("INT8", [1], int_contents=[300]), "out of range"),
        (request("FLOAT", [1], raw=b"1234"), "unknown datatype"),
        (request("FP32", [-1], raw=b"1234"), "shape"),
        (request("FP32", [1 << 39, 1 << 39], fp32_contents=[1.0]), "needs"),
        (request("BYTES", [1], raw=b"\xff\xff\xff\xff"), "middle of a value"),
        (message("inference.ModelInferRequest")(), "needs inputs"),
    ],
)
def test_a_message_that_is_none_is_refused_with_a_sentence(made: Any, told: str) -> None:
    with pytest.raises(Problem, match=told):
        asked(made)


def test_calls_need_keys_and_keys_hold_for_their_models_only(tmp_path: Path) -> None:
    om = Store(tmp_path / "store")
    om.models.put(constant(1.0), "net")
    om.models.put(constant(2.0), "team/net")
    om.close()
    keys = Keys(str(tmp_path / "store"))
    limited = keys.add(["predict"], names={"models": ["team/*"]})[1]
    admin = keys.add(["admin"])[1]
    keys.close()
    with (
        serving(tmp_path / "store", "--grpc-port", "0") as served,
        triton.InferenceServerClient(served.grpc) as client,
    ):
        assert client.is_server_live()

        def asked(name: str, key: str = "") -> float:
            headers = {"authorization": f"Bearer {key}"} if key else {}
            return float(client.infer(name, [tensor(ROWS)], headers=headers).as_numpy("predict")[0])

        assert asked("team/net", limited) == 2.0
        for name, key, code in [
            ("team/net", "", "UNAUTHENTICATED"),
            ("team/net", limited[:-1] + "x", "UNAUTHENTICATED"),
            ("net", limited, "PERMISSION_DENIED"),
            ("net@1", limited, "PERMISSION_DENIED"),
        ]:
            with pytest.raises(triton.InferenceServerException) as caught:
                asked(name, key)
            assert caught.value.status() == f"StatusCode.{code}"
        with pytest.raises(triton.InferenceServerException, match="this needs admin"):
            client.unload_model("team/net", headers={"x-api-key": limited})
        client.unload_model("team/net", headers={"x-api-key": admin})
        assert asked("net", admin) == 1.0
        assert served.stop() == 0


def test_raw_tensors_are_taken_out_of_a_message_and_the_rest_is_what_it_was() -> None:
    made = message("inference.ModelInferRequest")(model_name="net", id="7")
    made.inputs.add(name="x", datatype="FP32", shape=[1]).parameters["a"].int64_param = 1 << 40
    made.raw_input_contents.extend([b"1234", b"", b"x" * 300])
    sent = InferMessage(made.SerializeToString())
    assert [bytes(one) for one in sent.raw] == list(made.raw_input_contents)
    del made.raw_input_contents[:]
    assert sent.parsed() == made
    assert (sent.without_tensors().id, len(sent.without_tensors().inputs)) == ("7", 0)


@pytest.mark.parametrize(
    "content",
    [
        b"\x3a\x05abc",
        b"\x3a",
        b"\x0b",
        b"\xff" * 20,
        b"\x08" + b"\xff" * 20,
        b"\x2a\x00" * 20_000,
        b"\x0a\x01\xff",
    ],
)
def test_bytes_that_are_no_message_are_a_problem_of_the_sender(content: bytes) -> None:
    with pytest.raises(Problem, match="cannot be read"):
        InferMessage(content).parsed()


def test_a_message_of_many_small_tensors_is_read_and_one_of_empty_fields_is_not() -> None:
    made = message("inference.ModelInferRequest")(model_name="net")
    for i in range(2000):
        made.inputs.add(name=f"{i}", datatype="BOOL", shape=[1])
        made.raw_input_contents.append(b"1")
    assert len(InferMessage(made.SerializeToString()).raw) == 2000
    for field in (b"\x2a\x00", b"\x3a\x00"):
        with pytest.raises(Problem, match="256 fields in its first 512 bytes"):
            InferMessage(field * 300)


def test_a_client_with_more_calls_than_a_connection_takes_at_a_time_gets_all_answers(served: Served) -> None:
    made = message("inference.ModelInferRequest")(model_name="net")
    made.inputs.add(name="x", datatype="FP64", shape=[2, 3])
    made.raw_input_contents.append(np.array(ROWS).tobytes())
    content = made.SerializeToString()

    answers: list[bytes] = []

    async def ask() -> None:
        async with grpc.aio.insecure_channel(served.grpc) as channel:
            call = channel.unary_unary(f"/{INFERENCE}/ModelInfer")

            async def one_after_the_other() -> None:
                answers.extend([await call(content, timeout=120) for _ in range(5)])

            await asyncio.gather(*(one_after_the_other() for _ in range(400)))

    asyncio.run(ask())
    assert len(answers) == 2000
    found = {
        message("inference.ModelInferResponse").FromString(one).raw_output_contents[0] for one in answers
    }
    assert all(np.allclose(np.frombuffer(content), expected(ROWS)) for content in found)


def test_threads_that_read_what_strangers_send_come_after_the_rest_of_the_server(
    served: Served, client: Any
) -> None:
    assert client.is_server_live()
    threads = list(Path(f"/proc/{served.process.pid}/task").glob("*"))
    engine = [int(one.name) for one in threads if (one / "comm").read_text().startswith("event_engine")]
    assert 10 in {os.getpriority(os.PRIO_PROCESS, number) for number in engine}
    assert os.getpriority(os.PRIO_PROCESS, served.process.pid) == 0


def test_large_messages_packed_ones_and_large_answers_pass(served: Served) -> None:
    rows = np.random.default_rng(0).normal(size=(40_000, 3))
    made = message("inference.ModelInferRequest")(model_name="net")
    made.inputs.add(name="x", datatype="FP64", shape=rows.shape)
    made.raw_input_contents.append(rows.tobytes())
    for compression in (grpc.Compression.NoCompression, grpc.Compression.Gzip, grpc.Compression.Deflate):
        with grpc.insecure_channel(served.grpc, compression=compression) as channel:
            call = channel.unary_unary(
                f"/{INFERENCE}/ModelInfer",
                request_serializer=lambda m: m.SerializeToString(),
                response_deserializer=message("inference.ModelInferResponse").FromString,
            )
            reply = call(made, timeout=60)
        assert np.allclose(np.frombuffer(reply.raw_output_contents[0]), expected(rows))


def test_messages_that_become_much_larger_are_read_elsewhere_or_refused(served: Served) -> None:
    server = psutil.Process(served.process.pid)
    made = message("inference.ModelInferRequest")(model_name="net")
    tensor = made.inputs.add(name="x", datatype="INT64", shape=[1, 900_000])
    tensor.contents.int64_contents.extend([1] * 900_000)
    many = made.SerializeToString()
    texts = message("inference.ModelInferRequest")(model_name="net")
    texts.inputs.add(name="x", datatype="BYTES", shape=[1, 200_000])
    texts.raw_input_contents.append(struct.pack("<I", 0) * 200_000)
    with grpc.insecure_channel(served.grpc) as channel:
        call = channel.unary_unary(f"/{INFERENCE}/ModelInfer")
        with pytest.raises(grpc.RpcError, match="needs inputs"):
            call(b"\x0a\x03net", timeout=60)  # the model is loaded
        before = server.memory_info().rss
        for content, told in [
            (b"\x0a\x03net" + b"\x2a\x00" * 400_000, "256 fields"),
            (b"\x0a\x03net" + b"\x2a\x05\x0a\x03abc" * 130_000, "more than"),
            (b"\x0a\x03net" + b"\x2a\x05\x0a\x03abc" * 9_000, "twice|unknown datatype"),
            (many, "shape"),
            (texts.SerializeToString(), "shape|text"),
        ]:
            with pytest.raises(grpc.RpcError, match=told) as caught:
                call(content, timeout=60)
            assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT
        assert server.memory_info().rss - before < 40 << 20


def test_health_and_reflection_are_those_of_grpc_itself(served: Served) -> None:
    with grpc.insecure_channel(served.grpc) as channel:
        health = health_pb2_grpc.HealthStub(channel)
        assert health.Check(health_pb2.HealthCheckRequest(), timeout=30).status == 1
        assert health.Check(health_pb2.HealthCheckRequest(service=INFERENCE), timeout=30).status == 1
        with pytest.raises(grpc.RpcError, match="unknown service 'other'"):
            health.Check(health_pb2.HealthCheckRequest(service="other"), timeout=30)
        watched = health.Watch(health_pb2.HealthCheckRequest(), timeout=30)
        assert next(watched).status == 1
        watched.cancel()
        known = ProtoReflectionDescriptorDatabase(channel)
        assert set(known.get_services()) >= {INFERENCE, "grpc.health.v1.Health"}
        found = known.FindFileContainingSymbol(INFERENCE)
        assert [service.name for service in found.service] == ["GRPCInferenceService"]
