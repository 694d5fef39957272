"""The target answers behind an OpenAI-compatible server: vLLM, SGLang, `transformers serve`."""

import logging
import os
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Any

from dflash_lightning.data.answers import Answer, Answers, Question, finished
from dflash_lightning.data.client import Client, Refused
from dflash_lightning.errors import UserError
from dflash_lightning.target import Target
from dflash_lightning.target_spec import TargetSpec

log = logging.getLogger(__name__)

_FEW, _MOST_REFUSED = 20, 0.05


@dataclass
class ServerAnswers(Answers):
    """A server that runs the target answers, by POST to URL/completions.

    Prompts go as token ids and answers come back as token ids where the server can (vLLM does).
    Otherwise text goes both ways and is tokenized here; an answer whose token count then differs
    from the server's is counted in the summary, and a prompt that the server reads as another
    number of tokens is an error.

    Args:
        url: Base address up to /v1, such as http://localhost:8000/v1; several in a list take turns.
        model: Its name there; null takes the only one that the server lists.
        concurrency: Requests under way at the same time, over all servers.
        temperature: 0 is greedy, as the drafter is evaluated by default.
        top_p: Keep the most probable tokens that together have at least this probability.
        top_k: Keep the k most probable tokens; not every server knows it. Null keeps all.
        seed: Each prompt's seed follows from it, where the server honours seeds.
        api_key_env: Environment variable that holds the key, if the server wants one. The key goes
            into no file and no log.
        timeout: Seconds to wait for an answer.
        retries: How often a request that failed (429, 5xx, time-out, cut connection or body) is
            sent again, after 1, 2, 4, ... seconds up to a minute, each at random +-50%.
        shard_size: Answers kept together on disk; a kill loses those of unfinished shards.
    """

    url: str | list[str] = "http://localhost:8000/v1"
    model: str | None = None
    concurrency: int = 64
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int | None = None
    seed: int = 0
    api_key_env: str = "OPENAI_API_KEY"
    timeout: float = 600.0
    retries: int = 8
    shard_size: int = 64

    def __post_init__(self) -> None:
        """Check the values."""
        self.check_sampling()
        for name in ("concurrency", "shard_size"):
            if getattr(self, name) < 1:
                raise UserError(f"data.answers.{name}: needs at least 1, got {getattr(self, name)}")
        if self.retries < 0 or not self.timeout > 0:
            raise UserError("data.answers: retries needs 0 or more, timeout more than 0 seconds")
        self.window = max(64 * self.shard_size, 16 * self.concurrency)
        self.first_wait = 1.0
        self._client: Client | None = None
        self._served = ""
        self._by_ids = True
        self._refused, self._answered = 0, 0

    def identity(self) -> list[Any]:
        """Return the model's name and how tokens are drawn."""
        drawn = [self.temperature, self.top_p, self.top_k, self.seed] if self.temperature else []
        return ["server", self.model, *drawn]

    def answer(
        self, spec: TargetSpec, load_target: Callable[[], Target], questions: Sequence[Question]
    ) -> Iterator[tuple[int, Answer]]:
        """Yield answers as they come, `concurrency` requests at a time."""
        if self._client is None:
            self._client = self._connect(spec, questions[0])
        waiting = iter(enumerate(questions))
        running: dict[Future[dict[str, Any] | Refused], int] = {}
        pool = ThreadPoolExecutor(self.concurrency, thread_name_prefix="answers")
        try:
            while True:
                while len(running) < self.concurrency and (item := next(waiting, None)):
                    body = self._body(spec, item[1])
                    running[pool.submit(_complete, self._client, body)] = item[0]
                if not running:
                    return
                for done in wait(running, return_when=FIRST_COMPLETED).done:
                    index = running.pop(done)
                    yield index, self._read(spec, questions[index], done.result())
        except BaseException:
            self._client.stop()
            self._client = None
            raise
        finally:
            pool.shutdown(wait=False, cancel_futures=True)

    def _connect(self, spec: TargetSpec, first: Question) -> Client:
        """Find out which model is served and whether it speaks token ids."""
        key = os.environ.get(self.api_key_env, "") if self.api_key_env else ""
        client = Client(
            [self.url] if isinstance(self.url, str) else list(self.url),
            key,
            self.timeout,
            self.retries,
            self.first_wait,
        )
        try:
            self._served = self.model or _only_model(client)
            short = Question(first.ids, 1)
            try:
                self._by_ids = True
                client.call("/completions", self._body(spec, short))
            except Refused as error:
                if error.status not in (400, 404, 422, 501):
                    raise
                self._by_ids = False
                client.call("/completions", self._body(spec, short))
                log.info("the server takes no token ids (%s): text is sent and tokenized", error)
        except Refused as error:
            hint = f"; is the key in ${self.api_key_env}?" if error.status in (401, 403) else ""
            raise UserError(f"data.answers.url: the server says {error}{hint}") from error
        return client

    def _body(self, spec: TargetSpec, question: Question) -> dict[str, Any]:
        body: dict[str, Any] = {
            "model": self._served,
            "max_tokens": question.limit,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "frequency_penalty": 0.0,
        }
        if self.temperature > 0:
            body["seed"] = self.question_seed(question)
        if self._by_ids:  # says too what else a target's generation config might bend
            return body | {
                "prompt": list(question.ids),
                "return_token_ids": True,
                "skip_special_tokens": False,
                "stop_token_ids": sorted(spec.stop_ids),
                "top_k": self.top_k or -1,
                "min_p": 0.0,
                "repetition_penalty": 1.0,
            }
        if self.top_k is not None:
            body["top_k"] = self.top_k
        return body | {"prompt": str(spec.tokenizer.decode(list(question.ids)))}

    def _read(
        self, spec: TargetSpec, question: Question, found: dict[str, Any] | Refused
    ) -> Answer:
        if isinstance(found, Refused):
            return self._no_answer(found)
        self._answered += 1
        return read_answer(spec, question, found["choices"][0], found.get("usage") or {})

    def _no_answer(self, error: Refused) -> Answer:
        self._refused += 1
        if error.status in (401, 403, 404):
            raise UserError(f"data.answers.url: the server says {error}") from error
        if self._refused >= _FEW and self._refused > _MOST_REFUSED * self._answered:
            raise UserError(
                f"data.answers.url: the server refused {self._refused} prompts, such as "
                f"with {error}"
            ) from error
        if self._refused <= 3:
            log.warning("the server refuses a prompt, which is left out: %s", error)
        return Answer([], "refused")


def _complete(client: Client, body: dict[str, Any]) -> dict[str, Any] | Refused:
    """Return a completion whose first choice ended by a stop token or the limit."""
    found: dict[str, Any] = {}
    for _ in range(client.retries + 1):
        try:
            found = client.call("/completions", body)
        except Refused as error:
            return error
        choice = next(iter(found.get("choices") or []), None)
        if isinstance(choice, dict) and choice.get("finish_reason") in ("stop", "length"):
            return found
        time.sleep(min(1.0, client.first_wait))
    raise UserError(
        "data.answers.url: the server sends no choice that ended by stop or length: "
        f"{str(found)[:200]}"
    )


def read_answer(
    spec: TargetSpec, question: Question, choice: dict[str, Any], usage: dict[str, Any]
) -> Answer:
    """Return the answer of a completion's choice as token ids.

    Args:
        spec: The target; its tokenizer is used where the choice has text only.
        question: What was asked.
        choice: With `finish_reason`, `text` and, from vLLM, `token_ids` and `stop_reason`.
        usage: `prompt_tokens` and `completion_tokens`, where the server counts.

    Raises:
        UserError: The server reads the prompt as other tokens than ours.
    """
    read = usage.get("prompt_tokens")
    if isinstance(read, int) and read != len(question.ids):
        raise UserError(
            f"data.answers.url: the server reads {read} tokens where the prompt has "
            f"{len(question.ids)}: it serves another tokenizer, or adds a begin token of its own"
        )
    counted = usage.get("completion_tokens")
    given = choice.get("token_ids")
    exact = isinstance(given, list)
    ids = list(given or []) if exact else answer_ids(spec, question, str(choice.get("text") or ""))
    if choice["finish_reason"] == "length":
        found = finished(ids[: question.limit], spec.stop_ids)
    elif ids and ids[-1] in spec.stop_ids:
        found = finished(ids, spec.stop_ids)
    else:
        found = finished([*ids, _stop_id(spec, choice)], spec.stop_ids)
    if exact or not isinstance(counted, int):
        return Answer(found.ids, found.finish, exact)
    # servers differ in whether they count the stop token
    shortest = len(found.ids) - (found.finish == "stop")
    return Answer(found.ids, found.finish, shortest <= counted <= len(found.ids))


def answer_ids(spec: TargetSpec, question: Question, text: str) -> list[int]:
    """Tokenize an answer's text as it stands behind its prompt.

    Together with the prompt where that leaves the prompt's tokens as they are, so that a tokenizer
    which puts a space before a text does not put one between them; else alone.
    """
    prompt = list(question.ids)
    before = str(spec.tokenizer.decode(prompt))
    together = list(spec.tokenizer(before + text, add_special_tokens=False).input_ids)
    if together[: len(prompt)] == prompt:
        return together[len(prompt) :]
    return list(spec.tokenizer(text, add_special_tokens=False).input_ids)


def _stop_id(spec: TargetSpec, choice: dict[str, Any]) -> int:
    """Return the stop token that ended the answer; servers leave it out of the text."""
    reason = choice.get("stop_reason")
    if isinstance(reason, int) and reason in spec.stop_ids:
        return reason
    own = spec.tokenizer.eos_token_id
    return own if own in spec.stop_ids else min(spec.stop_ids)


def _only_model(client: Client) -> str:
    found = client.call("/models").get("data")
    names = [str(m.get("id")) for m in found or [] if isinstance(m, dict)]
    if len(names) != 1:
        listed = ", ".join(names[:5]) or "none"
        raise UserError(f"data.answers.model: say which of the server's models it is ({listed})")
    return names[0]
