# Copyright: the Metalserve authors
# SPDX-License-Identifier: Apache-2.0
"""An OpenAI server in front of Triton, for the lab: it stands where vendors' images have theirs and takes its arguments.

It starts tritonserver on loopback ports and translates: completions and chat completions, whole or streamed, to Triton's
generate endpoints; the list of models; load and unload. It ends when tritonserver ends, and ends it when it is told to.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import importlib
import json
import os
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import grpc
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

TRITON = "/opt/tritonserver"
SAMPLING = (
    "max_tokens",
    "temperature",
    "top_p",
    "top_k",
    "min_tokens",
    "stop",
    "seed",
    "ignore_eos",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
)
"""Fields of an OpenAI request that are vLLM's sampling parameters of the same name."""

MOST_NAME = 127
NOT_HERE = ("logprobs", "tools", "response_format", "suffix", "echo")


class RefusedError(Exception):
    """A request that cannot be answered: status and sentence."""

    def __init__(self, status: int, text: str) -> None:
        """Keep both."""
        super().__init__(text)
        self.status = status


def free_port() -> int:
    """Return a port of the loopback interface that nobody has."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Triton:
    """The tritonserver process and its HTTP side."""

    def __init__(self, given: argparse.Namespace) -> None:
        """Start it."""
        self.http, self.grpc, self.metrics = free_port(), free_port(), free_port()
        command = [
            f"{TRITON}/bin/tritonserver",
            f"--model-repository={given.model_repository}",
            f"--backend-directory={TRITON}/backends",
            f"--model-control-mode={given.model_control_mode}",
            *(f"--load-model={name}" for name in given.load_model),
            "--http-address=127.0.0.1",
            f"--http-port={self.http}",
            "--metrics-address=127.0.0.1",
            f"--metrics-port={self.metrics}",
            "--grpc-address=127.0.0.1",
            f"--grpc-port={self.grpc}",
            f"--exit-timeout-secs={given.exit_timeout_s}",
        ]
        self.process = subprocess.Popen(command)
        self.session: aiohttp.ClientSession | None = None

    def url(self, path: str) -> str:
        """Return the address of a path of its HTTP side."""
        return f"http://127.0.0.1:{self.http}{path}"

    @property
    def client(self) -> aiohttp.ClientSession:
        """The connections to it."""
        if self.session is None:
            self.session = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None, sock_connect=5))
        return self.session

    async def post(self, path: str, body: Any) -> tuple[int, Any]:
        """Return (status, JSON) of a POST."""
        async with self.client.post(self.url(path), json=body) as answer:
            text = await answer.text()
            return answer.status, json.loads(text) if text else {}

    async def control(self, name: str, action: str) -> str:
        """Load or unload a model; returns what is wrong, "" when it is done.

        Over gRPC, which has threads of its own: the HTTP side waits for a load in the thread that other requests'
        answers go through, and those that are in flight would wait with it.
        """
        word = name.encode("utf-8")
        method = f"/inference.GRPCInferenceService/RepositoryModel{action.capitalize()}"
        async with grpc.aio.insecure_channel(f"127.0.0.1:{self.grpc}") as channel:
            # The message has one field, the second, a text: the model's name.
            call = channel.unary_unary(method)
            try:
                await call(b"\x12" + bytes([len(word)]) + word)
            except grpc.RpcError as error:
                return str(error.details())
        return ""

    async def models(self) -> list[dict[str, Any]]:
        """Return the versions of models that answer."""
        _status, index = await self.post("/v2/repository/index", {"ready": True})
        return [item for item in index if item.get("state") == "READY"]


class Server:
    """The OpenAI side."""

    def __init__(self, given: argparse.Namespace, triton: Triton) -> None:
        """Keep Triton and where the tokenizer is."""
        self.triton = triton
        self.tokenizer_path = given.tokenizer
        self.created = int(time.time())
        self._tokenizer: Any = None

    def prompt_of(self, messages: list[dict[str, Any]]) -> str:
        """Return the prompt that a conversation makes with the model's own template."""
        if self._tokenizer is None:
            # Only a chat needs it, and the import takes seconds.
            self._tokenizer = importlib.import_module("transformers").AutoTokenizer.from_pretrained(self.tokenizer_path)
        return str(self._tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))

    async def health(self, _request: Request) -> Response:
        """Say 200 while a model answers: Triton itself is not ready as soon as any version is being loaded."""
        with contextlib.suppress(aiohttp.ClientError, OSError, ValueError):
            if await self.triton.models():
                return PlainTextResponse("")
        return PlainTextResponse("", 503)

    async def metrics(self, _request: Request) -> Response:
        """Hand Triton's metrics on."""
        async with self.triton.client.get(f"http://127.0.0.1:{self.triton.metrics}/metrics") as answer:
            return PlainTextResponse(await answer.text(), answer.status)

    async def models(self, _request: Request) -> Response:
        """List what is loaded, each model once."""
        names = sorted({item["name"] for item in await self.triton.models()})
        data = [{"id": name, "object": "model", "created": self.created, "owned_by": "triton"} for name in names]
        return JSONResponse({"object": "list", "data": data})

    async def control(self, request: Request) -> Response:
        """Load a model, which takes the newest version in the repository, or unload it."""
        name, action = request.path_params["name"], request.path_params["action"]
        if action not in ("load", "unload"):
            return failure(404, f"{action} is nothing to do with a model")
        if len(name) > MOST_NAME:
            return failure(400, "the name is too long")
        problem = await self.triton.control(name, action)
        return failure(400, problem) if problem else JSONResponse({})

    async def completions(self, request: Request) -> Response:
        """Answer /v1/completions."""
        return await self._answer(request, chat=False)

    async def chat(self, request: Request) -> Response:
        """Answer /v1/chat/completions."""
        return await self._answer(request, chat=True)

    async def _answer(self, request: Request, chat: bool) -> Response:
        try:
            body = await request.json()
            if not isinstance(body, dict):
                raise RefusedError(400, "the body must be a JSON object")
            inputs = self._inputs(body, chat)
            path = f"/v2/models/{body['model']}/generate"
            about = {
                "id": f"{'chatcmpl' if chat else 'cmpl'}-{uuid.uuid4().hex}",
                "created": int(time.time()),
                "model": body["model"],
            }
            if not body.get("stream"):
                return await self._whole(path, inputs, about, chat)
            answer = await self.triton.client.post(self.triton.url(f"{path}_stream"), json={**inputs, "stream": True})
            if answer.status != 200:
                text = await answer.text()
                answer.release()
                raise refused(answer.status, text)
            usage = bool((body.get("stream_options") or {}).get("include_usage"))
            return StreamingResponse(parts(answer, about, chat, usage), media_type="text/event-stream")
        except RefusedError as error:
            return failure(error.status, str(error))
        except ValueError as error:
            return failure(400, str(error))

    def _inputs(self, body: dict[str, Any], chat: bool) -> dict[str, Any]:
        """Return the tensors of a request. Raises RefusedError."""
        if not isinstance(body.get("model"), str):
            raise RefusedError(400, "model is missing")
        for name in NOT_HERE:
            if body.get(name):
                raise RefusedError(400, f"{name} is not served here")
        if int(body.get("n") or 1) != 1:
            raise RefusedError(400, "n must be 1")
        if chat:
            prompt = self.prompt_of(body.get("messages") or [])
        else:
            given = body.get("prompt")
            prompt = given[0] if isinstance(given, list) and len(given) == 1 else given
            if not isinstance(prompt, str):
                raise RefusedError(400, "prompt must be one text")
        sampling = {name: body[name] for name in SAMPLING if body.get(name) is not None}
        if body.get("max_completion_tokens"):
            sampling["max_tokens"] = body["max_completion_tokens"]
        return {
            "text_input": prompt,
            "stream": False,
            "exclude_input_in_output": True,
            "sampling_parameters": json.dumps({"max_tokens": 256 if chat else 16, **sampling}),
        }

    async def _whole(self, path: str, inputs: dict[str, Any], about: dict[str, Any], chat: bool) -> Response:
        status, answer = await self.triton.post(path, inputs)
        if status != 200:
            raise refused(status, str(answer.get("error", answer)))
        text = answer["text_output"]
        choice = {"index": 0, "finish_reason": answer["finish_reason"], "logprobs": None}
        choice.update({"message": {"role": "assistant", "content": text}} if chat else {"text": text})
        return JSONResponse(
            {
                **about,
                "object": "chat.completion" if chat else "text_completion",
                "system_fingerprint": f"version-{answer['model_version']}",
                "choices": [choice],
                "usage": usage_of(answer["num_input_tokens"], answer["num_output_tokens"]),
            }
        )


def usage_of(prompt: int, answer: int) -> dict[str, int]:
    """Return OpenAI's count of tokens."""
    return {"prompt_tokens": prompt, "completion_tokens": answer, "total_tokens": prompt + answer}


def refused(status: int, text: str) -> RefusedError:
    """Return Triton's refusal as OpenAI's: an unknown model is a 404 there."""
    return RefusedError(404 if "is not found" in text or "unknown model" in text else status, text)


def failure(status: int, text: str) -> Response:
    """Return an error as OpenAI writes it."""
    return JSONResponse({"error": {"message": text, "type": "invalid_request_error", "code": status}}, status)


async def starting(_request: Request, _error: Exception) -> Response:
    """Say that Triton does not listen yet."""
    return failure(503, "Triton is starting")


async def parts(answer: Any, about: dict[str, Any], chat: bool, usage: bool) -> AsyncIterator[str]:
    """Yield a streamed answer as server-sent events of an OpenAI server."""
    kind = "chat.completion.chunk" if chat else "text_completion"
    fingerprint = ""

    def event(choices: list[dict[str, Any]], **more: Any) -> str:
        head = {**about, "object": kind, "system_fingerprint": fingerprint}
        return f"data: {json.dumps({**head, 'choices': choices, **more})}\n\n"

    def choice(text: str | None, reason: str | None) -> list[dict[str, Any]]:
        delta = {"content": text} if text else {}
        content: dict[str, Any] = {"delta": delta} if chat else {"text": text or ""}
        return [{"index": 0, "finish_reason": reason, "logprobs": None, **content}]

    try:
        if chat:
            yield event([{"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}])
        counts = (0, 0)
        async for line in answer.content:
            if not line.startswith(b"data:"):
                continue
            part = json.loads(line[5:])
            if "error" in part:
                yield f"data: {json.dumps({'error': {'message': part['error'], 'code': 400}})}\n\n"
                break
            fingerprint = f"version-{part['model_version']}"
            reason = part["finish_reason"]
            counts = (part["num_input_tokens"], part["num_output_tokens"])
            yield event(choice(part["text_output"], None if reason == "None" else reason))
        if usage:
            yield event([], usage=usage_of(*counts))
        yield "data: [DONE]\n\n"
    finally:
        answer.close()


def arguments() -> argparse.Namespace:
    """Return the command line: that of the vendor's frontend, as far as the bundle uses it."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--model-repository", required=True)
    parser.add_argument("--backend", choices=["vllm"], default="vllm")
    parser.add_argument("--tokenizer", required=True)
    parser.add_argument("--host", default="0.0.0.0")
    parser.add_argument("--openai-port", type=int, default=9000)
    parser.add_argument("--model-control-mode", choices=["none", "explicit"], default="none")
    parser.add_argument("--load-model", action="append", default=[])
    parser.set_defaults(exit_timeout_s=30)
    return parser.parse_args()


async def serve(given: argparse.Namespace) -> int:
    """Serve until told to stop, or until tritonserver ends. Returns the exit code."""
    triton = Triton(given)
    server = Server(given, triton)
    app = Starlette(
        routes=[
            Route("/health/ready", server.health),
            Route("/metrics", server.metrics),
            Route("/v1/models", server.models),
            Route("/v1/models/{name}/{action}", server.control, methods=["POST"]),
            Route("/v1/completions", server.completions, methods=["POST"]),
            Route("/v1/chat/completions", server.chat, methods=["POST"]),
        ],
        exception_handlers={aiohttp.ClientConnectorError: starting},
    )
    web = uvicorn.Server(
        uvicorn.Config(app, host=given.host, port=given.openai_port, timeout_keep_alive=5, access_log=False)
    )

    async def watch() -> None:
        while triton.process.poll() is None:
            await asyncio.sleep(0.5)
        web.should_exit = True

    watcher = asyncio.create_task(watch())
    await web.serve()
    watcher.cancel()
    if triton.session is not None:
        await triton.session.close()
    early = triton.process.poll()
    if early is None:
        triton.process.terminate()
        await asyncio.to_thread(triton.process.wait)
        return 0
    print(f"tritonserver ended with {early}", file=sys.stderr)
    return early or 1


if __name__ == "__main__":
    os.environ["PATH"] = f"{os.path.dirname(sys.executable)}:{os.environ.get('PATH', '')}"
    sys.exit(asyncio.run(serve(arguments())))
