"""Real clients over loopback against the server, with a fake engine behind it."""

import asyncio
import time
from typing import Any

import grpc
import pytest
from google.protobuf import descriptor_pool, json_format, message_factory
from google.rpc import error_details_pb2, status_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import (
    ProtoReflectionDescriptorDatabase,
)
from grpc_status import rpc_status

from jaxserve import errors
from jaxserve.config.sections import Server
from jaxserve.errors import OverloadedError
from jaxserve.server import front_end, inference
from jaxserve.server import jaxserve_pb2 as pb
from jaxserve.server.grpc import GrpcServer
from jaxserve.server.inference import status_error
from jaxserve.server.rpc import InferenceStub
from jaxserve.text.generator import TextGenerator
from tests import golden
from tests.jaxserve.server.faces import SECONDS, Faces, first_delta, rpc_error
from tests.jaxserve.server.http.test_answers import asked
from tests.jaxserve.text.fake_engine import FakeEngine
from tests.jaxserve.text.letters import LETTERS, Verbose, ids_of
from tests.jaxserve.waiting import until

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


def test_answers(faces):
    """`golden/server/grpc_answers.txt` lists calls."""
    calls = {"Generate": pb.GenerateRequest, "Tokenize": pb.TokenizeRequest}

    def said(request: str) -> str:
        name, fields = request.split(" ", 1)
        faces.engine.params.clear()
        faces.engine.cached_tokens = 2
        made = json_format.Parse(fields, calls[name]())
        answer = getattr(faces.stub, name)(made, timeout=SECONDS)
        text = json_format.MessageToJson(answer, indent=None, preserving_proto_field_name=True)
        return "\n".join([text, *map(asked, faces.engine.prompts[-1:], faces.engine.params)])

    golden.check_each("server/grpc_answers.txt", said)
    too_long = pb.TokenizeRequest(text="x" * 200)
    assert rpc_error(faces.stub.Tokenize, too_long, timeout=SECONDS)[0] == "INVALID_ARGUMENT"


def test_a_stream_starts_with_the_prompt_and_ends_with_the_reason(faces):
    events = list(faces.stream(token_ids=pb.TokenIds(ids=[5, 6]), max_tokens=7, request_id="a"))
    assert events[0].prompt == pb.PromptInfo(request_id="a", prompt_tokens=2)
    assert not any(event.HasField("prompt") for event in events[1:])
    deltas = [event.delta for event in events]
    assert "".join(delta.text for delta in deltas) == "one two"
    assert [i for delta in deltas for i in delta.token_ids] == ids_of("one two")
    assert not any(event.HasField("finish") for event in events[:-1])
    assert events[-1].finish == pb.FinishInfo(
        reason=pb.FINISH_REASON_LENGTH, usage=pb.Usage(prompt_tokens=2, completion_tokens=7)
    )
    assert faces.engine.prompts == [[5, 6]]


def test_an_empty_completion(faces):
    faces.engine.script = []
    faces.engine.pace = 0.2  # so that the prompt's message has not waited for it
    events = list(faces.stream(text="hi"))
    parts = [[field.name for field, _ in event.ListFields()] for event in events]
    assert parts in ([["prompt"], ["finish"]], [["prompt", "finish"]])
    assert events[0].prompt.request_id != ""


def test_what_is_there_at_once_is_one_message(faces, monkeypatch):
    monkeypatch.setattr(inference, "ALONE_SECONDS", SECONDS)
    faces.engine.chunk = 100
    events = list(faces.stream(text="hi"))
    (parts,) = [[field.name for field, _ in event.ListFields()] for event in events]
    assert parts == ["prompt", "delta", "finish"]
    assert events[0].delta.text == "one two three"


def test_the_prompt_is_told_before_a_late_first_token(faces):
    faces.engine.allowed = 0
    call = faces.stream(text="hi", request_id="a")
    assert next(call).prompt == pb.PromptInfo(request_id="a", prompt_tokens=3)
    faces.engine.allowed = None
    assert "".join(event.delta.text for event in call) == "one two three"


def test_log_probabilities_of_a_stream(faces):
    """They are those of the whole answer, which `golden/server/grpc_answers.txt` has."""
    fields = {"text": "hi", "max_tokens": 3, "logprobs": 2, "prompt_logprobs": 1}
    answer = faces.generate(**fields)
    assert (len(answer.logprobs), len(answer.prompt_logprobs)) == (3, 3)
    deltas = [event.delta for event in faces.stream(**fields)]
    assert [one for delta in deltas for one in delta.logprobs] == list(answer.logprobs)
    prompt = [one for delta in deltas for one in delta.prompt_logprobs]
    assert prompt == list(answer.prompt_logprobs)


def test_model_info(faces):
    info = faces.stub.GetModelInfo(pb.GetModelInfoRequest(), timeout=SECONDS)
    known = {"jaxserve_version": "0.1.0", "eos_token_ids": [1], **faces.engine.model_info()}
    del known["layers"]
    assert {field.name: value for field, value in info.ListFields()} == known


def test_abort(faces):
    call = faces.begun(request_id="a")
    faces.stub.Abort(pb.AbortRequest(request_id="a"), timeout=SECONDS)
    assert rpc_error(list, call) == ("CANCELLED", "the request was aborted")
    assert faces.engine.wait_until_idle()
    code, _ = rpc_error(faces.stub.Abort, pb.AbortRequest(request_id="a"), timeout=SECONDS)
    assert code == "NOT_FOUND"


@pytest.mark.parametrize("how", ["cancels its stream", "cancels a unary call", "vanishes"])
def test_a_client_that_leaves_returns_the_pages(faces, how):
    faces.engine.allowed = 3
    request = pb.GenerateRequest(text="hi", request_id="a")
    with grpc.insecure_channel(faces.grpc_address) as channel:
        if how == "cancels a unary call":
            call = InferenceStub(channel).Generate.future(request, timeout=SECONDS)
            until(lambda: faces.engine.running)
        else:
            call = InferenceStub(channel).GenerateStream(request, timeout=SECONDS)
            first_delta(call)
        if how != "vanishes":
            call.cancel()
            assert faces.engine.wait_until_idle()
    assert faces.engine.wait_until_idle()
    assert faces.engine.cancelled == ["a"]
    faces.engine.allowed = None
    assert faces.generate(text="hi").text == "one two three"  # nobody else noticed


def test_the_server_itself_says_deadline_exceeded(faces, monkeypatch):
    """Where the engine gives up before the client's clock does."""
    faces.engine.allowed = 3
    submit = faces.generator.submit

    def hurried(*args, deadline, **kwargs):  # type: ignore[no-untyped-def]
        return submit(*args, deadline=deadline - (SECONDS - 0.1), **kwargs)

    monkeypatch.setattr(faces.generator, "submit", hurried)
    assert faces.grpc_error() == ("DEADLINE_EXCEEDED", "the deadline has passed")


def test_a_reader_that_stalls_is_dropped():
    """Other requests go on, its pages come back, and its queue stays bounded."""
    rig = Faces(tokenizer=Verbose("y" * 200_000), limits={"max_pending_tokens": 20})
    rig.engine.script = ids_of("x" * 90)
    rig.engine.pace = 0.001

    async def read_to_end(call: grpc.aio.UnaryStreamCall) -> None:
        while await call.read() is not grpc.aio.EOF:
            pass

    async def stall() -> grpc.aio.AioRpcError:
        options = [("grpc.http2.bdp_probe", 0), ("grpc.max_receive_message_length", 1 << 26)]
        async with grpc.aio.insecure_channel(rig.grpc_address, options=options) as channel:
            call = InferenceStub(channel).GenerateStream(pb.GenerateRequest(text="hi"))
            await call.read()
            assert await asyncio.to_thread(rig.engine.wait_until_idle, 10)
            assert rig.generator.live == 0
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await read_to_end(call)
            return caught.value

    error = asyncio.run(stall())
    assert error.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
    assert "the reader is too slow" in (error.details() or "")
    rig.close()


def test_a_bad_field_is_named(faces):
    """`golden/server/grpc_fields.txt` lists requests."""

    def said(fields: str) -> str:
        fields = fields.replace("x{70000}", "x" * 70000)
        fields = fields.replace('1025 * "x"', ", ".join(['"x"'] * 1025))
        request = json_format.Parse(fields, pb.GenerateRequest())
        with pytest.raises(grpc.RpcError) as caught:
            faces.stub.Generate(request, timeout=SECONDS)
        assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT
        named = error_details_pb2.BadRequest()
        assert rpc_status.from_call(caught.value).details[0].Unpack(named)
        assert caught.value.details().startswith(f"{named.field_violations[0].field}: ")
        assert faces.engine.prompts == []
        return caught.value.details()

    golden.check_each("server/grpc_fields.txt", said)


def test_refusals_are_counted_by_their_reason(faces):
    faces.generate(text="hi")
    faces.grpc_error(temperature=9)
    faces.grpc_error(text="")
    faces.engine.refusal = OverloadedError("full", retry_after_s=1)
    faces.grpc_error()
    text = faces.metrics.text().decode()
    for reason, count in (("invalid_value", 2), ("overloaded", 1)):
        sample = f'jaxserve:grpc_refusals_total{{model_name="fake",reason="{reason}"}} {count}.0'
        assert sample in text


def test_a_failed_engine_is_unavailable_and_not_healthy(faces, caplog):
    call = faces.begun(request_id="a1")
    faces.engine.fail("process 1 (ffn, host node-17, pid 4321) is gone")
    assert rpc_error(list, call) == ("UNAVAILABLE", "the engine failed; request a1")
    assert "request a1: process 1 (ffn, host node-17, pid 4321) is gone" in caplog.text
    assert faces.grpc_error(request_id="a2") == ("UNAVAILABLE", "the engine failed; request a2")
    health = health_pb2_grpc.HealthStub(faces.channel)
    assert health.Check(health_pb2.HealthCheckRequest()).status == NOT_SERVING


def test_two_thousand_streams_at_once(faces):
    """gRPC's own default cancels some of more than 1,000 RPCs that wait to be taken up."""
    faces.engine.script = ids_of("a")

    async def text(stub: InferenceStub) -> str:
        call = stub.GenerateStream(pb.GenerateRequest(text="hi"))
        return "".join([event.delta.text async for event in call])

    async def many() -> list[str]:
        async with grpc.aio.insecure_channel(faces.grpc_address) as channel:
            stub = InferenceStub(channel)
            return await asyncio.gather(*(text(stub) for _ in range(2000)))

    assert asyncio.run(many()) == ["a"] * 2000


def test_health_over_a_life():
    server = GrpcServer(Server(grpc_port=0))
    address = server.start()
    engine = FakeEngine(ids_of("one"))
    generator = TextGenerator(engine, LETTERS)
    with grpc.insecure_channel(address) as channel:
        health = health_pb2_grpc.HealthStub(channel)

        def status(service: str) -> int:
            request = health_pb2.HealthCheckRequest(service=service)
            return health.Check(request, timeout=SECONDS).status

        watch = health.Watch(health_pb2.HealthCheckRequest(service=""), timeout=SECONDS)
        assert next(watch).status == NOT_SERVING
        early = rpc_error(InferenceStub(channel).Generate, pb.GenerateRequest(), timeout=SECONDS)
        assert early == ("UNAVAILABLE", "the server is starting")
        server.open(generator)
        assert next(watch).status == SERVING
        assert status("jaxserve.v1.Inference") == SERVING
        assert rpc_error(status, "nobody")[0] == "NOT_FOUND"
        server.refuse()
        assert next(watch).status == NOT_SERVING
        assert status("jaxserve.v1.Inference") == NOT_SERVING
        start = time.monotonic()
        server.stop(10)  # a watcher does not hold the server up
        assert time.monotonic() - start < 5
    generator.close()
    engine.close()


def test_what_does_not_finish_in_time_is_cut_as_unavailable(faces):
    call = faces.begun()
    faces.refuse()
    assert faces.engine.drain(0.1) is False
    faces.engine.close()
    code, details = rpc_error(list, call)
    assert code == "UNAVAILABLE"
    assert "shut down before the request was complete" in details


def test_reflection_is_enough_for_a_client_without_stubs(faces):
    """Asks for the services, builds the messages and calls, like grpcurl."""
    database = ProtoReflectionDescriptorDatabase(faces.channel)
    assert {"grpc.health.v1.Health", "jaxserve.v1.Inference"} < set(database.get_services())
    pool = descriptor_pool.DescriptorPool(database)
    service = pool.FindServiceByName("jaxserve.v1.Inference")
    methods = [method.name for method in service.methods]
    assert methods == ["Generate", "GenerateStream", "Tokenize", "Abort", "GetModelInfo"]
    method = service.FindMethodByName("Generate")
    request = message_factory.GetMessageClass(method.input_type)(text="hi", max_tokens=3)
    answer = message_factory.GetMessageClass(method.output_type)
    call = faces.channel.unary_unary(
        "/jaxserve.v1.Inference/Generate",
        request_serializer=type(request).SerializeToString,
        response_deserializer=answer.FromString,
    )
    assert call(request, timeout=SECONDS).text == "one"


@pytest.mark.parametrize("method", ["Generate", "Tokenize", "Abort", "GetModelInfo"])
def test_a_body_that_is_no_message(faces, method, caplog):
    call: Any = faces.channel.unary_unary(f"/jaxserve.v1.Inference/{method}")
    code, details = rpc_error(call, b"\xff" * 20, timeout=SECONDS)
    assert (code, details) == ("INVALID_ARGUMENT", "request: the body is no message of this RPC")
    assert not caplog.records


def test_statuses() -> None:
    def said(error: str) -> str:
        made = status_error(eval(error, vars(errors) | vars(front_end) | vars(inference)), "r1")
        return f"{made.code.name}: {made.rich_status().details}"

    golden.check_each("server/statuses.txt", said)


def test_the_delay_is_a_detail() -> None:
    error = status_error(OverloadedError("full", retry_after_s=2.5), "r1")
    ((key, value),) = error.rich_status().trailing_metadata
    assert key == "grpc-status-details-bin"
    retry = error_details_pb2.RetryInfo()
    assert status_pb2.Status.FromString(value).details[0].Unpack(retry)
    assert (retry.retry_delay.seconds, retry.retry_delay.nanos) == (2, 500_000_000)
