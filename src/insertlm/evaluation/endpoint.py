"""A judge behind a URL that answers like OpenAI's chat completions: vLLM, llama.cpp, Ollama, a paid service."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor, as_completed
from contextlib import suppress
from typing import Any

from insertlm.core.errors import InsertlmError
from insertlm.evaluation.journal import key_of
from insertlm.evaluation.judge import MOST_TOKENS
from insertlm.evaluation.rubrics import SYSTEM

try:
    import httpx
except ImportError as error:
    raise InsertlmError("a judge behind an endpoint needs httpx: pip install 'insertlm[text]'") from error

__all__ = ["KEY_VARIABLE", "Endpoint"]

KEY_VARIABLE = "OPENAI_API_KEY"
_TEMPORARY = {408, 409, 425, 429, 500, 502, 503, 504}  # the same request may well succeed a little later


class Endpoint:
    """Asks several questions at once. A temporary failure is tried again, each time after twice the pause; any other
    failure ends the work with one line."""

    def __init__(
        self, url: str, model: str, *, timeout: float = 120.0, tries: int = 5, pause: float = 1.0, together: int = 8
    ) -> None:
        with suppress(httpx.InvalidURL):
            address = httpx.URL(f"{url.rstrip('/').removesuffix('/chat/completions')}/chat/completions")
            if address.scheme in ("http", "https") and address.host:
                self._url, self._model = address, model
                self._timeout, self._tries, self._pause, self._together = timeout, tries, pause, together
                return
        raise InsertlmError(f"--endpoint {url}: expected a URL such as http://localhost:8000/v1")

    @property
    def identity(self) -> str:
        """The model alone: the same model behind another URL gives the same answers, or should."""
        return key_of("endpoint", self._model)

    def answers(self, questions: Sequence[str]) -> Iterator[tuple[int, str]]:
        key = os.environ.get(KEY_VARIABLE)
        # Local servers need no key.
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        # One client for all threads keeps its connections open from one question to the next.
        with httpx.Client(headers=headers, timeout=self._timeout) as client, ThreadPoolExecutor(self._together) as pool:
            asked = {pool.submit(self._ask, client, question): number for number, question in enumerate(questions)}
            try:
                yield from self._collect(asked)
            finally:
                pool.shutdown(wait=False, cancel_futures=True)

    @staticmethod
    def _collect(asked: Mapping[Future[str], int]) -> Iterator[tuple[int, str]]:
        """After a failure no more questions are sent, but answers on their way are waited for: they may cost money."""
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

    def _ask(self, client: httpx.Client, question: str) -> str:
        body = {
            "model": self._model,
            "messages": [{"role": "system", "content": SYSTEM}, {"role": "user", "content": question}],
            "temperature": 0,  # greedy, as the local judge, so that a judgement can be repeated
            "max_tokens": MOST_TOKENS,
        }
        problem = ""
        for attempt in range(self._tries):
            if attempt:  # 1, 2, 4 … pauses: a busy server needs time more than it needs requests
                time.sleep(self._pause * 2 ** (attempt - 1))
            try:
                response = client.post(self._url, json=body)
                if response.is_success:
                    return _content(response.json())
            except (httpx.HTTPError, ValueError) as error:  # no connection, no answer in time, no JSON
                problem = " ".join(str(error).split()) or type(error).__name__
                continue
            problem = f"{response.status_code} {_reason(response)}"
            if response.status_code not in _TEMPORARY:
                raise InsertlmError(f"{self._url}: {problem}; {_remedy(response.status_code)}")
        raise InsertlmError(
            f"{self._url}: no answer after {self._tries} tries: {problem}; finished judgements are kept, run it again"
        )


def _content(reply: Any) -> str:
    """Raises ValueError if this is not a chat completion. An empty answer is one; it has no score."""
    try:
        content = reply["choices"][0]["message"]["content"]
    except (LookupError, TypeError) as error:
        raise ValueError("its reply is not a chat completion") from error
    return content if isinstance(content, str) else ""


def _reason(response: httpx.Response) -> str:
    """Why the server refuses, in one line."""
    text = response.text  # OpenAI's format has the reason in error.message
    with suppress(ValueError, LookupError, TypeError):  # plain text or JSON of another kind is shown as it is
        text = str(json.loads(text)["error"]["message"])
    text = " ".join(text.split()) or response.reason_phrase
    return text if len(text) <= 160 else f"{text[:159]}…"


def _remedy(status: int) -> str:
    if status in (401, 403):
        return f"expected the key of the service in the environment variable {KEY_VARIABLE}"
    if status == 404:
        return "expected a URL that ends before /chat/completions, and a --model that the server has"
    return "expected a server that answers like OpenAI's chat completions"
