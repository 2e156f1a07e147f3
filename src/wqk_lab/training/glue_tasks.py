"""Tasks on sentences and pairs of sentences: files, metrics and baselines.

A task is a folder with ``train.jsonl`` and ``validation.jsonl``, rows with ``sentence`` or
``sentence1`` and ``sentence2``, and ``label``: a class as a number from 0 or as a name, or a number
to predict.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from wqk._files import read_text
from wqk.errors import CorpusError, required_by

# GLUE's own metrics; other tasks have accuracy, or, if labels are numbers, both correlations.
METRICS: Mapping[str, tuple[str, ...]] = {
    "cola": ("matthews",),
    "mrpc": ("f1", "accuracy"),
    "stsb": ("pearson", "spearman"),
}


@dataclass(frozen=True)
class TaskSplit:
    """Texts, one or two for each row, and labels."""

    texts: Sequence[tuple[str, ...]]
    labels: Sequence[float]


@dataclass(frozen=True)
class SentenceTask:
    """A task with its data."""

    name: str  #: Name of the folder, or of the file without the ending.
    train: TaskSplit
    validation: TaskSplit
    classes: int | None  #: None if the labels are numbers to be predicted.
    shared: int = 0  #: How many training rows were left out because validation has their texts.

    @property
    def metrics(self) -> tuple[str, ...]:
        """Names of the metrics; a table with one number shows the first metric."""
        default = ("pearson", "spearman") if self.classes is None else ("accuracy",)
        return METRICS.get(self.name, default)


def read_task(path: Path) -> SentenceTask:
    """Read a folder with two splits, or one file with every fifth row held out.

    Raises
    ------
    CorpusError
        A file is missing, or a row lacks a field.

    Examples
    --------
    >>> import json
    >>> from pathlib import Path
    >>> from tempfile import mkdtemp
    >>> file = Path(mkdtemp(), "mood.jsonl")
    >>> rows = [{"sentence": f"{n} is {'good' if n % 2 else 'bad'}", "label": n % 2}
    ...         for n in range(10)]
    >>> _ = file.write_text("".join(json.dumps(row) + chr(10) for row in rows))
    >>> task = read_task(file)
    >>> task.name, task.classes, len(task.train.labels), len(task.validation.labels)
    ('mood', 2, 8, 2)
    """
    if path.is_dir():
        rows = [_rows(path / f"{split}.jsonl") for split in ("train", "validation")]
    else:
        all_rows = _rows(path)
        held_out = all_rows[4::5]
        rows = [[row for number, row in enumerate(all_rows) if number % 5 != 4], held_out]
    if not all(rows):
        raise CorpusError(f"{path}: a task needs training rows and validation rows; got too few")
    task_name = path.name.removesuffix(".jsonl")
    labels, classes = _classes([label for _, label in itertools.chain.from_iterable(rows)], path)
    count = len(rows[0])
    train = TaskSplit([texts for texts, _ in rows[0]], labels[:count])
    validation = TaskSplit([texts for texts, _ in rows[1]], labels[count:])
    if len({len(texts) for texts in (*train.texts, *validation.texts)}) > 1:
        raise CorpusError(f"{path}: all rows must have one text, or all two; got both")
    validation_texts = {*validation.texts}
    new = [k for k, texts in enumerate(train.texts) if texts not in validation_texts]
    train = TaskSplit([train.texts[k] for k in new], [train.labels[k] for k in new])
    if len(set(train.labels)) < 2:
        raise CorpusError(
            f"{path}: a task needs at least two classes, or different numbers, in the training "
            f"rows that validation does not have; got {set(train.labels) or 'no row'}"
        )
    shared = len(rows[0]) - len(new)
    return SentenceTask(task_name, train, validation, classes, shared)


def _classes(labels: Sequence[float | str], path: Path) -> tuple[list[float], int | None]:
    """Return labels as numbers, and the number of classes; None for numbers to predict."""
    if any(isinstance(label, str) for label in labels):
        if not all(isinstance(label, str) for label in labels):
            raise CorpusError(f"{path}: labels must all be names, or all numbers; got both")
        names = tuple(sorted({str(label) for label in labels}))
        return [names.index(str(label)) for label in labels], len(names)
    numbers = [float(label) for label in labels]
    if any(number % 1 for number in numbers):
        return numbers, None
    class_numbers = sorted({int(number) for number in numbers})
    if len(class_numbers) > 1 and class_numbers != [*range(len(class_numbers))]:
        raise CorpusError(
            f"{path}: the classes are numbered from 0 without gaps; got the labels "
            f"{', '.join(map(str, class_numbers[:6]))}: number them so, name them, or, if they are "
            "quantities to predict, scale them so that some have a fraction"
        )
    return [int(number) for number in numbers], max(len(class_numbers), 2)


def _rows(path: Path) -> list[tuple[tuple[str, ...], float | str]]:
    rows = []
    text = read_text(path, CorpusError, "; expected a task's rows as JSON Lines")
    for number, line in enumerate(text.splitlines(), start=1):
        try:
            row = json.loads(line)
            names = ("sentence",) if "sentence" in row else ("sentence1", "sentence2")
            texts, label = tuple(row[name] for name in names), row["label"]
            good = all(isinstance(text, str) for text in texts)
            good &= isinstance(label, str) or math.isfinite(label)
        except (ValueError, TypeError, KeyError, RecursionError):
            good = False
        if not good:
            raise CorpusError(
                f"{path}: line {number}: expected sentence, or sentence1 and sentence2, and a "
                "label that is a number or a name"
            )
        rows.append((texts, label))
    return rows


def judge(task: SentenceTask, predictions: Sequence[float]) -> dict[str, float]:
    """Return the task's metrics, from −1 or 0 to 1.

    A correlation with constant predictions is 0.

    Examples
    --------
    >>> split = TaskSplit([("a",), ("b",), ("c",)], [0, 1, 1])
    >>> judge(SentenceTask("mrpc", split, split, 2), [0, 1, 0])
    {'f1': 0.6666666666666666, 'accuracy': 0.6666666666666666}
    """
    with required_by("scoring tasks"):
        from scipy import stats  # type: ignore[import-untyped]
        from sklearn import metrics  # type: ignore[import-untyped]
    labels = task.validation.labels
    metric_functions = {
        "accuracy": metrics.accuracy_score,
        "f1": lambda expected, predicted: metrics.f1_score(expected, predicted, zero_division=0),
        "matthews": metrics.matthews_corrcoef,
        "pearson": lambda expected, predicted: stats.pearsonr(expected, predicted).statistic,
        "spearman": lambda expected, predicted: stats.spearmanr(expected, predicted).statistic,
    }
    constant = len(set(predictions)) == 1
    scores = {}
    for name in task.metrics:
        undefined = constant and name in ("pearson", "spearman")
        scores[name] = 0.0 if undefined else float(metric_functions[name](labels, predictions))
    return scores


def baselines(task: SentenceTask) -> dict[str, dict[str, float]]:
    """Return the metrics of baselines without a language model.

    ``majority``: the most frequent class, or the mean. ``bag of words``: logistic (or ridge)
    regression on the occurring words and pairs of words; for two sentences, also on the common
    words and the words in only one sentence.

    Raises
    ------
    MissingPackage
        scikit-learn is not installed.
    """
    with required_by("scoring tasks"):
        from sklearn import linear_model
        from sklearn.feature_extraction import text  # type: ignore[import-untyped]
    count = len(task.validation.labels)
    if task.classes is None:
        constant, model = sum(task.train.labels) / len(task.train.labels), linear_model.Ridge()
    else:
        constant = max(sorted(set(task.train.labels)), key=list(task.train.labels).count)
        model = linear_model.LogisticRegression(max_iter=1000)
    vectorizer = text.CountVectorizer(analyzer=_features, binary=True, min_df=2)
    try:
        seen = vectorizer.fit_transform(task.train.texts)
    except ValueError:  # nothing occurs twice
        vectorizer.min_df = 1
        seen = vectorizer.fit_transform(task.train.texts)
    model.fit(seen, task.train.labels)
    predicted = model.predict(vectorizer.transform(task.validation.texts))
    return {
        "majority": judge(task, [constant] * count),
        "bag of words": judge(task, predicted.tolist()),
    }


def _features(texts: tuple[str, ...]) -> list[str]:
    """Return words and pairs of words; for two texts, also the common words."""
    features: list[str] = []
    bags = [text.lower().split() for text in texts]
    for number, bag in enumerate(bags):
        pairs = (" ".join(pair) for pair in itertools.pairwise(bag))
        features += [f"{number}:{feature}" for feature in (*bag, *pairs)]
    if len(bags) == 2:
        first, second = map(set, bags)
        features += [f"both:{word}" for word in first & second]
        features += [f"one:{word}" for word in first ^ second]
        shared = round(10 * len(first & second) / max(len(first | second), 1))
        features += [f"share:{tenth}" for tenth in range(shared)]
    return features
