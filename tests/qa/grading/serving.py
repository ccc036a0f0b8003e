"""A real HTTP server on this machine that speaks as much of the OpenAI API as a judge needs."""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass
class Answer:
    """What the server sends: a status, headers, and a body (JSON, or bytes as they are)."""

    body: Any
    status: int = 200
    headers: Mapping[str, str] = field(default_factory=dict)


@dataclass
class Served:
    """A server at work: its address, and the requests that it has seen, each with its headers."""

    url: str
    requests: list[tuple[Mapping[str, str], dict[str, Any]]] = field(default_factory=list)


Act = Callable[[int, dict[str, Any]], Answer]


@contextmanager
def serving(act: Act) -> Iterator[Served]:
    """A server that answers by ``act``, which is given the number of the request, from 0, and its JSON."""
    lock = threading.Lock()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            with lock:
                number = len(served.requests)
                served.requests.append((dict(self.headers), {"path": self.path, **asked}))
            answer = act(number, asked)
            data = answer.body if isinstance(answer.body, bytes) else json.dumps(answer.body).encode()
            try:
                self.send_response(answer.status)
                for name, value in {"Content-Length": str(len(data)), **answer.headers}.items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(data)
            except OSError:
                return  # the client has given up

        def log_message(self, *words: Any) -> None:
            del words

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    served = Served(f"http://127.0.0.1:{server.server_address[1]}/v1")
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield served
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def chat(content: str, p_yes: float | None = None) -> Answer:
    """A chat completion; with the log-probs of yes and no at its first token where ``p_yes`` is given."""
    log_probs = None
    if p_yes is not None:
        rows = [{"token": "yes", "logprob": math.log(p_yes)}, {"token": " no", "logprob": math.log(1 - p_yes)}]
        log_probs = {"content": [{**rows[0], "top_logprobs": rows}]}
    return Answer({"choices": [{"message": {"content": content}, "logprobs": log_probs, "finish_reason": "stop"}]})


def answer_in(asked: Mapping[str, Any]) -> str:
    """The proposed answer of a form that was sent."""
    text: str = asked["messages"][0]["content"]
    return text.rpartition("Proposed answer:\n")[2].partition("\n\n")[0].removeprefix("| ")
