"""What may differ between the layers of a model, and its experts, as config.json has them."""

from dataclasses import dataclass

from dp_engine.families import Family
from dp_engine.json_file import JsonFile
from dp_engine.rope_config import LAYER_TYPES, RopeConfig
from ep.routing import Routing
from kernels.rotary import Rope

EXPERT_COUNTS = ("num_local_experts", "num_experts", "n_routed_experts")


@dataclass(frozen=True)
class Mixture:
    """The experts of a layer. shared_size: of the network that every token goes through besides, 0 if there is none."""

    num_experts: int
    size: int
    routing: Routing
    shared_size: int


@dataclass(frozen=True)
class LayerConfig:
    """What may differ between layers. window: tokens that are attended to, None for all; sparse: it has experts."""

    window: int | None
    rope: Rope
    sparse: bool


def load_mixture(config: JsonFile, family: Family) -> Mixture:
    assert family.routing is not None
    named = next((key for key in EXPERT_COUNTS if config.values.get(key) is not None), EXPERT_COUNTS[0])
    experts, routing = config.integer(named), family.routing(config)
    if routing.top_k > experts:
        raise config.error("num_experts_per_tok", f"{routing.top_k} exceeds the {experts} experts")
    if experts % routing.num_groups:
        raise config.error("n_group", f"{routing.num_groups} does not divide the {experts} experts")
    reachable = experts // routing.num_groups * routing.topk_groups
    if routing.top_k > reachable:
        raise config.error("num_experts_per_tok", f"{routing.top_k} exceeds the {reachable} of topk_group groups")
    if routing.num_groups > 1 and routing.scoring == "sigmoid" and experts // routing.num_groups < 2:
        raise config.error("n_group", f"{routing.num_groups} leaves groups of one of the {experts} experts")
    return Mixture(experts, config.integer(family.expert_size), routing, family.shared_size(config))


def load_layers(config: JsonFile, family: Family, rope: RopeConfig, max_model_len: int) -> tuple[LayerConfig, ...]:
    count = config.integer("num_hidden_layers")
    kinds = config.get("layer_types")
    if kinds is None:
        sliding = [family.sliding is not None and family.sliding(config, layer) for layer in range(count)]
        kinds = [LAYER_TYPES[slides] for slides in sliding]
    if not isinstance(kinds, list) or len(kinds) != count or any(kind not in LAYER_TYPES for kind in kinds):
        raise config.error("layer_types", f"must be {count} of {', '.join(LAYER_TYPES)}, not {kinds!r}")
    if LAYER_TYPES[1] in kinds and family.sliding is None:
        raise config.error(
            "layer_types", f"names {LAYER_TYPES[1]}, which is not supported for {config.get('model_type')}"
        )
    if missing := set(kinds) - set(rope.by_type):
        raise config.error("rope_parameters", f"says nothing of layers of type {', '.join(sorted(missing))}")
    layers = []
    for layer, kind in enumerate(kinds):
        window = config.integer("sliding_window") if kind == LAYER_TYPES[1] else max_model_len
        sparse = family.sparse is not None and family.sparse(config, layer)
        layers.append(LayerConfig(window if window < max_model_len else None, rope.by_type[kind], sparse))
    return tuple(layers)
