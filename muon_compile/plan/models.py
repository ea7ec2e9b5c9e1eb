"""Public models as parameter lists, so that a cluster's step can be planned on a laptop."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace

from muon_compile.plan.planner import default_layout
from muon_compile.spec import MatrixSpec, MeshSpec, ShardLayout

# Name and shape of one parameter.
Param = tuple[str, tuple[int, ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpt2:
    """A GPT-2 model: learned positions, biases, one weight for q, k and v; the head is the embedding.

    Raises:
        ValueError: A figure below 1.
    """

    hidden_size: int
    num_layers: int
    num_positions: int = 1024
    vocab_size: int = 50257

    def __post_init__(self) -> None:
        _check_counts(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupedAttention:
    """Attention whose query heads share key and value heads (GQA); ``qk_norm``: queries and keys are normalized.

    Raises:
        ValueError: A figure below 1.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    qk_norm: bool = False

    def __post_init__(self) -> None:
        _check_counts(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentAttention:
    """Multi-head latent attention (MLA, DeepSeek-V2, arXiv 2405.04434), in the words of its config.json.

    Raises:
        ValueError: A figure below 1.
    """

    num_heads: int
    q_lora_rank: int
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int

    def __post_init__(self) -> None:
        _check_counts(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class Experts:
    """The mixture of experts that stands in for a layer's MLP.

    Args:
        num_routed: Experts that tokens are routed to, each ``intermediate_size`` wide.
        num_shared: Experts that see every token, as one MLP of that many times the width.
        num_dense_layers: First layers that keep an ordinary MLP.

    Raises:
        ValueError: A figure below 1, or a negative one where there may be none.
    """

    num_routed: int
    intermediate_size: int
    num_shared: int = 0
    num_dense_layers: int = 0

    def __post_init__(self) -> None:
        _check_counts(self, "num_shared", "num_dense_layers")


@dataclass(frozen=True, slots=True, kw_only=True)
class Decoder:
    """A decoder with RMS norms and gated MLPs, without biases: Llama and its descendants.

    Args:
        intermediate_size: Width of the MLPs that are no experts.
        vocab_size: Rows of the embedding and of the output head.
        experts: None: every layer has an MLP.
        tied: The head is the embedding.

    Raises:
        ValueError: A figure below 1, or more dense layers than layers.
    """

    hidden_size: int
    intermediate_size: int
    num_layers: int
    vocab_size: int
    attention: GroupedAttention | LatentAttention
    experts: Experts | None = None
    tied: bool = False

    def __post_init__(self) -> None:
        _check_counts(self)
        if self.experts is not None and self.experts.num_dense_layers > self.num_layers:
            raise ValueError(
                f"Decoder.experts: expected at most num_layers={self.num_layers} dense layers, "
                f"got num_dense_layers={self.experts.num_dense_layers}."
            )


def _check_counts(config: Gpt2 | GroupedAttention | LatentAttention | Experts | Decoder, *may_be_zero: str) -> None:
    for field in fields(config):
        value, least = getattr(config, field.name), 0 if field.name in may_be_zero else 1
        if isinstance(value, int) and not isinstance(value, bool) and value < least:
            raise ValueError(f"{type(config).__name__}.{field.name}: expected an int >= {least}, got {value}.")


# deepseek-ai/DeepSeek-V3; DeepSeek-V3, arXiv 2412.19437, section 4.2
_MLA = LatentAttention(
    num_heads=128, q_lora_rank=1536, kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128
)
_DEEPSEEK_V3 = Decoder(
    hidden_size=7168,
    intermediate_size=18432,
    num_layers=61,
    vocab_size=129280,
    attention=_MLA,
    experts=Experts(num_routed=256, intermediate_size=2048, num_shared=1, num_dense_layers=3),
)

# Figures: config.json of each model's page at huggingface.co, which is named beside it.
MODELS: dict[str, Gpt2 | Decoder] = {
    # openai-community/gpt2, -medium, -large, -xl
    "gpt2": Gpt2(hidden_size=768, num_layers=12),
    "gpt2-medium": Gpt2(hidden_size=1024, num_layers=24),
    "gpt2-large": Gpt2(hidden_size=1280, num_layers=36),
    "gpt2-xl": Gpt2(hidden_size=1600, num_layers=48),
    # huggyllama/llama-7b; LLaMA, arXiv 2302.13971, table 2. Llama-2-7b has the same shapes.
    "llama-7b": Decoder(
        hidden_size=4096,
        intermediate_size=11008,
        num_layers=32,
        vocab_size=32000,
        attention=GroupedAttention(num_heads=32, num_kv_heads=32, head_dim=128),
    ),
    # meta-llama/Llama-2-70b-hf
    "llama-70b": Decoder(
        hidden_size=8192,
        intermediate_size=28672,
        num_layers=80,
        vocab_size=32000,
        attention=GroupedAttention(num_heads=64, num_kv_heads=8, head_dim=128),
    ),
    # meta-llama/Llama-3.2-1B
    "llama-3.2-1b": Decoder(
        hidden_size=2048,
        intermediate_size=8192,
        num_layers=16,
        vocab_size=128256,
        attention=GroupedAttention(num_heads=32, num_kv_heads=8, head_dim=64),
        tied=True,
    ),
    # Qwen/Qwen3-30B-A3B; its intermediate_size is that of an MLP which no layer has.
    "qwen3-30b-a3b": Decoder(
        hidden_size=2048,
        intermediate_size=6144,
        num_layers=48,
        vocab_size=151936,
        attention=GroupedAttention(num_heads=32, num_kv_heads=4, head_dim=128, qk_norm=True),
        experts=Experts(num_routed=128, intermediate_size=768),
    ),
    "deepseek-v3": _DEEPSEEK_V3,
    # This library's own, not published: DeepSeek-V3 with its widths times 4/7, rounded to multiples of 1024, heads
    # (64 of the same width), and as many layers as make 100e9 parameters.
    "moe-100b": replace(
        _DEEPSEEK_V3,
        hidden_size=4096,
        intermediate_size=10240,
        num_layers=33,
        attention=replace(_MLA, num_heads=64, q_lora_rank=1024),
        experts=Experts(num_routed=256, intermediate_size=1024, num_shared=1, num_dense_layers=3),
    ),
}

# Matrices that go to AdamW, as muon_compile.route sends them: embeddings and the output head.
_ADAMW_MATRICES = ("transformer.wte.weight", "transformer.wpe.weight", "model.embed_tokens.weight", "lm_head.weight")


def model_specs(
    name: str,
    *,
    mesh: MeshSpec | None = None,
    expert_mesh: MeshSpec | None = None,
    dtype: str = "float32",
    device: str = "cpu",
) -> list[MatrixSpec]:
    """Every parameter of a public model, sent to Muon or AdamW as ``muon_compile.route`` sends it.

    Named as in transformers, matrices ``[out, in]``; a tied head is left out. A layer's routed experts are one stack
    ``[experts, out, in]`` per projection; the router's gate is a hidden matrix, so it goes to Muon. GPT-2's ``c_attn``
    is one matrix: cutting it takes a config of its own (``split_sizes``), which would hide ``make_plan``'s. DeepSeek-V3
    lacks its multi-token prediction layer, and ``e_score_correction_bias``, which no gradient trains.

    Args:
        name: One of ``MODELS``.
        mesh: Mesh that the parameters lie on, as fully_shard cuts them; None: the specs have no layout, and
            ``make_plan(mesh=...)`` may give them one.
        expert_mesh: The same ranks as other axes, for the stacks of experts: dim 0 is cut over the last axis, an axis
            before it holds copies. None: they lie on ``mesh``.
        dtype: dtype of parameters and gradients: float32 is what fully_shard hands the optimizer, also with
            ``MixedPrecisionPolicy(param_dtype=torch.bfloat16)``.
        device: Device of every parameter.

    Raises:
        ValueError: An unknown name, or an ``expert_mesh`` that does not fit the model or ``mesh``.
        NotImplementedError: A mesh of more than two axes.
    """
    if name not in MODELS:
        raise ValueError(f"model_specs: name: expected one of {', '.join(MODELS)}; got {name!r}.")
    config = MODELS[name]
    if expert_mesh is not None:
        _check_expert_mesh(name, mesh, expert_mesh)

    # One layout for all parameters of a length: on thousands of ranks it is long.
    @functools.cache
    def layout_of(length: int, on: MeshSpec) -> ShardLayout:
        return default_layout(MatrixSpec(name=name, shape=(length, 1)), on)

    specs = []
    for param, shape in _gpt2(config) if isinstance(config, Gpt2) else _decoder(config):
        on = expert_mesh if expert_mesh is not None and len(shape) == 3 else mesh
        specs.append(
            MatrixSpec(
                name=param,
                shape=shape,
                dtype=dtype,
                device=device,
                algorithm="adamw" if len(shape) < 2 or param in _ADAMW_MATRICES else "muon",
                layout=None if on is None else layout_of(shape[0], on),
            )
        )
    return specs


def _check_expert_mesh(name: str, mesh: MeshSpec | None, expert_mesh: MeshSpec) -> None:
    config = MODELS[name]
    if isinstance(config, Gpt2) or config.experts is None:
        raise ValueError(f"model_specs({name!r}): expert_mesh: the model has no experts; expected None.")
    if mesh is None or mesh.num_ranks != expert_mesh.num_ranks:
        raise ValueError(
            f"model_specs({name!r}): expert_mesh: expected a mesh beside it, over as many ranks, "
            f"got axes {expert_mesh.axes} beside {mesh and mesh.axes}."
        )
    if shared := dict(mesh.axes).keys() & dict(expert_mesh.axes).keys():
        raise ValueError(
            f"model_specs({name!r}): expert_mesh: a collective is known by its axis; expected axes of other names than "
            f"those of mesh, got {sorted(shared)} in both."
        )


def _gpt2(config: Gpt2) -> Iterator[Param]:
    width = config.hidden_size
    yield "transformer.wte.weight", (config.vocab_size, width)
    yield "transformer.wpe.weight", (config.num_positions, width)
    weights: dict[str, tuple[int, ...]] = {
        "ln_1": (width,),
        "attn.c_attn": (3 * width, width),
        "attn.c_proj": (width, width),
        "ln_2": (width,),
        "mlp.c_fc": (4 * width, width),
        "mlp.c_proj": (width, 4 * width),
    }
    for layer in range(config.num_layers):
        for name, shape in weights.items():
            yield f"transformer.h.{layer}.{name}.weight", shape
            yield f"transformer.h.{layer}.{name}.bias", shape[:1]
    yield "transformer.ln_f.weight", (width,)
    yield "transformer.ln_f.bias", (width,)


def _decoder(config: Decoder) -> Iterator[Param]:
    width, experts = config.hidden_size, config.experts
    yield "model.embed_tokens.weight", (config.vocab_size, width)
    for layer in range(config.num_layers):
        at = f"model.layers.{layer}"
        if isinstance(config.attention, LatentAttention):
            yield from _latent_attention(f"{at}.self_attn", config.attention, width)
        else:
            yield from _grouped_attention(f"{at}.self_attn", config.attention, width)
        if experts is None or layer < experts.num_dense_layers:
            yield from _mlp(f"{at}.mlp", config.intermediate_size, width)
        else:
            yield from _experts(f"{at}.mlp", experts, width)
        yield f"{at}.input_layernorm.weight", (width,)
        yield f"{at}.post_attention_layernorm.weight", (width,)
    yield "model.norm.weight", (width,)
    if not config.tied:
        yield "lm_head.weight", (config.vocab_size, width)


def _grouped_attention(at: str, config: GroupedAttention, width: int) -> Iterator[Param]:
    heads, kv_heads, head = config.num_heads, config.num_kv_heads, config.head_dim
    yield f"{at}.q_proj.weight", (heads * head, width)
    yield f"{at}.k_proj.weight", (kv_heads * head, width)
    yield f"{at}.v_proj.weight", (kv_heads * head, width)
    yield f"{at}.o_proj.weight", (width, heads * head)
    if config.qk_norm:
        yield f"{at}.q_norm.weight", (head,)
        yield f"{at}.k_norm.weight", (head,)


def _latent_attention(at: str, config: LatentAttention, width: int) -> Iterator[Param]:
    heads, q_rank, kv_rank = config.num_heads, config.q_lora_rank, config.kv_lora_rank
    nope, rope, value = config.qk_nope_head_dim, config.qk_rope_head_dim, config.v_head_dim
    yield f"{at}.q_a_proj.weight", (q_rank, width)
    yield f"{at}.q_a_layernorm.weight", (q_rank,)
    yield f"{at}.q_b_proj.weight", (heads * (nope + rope), q_rank)
    yield f"{at}.kv_a_proj_with_mqa.weight", (kv_rank + rope, width)
    yield f"{at}.kv_a_layernorm.weight", (kv_rank,)
    yield f"{at}.kv_b_proj.weight", (heads * (nope + value), kv_rank)
    yield f"{at}.o_proj.weight", (width, heads * value)


def _mlp(at: str, inner: int, width: int) -> Iterator[Param]:
    yield f"{at}.gate_proj.weight", (inner, width)
    yield f"{at}.up_proj.weight", (inner, width)
    yield f"{at}.down_proj.weight", (width, inner)


def _experts(at: str, config: Experts, width: int) -> Iterator[Param]:
    count, inner = config.num_routed, config.intermediate_size
    yield f"{at}.gate.weight", (count, width)
    yield f"{at}.experts.gate_proj", (count, inner, width)
    yield f"{at}.experts.up_proj", (count, inner, width)
    yield f"{at}.experts.down_proj", (count, width, inner)
    if config.num_shared:
        yield from _mlp(f"{at}.shared_experts", config.num_shared * inner, width)
