"""A judge behind an address that answers as OpenAI's chat completions do: vLLM, llama.cpp, Ollama, a paid service."""

from __future__ import annotations

import http.client
import json
import os
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor, as_completed
from contextlib import suppress
from typing import Any
from urllib.parse import urlsplit

from insertlm.core.errors import InsertlmError
from insertlm.evaluation.journal import key_of
from insertlm.evaluation.judge import MOST_TOKENS
from insertlm.evaluation.rubrics import SYSTEM

__all__ = ["KEY_VARIABLE", "Endpoint"]

KEY_VARIABLE = "OPENAI_API_KEY"
_PASSING = {408, 409, 425, 429, 500, 502, 503, 504}  # what a server says that may well answer a little later


class Endpoint:
    """Asks several questions at once. Whatever may pass is tried again, each time after twice the pause; what does not
    pass ends the work with one line."""

    def __init__(
        self, url: str, model: str, *, timeout: float = 120.0, tries: int = 5, pause: float = 1.0, together: int = 8
    ) -> None:
        if urlsplit(url).scheme not in ("http", "https") or not urlsplit(url).netloc:
            raise InsertlmError(f"--endpoint {url}: expected an address such as http://localhost:8000/v1")
        self._url, self._model = f"{url.rstrip('/').removesuffix('/chat/completions')}/chat/completions", model
        self._timeout, self._tries, self._pause, self._together = timeout, tries, pause, together

    @property
    def identity(self) -> str:
        """The same model elsewhere gives the same answers, or should."""
        return key_of("endpoint", self._model)

    def answers(self, questions: Sequence[str]) -> Iterator[tuple[int, str]]:
        with ThreadPoolExecutor(self._together) as pool:
            asked = {pool.submit(self._ask, question): number for number, question in enumerate(questions)}
            try:
                yield from self._collect(asked)
            finally:
                pool.shutdown(wait=False, cancel_futures=True)

    @staticmethod
    def _collect(asked: Mapping[Future[str], int]) -> Iterator[tuple[int, str]]:
        """After a failure the rest is not asked any more, but what is on its way is waited for: it may have a price."""
        failure: InsertlmError | None = None
        for future in as_completed(asked):
            try:
                yield asked[future], future.result()
            except CancelledError:
                continue
            except InsertlmError as error:
                failure = failure or error
                for other in asked:
                    other.cancel()
        if failure:
            raise failure

    def _ask(self, question: str) -> str:
        body = {
            "model": self._model,
            "messages": [{"role": "system", "content": SYSTEM}, {"role": "user", "content": question}],
            "temperature": 0,
            "max_tokens": MOST_TOKENS,
        }
        problem = ""
        for turn in range(self._tries):
            if turn:
                time.sleep(self._pause * 2 ** (turn - 1))
            try:
                return _content(self._post(body))
            except urllib.error.HTTPError as error:
                problem = f"{error.code} {_said(error)}"
                if error.code not in _PASSING:
                    raise InsertlmError(f"{self._url}: {problem}; {_todo(error.code)}") from error
            except (OSError, http.client.HTTPException, ValueError) as error:  # no connection, no time, no JSON
                problem = " ".join(str(getattr(error, "reason", error)).split()) or type(error).__name__
        raise InsertlmError(
            f"{self._url}: no answer after {self._tries} tries: {problem}; what is judged already is kept, run it again"
        )

    def _post(self, body: dict[str, Any]) -> Any:
        headers = {"Content-Type": "application/json"}
        if key := os.environ.get(KEY_VARIABLE):
            headers["Authorization"] = f"Bearer {key}"
        request = urllib.request.Request(self._url, json.dumps(body).encode(), headers)
        with urllib.request.urlopen(request, timeout=self._timeout) as response:
            return json.loads(response.read())


def _content(reply: Any) -> str:
    """Raises ValueError for what is no chat completion. An answer may be empty: then it has no score."""
    try:
        content = reply["choices"][0]["message"]["content"]
    except (LookupError, TypeError) as error:
        raise ValueError("its reply is no chat completion") from error
    return content if isinstance(content, str) else ""


def _said(error: urllib.error.HTTPError) -> str:
    """What a server says about its refusal, in one line."""
    text = ""
    with suppress(OSError, http.client.HTTPException):
        text = error.read().decode(errors="replace")
    with suppress(ValueError, LookupError, TypeError):  # plain text, or another form of JSON: shown as it is
        text = str(json.loads(text)["error"]["message"])
    text = " ".join(text.split()) or str(error.reason)
    return text if len(text) <= 160 else f"{text[:159]}…"


def _todo(code: int) -> str:
    if code in (401, 403):
        return f"expected the key of the service in the environment variable {KEY_VARIABLE}"
    if code == 404:
        return "expected an address that ends before /chat/completions, and a --model that is there"
    return "expected a server that answers as OpenAI's chat completions do"
