"""How a run is called: by what varies."""

from jsonargparse import Namespace

from dflash_lightning.drafter.axes import Axes
from dflash_lightning.position_weights import default_gamma


def run_name(config: Namespace) -> str:
    """Return a run's name, as in `d5-k16-g7-t5-s0`: depth, block size, gamma, taps and seed.

    Before the seed comes what isn't the default of the other axes; position
    weights other than by gamma are named by their class, as in `gdpace`.
    """
    model = config.model
    taps = model.target.target_layer_ids
    parts = [
        f"d{model.num_layers}",
        f"k{model.block_size}",
        f"g{_weights_name(model.position_weights, model.block_size)}",
        f"t{model.target.num_taps if taps is None else len(taps)}",
    ]
    for chosen, default in ((model.loss, "DataToken"), (config.data.anchors, "RandomAnchors")):
        if _class_name(chosen) != default:
            parts.append(_class_name(chosen).lower())
    axes = Axes(**dict(model.axes.items())).short_name.removeprefix("-")
    parts += [axes] if axes else []
    if (layers := model.init_from_layers) is not None:
        parts.append("init" + (layers if layers == "last" else ".".join(map(str, layers))))
    return "-".join([*parts, f"s{int(config.seed_everything)}"])


def _weights_name(weights: Namespace, block_size: int) -> str:
    name = _class_name(weights)
    if name != "ExpWeights":
        return name.removesuffix("Weights").lower()
    gamma = weights.init_args.gamma
    return f"{default_gamma(block_size) if gamma == 'auto' else gamma:g}"


def _class_name(chosen: Namespace) -> str:
    return str(chosen.class_path).rpartition(".")[2]
