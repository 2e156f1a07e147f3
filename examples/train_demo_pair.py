"""Train the two small models that `wqk demo` scores: an encoder and a decoder.

    python examples/train_demo_pair.py wikipedia.jsonl.xz --out demo

Both have the same four pre-norm layers, start from the same weights, and see the same blocks of
the same text, character by character. They differ in one thing: the encoder predicts masked
characters from both sides, the decoder each next character from its left. That is enough to make
the encoder's query-key forms symmetric and the decoder's directional.

Only what `wqk` reads is kept: the query and key weights and biases, in float16, under the names
that the full checkpoint would give them. `training.json` says how they came about.
"""

import argparse
import gzip
import json
import lzma
import platform
from collections import Counter
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from statistics import fmean, median
from typing import Any

import torch
import transformers
from torch import Generator, Tensor
from transformers import PreTrainedModel, RobertaPreLayerNormConfig

MODELS = {
    "encoder": transformers.RobertaPreLayerNormForMaskedLM,
    "decoder": transformers.RobertaPreLayerNormForCausalLM,
}
PADDING, MASK, UNKNOWN, FIRST_CHARACTER = range(4)
VOCABULARY = 128
LAYERS, WIDTH, HEADS = 4, 128, 4
INITIAL_STD = 0.06  # at the usual 0.02 the encoder is long in learning more than letter counts
BLOCK, BATCH = 32, 64  # short blocks: fewer positions to tell apart, a quicker start
MASKED_SHARE = 0.3
LEARNING_RATE = 2e-3
WEIGHT_DECAY = 1.0  # strong, to wear off the random start, whose forms have neither property
TRAINING_CHARACTERS = 8_000_000
HELD_OUT_DOCUMENTS, HELD_OUT_BLOCKS = 32, 1024


def read_documents(path: Path) -> Iterator[str]:
    """The `text` fields of a JSON Lines file: plain, .gz or .xz."""
    open_file: Any = {".gz": gzip.open, ".xz": lzma.open}.get(path.suffix, open)
    with open_file(path, "rt", encoding="utf-8") as lines:
        for line in lines:
            yield json.loads(line)["text"] + "\n\n"


def take(documents: Iterator[str], characters: int) -> str:
    """The next so many characters; what is left of the last document is dropped."""
    pieces, length = [], 0
    while length < characters and (document := next(documents, "")):
        pieces.append(document)
        length += len(document)
    return "".join(pieces)[:characters]


def encode(text: str, alphabet: str) -> Tensor:
    """Characters as tokens; those outside the alphabet become UNKNOWN."""
    numbers = {character: token for token, character in enumerate(alphabet, FIRST_CHARACTER)}
    return torch.tensor([numbers.get(character, UNKNOWN) for character in text])


def unigram_entropy(tokens: Tensor) -> float:
    """In nats: the loss of a model that knows how common each character is and nothing more."""
    shares = tokens.bincount().double() / len(tokens)
    return float(torch.special.entr(shares).sum())


def build_model(kind: str, seed: int) -> PreTrainedModel:
    """A new model; encoder and decoder of one seed start with equal weights."""
    torch.manual_seed(seed)
    config = RobertaPreLayerNormConfig(
        vocab_size=VOCABULARY,
        hidden_size=WIDTH,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        intermediate_size=4 * WIDTH,
        max_position_embeddings=PADDING + 1 + BLOCK,  # RoBERTa counts positions from padding + 1
        type_vocab_size=1,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        initializer_range=INITIAL_STD,
        pad_token_id=PADDING,
        bos_token_id=None,
        eos_token_id=None,
        is_decoder=kind == "decoder",
        use_cache=False,
    )
    return MODELS[kind](config)


def mask(blocks: Tensor, generator: Generator) -> tuple[Tensor, Tensor]:
    """Inputs with equally many characters masked in every block, and labels for just those."""
    chosen = torch.rand(blocks.shape, generator=generator).topk(round(MASKED_SHARE * BLOCK)).indices
    labels = torch.full_like(blocks, -100)  # transformers takes no loss at -100
    return blocks.scatter(1, chosen, MASK), labels.scatter(1, chosen, blocks.gather(1, chosen))


def loss_on(model: PreTrainedModel, blocks: Tensor, masking: Generator) -> Tensor:
    """Mean loss in nats per predicted character: each next one, or the masked ones."""
    inputs, labels = (blocks, blocks) if model.config.is_decoder else mask(blocks, masking)
    return model(input_ids=inputs, labels=labels).loss


def directionality(form: Tensor, *, excess: bool) -> float:
    """(R - C) / (R + C) over the rows and columns whose norm exceeds mean + 2 std; else 0."""
    totals = []
    for norms in (form.norm(dim=1), form.norm(dim=0)):
        threshold = norms.mean() + 2 * norms.std()
        outlying = norms[norms > threshold]
        totals.append((outlying - threshold if excess else outlying).sum().item())
    rows, columns = totals
    return (rows - columns) / (rows + columns) if rows + columns else 0.0


def score_layers(model: PreTrainedModel) -> list[dict[str, float]]:
    """Each layer's scores, densely in float64, of the weights as rounded for the file."""
    scores = []
    for layer in model.roberta_prelayernorm.encoder.layer:
        sides = layer.attention.self.query, layer.attention.self.key
        query, key = (side.weight.detach().half().double().T for side in sides)
        form = query @ key.T
        scores.append(
            {
                "symmetry": ((form * form.T).sum() / form.square().sum()).item(),
                "directionality": directionality(form, excess=False),
                "directionality_excess": directionality(form, excess=True),
            }
        )
    return scores


def train(
    model: PreTrainedModel, training: Tensor, held_out: Tensor, steps: int, seed: int
) -> dict[str, Any]:
    """Train in place and say now and then how it goes; the last such report."""
    matrices = [parameter for parameter in model.parameters() if parameter.ndim > 1]
    vectors = [parameter for parameter in model.parameters() if parameter.ndim == 1]
    groups = [{"params": matrices, "weight_decay": WEIGHT_DECAY}, {"params": vectors}]
    optimizer = torch.optim.AdamW(groups, lr=LEARNING_RATE, weight_decay=0.0)
    schedule = transformers.get_linear_schedule_with_warmup(optimizer, steps // 20, steps)
    # Two generators: masking must not change which blocks the encoder sees next.
    drawing, masking = Generator().manual_seed(seed), Generator().manual_seed(seed)
    report, losses = {}, []
    for step in range(1, steps + 1):
        starts = torch.randint(len(training) - BLOCK + 1, (BATCH, 1), generator=drawing)
        loss = loss_on(model, training[starts + torch.arange(BLOCK)], masking)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
        if step % 200 == 0 or step == steps:
            with torch.no_grad():
                held_out_loss = loss_on(model, held_out, Generator().manual_seed(0)).item()
            report = {
                "training_loss": fmean(losses),  # since the last report
                "held_out_loss": held_out_loss,
                "layers": score_layers(model),
            }
            print_progress(step, report)
            losses.clear()
    return report


def print_progress(step: int, report: dict[str, Any]) -> None:
    """One line: losses, and the medians of the scores over the layers."""
    medians = (
        f"{score} {median(layer[score] for layer in report['layers']):+.2f}"
        for score in ("symmetry", "directionality", "directionality_excess")
    )
    losses = f"loss {report['training_loss']:.3f}, held out {report['held_out_loss']:.3f}"
    print(f"step {step}: {losses}; medians: {', '.join(medians)}", flush=True)


def save_queries_and_keys(model: PreTrainedModel, folder: Path) -> None:
    """A checkpoint as `save_pretrained` writes it, less the tensors that are not scored."""
    kept = (".self.query.", ".self.key.")
    tensors = model.half().state_dict().items()
    scored = {name: tensor for name, tensor in tensors if any(part in name for part in kept)}
    model.save_pretrained(folder, state_dict=scored)
    (folder / "generation_config.json").unlink(missing_ok=True)


def main() -> None:
    """Train both models on the same text and record how."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("text", type=Path, help="JSON Lines with a `text` field: plain, .gz, .xz")
    parser.add_argument("--out", type=Path, required=True, help="folder for the two models")
    parser.add_argument("--steps", type=int, default=4000, help="for each model (%(default)s)")
    parser.add_argument("--seed", type=int, default=1, help="weights, blocks, masks (%(default)s)")
    arguments = parser.parse_args()
    torch.set_num_threads(1)  # sums keep their order, and so small a model gains little from more

    documents = read_documents(arguments.text)
    held_out_text = "".join(islice(documents, HELD_OUT_DOCUMENTS))
    training_text = take(documents, TRAINING_CHARACTERS)
    counts = Counter(training_text).most_common(VOCABULARY - FIRST_CHARACTER)
    alphabet = "".join(character for character, _ in counts)
    training = encode(training_text, alphabet)
    spacing = len(held_out_text) // HELD_OUT_BLOCKS  # blocks from all over these documents
    held_out = encode(held_out_text, alphabet).unfold(0, BLOCK, spacing)

    record = {
        "steps": arguments.steps,
        "tokens": arguments.steps * BATCH * BLOCK,
        "seed": arguments.seed,
        "text": f"{arguments.text.name} by character: the first {HELD_OUT_DOCUMENTS} documents "
        f"held out, the next {len(training_text):,} characters to train on",
        "unigram_entropy": unigram_entropy(training),
    }
    print(json.dumps(record, indent=2))
    for kind in MODELS:
        print(f"\n{kind}")
        model = build_model(kind, arguments.seed)
        record[kind] = train(model, training, held_out, arguments.steps, arguments.seed)
        save_queries_and_keys(model, arguments.out / kind)
    record["versions"] = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }
    (arguments.out / "training.json").write_text(json.dumps(record, indent=2) + "\n")


if __name__ == "__main__":
    main()
