"""Name maps applied to names and shapes alone: what comes out is carried out on arrays and compared with the rules of
the frameworks, written down here a second time and in another way.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bytecheckpoint.errors import CheckpointError, CheckpointMismatchError, UnsafeCheckpointError
from bytecheckpoint.manifest import Chunk, DataFile, Manifest, MapNotes, tensor_record
from bytecheckpoint.name_maps import operations
from bytecheckpoint.name_maps.apply import MapInput, Mapped, MapRequest, apply_map, in_a_state
from bytecheckpoint.name_maps.parameters import PlainValues, parse_options
from bytecheckpoint.name_maps.rewrite_manifest import refuse_zeros, relink
from bytecheckpoint.name_maps.schema import MapFile, parse_map
from bytecheckpoint.planner.copy_plan import WantedTensor
from bytecheckpoint.region import Region, find_tiling_fault, grid_regions

MAPS = Path(operations.__file__).parent / "maps"
SHIPPED = MAPS / "megatron-gpt-to-hf-llama.toml"
GPT_TO_LLAMA = parse_map(SHIPPED.read_text(), "megatron-gpt-to-hf-llama")

Arrays = dict[str, np.ndarray]

SMALL = """
format = 1
sides = ["a", "b"]
[options.groups]
about = "groups of rows"
from = ["args.groups"]
[options.size]
from = [{ value = "args.size", if = "args.has_size" }, { tensor = "x.{layer}.w", dim = -1 }]
default = "groups * 2"
[[tensors]]
a = "x.{layer}.w"
b = ["y.{layer}.p", "y.{layer}.q"]
interleave = { groups = "groups" }
[[tensors]]
a = "embed"
b = "wte"
padding = { side = "a", rows = "size", without = "groups" }
[[tensors]]
a = "norm"
b = "ln"
"""


def slices(region: Region) -> tuple[slice, ...]:
    return tuple(slice(start, end) for start, end in zip(region.offsets, region.ends, strict=True))


def carry_out(tensors: list[WantedTensor], sources: Mapping[str, np.ndarray]) -> Arrays:
    """The plan done the plainest way; every element is to be written exactly once."""
    made = {}
    for fqn, dtype, shape, pieces in tensors:
        assert find_tiling_fault(shape, [piece.region for piece in pieces]) is None, fqn
        array = np.empty(shape, dtype)
        for piece in pieces:
            content = 0 if piece.fqn is None else sources[piece.fqn][slices(piece.source_region)]
            array[slices(piece.region)] = np.reshape(content, piece.region.lengths if piece.fqn else ())
        made[fqn] = array
    return made


def contents(arrays: Mapping[str, np.ndarray], facts: Mapping[str, Any], aliases: Mapping[str, str]) -> MapInput:
    described = {name: (str(array.dtype), array.shape) for name, array in arrays.items()}
    return MapInput(described, aliases, PlainValues(facts))


def apply(
    arrays: Mapping[str, np.ndarray],
    *,
    name_map: MapFile = GPT_TO_LLAMA,
    facts: Mapping[str, Any] | None = None,
    aliases: Mapping[str, str] | None = None,
    side: int | None = None,
    keep_unmapped: bool = False,
    **options: int | str,
) -> Mapped:
    """With a tensor for each layer, unless that is asked for otherwise."""
    asked = MapRequest(side, {"stacked": "no", **options}, keep_unmapped=keep_unmapped)
    return apply_map(name_map, contents(arrays, facts or {}, aliases or {}), asked)


def assert_equal(found: Mapping[str, np.ndarray], expected: Mapping[str, np.ndarray]) -> None:
    assert sorted(found) == sorted(expected)
    for name, array in expected.items():
        assert found[name].dtype == array.dtype, name
        np.testing.assert_array_equal(found[name], array, err_msg=name)


class Model:
    """The numbers of a model, and its tensors under the names of both frameworks."""

    def __init__(
        self,
        *,
        groups: int = 2,
        heads_a_group: int = 3,
        head_size: int = 2,
        hidden: int = 12,
        ffn: int = 5,
        layers: int = 3,
        vocab: int = 7,
        padding: int = 0,
        has_biases: bool = False,
    ) -> None:
        self.groups, self.heads, self.head_size = groups, groups * heads_a_group, head_size
        self.hidden, self.ffn, self.layers, self.vocab = hidden, ffn, layers, vocab
        self.padding, self.has_biases = padding, has_biases
        self._rng = np.random.default_rng(groups + layers)
        self.llama = self._llama()

    @property
    def facts(self) -> dict[str, object]:
        return {
            "args.num_attention_heads": self.heads,
            "args.num_query_groups": self.groups,
            "args.group_query_attention": True,
            "args.kv_channels": self.head_size,
            "args.vocab_size": self.vocab,
            "args.padded_vocab_size": self.vocab + self.padding,
        }

    def _random(self, *shape: int) -> np.ndarray:
        return self._rng.integers(1, 1 << 30, shape, np.int32)

    def _llama(self) -> Arrays:
        hidden, ffn, head_size = self.hidden, self.ffn, self.head_size
        found = {
            "model.embed_tokens.weight": self._random(self.vocab, hidden),
            "lm_head.weight": self._random(self.vocab, hidden),
            "model.norm.weight": self._random(hidden),
        }
        rows = {
            "self_attn.q_proj": (self.heads * head_size, hidden),
            "self_attn.k_proj": (self.groups * head_size, hidden),
            "self_attn.v_proj": (self.groups * head_size, hidden),
            "self_attn.o_proj": (hidden, self.heads * head_size),
            "mlp.gate_proj": (ffn, hidden),
            "mlp.up_proj": (ffn, hidden),
            "mlp.down_proj": (hidden, ffn),
        }
        for layer in range(self.layers):
            for name, shape in rows.items():
                found[f"model.layers.{layer}.{name}.weight"] = self._random(*shape)
                if self.has_biases:
                    found[f"model.layers.{layer}.{name}.bias"] = self._random(shape[0])
            for name in ("input_layernorm", "post_attention_layernorm"):
                found[f"model.layers.{layer}.{name}.weight"] = self._random(hidden)
        return found

    def megatron(self, *, variant: str = "te", ranks: int = 1) -> Arrays:
        """The same as Megatron has it; fc1 as it stands where the files of so many ranks are joined."""
        llama = self.llama
        filler = np.zeros((self.padding, self.hidden), np.int32)
        found = {
            "embedding.word_embeddings.weight": np.concatenate([llama["model.embed_tokens.weight"], filler]),
            "output_layer.weight": np.concatenate([llama["lm_head.weight"], filler]),
            "decoder.final_layernorm.weight": llama["model.norm.weight"],
        }
        for layer in range(self.layers):
            for kind in ("weight", "bias") if self.has_biases else ("weight",):
                found |= self._layer(layer, kind, ranks)
            norms = {
                "te": ("self_attention.linear_qkv.layer_norm_weight", "mlp.linear_fc1.layer_norm_weight"),
                "local": ("input_layernorm.weight", "pre_mlp_layernorm.weight"),
            }[variant]
            for name, of_llama in zip(norms, ("input_layernorm", "post_attention_layernorm"), strict=True):
                found[f"decoder.layers.{layer}.{name}"] = llama[f"model.layers.{layer}.{of_llama}.weight"]
        return found

    def _layer(self, layer: int, kind: str, ranks: int) -> Arrays:
        def of(name: str) -> np.ndarray:
            return self.llama[f"model.layers.{layer}.{name}.{kind}"]

        q, k, v = (of(f"self_attn.{name}_proj") for name in "qkv")
        by_group = [array.reshape(self.groups, -1, self.head_size, *array.shape[1:]) for array in (q, k, v)]
        qkv = np.concatenate(by_group, axis=1)  # groups x (heads of the group, 1, 1) x head size
        gates, ups = np.split(of("mlp.gate_proj"), ranks), np.split(of("mlp.up_proj"), ranks)
        name = f"decoder.layers.{layer}"
        return {
            f"{name}.self_attention.linear_qkv.{kind}": qkv.reshape(-1, *q.shape[1:]),
            f"{name}.self_attention.linear_proj.{kind}": of("self_attn.o_proj"),
            f"{name}.mlp.linear_fc1.{kind}": np.concatenate(
                [half for pair in zip(gates, ups, strict=True) for half in pair]
            ),
            f"{name}.mlp.linear_fc2.{kind}": of("mlp.down_proj"),
        }


def stacked(arrays: Mapping[str, np.ndarray], layers: int) -> Arrays:
    """As Megatron's distributed checkpoints have it."""
    first = "decoder.layers.0."
    whole = {name: array for name, array in arrays.items() if not name.startswith("decoder.layers.")}
    names = [name.removeprefix(first) for name in arrays if name.startswith(first)]
    return whole | {
        f"decoder.layers.{name}": np.stack([arrays[f"decoder.layers.{layer}.{name}"] for layer in range(layers)])
        for name in names
    }


models = st.builds(
    Model,
    groups=st.integers(1, 4),
    heads_a_group=st.integers(1, 4),
    head_size=st.integers(1, 4),
    hidden=st.integers(1, 9),
    ffn=st.integers(1, 3).map(lambda count: count * 4),
    layers=st.integers(1, 12),
    vocab=st.integers(1, 9),
    padding=st.integers(0, 5),
    has_biases=st.booleans(),
)


@given(models, st.booleans(), st.sampled_from(["te", "local"]), st.sampled_from([1, 2, 4]))
@settings(max_examples=40, deadline=None)
def test_megatron_becomes_llama_and_llama_megatron_to_the_bit(
    model: Model, is_stacked: bool, variant: str, ranks: int
) -> None:
    """Stripped padding, rows of heads sorted by query, key and value, gate and up apart; and all of it back."""
    unstacked = model.megatron(variant=variant, ranks=ranks)
    megatron = stacked(unstacked, model.layers) if is_stacked else unstacked
    there = apply(megatron, facts=model.facts, fc1_ranks=ranks)
    assert (there.sides, there.dropped, there.unmapped) == (("megatron-gpt", "hf-llama"), [], [])
    llama = carry_out(there.tensors, megatron)
    assert_equal(llama, model.llama)
    how = "yes" if is_stacked else "no"
    back = apply(llama, facts=model.facts, fc1_ranks=ranks, variant=variant, stacked=how)
    assert_equal(carry_out(back.tensors, llama), megatron)


@given(models)
@settings(max_examples=15, deadline=None)
def test_what_llamas_configuration_says_is_enough(model: Model) -> None:
    facts = {
        "config.num_attention_heads": model.heads,
        "config.num_key_value_heads": model.groups,
        "config.head_dim": model.head_size,
    }
    plan = apply(model.llama, facts=facts, padded_vocab_size=model.vocab + model.padding)
    assert_equal(carry_out(plan.tensors, model.llama), model.megatron())


@given(models, st.booleans(), st.integers(0, 1 << 30))
@settings(max_examples=15, deadline=None)
def test_chunks_of_the_other_framework_lie_in_the_same_files(model: Model, is_stacked: bool, seed: int) -> None:
    """Whatever ranks the chunks were cut for: rows for column-parallel layers, columns for row-parallel ones."""
    megatron = stacked(model.megatron(), model.layers) if is_stacked else model.megatron()
    rng = np.random.default_rng(seed)
    cuts = {name: tuple(rng.integers(1, array.shape, endpoint=True).tolist()) for name, array in megatron.items()}
    manifest, content = manifest_of(megatron, cuts)
    plan = apply(megatron, facts=model.facts)
    relinked = relink(manifest, plan.tensors)
    assert_equal({name: assembled(record, content) for name, record in relinked.records.items()}, model.llama)
    assert relinked.zeros is None


def manifest_of(arrays: Mapping[str, np.ndarray], cuts: Mapping[str, tuple[int, ...]]) -> tuple[Manifest, bytes]:
    """One file of all chunks, each of which is a part of a grid, and its manifest."""
    content, tensors = bytearray(b"head"), {}
    for name, array in arrays.items():
        chunks = []
        for region in grid_regions(array.shape, cuts[name]):
            part = array[slices(region)].tobytes()
            chunks.append(Chunk(region, 0, len(content), len(part)))
            content += part
        tensors[name] = tensor_record(str(array.dtype), array.shape, chunks)
    return Manifest(save_id="s", files=[DataFile("f", len(content))], tensors=tensors), bytes(content)


def assembled(record: Any, content: bytes) -> np.ndarray:
    assert find_tiling_fault(record.shape, [chunk.region for chunk in record.chunks]) is None
    array = np.empty(record.shape, record.dtype)
    for chunk in record.chunks:
        part = np.frombuffer(content, record.dtype, chunk.region.numel, chunk.byte_offset)
        assert chunk.byte_length == part.nbytes
        array[slices(chunk.region)] = part.reshape(chunk.region.lengths)
    return array


def test_megatron_gets_all_layers_in_one_tensor_unless_that_is_refused() -> None:
    model = Model()
    plan = apply_map(GPT_TO_LLAMA, contents(model.llama, model.facts, {}), MapRequest(None, {}, keep_unmapped=False))
    assert_equal(carry_out(plan.tensors, model.llama), stacked(model.megatron(), model.layers))


def test_a_count_that_all_layers_have_in_common_is_that_of_each() -> None:
    """So this library saves the steps of Megatron's optimizers, whose layers have one name."""
    model = Model(layers=2)
    megatron = stacked(model.megatron(), 2)
    steps = {f"optimizer.state.{name}.step": np.array(3.0) for name in megatron}
    plan = apply(megatron | steps, facts=model.facts)
    expected = {f"optimizer.state.{name}.step": np.array(3.0) for name in model.llama}
    assert_equal(carry_out(plan.tensors, megatron | steps), model.llama | expected)
    back = apply(model.llama | expected, facts=model.facts, stacked="yes")
    assert_equal(carry_out(back.tensors, model.llama | expected), megatron | steps)
    with pytest.raises(CheckpointMismatchError, match=r"step' is of all layers, and none of their weights is there"):
        apply(steps, facts=model.facts)
    names = plan.translation.translate("decoder.layers.mlp.linear_fc1.weight")
    assert names == tuple(f"model.layers.{layer}.mlp.{part}_proj.weight" for layer in (0, 1) for part in ("gate", "up"))


def test_the_state_of_an_optimizer_goes_with_its_parameters() -> None:
    """Megatron's own checkpoints name it the other way round than this library does."""
    model = Model(padding=2)
    megatron = model.megatron()
    own = {f"optimizer.state.{name}.{state}": array for state in STATES for name, array in megatron.items()}
    of_megatron = {f"optimizer.state.{state}.{name}": array for state in STATES for name, array in megatron.items()}
    expected = {f"optimizer.state.{name}.{state}": array for state in STATES for name, array in model.llama.items()}
    for states in (own, of_megatron):
        plan = apply(megatron | states, facts=model.facts)
        assert_equal(carry_out(plan.tensors, megatron | states), model.llama | expected)
        assert plan.in_model == dict.fromkeys(model.llama, "")
    back = apply(model.llama | expected, facts=model.facts)
    assert_equal(carry_out(back.tensors, model.llama | expected), megatron | own)


STATES = ("exp_avg", "exp_avg_sq", "fp32_param", "param")


@pytest.mark.parametrize("entry", ["model", "module"])
def test_the_entry_of_a_state_stays_before_the_names_in_it(entry: str) -> None:
    model = Model()
    megatron = {f"{entry}.{name}": array for name, array in model.megatron().items()}
    llama = {f"{entry}.{name}": array for name, array in model.llama.items()}
    plan = apply(megatron, facts=model.facts)
    assert_equal(carry_out(plan.tensors, megatron), llama)
    assert plan.in_model == dict.fromkeys(llama, f"{entry}.")
    assert_equal(carry_out(apply(llama, facts=model.facts).tensors, llama), megatron)


def test_a_model_without_a_name_gets_one_unless_it_is_taken() -> None:
    model = Model()
    aliases = {"lm_head.weight": "model.embed_tokens.weight"}
    tied = {name: array for name, array in model.llama.items() if name not in aliases}
    plan = in_a_state(apply(tied, facts=model.facts, aliases=aliases))
    assert plan.aliases == {"model.output_layer.weight": "model.embedding.word_embeddings.weight"}
    assert plan.in_model == dict.fromkeys([*(tensor.fqn for tensor in plan.tensors), *plan.aliases], "model.")
    with_name = {f"model.{name}": array for name, array in model.llama.items()}
    named = apply(with_name, facts=model.facts)
    assert in_a_state(named) == named
    both = apply(model.llama | with_name, facts=model.facts)
    with pytest.raises(CheckpointMismatchError, match=r"has 'model\.embedding\.word_embeddings\.weight', and another"):
        in_a_state(both)


def test_tied_embeddings_stay_tied() -> None:
    model = Model()
    llama = {name: array for name, array in model.llama.items() if name != "lm_head.weight"}
    plan = apply(llama, facts=model.facts, aliases={"lm_head.weight": "model.embed_tokens.weight"})
    assert plan.aliases == {"output_layer.weight": "embedding.word_embeddings.weight"}
    assert "output_layer.weight" not in {tensor.fqn for tensor in plan.tensors}
    assert "output_layer.weight" not in {tensor.fqn for tensor in apply(llama, facts=model.facts).tensors}


def test_what_has_no_counterpart_is_an_error_unless_it_is_kept_or_the_map_drops_it() -> None:
    model = Model()
    extra = {
        "decoder.layers.0.self_attention.linear_qkv._extra_state": np.zeros(3, np.uint8),
        "decoder.odd": np.ones(2),
    }
    megatron = model.megatron() | extra
    with pytest.raises(
        CheckpointMismatchError, match=r"does not know 1 tensors of this model: decoder\.odd;"
    ) as failed:
        apply(megatron, facts=model.facts)
    assert failed.value.kind == "unexpected_key"
    plan = apply(megatron, facts=model.facts, keep_unmapped=True)
    assert (plan.unmapped, plan.dropped) == (
        ["decoder.odd"],
        ["decoder.layers.0.self_attention.linear_qkv._extra_state"],
    )
    assert_equal(carry_out(plan.tensors, megatron), model.llama | {"decoder.odd": np.ones(2)})


@pytest.mark.parametrize("suffix", ["_scale_inv", "_scale"])
def test_quantized_weights_are_refused_even_if_what_is_unknown_is_kept(suffix: str) -> None:
    """The weight got another name, and was loaded without its scales."""
    model = Model()
    name = f"model.layers.0.mlp.down_proj.weight{suffix}"
    with pytest.raises(CheckpointMismatchError, match=rf"does not know '{name}', the scales of a quantized weight"):
        apply(model.llama | {name: np.ones(2)}, facts=model.facts, keep_unmapped=True)


def test_what_is_none_of_the_model_stays_as_it_is() -> None:
    """Random state, and buckets of a distributed optimizer."""
    model = Model()
    others = {"rng_state.0.torch_rng_state": np.ones(4, np.uint8), "optimizer.distributed.bucket_0": np.ones(9)}
    plan = apply(model.megatron() | others, facts=model.facts)
    assert (plan.unmapped, plan.others) == ([], sorted(others))
    assert_equal(carry_out(plan.tensors, model.megatron() | others), model.llama | others)
    in_entry = {f"model.{name}": array for name, array in model.megatron().items()}
    with pytest.raises(CheckpointMismatchError, match=r"does not know 1 tensors of this model: model\.vision\.w;"):
        apply(in_entry | {"model.vision.w": np.ones(2)}, facts=model.facts)


def test_rows_of_padding_that_are_made_are_zeros() -> None:
    model = Model(vocab=5)
    made = carry_out(apply(model.llama, facts=model.facts, padded_vocab_size=8).tensors, model.llama)
    assert made["output_layer.weight"].shape == (8, model.hidden)
    assert not made["output_layer.weight"][5:].any()
    assert made["output_layer.weight"][:5].all()


def test_a_model_without_query_groups_has_as_many_as_heads_whatever_its_arguments_say() -> None:
    """Megatron keeps num_query_groups = 1 where group_query_attention is off, and does not look at it."""
    model = Model(groups=4, heads_a_group=1)
    facts = model.facts | {"args.num_query_groups": 1, "args.group_query_attention": False}
    assert_equal(carry_out(apply(model.megatron(), facts=facts).tensors, model.megatron()), model.llama)


def test_head_size_follows_from_the_hidden_size_where_nothing_else_says_it() -> None:
    model = Model(groups=2, heads_a_group=2, head_size=3, hidden=12)
    facts = {name: value for name, value in model.facts.items() if name != "args.kv_channels"}
    assert_equal(carry_out(apply(model.megatron(), facts=facts).tensors, model.megatron()), model.llama)


def test_facts_are_found_wherever_they_stand_and_must_not_differ() -> None:
    model = Model()
    deep = {f"common_state.0.{name}": value for name, value in model.facts.items()}
    assert_equal(carry_out(apply(model.megatron(), facts=deep).tensors, model.megatron()), model.llama)
    both = deep | {"old.args.kv_channels": model.head_size + 1}
    with pytest.raises(CheckpointMismatchError, match=r"different things of args\.kv_channels: .* 2, .* 3;"):
        apply(model.megatron(), facts=both)
    assert apply(model.megatron(), facts=both, head_size=model.head_size)


@pytest.mark.parametrize(
    ("changed", "options", "kind", "expected"),
    [
        ({"args.num_attention_heads": None}, {}, "conflict", r"needs heads \(attention heads\).* args\.num_attention"),
        ({"args.vocab_size": None}, {}, "conflict", r"needs vocab_size \(tokens.*config\.vocab_size: give the option"),
        ({"args.num_query_groups": 3}, {}, "shape", r"linear_qkv\.weight': it has 20 rows, not 3 groups of .* groups"),
        (
            {"args.num_query_groups": 4},
            {},
            "shape",
            r"6 / 4|heads / groups \* head_size, heads 6, groups 4.* not a whole",
        ),
        ({"args.swiglu": False}, {}, "conflict", r"args\.swiglu = False: its MLP has no gate"),
        ({"args.rotary_interleaved": True}, {}, "conflict", r"pair neighbouring elements"),
        ({}, {"vocab_size": 8}, "shape", r"word_embeddings\.weight': it has 7 rows, which cannot be cut to .*, 8"),
        ({}, {"heads": "six"}, "conflict", r"option heads is 'six', not a number from 1"),
        ({}, {"heads": 0}, "conflict", r"option heads is 0, not a number from 1"),
        ({}, {"head": 6}, "conflict", r"'head' is not an option of it, those are heads, groups, .*, variant, stacked"),
        ({}, {"variant": "te"}, "conflict", r"hf-llama has no variant 'te', only one"),
        ({}, {"stacked": "yes"}, "conflict", r"nothing of hf-llama can be stacked"),
        ({}, {"stacked": 1}, "conflict", r"option stacked is 1, not yes or no"),
    ],
)
def test_what_does_not_fit_is_said(
    changed: dict[str, object], options: dict[str, int | str], kind: str, expected: str
) -> None:
    model = Model(groups=2, heads_a_group=3)
    with pytest.raises(CheckpointMismatchError, match=expected) as failed:
        apply(model.megatron(), facts=model.facts | changed, **options)
    assert failed.value.kind == kind
    assert "nothing was loaded or written" in str(failed.value)


def test_a_padded_vocabulary_that_is_too_small_is_refused() -> None:
    model = Model(vocab=5)
    with pytest.raises(CheckpointMismatchError, match="5 rows, which cannot be padded to padded_vocab_size, 4"):
        apply(model.llama, facts=model.facts, padded_vocab_size=4)


def test_rows_beyond_the_vocabulary_mean_nothing_on_either_side() -> None:
    """Of an embedding with more rows than tokens, those that are left become zeros."""
    model = Model(vocab=9)
    made = carry_out(apply(model.llama, facts=model.facts, vocab_size=6, padded_vocab_size=8).tensors, model.llama)
    for ours, theirs in (("embedding.word_embeddings", "model.embed_tokens"), ("output_layer", "lm_head")):
        assert made[f"{ours}.weight"].shape[0] == 8
        assert np.array_equal(made[f"{ours}.weight"][:6], model.llama[f"{theirs}.weight"][:6])
        assert not made[f"{ours}.weight"][6:].any()


def test_a_vocabulary_with_more_tokens_than_rows_is_refused_on_the_way_to_padding_too() -> None:
    model = Model(vocab=5)
    with pytest.raises(CheckpointMismatchError, match="it has 5 rows, which cannot be cut to vocab_size, 6"):
        apply(model.llama, facts=model.facts, vocab_size=6, padded_vocab_size=8)


@pytest.mark.parametrize("name", ["self_attn.k_proj", "mlp.up_proj"])
def test_a_tensor_that_is_missing_beside_others_is_named(name: str) -> None:
    model = Model()
    llama = {key: array for key, array in model.llama.items() if key != f"model.layers.1.{name}.weight"}
    with pytest.raises(CheckpointMismatchError, match=rf"no 'model\.layers\.{{layer}}\.{name}\.weight'") as failed:
        apply(llama, facts=model.facts)
    assert failed.value.kind == "missing_key"


def test_layers_that_cannot_be_stacked_are_named() -> None:
    model = Model()
    without = {key: array for key, array in model.llama.items() if key != "model.layers.1.mlp.down_proj.weight"}
    with pytest.raises(CheckpointMismatchError, match=r"'decoder\.layers\.mlp\.linear_fc2\.weight'.* layer 1 is not"):
        apply(without, facts=model.facts, stacked="yes")
    norm = "model.layers.1.input_layernorm.weight"
    with pytest.raises(CheckpointMismatchError, match=r"layer_norm_weight' differ: int32 \[12\] and int32 \[13\]"):
        apply(model.llama | {norm: np.ones(13, np.int32)}, facts=model.facts, stacked="yes")


def test_parts_of_different_dtypes_are_not_joined() -> None:
    model = Model()
    name = "model.layers.0.self_attn.v_proj.weight"
    llama = model.llama | {name: model.llama[name].astype(np.float64)}
    with pytest.raises(CheckpointMismatchError, match=r"cannot be one tensor .* float64 \[12\] and int32 \[12\]"):
        apply(llama, facts=model.facts)


def test_two_names_of_one_tensor_are_refused() -> None:
    model = Model()
    both = model.megatron() | stacked(model.megatron(), model.layers)
    with pytest.raises(CheckpointMismatchError, match="mean the same tensor"):
        apply(both, facts=model.facts)


@pytest.mark.parametrize("stacked", ["yes", "no"])
def test_two_models_that_come_to_the_same_names_are_refused(stacked: str) -> None:
    """Where layers are stacked, the second took the place of the first."""
    text = """
    format = 1
    sides = ["ours", "hf"]
    around = [{ ours = "{name}", hf = "model.{name}" }, { ours = "{name}", hf = "ema.{name}" }]
    tensors = [{ ours = "blocks.{layer}.w", hf = "h.{layer}.w" }]
    stacked = { ours = "layer" }
    """
    arrays = {f"{model}.h.{layer}.w": np.zeros(2) for model in ("model", "ema") for layer in (0, 1)}
    with pytest.raises(CheckpointMismatchError, match="two tensors of it come to the name 'blocks"):
        apply(arrays, name_map=parse_map(text, "ours"), stacked=stacked)


def test_names_of_no_side_are_told_from_those_of_one() -> None:
    with pytest.raises(CheckpointMismatchError, match=r"cannot be told which it is \(its first names: a, b\)"):
        apply({"a": np.ones(2), "b": np.ones(2)})
    with pytest.raises(CheckpointMismatchError, match=r"knows none of its 1 tensors as one of hf-llama"):
        apply({"a": np.ones(2)}, side=1)
    llama = Model().llama
    with pytest.raises(CheckpointMismatchError, match=r"knows none of its \d+ tensors as one of megatron-gpt"):
        apply(llama, side=0)


@given(st.dictionaries(st.from_regex(r"(layers\.)?[0-9a-z{}.#]{0,12}", fullmatch=True), st.just((2,)), max_size=4))
@settings(max_examples=50, deadline=None)
def test_odd_names_are_unknown_and_nothing_else(shapes: dict[str, tuple[int, ...]]) -> None:
    arrays = {name: np.ones(shape) for name, shape in shapes.items() if name not in {"embed", "norm"}}
    plan = apply({**arrays, "norm": np.ones(2)}, name_map=parse_map(SMALL, "m"), keep_unmapped=True)
    assert {tensor.fqn for tensor in plan.tensors} == {*arrays, "ln"}


def test_a_manifest_that_claims_a_billion_layers_or_groups_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operations, "MAX_PIECES", 100)
    model = Model(layers=40)
    with pytest.raises(UnsafeCheckpointError, match="more than 100 pieces") as failed:
        apply(stacked(model.megatron(), 40), facts=model.facts)
    assert failed.value.kind == "limits_exceeded"
    many = Model(layers=1, groups=60, heads_a_group=1)
    with pytest.raises(UnsafeCheckpointError, match="more than 100 pieces"):
        apply(many.megatron(), facts=many.facts)


def test_what_cannot_be_read_in_place_says_so() -> None:
    model = Model(vocab=5)
    manifest, _ = manifest_of(model.llama, {name: array.shape for name, array in model.llama.items()})
    plan = apply(model.llama, facts=model.facts, padded_vocab_size=8)
    relinked = relink(manifest, plan.tensors)
    assert relinked.zeros is not None
    notes = MapNotes(zeros_file=len(manifest.files))
    with_zeros = replace(manifest, tensors=relinked.records, map_notes=notes)
    with pytest.raises(CheckpointMismatchError, match=r"word_embeddings\.weight .* 3 of its rows are zeros.*convert"):
        refuse_zeros(with_zeros)
    packed = {name: record._replace(codecs=["zstd"] * record.num_chunks) for name, record in manifest.tensors.items()}
    compressed = Manifest(save_id="s", files=manifest.files, tensors=packed)
    with pytest.raises(CheckpointMismatchError, match=r"linear_qkv\.weight .* compressed together"):
        relink(compressed, apply(model.llama, facts=model.facts).tensors)
    renamed = [tensor for tensor in apply(model.llama, facts=model.facts).tensors if "proj" in tensor.fqn]
    found = relink(compressed, renamed).records
    assert all(list(record.codecs) == ["zstd"] for record in found.values())
    with pytest.raises(CheckpointMismatchError, match=r"stored as int32 and wanted as float32"):
        relink(manifest, [tensor._replace(dtype="float32") for tensor in renamed])


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ("format = 1", "format = 2", r"format: it is 2, and this release reads 1"),
        ("format = 1", "format = ", r"no TOML: .*line 2"),
        ('sides = ["a", "b"]', 'sides = ["a", "a"]', r"sides: it has to name the two sides"),
        ('sides = ["a", "b"]', 'sides = "ab"', r"sides: it has to name the two sides"),
        ('sides = ["a", "b"]', "", r"sides: it has to name the two sides"),
        ('a = "norm"', "a = 3", r"tensors\[2\] \(line 18\)\.a: Expected `str \| array`, got `int`"),
        ('a = "norm"', 'c = "norm"', r"tensors\[2\] \(line 18\): .* unknown field `c`"),
        ('a = "norm"', "", r"tensors\[2\] \(line 18\): .* missing required field `a`"),
        ('a = "norm"', 'a = "embed"', r"tensors\[2\] \(line 18\): 'embed' is in tensors\[1\] \(line 14\) as well"),
        ('a = "norm"', 'a = "norm..w"', r"tensors\[2\] \(line 18\): 'norm\.\.w' has nothing between two dots"),
        ('a = "norm"', 'a = "norm.{layer}"', r"tensors\[2\] \(line 18\): its names do not all have the same fields"),
        ('a = "norm"', 'a = "norm.x{layer}"', r"has 'x\{layer\}': a field fills the place between two dots"),
        ('a = "norm"', 'a = ["n", "m"]', r"a has 2 names for 0 variants"),
        ('a = "norm"', "a = []", r"tensors\[\d\] \(line \d+\): it has an empty list of names for a: give one"),
        ('b = ["y.{layer}.p", "y.{layer}.q"]', 'b = "y.{layer}.p"', r"one side has one name and the other a list"),
        ('b = ["y.{layer}.p", "y.{layer}.q"]', 'b = ["y.{layer}.p"]', r"has 0 sizes for 1 parts"),
        ('"groups" }\n[[tensors]]\na = "embed"', '"no" }\n[[tensors]]\na = "embed"', r"'no', which is not an option"),
        ('groups = "groups" }', 'groups = "groups", rows = [1] }', r"interleave\.rows has 1 sizes for 2 parts"),
        (
            'groups = "groups" }',
            'groups = "groups +" }',
            r"tensors\[0\] \(line \d+\)\.interleave\.groups: 'groups \+' is not a size",
        ),
        ('groups = "groups" }', 'groups = "a.b" }', r"'a\.b', which is neither an option's name"),
        ('groups = "groups" }', "groups = 0 }", r"0 is not a number from 1"),
        ('groups = "groups" }', 'groups = "groups" }\npadding = { side = "a", rows = 1, without = 1 }', r"cannot both"),
        (
            'side = "a"',
            'side = "c"',
            r"used: tensors\[\d\] \(line \d+\)\.padding: 'c' is not a side, those are a and b;",
        ),
        ('default = "groups * 2"', 'default = "size"', r"options: the defaults of size need one another"),
        ('default = "groups * 2"', 'default = "nothing"', r"the default of 'size' needs 'nothing'"),
        ('from = ["args.groups"]', "from = [{ dim = 1 }]", r"options\.groups\.from\[0\]: a source has either a value"),
        ("[options.groups]", "[options.stacked]", r"options\.stacked: 'stacked' cannot be the name of an option"),
        ("[options.groups]", "[stacked]\na = 'layers'\n[options.groups]", r"stacked\.a: 'layers' is not a field"),
        ("[options.groups]", "[stacked]\nc = 'layer'\n[options.groups]", r"stacked: 'c' is not a side"),
        (
            "[options.groups]",
            "[[around]]\na = 'x'\nb = '{name}'\n[options.groups]",
            r"around\[0\] \(line 4\)\.a: 'x' has to",
        ),
        (
            "[options.groups]",
            "[[around]]\na = 'x.{name}'\nb = '{name}'\nentry = 'm'\n[options.groups]",
            r"an entry is for",
        ),
        (
            "[options.groups]",
            "[[refuse]]\nvalue = 'x'\n[options.groups]",
            r"refuse\[0\] \(line 4\): .* missing required field `is`",
        ),
        ("[options.groups]", "more = 1\n[options.groups]", r"unknown field `more`"),
    ],
)
def test_a_map_that_cannot_be_used_says_where_and_why(old: str, new: str, expected: str) -> None:
    assert old in SMALL
    with pytest.raises(CheckpointMismatchError, match=expected) as failed:
        parse_map(SMALL.replace(old, new, 1), "mine.toml")
    assert str(failed.value).startswith("the name map mine.toml cannot be used: ")
    assert failed.value.kind == "conflict"


@pytest.mark.parametrize(
    "text",
    [
        "a = " + "[" * 5000 + "]" * 5000,
        "x" * (1 << 20) + "=",
        "#" * ((1 << 20) + 1),
        'format = 1\nsides = ["a", "b"]\ntensors = 3',
        'format = 1\nsides = ["interleave", "b"]\ntensors = []',
        'format = 1\nsides = ["a", "entry"]\ntensors = []',
        'format = 1\nsides = ["a", "b"]\ntensors = [3]',
        'format = 1\nsides = ["a", "b"]\naround = {a = 1}\ntensors = []',
        'format = 1\nsides = ["a", "b"]\ntensors = []\noptions = 7',
        'format = 99999999999999999999999\nsides = ["a", "b"]',
        "\x00",
    ],
)
def test_hostile_maps_are_refused(text: str) -> None:
    with pytest.raises(CheckpointMismatchError):
        parse_map(text, "m")


@given(st.integers(0, len(SMALL) - 1), st.integers(0, len(SMALL) - 1), st.text(max_size=4))
@settings(max_examples=80, deadline=None)
def test_a_map_with_a_piece_missing_or_added_is_read_or_refused(start: int, end: int, more: str) -> None:
    text = SMALL[: min(start, end)] + more + SMALL[max(start, end) :]
    with suppress(CheckpointError):
        found = parse_map(text, "m")
        apply_map(found, contents({"norm": np.ones(2)}, {}, {}), MapRequest(0, {}, keep_unmapped=True))


def test_two_rules_that_mean_one_name_are_refused() -> None:
    name_map = parse_map(SMALL + '[[tensors]]\na = "x.0.w"\nb = "z"\n', "m")
    with pytest.raises(CheckpointMismatchError, match=r"'x\.0\.w' is meant by tensors\[0\] .* and tensors\[3\]"):
        apply({"x.0.w": np.ones((4, 2))}, name_map=name_map, groups=2)


def test_equal_parts_need_no_sizes() -> None:
    name_map = parse_map(SMALL, "m")
    arrays = {"x.7.w": np.arange(16).reshape(8, 2)}
    found = carry_out(apply(arrays, name_map=name_map, groups=2).tensors, arrays)
    assert_equal(found, {"y.7.p": arrays["x.7.w"][[0, 1, 4, 5]], "y.7.q": arrays["x.7.w"][[2, 3, 6, 7]]})
    with pytest.raises(CheckpointMismatchError, match=r"it has 8 rows, which are not 6 equal parts"):
        apply(arrays, name_map=name_map, groups=3)


def test_a_variant_may_have_a_number_as_its_name() -> None:
    """A command reads it as a number."""
    text = """
    format = 1
    sides = ["a", "b"]
    tensors = [{ a = "x", b = ["y", "z"] }]
    variants = { b = ["1", "2"] }
    """
    plan = apply({"x": np.zeros(2)}, name_map=parse_map(text, "numbers"), **parse_options(["variant=2"]))
    assert [tensor.fqn for tensor in plan.tensors] == ["z"]


def test_every_map_of_the_library_reads() -> None:
    for path in MAPS.glob("*.toml"):
        found = parse_map(path.read_text(), path.name)
        assert path.stem == "-to-".join(found.sides)
        assert all(option.about for option in found.options.values()), "docs and errors show it"


def test_options_as_a_command_gets_them() -> None:
    assert parse_options(["heads=32", "variant=local"]) == {"heads": 32, "variant": "local"}
    for wrong in (["heads"], ["=3"], ["heads="], ["heads=1", "heads=2"]):
        with pytest.raises(ValueError, match=r"not NAME=VALUE|given twice"):
            parse_options(wrong)
