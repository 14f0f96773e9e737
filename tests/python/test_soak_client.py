"""The clients of tools/soak.py: whatever a server answers is a fault of that request, and ends no soak."""

import asyncio
import json

import pytest

web = pytest.importorskip("aiohttp.web", reason="comes with vLLM")

import aiohttp  # noqa: E402

from tools.soaking.client import perform  # noqa: E402
from tools.soaking.plan import Action, BadBody, Job, Kind  # noqa: E402
from tools.soaking.server import Server, free_port  # noqa: E402

JOB = Job((1, 2, 3), 2)
LOGPROBS = {"token_logprobs": [-0.5, -0.25], "top_logprobs": [{"a": -0.5, "b": -1.0}, {"a": -0.25, "b": -3.0}]}
WHOLE = {"choices": [{"token_ids": [7, 8], "logprobs": LOGPROBS}]}


def outcome_of(action, answer):
    """What comes of an action at a server that answers every request with this; None: nobody listens."""

    async def handle(request):
        if isinstance(answer, dict | list):
            return web.json_response(answer)
        return web.Response(text=answer)

    async def run():
        port = free_port()
        if answer is not None:
            app = web.Application()
            app.router.add_post("/v1/completions", handle)
            runner = web.AppRunner(app)
            await runner.setup()
            await web.TCPSite(runner, "127.0.0.1", port).start()
        try:
            async with aiohttp.ClientSession() as session:
                return await perform(Server(f"http://127.0.0.1:{port}", "m", session, None), action)
        finally:
            if answer is not None:
                await runner.cleanup()

    return asyncio.run(run())


@pytest.mark.parametrize(
    "answer",
    [
        None,
        {},
        [],
        {"choices": []},
        {"choices": [{"token_ids": [7, 8], "logprobs": None}]},
        {"choices": [{"token_ids": [7], "logprobs": {"token_logprobs": [-1.0], "top_logprobs": [{"a": -1.0}]}}]},
        {"choices": [{"token_ids": [7], "logprobs": {"token_logprobs": [-0.5], "top_logprobs": []}}]},
        "no JSON",
    ],
)
def test_an_answer_that_is_none_is_a_fault(answer):
    found = outcome_of(Action(Kind.ANSWER, (JOB,)), answer)
    assert found.answer is None and found.fault.startswith("answer, 3 + 2 tokens: ")


def test_a_whole_answer_is_taken_streamed_or_not():
    found = outcome_of(Action(Kind.ANSWER, (JOB,)), WHOLE)
    assert found.fault is None and found.answer.tokens == [7, 8] and found.answer.gaps == [0.5, 2.75]
    logprobs = {"token_logprobs": [-1], "top_logprobs": [{"a": -1, "b": -2}]}
    piece = json.dumps({"choices": [{"token_ids": [7], "logprobs": logprobs}]})
    found = outcome_of(Action(Kind.STREAM, (JOB,)), f"data: {piece}\n\ndata: [DONE]\n\n")
    assert found.fault == "stream, 3 + 2 tokens: 1 tokens came"


def test_a_stream_that_tells_an_error_is_a_fault():
    found = outcome_of(Action(Kind.STREAM, (JOB,)), 'data: {"error": "engine is dead"}\n\n')
    assert found.fault == "stream, 3 + 2 tokens: KeyError: 'choices'"


def test_a_client_that_finds_no_server_is_a_fault_and_one_that_is_killed_is_none():
    action = Action(Kind.KILLED, (JOB, JOB), patience=0.2)
    assert "the client ended by itself, with 1" in outcome_of(action, None).fault
    assert outcome_of(action, WHOLE).fault is None


def test_a_bad_body_must_be_refused():
    action = Action(Kind.BAD, bad=BadBody("nothing", b""))
    assert outcome_of(action, WHOLE).fault.startswith("bad, nothing: RuntimeError: HTTP 200, expected (400,)")
