"""Answers from a server: faults lose and repeat nothing, ids are the target's, the key is safe."""

import json
import logging
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from proxy import FAULTS, Loopback, Reply, forward, plain, serving
from test_chats import spec_of
from tiny import EOS, VOCAB, tiny_model, tiny_tokenizer

from dflash_lightning.data.answers import Answer
from dflash_lightning.data.client import Client
from dflash_lightning.data.prepare import AnswerBook, windows
from dflash_lightning.data.server import Question as Asked
from dflash_lightning.data.server import ServerAnswers, read_answer
from dflash_lightning.errors import UserError
from dflash_lightning.target_spec import TargetSpec

SPEC = spec_of()
TOKENIZER = SPEC.tokenizer
PROMPTS = [list(TOKENIZER(f"<|im_start|>{n * n}" + "?" * (n % 5)).input_ids) for n in range(40)]
LIMIT = 12


def completion(ids: Sequence[int], limit: int) -> tuple[list[int], str]:
    """Return what the made-up target answers: its ids and why it ended."""
    drawn = random.Random(str(list(ids)))
    said = [drawn.randrange(5, 88) for _ in range(drawn.randrange(1, LIMIT + 6))]
    return (said[:limit], "length") if len(said) >= limit else ([*said, EOS], "stop")


def speaks_ids(path: str, body: bytes, headers: Any) -> Reply:
    """As vLLM: token ids go in and come out."""
    if path == "/v1/models":
        return plain({"data": [{"id": "the-target"}]})
    asked = json.loads(body)
    ids, reason = completion(asked["prompt"], asked["max_tokens"])
    text = str(TOKENIZER.decode(ids))
    return plain({"choices": [{"text": text, "token_ids": ids, "finish_reason": reason}]})


def speaks_text(path: str, body: bytes, headers: Any) -> Reply:
    """As `transformers serve`: text only, without special tokens; unknown fields are refused."""
    if path == "/v1/models":
        return plain({"data": [{"id": "the-target"}]})
    asked = json.loads(body)
    if not isinstance(asked["prompt"], str) or "return_token_ids" in asked:
        return 422, b'{"detail": "unexpected field"}'
    prompt = TOKENIZER(asked["prompt"]).input_ids
    ids, reason = completion(prompt, asked["max_tokens"])
    usage = {"prompt_tokens": len(prompt), "completion_tokens": len(ids)}
    text = str(TOKENIZER.decode(ids, skip_special_tokens=True))
    return plain({"choices": [{"text": text, "finish_reason": reason}], "usage": usage})


def backend(url: str | list[str], **options: Any) -> ServerAnswers:
    given = {"concurrency": 6, "shard_size": 4, "timeout": 5.0, **options}
    found = ServerAnswers(url, **given)
    found.first_wait = 0.002
    return found


def never() -> Any:
    raise AssertionError("the target was loaded here")


def ask(
    answers: ServerAnswers,
    cache: Path,
    prompts: Sequence[Sequence[int]] = PROMPTS,
    spec: TargetSpec = SPEC,
) -> list[Answer]:
    book = AnswerBook(answers, spec, never, LIMIT, cache)
    try:
        return [a for window in windows(prompts, book.window) for a in book.ask(window)]
    finally:
        book.close()


EXPECTED = [Answer(*completion(p, LIMIT)) for p in PROMPTS]  # type: ignore[arg-type]


@pytest.mark.parametrize("reply", [speaks_ids, speaks_text])
def test_answers_are_the_servers(reply: Callable[..., Reply], tmp_path: Path) -> None:
    assert {a.finish for a in EXPECTED} == {"stop", "length"}
    with serving(Loopback(reply)) as server:
        assert ask(backend(server.url), tmp_path) == EXPECTED
        assert 1 < server.at_once <= 6
        probes = 1 if reply is speaks_ids else 2
        assert sum(server.seen.values()) == len(PROMPTS) + probes
    assert ask(backend(server.url), tmp_path) == EXPECTED, "from disk, the server being gone"


@pytest.mark.parametrize("reply", [speaks_ids, speaks_text])
def test_faults_lose_and_repeat_nothing(reply: Callable[..., Reply], tmp_path: Path) -> None:
    """Every request meets one to three faults, each kind in turn."""

    def plan(nth: int) -> list[str]:
        return [FAULTS[(nth + k) % len(FAULTS)] for k in range(1 + nth % 3)]

    with serving(Loopback(reply, plan)) as server:
        assert ask(backend(server.url, timeout=0.3), tmp_path) == EXPECTED
        assert set(FAULTS) <= set(server.met)
        assert max(server.given.values()) == 1, "no answer was asked for again once it was whole"
    rows = [line for f in tmp_path.rglob("*.jsonl") for line in f.read_text().splitlines()]
    assert len(rows) == len(PROMPTS)


def test_several_servers_share_the_work(tmp_path: Path) -> None:
    with serving(Loopback(speaks_ids)) as one, serving(Loopback(speaks_ids)) as two:
        assert ask(backend([one.url, two.url], model="the-target"), tmp_path) == EXPECTED
        assert min(sum(s.seen.values()) for s in (one, two)) > len(PROMPTS) // 3


def test_dead_server_is_given_up_and_what_is_there_is_kept(tmp_path: Path) -> None:
    answered = threading.Event()

    def dies(path: str, body: bytes, headers: Any) -> Reply:
        if b'"max_tokens": 1,' not in body and len(server.given) > 20:
            answered.set()
            return 503, b"{}"
        return speaks_ids(path, body, headers)

    server = Loopback(dies)
    with serving(server), pytest.raises(UserError) as caught:
        ask(backend(server.url, retries=2), tmp_path)
    message = str(caught.value)
    assert "failed 3 times" in message
    assert "status 503" in message
    assert "start again to go on" in message
    assert "\n" not in message
    kept = len(list(tmp_path.rglob("*.jsonl")))
    assert kept > 1
    with serving(Loopback(speaks_ids)) as alive:
        assert ask(backend(alive.url), tmp_path) == EXPECTED
        assert sum(alive.given.values()) == len(PROMPTS) - 4 * kept + 1


def test_giving_up_waits_for_nobody(tmp_path: Path) -> None:
    """One request fails for good while the others hang: the error comes at once, threads end."""
    hang = threading.Event()

    def hangs(path: str, body: bytes, headers: Any) -> Reply:
        if body and json.loads(body)["max_tokens"] > 1:
            if json.loads(body)["prompt"] == PROMPTS[3]:
                return 503, b"{}"
            hang.wait(30)
        return speaks_ids(path, body, headers)

    start = time.monotonic()
    with serving(Loopback(hangs)) as server, pytest.raises(UserError, match="503"):
        ask(backend(server.url, retries=1, timeout=60.0), tmp_path)
    while any(t.name.startswith("answers") for t in threading.enumerate()):
        assert time.monotonic() - start < 10, "a thread still waits"
        time.sleep(0.01)
    hang.set()


def test_kill_and_start_again_gives_the_same_bytes(tmp_path: Path) -> None:
    def slowly(path: str, body: bytes, headers: Any) -> Reply:
        time.sleep(0.02)
        return speaks_ids(path, body, headers)

    with serving(Loopback(slowly)) as server:
        ask(backend(server.url), tmp_path / "straight")
        for shards in (1, 5):
            child = os.fork()
            if child == 0:
                try:
                    ask(backend(server.url), tmp_path / "killed")
                finally:
                    os._exit(0)
            while len(list((tmp_path / "killed").rglob("*.jsonl"))) < shards:
                time.sleep(0.001)
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
        assert 5 <= len(list((tmp_path / "killed").rglob("*.jsonl"))) < 10
        ask(backend(server.url), tmp_path / "killed")
    straight, killed = (
        {f.name: f.read_bytes() for f in (tmp_path / name).rglob("*.jsonl")}
        for name in ("straight", "killed")
    )
    assert killed == straight


def test_refused_prompts_are_left_out_and_counted(tmp_path: Path) -> None:
    def refuses(path: str, body: bytes, headers: Any) -> Reply:
        if body and json.loads(body)["prompt"] == PROMPTS[7]:
            return 400, b'{"error": "too long for me"}'
        return speaks_ids(path, body, headers)

    with serving(Loopback(refuses)) as server:
        found = ask(backend(server.url), tmp_path)
    assert found[7] == Answer([], "refused")
    assert found[:7] + found[8:] == EXPECTED[:7] + EXPECTED[8:]


@pytest.mark.parametrize(
    ("status", "reason"), [(401, "OPENAI_API_KEY"), (404, "404"), (400, "400"), (302, "302")]
)
def test_server_that_refuses_everything_is_one_line(
    tmp_path: Path, status: int, reason: str
) -> None:
    def refuses(path: str, body: bytes, headers: Any) -> Reply:
        return status, b'{"error": "no\\nand no"}'

    with serving(Loopback(refuses)) as server, pytest.raises(UserError, match=reason) as caught:
        ask(backend(server.url, model="x"), tmp_path)
    assert "\n" not in str(caught.value)
    assert not list(tmp_path.rglob("*.jsonl"))


def test_model_must_be_named_where_the_server_has_several(tmp_path: Path) -> None:
    def several(path: str, body: bytes, headers: Any) -> Reply:
        return plain({"data": [{"id": "a"}, {"id": "b"}]})

    with serving(Loopback(several)) as server, pytest.raises(UserError, match=r"\(a, b\)"):
        ask(backend(server.url), tmp_path)


def test_key_is_sent_and_shown_nowhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    secret = "sk-very-secret"
    monkeypatch.setenv("MY_KEY", secret + "\n")
    monkeypatch.setattr(logging.getLogger("dflash_lightning"), "propagate", True)
    caplog.set_level(logging.DEBUG)

    def echoes(path: str, body: bytes, headers: Any) -> Reply:
        if headers["Authorization"] != f"Bearer {secret}":
            return 401, b"{}"
        if b'"max_tokens": 1,' in body or not body:
            return speaks_ids(path, body, headers)
        return 429, json.dumps({"error": f"slow down, {headers['Authorization']}"}).encode()

    server = Loopback(echoes)
    answers = backend(server.url, api_key_env="MY_KEY", retries=1)
    with serving(server), pytest.raises(UserError) as caught:
        ask(answers, tmp_path)
    assert "slow down, Bearer ***" in str(caught.value)
    written = "".join(f.read_text() for f in tmp_path.rglob("*") if f.is_file())
    assert secret not in str(caught.value) + caplog.text + repr(answers) + written
    assert secret not in repr(Client([server.url], secret))


def test_sampling_reaches_the_server_with_a_seed_per_prompt(tmp_path: Path) -> None:
    bodies = []

    def records(path: str, body: bytes, headers: Any) -> Reply:
        bodies.append(json.loads(body or b"{}"))
        return speaks_ids(path, body, headers)

    with serving(Loopback(records)) as server:
        ask(backend(server.url, temperature=0.7, top_p=0.9, top_k=8, seed=3), tmp_path)
        asked = [b for b in bodies if b.get("max_tokens") == LIMIT]
        assert {(b["temperature"], b["top_p"], b["top_k"]) for b in asked} == {(0.7, 0.9, 8)}
        assert len({b["seed"] for b in asked}) == len(PROMPTS)
        seeds = {str(b["prompt"]): b["seed"] for b in asked}
        bodies.clear()
        ask(backend(server.url, temperature=0.7, seed=3), tmp_path)
        assert {
            str(b["prompt"]): b["seed"] for b in bodies if b.get("max_tokens") == LIMIT
        } == seeds
        bodies.clear()
        ask(backend(server.url), tmp_path)
        assert bodies[-1]["temperature"] == 0
        assert bodies[-1]["repetition_penalty"] == 1.0
        assert bodies[-1]["stop_token_ids"] == [EOS]


# ---- from text to ids --------------------------------------------------------


def test_text_is_tokenized_behind_its_prompt() -> None:
    asked = Asked(list(TOKENIZER("<|im_start|>hi").input_ids), 20)
    ids = list(TOKENIZER("yes").input_ids)

    def read(**choice: Any) -> Answer:
        usage = choice.pop("usage", {})
        return read_answer(SPEC, asked, {"finish_reason": "stop", "text": "yes", **choice}, usage)

    assert read() == Answer([*ids, EOS], "stop", False)
    for count, exact in ((3, True), (4, True), (5, False), (2, False)):
        found = read(usage={"prompt_tokens": 3, "completion_tokens": count})
        assert found == Answer([*ids, EOS], "stop", exact)
    found = read(finish_reason="length", usage={"completion_tokens": 3})
    assert found == Answer(ids, "length", True)
    assert read(token_ids=[9, 8]) == Answer([9, 8, EOS], "stop", True)
    assert read(token_ids=[9, EOS]) == Answer([9, EOS], "stop", True)
    assert read(token_ids=[]) == Answer([EOS], "stop", True)
    assert read(text="yes<|im_end|>") == Answer([*ids, EOS], "stop", False)
    with pytest.raises(UserError, match=r"reads 4 tokens where the prompt has 3"):
        read(usage={"prompt_tokens": 4})


def test_stop_token_is_the_one_the_server_names() -> None:
    spec = TargetSpec(**{**vars(SPEC), "stop_ids": frozenset({EOS, 4})})
    choice = {"finish_reason": "stop", "text": "a", "stop_reason": 4}
    asked = Asked([3], 20)
    assert read_answer(spec, asked, choice, {}).ids[-1] == 4
    assert read_answer(spec, asked, {**choice, "stop_reason": None}, {}).ids[-1] == EOS


# ---- a real server -----------------------------------------------------------


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, int]]:
    """`transformers serve` on loopback with a tiny target that says nothing special but its end."""
    folder = tmp_path_factory.mktemp("served")
    model, tokenizer = tiny_model("llama_untied"), tiny_tokenizer()
    special = {*tokenizer.all_special_ids, *range(len(tokenizer), VOCAB)} - {EOS}
    model.generation_config.suppress_tokens = sorted(special)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    start = (
        "from transformers.cli.serve import Serve; "
        f"Serve(force_model={str(folder)!r}, device='cpu', dtype='float32', host='127.0.0.1', "
        f"port={port})"
    )
    with (folder / "log").open("w") as log:
        process = subprocess.Popen([sys.executable, "-c", start], stdout=log, stderr=log)
    try:
        reply = forward(port)
        for _ in range(600):
            try:
                reply("/v1/models", b"", {})
                break
            except OSError:
                assert process.poll() is None, (folder / "log").read_text()
                time.sleep(0.1)
        yield folder, port
    finally:
        process.kill()
        process.wait()


def test_transformers_serve_behind_faults(served: tuple[Path, int], tmp_path: Path) -> None:
    """Its answers are the target's greedy tokens, whatever happens on the way."""
    folder, port = served
    prompts = PROMPTS[:24]

    def plan(nth: int) -> list[str]:
        return [FAULTS[nth % len(FAULTS)]] if nth % 2 else []

    with serving(Loopback(forward(port), plan, sleep=3.0)) as proxy:
        answers = backend(proxy.url, concurrency=3, timeout=2.5)
        found = ask(answers, tmp_path, prompts)
        assert not answers._by_ids, "it takes text only"
        assert sum(proxy.met.values()) > len(prompts) + 10
        assert max(proxy.given.values()) == 1
    model = type(tiny_model("llama_untied")).from_pretrained(folder).eval()
    for prompt, answer in zip(prompts, found, strict=True):
        expected = model.generate(
            torch.tensor([prompt]), max_new_tokens=LIMIT, do_sample=False, pad_token_id=2
        )[0, len(prompt) :].tolist()
        assert answer.ids == expected
        assert answer.finish == ("stop" if expected[-1] == EOS else "length")
        assert answer.exact
    assert len({tuple(a.ids) for a in found}) > 10
