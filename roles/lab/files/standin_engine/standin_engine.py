#!/usr/bin/env python3
# Copyright: the Metalserve authors
# SPDX-License-Identifier: Apache-2.0
"""A stand-in for vLLM's OpenAI server: ready at once, the same endpoints, metrics and drain, and faults on demand.

Faults come from METALSERVE_STANDIN_FAULT at the start, or at any time from a control endpoint on 127.0.0.1, port
METALSERVE_STANDIN_CONTROL_PORT (default: the server's port + 10000): GET / shows the state, POST / with
``{"fault": "slow", "factor": 20}`` changes it. Faults:

    none           answers as it should
    crash          the process ends with status 1 while it starts
    silent_start   the process stays up and nothing listens
    garbage        answers that mean nothing
    slow           everything takes ``factor`` times as long
    wedge          /health says 200, requests are taken, and no token ever comes
    oom            the first completion ends the process with status 137, as the kernel's killer would
    error          every completion answers 500
    reject         every completion answers 503, and is counted as an admission rejection
    reject_stream  the same, but a stream answers 200 and then an error event
    truncate       a stream is cut in its middle

Speed: METALSERVE_STANDIN_STEP_S (0.004), METALSERVE_STANDIN_PREFILL_TOKENS_PER_S (20000),
METALSERVE_STANDIN_LOAD_S (0.2).
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import sys
import time
import uuid
from dataclasses import dataclass, field
from typing import Any

import http11
from generation import Engine, Job, Observer, Speed, answer, count_tokens
from http11 import BadRequest, EventStream, Request, Response
from metrics import Metrics
from options import OptionError, parse_arguments

VERSION = os.environ.get("METALSERVE_STANDIN_VERSION", "0.32.0")
FAULTS = frozenset(
    ["none", "crash", "silent_start", "garbage", "slow", "wedge", "oom", "error", "reject", "reject_stream", "truncate"]
)
GUARDED = ("/v1", "/v2", "/inference", "/cohere")
"""Only these paths ask for the API key."""
UNCOUNTED = frozenset(["/metrics", "/health", "/load", "/ping", "/version", "/server_info"])
"""Paths that the HTTP metrics leave out."""

log = logging.getLogger("standin")


class ApiError(Exception):
    """A request that is refused, with the server's own words for it."""

    def __init__(self, status: int, message: str, kind: str = "BadRequestError", param: str | None = None) -> None:
        """Keep status, type and parameter beside the message."""
        super().__init__(message)
        self.status = status
        self.kind = kind
        self.param = param

    def body(self) -> dict[str, Any]:
        """Return the OpenAI-style error."""
        return {"error": {"message": str(self), "type": self.kind, "param": self.param, "code": self.status}}


@dataclass
class Settings:
    """What the command line and the environment say, as numbers."""

    model: str = "standin"
    served_names: list[str] = field(default_factory=list)
    host: str = "0.0.0.0"
    port: int = 8000
    api_keys: list[str] = field(default_factory=list)
    max_model_len: int = 2048
    max_queued_requests: int = 0
    max_queued_tokens: int = 0
    shutdown_timeout_s: float = 0.0
    sse_keep_alive_s: float = 0.0
    keep_alive_s: float = 5.0
    load_tracking: bool = False
    speed: Speed = field(default_factory=Speed)

    @classmethod
    def from_options(cls, options: dict[str, Any], environment: dict[str, str]) -> Settings:
        """Read ``options`` (option -> text) and ``environment``. Raises OptionError."""

        def number(name: str, default: float) -> float:
            text = options.get(name)
            try:
                return default if text is None else float(text)
            except (TypeError, ValueError):
                raise OptionError(f"argument --{name.replace('_', '-')}: invalid value: {text!r}") from None

        model = str(options.get("model", "standin"))
        names = options.get("served_model_name", model)
        keys = options.get("api_key", environment.get("VLLM_API_KEY", ""))
        settings = cls(
            model=model,
            served_names=[names] if isinstance(names, str) else list(names),
            host=str(options.get("host", "0.0.0.0")),
            port=int(number("port", 8000)),
            api_keys=[key for key in ([keys] if isinstance(keys, str) else keys) if key],
            max_model_len=int(number("max_model_len", 2048)),
            max_queued_requests=int(number("max_num_queued_reqs", 0)),
            max_queued_tokens=int(number("max_num_queued_tokens", 0)),
            shutdown_timeout_s=number("shutdown_timeout", 0),
            sse_keep_alive_s=number("sse_keep_alive_interval", 0),
            keep_alive_s=float(environment.get("VLLM_HTTP_TIMEOUT_KEEP_ALIVE", "5")),
            load_tracking=bool(options.get("enable_server_load_tracking", False)),
        )
        settings.speed = Speed(
            step_s=float(environment.get("METALSERVE_STANDIN_STEP_S", "0.004")),
            prefill_tokens_per_s=float(environment.get("METALSERVE_STANDIN_PREFILL_TOKENS_PER_S", "20000")),
            max_num_seqs=int(number("max_num_seqs", 256)),
            max_num_batched_tokens=int(number("max_num_batched_tokens", 2048)),
        )
        if settings.speed.max_num_seqs < 1 or settings.max_model_len < 1:
            raise OptionError("max_num_seqs and max_model_len must be at least 1")
        return settings


class Recorder(Observer):
    """Turns what the scheduler reports into the metrics of the real engine."""

    def __init__(self, metrics: Metrics) -> None:
        """Write into ``metrics``."""
        self.metrics = metrics

    def step(self, tokens: int) -> None:
        """Note the size of one step."""
        self.metrics["vllm:iteration_tokens_total"].observe(tokens, engine="0")

    def token(self, job: Job, now: float) -> None:
        """Note one token and the time it took."""
        self.metrics["vllm:generation_tokens_total"].add(1, engine="0")
        if job.sent == 0:
            job.first_token = now
            self.metrics["vllm:time_to_first_token_seconds"].observe(now - job.arrived, engine="0")
            self.metrics["vllm:prompt_tokens_total"].add(job.prompt_tokens, engine="0")
            self.metrics["vllm:prompt_tokens_by_source_total"].add(
                job.prompt_tokens, engine="0", source="local_compute"
            )
            self.metrics["vllm:prefix_cache_queries_total"].add(job.prompt_tokens, engine="0")
        else:
            self.metrics["vllm:inter_token_latency_seconds"].observe(now - job.last_token, engine="0")
        job.last_token = now

    def finished(self, job: Job, reason: str) -> None:
        """Note a finished request."""
        now = time.monotonic()
        seen: dict[str, float] = {
            "vllm:e2e_request_latency_seconds": now - job.arrived,
            "vllm:request_queue_time_seconds": (job.scheduled or now) - job.arrived,
            "vllm:request_prompt_tokens": job.prompt_tokens,
            "vllm:request_generation_tokens": job.sent,
            "vllm:request_max_num_generation_tokens": job.max_tokens,
            "vllm:request_params_max_tokens": job.max_tokens,
            "vllm:request_params_n": 1,
            "vllm:request_num_preemptions": 0,
            "vllm:request_prefill_kv_computed_tokens": job.prefilled,
        }
        if job.first_token:
            seen["vllm:request_prefill_time_seconds"] = job.first_token - job.scheduled
            seen["vllm:request_decode_time_seconds"] = now - job.first_token
            seen["vllm:request_inference_time_seconds"] = now - job.scheduled
            if job.sent > 1:
                seen["vllm:request_time_per_output_token_seconds"] = (now - job.first_token) / (job.sent - 1)
        for name, value in seen.items():
            self.metrics[name].observe(value, engine="0")
        self.metrics["vllm:request_success_total"].add(1, engine="0", finished_reason=reason)


class Server:
    """The HTTP face of the engine."""

    def __init__(self, settings: Settings, fault: str = "none") -> None:
        """Serve as ``settings`` say, with ``fault`` from the start."""
        self.settings = settings
        self.fault = fault
        self.factor = 20.0
        blocks = 8192
        self.metrics = Metrics(
            settings.served_names[0],
            settings.max_model_len,
            {
                "block_size": "16",
                "num_gpu_blocks": str(blocks),
                "kv_cache_size_tokens": str(blocks * 16),
                "kv_cache_max_concurrency": str(blocks * 16 / settings.max_model_len),
            },
        )
        self.kv_tokens = blocks * 16
        self.engine = Engine(settings.speed, Recorder(self.metrics))
        self.draining = False
        self.jobs: set[Job] = set()
        self.load = 0
        self.apply_fault(fault, self.factor)

    def apply_fault(self, fault: str, factor: float) -> None:
        """Make ``fault`` true from now on; "none" heals."""
        self.fault, self.factor = fault, factor
        self.engine.wedged = fault == "wedge"
        self.engine.slow_factor = factor if fault == "slow" else 1.0

    # --- connections -------------------------------------------------------------------------------------------

    async def connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve the requests of one client until it, or a bad request, ends the connection."""
        try:
            while True:
                request = await http11.read_request(reader, writer, self.settings.keep_alive_s)
                if request is None or not await self.serve(request, reader, writer):
                    break
        except BadRequest as error:
            writer.write(Response(error.status, str(error).encode(), "text/plain").encode(keep_alive=False))
        except ConnectionError:
            pass
        finally:
            writer.close()

    async def serve(self, request: Request, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """Answer one request; return whether the connection can carry another."""
        started = time.monotonic()
        path = request.path.partition("?")[0]
        handler = ROUTES.get((request.method, path))
        status, size = 500, 0
        try:
            if self.settings.api_keys and path.startswith(GUARDED) and not self._allowed(request):
                response: Response | None = Response(401, {"error": "Unauthorized"})
            elif handler is None:
                known = any(route == path for _, route in ROUTES)
                response = Response(
                    *((405, {"detail": "Method Not Allowed"}) if known else (404, {"detail": "Not Found"}))
                )
            else:
                response = await handler(self, request, reader, writer)
        except ApiError as error:
            response = Response(error.status, error.body())
        if response is None:  # a stream wrote its own answer
            status = 200
        else:
            encoded = response.encode(request.keep_alive)
            status, size = response.status, len(encoded)
            writer.write(encoded)
        await writer.drain()
        self._count(request, path if handler else "none", status, size, time.monotonic() - started)
        return request.keep_alive and not writer.is_closing()

    def _allowed(self, request: Request) -> bool:
        scheme, _, token = request.headers.get("authorization", "").partition(" ")
        return scheme.lower() == "bearer" and token in self.settings.api_keys

    def _count(self, request: Request, handler: str, status: int, size: int, seconds: float) -> None:
        if handler in UNCOUNTED:
            return
        metrics = self.metrics
        metrics["http_requests_total"].add(1, handler=handler, method=request.method, status=f"{status // 100}xx")
        metrics["http_request_size_bytes"].observe(len(request.body), handler=handler)
        metrics["http_response_size_bytes"].observe(size, handler=handler)
        metrics["http_request_duration_highr_seconds"].observe(seconds)
        metrics["http_request_duration_seconds"].observe(seconds, handler=handler, method=request.method)

    # --- plain endpoints ---------------------------------------------------------------------------------------

    async def get_health(self, *_: Any) -> Response:
        """The process is there; that is all a real engine says as well, also while it drains."""
        return Response(200)

    async def get_version(self, *_: Any) -> Response:
        """The version that this server stands in for."""
        return Response(200, {"version": VERSION})

    async def get_load(self, *_: Any) -> Response:
        """Requests inside, where the option asks to count them."""
        return Response(200, {"server_load": self.load if self.settings.load_tracking else 0})

    async def get_models(self, *_: Any) -> Response:
        """The names under which the model answers."""
        card = {"object": "model", "created": int(self.metrics.started), "owned_by": "vllm", "parent": None}
        data = [
            {"id": name, **card, "root": self.settings.model, "max_model_len": self.settings.max_model_len}
            for name in self.settings.served_names
        ]
        return Response(200, {"object": "list", "data": data})

    async def get_metrics(self, *_: Any) -> Response:
        """The engine's metrics, with the gauges as they are now."""
        running, waiting = len(self.engine.running), len(self.engine.waiting)
        metrics = self.metrics
        metrics["vllm:num_requests_running"].set(running, engine="0")
        metrics["vllm:num_requests_waiting"].set(waiting, engine="0")
        metrics["vllm:num_requests_waiting_by_reason"].set(waiting, engine="0", reason="capacity")
        used = sum(job.prefilled + job.sent for job in self.engine.running)
        metrics["vllm:kv_cache_usage_perc"].set(min(1.0, used / self.kv_tokens), engine="0")
        return Response(200, metrics.render(), "text/plain; version=0.0.4; charset=utf-8")

    async def post_tokenize(self, request: Request, *_: Any) -> Response:
        """Count the tokens of a prompt or of messages."""
        body = self._body(request)
        count = count_tokens(self._prompt(body, chat="messages" in body))
        return Response(
            200, {"count": count, "max_model_len": self.settings.max_model_len, "tokens": list(range(count))}
        )

    # --- completions -------------------------------------------------------------------------------------------

    async def post_completions(
        self, request: Request, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> Response | None:
        """POST /v1/completions."""
        return await self._complete(request, reader, writer, chat=False)

    async def post_chat(
        self, request: Request, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> Response | None:
        """POST /v1/chat/completions."""
        return await self._complete(request, reader, writer, chat=True)

    async def _complete(
        self, request: Request, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, chat: bool
    ) -> Response | None:
        if self.draining:
            raise ApiError(
                500, "EngineCore encountered an issue. See stack trace for the root cause.", "InternalServerError"
            )
        if self.fault == "error":
            raise ApiError(500, "Internal server error", "InternalServerError")
        if self.fault == "oom":
            log.error("out of memory")
            os._exit(137)
        body = self._body(request)
        prompt = self._prompt(body, chat)
        job = self._job(body, prompt, chat)
        stream = body.get("stream") is True
        rejected = self._rejection(job)
        if rejected:
            self.metrics["vllm:admission_rejections_total"].add(1, reason=rejected)
            error = ApiError(503, f"Request rejected: {rejected} limit reached.", "ServiceUnavailableError")
            if self.fault == "reject_stream" and stream:
                events = EventStream(writer, request.keep_alive)
                events.send(json.dumps(error.body()))
                events.send("[DONE]")
                events.end()
                return None
            raise error
        answerer = Answer(self, body, job, chat, request)
        self.jobs.add(job)
        self.load += 1
        self.engine.submit(job)
        gone = asyncio.ensure_future(self._abort_when_gone(reader, job))
        try:
            return await (answerer.stream(writer) if stream else answerer.whole())
        finally:
            gone.cancel()
            self.jobs.discard(job)
            self.load -= 1
            if job in self.engine.running or job in self.engine.waiting:
                self.engine.abort(job)

    async def _abort_when_gone(self, reader: asyncio.StreamReader, job: Job) -> None:
        """Abort ``job`` once its client has closed the connection."""
        while not reader.at_eof():
            await asyncio.sleep(0.5)
        self.engine.abort(job)

    def _body(self, request: Request) -> dict[str, Any]:
        try:
            body = json.loads(request.body)
        except (ValueError, UnicodeDecodeError) as error:
            raise ApiError(400, f"Invalid JSON: {error}", "BadRequestError") from None
        if not isinstance(body, dict):
            raise ApiError(400, "Input should be a valid dictionary")
        model = body.get("model")
        if model is not None and model not in self.settings.served_names:
            raise ApiError(404, f"The model `{model}` does not exist.", "NotFoundError", "model")
        return body

    def _prompt(self, body: dict[str, Any], chat: bool) -> str:
        if not chat:
            prompt = body.get("prompt")
            if isinstance(prompt, list) and prompt and all(isinstance(part, int) for part in prompt):
                return " ".join(str(part) for part in prompt)
            if isinstance(prompt, list) and len(prompt) == 1:
                prompt = prompt[0]
            if not isinstance(prompt, str) or not prompt:
                raise ApiError(400, "Either prompt or prompt_embeds must be provided and non-empty.", param="prompt")
            return prompt
        messages = body.get("messages")
        if not isinstance(messages, list) or not messages:
            raise ApiError(400, "messages: Field required", param="messages")
        lines = []
        for message in messages:
            if not isinstance(message, dict) or not isinstance(message.get("role"), str):
                raise ApiError(400, "messages: each needs a role and content", param="messages")
            content = message.get("content") or ""
            if isinstance(content, list):
                content = "".join(str(part.get("text", "")) for part in content if isinstance(part, dict))
            lines.append(f"{message['role']}: {content}")
        return "\n".join(lines)

    def _job(self, body: dict[str, Any], prompt: str, chat: bool) -> Job:
        wanted = body.get("max_completion_tokens") or body.get("max_tokens")
        if wanted is None and not chat:
            wanted = 16
        if wanted is not None and (isinstance(wanted, bool) or not isinstance(wanted, int) or wanted < 1):
            raise ApiError(400, f"max_tokens must be at least 1, got {wanted}.", param="max_tokens")
        tokens = count_tokens(prompt)
        limit = self.settings.max_model_len
        if tokens + (wanted or 1) > limit:
            raise ApiError(
                400,
                f"This model's maximum context length is {limit} tokens. However, you requested {wanted or 1} output "
                f"tokens and your prompt contains at least {tokens} input tokens.",
                param="input_tokens",
            )
        text, reason = answer(prompt, wanted, garbage=self.fault == "garbage")
        return Job(tokens, text, reason, wanted or limit - tokens)

    def _rejection(self, job: Job) -> str:
        """Return the name of the limit that ``job`` would break, or nothing."""
        if self.fault in ("reject", "reject_stream"):
            return "max_num_queued_reqs"
        inside = len(self.engine.running) + len(self.engine.waiting)
        if self.settings.max_queued_requests and inside >= self.settings.max_queued_requests:
            return "max_num_queued_reqs"
        queued = self.engine.queued_prompt_tokens() + job.prompt_tokens
        if self.settings.max_queued_tokens and queued > self.settings.max_queued_tokens:
            return "max_num_queued_tokens"
        return ""

    # --- control and end ---------------------------------------------------------------------------------------

    async def control(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """The endpoint for tests on the loopback address."""
        try:
            request = await http11.read_request(reader, writer, 5.0)
            if request is None:
                return
            status = 200
            if request.method == "POST":
                try:
                    wanted = json.loads(request.body)
                    fault, factor = str(wanted["fault"]), float(wanted.get("factor", self.factor))
                    if fault not in FAULTS:
                        raise ValueError(fault)
                    self.apply_fault(fault, factor)
                    log.info("fault is now %s", fault)
                except (ValueError, KeyError, TypeError):
                    status = 400
            state = {"fault": self.fault, "factor": self.factor, "in_flight": len(self.jobs), "draining": self.draining}
            writer.write(Response(status, {**state, "faults": sorted(FAULTS)}).encode(keep_alive=False))
            await writer.drain()
        except (BadRequest, ConnectionError):
            pass
        finally:
            writer.close()

    async def drain(self) -> None:
        """Let what is inside finish within the shutdown timeout; with a timeout of 0 abort it at once."""
        self.draining = True
        deadline = time.monotonic() + self.settings.shutdown_timeout_s
        while self.jobs and time.monotonic() < deadline:
            await asyncio.sleep(0.02)
        for job in list(self.jobs):
            self.engine.abort(job)
        await asyncio.sleep(0.05)


class Answer:
    """One completion on its way to the client."""

    def __init__(self, server: Server, body: dict[str, Any], job: Job, chat: bool, request: Request) -> None:
        """Answer ``body`` with the tokens of ``job``."""
        self.server = server
        self.job = job
        self.chat = chat
        self.request = request
        self.usage_wanted = bool((body.get("stream_options") or {}).get("include_usage"))
        self.model = body.get("model") or server.settings.served_names[0]
        name = request.headers.get("x-request-id") or uuid.uuid4().hex
        self.head = {
            "id": f"{'chatcmpl' if chat else 'cmpl'}-{name}",
            "object": ("chat.completion" if chat else "text_completion"),
            "created": int(time.time()),
            "model": self.model,
        }

    def usage(self) -> dict[str, int]:
        """Return the token counts."""
        prompt, completion = self.job.prompt_tokens, self.job.sent
        return {"prompt_tokens": prompt, "total_tokens": prompt + completion, "completion_tokens": completion}

    async def whole(self) -> Response:
        """Return the answer in one piece."""
        parts = []
        while (token := await self.job.events.get()) is not None:
            parts.append(token)
        if len(parts) < len(self.job.tokens):
            raise ApiError(500, "The request was aborted.", "InternalServerError")
        choice: dict[str, Any] = {"index": 0, "logprobs": None, "finish_reason": self.job.finish_reason}
        text = "".join(parts)
        choice.update({"message": {"role": "assistant", "content": text}} if self.chat else {"text": text})
        return Response(200, {**self.head, "choices": [choice], "usage": self.usage()})

    async def stream(self, writer: asyncio.StreamWriter) -> None:
        """Send the answer token by token."""
        events = EventStream(writer, self.request.keep_alive)
        kind = "chat.completion.chunk" if self.chat else "text_completion"
        base = {**self.head, "object": kind}

        def send(choices: list[dict[str, Any]], **more: Any) -> None:
            events.send(json.dumps({**base, "choices": choices, **more}, separators=(",", ":")))

        if self.chat:
            send([{"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}])
        sent = 0
        while True:
            token = await self._next(events)
            if token is None:
                break
            sent += 1
            reason = self.job.finish_reason if sent == len(self.job.tokens) else None
            piece = {"delta": {"content": token}} if self.chat else {"text": token}
            send([{"index": 0, **piece, "finish_reason": reason}])
            if self.server.fault == "truncate" and sent >= max(1, len(self.job.tokens) // 2):
                writer.transport.abort()
                raise ConnectionResetError("cut by the fault truncate")
            await writer.drain()
        if sent < len(self.job.tokens):
            writer.transport.abort()
            raise ConnectionResetError("aborted")
        if self.usage_wanted:
            send([], usage=self.usage())
        events.send("[DONE]")
        events.end()

    async def _next(self, events: EventStream) -> str | None:
        """Return the next token, with comment lines while it takes long where the option asks for them."""
        interval = self.server.settings.sse_keep_alive_s
        if interval <= 0:
            return await self.job.events.get()
        while True:
            try:
                return await asyncio.wait_for(self.job.events.get(), interval)
            except asyncio.TimeoutError:
                events.comment()


ROUTES: dict[tuple[str, str], Any] = {
    ("GET", "/health"): Server.get_health,
    ("GET", "/ping"): Server.get_health,
    ("POST", "/ping"): Server.get_health,
    ("GET", "/version"): Server.get_version,
    ("GET", "/load"): Server.get_load,
    ("GET", "/v1/models"): Server.get_models,
    ("GET", "/metrics"): Server.get_metrics,
    ("POST", "/tokenize"): Server.post_tokenize,
    ("POST", "/v1/completions"): Server.post_completions,
    ("POST", "/v1/chat/completions"): Server.post_chat,
}


async def serve(settings: Settings, fault: str, environment: dict[str, str]) -> int:
    """Run until a signal asks to stop; return the exit status."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    if fault == "silent_start":
        await stop.wait()
        return 0
    load_s = float(environment.get("METALSERVE_STANDIN_LOAD_S", "0.2"))
    log.info("Starting to load model %s...", settings.model)
    await asyncio.sleep(load_s)
    if fault == "crash":
        log.error("EngineCore failed to start.")
        log.error("RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}")
        return 1
    log.info("Model loading took 0.25 GiB memory and %.6f seconds", load_s)
    server = Server(settings, fault)
    log.info("GPU KV cache size: %s tokens", f"{server.kv_tokens:,}")
    log.info(
        "Maximum concurrency for %s tokens per request: %.2fx",
        f"{settings.max_model_len:,}",
        server.kv_tokens / settings.max_model_len,
    )
    scheduler = asyncio.ensure_future(server.engine.run())
    limit = http11.MAX_HEAD_BYTES
    listener = await asyncio.start_server(server.connection, settings.host, settings.port, limit=limit, backlog=2048)
    control_port = int(environment.get("METALSERVE_STANDIN_CONTROL_PORT", "0")) or settings.port + 10000
    control = await asyncio.start_server(server.control, "127.0.0.1", control_port)
    log.info("Started server process [%d]", os.getpid())
    log.info("Application startup complete.")
    await stop.wait()
    log.info("Shutting down")
    await server.drain()
    listener.close()
    control.close()
    scheduler.cancel()
    log.info("Finished server process [%d]", os.getpid())
    return 0


def main(arguments: list[str]) -> int:
    """Read the command line and serve; 2 for an option that the real server would refuse."""
    logging.basicConfig(
        level=logging.INFO,
        stream=sys.stdout,
        format="%(levelname)s %(asctime)s [standin_engine.py] %(message)s",
        datefmt="%m-%d %H:%M:%S",
    )
    fault = os.environ.get("METALSERVE_STANDIN_FAULT", "none")
    try:
        if fault not in FAULTS:
            raise OptionError(f"METALSERVE_STANDIN_FAULT={fault} is none of {', '.join(sorted(FAULTS))}")
        settings = Settings.from_options(parse_arguments(arguments), dict(os.environ))
    except OptionError as error:
        print(f"api_server.py: error: {error}", file=sys.stderr)
        return 2
    try:
        return asyncio.run(serve(settings, fault, dict(os.environ)))
    except OSError as error:
        log.error("%s:%s cannot be listened on: %s", settings.host, settings.port, error.strerror)
        return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
