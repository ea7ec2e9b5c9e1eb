"""Public models as parameter lists: their sizes, their shapes, where they are sent, how they lie on meshes."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence

import pytest
import torch
from torch import nn
from torch.nn import Parameter

import muon_compile as mc
from muon_compile.plan.models import MODELS, Decoder, Experts, Gpt2, GroupedAttention, model_specs
from muon_compile.spec import MatrixSpec, ShardLayout

# What transformers 4.57 counts in a model of the published config.json (num_parameters); what the model's page or paper
# prints; and half of that print's last digit, since a print is rounded.
PUBLISHED = {
    "gpt2": (124_439_808, 124e6, 0.5e6),
    "gpt2-medium": (354_823_168, 355e6, 0.5e6),
    "gpt2-large": (774_030_080, 774e6, 0.5e6),
    "gpt2-xl": (1_557_611_200, 1.56e9, 0.005e9),
    "llama-7b": (6_738_415_616, 6.7e9, 0.05e9),
    "llama-70b": (68_976_648_192, 69e9, 0.5e9),
    "llama-3.2-1b": (1_235_814_400, 1.24e9, 0.005e9),
    "qwen3-30b-a3b": (30_532_122_624, 30.5e9, 0.05e9),
    "deepseek-v3": (671_026_404_352, 671e9, 0.5e9),
}
FAMILIES = ("gpt2", "llama-3.2-1b", "qwen3-30b-a3b", "deepseek-v3")


def total(specs: Sequence[MatrixSpec]) -> int:
    return sum(spec.numel for spec in specs)


def mesh(**axes: int) -> mc.MeshSpec:
    return mc.MeshSpec(axes=tuple(axes.items()))


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_model_has_as_many_parameters_as_published(name: str) -> None:
    counted, printed, rounding = PUBLISHED[name]
    assert total(model_specs(name)) == counted
    assert abs(counted - printed) <= rounding


def test_our_own_model_is_of_the_100b_class() -> None:
    assert set(MODELS) - set(PUBLISHED) == {"moe-100b"}
    assert total(model_specs("moe-100b")) == pytest.approx(100e9, rel=0.05)


@pytest.mark.parametrize("name", MODELS)
def test_names_are_unique(name: str) -> None:
    names = [spec.name for spec in model_specs(name)]
    assert len(set(names)) == len(names)


@pytest.mark.parametrize(
    ("name", "part", "shapes"),
    [
        # arXiv 2412.19437, section 4.2: 128 heads of 128, compressed to 1536 and 512, 64 rotary; experts of 2048.
        (
            "deepseek-v3",
            "model.layers.3.",
            {
                "self_attn.q_a_proj.weight": (1536, 7168),
                "self_attn.q_a_layernorm.weight": (1536,),
                "self_attn.q_b_proj.weight": (128 * 192, 1536),
                "self_attn.kv_a_proj_with_mqa.weight": (576, 7168),
                "self_attn.kv_a_layernorm.weight": (512,),
                "self_attn.kv_b_proj.weight": (128 * 256, 512),
                "self_attn.o_proj.weight": (7168, 128 * 128),
                "mlp.gate.weight": (256, 7168),
                "mlp.experts.gate_proj": (256, 2048, 7168),
                "mlp.experts.up_proj": (256, 2048, 7168),
                "mlp.experts.down_proj": (256, 7168, 2048),
                "mlp.shared_experts.gate_proj.weight": (2048, 7168),
                "mlp.shared_experts.up_proj.weight": (2048, 7168),
                "mlp.shared_experts.down_proj.weight": (7168, 2048),
                "input_layernorm.weight": (7168,),
                "post_attention_layernorm.weight": (7168,),
            },
        ),
        (
            "deepseek-v3",
            "model.layers.2.mlp.",
            {"gate_proj.weight": (18432, 7168), "up_proj.weight": (18432, 7168), "down_proj.weight": (7168, 18432)},
        ),
        (
            "qwen3-30b-a3b",
            "model.layers.0.self_attn.",
            {
                "q_proj.weight": (4096, 2048),
                "k_proj.weight": (512, 2048),
                "v_proj.weight": (512, 2048),
                "o_proj.weight": (2048, 4096),
                "q_norm.weight": (128,),
                "k_norm.weight": (128,),
            },
        ),
        ("gpt2", "transformer.h.11.attn.c_attn.", {"weight": (2304, 768), "bias": (2304,)}),
        ("gpt2", "transformer.h.0.mlp.c_proj.", {"weight": (768, 3072), "bias": (768,)}),
    ],
)
def test_shapes_of_a_layer(name: str, part: str, shapes: dict[str, tuple[int, ...]]) -> None:
    found = {s.name.removeprefix(part): s.shape for s in model_specs(name) if s.name.startswith(part)}
    assert found == shapes


def model_of(specs: Sequence[MatrixSpec]) -> nn.Module:
    """Modules that hold parameters of these names and shapes, on the meta device."""
    root = nn.Module()
    for spec in specs:
        *path, own = spec.name.split(".")
        at = root
        for depth, name in enumerate(path):
            if name not in at._modules:
                last = depth == len(path) - 1
                at.add_module(name, _leaf(name, spec.shape) if last and own == "weight" else nn.Module())
            at = at.get_submodule(name)
        setattr(at, own, Parameter(torch.empty(spec.shape, device="meta")))
    return root


def _leaf(name: str, shape: tuple[int, ...]) -> nn.Module:
    if len(shape) == 1:
        return nn.LayerNorm(shape, bias=False, device="meta")
    if name in ("wte", "wpe", "embed_tokens"):
        return nn.Embedding(shape[0], shape[1], device="meta")
    return nn.Linear(shape[1], shape[0], bias=False, device="meta")


@pytest.mark.parametrize("name", FAMILIES)
def test_parameters_go_where_route_sends_them(name: str) -> None:
    specs = model_specs(name)
    model = model_of(specs)
    # Tied heads, which are no parameters of their own; without one, route takes the last linear map for the head.
    tied = {"gpt2": "transformer.wte", "llama-3.2-1b": "model.embed_tokens"}
    if name in tied:
        head = nn.Linear(1, 1, bias=False, device="meta")
        head.weight = model.get_parameter(f"{tied[name]}.weight")
        model.add_module("lm_head", head)
    groups = mc.route(model, verbose=False)
    routed = {param: group["algorithm"] for group in groups for param, _ in group["params"]}
    assert {spec.name: spec.algorithm for spec in specs} == routed


def test_a_router_is_a_hidden_matrix_and_a_tied_head_is_left_out() -> None:
    sent = {spec.name: spec.algorithm for spec in model_specs("qwen3-30b-a3b")}
    assert sent["model.layers.0.mlp.gate.weight"] == "muon"
    assert sent["lm_head.weight"] == "adamw"
    assert "lm_head.weight" not in {spec.name for spec in model_specs("llama-3.2-1b")}


def test_dtype_and_device_reach_every_parameter() -> None:
    specs = model_specs("gpt2", dtype="bfloat16", device="npu:0")
    assert {(s.dtype, s.grad_dtype, s.device, s.layout) for s in specs} == {("bfloat16", "bfloat16", "npu:0", None)}
    assert {(s.dtype, s.device) for s in model_specs("gpt2")} == {("float32", "cpu")}


@pytest.mark.parametrize("on", [mesh(shard=4), mesh(replicate=2, shard=4)])
@pytest.mark.parametrize("name", ["gpt2", "moe-100b"])
def test_layouts_are_those_that_the_planner_gives(name: str, on: mc.MeshSpec) -> None:
    laid = mc.make_plan(model_specs(name, mesh=on))
    assert laid == mc.make_plan(model_specs(name), mesh=on)
    assert all(bucket.layout is not None and bucket.layout.axis == "shard" for bucket in laid.buckets)


def test_gpt2_on_four_ranks_exchanges_its_matrices_alone() -> None:
    plan = mc.make_plan(model_specs("gpt2"), mesh=mesh(shard=4))
    exchanged = [plan.buckets[part.bucket] for part in plan.parts if part.exchange is not None]
    assert sum(bucket.size for bucket in exchanged) == 12 * 4
    assert {bucket.shape for bucket in exchanged} == {(2304, 768), (768, 768), (3072, 768), (768, 3072)}


def expert_parts(plan: mc.Plan) -> list[object]:
    return [part.exchange for part in plan.parts if len(plan.buckets[part.bucket].shape) == 3]


def test_experts_need_no_collective_where_they_divide() -> None:
    on = mesh(shard=64)
    specs = model_specs("moe-100b", mesh=on)
    stacks = [spec for spec in specs if len(spec.shape) == 3]
    assert {spec.layout for spec in stacks} == {ShardLayout(mesh=on, axis="shard", dim=0, sizes=(4,) * 64)}
    found = expert_parts(mc.make_plan(specs))
    assert found and set(found) == {None}
    # Cut through every expert instead, the same stacks do.
    rows = ShardLayout(mesh=on, axis="shard", dim=1, sizes=(16,) * 64)
    cut = [dataclasses.replace(spec, layout=rows) for spec in stacks if spec.shape[1] == 1024]
    assert None not in expert_parts(mc.make_plan(cut))


def test_experts_may_lie_on_other_axes_of_the_same_ranks() -> None:
    dense, sparse = mesh(replicate=4, shard=128), mesh(expert_replicate=2, expert=256)
    for name, sizes in (("moe-100b", (1,) * 256), ("qwen3-30b-a3b", (1,) * 128 + (0,) * 128)):
        specs = model_specs(name, mesh=dense, expert_mesh=sparse)
        experts = {s.layout for s in specs if ".experts." in s.name}
        assert experts == {ShardLayout(mesh=sparse, axis="expert", dim=0, sizes=sizes, replica_axis="expert_replicate")}
        others = {s.layout.mesh for s in specs if s.layout is not None and ".experts." not in s.name}
        assert others == {dense}
    axes = {collective.axis for collective in mc.make_plan(model_specs("moe-100b", mesh=dense)).collectives}
    assert axes == {"replicate", "shard"}
    specs = model_specs("moe-100b", mesh=dense, expert_mesh=sparse)
    axes = {collective.axis for collective in mc.make_plan(specs).collectives}
    assert axes == {"replicate", "shard", "expert_replicate"}


def test_ten_thousand_ranks_share_their_layouts() -> None:
    specs = model_specs("deepseek-v3", mesh=mesh(shard=10_000))
    assert len({id(spec.layout) for spec in specs}) == len({spec.shape[0] for spec in specs})


def test_deepseek_v3_expands_well_under_a_tenth_of_a_second() -> None:
    def seconds() -> float:
        start = time.perf_counter()
        model_specs("deepseek-v3", mesh=mesh(replicate=4, shard=128))
        return time.perf_counter() - start

    assert min(seconds() for _ in range(5)) < 0.1


@pytest.mark.parametrize(
    ("name", "on", "experts", "says"),
    [
        ("gpt5", None, None, "name: expected one of gpt2, .*llama-7b, .*moe-100b; got 'gpt5'"),
        ("llama-7b", mesh(shard=4), mesh(expert=4), r"'llama-7b'\): expert_mesh: the model has no experts"),
        ("gpt2", mesh(shard=4), mesh(expert=4), r"'gpt2'\): expert_mesh: the model has no experts"),
        ("moe-100b", None, mesh(expert=4), r"'moe-100b'\): expert_mesh: expected a mesh beside it, .*beside None"),
        ("moe-100b", mesh(shard=8), mesh(expert=4), r"as many ranks, got axes \(\('expert', 4\),\) beside .*8"),
        ("moe-100b", mesh(shard=4), mesh(shard=4), r"of other names than those of mesh, got \['shard'\] in both"),
    ],
)
def test_arguments_that_do_not_fit(name: str, on: mc.MeshSpec | None, experts: mc.MeshSpec | None, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        model_specs(name, mesh=on, expert_mesh=experts)


def test_an_unknown_dtype_names_the_parameter() -> None:
    with pytest.raises(ValueError, match=r"'transformer.wte.weight': expected a real floating dtype .*got int8"):
        model_specs("gpt2", dtype="int8")


def test_figures_that_no_model_has() -> None:
    with pytest.raises(ValueError, match=r"Gpt2.num_layers: expected an int >= 1, got 0"):
        Gpt2(hidden_size=8, num_layers=0)
    with pytest.raises(ValueError, match=r"GroupedAttention.head_dim: expected an int >= 1, got -1"):
        GroupedAttention(num_heads=2, num_kv_heads=2, head_dim=-1)
    assert Experts(num_routed=2, intermediate_size=8, num_shared=0).num_shared == 0
    with pytest.raises(ValueError, match=r"Experts.num_shared: expected an int >= 0, got -1"):
        Experts(num_routed=2, intermediate_size=8, num_shared=-1)
    deepseek = MODELS["deepseek-v3"]
    assert isinstance(deepseek, Decoder)
    with pytest.raises(ValueError, match=r"at most num_layers=2 dense layers, got num_dense_layers=3"):
        dataclasses.replace(deepseek, num_layers=2)
