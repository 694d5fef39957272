"""Tests of the frozen target: its taps, its borrowed embedding and head, its mask token, and how it
is found on disk.
"""

import json
import shutil
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from reference import hook_count, token_ids, training_module, wrap_layers
from safetensors.torch import load_file, save_file
from tiny import (
    ARCHITECTURES,
    EOS,
    MASK,
    tiny_drafter,
    tiny_model,
    tiny_target,
    tiny_tokenizer,
)
from torch import Tensor
from transformers import AutoModelForCausalLM, GPT2Config, GraniteConfig
from transformers.cache_utils import DynamicCache

from dflash_lightning import target_files
from dflash_lightning.errors import UserError
from dflash_lightning.target import Target, load_target
from dflash_lightning.target_files import fingerprint, target_folder
from dflash_lightning.target_rules import (
    FINAL,
    check_layer_ids,
    check_mask_token_id,
    choose_mask_token_id,
    default_layer_ids,
    reserved_token_ids,
)
from dflash_lightning.target_spec import TargetConfig, inspect_target

RESERVED = {0: "bos", EOS: "eos", 2: "pad"}


def stamp(index: int, output: Tensor) -> Tensor:
    """Write `100 + index` into channel 0 of a layer's output."""
    output = output.clone()
    output[..., 0] = 100.0 + index
    return output


# ---- taps ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("taps", [(0,), (1, 3, 5), (0, 6)])
def test_a_tap_is_the_output_of_its_layer(architecture: str, taps: tuple[int, ...]) -> None:
    """Each layer signs its output; the features carry the signatures of the tapped ids,
    in order.
    """
    target = tiny_target(architecture, taps=taps)
    wrap_layers(target, stamp)
    ids = token_ids(7)[None]
    hidden = target.forward(ids).hidden
    assert hidden is not None
    assert hidden.shape == (1, 7, len(taps) * 32)
    for place, layer in enumerate(taps):
        assert (hidden[..., place * 32] == 100 + layer).all()
    parts = target.features(ids, torch.ones_like(ids), taps)
    assert [float(part[0, 0, 0]) for part in parts] == [100.0 + layer for layer in taps]


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_taps_are_hugging_face_hidden_states_shifted_by_one(architecture: str) -> None:
    """`hidden_states[0]` is the embedding, so layer i is entry i + 1."""
    target = tiny_target(architecture, taps=(0, 3, 6))
    ids = token_ids(20)[None]
    states = target.model(input_ids=ids, output_hidden_states=True).hidden_states
    expected = torch.cat([states[1], states[4], states[7]], dim=-1)
    assert torch.equal(target.forward(ids).hidden, expected)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_the_final_state_is_what_the_head_reads(architecture: str) -> None:
    target = tiny_target(architecture)
    ids = token_ids(12)[None]
    one, final, other = target.features(ids, torch.ones_like(ids), [1, FINAL, 4])
    torch.testing.assert_close(target.head(final), target.forward(ids, logits_to_keep=0).logits)
    assert torch.equal(
        torch.cat([one, other], -1),
        torch.cat(target.features(ids, torch.ones_like(ids), [1, 4]), -1),
    )
    states = target.document_states(ids, torch.ones_like(ids).bool(), torch.zeros_like(ids), True)
    assert torch.equal(states[..., :-32], target.forward(ids).hidden)
    torch.testing.assert_close(states[..., -32:], final)


def test_explicit_taps_keep_their_order_in_features() -> None:
    """`features` returns layers in the order they run, which is ascending."""
    target = tiny_target()
    ids = token_ids(5)[None]
    taps = target.features(ids, torch.ones_like(ids), [2, 4])
    assert torch.equal(torch.cat(taps, -1), tiny_target(taps=(2, 4)).forward(ids).hidden)


def test_untapped_forward_returns_no_features_and_as_many_logits_as_asked() -> None:
    """The head is the most expensive matmul: it runs on the wanted positions only."""
    target = tiny_target()
    ids = token_ids(9)[None]
    assert target.forward(ids, tap=False).hidden is None
    everything = target.forward(ids, logits_to_keep=0).logits
    assert everything.shape == (1, 9, 96)
    assert target.forward(ids).logits.shape == (1, 1, 96)
    torch.testing.assert_close(target.forward(ids, logits_to_keep=3).logits, everything[:, -3:])


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_taps_with_a_cache_cover_the_new_positions(architecture: str) -> None:
    """After a cache come the features of the new tokens, equal to those of the whole sequence."""
    target = tiny_target(architecture)
    ids = token_ids(30)[None]
    cache = DynamicCache(config=target.config)
    pieces = [target.forward(part, cache=cache).hidden for part in ids.split([20, 1, 4, 5], dim=1)]
    assert [piece.shape[1] for piece in pieces] == [20, 1, 4, 5]
    whole = target.forward(ids).hidden
    torch.testing.assert_close(torch.cat(pieces, 1), whole, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_padded_batch_gives_the_features_of_single_sequences(architecture: str) -> None:
    """Right padding reaches no real token, whatever lies in it."""
    target = tiny_target(architecture)
    lengths = [20, 13, 1]
    rows = [token_ids(n, seed=n) for n in lengths]
    ids = torch.full((3, 20), 77)
    mask = torch.zeros(3, 20, dtype=torch.int64)
    for i, row in enumerate(rows):
        ids[i, : len(row)] = row
        mask[i, : len(row)] = 1
    batch = target.forward(ids, mask).hidden
    cached = torch.cat(target.features(ids, mask, target.target_layer_ids), -1)
    for i, row in enumerate(rows):
        single = target.forward(row[None]).hidden
        for found in (batch, cached):
            torch.testing.assert_close(found[i, : len(row)], single[0], rtol=1e-4, atol=1e-4)


def test_features_carry_no_gradient_and_may_enter_autograd() -> None:
    """`no_grad`, not `inference_mode`: an inference tensor can't be saved for a backward."""
    hidden = tiny_target().forward(token_ids(6)[None]).hidden
    assert hidden is not None
    assert not hidden.requires_grad
    assert not hidden.is_inference()


def test_hooks_go_when_the_forward_raises() -> None:
    """A failed forward leaves nothing behind that would collect features forever."""
    target = tiny_target()
    before = hook_count(target.model)
    bad = torch.tensor([[5, 10_000]])
    with pytest.raises(IndexError):
        target.forward(bad)
    with pytest.raises(IndexError):
        target.features(bad, torch.ones_like(bad), [1])
    assert hook_count(target.model) == before == 0


# ---- which layers --------------------------------------------------------------------------------


@pytest.mark.parametrize("num_taps", range(1, 9))
def test_default_layer_ids_are_valid_or_refused(num_taps: int) -> None:
    """Never duplicated, negative or the last layer; too few layers is an error with the key."""
    for num_layers in range(2, num_taps + 3):
        with pytest.raises(UserError, match=r"model\.target\.num_taps"):
            default_layer_ids(num_layers, num_taps)
    for num_layers in range(num_taps + 3, 41):
        ids = default_layer_ids(num_layers, num_taps)
        assert len(ids) == num_taps
        assert check_layer_ids(ids, num_layers) == ids
        if num_taps > 1:
            assert (ids[0], ids[-1]) == (1, num_layers - 3)


@pytest.mark.parametrize(
    ("num_layers", "num_taps", "expected"),
    [
        (36, 5, [1, 9, 17, 25, 33]),
        (30, 5, [1, 8, 14, 20, 27]),
        (36, 3, [1, 17, 33]),
        (8, 5, [1, 2, 3, 4, 5]),
        (36, 1, [18]),
        (4, 1, [2]),
    ],
)
def test_default_layer_ids_are_the_published_ones(
    num_layers: int, num_taps: int, expected: list[int]
) -> None:
    """z-lab's `build_target_layer_ids`, to the number."""
    assert default_layer_ids(num_layers, num_taps) == expected


@pytest.mark.parametrize("ids", [[], [7], [1, 7], [8], [-1, 3], [3, 3], [3, 1]])
def test_bad_layer_ids_are_refused(ids: list[int]) -> None:
    """The last layer (7 of 8) is after the final norm; the others are mistakes."""
    with pytest.raises(UserError, match="last may not be tapped") as caught:
        tiny_target(taps=tuple(ids))
    assert "\n" not in str(caught.value)


def test_no_taps_are_refused() -> None:
    with pytest.raises(UserError, match="at least 1"):
        default_layer_ids(30, 0)


# ---- embedding and head --------------------------------------------------------------------------


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_borrowed_embedding_is_what_enters_the_first_layer(architecture: str) -> None:
    """Scaled (Gemma), tied, untied or padded: the drafter sees what the target's first
    layer sees.
    """
    target = tiny_target(architecture)
    entered: list[Tensor] = []
    handle = target._layers[0].register_forward_pre_hook(
        lambda _m, args, kwargs: entered.append(args[0] if args else kwargs["hidden_states"]),
        with_kwargs=True,
    )
    ids = torch.tensor([[3, 50, MASK, target.num_embeddings - 1]])
    target.forward(ids)
    handle.remove()
    assert torch.equal(entered[0], target.embed(ids))


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_borrowed_head_gives_the_targets_logits(architecture: str) -> None:
    """Head over the final-normed states = the model's own logits, soft-cap included."""
    target = tiny_target(architecture)
    ids = token_ids(12)[None]
    final = target.model.base_model(input_ids=ids)[0]
    logits = target.model(input_ids=ids).logits
    assert logits.shape[-1] == target.num_embeddings
    torch.testing.assert_close(target.head(final), logits)
    rows = torch.tensor([3, 40, 41, 90])
    torch.testing.assert_close(target.head.rows(rows)(final), logits[..., rows])


def test_gemma_scale_and_softcap_matter() -> None:
    """The tiny Gemma would tell a forgotten scale or cap from the right one."""
    target = tiny_target("gemma3_softcap")
    ids = torch.tensor([[3, 4]])
    raw = target.model.get_input_embeddings().weight[ids]
    torch.testing.assert_close(target.embed(ids), raw * 32**0.5)
    final = target.model.base_model(input_ids=ids)[0] * 10
    assert target.head(final).abs().max() <= 5.0
    assert (final @ target.head.weight.T).abs().max() > 6.0


def test_head_of_a_slice_copies_no_weight() -> None:
    """torch's linear of a 3-D slice is a batched product that copies the weight: 30 x slower."""
    target = tiny_target()
    block = torch.randn(1, 6, 32)
    with torch.no_grad(), torch.profiler.profile() as profile:
        logits = target.head(block[:, 1:])
    assert "aten::bmm" not in {event.name for event in profile.events()}
    torch.testing.assert_close(logits, target.head(block)[:, 1:])


def test_head_is_borrowed_by_reference() -> None:
    """No copy of the largest matrix, tied or not."""
    for architecture in ("llama_tied", "llama_untied"):
        target = tiny_target(architecture)
        assert target.head.weight is target.model.get_output_embeddings().weight
    assert tiny_target("llama_untied").head.weight is not tiny_target("llama_untied")._embedding


def test_head_keeps_a_bias_and_a_logit_scale() -> None:
    """Both change which token wins, row selection included."""
    model = AutoModelForCausalLM.from_config(_granite(embedding_multiplier=1.0, logits_scaling=4.0))
    target = Target(model, None, [1, 3], MASK)
    head = target.head
    ids = token_ids(6)[None]
    final = model.base_model(input_ids=ids)[0]
    torch.testing.assert_close(head(final), model(input_ids=ids).logits)
    assert head.scale == 0.25
    biased = type(head)(head.weight, bias=torch.arange(96.0), scale=2.0)
    expected = (final @ head.weight.T + torch.arange(96.0)) * 2
    torch.testing.assert_close(biased(final), expected)
    rows = torch.tensor([5, 7])
    torch.testing.assert_close(biased.rows(rows)(final), expected[..., rows])


def _granite(**changes: float) -> GraniteConfig:
    return GraniteConfig(
        vocab_size=96,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=8,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.3,
        **changes,
    )


@pytest.mark.parametrize(
    "config",
    [
        _granite(embedding_multiplier=12.0),
        GPT2Config(vocab_size=96, n_embd=32, n_layer=8, n_head=4, n_positions=64),
    ],
    ids=["scaled outside the embedding", "learned positions"],
)
def test_targets_whose_embedding_cannot_be_borrowed_are_refused(config: Any) -> None:
    """Training in another space than drafting is silent; refusing it is not."""
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with pytest.raises(UserError, match="adds something to its embedding"):
        Target(model, None, [1, 3], MASK)


def test_a_model_without_head_is_refused() -> None:
    with pytest.raises(UserError, match="no output head"):
        Target(tiny_model("llama_tied").model, None, [1, 3], MASK)


# ---- frozen --------------------------------------------------------------------------------------


class Holder(pl.LightningModule):
    """A LightningModule with a target and one weight of its own."""

    def __init__(self, target: Target) -> None:
        super().__init__()
        self.target = target
        self.own = torch.nn.Linear(2, 2)


def test_target_is_frozen_and_no_part_of_a_module() -> None:
    """Neither saved, nor trained, nor switched to train mode, nor cast."""
    model = tiny_model("llama_tied").train()
    target = Target(model, None, [1, 3, 5], MASK)
    module = Holder(target)
    module.train()
    module.bfloat16()
    assert set(module.state_dict()) == {"own.weight", "own.bias"}
    assert sum(1 for _ in module.parameters()) == 2
    assert not any(m.training for m in target.model.modules())
    assert not any(p.requires_grad for p in target.model.parameters())
    assert target.dtype == torch.float32


def test_training_module_holds_the_drafter_only() -> None:
    """The real module's checkpoint has z-lab's names under `drafter.` and nothing of the target."""
    target = tiny_target()
    module = training_module(target, tiny_drafter(target))
    module.train()
    assert {key.split(".")[0] for key in module.state_dict()} == {"drafter"}
    assert not target.model.training
    assert module.drafter.training


# ---- mask token ----------------------------------------------------------------------------------


@pytest.mark.parametrize(("token_id", "role"), [(0, "bos"), (EOS, "eos"), (2, "pad")])
def test_mask_token_is_never_a_reserved_one(token_id: int, role: str) -> None:
    with pytest.raises(UserError, match=f"target's {role} token"):
        Target(tiny_model("llama_tied"), None, [1], token_id)


@pytest.mark.parametrize("token_id", [-1, 96, 200])
def test_mask_token_is_an_existing_row(token_id: int) -> None:
    with pytest.raises(UserError, match=r"outside the target's embedding \(rows 0\.\.95\)"):
        Target(tiny_model("llama_tied"), None, [1], token_id)


def test_mask_token_may_be_a_padded_row() -> None:
    assert check_mask_token_id(127, 128, RESERVED) == 127


def test_every_eos_of_a_list_is_reserved() -> None:
    """Llama 3 states several stop tokens; each is refused, and the tokenizer's own ids too."""
    model = tiny_model("llama_tied")
    model.config.eos_token_id = [EOS, 40]
    assert reserved_token_ids(model.config, None) == {**RESERVED, 40: "eos"}
    tokenizer = tiny_tokenizer()
    tokenizer.pad_token = "A"
    assert reserved_token_ids(model.config, tokenizer)[tokenizer.pad_token_id] == "pad"


def test_mask_token_choice_starts_with_the_tokenizers() -> None:
    """First what the tokenizer calls its mask token, even where spare rows exist."""
    tokenizer = tiny_tokenizer()
    tokenizer.add_special_tokens({"mask_token": "<mask>"})
    assert tokenizer.mask_token_id == len(tokenizer) - 1
    assert choose_mask_token_id(tokenizer, 96, RESERVED) == tokenizer.mask_token_id


def test_mask_token_choice_then_takes_the_first_spare_row() -> None:
    tokenizer = tiny_tokenizer()
    assert choose_mask_token_id(tokenizer, 96, RESERVED) == len(tokenizer) < 96


def test_a_spare_row_is_behind_every_token_even_in_a_vocabulary_with_gaps() -> None:
    """A tokenizer with unused ids has fewer tokens than its highest id: the count is a
    row in use.
    """
    tokenizer = tiny_tokenizer()
    backend = json.loads(tokenizer.backend_tokenizer.to_str())
    moved = {t: i + 3 * (i > 50) for t, i in backend["model"]["vocab"].items()}
    backend["model"]["vocab"] = moved
    gappy = type(tokenizer)(
        tokenizer_object=type(tokenizer.backend_tokenizer).from_str(json.dumps(backend))
    )
    assert len(gappy) < max(moved.values())
    assert choose_mask_token_id(gappy, 128, {}) == max(moved.values()) + 1


def test_mask_token_choice_then_takes_an_unused_special_token() -> None:
    """`<unk>` is special, not reserved, and unlike `<|im_start|>` not in the chat template."""
    tokenizer = tiny_tokenizer()
    chosen = choose_mask_token_id(tokenizer, len(tokenizer), RESERVED)
    assert tokenizer.convert_ids_to_tokens(chosen) == "<unk>"


def test_mask_token_choice_gives_up_with_a_cure() -> None:
    """Nothing left: the template uses every special token that is not reserved."""
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = str(tokenizer.chat_template) + "<unk>"
    with pytest.raises(UserError, match="name an embedding row"):
        choose_mask_token_id(tokenizer, len(tokenizer), RESERVED)


# ---- from name to folder -------------------------------------------------------------------------


def test_inspecting_equals_loading(target_folder: Path, tmp_path: Path) -> None:
    """What data preparation sees without weights is what training gets with them."""
    spec = inspect_target(TargetConfig(str(target_folder), dtype="float32", num_taps=3), tmp_path)
    target = load_target(spec)
    assert spec.folder == target_folder
    assert target.target_layer_ids == spec.target_layer_ids == [1, 3, 5]
    assert target.mask_token_id == spec.mask_token_id == len(spec.tokenizer)
    assert target.fingerprint == spec.fingerprint
    assert target.dtype == torch.float32
    assert spec.tokenizer.padding_side == "right"
    half = inspect_target(TargetConfig(str(target_folder), dtype="bfloat16"), tmp_path)
    assert half.fingerprint != spec.fingerprint
    assert load_target(half).dtype == torch.bfloat16


def test_stop_ids_gather_every_source(target_folder: Path, tmp_path: Path) -> None:
    """Generation config, model config and tokenizer may each know another stop token."""
    spec = inspect_target(TargetConfig(str(target_folder), dtype="float32"), tmp_path)
    model = AutoModelForCausalLM.from_pretrained(spec.folder)
    model.generation_config.eos_token_id = [41, 42]
    model.config.eos_token_id = 43
    spec.tokenizer.eos_token = "A"
    target = Target(model, spec.tokenizer, [1], MASK)
    assert target.stop_ids == {41, 42, 43, spec.tokenizer.eos_token_id}


@pytest.mark.parametrize(
    "changes",
    [{"mask_token_id": EOS}, {"mask_token_id": 96}, {"target_layer_ids": [7]}, {"num_taps": 6}],
)
def test_bad_target_settings_are_refused_before_loading(
    changes: dict[str, Any], target_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", None)
    with pytest.raises(UserError, match=r"model\.target\.") as caught:
        inspect_target(TargetConfig(str(target_folder), **changes), tmp_path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("./nowhere", "no such folder"),
        ("/nowhere/at/all", "no such folder"),
        ("~/nowhere-at-all", "no such folder"),
        ("a/b/c", "no such folder"),
        ("/nowhere/model.gguf", "no such file"),
        ("model.gguf", "no such file"),
        ("package://no_such_package/x.gguf", "'no_such_package' .* is not installed"),
        ("package://not-a-name/x.gguf", "is not installed"),
        ("package://", "is not installed"),
        ("package://dflash_lightning/x.gguf", "holds no file"),
    ],
)
def test_a_name_that_leads_nowhere_is_one_clear_line(
    name: str, message: str, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=rf"model\.target\.name: .*{message}") as caught:
        target_folder_of(name, tmp_path)
    assert "\n" not in str(caught.value)
    assert name.removeprefix("package://").partition("/")[0] in str(caught.value)


def target_folder_of(name: str, cache: Path) -> Path:
    """The function under test; `target_folder` is also a fixture."""
    return target_folder(name, None, cache)


def test_a_folder_without_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"has no config\.json"):
        target_folder_of(str(tmp_path), tmp_path)


def test_a_hub_id_that_cannot_be_fetched_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def offline(*_args: Any, **_kwargs: Any) -> str:
        raise OSError("no network\nand a long explanation")

    monkeypatch.setattr("huggingface_hub.snapshot_download", offline)
    with pytest.raises(UserError, match=r"'org/model' .*\(no network\)") as caught:
        target_folder_of("org/model", tmp_path)
    assert "\n" not in str(caught.value)


def test_a_gguf_target_without_its_packages_names_the_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The failed attempt leaves no folder that the next one would take for a target."""
    file = tmp_path / "model.gguf"
    file.write_bytes(b"GGUF")
    monkeypatch.setattr(target_files.importlib.util, "find_spec", lambda _name: None)
    for _ in range(2):
        with pytest.raises(UserError, match=r"dflash-lightning\[gguf\]"):
            target_folder_of(str(file), tmp_path / "cache")


def test_a_gguf_file_is_converted_once_and_again_when_it_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    converted: list[Path] = []
    monkeypatch.setattr(target_files, "_convert_gguf", lambda path, _folder: converted.append(path))
    file = tmp_path / "model.gguf"
    file.write_bytes(b"one")
    first = target_folder_of(str(file), tmp_path)
    assert target_folder_of(str(file), tmp_path) == first
    assert len(converted) == 1
    file.write_bytes(b"two")
    assert target_folder_of(str(file), tmp_path) != first
    assert len(converted) == 2


# ---- fingerprint ---------------------------------------------------------------------------------


def test_fingerprint_changes_with_a_single_weight(target_folder: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(target_folder, copy)
    before = fingerprint(copy)
    assert before == fingerprint(target_folder)
    assert len(before) == 16
    weights = load_file(copy / "model.safetensors")
    weights["model.norm.weight"][-1] += 1e-3
    save_file(weights, copy / "model.safetensors", metadata={"format": "pt"})
    assert fingerprint(copy) != before


@pytest.mark.parametrize("file", ["config.json", "chat_template.jinja", "tokenizer.json"])
def test_fingerprint_changes_with_what_the_target_sees(
    file: str, target_folder: Path, tmp_path: Path
) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(target_folder, copy)
    before = fingerprint(copy)
    (copy / file).write_text((copy / file).read_text() + " ")
    assert fingerprint(copy) != before


def test_fingerprint_sees_a_fine_tune_that_kept_the_embedding(tmp_path: Path) -> None:
    """A merged LoRA has its base's embedding, names and sizes: the file starts the same."""
    file = tmp_path / "model.safetensors"
    prints = set()
    for changed in (b"", b"\1", b"\2"):
        with file.open("wb") as stream:
            stream.truncate(80 << 20)
            stream.seek(50 << 20)
            stream.write(changed * (2 << 20))
        prints.add(fingerprint(tmp_path))
    assert len(prints) == 3
