"""An OpenAI-compatible endpoint on a real HTTP server, which answers requests as it is told."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Answer = Callable[[BaseHTTPRequestHandler], None]


class ModelEndpoint:
    """Answers the n-th request with the n-th answer, and further ones with the last.

    Attributes:
        url: Its base URL.
        requests: The bodies that it got.
        headers: Their headers.
    """

    def __init__(self, answers: Sequence[Answer]) -> None:
        self.requests: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.ended = threading.Event()
        """Set at the end of the test; silent answers wait for it."""
        self._answers = list(answers)
        self._lock = threading.Lock()
        endpoint = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                endpoint.answer(self)

            def log_message(self, format: str, *args: Any) -> None: ...

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.server.server_port}/v1"

    def answer(self, handler: BaseHTTPRequestHandler) -> None:
        body = json.loads(handler.rfile.read(int(handler.headers["Content-Length"])))
        with self._lock:
            answer = self._answers[min(len(self.requests), len(self._answers) - 1)]
            self.requests.append({"path": handler.path, **body})
            self.headers.append(dict(handler.headers))
        if answer is silent:
            self.ended.wait()
            handler.close_connection = True
            return
        try:
            answer(handler)
        except ConnectionError:
            handler.close_connection = True


@contextmanager
def serving(*answers: Answer) -> Iterator[ModelEndpoint]:
    """Run an endpoint in threads until the block ends."""
    endpoint = ModelEndpoint(answers)
    thread = threading.Thread(target=endpoint.server.serve_forever, args=(0.02,))
    thread.start()
    try:
        yield endpoint
    finally:
        endpoint.ended.set()
        endpoint.server.shutdown()
        thread.join()
        endpoint.server.server_close()


# --- answers --------------------------------------------------------------------------------------


def tool_call(
    name: str, arguments: dict[str, Any] | str, call_id: str = "call_1"
) -> dict[str, Any]:
    """Return a tool call of a message; arguments may be malformed text."""
    text = arguments if isinstance(arguments, str) else json.dumps(arguments)
    return {
        "id": call_id,
        "type": "function",
        "function": {"name": name, "arguments": text},
    }


def completion(
    text: str | None = None,
    *calls: dict[str, Any],
    finish_reason: str | None = None,
    usage: tuple[int, int] = (10, 5),
    **fields: Any,
) -> Answer:
    """Answer with a chat completion."""
    message: dict[str, Any] = {"role": "assistant", "content": text, **fields}
    if calls:
        message["tool_calls"] = list(calls)
    reason = finish_reason or ("tool_calls" if calls else "stop")
    return body(
        {
            "id": "c",
            "object": "chat.completion",
            "choices": [{"index": 0, "message": message, "finish_reason": reason}],
            "usage": {"prompt_tokens": usage[0], "completion_tokens": usage[1]},
        }
    )


def body(data: Any, status: int = 200, **headers: str) -> Answer:
    """Answer with JSON, or with text as it is."""
    text = data if isinstance(data, str) else json.dumps(data)

    def answer(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(status)
        for name, value in headers.items():
            handler.send_header(name.replace("_", "-"), value)
        handler.send_header("Content-Type", "application/json")
        handler.send_header("Content-Length", str(len(text.encode())))
        handler.end_headers()
        handler.wfile.write(text.encode())

    return answer


def refusal(status: int, message: str, **headers: str) -> Answer:
    """Answer with an error in OpenAI's format."""
    return body({"error": {"message": message, "type": "error"}}, status, **headers)


def stream(*chunks: Any, done: bool = True, last: tuple[str, Any] | None = None) -> Answer:
    """Answer with a stream of chunks; without `done` the connection dies in the middle of it.

    Args:
        chunks: The values of the fields ``data``, as JSON or as text.
        done: Whether the stream ends as it should.
        last: A field with another name, and its value, after the chunks.
    """

    def answer(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(200)
        handler.send_header("Content-Type", "text/event-stream")
        handler.send_header("Transfer-Encoding", "chunked")
        handler.end_headers()
        for chunk in chunks:
            text = chunk if isinstance(chunk, str) else json.dumps(chunk)
            _send(handler, f": keep-alive\n\ndata: {text}\r\n\r\n".encode())
        if last is not None:
            _send(handler, f"{last[0]}: {json.dumps(last[1])}\n\n".encode())
        if done:
            _send(handler, b"data: [DONE]\n\n")
            _send(handler, b"")
        handler.close_connection = True

    return answer


def _send(handler: BaseHTTPRequestHandler, data: bytes) -> None:
    handler.wfile.write(b"%x\r\n%s\r\n" % (len(data), data))
    handler.wfile.flush()


def delta(finish_reason: str | None = None, **fields: Any) -> dict[str, Any]:
    """Return a chunk of a stream."""
    return {"choices": [{"index": 0, "delta": fields, "finish_reason": finish_reason}]}


def dies(handler: BaseHTTPRequestHandler) -> None:
    """End the connection in the middle of an answer."""
    handler.send_response(200)
    handler.send_header("Content-Type", "application/json")
    handler.send_header("Content-Length", "1000")
    handler.end_headers()
    handler.wfile.write(b'{"choices": [{"mess')
    handler.close_connection = True


def silent(handler: BaseHTTPRequestHandler) -> None:
    """Never answer."""
    raise AssertionError("the endpoint waits instead")
