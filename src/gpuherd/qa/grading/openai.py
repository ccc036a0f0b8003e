"""A client of servers with the OpenAI API: waits and tries again where that can help.

Knows what a failure means: one that may pass, one of this text alone, or one of everything that could be asked. The
key is in no message and no reply.
"""

from __future__ import annotations

import http.client
import json
import re
import socket
import ssl
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any
from urllib.parse import urlsplit

from gpuherd import __version__
from gpuherd.errors import GpuherdError, UsageError
from gpuherd.qa.grading.files import LONGEST_REPLY
from gpuherd.qa.grading.verdicts import Mode, Ruling, Verdict, Way, parse_reply, scale, verdict_from_log_probs

# --- Requests and replies ---------------------------------------------------------------------------------------------
#
# What is sent to a server that speaks the OpenAI API, and what its reply means. Pure; no network.
#
# Servers differ in what they take: one gives no log-probs, one only five of them, one has another word for the most
# tokens. What a server refuses by name is left out or said otherwise, once, and every verdict that was thereby read in
# another way says so.

# What OpenAI and vLLM allow at most, and what several others do.
MOST_TOP, FEWER_TOP = 20, 5
_LONGEST_REASON = 40
_TOO_LONG = "too long"
_LEAST = 1e300  # a log-prob below is none: compared before it is made a float, since JSON has integers without end
VERDICT_TOKENS = 16  # room for "Verdict: yes" and for a spelling in several tokens


@dataclass(frozen=True, slots=True)
class Dialect:
    """The variant of the API that a server takes.

    Attributes:
        top: how many log-probs of each token, None for none.
        tokens_word: the name of the most tokens.
        temperature: whether a request may have one.
    """

    top: int | None = MOST_TOP
    tokens_word: str = "max_tokens"
    temperature: bool = True


@dataclass(frozen=True, slots=True)
class Reply:
    """A server's reply.

    Attributes:
        content: what the judge wrote, without surrogates.
        top: the log-probs at its first token that is no white space (token -> natural log); None where the server gave
            none.
        finish: why it ended.
        refused: why there is no reply, where the server can't deal with this case.
    """

    content: str
    top: Mapping[str, float] | None
    finish: str | None
    refused: str | None = None


def body(model: str, text: str, *, dialect: Dialect, most_tokens: int) -> dict[str, Any]:
    """The JSON of a request for a chat completion."""
    values: dict[str, Any] = {"model": model, "messages": [{"role": "user", "content": text}]}
    values[dialect.tokens_word] = most_tokens
    if dialect.temperature:
        values["temperature"] = 0
    if dialect.top is not None:
        values |= {"logprobs": True, "top_logprobs": dialect.top}
    return values


def next_dialect(dialect: Dialect, complaint: str) -> Dialect | None:
    """Another way to ask, where a server refused a request and said why; None where nothing is left."""
    words = complaint.lower()
    if "max_completion_tokens" in words and dialect.tokens_word == "max_tokens":
        return replace(dialect, tokens_word="max_completion_tokens")
    if "logprobs" in words and dialect.top is not None:
        return replace(dialect, top=FEWER_TOP if dialect.top > FEWER_TOP else None)
    if "temperature" in words and dialect.temperature:
        return replace(dialect, temperature=False)
    return None


def read_reply(value: Any) -> Reply:
    """The reply in a server's JSON. Raises ValueError for what is no chat completion."""
    try:
        choice = value["choices"][0]
        content = choice["message"]["content"] or ""
        finish, log_probs = choice.get("finish_reason"), choice.get("logprobs")
    except (KeyError, IndexError, TypeError, AttributeError):
        raise ValueError("no chat completion") from None
    if not isinstance(content, str):
        raise ValueError("its content is no text")
    # Half a character of UTF-16 can't be written by whoever makes a table or a page of it.
    plain = content.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    if len(plain) > LONGEST_REPLY:
        plain, finish = plain[:LONGEST_REPLY], _TOO_LONG
    return Reply(plain, _first_top(log_probs), finish[:_LONGEST_REASON] if isinstance(finish, str) else None)


def _first_top(log_probs: Any) -> dict[str, float] | None:
    tokens = log_probs.get("content") if isinstance(log_probs, dict) else None
    for token in tokens if isinstance(tokens, list) else ():
        if not isinstance(token, dict) or not str(token.get("token", "")).strip():
            continue
        top = token.get("top_logprobs")
        # The token itself stands among them in most servers, not in all.
        rows = [*(top if isinstance(top, list) else ()), token]
        found = {row["token"]: float(row["logprob"]) for row in rows if _is_row(row)}
        return found or None
    return None


def _is_row(row: Any) -> bool:
    return (
        isinstance(row, dict)
        and isinstance(row.get("token"), str)
        and isinstance(row.get("logprob"), int | float)
        and not isinstance(row["logprob"], bool)
        and -_LEAST <= row["logprob"] <= 1e-6  # rounding; anything above is no log-prob
    )


def ruling_of(reply: Reply, *, way: Way, mode: Mode, threshold: float | None, min_mass: float) -> Ruling:
    """The ruling in a reply: from the log-probs where they carry one, else from the text."""
    if reply.refused is not None:
        return Ruling(Verdict.UNPARSED, note=f"no reply from the server: {reply.refused}")
    if reply.finish == _TOO_LONG:
        # What is not kept might say something else.
        long = f"the reply is longer than {LONGEST_REPLY} characters"
        return Ruling(Verdict.UNPARSED, note=long, reply=reply.content)
    note = None
    if mode == "tokens":
        if reply.top is None:
            note = "the server gave no log-probs; read from the text"
        else:
            found = verdict_from_log_probs(_by_verdict(reply.top, way), threshold=threshold, min_mass=min_mass)
            if found.verdict is not Verdict.UNPARSED or _begins_with_word(reply.content, reply.top, way):
                # Its own probabilities say how sure it is of the word that it begins with.
                return replace(found, reply=reply.content)
            note = f"{found.note}; read from the text"
    verdict, problem = parse_reply(reply.content, way)
    if problem is not None and reply.finish == "length":
        problem += "; the reply was cut off (--reply-tokens allows more)"
    notes = [each for each in (note, problem) if each]
    return Ruling(verdict, note="; ".join(notes) or None, reply=reply.content)


def _begins_with_word(text: str, top: Mapping[str, float], way: Way) -> bool:
    """Whether the first word is a verdict and one token, so that its probability is known."""
    first = re.match(r"\s*([A-Za-z]+)", text)
    return first is not None and first[1].lower() in scale(way).words and first[1] in {token.strip() for token in top}


def _by_verdict(top: Mapping[str, float], way: Way) -> dict[Verdict, list[float | None]]:
    """Log-probs of the tokens that are a verdict word by themselves; single letters only as capitals."""
    words = scale(way).words
    found: dict[Verdict, list[float | None]] = {verdict: [] for verdict in dict.fromkeys(words.values())}
    for token, log_prob in top.items():
        word = token.strip()
        if len(word) == 1 and not word.isupper():
            continue
        verdict = words.get(word.lower())
        if verdict is not None:
            found[verdict].append(log_prob)
    return found


# --- One POST ---------------------------------------------------------------------------------------------------------
#
# One POST at a time, with a deadline that holds whatever the server does, and that another thread can break off.
#
# The standard library's client does all that is needed. A timeout of its sockets is one of each read, and a server
# that sends a byte a minute keeps them busy for ever; so that the socket is shut when the time is over. Redirects are
# not followed, since a key would go with them.

_MOST_BYTES = 8 << 20
_CHUNK = 1 << 16


class _Call:
    """A request that is under way."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._socket: socket.socket | None = None
        self.is_cut = False

    def connected(self, connection: http.client.HTTPConnection) -> None:
        """Tells its socket."""
        with self._lock:
            self._socket = connection.sock
        if self.is_cut:
            self.cut()

    def cut(self) -> None:
        """Breaks it off: whoever reads from it comes back."""
        with self._lock:
            self.is_cut = True
            if self._socket is not None:
                with suppress(OSError):
                    # Not the method of an encrypted socket, which only its reader may touch.
                    socket.socket.shutdown(self._socket, socket.SHUT_RDWR)


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *_: Any) -> None:
        return None


class _WatchingHandler(urllib.request.HTTPHandler, urllib.request.HTTPSHandler):
    """Opens connections whose sockets a call can shut."""

    def __init__(self, call: _Call, context: ssl.SSLContext):
        super().__init__(context=context)
        self._call, self._trust = call, context

    def http_open(self, req: urllib.request.Request) -> http.client.HTTPResponse:
        return self.do_open(self._connection(http.client.HTTPConnection), req)

    def https_open(self, req: urllib.request.Request) -> http.client.HTTPResponse:
        return self.do_open(self._connection(http.client.HTTPSConnection), req, context=self._trust)

    def _connection(self, kind: type[http.client.HTTPConnection]) -> Any:
        call = self._call

        class Connection(kind):  # type: ignore[misc,valid-type]
            def connect(self) -> None:
                super().connect()
                call.connected(self)

        return Connection


class Post:
    """Posts to one server, from several threads at once.

    Args:
        here: the server is this machine: no proxy of the environment is used.
    """

    def __init__(self, *, here: bool):
        self._proxies = [urllib.request.ProxyHandler({})] if here else []
        self._context = ssl.create_default_context()
        self._lock = threading.Lock()
        self._calls: set[_Call] = set()
        self._ended = False

    def end(self) -> None:
        """Breaks off what is under way, and sends nothing any more."""
        with self._lock:
            self._ended = True
            calls = tuple(self._calls)
        for call in calls:
            call.cut()

    def post(self, url: str, data: bytes, headers: dict[str, str], timeout_s: float) -> bytes:
        """The body of the reply to a request.

        Raises urllib.error.HTTPError for any status but 200, TimeoutError where the whole reply was not there in time,
        ValueError for one that is too long, and OSError, http.client.HTTPException where the connection broke.
        """
        call = _Call()
        with self._lock:
            if self._ended:
                raise ConnectionAbortedError("it was broken off")
            self._calls.add(call)
        clock = threading.Timer(timeout_s, call.cut)
        clock.daemon = True
        clock.start()
        opener = urllib.request.build_opener(_NoRedirects, _WatchingHandler(call, self._context), *self._proxies)
        request = urllib.request.Request(url, data, headers)  # noqa: S310 - http and https alone: judge_named
        try:
            with opener.open(request, timeout=timeout_s) as answer:
                whole = _all(answer)
        except (OSError, http.client.HTTPException):
            if call.is_cut and not self._ended:
                raise TimeoutError from None
            raise
        finally:
            clock.cancel()
            with self._lock:
                self._calls.discard(call)
        if call.is_cut:
            # Without a length, what was cut off looks like an end.
            raise TimeoutError
        return whole


def _all(answer: http.client.HTTPResponse) -> bytes:
    parts: list[bytes] = []
    size = 0
    while part := answer.read(_CHUNK):
        parts.append(part)
        size += len(part)
        if size > _MOST_BYTES:
            raise ValueError(f"it is longer than {_MOST_BYTES >> 20} MB")
    if answer.length:
        raise http.client.IncompleteRead(b"", answer.length)
    return b"".join(parts)


# --- Patience ---------------------------------------------------------------------------------------------------------

HERE = ("localhost", "127.0.0.1", "::1")
_PASSING = frozenset({408, 409, 425, 429, 500, 502, 503, 504, 520, 521, 522, 523, 524, 529})
# A text too long or not allowed is refused so; a request that should be put otherwise, too.
_OF_THE_REQUEST = frozenset({400, 413, 422})
_LONGEST_COMPLAINT = 300


class JudgeUnavailable(GpuherdError):
    """The server behind an address does not answer, after all tries. What it has answered before is kept."""


class JudgeRefused(UsageError):
    """The server does not take any request: the key, the model, the address, or the form is wrong."""


class CaseFailed(GpuherdError):
    """A text got no reply: the server refuses it, or fails at it every time. A request with another text shows whether
    the text is at fault.

    Attributes:
        complaint: what the server says.
        meaning: the error, should it not be the fault of the text.
    """

    def __init__(self, complaint: str, meaning: JudgeRefused | JudgeUnavailable):
        super().__init__(complaint)
        self.complaint, self.meaning = complaint, meaning


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """How long a reply may take, how many further tries there are, and the waits between: doubled from the first to
    the longest; where the server says how long, that (but no longer than ten times the longest)."""

    timeout_s: float = 120.0
    retries: int = 6
    first_wait_s: float = 1.0
    longest_wait_s: float = 60.0

    def wait_s(self, tries: int, retry_after: str | None) -> float:
        """Seconds to wait after the ``tries``-th failure (from 1); ``retry_after``: the server's header."""
        try:
            said = float(retry_after) if retry_after is not None else None
        except ValueError:
            said = None  # a date; rare, and our own waits do
        if said is not None and said >= 0:
            return min(said, 10 * self.longest_wait_s)
        return min(self.first_wait_s * 2.0 ** (tries - 1), self.longest_wait_s)


class _Passing(Exception):
    """A failure that may pass; ``of_text``: the text of the request may also be at fault."""

    def __init__(self, what: str, *, retry_after: str | None = None, of_text: bool = False):
        super().__init__(what)
        self.retry_after, self.of_text = retry_after, of_text


class Endpoint:
    """One model behind one address; several threads may use it at once.

    Args:
        url: up to and with ``/v1``.
        model: as the server names it.
        key: sent as a bearer token; None where the server wants none.
        dialect: of the first request; ``self.dialect`` is the one that the server took.
        wait: what waits for so many seconds, at most until ``stop``.

    Raises UsageError for a key that can't be sent.
    """

    def __init__(
        self,
        url: str,
        model: str,
        *,
        key: str | None = None,
        most_tokens: int,
        dialect: Dialect,
        patience: RetryPolicy,
        wait: Callable[[float], object] | None = None,
    ):
        if key is not None and not (key.isascii() and key.isprintable() and key.strip() == key and key):
            raise UsageError("the key in the environment variable of --api-key-env is no usable key (empty, or spaces)")
        self.dialect = dialect
        self._url, self._model, self._key = f"{url}/chat/completions", model, key
        self._stopping = threading.Event()
        self._most_tokens, self._patience, self._wait = most_tokens, patience, wait or self._stopping.wait
        self._post = Post(here=urlsplit(url).hostname in HERE)

    @property
    def host(self) -> str:
        """The server's host and port."""
        return urlsplit(self._url).netloc

    def stop(self) -> None:
        """Ends all waiting and breaks off every request; later ones fail."""
        self._stopping.set()
        self._post.end()

    def settle(self, text: str) -> None:
        """Finds out which form of request the server accepts, with a text that has no fault: only the server is then to
        blame. Raises JudgeRefused if it accepts none, JudgeUnavailable."""
        while True:
            try:
                self.ask(text)
                return
            except CaseFailed as failure:
                refused = isinstance(failure.meaning, JudgeRefused)
                other = next_dialect(self.dialect, failure.complaint) if refused else None
                if other is None:
                    raise failure.meaning from None
                self.dialect = other

    def ask(self, text: str) -> Reply:
        """The reply to a text. Raises CaseFailed, JudgeUnavailable, JudgeRefused."""
        tries = 0
        while not self._stopping.is_set():
            try:
                return self._attempt(text)
            except _Passing as failure:
                tries += 1
                if tries > self._patience.retries:
                    gave_up = JudgeUnavailable(
                        f"{self.host}: {failure}, {tries} times in a row; the same command goes on from here"
                    )
                    raise (CaseFailed(str(failure), gave_up) if failure.of_text else gave_up) from None
                self._wait(self._patience.wait_s(tries, failure.retry_after))
        raise JudgeUnavailable(f"{self.host} is not asked any more: another request has failed, or it was stopped")

    def _attempt(self, text: str) -> Reply:
        request = body(self._model, text, dialect=self.dialect, most_tokens=self._most_tokens)
        headers = {"Content-Type": "application/json", "User-Agent": f"gpuherd/{__version__}"}
        if self._key is not None:
            headers["Authorization"] = f"Bearer {self._key}"
        data = json.dumps(request, ensure_ascii=True).encode("ascii")
        try:
            reply = read_reply(json.loads(self._post.post(self._url, data, headers, self._patience.timeout_s)))
        except urllib.error.HTTPError as refusal:
            raise self._meaning(refusal) from None
        except urllib.error.URLError as problem:
            raise _Passing(f"no connection ({self._without_key(str(problem.reason))})") from None
        except TimeoutError:
            raise _Passing(f"no whole reply within {self._patience.timeout_s:g} s") from None
        except (OSError, http.client.HTTPException) as problem:
            what = self._without_key(f"{type(problem).__name__}: {problem}")
            raise _Passing(f"the connection broke ({what})") from None
        except (ValueError, RecursionError) as problem:
            raise _Passing(f"an answer that can't be read ({problem})", of_text=True) from None
        return replace(reply, content=reply.content.replace(self._key, "(the key)")) if self._key else reply

    def _meaning(self, refusal: urllib.error.HTTPError) -> Exception:
        complaint = self._complaint(refusal)
        if refusal.code in _PASSING:
            after = refusal.headers.get("Retry-After")
            return _Passing(f"HTTP {refusal.code} ({complaint})", retry_after=after, of_text=refusal.code == 500)
        refused = JudgeRefused(f"{self.host} refuses (HTTP {refusal.code}): {complaint}; {_remedy(refusal.code)}")
        return CaseFailed(complaint, refused) if refusal.code in _OF_THE_REQUEST else refused

    def _complaint(self, refusal: urllib.error.HTTPError) -> str:
        """The error message of the server."""
        try:
            raw = refusal.read(_LONGEST_COMPLAINT * 20).decode("utf-8", "replace")
        except (OSError, http.client.HTTPException):
            raw = ""
        return self._without_key(_message(raw) or refusal.reason or "no reason given")

    def _without_key(self, text: str) -> str:
        """A text of the server's for a message: short, and without the key, should it be in there."""
        return (text if self._key is None else text.replace(self._key, "(the key)"))[:_LONGEST_COMPLAINT]


def _message(raw: str) -> str:
    try:
        value = json.loads(raw)
        error = value.get("error", value) if isinstance(value, dict) else value
        message = error.get("message", error.get("detail")) if isinstance(error, dict) else error
        return message if isinstance(message, str) else raw.strip()
    except (ValueError, RecursionError):
        return raw.strip()


def _remedy(code: int) -> str:
    if code in (401, 403):
        return "is the key in the variable of --api-key-env right?"
    if code == 404:
        return "is the address right (it ends in /v1 mostly), and does the server have the model of --judge-model?"
    if 300 <= code < 400:
        return "it points to another address; give that one, if you trust it"
    return "see the server's own documentation"
