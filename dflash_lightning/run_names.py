"""How a run is called: by what varies."""

from typing import Any

from jsonargparse import Namespace

from dflash_lightning.drafter.axes import Axes
from dflash_lightning.position_weights import default_gamma


def run_name(config: Namespace) -> str:
    """Return a run's name, as in `d5-k16-g7-t5-s0`: depth, block size, gamma, taps and seed.

    Before the seed comes what isn't the default of the other axes, as in `a20` (20 anchors a
    sample) or `v1536` (draft vocabulary). Position weights other than by gamma, losses and anchor
    rules are named by class and values, as in `gdpace0.5`.
    """
    model, anchors = config.model, config.data.anchors
    taps = model.target.target_layer_ids
    named = [
        f"d{model.num_layers}",
        f"k{model.block_size}",
        f"g{_weights_name(model.position_weights, model.block_size)}",
        f"t{model.target.num_taps if taps is None else '.'.join(map(str, taps))}",
    ]
    if _class_name(model.loss) != "DataToken":
        named.append(_words(model.loss))
    if _class_name(anchors) != "RandomAnchors":
        named.append(_words(anchors))
    elif anchors.init_args.num_anchors != 512:
        named.append(f"a{anchors.init_args.num_anchors}")
    if axes := Axes(**dict(model.axes.items())).short_name.removeprefix("-"):
        named.append(axes)
    if model.draft_vocab is not None:
        named.append(f"v{model.draft_vocab}")
    if (layers := model.init_from_layers) is not None:
        named.append("init" + (layers if layers == "last" else ".".join(map(str, layers))))
    return "-".join([*named, f"s{int(config.seed_everything)}"])


def _weights_name(weights: Namespace, block_size: int) -> str:
    if _class_name(weights) != "ExpWeights":
        return _words(weights).replace("weights", "")
    gamma = weights.init_args.gamma
    return f"{default_gamma(block_size) if gamma == 'auto' else gamma:g}"


def _class_name(chosen: Namespace) -> str:
    return str(chosen.class_path).rpartition(".")[2]


def _words(chosen: Any) -> str:
    """Return a class's name and the values it is given, nested classes included."""
    if isinstance(chosen, Namespace):
        chosen = chosen.as_dict()
    if isinstance(chosen, dict):
        name = str(chosen.get("class_path", "")).rpartition(".")[2].lower()
        given = chosen.get("init_args", {}) if name else chosen
        plain = any(not isinstance(v, dict) for v in given.values())
        between = "" if plain and not name else "."  # a term of a mix: its loss and its weight
        return name + between.join(words for v in given.values() if (words := _words(v)))
    return f"{chosen:g}" if isinstance(chosen, int | float) else str(chosen or "").lower()
