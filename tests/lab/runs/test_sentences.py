"""Numbers in sentences of the results, recomputed from the records.

The tables of the pages are compared elsewhere. Here each function yields what a page has to say,
with numbers from the records; a record that changes makes the sentence stale, and fails.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from statistics import fmean, median, stdev

import polars as pl
import pytest
from scipy import stats

from wqk_lab.runs.contrasts import differences, read_definition, read_records, results

RESULTS = Path(__file__).parents[3] / "docs" / "results"
COUNTS = ("none", "one", "two", "three", "four", "five")


def short(value: float, digits: int) -> str:
    """Return a number as the pages print it: a true minus, and no zero before the point."""
    return f"{value:.{digits}f}".replace("0.", ".", 1).replace("-", "−")


@cache
def effect(folder: str, name: str) -> float:
    """Return the mean of a contrast."""
    return results(RESULTS / folder)[name].value


def share(folder: str, name: str) -> str:
    """Return the interval of a contrast that allows for all contrasts, with two digits."""
    result = results(RESULTS / folder)[name]
    return f"{short(result.value, 2)} [{', '.join(short(end, 2) for end in result.allowed)}]"


@cache
def starts() -> dict[str, dict[int, dict[str, float]]]:
    """Return loss and end of the plateau at step 1,000, by start and seed."""
    runs = pl.read_csv(RESULTS / "table1-cpu" / "runs.csv").filter(step=1000)
    by_start: dict[str, dict[int, dict[str, float]]] = {}
    for row in runs.iter_rows(named=True):
        start = row["run"].rpartition("-")[0]
        values = {"loss": row["held_out_loss"], "end": row["first_below_3"]}
        by_start.setdefault(start, {})[row["seed"]] = values
    return by_start


def is_between(value: float, *ends: float) -> bool:
    """Return whether a value lies between two ends."""
    return min(ends) < value < max(ends)


def symmetric_starts() -> Iterator[str]:
    """Yield sentences of table-1.md on starts."""
    random, symmetric = starts()["random"], starts()["symmetric-heads-1"]
    sooner = [f"{random[seed]['end'] - symmetric[seed]['end']:.0f}" for seed in random]
    yield f"by {', '.join(sooner[:-1])} and {sooner[-1]} steps)"
    lower = [random[seed]["loss"] - symmetric[seed]["loss"] for seed in random]
    gains = sorted(gain for gain in lower if gain > 0)
    yield (
        f"{COUNTS[len(gains)]} of the five seeds are lower, by {short(gains[0], 3)} to "
        f"{short(gains[-1], 3)} nats, and {COUNTS[5 - len(gains)]} higher"
    )
    later = effect("", "negated-heads-plateau")
    yield f"leaves the plateau {later:.0f} steps later than random"
    at_norms = [-effect("", f"symmetric-heads-{norm}-plateau") for norm in ("2", "3", "6.5")]
    yield "the difference is {:.0f}, {:.0f} and {:.0f} steps".format(*at_norms)
    ends = [run["end"] for run in random.values()]
    yield f"Random falls below 3.0 nats at step {min(ends):.0f} to {max(ends):.0f}"
    of_norm, of_all = effect("", "norm-6.5"), effect("", "published")
    yield f"gains {short(-of_norm, 3)} nats where the published start gains {short(-of_all, 3)}"
    assert 0.55 < of_norm / of_all < 0.65
    yield "(`norm-6.5`, `published`): three fifths"
    of_keys, of_scale = effect("", "queries-keys"), effect("", "scale")
    assert 0.85 < of_scale / of_all < 0.95
    yield "keep about nine tenths of the gain (`scale`, `published`)"
    yield f"alone keep {short(-of_keys, 3)} of these {short(-of_scale, 3)} nats"


def spreads() -> Iterator[str]:
    """Yield the sentence of table-1.md on the spread of one contrast among others."""
    records = read_records(RESULTS)
    deviations = {}
    for contrast in read_definition(RESULTS)[0]:
        values = differences(contrast, records)
        if contrast.measure == "loss at step 1000" and len(values) == 5:
            deviations[contrast.name] = stdev(values)
    lucky = deviations.pop("symmetry-at-scale")
    yield (
        f"a standard deviation of only {short(lucky, 4)} nats, where the median of the contrasts "
        f"of five seeds is {short(median(deviations.values()), 3)}"
    )


def symmetry_at_the_end() -> Iterator[str]:
    """Yield sentences of table-1.md on the symmetry that starts end with."""
    layers = pl.read_csv(RESULTS / "table1-cpu" / "scores.csv")
    over_layers = layers.group_by("start", "seed", "step").agg(pl.median("symmetry"))
    over_seeds = over_layers.group_by("start", "step").agg(pl.mean("symmetry"))
    ends = dict(over_seeds.filter(step=1000).select("start", "symmetry").iter_rows())
    yield f"random ends with a median over layers of {short(ends['random'], 2)}"
    yield f"W_k = W_q with {short(ends['symmetric'], 2)}"
    yield f"`published` goes down from 1.00 to {short(ends['published'], 2)}"
    yield f"of the large scale end lowest, at {short(ends['published-independent'], 2)}"
    random, published = (starts()[start] for start in ("random", "published"))
    assert sorted(random) == sorted(published)


def signs_of_starts() -> Iterator[str]:
    """Yield the sentence of table-1.md on starts with both signs."""
    symmetric, indefinite, negated = (
        starts()[start] for start in ("symmetric", "indefinite", "negated")
    )
    counts = {}
    for quantity in ("end", "loss"):
        counts[quantity] = sum(
            is_between(
                indefinite[seed][quantity], symmetric[seed][quantity], negated[seed][quantity]
            )
            for seed in indefinite
        )
    assert counts["end"] == len(indefinite)
    yield (
        "`indefinite` ends its plateau between the two in every seed, and its loss lies between "
        f"them in {COUNTS[counts['loss']]} of five"
    )


def first_below(losses: pl.DataFrame, level: float) -> int:
    """Return the first step at which the mean of ten logged losses lies below a level."""
    means = losses.sort("step").with_columns(pl.col("loss").rolling_mean(10))
    return int(means.filter(pl.col("loss") < level)["step"].min())


def plateau_of_reviews() -> Iterator[str]:
    """Yield the sentence of table-1.md on the plateau of another text."""
    losses = pl.read_csv(RESULTS / "table1-cpu" / "losses.csv").drop_nulls("loss")
    runs = losses.filter(start="reviews-random").partition_by("seed")
    steps = [first_below(run, 2.9) for run in runs]
    yield f"Random leaves their plateau (below 2.9 nats) at step {min(steps)} to {max(steps)}"


def pre_norm_runs() -> Iterator[str]:
    """Yield sentences of table-1.md on pre-norm runs and on the pair of `make train`."""
    runs = pl.read_csv(RESULTS / "prenorm" / "runs.csv")
    cells = {"random": "wikipedia-encoder"} | {
        f"`{start}`": f"wikipedia-encoder-{start}"
        for start in ("symmetric", "indefinite", "paired")
    }
    for start, cell in cells.items():
        losses = runs.filter(pl.col("run").str.contains(rf"^{cell}-\d$"))["held_out_loss"]
        yield f"{start} {losses.mean():.3f} ± {short(losses.std(), 3)}"
    scores = pl.read_csv(RESULTS / "make-train" / "scores.csv")
    first = scores.filter(mode="encoder", layer=0)["directionality_excess"].item()
    decoder = scores.filter(mode="decoder")["directionality_excess"].min()
    assert first < decoder
    yield f"its first layer ends at {short(first, 2)} (`make-train/scores.csv`)"
    yield f"than any layer of the decoder beside it ({short(decoder, 2)})"


def starts_taken_apart() -> Iterator[str]:
    """Yield sentences of starts.md."""
    runs = pl.read_csv(RESULTS / "starts" / "runs.csv")
    skew = runs.filter(start="skew part")
    assert skew.height == skew["first_below"].null_count() == 15
    left = runs.filter(start="random")["first_below"].count()
    ends = (skew["last_loss"].min(), skew["last_loss"].max())
    assert left == 14
    yield "(last losses {:.2f} to {:.2f}), where fourteen random starts do".format(*ends)
    assert runs.filter(start="symmetric part")["first_below"].count() == 15
    yield "With the symmetric part alone all fifteen do"
    low, high = results(RESULTS / "starts")["symmetric-part"].allowed
    assert low > -0.02
    yield f"a cost of more than {short(high, 3)} as well"
    larger = effect("larger", "larger-symmetric-part")
    yield f"the symmetric part alone costs {short(larger, 3)} (`larger-symmetric-part`)"
    same, negated = (effect("starts", name) for name in ("same-token", "negated"))
    yield f"(`same-token`: {short(same, 3)} nats, W_k = −W_q {short(negated, 3)})"
    losses = runs.pivot("start", index="seed", values="plateau_loss")
    signs = losses.select(
        (pl.col("negated") > pl.col("symmetric"))
        == (pl.col("negated without self") > pl.col("symmetric without self"))
    )
    assert signs.to_series().all()
    yield "Here it stays the same, seed by seed"


def linear_attention() -> Iterator[str]:
    """Yield sentences of linear.md."""
    share_of_gap = effect("linear", "linear-symmetry") / effect("linear", "softmax-symmetry")
    assert 0.2 < share_of_gap < 0.3
    yield "in the mean a quarter of it"
    runs = pl.read_csv(RESULTS / "linear" / "runs.csv")
    symmetry = runs.pivot("start", index="seed", values="mean_symmetry")
    grown = symmetry["linear encoder"] - symmetry["linear encoder at the start"]
    yield f"{COUNTS[(grown < 0.05).sum()]} linear encoder of five ends as it started"
    names = ("softmax-directionality", "linear-directionality", "linear-decoder-turns")
    reach = sorted(results(RESULTS / "linear")[name].detectable for name in names)
    yield f"effects of {short(reach[0], 2)} to {short(reach[-1], 2)} would have been found"


def collator() -> Iterator[str]:
    """Yield sentences of collator.md."""
    runs = pl.read_csv(RESULTS / "collator" / "runs.csv")
    symmetry = runs.pivot("start", index="seed", values="mean_symmetry")
    assert (symmetry["masked-next"] < symmetry["causal"]).all()
    yield "in every seed (`collator-symmetry`)"
    yield f"their mean symmetry is +{short(symmetry['masked-next'].mean(), 2)}"


def directionality() -> Iterator[str]:
    """Yield sentences of directionality.md."""
    behind = effect("directionality", "sgd-loss")
    yield f"in decoders that end {short(behind, 2)} nats behind (`sgd-loss`)"
    no_type = results(RESULTS / "directionality")["no-type-loss"]
    assert max(map(abs, no_type.allowed)) < 0.007
    yield "same loss within .007 nats (`no-type-loss`)"
    yield f"{no_type.count} of 15 planned seeds were run"


def conversions() -> Iterator[str]:
    """Yield sentences of conversion.md."""
    scores = pl.read_csv(RESULTS / "conversion" / "scores.csv").filter(pl.col("layer").is_null())
    means = {
        (cell, step): symmetry
        for cell, step, symmetry in scores.with_columns(cell=pl.col("run").str.replace(r"-\d$", ""))
        .group_by("cell", "step")
        .agg(pl.mean("symmetry"))
        .iter_rows()
    }
    kept = []
    for text in ("", "reviews-"):
        before = means[f"{text}converted", 0]
        gained = means[f"{text}converted", 800] - before
        kept.append(100 * (means[f"{text}converted-back", 800] - before) / gained)
    yield f"keeps {kept[0]:.0f} % of the symmetry it had gained on Wikipedia, and {kept[1]:.0f} %"
    against_encoder = share("conversion", "reviews-converted-against-encoder")
    yield f"(`reviews-converted-against-encoder`, {against_encoder}; its own five differences"


def shares_of_layers() -> pl.DataFrame:
    """Return symmetry, explained loss and shares of parts by layer, of the first records."""
    rows = pl.read_csv(RESULTS / "parts" / "shares.csv", infer_schema_length=None)
    rows = rows.drop_nulls("layer")
    keys = ["model", "seed", "step", "layer"]
    losses = rows.pivot("part", index=keys, values="loss")
    shares = rows.pivot("part", index=keys, values="share")
    symmetry = rows.filter(part="whole").select(*keys, symmetry=pl.col("symmetry"))
    explained = losses.select(*keys, explained=pl.col("none") - pl.col("whole"))
    parts = shares.select(*keys, "symmetric", "skew")
    return parts.join(symmetry, on=keys).join(explained, on=keys)


def parts_of_layers() -> Iterator[str]:
    """Yield sentences of parts.md on layers."""
    layers = shares_of_layers().filter(pl.col("layer") == 0, pl.col("step") == 1600)
    ranges = {}
    for text, model in {"docstrings": "encoder", "Wikipedia": "wikipedia-encoder"}.items():
        first = layers.filter(model=model)
        ends = [first["symmetry"].drop_nulls().min(), first["symmetry"].drop_nulls().max()]
        ranges[text] = "({} to {})".format(*(short(end, 2) for end in ends))
        ranges[f"{text}, skew"] = [100 * first["skew"].min(), 100 * first["skew"].max()]
    yield (
        f"are as symmetric on Wikipedia {ranges['Wikipedia']} as on the docstrings "
        f"{ranges['docstrings']}"
    )
    wikipedia, docstrings = ranges["Wikipedia, skew"], ranges["docstrings, skew"]
    yield (
        "keep {:.0f} to {:.0f} % (the docstrings' ".format(*wikipedia)
        + "{:.0f} to {:.0f} %)".format(*docstrings).replace("-", "−")
    )
    small = shares_of_layers().filter(pl.col("step") == 1200)
    counts = []
    for model in ("small-decoder", "small-reviews-decoder"):
        runs = small.filter(model=model).sort("symmetry").partition_by("seed")
        leads = [(run["symmetric"] - run["skew"]).to_list() for run in runs]
        counts.append(sum(more > less for less, more in leads))
    yield (
        f"symmetric part is further ahead in {COUNTS[counts[0]]} of five on Wikipedia and "
        f"{COUNTS[counts[1]]} of five on reviews"
    )
    second = small.filter(
        pl.col("model").is_in(["small-encoder", "small-reviews-encoder"]), layer=1
    )
    yield f"the second layer explains at most {short(second['explained'].max(), 3)} nats"


def correlations_of_layers() -> Iterator[str]:
    """Yield the sentence of parts.md on rank correlations over layers."""
    layers = shares_of_layers().filter(pl.col("step") == 1600).drop_nulls()
    means, counts = {}, {}
    for mode in ("encoder", "decoder"):
        by_text = []
        for model in (mode, f"wikipedia-{mode}"):
            runs = layers.filter(model=model).partition_by("seed", as_dict=True)
            by_text.append(
                {
                    seed: stats.spearmanr(run["symmetry"], run["symmetric"] - run["skew"])[0]
                    for seed, run in runs.items()
                    if run.height == 4
                }
            )
        seeds = by_text[0].keys() & by_text[1].keys()
        means[mode] = fmean(fmean(text[seed] for text in by_text) for seed in seeds)
        counts[mode] = COUNTS[len(seeds)]
    yield (
        f"{short(means['decoder'], 2)} in decoders ({counts['decoder']} seeds) and "
        f"{short(means['encoder'], 2)} in encoders ({counts['encoder']};"
    )


def shares_of_parts() -> Iterator[str]:
    """Yield sentences of parts.md on shares of all layers together."""
    rows = pl.read_csv(RESULTS / "parts" / "shares.csv").filter(pl.col("layer").is_null())
    rows = rows.filter(part="skew", step=1600).drop_nulls("share")
    skew = dict(rows.group_by("model").agg(pl.mean("share")).iter_rows())
    yield (
        f"(encoder {short(skew['wikipedia-encoder'], 2)} beside {short(skew['encoder'], 2)}, "
        f"decoder {short(skew['wikipedia-decoder'], 2)} beside {short(skew['decoder'], 2)})"
    )
    converted = effect("parts", "rerun-small-converted-symmetric")
    started = effect("parts", "rerun-small-encoder-from-symmetric-symmetric")
    yield f"a converted decoder's keeps {short(converted, 2)} more than random halves"
    yield f"after a symmetric start {short(started, 2)}"
    on_reviews = effect("parts", "rerun-small-reviews-decoder-skew")
    yield f"which keep {short(on_reviews, 2)} more than random halves"


def parts_along_training() -> Iterator[str]:
    """Yield the sentence of parts.md on step 200 of encoders on Wikipedia."""
    rows = pl.read_csv(RESULTS / "parts" / "controls.csv", infer_schema_length=None)
    rows = rows.filter(pl.col("layer").is_null())
    untrained = (
        rows.filter(step=0).drop_nulls("loss").pivot("part", index=["model", "seed"], values="loss")
    )
    assert untrained.height == 4
    explained = (untrained["none"] - untrained["whole"]).max()
    changes = untrained.select(pl.exclude("model", "seed", "whole", "none") - pl.col("whole"))
    largest = max(abs(change) for row in changes.rows() for change in row)
    yield (
        f"all scores explain at most {short(explained, 3)} nats, and the loss with any part is "
        f"within {short(largest, 3)} nats of the whole model's"
    )
    rows = rows.filter(pl.col("model") == "rerun-wikipedia-encoder", step=200)
    means = rows.drop_nulls("loss").group_by("part").agg(pl.mean("loss"), pl.mean("share"))
    loss = dict(means.select("part", "loss").iter_rows())
    share = dict(means.select("part", (100 * pl.col("share")).round(0).cast(int)).iter_rows())
    yield f"all scores explain {short(loss['none'] - loss['whole'], 2)} nats"
    yield f"its symmetric part keeps {share['symmetric']} %, and random halves {share['random']} %"
    as_large = share["random, size of symmetric"]
    yield f"Random parts as large as the symmetric part keep {as_large} %"


def larger_models() -> Iterator[str]:
    """Yield sentences of larger.md."""
    runs = pl.read_csv(RESULTS / "larger" / "starts.csv")
    seeds = runs.group_by("start").len()["len"]
    assert seeds.n_unique() == 1
    assert seeds[0] == 10
    yield "All ten planned seeds were run"
    yield "experiment ten are trained, in four of five arms"
    held, part = (effect("larger", f"larger-{name}") for name in ("tied", "symmetric-part"))
    yield f"(`larger-tied`): {short(held, 3)} nats, in every seed"
    yield f"(`larger-symmetric-part`): {short(part, 3)} nats"
    low, high = results(RESULTS / "starts")["symmetric-part"].allowed
    yield f"the interval is {short(low, 3)} to +{short(high, 3)}"
    wide = runs.with_columns(pl.col("start").str.strip_prefix("larger "))
    loss = wide.pivot("start", index="seed", values="plateau_loss")
    assert (loss["tied"] > loss["symmetric"]).all()
    small = pl.read_csv(RESULTS / "starts" / "runs.csv").filter(start="random")["first_below"]
    large = wide.filter(start="random")["first_below"]
    yield (
        f"random starts fall below 3.0 between steps {large.min()} and {large.max()} here, and "
        f"between {small.min()} and {small.max()} in the two-layer models"
    )
    step = wide.pivot("start", index="seed", values="first_below")
    last = wide.pivot("start", index="seed", values="last_loss")
    sooner = (step["random"] - step["symmetric part"]).mean()
    behind = (last["symmetric part"] - last["random"]).mean()
    yield f"({sooner:.0f} steps sooner in the mean) and is {short(behind, 2)} nats behind at step"
    plateau = (loss["symmetric"] - loss["random"]).mean()
    at_the_end = (last["symmetric"] - last["random"]).mean()
    yield f"higher by {short(plateau, 3)} nats in the mean, and by {short(at_the_end, 2)} at step"


SENTENCES: dict[str, list[Callable[[], Iterator[str]]]] = {
    "table-1.md": [
        symmetric_starts,
        spreads,
        symmetry_at_the_end,
        signs_of_starts,
        plateau_of_reviews,
        pre_norm_runs,
    ],
    "starts.md": [starts_taken_apart],
    "larger.md": [larger_models],
    "linear.md": [linear_attention],
    "collator.md": [collator],
    "directionality.md": [directionality],
    "conversion.md": [conversions],
    "parts.md": [
        parts_of_layers,
        correlations_of_layers,
        shares_of_parts,
        parts_along_training,
    ],
}


@pytest.mark.parametrize(
    ("page", "recomputed"),
    [(page, function) for page, functions in SENTENCES.items() for function in functions],
    ids=lambda value: value if isinstance(value, str) else value.__name__,
)
def test_sentences_have_the_numbers_of_the_records(
    page: str, recomputed: Callable[[], Iterator[str]]
) -> None:
    text = " ".join((RESULTS / page).read_text(encoding="utf-8").split())
    stale = [sentence for sentence in recomputed() if sentence not in text]
    assert not stale


def test_a_stale_number_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The end of one plateau is moved by ten steps."""
    changed = {
        start: {seed: dict(run) for seed, run in runs.items()} for start, runs in starts().items()
    }
    changed["random"][1]["end"] += 10
    monkeypatch.setitem(symmetric_starts.__globals__, "starts", lambda: changed)
    text = " ".join((RESULTS / "table-1.md").read_text(encoding="utf-8").split())
    assert [sentence for sentence in symmetric_starts() if sentence not in text]
