"""A check of `wqk lab glue` that uses nothing of wqk: the same fine-tuning by a plain Trainer.

``python examples/plain_glue.py path/to/model glue/cola --seeds 3`` prints the task's metric for
every seed, to be compared with ``wqk lab glue path/to/model --data glue --tasks cola --seeds 3``.
"""

import argparse
import json
import tempfile
from pathlib import Path

import torch
import transformers
from scipy.stats import pearsonr
from sklearn.metrics import accuracy_score, f1_score, matthews_corrcoef

METRICS = {"cola": matthews_corrcoef, "mrpc": f1_score, "stsb": lambda y, x: pearsonr(y, x)[0]}


def main() -> None:
    """Fine-tune once per seed, and print each metric."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("task", type=Path)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--epochs", type=int, default=3)
    options = parser.parse_args()
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    tokenizer = transformers.AutoTokenizer.from_pretrained(options.model)

    def rows(split: str) -> list[dict]:
        lines = (options.task / f"{split}.jsonl").read_text(encoding="utf-8").splitlines()
        encoded = []
        for row in map(json.loads, lines):
            texts = [row[name] for name in ("sentence", "sentence1", "sentence2") if name in row]
            encoded.append(dict(tokenizer(*texts, truncation=True, max_length=128)))
            encoded[-1]["label"] = row["label"]
        return encoded

    train, validation = rows("train"), rows("validation")
    labels = [row["label"] for row in validation]
    regression = isinstance(train[0]["label"], float)
    for seed in range(1, options.seeds + 1):
        transformers.set_seed(seed)
        model = transformers.AutoModelForSequenceClassification.from_pretrained(
            options.model, num_labels=1 if regression else len({row["label"] for row in train})
        )
        with tempfile.TemporaryDirectory() as folder:
            trainer = transformers.Trainer(
                model,
                transformers.TrainingArguments(
                    folder,
                    seed=seed,
                    num_train_epochs=options.epochs,
                    learning_rate=5e-5,
                    weight_decay=0.01,
                    warmup_steps=0.06,
                    per_device_train_batch_size=32,
                    save_strategy="no",
                    logging_strategy="no",
                    report_to=[],
                    disable_tqdm=True,
                ),
                data_collator=transformers.DataCollatorWithPadding(tokenizer),
                train_dataset=train,
            )
            trainer.train()
            logits = trainer.predict(validation).predictions
        predicted = logits[:, 0] if regression else logits.argmax(-1)
        metric = METRICS.get(options.task.name, accuracy_score)
        print(f"seed {seed}: {metric(labels, predicted):.4f}", flush=True)


if __name__ == "__main__":
    main()
