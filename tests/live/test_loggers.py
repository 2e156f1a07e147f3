"""Medians of a monitor reach loggers of experiments, which work without a network here."""

from __future__ import annotations

import csv
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import wqk

ROOT = Path(__file__).parents[2]
SYMMETRY = "wqk/symmetry_median"
CONFIG = transformers.GPT2Config(
    n_embd=16, n_layer=2, n_head=2, vocab_size=20, bos_token_id=0, eos_token_id=0
)

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]


@pytest.fixture
def medians_by_step() -> dict[int, dict[str, float]]:
    """Medians that a monitor returns before the first step, and after weights have changed."""
    model = transformers.GPT2LMHeadModel(CONFIG)
    monitor = wqk.Monitor(model, every=5)
    medians = {0: monitor(0)}
    with torch.no_grad():
        model.transformer.h[0].attn.c_attn.weight[0] += 1
    return medians | {5: monitor(5)}


def test_lightning_logs_medians_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The callback is that of the page on monitors."""
    lightning = pytest.importorskip("pytorch_lightning")
    monkeypatch.chdir(tmp_path)
    page = (ROOT / "docs" / "monitoring.md").read_text("utf-8")
    snippet = re.search(r"```python\n(class Symmetry.*?)```", page, re.DOTALL)
    assert snippet is not None
    defined: dict[str, Any] = {"lightning": lightning, "wqk": wqk}
    exec(snippet[1].replace("every=200", "every=2"), defined)

    class Decoder(lightning.LightningModule):  # type: ignore[name-defined, misc]
        def __init__(self) -> None:
            super().__init__()
            self.model = transformers.GPT2LMHeadModel(CONFIG)

        def training_step(self, batch: torch.Tensor, _: int) -> torch.Tensor:
            loss: torch.Tensor = self.model(input_ids=batch, labels=batch).loss
            self.log("loss", loss)
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), 1e-3)

    trainer = lightning.Trainer(
        max_steps=4,
        logger=lightning.loggers.CSVLogger(tmp_path),
        callbacks=[defined["Symmetry"]()],
        log_every_n_steps=1,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        accelerator="cpu",
    )
    trainer.fit(Decoder(), torch.utils.data.DataLoader(torch.randint(20, (8, 6)), batch_size=2))
    (file,) = tmp_path.rglob("metrics.csv")
    with file.open(encoding="utf-8", newline="") as lines:
        logged = [int(row["step"]) for row in csv.DictReader(lines) if row[SYMMETRY]]
    assert logged == [0, 2]
    table = wqk.read_table(tmp_path / "run" / "scores.jsonl")
    assert table.frame["step"].unique().sort().to_list() == [0, 2, 4]


def test_wandb_takes_medians(
    medians_by_step: dict[int, dict[str, float]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wandb = pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_SILENT", "true")
    wandb.init(mode="offline", dir=str(tmp_path), project="test")
    for step, medians in medians_by_step.items():
        wandb.log(medians, step=step)
    wandb.finish()
    (file,) = tmp_path.rglob("*.wandb")
    assert file.read_bytes().count(SYMMETRY.encode()) >= len(medians_by_step)


def test_mlflow_takes_medians(
    medians_by_step: dict[int, dict[str, float]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    mlflow.set_tracking_uri((tmp_path / "runs").as_uri())
    with mlflow.start_run() as run:
        for step, medians in medians_by_step.items():
            mlflow.log_metrics(medians, step=step)
    history = mlflow.MlflowClient().get_metric_history(run.info.run_id, SYMMETRY)
    expected = [(step, medians[SYMMETRY]) for step, medians in medians_by_step.items()]
    assert [(metric.step, metric.value) for metric in history] == expected


def test_trackio_takes_medians(
    medians_by_step: dict[int, dict[str, float]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path))
    trackio = pytest.importorskip("trackio")
    trackio.init(project="test", embed=False)
    for step, medians in medians_by_step.items():
        trackio.log(medians, step=step)
    trackio.finish()
    assert list(tmp_path.rglob("*.db"))
