"""`generate` on a tiny run: what it shows, what it writes, what Ctrl-C leaves, what it refuses."""

import io
import json
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from tiny import save_tiny_target, tiny_tokenizer
from transformers import AutoModelForCausalLM

from dflash_lightning import __main__ as command_line
from dflash_lightning import streaming
from dflash_lightning.cli import main
from dflash_lightning.commands import COMMANDS, spell_out
from dflash_lightning.data.samples import prompt_ids
from dflash_lightning.decoding.proposer import DrafterProposer, Proposal
from dflash_lightning.drafter.model import Drafter
from dflash_lightning.errors import UserError
from dflash_lightning.generate import generate
from dflash_lightning.runs import load_drafter, load_run, target_of
from dflash_lightning.streaming import GREEN, PLAIN, Stream

PROMPT = "0 and 1?"
QUESTIONS = [f"{n} and {n + 1}?" for n in range(20)]


@pytest.fixture(scope="module")
def place(experiment: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a target, prompts, and one finished run; now and then a draft is accepted."""
    folder = tmp_path_factory.mktemp("generate")
    save_tiny_target(folder / "target")
    rows = [{"prompt": text} for text in QUESTIONS]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = {
        "base": str(experiment),
        "model": {"target": {"name": str(folder / "target")}, "draft_vocab": 60, "lr": 5e-3},
        "data": {
            "prompts": {"init_args": {"train": str(folder / "prompts.jsonl"), "held_out": 1}},
            "max_new_tokens": 32,
            "anchors": {"init_args": {"num_anchors": 16}},
            "features": "online",
            "cache_dir": str(folder / "cache"),
        },
        "decode": {"every_n_steps": None, "final_prompts": 1},
        "trainer": {
            "max_steps": 60,
            "val_check_interval": 60,
            "default_root_dir": str(folder / "runs"),
        },
    }
    (folder / "experiment.yaml").write_text(yaml.safe_dump(config))
    main(["fit", "-c", str(folder / "experiment.yaml")])
    return folder


@pytest.fixture(scope="module")
def run(place: Path) -> Path:
    return next((place / "runs").glob("*/version_0"))


Say = Callable[..., tuple[int, str, str]]


@pytest.fixture
def say(run: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Say:
    """Run `generate` as the command line does; gives status, standard output, standard error."""
    monkeypatch.setattr(command_line, "_quieten", lambda: None)

    def command(*flags: str, ckpt: Path | str = run) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["x", "generate", "--ckpt", str(ckpt), *flags])
        capsys.readouterr()
        status = command_line.run()
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    return command


@pytest.fixture
def rows(say: Say, place: Path, tmp_path: Path) -> Callable[..., list[dict[str, Any]]]:
    """Decode the file of prompts and return the results."""

    def command(*flags: str, ckpt: Path | None = None) -> list[dict[str, Any]]:
        out = tmp_path / "results.jsonl"
        options = {} if ckpt is None else {"ckpt": ckpt}
        status, shown, _ = say(
            "--file", str(place / "prompts.jsonl"), "--out", str(out), *flags, **options
        )
        assert (status, shown) == (0, "")
        return [json.loads(line) for line in out.read_text().splitlines()]

    return command


# ---- the stream ----------------------------------------------------------------------------------


def as_bytes(tokens: list[int]) -> str:
    return bytes(tokens).decode(errors="replace")


def streamed(text: str, sizes: list[int], colored: bool = False) -> str:
    """Stream the bytes of `text` in commits of so many tokens, all but the last one accepted."""
    out, tokens = io.StringIO(), list(text.encode())
    stream = Stream(as_bytes, out, colored)
    while tokens:
        size = sizes.pop(0) if sizes else 1
        stream.commit(tokens[:size], size - 1)
        tokens = tokens[size:]
        assert "\ufffd" not in out.getvalue()
    stream.close()
    return out.getvalue()


@pytest.mark.parametrize("sizes", [[], [2, 3], [5, 1, 4], [100], [3, 3, 3, 3, 3, 3, 3]])
def test_stream_writes_the_text_and_holds_back_half_characters(sizes: list[int]) -> None:
    text = "naïve 日本 🙂🙃 é\n\nend"
    assert streamed(text, list(sizes)) == text + "\n"
    colored = streamed(text, list(sizes), colored=True)
    assert colored.replace(GREEN, "").replace(PLAIN, "") == text + "\n"


def test_stream_writes_at_once_and_only_new_text() -> None:
    out = io.StringIO()
    stream = Stream(as_bytes, out, colored=False)
    shown = []
    for tokens in (b"ab", b"c\xc3", b"\xa9", b"d"):
        stream.commit(list(tokens), 0)
        shown.append(out.getvalue())
    assert shown == ["ab", "abc", "abcé", "abcéd"]


def test_stream_colours_accepted_drafts_and_nothing_else() -> None:
    out = io.StringIO()
    stream = Stream(as_bytes, out, colored=True)
    stream.commit(list(b"a"), 0)
    stream.commit(list(b"bcd"), 2)
    stream.commit(list(b"e"), 0)
    stream.close()
    assert out.getvalue() == f"a{GREEN}bc{PLAIN}de\n"


def test_stream_shows_a_character_that_never_ends() -> None:
    out = io.StringIO()
    stream = Stream(as_bytes, out, colored=False)
    stream.commit([*b"a", 0xF0], 0)
    assert out.getvalue() == "a"
    stream.close()
    assert out.getvalue() == "a\ufffd\n"


# ---- one prompt ----------------------------------------------------------------------------------


def own_answer(place: Path, text: str, max_new_tokens: int) -> list[int]:
    """Return what transformers' greedy generation gives."""
    model: Any = AutoModelForCausalLM.from_pretrained(place / "target", dtype=torch.float32)
    ids = torch.tensor([prompt_ids(tiny_tokenizer(), [{"role": "user", "content": text}])])
    output = model.generate(
        ids, max_new_tokens=max_new_tokens, do_sample=False, eos_token_id=1, pad_token_id=2
    )
    return list(output[0, ids.shape[1] :].tolist())


def as_text(tokens: list[int]) -> str:
    return str(tiny_tokenizer().decode(tokens, skip_special_tokens=True))


def test_one_prompt_gives_the_targets_own_text(say: Say, place: Path) -> None:
    expected = own_answer(place, PROMPT, 40)
    status, out, err = say("--prompt", PROMPT, "--max_new_tokens", "40")
    assert status == 0
    assert out == as_text(expected) + "\n"
    assert re.fullmatch(
        rf"{len(expected)} tokens in \d+\.\d s: \d+\.\d tokens/s, "
        r"accept length \d\.\d\d over \d+ cycles\n",
        err,
    )


def draft_the_truth(place: Path, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Let the drafter be right about PROMPT: K = 4, so each cycle accepts three drafts."""
    truth = own_answer(place, PROMPT, 60)
    length = len(prompt_ids(tiny_tokenizer(), [{"role": "user", "content": PROMPT}]))

    def propose(self: DrafterProposer, *_: Any) -> Proposal:
        start = int(self.context.rows.lengths[0]) - length + 1
        return Proposal(torch.tensor([truth[start : start + 3]]))

    monkeypatch.setattr(DrafterProposer, "propose", propose)
    return truth


def test_colour_only_when_asked_or_on_a_terminal(
    say: Say, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens = draft_the_truth(place, monkeypatch)[:41]
    expected = as_text(tokens[:1])
    for start in range(1, 41, 4):
        drafts, bonus = as_text(tokens[start : start + 3]), as_text(tokens[start + 3 : start + 4])
        expected += (f"{GREEN}{drafts}{PLAIN}" if drafts else "") + bonus
    flags = ("--prompt", PROMPT, "--max_new_tokens", "41")
    _, plain, err = say(*flags)
    assert plain == as_text(tokens) + "\n"
    assert "accept length 4.00 over 10 cycles\n" in err
    _, colored, err = say(*flags, "--color", "always")
    assert colored == expected + "\n"
    assert err.endswith(" (green: accepted drafts)\n")
    monkeypatch.setattr(type(sys.stdout), "isatty", lambda self: True)
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert say(*flags)[1] == colored
    assert say(*flags, "--color", "never")[1] == plain
    monkeypatch.setenv("NO_COLOR", "1")
    assert say(*flags)[1] == plain


def test_prompt_comes_from_standard_input(say: Say, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = say("--prompt", PROMPT, "--max_new_tokens", "10")[1]
    monkeypatch.setattr(sys, "stdin", io.StringIO(PROMPT + "\n"))
    assert say("--max_new_tokens", "10")[1] == expected


def test_raw_leaves_out_the_chat_template(say: Say, place: Path) -> None:
    raw = say("--prompt", PROMPT, "--max_new_tokens", "10", "--raw")[1]
    assert raw != say("--prompt", PROMPT, "--max_new_tokens", "10")[1]
    model: Any = AutoModelForCausalLM.from_pretrained(place / "target", dtype=torch.float32)
    ids = torch.tensor([tiny_tokenizer()(PROMPT).input_ids])
    output = model.generate(ids, max_new_tokens=10, do_sample=False, eos_token_id=1, pad_token_id=2)
    assert raw == as_text(output[0, ids.shape[1] :].tolist()) + "\n"


def test_compare_says_speedup_and_whether_tokens_agree(say: Say) -> None:
    _, out, err = say("--prompt", PROMPT, "--max_new_tokens", "20", "--compare")
    assert out == say("--prompt", PROMPT, "--max_new_tokens", "20")[1]
    assert re.search(
        r"^plain decoding: 20 tokens in .* tokens/s; speedup \d+\.\d\d x; the same tokens$",
        err,
        re.M,
    )


def test_compare_says_where_outputs_part(say: Say, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = streaming.Decoder.plain

    def other(self: Any, prompts: Any, first: int = 0) -> Any:
        found = whole(self, prompts, first)
        for decoded in found:
            decoded.tokens[7] = (decoded.tokens[7] + 1) % 90
        return found

    monkeypatch.setattr(streaming.Decoder, "plain", other)
    err = say("--prompt", PROMPT, "--max_new_tokens", "20", "--compare")[2]
    assert re.search(r"differs from token 7 on \(the target's two logits lie [\d.]+ apart\)", err)


def test_one_token_has_no_accept_length(say: Say) -> None:
    status, _, err = say("--prompt", PROMPT, "--max_new_tokens", "1", "--compare")
    assert status == 0
    assert "nan" not in err
    assert "accept length" not in err


def test_smaller_and_longer_blocks_keep_the_text(say: Say, monkeypatch: pytest.MonkeyPatch) -> None:
    flags = ("--prompt", PROMPT, "--max_new_tokens", "20")
    expected = say(*flags)[1]
    used, decode = [], streaming.Decoder.decode

    def note(self: Any, *args: Any, **options: Any) -> Any:
        used.append(self.proposer.block_size)
        return decode(self, *args, **options)

    monkeypatch.setattr(streaming.Decoder, "decode", note)
    assert say(*flags, "--block_size", "2")[1] == expected
    assert say(*flags, "--block_size", "8", "--longer")[1] == expected
    assert used == [2, 8]


# ---- a file of prompts ---------------------------------------------------------------------------


def test_file_gives_one_row_a_prompt(
    rows: Callable[..., list[dict[str, Any]]], place: Path
) -> None:
    found = rows("--max_new_tokens", "24", "--batch_size", "6")
    assert [row["source"] for row in found] == [
        f"{place / 'prompts.jsonl'}:{n}" for n in range(1, 21)
    ]
    for row, text in zip(found, QUESTIONS, strict=True):
        assert row["token_ids"] == own_answer(place, text, 24)
        assert row["text"] == as_text(row["token_ids"])
        assert text in row["prompt"]
        stopped = row["token_ids"][-1] == 1
        assert row["finish_reason"] == ("stop" if stopped else "length")
        assert row["accept_len"] == (len(row["token_ids"]) - 1) / row["cycles"]


def test_rows_do_not_depend_on_the_batch(rows: Callable[..., list[dict[str, Any]]]) -> None:
    flags = ("--max_new_tokens", "12", "--temperature", "0.8", "--seed", "5")
    expected = rows(*flags, "--batch_size", "1")
    assert rows(*flags, "--batch_size", "7") == expected
    assert rows(*flags, "--batch_size", "7", "--seed", "6") != expected


def test_file_streams_rows_to_standard_output(say: Say, place: Path) -> None:
    status, out, err = say("--file", str(place / "prompts.jsonl"), "--max_new_tokens", "4")
    assert status == 0
    assert len([json.loads(line) for line in out.splitlines()]) == 20
    assert err.startswith("20 prompts, 80 tokens in ")


def test_file_compare(say: Say, place: Path, tmp_path: Path) -> None:
    _, _, err = say(
        *("--file", str(place / "prompts.jsonl"), "--out", str(tmp_path / "o")),
        *("--max_new_tokens", "6", "--compare"),
    )
    assert re.search(r"plain decoding: 120 tokens .* x; the same tokens for 20 of 20$", err, re.M)


def test_chats_are_answered_after_their_last_question(say: Say, tmp_path: Path) -> None:
    turns = [
        {"role": "user", "content": "a?"},
        {"role": "assistant", "content": "b"},
        {"role": "user", "content": "c?"},
    ]
    chats = [turns, [*turns, {"role": "assistant", "content": "dropped"}]]
    file = tmp_path / "chats.jsonl"
    file.write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in chats))
    out = say("--file", str(file), "--max_new_tokens", "6")[1]
    first, second = (json.loads(line) for line in out.splitlines())
    assert first["token_ids"] == second["token_ids"]
    assert "b<|im_end|>" in first["prompt"]
    assert "dropped" not in second["prompt"]
    status, _, err = say("--file", str(file), "--raw")
    assert (status, err) == (2, f"error: {file}:1: a chat of 3 messages can't be raw text\n")


# ---- sampling and stops --------------------------------------------------------------------------


@pytest.mark.parametrize("rule", ["match", "rejection"])
def test_seeds_reproduce_a_sample(say: Say, rule: str) -> None:
    flags = ("--prompt", PROMPT, "--max_new_tokens", "20", "--temperature", "1", "--rule", rule)
    first = say(*flags, "--seed", "1", "--compare")
    assert say(*flags, "--seed", "1")[1] == first[1]
    assert say(*flags, "--seed", "2")[1] != first[1]
    assert "same tokens" not in first[2]
    assert "differs" not in first[2]


def test_sampling_flags_arrive(say: Say) -> None:
    greedy = say("--prompt", PROMPT, "--max_new_tokens", "20")[1]
    flags = ("--prompt", PROMPT, "--max_new_tokens", "20", "--temperature", "1")
    sampled = say(*flags)[1]
    assert sampled != greedy
    assert say(*flags, "--top_k", "1")[1] == greedy
    assert say(*flags, "--top_p", "0.0001")[1] == greedy
    assert say(*flags, "--repetition_penalty", "3")[1] != sampled


def test_stop_tokens_end_the_output(say: Say, place: Path) -> None:
    tokens = own_answer(place, PROMPT, 40)
    vocabulary = {i: token for token, i in tiny_tokenizer().get_vocab().items()}
    stops = [n for n, i in enumerate(tokens) if vocabulary.get(i, "0").isalpha() and n > 3]
    first, later = stops[0], next(n for n in stops if tokens[n] not in tokens[: stops[0] + 1])
    flags = ("--prompt", PROMPT, "--max_new_tokens", "40")
    letter, other = vocabulary[tokens[first]], vocabulary[tokens[later]]
    end = tokens.index(tokens[first]) + 1
    assert say(*flags, "--stop", letter)[1] == as_text(tokens[:end]) + "\n"
    assert say(*flags, "--stop", f'["{other}", "{letter}"]')[1] == as_text(tokens[:end]) + "\n"
    end = tokens.index(tokens[later]) + 1
    assert say(*flags, "--stop", other)[1] == as_text(tokens[:end]) + "\n"


# ---- which run -----------------------------------------------------------------------------------


def test_run_drafter_folder_and_checkpoint_give_the_same_rows(
    rows: Callable[..., list[dict[str, Any]]], run: Path, tmp_path: Path
) -> None:
    expected = rows("--max_new_tokens", "10")
    checkpoint = next((run / "checkpoints").glob("*.ckpt"))
    (tmp_path / "unfinished" / "checkpoints").mkdir(parents=True)
    (tmp_path / "unfinished" / "checkpoints" / "last.ckpt").symlink_to(checkpoint)
    for ckpt in (run / "drafter", checkpoint, tmp_path / "unfinished"):
        assert rows("--max_new_tokens", "10", ckpt=ckpt) == expected, ckpt


def test_saved_drafter_finds_its_target_again(run: Path, place: Path) -> None:
    config = Drafter.from_pretrained(run / "drafter").config
    assert (config.target_name, config.target_dtype) == (str(place / "target"), "float32")
    assert config.target_revision is None
    target, drafter = load_run(run, place / "cache")
    assert (target.dtype, target.fingerprint) == (torch.float32, config.target_fingerprint)
    assert not drafter.training


def test_revision_goes_with_the_trained_name_only(
    run: Path, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []
    monkeypatch.setattr("dflash_lightning.runs.inspect_target", lambda c, _: asked.append(c))
    drafter = load_drafter(run)
    drafter.config.target_revision = "v2"
    target_of(drafter, place)
    target_of(drafter, place, "other/name")
    assert [(c.name, c.revision) for c in asked] == [
        (str(place / "target"), "v2"),
        ("other/name", None),
    ]
    assert asked[0].dtype == "float32"


def test_moved_target_is_named(say: Say, place: Path, tmp_path: Path) -> None:
    save_tiny_target(tmp_path / "moved")
    flags = ("--prompt", PROMPT, "--max_new_tokens", "10")
    assert say(*flags, "--target", str(tmp_path / "moved"))[:2] == say(*flags)[:2]


# ---- Ctrl-C --------------------------------------------------------------------------------------


def interrupt_after(commits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Raise as Ctrl-C does, after so many commitments."""
    commit, left = streaming.Progress.commit, [commits]

    def interrupted(self: Any, index: int, tokens: list[int], accepted: int) -> None:
        if not left[0]:
            raise KeyboardInterrupt
        left[0] -= 1
        commit(self, index, tokens, accepted)

    monkeypatch.setattr(streaming.Progress, "commit", interrupted)


def test_interrupt_keeps_the_text_so_far(say: Say, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = say("--prompt", PROMPT, "--max_new_tokens", "40")[1]
    interrupt_after(10, monkeypatch)
    status, out, err = say("--prompt", PROMPT, "--max_new_tokens", "40", "--compare")
    assert status == 130
    assert out.endswith("\n")
    assert len(out) > 5
    assert whole.startswith(out[:-1])
    assert re.match(r"interrupted: \d+ tokens in .* over 9 cycles\n$", err)


def test_interrupt_keeps_the_rows_so_far(
    say: Say, place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def flags(name: str) -> list[str]:
        options = ["--max_new_tokens", "5", "--batch_size", "3", "--block_size", "2"]
        return ["--file", str(place / "prompts.jsonl"), "--out", str(tmp_path / name), *options]

    def read(name: str) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (tmp_path / name).read_text().splitlines()]

    say(*flags("whole"))
    whole = read("whole")
    done = sum(row["cycles"] + 1 for row in whole[:3])
    interrupt_after(done + 5, monkeypatch)  # 2, 2 and 1 commitments of the second batch
    status, _, err = say(*flags("cut"))
    assert status == 130
    cut = read("cut")
    assert cut[:3] == whole[:3]
    assert [row["source"] for row in cut] == [row["source"] for row in whole[:6]]
    assert [row["finish_reason"] for row in cut[3:]] == ["interrupted"] * 3
    for part, row in zip(cut[3:], whole[3:6], strict=True):
        assert part["token_ids"] == row["token_ids"][: len(part["token_ids"])]
        assert part["text"] == as_text(part["token_ids"])
    assert [row["cycles"] for row in cut[3:]] == [1, 1, 0]
    assert err.startswith("interrupted, 20 prompts asked: 6 prompts, ")


def test_interrupt_of_plain_decoding_writes_no_row_twice(
    say: Say, place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(streaming.Decoder, "plain", interrupted)
    flags = ["--file", str(place / "prompts.jsonl"), "--out", str(tmp_path / "out")]
    options = ("--compare", "--max_new_tokens", "5", "--batch_size", "3")
    status, _, err = say(*flags, *options)
    assert status == 130
    assert len((tmp_path / "out").read_text().splitlines()) == 3
    assert err.startswith("interrupted, 20 prompts asked: 3 prompts, ")


def test_signal_ends_the_process_cleanly(run: Path, tmp_path: Path) -> None:
    file, out = tmp_path / "prompts.jsonl", tmp_path / "out.jsonl"
    file.write_text('{"prompt": "0 and 1?"}\n' * 2000)
    command = [sys.executable, "-m", "dflash_lightning", "generate", "--ckpt", str(run)]
    flags = ["--file", str(file), "--out", str(out), "--batch_size", "2", "--max_new_tokens", "100"]
    process = subprocess.Popen(
        [*command, *flags],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a shell's `&` ignores it
    )
    try:
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline and not (out.is_file() and out.stat().st_size):
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        shown, err = process.communicate(timeout=60)
    finally:
        process.kill()
    assert (process.returncode, shown) == (130, "")
    assert "Traceback" not in err
    assert err.splitlines()[-1].startswith("interrupted, 2000 prompts asked: ")
    found = [json.loads(line) for line in out.read_text().splitlines()]
    assert 2 <= len(found) < 2000
    assert all(row["finish_reason"] != "interrupted" for row in found[:2])


# ---- bad input -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--prompt|", "--prompt: the prompt is empty"),
        ("--prompt| \n", "the prompt is empty"),
        ("--prompt|\udcff", "not UTF-8"),
        (
            "--prompt|a",
            "error: --prompt: 20 prompt tokens and max_new_tokens=256 exceed",
        ),
        ("--prompt|a|--max_new_tokens|0", "max_new_tokens: needs at least 1, got 0"),
        ("--prompt|a|--max_new_tokens|many", "max_new_tokens"),
        ("--prompt|a|--batch_size|0", "batch_size: needs at least 1, got 0"),
        ("--prompt|a|--block_size|5", "block_size: the drafter was trained with 4; 5 needs"),
        ("--prompt|a|--block_size|1|--longer", "block_size: needs at least 2"),
        ("--prompt|a|--temperature|-1", "temperature: needs 0 (greedy) or more"),
        ("--prompt|a|--top_k|0", "top_k: needs at least 1"),
        ("--prompt|a|--top_p|1.5", "top_p: needs more than 0"),
        ("--prompt|a|--rule|typical", "rule"),
        ("--prompt|a|--stop|ab", "--stop: 'ab' is 2 tokens of this target"),
        ("--prompt|a|--stop|", "--stop: '' is 0 tokens"),
        ("--prompt|a|--stop|é", "--stop: 'é' is an unknown token"),
        ("--prompt|a|--color|red", "color"),
        ("--prompt|a|--device|gpu", "--device: gpu can't be used here"),
        ("--prompt|a|--target|./nowhere", "no such folder: ./nowhere; --target says where"),
        ("--prompt|a|--file|{prompts}", "--prompt and --file exclude each other"),
        ("--prompt|a|--out|x.jsonl", "--out goes with --file"),
        ("--prompt|a|--promt|b", "--promt b (see python -m dflash_lightning generate --help)"),
        ("--prom|a", "--prom a"),
        ("--file|nowhere.jsonl", "--file: no such file: nowhere.jsonl"),
        ("--file|{prompts}|--out|nowhere/x.jsonl", "--out: can't write nowhere/x.jsonl"),
        ("--file|{prompts}|--out|{here}", "--out: can't write"),
        ("--file|{prompts}|--out|{prompts}", "is the file of the prompts"),
        ("--file|{bad}|--max_new_tokens|9", "bad.jsonl:2: not JSON"),
        ("--file|{blank}|--max_new_tokens|9", "blank.jsonl:3: the prompt is empty"),
        ("--file|{answered}|--max_new_tokens|9", "answered.jsonl:1: the prompt is empty"),
        ("--file|{long}|--max_new_tokens|9", "long.jsonl:2: "),
        ("--file|{empty}|--max_new_tokens|9", "--file: there is no prompt in"),
    ],
)
def test_bad_input_is_one_line(
    say: Say, place: Path, tmp_path: Path, flags: str, words: str
) -> None:
    good = '{"prompt": "a"}\n'
    files = {
        "bad": good + '{"prompt": \n',
        "blank": good + "\n" + '{"prompt": " "}\n',
        "answered": '{"messages": [{"role": "assistant", "content": "a"}]}\n',
        "long": good + json.dumps({"prompt": "a" * 300}) + "\n",
        "empty": "\n",
    }
    names = {"prompts": str(place / "prompts.jsonl"), "here": str(tmp_path)}
    for name, text in files.items():
        (tmp_path / f"{name}.jsonl").write_text(text)
        names[name] = str(tmp_path / f"{name}.jsonl")
    before = (place / "prompts.jsonl").read_bytes()
    status, out, err = say(*flags.format(**names).split("|"))
    assert (status, out) == (2, "")
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert words in err
    assert (place / "prompts.jsonl").read_bytes() == before


def test_bad_input_leaves_an_old_result_alone(say: Say, tmp_path: Path) -> None:
    (tmp_path / "bad.jsonl").write_text("{}\n")
    (tmp_path / "old.jsonl").write_text("old\n")
    flags = ("--file", str(tmp_path / "bad.jsonl"), "--out", str(tmp_path / "old.jsonl"))
    assert say(*flags)[0] == 2
    assert (tmp_path / "old.jsonl").read_text() == "old\n"


def test_ckpt_that_is_nothing_of_ours(say: Say, run: Path, place: Path, tmp_path: Path) -> None:
    (tmp_path / "text.ckpt").write_text("hello")
    torch.save({"state_dict": {}}, tmp_path / "foreign.ckpt")
    broken = {"config.json": "[]", "model.safetensors": "x"}
    for name, text in broken.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text((run / "drafter" / "config.json").read_text())
        (tmp_path / name / name).write_text(text)
    cases = {
        tmp_path / "nowhere": "--ckpt: no run, drafter folder or .ckpt file at",
        place / "runs": "--ckpt: no run, drafter folder or .ckpt file at",
        tmp_path / "text.ckpt": "is no checkpoint of dflash_lightning",
        tmp_path / "foreign.ckpt": "is no checkpoint of dflash_lightning",
        place / "target": "holds no drafter of dflash_lightning but a llama",
        tmp_path / "config.json": "is not a JSON object",
        tmp_path / "model.safetensors": "can't be read",
    }
    for ckpt, words in cases.items():
        status, out, err = say("--prompt", "a", ckpt=ckpt)
        assert (status, out, err.count("\n")) == (2, "", 1), err
        assert words in err


def test_drafter_that_lacks_weights_is_refused(run: Path, tmp_path: Path) -> None:
    drafter = load_drafter(run)
    weights = {k: v for k, v in drafter.state_dict().items() if not k.startswith("fc")}
    drafter.save_pretrained(tmp_path / "cut", state_dict=weights)
    with pytest.raises(UserError, match=r"lacks the weights fc\.weight"):
        load_drafter(tmp_path / "cut")


@pytest.mark.parametrize("change", ["other weights", "fewer layers"])
def test_drafter_of_another_target_is_refused(say: Say, tmp_path: Path, change: str) -> None:
    folder = save_tiny_target(tmp_path / "other", "qwen3")
    if change == "fewer layers":
        config = json.loads((folder / "config.json").read_text())
        config.update(num_hidden_layers=4, layer_types=["full_attention"] * 4)
        (folder / "config.json").write_text(json.dumps(config))
    status, out, err = say("--prompt", "a", "--max_new_tokens", "9", "--target", str(folder))
    assert (status, out) == (2, "")
    words = "was trained for another target" if change == "other weights" else "target_layer_ids"
    assert words in err.splitlines()[-1]
    assert err.splitlines()[-1].startswith("error: ")


def test_changed_target_folder_is_refused(say: Say, run: Path, place: Path, tmp_path: Path) -> None:
    folder = save_tiny_target(tmp_path / "tuned")
    model: Any = AutoModelForCausalLM.from_pretrained(folder)
    model.model.layers[3].mlp.up_proj.weight.data += 0.1
    model.save_pretrained(folder)
    drafter = load_drafter(run)
    drafter.config.target_name = str(folder)
    drafter.save_pretrained(tmp_path / "drafter")
    status, _, err = say("--prompt", "a", "--max_new_tokens", "9", ckpt=tmp_path / "drafter")
    assert status == 2
    assert "was trained for another target" in err
    assert "target_fingerprint" in err


# ---- the command line ----------------------------------------------------------------------------


def test_help_lists_the_commands(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command_line, "_quieten", lambda: None)
    monkeypatch.setattr(sys, "argv", ["x", "--help"])
    assert command_line.run() == 0
    out = capsys.readouterr().out
    assert "fit" in out
    for name, words in COMMANDS.items():
        assert re.search(rf"^    {name} +{re.escape(words)}$", out, re.M)


def test_help_of_the_command_is_quick_and_in_words() -> None:
    code = (
        "import sys; from dflash_lightning.__main__ import run\n"
        "sys.argv = ['x', 'generate', '--help']\n"
        "try: run()\n"
        "finally: print(sorted({'torch', 'lightning', 'transformers'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    text = " ".join(done.stdout.split())
    assert text.endswith("[]")
    for words in ("ends with status 130", "Longest output, in tokens", "Permit a block size"):
        assert words in text


def test_bare_switches() -> None:
    assert spell_out(generate, ["--longer", "--compare", "false", "--prompt", "--raw"]) == [
        *("--longer", "true", "--compare", "false", "--prompt", "--raw", "true")
    ]


def test_closed_output_ends_quietly(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Closed(io.StringIO):
        def write(self, text: str) -> int:
            raise BrokenPipeError

        def fileno(self) -> int:
            return file.fileno()

    monkeypatch.setattr(command_line, "_quieten", lambda: None)
    flags = ["--ckpt", str(run), "--prompt", "a", "--max_new_tokens", "9"]
    monkeypatch.setattr(sys, "argv", ["x", "generate", *flags])
    with (tmp_path / "closed").open("w") as file:
        monkeypatch.setattr(sys, "stdout", Closed())
        assert command_line.run() == 141
        file.write("this goes to the null device, so that nothing complains at exit")
    assert (tmp_path / "closed").read_text() == ""
    assert capsys.readouterr().err == ""
