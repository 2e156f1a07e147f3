"""The sources of figures: score tables, surveys, training runs and details, by their paths."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from os import PathLike
from pathlib import Path

from wqk.errors import TableError
from wqk.scanning.scan import scan
from wqk.scanning.surveys.surveying import survey_table
from wqk.scanning.surveys.watch import WATCHED
from wqk.tables.details import BlockDetails, read_details
from wqk.tables.run import SCORES, SETTINGS, Run, open_run
from wqk.tables.score_table import ScoreTable, join, read_table
from wqk.tables.writers import READERS, WRITERS
from wqk_lab.figures.followed import followed_runs, scan_steps
from wqk_lab.runs.pairs import DESIGN, PairSurvey, read_pairs

# The file of a survey's folder.
MANIFEST = "manifest.jsonl"


@dataclass(frozen=True)
class Sources:
    """All sources of a figure.

    Attributes
    ----------
    runs
        Training runs, finished or not.
    table
        The scores of all tables and surveys, if any.
    blocks
        The layers of all ``.npz`` files of details.
    published
        Whether the paper's training runs are drawn below the given runs.
    level
        Training loss in nats; the figure ``dose`` shows the steps at which runs fall below this
        loss.
    pairs
        The last survey of pairs among the sources.
    parameters
        Numbers of parameters of the user's models in ``fig2``, ``s1`` and ``s2``, which replace the
        numbers in the table: by the name of the checkpoint or the last part of the name.
    """

    runs: tuple[Run, ...] = ()
    table: ScoreTable | None = None
    blocks: tuple[BlockDetails, ...] = ()
    published: bool = False
    level: float | None = None
    pairs: PairSurvey | None = None
    parameters: Mapping[str, int] = field(default_factory=dict)

    @property
    def runs_with_steps(self) -> tuple[Run, ...]:
        """The runs, and the models that have several steps in the table."""
        followed = followed_runs(self.table) if self.table is not None else []
        return (*self.runs, *followed)

    @property
    def scores(self) -> ScoreTable | None:
        """The scores of the table and of all runs, if any."""
        tables = [self.table] if self.table is not None else []
        tables += [run.scores for run in self.runs]
        return join(tables) if tables else None


def read_sources(*paths: str | PathLike[str], models: bool = False) -> Sources:
    """Open the sources at some paths.

    A path is the folder of a training run, of a monitor or of a callback, a folder of such folders,
    a folder of ``checkpoint-*`` (with the table of `wqk.watch`, or else scanned now), the folder of
    a survey, a score table (``.parquet``, ``.jsonl``, ``.csv``) or the details of a
    scan (``.npz``).

    With ``models``, a path may also be a checkpoint: a folder, a file of weights, ``demo:NAME`` or
    a Hub id. The layers of the checkpoint are scored.

    Raises
    ------
    WqkError
        A path contains none of these, or cannot be read.

    Examples
    --------
    >>> import tempfile, wqk
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     wqk.scan(wqk.demo_model("encoder")).write(folder + "/scores.parquet")
    ...     sources = read_sources(folder + "/scores.parquet")
    >>> len(sources.runs), len(sources.table)
    (0, 20)
    """
    runs: list[Run] = []
    tables: list[ScoreTable] = []
    blocks: list[BlockDetails] = []
    pairs: PairSurvey | None = None
    for path in map(Path, paths):
        if folders := _folders_with(SETTINGS, path):
            runs += map(open_run, folders)
        elif folders := _folders_with(SCORES, path):
            for folder in folders:
                runs += followed_runs(Run(folder, {}).scores, folder)
        elif _is_watched(path):
            tables.append(_survey(path / WATCHED))
        elif path.is_dir() and (scanned := scan_steps(path)):
            tables.append(scanned)
        elif models and _is_checkpoint(path):
            tables.append(scan(str(path), heads=False))
        elif path.is_dir():
            tables.append(_survey(path))
            pairs = read_pairs(path) if (path / DESIGN).is_file() else pairs
        elif path.suffix == ".npz":
            blocks += read_details(path).blocks
        elif not path.exists():
            raise TableError(f"{path}: no such file or folder", path=path)
        else:
            tables.append(read_table(path))
    table = join(tables) if tables else None
    return Sources(tuple(runs), table, tuple(blocks), pairs=pairs)


# Files of a folder that make it a checkpoint, whether or not it can be read.
CHECKPOINT_FILES = ("config.json", "*.safetensors", "*.gguf", "pytorch_model*.bin")


def _is_checkpoint(path: Path) -> bool:
    """Return whether a source is a checkpoint: a folder, a file of weights, or a name."""
    if path.is_dir():
        is_survey = (path / MANIFEST).is_file()
        return not is_survey and any(any(path.glob(name)) for name in CHECKPOINT_FILES)
    return path.suffix not in (*READERS, *WRITERS, ".npz")


def _folders_with(file_name: str, path: Path) -> list[Path]:
    """Return a folder with a file of this name, or else its subfolders with such a file."""
    if (path / file_name).is_file():
        return [path]
    return sorted(file.parent for file in path.glob(f"*/{file_name}"))


def _is_watched(folder: Path) -> bool:
    """Return whether `wqk.watch` has written its table into a run's folder."""
    return (folder / WATCHED / MANIFEST).is_file()


def _survey(folder: Path) -> ScoreTable:
    try:
        return survey_table(folder)
    except TableError:
        raise TableError(
            f"{folder}: contains no training run and no survey; expected a folder of checkpoint-*, "
            "one that wqk lab train, wqk survey, wqk watch, or a monitor has written, or a table: "
            "wqk scan REF --out FILE"
        ) from None
