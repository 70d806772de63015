"""A small stand-in for model providers on loopback: speaks as much of the Responses, Chat
Completions and Messages protocols as agents need to change one file, always as a stream.

It has no model: asked for the first time it edits, told that this was done it says so.
"""

import json
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NamedTuple, Self

KEY = "sk-only-the-host-has-this-0123456789abcdef"
FILE, BEFORE, AFTER = "greeting.txt", "Hello, nobody.", "Hello, world."
COMMAND = f"sed -i 's/{BEFORE}/{AFTER}/' {FILE}"
DONE = "The greeting is for everybody now."
BLOCK = f"{FILE}\n```\n<<<<<<< SEARCH\n{BEFORE}\n=======\n{AFTER}\n>>>>>>> REPLACE\n```\n"
"""An edit as aider's `diff` format has it; else it wants the whole file."""
WHOLE = f"{FILE}\n```\n{AFTER}\n```\n"
INPUT_TOKENS, OUTPUT_TOKENS = 1000, 50
"""What every answer says that it took."""
_SHELLS = ("exec_command", "shell_command", "shell", "Bash")

Event = dict[str, Any]


class Asked(NamedTuple):
    """A request as the server saw it."""

    method: str
    path: str
    headers: dict[str, str]
    body: Any


class ModelServer(ThreadingHTTPServer):
    """Listens on a free port of loopback from :meth:`__enter__` on; keeps what it was asked."""

    daemon_threads = True

    def __init__(self, port: int = 0, *, pause_s: float = 0.0) -> None:
        super().__init__(("127.0.0.1", port), _Handler)
        self.pause_s = pause_s
        self.asked: list[Asked] = []
        self._thread = threading.Thread(target=self.serve_forever, args=(0.05,), daemon=True)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()
        self.server_close()
        self._thread.join()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: ModelServer

    def log_message(self, *_: Any) -> None:
        """Nothing is printed: `asked` says it all."""

    def do_GET(self) -> None:
        self._asked(None)
        models = [{"id": "stand-in", "object": "model"}]
        self._whole(200, {"object": "list", "data": models, "models": []})

    def do_POST(self) -> None:
        length = int(self.headers.get("content-length") or 0)
        data = self.rfile.read(length) if length else b"".join(self._chunks())
        body = json.loads(data or b"{}")
        self._asked(body)
        if not self._knows_the_key():
            self._whole(401, {"error": {"message": "no such key", "type": "invalid_api_key"}})
            return
        answers = {
            "/v1/responses": responses,
            "/v1/chat/completions": chat,
            "/v1/messages": messages,
        }
        if answer := answers.get(self.path.partition("?")[0]):
            self._stream(answer(body))
        else:
            self._whole(404, {"error": {"message": "no such path"}})

    def _asked(self, body: Any) -> None:
        headers = {name.lower(): value for name, value in self.headers.items()}
        self.server.asked.append(Asked(self.command, self.path, headers, body))

    def _knows_the_key(self) -> bool:
        said = self.headers.get("authorization", ""), self.headers.get("x-api-key", "")
        return said in ((f"Bearer {KEY}", ""), ("", KEY))

    def _chunks(self) -> Iterator[bytes]:
        while size := int(self.rfile.readline().strip() or b"0", 16):
            yield self.rfile.read(size)
            self.rfile.readline()

    def _whole(self, status: int, value: Any) -> None:
        data = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def _stream(self, events: Iterator[tuple[str, Event]]) -> None:
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.send_header("transfer-encoding", "chunked")
        self.end_headers()
        pause = threading.Event()
        for name, event in events:
            line = f"event: {name}\n" if name else ""
            text = json.dumps(event) if event else "[DONE]"
            data = f"{line}data: {text}\n\n".encode()
            self.wfile.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")
            self.wfile.flush()
            pause.wait(self.server.pause_s)
        self.wfile.write(b"0\r\n\r\n")


# --- the Responses protocol -----------------------------------------------------------------------


def responses(body: Any) -> Iterator[tuple[str, Event]]:
    """One shell command, then a last message."""
    tools = {str(tool.get("name")): tool for tool in body.get("tools", ())}
    done = any("output" in str(item.get("type")) for item in body.get("input", ()))
    shell = next((name for name in _SHELLS if name in tools), None)
    item = _message(DONE) if done or not shell else _call(shell, tools[shell])
    answer = {"id": "resp_1", "object": "response", "model": "stand-in"}
    yield "response.created", {"type": "response.created", "response": answer}
    yield "", {"type": "response.output_item.added", "output_index": 0, "item": item}
    if item["type"] == "message":
        for word in DONE.split(" "):
            place = {"item_id": item["id"], "output_index": 0, "content_index": 0}
            yield "", {"type": "response.output_text.delta", "delta": f"{word} ", **place}
    yield "", {"type": "response.output_item.done", "output_index": 0, "item": item}
    usage = {
        "input_tokens": INPUT_TOKENS,
        "input_tokens_details": {"cached_tokens": 0},
        "output_tokens": OUTPUT_TOKENS,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": INPUT_TOKENS + OUTPUT_TOKENS,
    }
    ended = answer | {"status": "completed", "output": [item], "usage": usage}
    yield "response.completed", {"type": "response.completed", "response": ended}


def _message(text: str) -> Event:
    content = [{"type": "output_text", "text": text, "annotations": []}]
    return {
        "id": "msg_1",
        "type": "message",
        "role": "assistant",
        "status": "completed",
        "content": content,
    }


def _call(name: str, tool: Event) -> Event:
    """A call of whatever shell is offered, by the words of its own schema."""
    properties = tool.get("parameters", {}).get("properties", {})
    key = "cmd" if "cmd" in properties else "command"
    takes_list = properties.get(key, {}).get("type") == "array"
    command: object = ["bash", "-lc", COMMAND] if takes_list else COMMAND
    return {
        "id": "fc_1",
        "type": "function_call",
        "call_id": "call_1",
        "name": name,
        "arguments": json.dumps({key: command}),
        "status": "completed",
    }


# --- Chat Completions -----------------------------------------------------------------------------


def chat(body: Any) -> Iterator[tuple[str, Event]]:
    """An edit in the format of aider, token by token, and its usage if that was asked for."""
    head = {
        "id": "chat_1",
        "object": "chat.completion.chunk",
        "created": int(time.time()),
        "model": "stand-in",
    }
    text = BLOCK if "SEARCH" in str(body.get("messages")) else WHOLE
    for word in text.splitlines(keepends=True):
        choice = {"index": 0, "delta": {"role": "assistant", "content": word}}
        yield "", head | {"choices": [choice | {"finish_reason": None}]}
    yield "", head | {"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]}
    if (body.get("stream_options") or {}).get("include_usage"):
        usage = {
            "prompt_tokens": INPUT_TOKENS,
            "completion_tokens": OUTPUT_TOKENS,
            "total_tokens": INPUT_TOKENS + OUTPUT_TOKENS,
        }
        yield "", head | {"choices": [], "usage": usage}
    yield "", {}


# --- Messages -------------------------------------------------------------------------------------


def messages(body: Any) -> Iterator[tuple[str, Event]]:
    """A last message; usage as it comes there: the input first, the output at the end."""
    usage = {"input_tokens": INPUT_TOKENS, "cache_read_input_tokens": 0, "output_tokens": 1}
    message = {
        "id": "msg_1",
        "type": "message",
        "role": "assistant",
        "model": "stand-in",
        "content": [],
        "usage": usage,
    }
    yield "message_start", {"type": "message_start", "message": message}
    block = {"type": "text", "text": ""}
    yield "", {"type": "content_block_start", "index": 0, "content_block": block}
    for word in DONE.split(" "):
        delta = {"type": "text_delta", "text": f"{word} "}
        yield "", {"type": "content_block_delta", "index": 0, "delta": delta}
    yield "", {"type": "content_block_stop", "index": 0}
    ended = {"delta": {"stop_reason": "end_turn"}, "usage": {"output_tokens": OUTPUT_TOKENS}}
    yield "message_delta", {"type": "message_delta", **ended}
    yield "message_stop", {"type": "message_stop"}


if __name__ == "__main__":
    with ModelServer(int(sys.argv[1]), pause_s=0.05) as server:
        print(server.url, flush=True)
        server._thread.join()
