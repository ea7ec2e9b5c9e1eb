"""What the planner makes of the speed-ups that are reported from an Ascend cluster, from first principles.

python tools/field_ratios.py                  the table: predicted ratios beside reported ones
python tools/field_ratios.py --json           the same as JSON
python tools/field_ratios.py --markdown       the same as docs/planner.md has it
python tools/field_ratios.py --queue-pairs    queue pairs by strategy and number of ranks, as docs/planner.md has them

Nothing is fitted. Sizes follow a rule, whatever comes out: those that the report names (512 dies, 100e9 parameters,
HSDP, 74 matrices of [24, 10240]), else a public model's and its public training recipe's. The machine is the preset
``ascend-910c``, one rank to a die; Newton-Schulz is the standard form.
"""

from __future__ import annotations

import argparse
import functools
import json
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).parent))

from _queue_pairs import markdown, queue_pair_pages, shards

import muon_compile as mc
from muon_compile.plan.hardware import network_of
from muon_compile.plan.network import Group
from muon_compile.plan.planner import DEFAULT_MAX_GATHER_BYTES, make_plan
from muon_compile.plan.step_cost import StepCost, predict_step
from muon_compile.plan.traffic import fastest
from muon_compile.spec import FLOAT_BYTES, MatrixSpec, MeshSpec

MACHINE = "ascend-910c"
# The reported end-to-end goal names both; the model is the library's own DeepSeek-V3 cut to 100e9 parameters.
DIES, MODEL = 512, "moe-100b"
# float32 parameter, gradient and momentum of 100e9 parameters take 1.2 TB: the smallest power of two of dies that holds
# that in half of their 64 GB (128 GB to a package: CloudMatrix384, arXiv 2506.12708), and activations in the rest.
SHARDS = 64
HSDP = f"{MODEL}, HSDP {DIES // SHARDS} x {SHARDS}"
# Qwen3-30B-A3B's experts on Ascend: Ascend/MindSpeed-LLM, examples/mcore/qwen3_moe/pretrain_qwen3_30b_a3b_4K_ptd.sh
# has EP=4 for 128 experts.
EXPERT_MODEL, EXPERT_RANKS = "qwen3-30b-a3b", 4
SMALL, SMALL_COUNT = (24, 10240), 74
# Host's time for an operator of eager PyTorch on an accelerator: an add or mul of 512 x 512, issued back to back on an
# A100, takes 8 us (flagos-ai/Torch-FL, pull request 27). None is published for an NPU.
EAGER_OP_SECONDS = 8e-6
# Operators around a collective in eager, as in the cost model: packing, the call, the wait, unpacking.
EAGER_EXCHANGE_OPS = 4
WITHIN = 0.30
# Of a die's 64 GB, what gathers might take where everything is to go in one wave: not a setting for training.
ROOM = 64 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class Ratio:
    """One reported speed-up beside the predicted one.

    Args:
        what: What is compared.
        setting: Sizes and ranks.
        reported: The reported factor, and its two times in ms where there are any.
        before: Predicted seconds.
        after: Predicted seconds.
    """

    what: str
    setting: str
    reported: float | tuple[float, float]
    before: float
    after: float

    @property
    def goal(self) -> float:
        """The reported factor."""
        return self.reported[0] / self.reported[1] if isinstance(self.reported, tuple) else self.reported

    @property
    def factor(self) -> float:
        """The predicted factor."""
        return self.before / self.after

    @property
    def deviation(self) -> float:
        """How far the predicted factor is from the reported one, as a fraction of it."""
        return self.factor / self.goal - 1

    @property
    def within(self) -> bool:
        """Whether that is at most ``WITHIN``."""
        return abs(self.deviation) <= WITHIN


# -- predictions ------------------------------------------------------------------------------------------------------


def hsdp() -> MeshSpec:
    """All dies as replicas of ``SHARDS`` shards."""
    return MeshSpec(axes=(("replicate", DIES // SHARDS), ("shard", SHARDS)))


def step(
    specs: Iterable[MatrixSpec],
    machine: mc.Hardware,
    strategy: str = "auto",
    *,
    replicas: str = "divide",
    room: int = DEFAULT_MAX_GATHER_BYTES,
) -> StepCost:
    """A step of the standard form, predicted; ``room``: bytes that may be gathered at once."""
    plan = make_plan(
        specs,
        strategy=strategy,
        ns="standard",
        replicas=replicas,
        max_gather_bytes=room,
        max_temp_bytes=2 * room,
        hardware=machine,
    )
    return predict_step(plan, machine)


def model(name: str, mesh: MeshSpec, machine: mc.Hardware) -> list[MatrixSpec]:
    """A model's parameters as ``fully_shard`` cuts them."""
    return mc.model_specs(name, mesh=mesh, device=machine.device)


def all_gathered(stacks: Sequence[MatrixSpec], shards: int, machine: mc.Hardware) -> StepCost:
    """Stacks of experts of which every rank gets all and orthogonalizes all, on any copy of the shard group."""
    whole = step([replace(spec, layout=None) for spec in stacks], machine)
    own = step(stacks, machine)
    network, group = network_of(machine), Group(size=shards)
    # Padded to the longest shard; on the wire as the products have it.
    sizes = [-(-spec.shape[0] // shards) * spec.shape[1] * spec.shape[2] * FLOAT_BYTES["bfloat16"] for spec in stacks]
    sent = sum(fastest("all_gather_into_tensor", size, group, network).seconds for size in sizes)
    seconds = own.passes.seconds + whole.solve.seconds + sent
    return replace(whole, seconds=seconds, passes=own.passes, network_seconds=sent)


def eager_host_seconds(specs: Sequence[MatrixSpec], machine: mc.Hardware, exchange_ops: int = 0) -> float:
    """Host's time for all Muon parameters one by one, each with the operators of a bucket that has it alone."""
    total = 0.0
    for shape in (spec.shape for spec in specs if spec.algorithm == "muon"):
        total += _operators(shape, machine) + exchange_ops
    return total * EAGER_OP_SECONDS


@functools.cache
def _operators(shape: tuple[int, ...], machine: mc.Hardware) -> int:
    alone = step([MatrixSpec(name="w", shape=shape, device=machine.device)], machine)
    return round((alone.solve.host_seconds + alone.passes.host_seconds) / machine.op_seconds)


def device_seconds(cost: StepCost, machine: mc.Hardware) -> float:
    """A step without the host's share."""
    return cost.seconds - cost.solve.host_seconds - cost.passes.host_seconds


# -- the five reports -------------------------------------------------------------------------------------------------


def owners(machine: mc.Hardware, ranks: int = DIES) -> Ratio:
    """all_gather against gather_broadcast within one shard group."""
    specs = model(MODEL, shards(ranks), machine)
    before, after = (step(specs, machine, name).seconds for name in ("all_gather", "gather_broadcast"))
    return Ratio(
        what="every rank all -> owners, results broadcast",
        setting=f"{MODEL}, FSDP on {ranks}",
        reported=(485, 129),
        before=before,
        after=after,
    )


def experts(machine: mc.Hardware) -> Ratio:
    """Experts gathered everywhere against each rank's own."""
    specs = model(EXPERT_MODEL, shards(EXPERT_RANKS), machine)
    layer = [spec for spec in specs if spec.name.startswith("model.layers.0.mlp.experts.")]
    return Ratio(
        what="experts: every rank all -> its own",
        setting=f"{EXPERT_MODEL}, one layer's, on {EXPERT_RANKS}",
        reported=(4.9, 1.1),
        before=all_gathered(layer, EXPERT_RANKS, machine).seconds,
        after=step(layer, machine).seconds,
    )


def small(machine: mc.Hardware, count: int = SMALL_COUNT) -> Ratio:
    """Small matrices one by one in eager against one static graph."""
    specs = [MatrixSpec(name=f"w{i}", shape=SMALL, device=machine.device) for i in range(count)]
    batched = step(specs, machine)
    # Eager launches run ahead of the device: the slower of the two sets the time.
    return Ratio(
        what="one by one in eager -> one batch in one graph",
        setting=f"{count} x {list(SMALL)}, on 1",
        reported=(74, 2.4),
        before=max(eager_host_seconds(specs, machine), device_seconds(batched, machine)),
        after=batched.seconds,
    )


def replicas(machine: mc.Hardware, room: int = DEFAULT_MAX_GATHER_BYTES) -> tuple[Ratio, Ratio]:
    """HSDP: every replica repeats Newton-Schulz, or they divide it; products alone, and the whole step."""
    specs, setting = model(MODEL, hsdp(), machine), HSDP
    if room != DEFAULT_MAX_GATHER_BYTES:
        setting += f", {room >> 30} GiB gathered at once"
    repeat, divide = (
        step(specs, machine, "gather_broadcast", replicas=what, room=room) for what in ("repeat", "divide")
    )
    products = Ratio(
        what="replicas repeat -> divide: products",
        setting=setting,
        reported=7,
        before=repeat.solve.gemm_seconds,
        after=divide.solve.gemm_seconds,
    )
    overall = Ratio(
        what="replicas repeat -> divide: step",
        setting=setting,
        reported=2,
        before=repeat.seconds,
        after=divide.seconds,
    )
    return products, overall


def end_to_end(machine: mc.Hardware, strategy: str = "gather_broadcast", *, gather_experts: bool = True) -> Ratio:
    """Everything gathered and repeated on every rank, eager, against owners, divided replicas, one graph."""
    specs = model(MODEL, hsdp(), machine)
    stacks = [spec for spec in specs if len(spec.shape) == 3]
    rest = specs if not gather_experts else [spec for spec in specs if len(spec.shape) != 3]
    device = device_seconds(step(rest, machine, "all_gather", replicas="repeat"), machine)
    if gather_experts:
        device += device_seconds(all_gathered(stacks, SHARDS, machine), machine)
    return Ratio(
        what=f"eager, every rank all -> {strategy}, divided, one graph",
        setting=HSDP,
        reported=(2700, 450),
        before=max(device, eager_host_seconds(specs, machine, EAGER_EXCHANGE_OPS)),
        after=step(specs, machine, strategy).seconds,
    )


@functools.cache
def ratios(name: str = MACHINE) -> tuple[Ratio, ...]:
    """The reported speed-ups, predicted on a preset."""
    machine = mc.Hardware.preset(name)
    return owners(machine), experts(machine), small(machine), *replicas(machine), end_to_end(machine)


@functools.cache
def elsewhere() -> tuple[Ratio, ...]:
    """The same under other settings than those of the rule: what the predictions hang on."""
    machine, other = mc.Hardware.preset(MACHINE), mc.Hardware.preset("ascend-910b")
    named = replace(owners(other), setting=f"{MODEL}, FSDP on {DIES} of {other.name}")
    local = end_to_end(machine, gather_experts=False)
    return (
        owners(machine, SHARDS),
        named,
        small(machine, 32),
        *replicas(machine, ROOM),
        replace(local, setting=f"{local.setting}, experts local before too"),
        end_to_end(machine, "auto"),
    )


# -- tables -----------------------------------------------------------------------------------------------------------

HEADS = ["", "setting", "reported", "predicted", "deviation", "within 30 %"]


def cells(ratio: Ratio) -> list[str]:
    """A row of the table."""
    times = f"{ratio.reported[0]:g} -> {ratio.reported[1]:g} ms, " if isinstance(ratio.reported, tuple) else ""
    return [
        ratio.what,
        ratio.setting,
        f"{times}{ratio.goal:.1f}x",
        f"{ratio.before * 1e3:.3g} -> {ratio.after * 1e3:.3g} ms, {ratio.factor:.1f}x",
        f"{ratio.deviation:+.0%}",
        "yes" if ratio.within else "no",
    ]


def ratio_page() -> str:
    """The tables of docs/planner.md: the ratios, and what they are elsewhere."""
    first, second = (markdown(HEADS, [cells(r) for r in rows]) for rows in (ratios(), elsewhere()))
    return f"{first}\n\nUnder other settings than those of the rule:\n\n{second}"


def _show(title: str, rows: Iterable[Ratio]) -> None:
    table = Table(box=SIMPLE_HEAD, title=title, title_justify="left", pad_edge=False)
    for head in HEADS:
        table.add_column(head, justify="right" if head in HEADS[2:5] else "left")
    for row in rows:
        table.add_row(*cells(row))
    Console(width=170).print(table)


def _data(ratio: Ratio) -> dict[str, object]:
    return {
        "what": ratio.what,
        "setting": ratio.setting,
        "reported": ratio.goal,
        "before_seconds": ratio.before,
        "after_seconds": ratio.after,
        "predicted": ratio.factor,
        "deviation": ratio.deviation,
        "within": ratio.within,
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    kinds = parser.add_mutually_exclusive_group()
    kinds.add_argument("--json", action="store_true", help="the ratios as JSON")
    kinds.add_argument("--markdown", action="store_true", help="the ratios as docs/planner.md has them")
    kinds.add_argument("--queue-pairs", action="store_true", help="queue pairs by strategy and ranks, as markdown")
    args = parser.parse_args(argv)
    if args.queue_pairs:
        print(queue_pair_pages())
    elif args.markdown:
        print(ratio_page())
    elif args.json:
        both = {"ratios": ratios(), "elsewhere": elsewhere()}
        print(json.dumps({"machine": MACHINE} | {k: [_data(r) for r in v] for k, v in both.items()}, indent=1))
    else:
        _show(f"Predicted on {MACHINE} against reported", ratios())
        _show("Under other settings than those of the rule", elsewhere())
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
