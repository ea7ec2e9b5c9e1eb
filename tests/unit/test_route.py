"""Which parameters go to Muon, which to AdamW, and what is said about it."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import Parameter

import muon_compile as mc


class Block(nn.Module):
    def __init__(self, width: int, experts: int = 0) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width, bias=False)
        self.gain = Parameter(torch.tensor(1.0))
        if experts:
            self.experts = Parameter(torch.randn(experts, width, 2 * width))
        else:
            self.up = nn.Linear(width, 2 * width)


class Transformer(nn.Module):
    def __init__(self, *, tied: bool = False, experts: int = 0) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(32, 8), nn.Embedding(16, 8)
        self.cls_token = Parameter(torch.zeros(1, 4, 8))
        self.blocks = nn.ModuleList([Block(8, experts) for _ in range(2)])
        self.norm = nn.LayerNorm(8)
        self.lm_head = nn.Linear(8, 32, bias=False)
        if tied:
            self.lm_head.weight = self.wte.weight


Where = dict[str, list[str]]


def names(groups: list[dict[str, Any]]) -> Where:
    """Names by algorithm; ``"flat"`` are those of a group with ``flatten=True``."""
    found: Where = {"muon": [], "flat": [], "adamw": []}
    for group in groups:
        assert group["params"], "an empty group"
        assert set(group) <= {"params", "algorithm", "flatten"}
        key = "flat" if group.get("flatten") else group["algorithm"]
        found[key] += [name for name, _ in group["params"]]
    return found


def sort(model: nn.Module, **patterns: Any) -> Where:
    """Route silently; every trainable parameter must be somewhere, once, under its own name."""
    groups = mc.route(model, verbose=False, **patterns)
    by_name = dict(model.named_parameters())
    taken = [pair for group in groups for pair in group["params"]]
    assert all(by_name[name] is tensor for name, tensor in taken)
    assert sorted(name for name, _ in taken) == sorted(n for n, p in by_name.items() if p.requires_grad)
    return names(groups)


def test_a_transformer() -> None:
    where = sort(Transformer())
    hidden = ["qkv.weight", "proj.weight", "up.weight"]
    assert where["muon"] == [f"blocks.{i}.{name}" for i in range(2) for name in hidden]
    assert where["flat"] == []
    assert {"wte.weight", "wpe.weight", "cls_token", "lm_head.weight", "norm.weight"} < set(where["adamw"])
    assert {"blocks.0.gain", "blocks.1.norm2.bias", "blocks.0.qkv.bias"} < set(where["adamw"])


def test_a_tied_weight_is_taken_once() -> None:
    where = sort(Transformer(tied=True))
    assert where["adamw"].count("wte.weight") == 1
    assert "lm_head.weight" not in where["adamw"] + where["muon"]

    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(8, 8, bias=False)
            self.second = nn.Linear(8, 8, bias=False)
            self.second.weight = self.first.weight
            self.head = nn.Linear(8, 4, bias=False)

    assert sort(Shared()) == {"muon": ["first.weight"], "flat": [], "adamw": ["head.weight"]}


def test_a_stack_of_experts_goes_to_muon_whatever_its_name() -> None:
    assert "blocks.1.experts" in sort(Transformer(experts=3))["muon"]
    model = nn.Module()
    for name in ("a", "w13", "MoeBlock_0"):
        model.register_parameter(name, Parameter(torch.randn(3, 8, 6)))
    assert sort(model)["muon"] == ["a", "w13", "MoeBlock_0"]


def test_a_convolutional_net() -> None:
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Conv3d(8, 8, 2), nn.ConvTranspose2d(8, 8, 2), nn.Linear(8, 4)
    )
    assert sort(model) == {
        "muon": ["0.weight", "2.weight", "3.weight", "4.weight"],
        "flat": [],
        "adamw": ["0.bias", "1.weight", "1.bias", "2.bias", "3.bias", "4.bias"],
    }


def test_one_dimensional_convolutions_are_flattened_and_expert_stacks_are_not() -> None:
    model = nn.Module()
    model.conv, model.back = nn.Conv1d(4, 8, 3, bias=False), nn.ConvTranspose1d(8, 4, 3, bias=False)
    model.experts = Parameter(torch.randn(2, 4, 6))
    assert sort(model) == {"muon": ["experts"], "flat": ["conv.weight", "back.weight"], "adamw": []}
    optimizer = mc.Muon(mc.route(model, verbose=False), backend="aot_eager")
    batches = optimizer.compiled.plan.batches
    assert {(b.num_matrices, b.rows, b.cols) for b in batches} == {(2, 4, 6), (2, 8, 4 * 3)}


def test_the_output_head() -> None:
    def head(*layers: tuple[str, nn.Module]) -> list[str]:
        model = nn.Module()
        for name, layer in layers:
            model.add_module(name, layer)
        return [name for name in sort(model)["adamw"] if name.endswith("weight")]

    def linear() -> nn.Linear:
        return nn.Linear(8, 8, bias=False)

    assert head(("a", linear()), ("b", linear())) == ["b.weight"]  # the last one
    assert head(("lm_head", linear()), ("b", linear())) == ["lm_head.weight"]  # the named one
    assert head(("a", linear()), ("classifier", linear()), ("c", linear())) == ["classifier.weight"]
    assert head(("only", linear())) == []


def test_frozen_parameters_are_left_out() -> None:
    model = Transformer()
    model.blocks[0].qkv.weight.requires_grad_(False)
    model.wte.weight.requires_grad_(False)
    where = sort(model)
    assert "blocks.0.qkv.weight" not in where["muon"] and "wte.weight" not in where["adamw"]
    assert "blocks.1.qkv.weight" in where["muon"]


def test_a_row_or_a_column_is_no_matrix() -> None:
    model = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 1, bias=False), nn.Linear(8, 8, bias=False))
    model.column = Parameter(torch.randn(8, 1))
    assert sort(model) == {"muon": ["0.weight"], "flat": [], "adamw": ["column", "1.weight", "2.weight"]}


def test_a_word_inside_another_is_no_embedding() -> None:
    model = nn.Module()
    model.ensemble = nn.ModuleList([nn.Linear(8, 8, bias=False) for _ in range(2)])
    model.member_gate, model.tempo = nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)
    model.head = nn.Linear(8, 4, bias=False)
    assert sort(model)["adamw"] == ["head.weight"]


@pytest.mark.parametrize("name", ["tok_embeddings", "embed_tokens", "pos_embed", "wte", "mask_token", "word_emb"])
def test_embeddings_that_are_plain_parameters(name: str) -> None:
    model = nn.Module()
    model.register_parameter(name, Parameter(torch.randn(6, 8)))
    model.hidden = nn.Linear(8, 8, bias=False)
    assert sort(model) == {"muon": ["hidden.weight"], "flat": [], "adamw": [name]}


# -- patterns -----------------------------------------------------------------------------------------------------


def test_patterns_overrule_the_rules() -> None:
    where = sort(Transformer(), adamw=["*.qkv.weight", "blocks.1.up.weight"], muon=["lm_head.weight"])
    assert where["muon"] == ["blocks.0.proj.weight", "blocks.0.up.weight", "blocks.1.proj.weight", "lm_head.weight"]
    assert {"blocks.0.qkv.weight", "blocks.1.qkv.weight", "blocks.1.up.weight"} < set(where["adamw"])


def test_a_pattern_that_matches_nothing_is_an_error() -> None:
    with pytest.raises(ValueError, match=re.escape("'*.qvk.weight'")):
        mc.route(Transformer(), adamw=["*.qvk.weight"])
    with pytest.raises(ValueError, match="no parameter"):
        mc.route(Transformer(), muon=["nothing"])


def test_a_pattern_reaches_a_tied_weight_by_either_name() -> None:
    assert "wte.weight" in sort(Transformer(tied=True), muon=["wte.weight"])["muon"]
    assert "wte.weight" in sort(Transformer(tied=True), muon=["lm_head.weight"])["muon"]


def test_a_lone_string_is_one_pattern() -> None:
    assert "lm_head.weight" in sort(Transformer(), muon="lm_head.weight")["muon"]
    with pytest.raises(ValueError, match="nothing in the model is for Muon"):
        mc.route(Transformer(), adamw="*", verbose=False)


def test_a_vector_named_for_muon_is_refused_by_the_optimizer() -> None:
    groups = mc.route(Transformer(), muon=["norm.bias"], verbose=False)
    with pytest.raises(ValueError, match=r"'norm\.bias'.*\(8,\)"):
        mc.Muon(groups)


# -- nothing for Muon ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "model",
    [
        nn.LayerNorm(8),
        nn.Embedding(8, 4),
        nn.Sequential(nn.Embedding(8, 4), nn.Linear(4, 1)),
        nn.Linear(8, 8).requires_grad_(False),
        nn.ReLU(),
    ],
    ids=["norm", "embedding", "row", "frozen", "empty"],
)
def test_a_model_with_nothing_for_muon_is_an_error(model: nn.Module) -> None:
    with pytest.raises(ValueError, match=r"nothing in the model is for Muon.*AdamW"):
        mc.route(model, verbose=False)


# -- what is printed ----------------------------------------------------------------------------------------------


def rows(text: str) -> list[list[str]]:
    """The printed table: where it goes, parameters, shape, count and reason."""
    lines = [re.split(r"\s{2,}", line.strip()) for line in text.splitlines()]
    return [cells for cells in lines if len(cells) == 5 and cells[0] != "goes to"]


def test_the_printed_table(capsys: pytest.CaptureFixture[str]) -> None:
    model = Transformer(tied=True, experts=3)
    model.blocks[0].norm1.weight.requires_grad_(False)
    mc.route(model)
    text = capsys.readouterr().out
    assert max(map(len, text.splitlines())) <= 120
    table = rows(text)
    for row in (
        ["muon", "blocks.*.qkv.weight", "24x8", "2", "hidden matrix"],
        ["muon", "blocks.*.experts", "3x8x16", "2", "stack of matrices"],
        ["adamw", "blocks.*.gain", "scalar", "2", "scalar"],
        ["adamw", "blocks.*.qkv.bias", "24", "2", "bias"],
        ["adamw", "blocks.*.norm*.weight", "8", "3", "norm"],
        ["adamw", "wte.weight", "32x8", "1", "embedding (tied head)"],
        ["-", "lm_head.weight", "32x8", "1", "tied to wte.weight"],
        ["-", "blocks.*.norm*.weight", "8", "1", "frozen (requires_grad=False), left out"],
    ):
        assert row in table, text
    goes_to = [row[0] for row in table]
    assert goes_to == sorted(goes_to, key=["muon", "adamw", "-"].index)
    assert sum(int(row[3]) for row in table) == 1 + len(list(model.parameters()))  # the tied name has a row as well


def test_the_table_names_patterns_and_can_be_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    mc.route(Transformer(), muon=["wpe.weight"], adamw=["*.up.weight"])
    table = rows(capsys.readouterr().out)
    assert ["muon", "wpe.weight", "16x8", "1", "named by muon="] in table
    assert ["adamw", "blocks.*.up.weight", "16x8", "2", "named by adamw="] in table
    mc.route(Transformer(), verbose=False)
    assert capsys.readouterr().out == ""


def test_the_table_is_printed_before_the_error(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ValueError, match="nothing"):
        mc.route(nn.Embedding(8, 4))
    assert rows(capsys.readouterr().out) == [["adamw", "weight", "8x4", "1", "embedding"]]


def test_the_groups_train() -> None:
    model = nn.Sequential(nn.Embedding(16, 8), nn.Conv1d(8, 8, 3), nn.Linear(6, 6), nn.Linear(6, 4))
    optimizer = mc.Muon(mc.route(model, verbose=False), lr=0.1, adamw_lr=0.1, backend="aot_eager")
    before = {name: p.detach().clone() for name, p in model.named_parameters()}

    def loss() -> Tensor:
        tokens = model[0](torch.arange(8)).T  # [8, 8]
        return model[3](model[2](model[1](tokens))).square().mean()

    for _ in range(3):
        optimizer.zero_grad()
        loss().backward()
        optimizer.step()
    assert all(not torch.equal(p, before[name]) for name, p in model.named_parameters())
