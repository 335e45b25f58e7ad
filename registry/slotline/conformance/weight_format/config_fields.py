"""Every field of quantizers' configurations: those that say nothing about a weight, those that count, the refused.

The fields are those of GPTQModel's and transformers' GPTQ, AutoAWQ's, DeepSeek's and AutoFP8's FP8, ModelOpt's FP8,
compressed-tensors', bitsandbytes' and GPT-OSS' MXFP4. A field that is set and ignored gives other weights than the
library that wrote the checkpoint, without a word. Each check takes an example of the plugin and changes one field over
the same tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Any

import torch
from attrs import evolve, frozen

from slotline.registry.contracts.weight_format import FormatExample
from slotline.registry.contracts.weights import QuantizedWeight
from slotline.registry.descriptor import Kind
from slotline.registry.errors import ModelError
from slotline.testing.check import Case, Failed, Level, NotApplicable, Run, check
from slotline.testing.environments.weight_format import MODULES, FormatWorld, MemoryReader, context_of, examples_of
from slotline.testing.subject import Subject

Change = Callable[[QuantizedWeight], QuantizedWeight]
GROUP = "config_groups.group_0."


@frozen
class Field:
    """One field with a value.

    Attributes:
        path: its place in the configuration, names joined by dots.
        value: what it is set to.
        means: ``same`` for nothing, ``plain`` for modules that stay plain, ``refused``, or a function of the weight.
        named: what a refusal may name instead of the field: tensors that contradict it.
        when: True for schemes over which the value is another one.
    """

    path: str
    value: Any
    means: str | Change = "same"
    named: tuple[str, ...] = ()
    when: Callable[[FormatExample], bool] = lambda _: True


def _same(*pairs: tuple[str, Any]) -> tuple[Field, ...]:
    return tuple(Field(path, value) for path, value in pairs)


def _refused(*pairs: tuple[str, Any]) -> tuple[Field, ...]:
    return tuple(Field(path, value, "refused") for path, value in pairs)


def _plain(*paths: str) -> tuple[Field, ...]:
    return tuple(Field(path, [name], "plain") for path in paths for name in (MODULES[0], "q_proj"))


def _symmetric(example: FormatExample) -> bool:
    return example.scheme.symmetric


def _asymmetric(example: FormatExample) -> bool:
    return not example.scheme.symmetric


def _grouped(example: FormatExample) -> bool:
    return example.scheme.granularity == "group"


def _zero_offsets(weight: QuantizedWeight) -> QuantizedWeight:
    return evolve(weight, scheme=evolve(weight.scheme, symmetric=False), offsets=torch.zeros_like(weight.scales))


def _in_order(weight: QuantizedWeight) -> QuantizedWeight:
    order = torch.arange(weight.codes.shape[1], dtype=torch.int32) // weight.scheme.group[1]
    return evolve(weight, scheme=evolve(weight.scheme, act_order=True), g_idx=order)


def _zeros_of_version(version: str) -> Change:
    """Return what the tensors mean in the other version of GPTQ, which stores zero points less one, or as they are."""

    def read(weight: QuantizedWeight) -> QuantizedWeight:
        assert weight.offsets is not None
        size = 1 << weight.scheme.element.bits
        points = (-weight.offsets / weight.scales).round() + size // 2
        shift = -1 if version == "gptq_v2" else 1
        return evolve(weight, offsets=-(((points + shift) % size) - size // 2) * weight.scales)

    return read


def _of_other_version(version: str) -> Callable[[FormatExample], bool]:
    def other(example: FormatExample) -> bool:
        config: Mapping[str, Any] = {} if callable(example.config) else example.config
        return _asymmetric(example) and config.get("checkpoint_format") != version

    return other


GPTQ = (
    *_same(
        ("damp_percent", 0.05),
        ("damp_auto_increment", 0.01),
        ("true_sequential", False),
        ("static_groups", True),
        ("lm_head", False),
        ("pack_dtype", "int32"),
        ("meta", {"quantizer": ["gptqmodel:5.0.0"]}),
        ("model_name_or_path", "/somewhere"),
        ("model_file_base_name", "model"),
        ("model_seqlen", 2048),
        ("max_input_length", 4096),
        ("batch_size", 4),
        ("dataset", "c4"),
        ("tokenizer", None),
        ("pad_token_id", 0),
        ("block_name_to_quantize", "model.layers"),
        ("module_name_preceding_first_block", ["model.embed_tokens"]),
        ("modules_in_block_to_quantize", [["self_attn.q_proj"], ["mlp.down_proj"]]),
        ("cache_block_outputs", True),
        ("use_cuda_fp16", True),
        ("use_exllama", False),
        ("disable_exllama", True),
        ("exllama_config", {"version": 1}),
        ("backend", "auto"),
        ("mse", 2.4),
        ("act_group_aware", True),
        ("dynamic", None),
        ("adapter", None),
        ("rotation", None),
        ("is_marlin_format", False),
    ),
    *_plain("modules_to_not_convert"),
    *_refused(
        ("bits", 3),
        ("checkpoint_format", "marlin"),
        ("is_marlin_format", True),
        ("pack_dtype", "int8"),
        ("dynamic", {"+:.*down_proj.*": {"bits": 8}}),
        ("adapter", {"name": "lora", "rank": 8}),
        ("rotation", "hadamard"),
    ),
    Field("group_size", 16, "refused", ("scales", "qzeros"), _grouped),
    Field("group_size", 64, "refused", ("scales", "qzeros"), _grouped),
    Field("sym", False, _zero_offsets, when=_symmetric),
    Field("sym", True, "refused", when=_asymmetric),
    Field("desc_act", True, _in_order, when=lambda example: _grouped(example) and not example.scheme.act_order),
    Field("desc_act", False, "refused", when=lambda example: example.scheme.act_order),
    *(
        Field("checkpoint_format", name, _zeros_of_version(name), when=_of_other_version(name))
        for name in ("gptq", "gptq_v2")
    ),
)
AWQ = (
    *_same(
        ("do_fuse", False),
        ("fuse_max_seq_len", 512),
        ("modules_to_fuse", None),
        ("exllama_config", {"version": 2}),
        ("backend", "autoawq"),
        ("calib_data", "pileval"),
    ),
    *_plain("modules_to_not_convert"),
    *_refused(("bits", 8), ("version", "gemv"), ("version", "exllama"), ("version", "marlin")),
    Field("group_size", 64, "refused", ("scales", "qzeros"), _grouped),
    Field(
        "zero_point",
        False,
        lambda weight: evolve(weight, scheme=evolve(weight.scheme, symmetric=True), offsets=None),
        ("qzeros",),
        _asymmetric,
    ),
)
FP8 = (
    *_same(("fmt", "e4m3"), ("dequantize", False), ("kv_cache_scheme", None), ("quantization_status", "compressed")),
    *_plain("modules_to_not_convert"),
    *_refused(("fmt", "e5m2"), ("activation_scheme", "block")),
    Field(
        "weight_block_size",
        [32, 20],
        "refused",
        ("weight_scale_inv", "weight_scale"),
        lambda example: example.scheme.granularity == "block",
    ),
)
MODELOPT = (
    *_same(("producer", {"name": "modelopt", "version": "0.40"}), ("kv_cache_quant_algo", None), ("group_size", None)),
    *_plain("exclude_modules"),
    *_refused(("quant_algo", "NVFP4"), ("quant_algo", "W4A8_AWQ"), ("quant_algo", "MIXED_PRECISION")),
)
COMPRESSED = (
    *_same(
        ("quantization_status", "compressed"),
        ("global_compression_ratio", 1.5),
        ("version", "0.13.0"),
        ("kv_cache_scheme", None),
        ("sparsity_config", {}),
        ("sparsity_config", {"format": "dense"}),
        ("transform_config", {}),
        (GROUP + "weights.observer", "mse"),
        (GROUP + "weights.observer_kwargs", {"averaging_constant": 0.5}),
        (GROUP + "weights.dynamic", False),
        (GROUP + "weights.scale_dtype", "bfloat16"),
        (GROUP + "weights.zp_dtype", "torch.int8"),
        (GROUP + "output_activations", None),
        (GROUP + "targets", [r"re:.*proj$"]),
        (GROUP + "format", None),
    ),
    *_plain("ignore"),
    Field("ignore", [r"re:.*self_attn\..*"], "plain"),
    Field(GROUP + "targets", ["o_proj"], "plain"),
    *_refused(
        ("sparsity_config", {"format": "sparse-24-bitmask", "sparsity_structure": "2:4"}),
        ("transform_config", {"config_groups": {"R1": {"type": "hadamard"}}}),
        ("format", "marlin-24"),
        ("format", "nvfp4-pack-quantized"),
        (GROUP + "weights.num_bits", 3),
        (GROUP + "weights.strategy", "tensor_group"),
        (GROUP + "weights.dynamic", True),
        (GROUP + "output_activations", {"num_bits": 8, "type": "int"}),
        (GROUP + "input_activations", {"num_bits": 4, "type": "int", "dynamic": True}),
        (GROUP + "input_activations", {"num_bits": 8, "type": "int", "dynamic": True, "symmetric": False}),
        (GROUP + "input_activations", {"num_bits": 8, "type": "float", "dynamic": "local"}),
    ),
    Field(GROUP + "weights.group_size", 16, "refused", ("weight_scale",), _grouped),
    Field(GROUP + "weights.symmetric", False, "refused", ("weight_zero_point",), _symmetric),
    Field(
        GROUP + "weights.actorder",
        "group",
        "refused",
        ("weight_g_idx",),
        lambda example: _grouped(example) and not example.scheme.act_order,
    ),
)
BITSANDBYTES = _same(
    ("load_in_4bit", False),
    ("load_in_8bit", False),
    ("_load_in_4bit", True),
    ("_load_in_8bit", True),
    ("bnb_4bit_quant_type", "fp4"),  # what a tensor's own state says counts: the configuration may be the defaults
    ("bnb_4bit_use_double_quant", True),
    ("bnb_4bit_compute_dtype", "bfloat16"),
    ("bnb_4bit_quant_storage", "uint8"),
    ("llm_int8_threshold", 0.0),
    ("llm_int8_skip_modules", ["lm_head"]),
    ("llm_int8_enable_fp32_cpu_offload", True),
    ("llm_int8_has_fp16_weight", False),
)
MXFP4 = (*_same(("dequantize", False)), Field("modules_to_not_convert", ["mlp.experts"], "plain"))
FIELDS: Mapping[str, tuple[Field, ...]] = MappingProxyType(
    {
        "gptq": GPTQ,
        "awq": AWQ,
        "fp8": FP8,
        "modelopt": MODELOPT,
        "compressed-tensors": COMPRESSED,
        "bitsandbytes": BITSANDBYTES,
        "mxfp4": MXFP4,
    }
)
"""Value of `quant_method` -> fields of that configuration."""


def _method(example: FormatExample) -> str:
    return "" if callable(example.config) else str(example.config.get("quant_method", ""))


def _cases(subject: Subject) -> Iterable[Case]:
    """Return each field of the methods that are known, over the first example for which its value is another one."""
    found, examples = [], examples_of(subject)
    methods = dict.fromkeys(method for each in examples.values() if (method := _method(each)) in FIELDS)
    if not methods:
        raise NotApplicable("no example is of a quant_method whose fields the suite knows, not declared")
    for method in methods:
        for index, field in enumerate(FIELDS[method]):
            fitting = (name for name, each in examples.items() if _method(each) == method and field.when(each))
            if (name := next(fitting, None)) is not None:
                found.append({"example": name, "field": field.path.rpartition(".")[2], "index": index})
    return found


@check(Kind.WEIGHT_FORMAT, "weight_format.config.fields", Level.HOSTILE, cases=_cases, cost=0.02)
def config_fields(run: Run) -> None:
    """A field of a quantizer's configuration counts as its library reads it, changes nothing, or is refused by name."""
    world = FormatWorld(run)
    field = FIELDS[_method(world.example)][run["index"]]
    config = dict(world.example.config)  # type: ignore[arg-type]  # _method leaves callables out
    what = f"{field.path} = {field.value!r}"
    name, weight = world.names[0], world.weight()
    example = evolve(world.example, config=_with(config, field.path.split("."), field.value))
    reader = MemoryReader(world.tensors({name: weight}))
    try:
        built = run.subject.build(context_of(run.subject, example, reader))
        scheme = built.scheme_of(name, world.kind)
        found = None if scheme is None else built.read(name, world.kind)
        if found is not None:
            found.check(name)
    except ModelError as error:
        _may_be_refused(field, what, error)
        return
    if field.means == "refused":
        raise Failed(f"{what} was taken, and gives a weight: refuse it by name")
    if field.means == "plain":
        if scheme is not None:
            raise Failed(f"{what} leaves {name} plain, and scheme_of gave {scheme}")
        return
    if found is None:
        raise Failed(f"{what}: {name} has no scheme any more")
    wanted = field.means(weight) if callable(field.means) else weight
    if scheme != wanted.scheme:
        raise Failed(f"{what}: scheme_of gave {scheme}, expected {wanted.scheme}")
    world.compare(found, wanted, what)


def _may_be_refused(field: Field, what: str, error: ModelError) -> None:
    """Judge a refusal. A field that changes nothing must be taken, and one that only names modules too."""
    if field.means in ("same", "plain"):
        raise Failed(f"{what} means nothing that could not be read, yet it is refused: {error}") from error
    names = (field.path.rpartition(".")[2], *field.named)
    if not any(name in error.message for name in names) or not error.fix:
        raise Failed(f"{what} is refused, and the message names neither it nor a remedy: {error}") from error


def _with(config: Mapping[str, Any], path: list[str], value: Any) -> dict[str, Any]:
    """Return a configuration with one field changed, however deep it lies."""
    first, *rest = path
    return {**config, first: _with(config.get(first) or {}, rest, value) if rest else value}
