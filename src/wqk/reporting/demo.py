"""Small models in the package: an encoder and a decoder of one recipe, and an induction model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple, get_args

import numpy as np

from wqk._style import SCORE_LABELS, new_figure, style
from wqk.errors import DEMO_MODELS, CheckpointError, called_as
from wqk.forms.images import matrix_image
from wqk.model import open as open_model
from wqk.scanning.scan import scan
from wqk.tables.rendering import label, layer_curves
from wqk.tables.score_table import ScoreTable

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Name = Literal["encoder", "decoder", "induction"]
COMPARED_MODELS: tuple[Name, ...] = (
    "encoder",
    "decoder",
)  # the pair of the demonstration


class Claim(NamedTuple):
    """A claim of the paper, and its prediction for an encoder and a decoder.

    In both predictions, the encoder has the larger score. The sentence begins with the subject of
    the claim.
    """

    sentence: str
    prediction: str


CLAIMS = {
    "symmetry": Claim("bidirectional training makes W_qk symmetric", "the encoder's {} is larger"),
    "directionality_excess": Claim(
        "autoregressive training makes columns dominate, which a negative directionality shows",
        "the decoder's {} is lower",
    ),
}

# Two models of one seed test nothing; random forms of their width have scores within these limits.
CHANCE = {"symmetry": 0.02, "directionality_excess": 0.8}


@called_as('wqk.demo_model("encoder"), "decoder" or "induction"')
def demo_model(name: Name) -> Path:
    """Return the folder of a small model in the package.

    The folders of the encoder and the decoder contain the query and key weights and the
    configuration. Both models have one shape and were trained on one text with one recipe; the
    encoder fills in masked characters, and the decoder predicts the next character
    (``examples/train_demo_pair.sh``). The third model, ``induction``, is complete: two layers of
    attention that continue repeated random tokens (``examples/train_induction.py``). Its folder
    contains the history of its training, ``training.csv``.

    Examples
    --------
    >>> sorted(path.name for path in demo_model("decoder").iterdir())
    ['config.json', 'model.safetensors']
    """
    if name not in get_args(Name):
        raise CheckpointError(f"a demo model is one of {', '.join(get_args(Name))}, got {name!r}")
    return DEMO_MODELS / name


def demo_table() -> ScoreTable:
    """Return scores and details of both models in one table, under the names of the models."""
    models = [open_model(DEMO_MODELS / name) for name in COMPARED_MODELS]
    for model, name in zip(models, COMPARED_MODELS, strict=True):
        model.checkpoint.name = name
    return scan(models, details=True)


def demo_introduction() -> str:
    """Describe the two models and their training."""
    training = json.loads((DEMO_MODELS / "training.json").read_text(encoding="utf-8"))
    config = json.loads((DEMO_MODELS / "encoder/config.json").read_text(encoding="utf-8"))
    encoder, decoder = (training[name]["held_out_loss"] for name in COMPARED_MODELS)
    return (
        f"Two models of one shape ({config['num_hidden_layers']} layers, width "
        f"{config['hidden_size']}, {config['num_attention_heads']} heads), trained from the same "
        f"start on the same {training['tokens'] / 1e6:.1f} million characters of Wikipedia. The "
        "encoder fills in masked characters from both sides, the decoder predicts the next one "
        f"from the left. Held-out losses are {encoder:.2f} and {decoder:.2f} nats; from "
        f"the frequencies of characters alone, {training['unigram_entropy']:.2f}."
    )


def demo_verdict(table: ScoreTable) -> str:
    """Compare the models with the paper's claims and with chance, layer by layer."""
    layers = table.layers.frame
    encoder, decoder = (layers.filter(checkpoint=name).sort("layer") for name in COMPARED_MODELS)
    lines = []
    for score, claim in CLAIMS.items():
        pairs = zip(encoder["layer"], encoder[score], decoder[score], strict=True)
        exceptions = []
        for layer, encoder_score, decoder_score in pairs:
            if not encoder_score > decoder_score:
                exceptions.append(str(layer))
        layers_above = "in every layer"
        if exceptions:
            layers_above = f"in all layers but {', '.join(exceptions)}"
        lines.append(
            f"The paper: {claim.sentence}. In these two models "
            f"{claim.prediction.format(label(score))} {layers_above}; medians: encoder "
            f"{np.median(encoder[score]):.2f}, decoder {np.median(decoder[score]):.2f}. A layer's "
            f"chance at this width: ±{CHANCE[score]:g}."
        )
    return "\n".join(lines)


@style()
def demo_figure(table: ScoreTable, *, narrow: bool = False) -> Figure:
    """Draw the scores of both models, and one layer's matrix of each (needs matplotlib).

    A narrow figure, for phones, has the matrices below the scores.
    """
    from wqk.forms.images import draw_with_norms

    # For each model, the layer with the clearest structure.
    layers = table.layers.frame
    chosen: dict[Name, int] = {
        "encoder": layers.filter(checkpoint="encoder").sort("symmetry")["layer"][-1],
        "decoder": layers.filter(checkpoint="decoder").sort("directionality_excess")["layer"][0],
    }
    if narrow:
        figure = new_figure(4.4, 4.6)
        grid = figure.add_gridspec(2, 2, height_ratios=[1.0, 1.1])
    else:
        figure = new_figure(9.4, 2.6)
        grid = figure.add_gridspec(1, 4, width_ratios=[1.0, 1.0, 1.15, 1.15])
    for column, (score, title) in enumerate(SCORE_LABELS.items()):
        axis = figure.add_subplot(grid[column])
        layer_curves(axis, table, score, title)
        if column == 0:
            axis.legend(loc="lower left")
    for column, (name, layer) in enumerate(chosen.items(), start=2):
        panel = grid[column].subgridspec(
            2, 2, width_ratios=[5, 1], height_ratios=[1, 5], wspace=0.02, hspace=0.02
        )
        image = matrix_image(open_model(demo_model(name))[layer].form)
        drawn, columns, rows = draw_with_norms(figure, panel, image)
        columns.set_title(f"{name}, layer {layer}")
        drawn.axes.set(xlabel="key side", ylabel="query side", xticks=[], yticks=[])
        for margin in (columns, rows):
            margin.set_axis_off()
    return figure
