"""Checkpoints seen through a name map, where they lie: weights of one framework in the model of another compute the
same.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from click.testing import CliRunner
from faults.seams import Seam, before
from formats.foreign_files import assert_same
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor
from two_llamas import (
    GROUPS,
    HEAD_SIZE,
    HEADS,
    HIDDEN,
    LAYERS,
    VOCABULARY,
    Llama,
    Megatron,
    llama_configuration,
    megatron_arguments,
    stacked,
    trained,
    write_safetensors,
)

import bytecheckpoint as bcp
from bytecheckpoint.errors import CheckpointError, CheckpointMismatchError
from bytecheckpoint.loading import read
from bytecheckpoint.name_maps.load import choose
from bytecheckpoint.tools.main import cli
from distributed.workers import WorkerError, WorkerPool

TO_LLAMA, TO_MEGATRON = "megatron-gpt-to-hf-llama", "hf-llama-to-megatron-gpt"
SIZES = {"heads": HEADS, "groups": GROUPS, "head_size": HEAD_SIZE, "vocab_size": VOCABULARY}

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def through(name: Any, **options: int | str) -> bcp.LoadOptions:
    """The small Megatron has a tensor for each layer."""
    options = {"stacked": "no", **options} if name == TO_MEGATRON else options
    return bcp.LoadOptions(name_map=bcp.NameMap(name, options))


def check_same_logits(megatron: Megatron, llama: Llama) -> None:
    tokens = torch.randint(0, VOCABULARY, (2, 7), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected = llama(tokens)
        found = megatron(tokens).transpose(0, 1)[..., :VOCABULARY]
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)
    assert expected.abs().max() > 0.1


def test_weights_of_llama_loaded_into_megatron_compute_the_same(tmp_path: Path) -> None:
    llama, megatron = Llama(), Megatron()
    path = write_safetensors(tmp_path / "hf", llama, llama_configuration())
    report = bcp.load(path, {"model": megatron}, options=through(TO_MEGATRON))
    assert (report.missing, report.unexpected) == ([], [])
    check_same_logits(megatron, llama)


def test_weights_of_megatron_loaded_into_llama_compute_the_same(tmp_path: Path) -> None:
    megatron, llama = Megatron(padding=5), Llama()
    bcp.save(tmp_path, {"model": megatron, "args": vars(megatron_arguments(5))})
    bcp.load(tmp_path, {"model": llama}, options=through(TO_LLAMA))
    check_same_logits(megatron, llama)


@pytest.mark.filterwarnings("ignore:the memory root")
def test_weights_of_megatron_held_in_memory_are_resumed_into_llama(tmp_path: Path) -> None:
    megatron, llama = Megatron(padding=5), Llama()
    options = bcp.SaveOptions(memory=bcp.Memory(copies=1, root=tmp_path / "memory"))
    state = {"model": megatron, "args": vars(megatron_arguments(5))}
    bcp.save(tmp_path / "run", state, step=3, options=options, to="memory")
    report = bcp.resume(tmp_path / "run", {"model": llama}, options=options, load_options=through(TO_LLAMA))
    assert report is not None
    assert (report.step, report.sources["memory"]) == (3, 1)
    check_same_logits(megatron, llama)


def test_a_distributed_checkpoint_of_megatron_with_all_layers_in_one_tensor_is_read_in_place(tmp_path: Path) -> None:
    megatron, llama = Megatron(padding=1), Llama()
    dcp.save(stacked(megatron), checkpoint_id=tmp_path / "iter")
    bcp.load(tmp_path / "iter", {"model": llama}, options=through(TO_LLAMA, **SIZES))
    check_same_logits(megatron, llama)


def test_a_file_of_torch_with_the_arguments_in_it_needs_no_options(tmp_path: Path) -> None:
    """Without the references to tensors that have other names now, and with the rest of its plain data."""
    megatron, llama = Megatron(), Llama()
    torch.save({"model": megatron.state_dict(), "args": megatron_arguments(), "iteration": 7}, tmp_path / "model.pt")
    options = bcp.LoadOptions(name_map=TO_LLAMA)
    report = bcp.load(tmp_path / "model.pt", {"model": llama}, options=options)
    assert report.num_tensors == len(llama.state_dict())
    check_same_logits(megatron, llama)
    found = bcp.open(tmp_path / "model.pt", options=options)
    assert found.objects["args"]["num_layers"] == LAYERS
    assert found.objects["iteration"] == 7
    tensors = {f"model.{name}": torch.zeros_like(tensor) for name, tensor in llama.state_dict().items()}
    bcp.load(
        tmp_path / "model.pt",
        {"model": {name.removeprefix("model."): it for name, it in tensors.items()}},
        options=options,
    )
    assert_same(tensors, {f"model.{name}": tensor for name, tensor in llama.state_dict().items()})


def test_a_model_beside_other_things_stands_under_the_name_of_an_entry(tmp_path: Path) -> None:
    """Megatron's distributed checkpoints have no name for the model, and an optimizer and arguments beside it."""
    megatron, llama = Megatron(), Llama()
    state = stacked(megatron)
    moments = {f"optimizer.state.exp_avg.{name}": tensor + 1 for name, tensor in state.items()}
    dcp.save({**state, **moments, "args": vars(megatron_arguments()), "iteration": 7}, checkpoint_id=tmp_path / "iter")
    options = bcp.LoadOptions(name_map=TO_LLAMA)
    bcp.load(tmp_path / "iter", {"model": llama}, options=options)
    check_same_logits(megatron, llama)
    found = bcp.open(tmp_path / "iter", options=options)
    assert {name.partition(".")[0] for name in found} == {"model", "optimizer"}
    weight = found["model.model.layers.1.mlp.up_proj.weight"][...]
    assert torch.equal(found["optimizer.state.model.layers.1.mlp.up_proj.weight.exp_avg"][...], weight + 1)


def test_there_and_back_are_the_same_bytes(tmp_path: Path) -> None:
    """A checkpoint of what was seen through a map, seen through the map the other way."""
    megatron = Megatron()
    bcp.save(tmp_path / "one", {"model": megatron, "args": vars(megatron_arguments())})
    seen = bcp.open(tmp_path / "one", options=through(TO_LLAMA))
    save_file({name: seen[name][...] for name in seen}, tmp_path / "two.safetensors")
    again = bcp.open(tmp_path / "two.safetensors", options=through(TO_MEGATRON, **SIZES))
    found = {name: again[name][...] for name in again}
    assert_same(found, {f"model.{name}": tensor for name, tensor in megatron.state_dict().items()})


def test_training_goes_on_in_the_other_framework(tmp_path: Path) -> None:
    """What the optimizer knows of a parameter goes where the parameter goes, and its hyperparameters come along."""
    megatron = Megatron()
    optimizer = trained(megatron)
    bcp.save(tmp_path, {"model": megatron, "optimizer": optimizer, "args": vars(megatron_arguments())})
    llama = Llama()
    other = torch.optim.AdamW(llama.parameters(), lr=0.5)
    bcp.load(tmp_path, {"model": llama, "optimizer": other}, options=through(TO_LLAMA))
    assert other.param_groups[0]["lr"] == 0.01
    for each in (optimizer, other):
        each.zero_grad()
    tokens = torch.arange(4).reshape(2, 2)
    for model, its_optimizer in ((megatron, optimizer), (llama, other)):
        model(tokens).square().sum().backward()
        its_optimizer.step()
    check_same_logits(megatron, llama)
    bcp.save(tmp_path / "back", {"model": llama, "optimizer": other})
    again = Megatron()
    last = torch.optim.AdamW(again.parameters())
    bcp.load(tmp_path / "back", {"model": again, "optimizer": last}, options=through(TO_MEGATRON, **SIZES))
    check_same_logits(again, llama)
    for mine, its in zip(again.parameters(), megatron.parameters(), strict=True):
        torch.testing.assert_close(last.state[mine], optimizer.state[its], rtol=1e-9, atol=1e-12)


def save_in_two_groups(path: Path, lr_of_keys: float) -> Llama:
    """Queries and values in one group, keys, which become one parameter with them, in another."""
    llama = Llama()
    by_name = dict(llama.named_parameters())
    keys = [parameter for name, parameter in by_name.items() if "k_proj" in name]
    others = [parameter for name, parameter in by_name.items() if "k_proj" not in name]
    optimizer = torch.optim.AdamW([{"params": others, "lr": 0.25}, {"params": keys, "lr": lr_of_keys}])
    bcp.save(path, {"model": llama, "optimizer": optimizer})
    return llama


def test_groups_of_equal_values_that_have_parts_of_one_parameter_become_one(tmp_path: Path) -> None:
    save_in_two_groups(tmp_path, 0.25)
    megatron = Megatron()
    optimizer = torch.optim.AdamW(megatron.parameters(), lr=0.5)
    bcp.load(tmp_path, {"model": megatron, "optimizer": optimizer}, options=through(TO_MEGATRON, **SIZES))
    assert optimizer.param_groups[0]["lr"] == 0.25


def test_a_load_gives_the_reason_why_an_optimizer_does_not_come(tmp_path: Path) -> None:
    """The one that a conversion gives, and nothing about the tensors of its state."""
    llama = save_in_two_groups(tmp_path / "c", 0.125)
    options = through(TO_MEGATRON, **SIZES)
    megatron = Megatron()
    bcp.load(tmp_path / "c", {"model": megatron}, options=options)
    check_same_logits(megatron, llama)
    state = {"model": megatron, "optimizer": torch.optim.AdamW(megatron.parameters())}
    given = [text for name, value in {**SIZES, "stacked": "no"}.items() for text in ("--map-option", f"{name}={value}")]
    command = ["convert", f"{tmp_path}/c", f"{tmp_path}/d", "--to", "bcp", "--map", TO_MEGATRON, *given, "--json"]
    (left_out,) = json.loads(CliRunner().invoke(cli, command).output)["left_out"]
    assert left_out["why"].endswith("linear_qkv.weight', with different values of lr")
    with pytest.raises(CheckpointMismatchError) as failed:
        bcp.load(tmp_path / "c", state, options=options)
    assert failed.value.message.splitlines()[1:] == [f"  conflict: optimizer: {left_out['why']}"]
    report = bcp.load(tmp_path / "c", state, options=options, strict=False)
    assert report.mismatched == [f"optimizer: {left_out['why']}"]
    assert (report.missing, report.unexpected) == ([], [])


@pytest.mark.parametrize("padding", [1, 5])
def test_rows_that_pad_a_vocabulary_are_zeros_on_the_way_in(tmp_path: Path, padding: int) -> None:
    llama = Llama()
    optimizer = trained(llama)
    bcp.save(tmp_path, {"model": llama, "optimizer": optimizer})
    megatron = Megatron(padding=padding)
    other = trained(megatron)
    options = through(TO_MEGATRON, **SIZES, padded_vocab_size=VOCABULARY + padding)
    bcp.load(tmp_path, {"model": megatron, "optimizer": other}, options=options)
    check_same_logits(megatron, llama)
    for weight in (megatron.embedding.word_embeddings.weight, megatron.output_layer.weight):
        assert not weight[VOCABULARY:].any()
        assert all(not other.state[weight][key][VOCABULARY:].any() for key in ("exp_avg", "exp_avg_sq"))
    of_head = optimizer.state[llama.lm_head.weight]["exp_avg"]
    assert torch.equal(other.state[megatron.output_layer.weight]["exp_avg"][:VOCABULARY], of_head)
    view = bcp.open(tmp_path, options=options)["model.output_layer.weight"]
    assert torch.equal(view[...], megatron.output_layer.weight)
    assert torch.equal(view[VOCABULARY - 1 :, 2:], megatron.output_layer.weight[VOCABULARY - 1 :, 2:])
    assert not view[VOCABULARY:].any()
    assert bcp.open(tmp_path, options=options).info.num_bytes == bcp.open(tmp_path).info.num_bytes


def load_padded(rank: int, world_size: int, path: str) -> list[Tensor]:
    """This rank's rows of the output layer, in memory that held other numbers."""
    rows = nn.Parameter(torch.full((VOCABULARY + 5, HIDDEN), 7.0, dtype=torch.float64))
    mesh = DeviceMesh("cpu", list(range(world_size)))
    mine = distribute_tensor(rows.detach(), mesh, [Shard(0)], src_data_rank=None)
    options = replace(through(TO_MEGATRON, **SIZES, padded_vocab_size=VOCABULARY + 5), exchange="on")
    bcp.load(path, {"model": {"output_layer.weight": mine}}, include="model.output_layer.weight", options=options)
    return mine.to_local()


def test_ranks_that_share_a_padded_vocabulary_zero_what_each_has_of_the_padding(
    tmp_path: Path, workers: WorkerPool
) -> None:
    llama = Llama()
    bcp.save(tmp_path, {"model": llama})
    found = torch.cat(workers.run(load_padded, str(tmp_path), world_size=4))
    assert torch.equal(found[:VOCABULARY], llama.lm_head.weight)
    assert found.shape[0] == VOCABULARY + 5
    assert not found[VOCABULARY:].any()


@pytest.mark.parametrize("padding", [0, 5])
def test_a_load_through_a_map_reads_again_what_is_replaced_meanwhile(tmp_path: Path, padding: int) -> None:
    """Rows of zeros, which lie in no file, make no checkpoint of another format of it."""
    old, new = Llama(), Llama()
    bcp.save(tmp_path, {"model": old})
    left = [new]

    def replace_once() -> None:
        while left:
            bcp.save(tmp_path, {"model": left.pop()}, options=bcp.SaveOptions(overwrite=True))

    megatron = Megatron(padding=padding)
    options = through(TO_MEGATRON, **SIZES, padded_vocab_size=VOCABULARY + padding)
    with before(Seam(read, "run_fetches"), replace_once):
        bcp.load(tmp_path, {"model": megatron}, options=options)
    check_same_logits(megatron, new)


def test_a_step_under_the_name_of_another_is_refused_through_a_map_too(tmp_path: Path) -> None:
    bcp.save(tmp_path, {"model": Llama()}, step=1)
    (tmp_path / "step_00000001").rename(tmp_path / "step_00000007")
    with pytest.raises(CheckpointMismatchError, match="step 1 under the name of step 7"):
        bcp.open(tmp_path, options=through(TO_MEGATRON, **SIZES))


def test_what_is_read_through_a_map_is_verified(tmp_path: Path) -> None:
    bcp.save(tmp_path, {"model": Megatron(), "args": vars(megatron_arguments())})
    (file,) = (tmp_path / "data").iterdir()
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    with pytest.raises(bcp.CheckpointCorruptError) as failed:
        bcp.load(tmp_path, {"model": Llama()}, options=through(TO_LLAMA))
    assert failed.value.kind == "checksum"


def test_compressed_chunks_that_would_have_to_be_cut_are_refused_before_anything_is_loaded(tmp_path: Path) -> None:
    megatron = Megatron(padding=500)
    for name, parameter in megatron.named_parameters():
        if "embedding" in name:
            nn.init.zeros_(parameter)
    bcp.save(
        tmp_path, {"model": megatron, "args": vars(megatron_arguments(500))}, options=bcp.SaveOptions(codec="zstd")
    )
    with pytest.raises(CheckpointMismatchError, match=r"embed_tokens\.weight cannot be read in place.*compressed"):
        bcp.load(tmp_path, {"model": Llama()}, options=through(TO_LLAMA))


def test_a_model_with_tied_embeddings_stays_tied(tmp_path: Path) -> None:
    llama = Llama()
    llama.lm_head.weight = llama.model.embed_tokens.weight
    bcp.save(tmp_path, {"model": llama})
    found = bcp.open(tmp_path, options=through(TO_MEGATRON, **SIZES))
    assert found.manifest.aliases == {"model.output_layer.weight": "model.embedding.word_embeddings.weight"}
    megatron = Megatron()
    megatron.output_layer.weight = megatron.embedding.word_embeddings.weight
    bcp.load(tmp_path, {"model": megatron}, options=through(TO_MEGATRON, **SIZES))
    check_same_logits(megatron, llama)


def test_an_optimizer_whose_state_the_map_does_not_know_is_not_loaded(tmp_path: Path) -> None:
    """By its name the parameter would be found, and its state would not."""
    (tmp_path / "own.toml").write_text(OWN.replace('theirs = "{name}"', 'theirs = "model.{name}"'))
    blocks = nn.ModuleDict({"blocks": nn.ModuleList([Named(4)])})
    optimizer = torch.optim.AdamW(blocks.parameters())
    blocks["blocks"][0].w.square().sum().backward()
    optimizer.step()
    bcp.save(tmp_path / "c", {"model": blocks, "optimizer": optimizer})
    options = bcp.LoadOptions(name_map=bcp.NameMap(tmp_path / "own.toml", keep_unmapped=True))
    found = bcp.open(tmp_path / "c", options=options)
    assert "model.h.0.weight" in found
    assert found.objects == {}
    other = nn.ModuleDict({"h": nn.ModuleList([nn.Linear(1, 1)])})
    other["h"][0].weight = nn.Parameter(torch.zeros(4))
    other["h"][0].bias = None
    bcp.load(tmp_path / "c", {"model": other}, options=options)
    assert torch.equal(other["h"][0].weight, blocks["blocks"][0].w)
    with pytest.raises(CheckpointMismatchError, match=r"optimizer"):
        bcp.load(tmp_path / "c", {"model": other, "optimizer": torch.optim.AdamW(other.parameters())}, options=options)


def test_plain_data_that_looks_like_an_optimizer_stays_as_it_is(tmp_path: Path) -> None:
    odd = {"a": {"state": {}, "groups": {"x": 3}}, "b": {"state": 1, "groups": {}}, "c": {"state": {}, "groups": {}}}
    odd["d"] = {"state": {}, "groups": {}, "elsewhere": [1]}
    bcp.save(tmp_path, {"model": Llama(), **odd})
    found = bcp.open(tmp_path, options=through(TO_MEGATRON, **SIZES)).objects
    assert found == bcp.open(tmp_path).objects


OWN = """
format = 1
sides = ["ours", "theirs"]
[[around]]
ours = "model.{name}"
theirs = "{name}"
[[tensors]]
ours = "blocks.{block}.w"
theirs = "h.{block}.weight"
[drop]
ours = ["model.notes", "*.cache"]
"""


def test_a_map_of_ones_own_goes_the_way_that_the_names_ask_for(tmp_path: Path) -> None:
    (tmp_path / "own.toml").write_text(OWN)
    blocks = nn.ModuleDict({"blocks": nn.ModuleList([Named(4), Named(4)])})
    bcp.save(tmp_path / "ours", {"model": blocks, "kept": 3})
    options = bcp.LoadOptions(name_map=tmp_path / "own.toml")
    found = bcp.open(tmp_path / "ours", options=options)
    assert sorted(found) == ["h.0.weight", "h.1.weight"]
    assert found.objects == {"kept": 3}
    save_file({name: found[name][...] for name in found}, tmp_path / "theirs.safetensors")
    there = bcp.open(tmp_path / "theirs.safetensors", options=options)
    assert_same(
        {name: there[name][...] for name in there}, {f"model.{name}": it for name, it in blocks.state_dict().items()}
    )


class Named(nn.Module):
    def __init__(self, length: int) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(length))


def test_plain_data_that_a_map_drops_is_gone_and_the_rest_stays(tmp_path: Path) -> None:
    (tmp_path / "own.toml").write_text(OWN)
    model = {"blocks": [{"w": torch.ones(2)}], "notes": "old", "deep": {"cache": {"x": 1}, "step": 4}}
    torch.save({"model": model, "loss": 0.5}, tmp_path / "model.pt")
    found = bcp.open(tmp_path / "model.pt", options=bcp.LoadOptions(name_map=str(tmp_path / "own.toml")))
    assert found.objects == {"model": {"deep": {"step": 4}}, "loss": 0.5}
    assert sorted(found) == ["h.0.weight"]


def test_a_long_map_is_read_to_its_end(tmp_path: Path) -> None:
    path = tmp_path / "long.toml"
    for comment in ("# " + "\xe9" * (1 << 19), "#" + "\xe9" * (1 << 19)):
        text = f'{OWN}{comment}\n[[tensors]]\nours = "last"\ntheirs = "end"\n'
        path.write_text(text, encoding="utf-8")
        assert len(choose(str(path)).name_map.rules) == 2
    path.write_text(OWN + "#" * (1 << 20))
    with pytest.raises(CheckpointMismatchError, match="more than 1048576 characters"):
        choose(str(path))


@pytest.mark.parametrize("content", [b"\xff\xfe", None])
def test_a_map_that_is_not_there_is_said_to_be_none(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "none.toml"
    if content is not None:
        path.write_bytes(content)
    bcp.save(tmp_path / "c", {"x": torch.ones(2)})
    with pytest.raises(
        CheckpointMismatchError, match=rf"no name map '{path}'.* the library has {TO_MEGATRON}, {TO_LLAMA}"
    ):
        bcp.open(tmp_path / "c", options=bcp.LoadOptions(name_map=path))


@pytest.mark.parametrize("name", ["a\0b", "a\ud800b"])
def test_a_name_that_is_no_path_is_no_map(name: str) -> None:
    with pytest.raises(CheckpointMismatchError, match="there is no name map 'a") as caught:
        choose(name)
    assert caught.value.kind == "conflict"


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (b"{", r"config\.json is damaged: it is no JSON"),
        (b"[" * 100_000, r"config\.json is damaged: it is no JSON"),
        (b" " * (1 << 21), r"config\.json: it has 2097152 bytes, at most 1048576 are read"),
        (b'{"a":' * 900 + b"1" + b"}" * 900, r"needs heads"),
        (b"[]", r"needs heads \(attention heads\)"),
        (b'{"num_attention_heads": "6"}', r"its option heads is '6', not a number"),
        (b'{"num_attention_heads": -6}', r"its option heads is -6, not a number"),
        (b'{"num_attention_heads": true}', r"its option heads is True, not a number"),
    ],
)
def test_a_configuration_that_makes_no_sense_is_an_error(tmp_path: Path, config: bytes, expected: str) -> None:
    path = write_safetensors(tmp_path / "hf", Llama(), None)
    (path / "config.json").write_bytes(config)
    with pytest.raises(CheckpointError, match=expected):
        bcp.load(path, {"model": Megatron()}, options=through(TO_MEGATRON))


def test_what_the_user_says_counts_before_the_configuration(tmp_path: Path) -> None:
    path = write_safetensors(tmp_path / "hf", Llama(), llama_configuration(num_attention_heads=99, head_dim=None))
    megatron = Megatron()
    bcp.load(path, {"model": megatron}, options=through(TO_MEGATRON, heads=HEADS, head_size=HEAD_SIZE))
    with pytest.raises(CheckpointMismatchError, match=r"head_size cannot follow from others: hidden_size / heads"):
        bcp.load(path, {"model": megatron}, options=through(TO_MEGATRON))


def test_what_the_map_does_not_know_is_named_or_kept(tmp_path: Path) -> None:
    megatron = Megatron()
    megatron.extra = nn.Parameter(torch.ones(3))
    bcp.save(tmp_path, {"model": megatron, "args": vars(megatron_arguments()), "beside": torch.zeros(2)})
    with pytest.raises(CheckpointMismatchError, match=r"does not know 1 tensors of this model: model\.extra;"):
        bcp.open(tmp_path, options=through(TO_LLAMA))
    kept = bcp.LoadOptions(name_map=bcp.NameMap(TO_LLAMA, keep_unmapped=True))
    found = bcp.open(tmp_path, options=kept)
    assert "model.lm_head.weight" in found
    assert torch.equal(found["model.extra"][...], torch.ones(3))
    assert torch.equal(found["beside"][...], torch.zeros(2))


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (lambda: bcp.NameMap(""), r"NameMap\.name takes the name or the path of a map, not ''"),
        (lambda: bcp.NameMap(3), r"NameMap\.name takes"),
        (lambda: bcp.NameMap("m", {"heads": 1.5}), r"NameMap\.options takes integers and texts by name, not"),
        (lambda: bcp.NameMap("m", {"heads": True}), r"NameMap\.options takes"),
        (lambda: bcp.NameMap("m", ["heads"]), r"NameMap\.options takes"),
        (lambda: bcp.NameMap("m", keep_unmapped=1), r"NameMap\.keep_unmapped takes True or False, not 1"),
        (lambda: bcp.LoadOptions(name_map=3), r"NameMap\.name takes"),
    ],
)
def test_a_choice_of_a_map_is_checked_where_it_is_made(make: Any, expected: str) -> None:
    with pytest.raises(ValueError, match=expected):
        make()


def load_mapped(rank: int, world_size: int, path: str, names: list[str]) -> dict[str, Tensor]:
    llama = Llama()
    bcp.load(path, {"model": llama}, options=through(names[rank]))
    return {name: tensor.detach() for name, tensor in llama.state_dict().items()}


def test_ranks_load_through_one_map_or_are_told(tmp_path: Path, workers: WorkerPool) -> None:
    bcp.save(tmp_path, {"model": Megatron(), "args": vars(megatron_arguments())})
    first, second = workers.run(load_mapped, str(tmp_path), [TO_LLAMA, TO_LLAMA], world_size=2)
    assert_same(first, second)
    with pytest.raises(WorkerError) as failed:
        workers.run(load_mapped, str(tmp_path), [TO_LLAMA, TO_MEGATRON], world_size=2)
    assert {error.kind for error in failed.value.errors.values()} == {"conflict"}
