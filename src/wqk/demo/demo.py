"""Two small models that ship with the package: an encoder and a decoder with the same recipe."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np

from wqk.attention import read_attention
from wqk.checkpoints import open_checkpoint
from wqk.forms.images import matrix_image
from wqk.scanning.scan import scan

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from wqk.scanning.tables import ScoreTable

FOLDER = Path(__file__).parent / "models"
Name = Literal["encoder", "decoder"]
MODELS: tuple[Name, ...] = ("encoder", "decoder")

# What the paper says of each score, by which an encoder's is larger than a decoder's.
CLAIMS = {
    "symmetry": "bidirectional training makes W_qk symmetric",
    "directionality_excess": "autoregressive training makes columns dominate",
}


def demo_model(name: Name) -> Path:
    """Folder of a model that ships with the package: its query and key weights and configuration.

    Both were trained on the same text, with the same shape and recipe, one to fill in masked
    characters and one to predict the next (``examples/train_demo_pair.sh``).

    Examples
    --------
    >>> sorted(path.name for path in demo_model("decoder").iterdir())
    ['config.json', 'model.safetensors']
    """
    return FOLDER / name


def demo_table() -> ScoreTable:
    """Scores and details of the encoder and the decoder, in one table, under these names."""
    checkpoints = []
    for name in MODELS:
        checkpoint = open_checkpoint(FOLDER / name)
        checkpoint.name = name
        checkpoints.append(checkpoint)
    return scan(checkpoints, details=True)


def demo_introduction() -> str:
    """What the two models are, in a few sentences."""
    training, config = (
        json.loads((FOLDER / file).read_text(encoding="utf-8"))
        for file in ("training.json", "encoder/config.json")
    )
    encoder, decoder = (training[name]["held_out_loss"] for name in MODELS)
    return (
        f"Two models of one shape ({config['num_hidden_layers']} layers, width "
        f"{config['hidden_size']}, {config['num_attention_heads']} heads), trained from the same "
        f"start on the same {training['tokens'] / 1e6:.1f} million characters of Wikipedia. The "
        "encoder fills in masked characters from both sides, the decoder predicts the next one "
        f"from the left. Held-out loss {encoder:.2f} and {decoder:.2f} nats; letters by their "
        f"frequency alone cost {training['unigram_entropy']:.2f}."
    )


def demo_verdict(table: ScoreTable) -> str:
    """Which parts of the paper's contrast hold, layer by layer, and which do not."""
    layers = table.layers.frame
    encoder, decoder = (layers.filter(checkpoint=name).sort("layer") for name in MODELS)
    lines = []
    for score, claim in CLAIMS.items():
        pairs = zip(encoder["layer"], encoder[score], decoder[score], strict=True)
        against = [str(layer) for layer, one, other in pairs if not one > other]
        verdict = f"not in layer {', '.join(against)}" if against else "in every layer"
        label = score.replace("_excess", " (excess)")
        lines.append(
            f"The paper: {claim}. Here: {verdict}; median {label} encoder "
            f"{np.median(encoder[score]):.2f}, decoder {np.median(decoder[score]):.2f}."
        )
    return "\n".join(lines)


def demo_figure(table: ScoreTable) -> Figure:
    """Score curves of both models, and one layer's matrix of each (needs matplotlib)."""
    from wqk.figures import contrast

    # The layers in which each model shows its structure most.
    layers = table.layers.frame
    encoder = layers.filter(checkpoint="encoder").sort("symmetry")["layer"][-1]
    decoder = layers.filter(checkpoint="decoder").sort("directionality_excess")["layer"][0]
    chosen: dict[Name, int] = {"encoder": encoder, "decoder": decoder}
    matrices = {
        f"{name}, layer {layer}": matrix_image(read_attention(demo_model(name), layer).form)
        for name, layer in chosen.items()
    }
    return contrast(table, matrices)
