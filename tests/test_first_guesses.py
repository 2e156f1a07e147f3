"""First guesses of calls, written down before their author looked at the reference, best first.

A goal is met if its guess returns something. The error of a mistaken call names what to do.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from tests import small

import wqk
from wqk.errors import CheckpointError, FormError, OutputError, RunError, TableError, UnknownFamily

Call = Callable[[], Any]

FIRST_THAT_WORK, GOALS_THAT_WORK = 108, 111  # of all goals


class Mistake(NamedTuple):
    """A call that cannot mean anything, and the error that it raises."""

    call: Call
    error: type[Exception]
    words: str  # part of the error's message


class Desk:
    """Models and arrays that guesses are tried on."""

    def __init__(self) -> None:
        import torch

        random = np.random.default_rng(0)
        self.ref = wqk.demo_model("encoder")
        self.model = wqk.open(self.ref)
        self.other = wqk.demo_model("decoder")
        self.pair = wqk.demo_model("induction")
        self.rotary = wqk.open(small.llama(sides="qkvo", name="llama"))
        self.net = small.running(key_heads=2)
        self.batch = torch.arange(8)[None] % 9
        self.tokens = torch.arange(64).reshape(2, 32) % 9
        self.a = random.standard_normal((8, 2))
        self.b = random.standard_normal((8, 2))
        self.x = np.ones(128)


@pytest.fixture
def desk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Desk:
    monkeypatch.chdir(tmp_path)
    return Desk()


def guesses_by_goal(desk: Desk) -> dict[str, list[Call]]:
    """Calls that people guess for each goal, the likeliest first."""
    ref, other_ref, pair, net, rotary = desk.ref, desk.other, desk.pair, desk.net, desk.rotary
    model, batch, tokens = desk.model, desk.batch, desk.tokens
    a, b, x = desk.a, desk.b, desk.x
    return {
        "heads of every layer": [lambda: model.n_heads, lambda: model[0].head_count],
        "the most symmetric layers": [
            lambda: wqk.scan(ref).sort_values("symmetry", ascending=False).head(3)
        ],
        "one layer's rows": [lambda: wqk.scan(ref).query("layer == 2")],
        "a CSV file": [lambda: wqk.scan(ref).to_csv("a.csv")],
        "a LaTeX table": [lambda: wqk.scan(ref).to_latex()],
        "one curve": [lambda: wqk.scan(ref).plot(y="symmetry")],
        "the p value": [lambda: wqk.kin(ref, other_ref).p_value],
        "open a model": [lambda: wqk.open(ref), lambda: wqk.load(ref)],
        "open a live module": [lambda: wqk.open(net), lambda: wqk.Model(net)],
        "number of layers": [lambda: len(model), lambda: model.n_layers],
        "a layer": [lambda: model[2], lambda: model.layers[2]],
        "the last layer": [lambda: model[-1], lambda: model.layers[-1]],
        "a head": [lambda: model[2, 1], lambda: model[2][1], lambda: model.head(2, 1)],
        "the heads of a layer": [lambda: model[2].heads, lambda: list(model[2])],
        "the first head of every layer": [
            lambda: model[:, 0],
            lambda: [layer[0] for layer in model],
        ],
        "a layer's matrix as an array": [
            lambda: np.asarray(model[2].form),
            lambda: model[2].W_qk,
            lambda: model[2].form.numpy(),
        ],
        "a head's matrix as an array": [
            lambda: np.asarray(model[2, 1]),
            lambda: model[2, 1].numpy(),
        ],
        "a head's symmetry": [lambda: model[2, 1].symmetry, lambda: wqk.symmetry(model[2, 1])],
        "a layer's symmetry": [
            lambda: model[2].symmetry,
            lambda: model[2].form.symmetry,
            lambda: wqk.symmetry(model[2]),
        ],
        "symmetry of all heads": [
            lambda: model[2].heads.symmetry,
            lambda: [head.symmetry for head in model[2]],
        ],
        "symmetry of two matrices": [lambda: wqk.symmetry(a, b), lambda: wqk.symmetry(a @ b.T)],
        "directionality of a matrix": [
            lambda: wqk.directionality(a @ b.T),
            lambda: wqk.directionality(a, b),
        ],
        "singular values of a head": [
            lambda: model[2, 1].svd().S,
            lambda: model[2, 1].singular_values(),
        ],
        "singular values as an array": [
            lambda: model[2, 1].S,
            lambda: np.linalg.svd(model[2, 1])[1],
        ],
        "eigenvalues of a head": [
            lambda: model[2, 1].eigenvalues(),
            lambda: np.linalg.eigvals(np.asarray(model[2, 1])),
        ],
        "norm of a head": [lambda: model[2, 1].norm, lambda: np.linalg.norm(model[2, 1])],
        "transpose of a head": [lambda: model[2, 1].T, lambda: model[2, 1].transpose()],
        "product of two heads": [lambda: model[1, 0] @ model[2, 1]],
        "difference of two heads": [lambda: model[1, 0] - model[2, 1]],
        "score of two vectors": [lambda: model[2, 1](x, x), lambda: x @ model[2, 1] @ x],
        "queries and keys of a head": [
            lambda: model[2, 1].query,
            model[2, 1].key,
            lambda: model[2, 1].W_q,
        ],
        "a form of my own factors": [lambda: wqk.BilinearForm(a, b), lambda: wqk.Head(a, b)],
        "a form of my own matrix": [
            lambda: wqk.BilinearForm.from_matrix(a @ b.T),
            lambda: wqk.BilinearForm(a @ b.T),
        ],
        "the output-value circuit": [lambda: rotary[1, 2].ov, lambda: rotary[1].ov],
        "a form at a distance": [
            lambda: rotary[1].at(distance=4),
            lambda: rotary[1].form(distance=4),
        ],
        "scores of all layers": [lambda: wqk.scan(ref), lambda: model.scan()],
        "scores as a data frame": [lambda: wqk.scan(ref).frame, lambda: wqk.scan(ref).to_pandas()],
        "the table's column": [
            lambda: wqk.scan(ref)["symmetry"],
            lambda: wqk.scan(ref).frame["symmetry"],
        ],
        "plot the scores": [lambda: wqk.scan(ref).plot(), lambda: wqk.plot(ref)],
        "picture of a head": [
            lambda: model[2, 1].plot(),
            lambda: wqk.show(ref, 2, 1),
            lambda: wqk.show(model[2, 1]),
        ],
        "are two models the same": [lambda: wqk.same(ref, ref), lambda: wqk.same(ref, ref).same],
        "is one made of the other": [
            lambda: wqk.kin(ref, other_ref),
            lambda: wqk.kin([ref, other_ref]),
        ],
        "where two models differ": [lambda: wqk.diff(ref, ref), lambda: wqk.compare(ref, ref)],
        "which heads compose": [lambda: wqk.compose(pair), lambda: wqk.compose(wqk.open(pair))],
        "which tokens a head matches": [
            lambda: wqk.tokens(net, 0, 1),
            lambda: wqk.tokens(net, layer=0, head=1),
        ],
        "coupling of heads": [
            lambda: wqk.coupling(model[2]),
            lambda: wqk.coupling(model[2].heads),
            lambda: model[2].coupling,
        ],
        "initialize symmetric": [
            lambda: wqk.initialize_(net, "symmetric"),
            lambda: wqk.initialize_(net, kind="symmetric"),
        ],
        "clip large logits": [
            lambda: wqk.clip_(net),
            lambda: wqk.clip_(net, 100),
            lambda: wqk.Clipper(net, 100),
        ],
        "an HTML report": [
            lambda: wqk.report(wqk.scan(ref)),
            lambda: wqk.report(wqk.scan(ref), "r.html"),
        ],
        "what a scan reads": [lambda: wqk.explain(ref), lambda: wqk.explain(model)],
        "is it the same": [lambda: bool(wqk.same(ref, ref)), lambda: wqk.same(ref, ref).same],
        "is it another": [
            lambda: 1 / (not wqk.same(ref, other_ref)),
            lambda: 1 / (not wqk.same(ref, other_ref).same),
        ],
        "why not the same": [
            lambda: wqk.same(ref, other_ref).reason,
            lambda: wqk.same(ref, other_ref).causes,
        ],
        "same by layer": [lambda: wqk.same(ref, ref).frame],
        "same as JSON": [lambda: json.dumps(wqk.same(ref, other_ref).to_dict())],
        "same, every tensor": [
            lambda: wqk.same(ref, ref, all=True),
            lambda: wqk.same(ref, ref, everything=True),
        ],
        "the repair": [
            lambda: wqk.same(ref, other_ref).repair,
            lambda: wqk.same(ref, other_ref).fix,
        ],
        "show a head": [lambda: wqk.show(ref, layer=0, head=1), lambda: wqk.show(ref, 0, 1)],
        "save what is shown": [
            lambda: wqk.show(ref, 0, 1).save("s.png"),
            lambda: wqk.show(ref, 0, 1).savefig("s.png"),
        ],
        "show the coupling": [lambda: wqk.show(ref, layer=0, coupling=True)],
        "are they related": [
            lambda: bool(wqk.kin(ref, other_ref)),
            lambda: wqk.kin(ref, other_ref).related,
        ],
        "what kin says": [
            lambda: wqk.kin(ref, other_ref).verdict,
            lambda: wqk.kin(ref, other_ref).conclusion,
        ],
        "kin's numbers": [lambda: wqk.kin(ref, other_ref).frame],
        "compose's frame": [lambda: wqk.compose(pair).frame],
        "the strongest pairs": [
            lambda: wqk.compose(pair).top(5),
            lambda: wqk.compose(pair).frame.head(5),
        ],
        "compose, keys only": [
            lambda: wqk.compose(pair, kind="K"),
            lambda: wqk.compose(pair, kind="k"),
        ],
        "draw compose": [lambda: wqk.compose(pair).plot(), lambda: wqk.compose(pair).save("c.png")],
        "parts of a text": [lambda: wqk.parts(net, tokens), lambda: wqk.parts(net, tokens=tokens)],
        "diff's frame": [lambda: wqk.diff(ref, ref).frame],
        "heads that moved most": [
            lambda: wqk.diff(ref, ref, heads=True).heads.frame,
            lambda: wqk.diff(ref, ref).heads,
        ],
        "token pairs": [
            lambda: wqk.tokens(net, layer=0, head=1).frame,
            lambda: wqk.tokens(net, 0, 1).frame,
        ],
        "five pairs of tokens": [
            lambda: wqk.tokens(net, 0, 1, top=5),
            lambda: wqk.tokens(net, 0, 1, k=5),
        ],
        "explain as a frame": [lambda: wqk.explain(ref).frame],
        "bytes to be read": [
            lambda: wqk.explain(ref).bytes,
            lambda: wqk.explain(ref).bytes_to_read,
        ],
        "verify a module": [lambda: wqk.verify(net, batch), lambda: wqk.verify(net)],
        "was it right": [lambda: bool(wqk.verify(net, batch)), lambda: wqk.verify(net, batch).ok],
        "logits of a batch": [lambda: wqk.logits(net, batch).frame],
        "the largest logit": [
            lambda: wqk.logits(net, batch).max,
            lambda: wqk.logits(net, batch).largest,
        ],
        "scores in a loop": [lambda: wqk.Monitor(net)(0), lambda: wqk.Monitor(net, None)(0)],
        "clip by a batch": [
            lambda: wqk.clip_(net, 100, wqk.logits(net, batch)),
            lambda: wqk.clip_(net, 100, batch),
        ],
        "a condition on rows": [
            lambda: wqk.scan(ref).heads.filter("symmetry > 0.4 and layer == 2"),
            lambda: wqk.scan(ref)[wqk.scan(ref)["symmetry"] > 0.6],
        ],
        "rows in an order": [
            lambda: wqk.scan(ref).heads.sort("symmetry", ascending=False),
            lambda: wqk.scan(ref).heads.sort("symmetry", descending=True),
        ],
        "a table as JSON": [lambda: wqk.scan(ref).save("scores.json")],
        "the widths and the type": [lambda: (model.d_model, model.d_head, model.dtype)],
        "the symmetric half": [lambda: model[2, 1].symmetric, lambda: model[2, 1].sym],
        "a matrix by its name": [lambda: model[2, 1].matrix, lambda: model[2, 1].M],
        "composition": [lambda: wqk.composition(pair), lambda: wqk.composition_scores(pair)],
        "relation": [lambda: wqk.related(ref, other_ref)],
        "what there is": [lambda: wqk.inspect(ref), lambda: wqk.info(ref)],
        "a limit of clipping": [lambda: wqk.QKClip(net, tau=100)],
        "a tolerance": [lambda: wqk.same(ref, ref, atol=1e-3), lambda: wqk.same(ref, ref, tol=0.1)],
        "one layer": [lambda: wqk.scan(ref, layer=2), lambda: wqk.scan(ref, layers=[2])],
        "a head at a distance": [lambda: rotary[1, 0].at(4), lambda: rotary[1, 0].at(distance=4)],
        "scores at a distance": [lambda: wqk.scan(rotary, distance=3)],
        "a curve by its name": [lambda: wqk.scan(ref).plot("symmetry")],
        "means over layers": [
            lambda: wqk.scan(ref).layers.mean(),
            lambda: wqk.scan(ref).layers["symmetry"].mean(),
        ],
        "means by layer": [
            lambda: wqk.scan(ref).heads.groupby("layer")["symmetry"].mean(),
            lambda: wqk.scan(ref).heads.group_by("layer").mean(),
        ],
        "compositions in an order": [lambda: wqk.compose(pair).sort_values("z", ascending=False)],
        "the mean composition": [lambda: wqk.compose(pair).mean()],
        "a polars file": [lambda: wqk.scan(ref).write_csv("a.csv")],
        "a table as text": [lambda: wqk.scan(ref).to_string()],
        "a table's size": [lambda: wqk.scan(ref).shape],
        "a block's attention": [lambda: model.blocks[0].attn.W_Q],
        "the form of a head": [lambda: model[0, 1].form.symmetry_score],
        "weights of a head": [lambda: model[0, 1].query_weight],
        "rows of a layer": [lambda: wqk.scan(ref).filter(layer=2)],
        "two tables in one": [
            lambda: wqk.join(wqk.scan(ref), wqk.scan(other_ref)),
            lambda: wqk.join([wqk.scan(ref), wqk.scan(other_ref)]),
        ],
        "a callback with other words": [lambda: wqk.ScoreCallback("run", every_n_steps=200)],
        "a step's scores": [lambda: wqk.Monitor(net).log(0), lambda: wqk.Monitor(net)(0)],
        "scores of a monitor": [lambda: followed(net).frame, lambda: followed(net).history],
        "what is printed": [lambda: 1 / (str(wqk.same(ref, ref)) == repr(wqk.same(ref, ref)))],
    }


def followed(net: Any) -> wqk.Monitor:
    """Return a monitor with the scores of one step."""
    monitor = wqk.Monitor(net)
    monitor(0)
    return monitor


def mistakes(desk: Desk) -> list[Mistake]:
    """Calls that cannot mean anything."""
    import torch

    ref, other_ref, net, model, batch = desk.ref, desk.other, desk.net, desk.model, desk.batch
    return [
        Mistake(lambda: wqk.logits(ref, batch), CheckpointError, "expected an nn.Module"),
        Mistake(
            lambda: wqk.Monitor(ref),
            CheckpointError,
            "a model in memory is followed: expected an nn.Module",
        ),
        Mistake(
            lambda: wqk.Monitor(net)(-1), RunError, "number of optimizer steps done so far, got -1"
        ),
        Mistake(
            lambda: wqk.Monitor(net).look(2.5),
            RunError,
            "number of optimizer steps done so far, got 2.5",
        ),
        Mistake(
            lambda: wqk.Monitor(net, steps=3),
            RunError,
            "steps must be numbers, or 'log' for 1, 2, 4, 8, ...; got 3",
        ),
        Mistake(
            lambda: wqk.Monitor(net, steps=[-3]),
            RunError,
            "number of optimizer steps done so far, got -3",
        ),
        Mistake(
            lambda: wqk.Monitor(net, every="9"),
            RunError,
            "every N steps with N at least 1, got every=9",
        ),
        Mistake(lambda: wqk.scan(ref, other_ref), TypeError, r"or wqk.scan([a, b]) for several"),
        Mistake(lambda: wqk.scan("demo:bert"), CheckpointError, "models of the package are demo:"),
        Mistake(lambda: wqk.Monitor(net).plot(), AttributeError, "did you mean 'table.plot()'"),
        Mistake(
            lambda: wqk.clip_(ref, 100, {(0, 0): 1.0}),
            CheckpointError,
            "a model in memory is clipped",
        ),
        Mistake(
            lambda: wqk.clip_(net, "100"), FormError, "limit must be a positive number, got '100'"
        ),
        Mistake(
            lambda: wqk.initialize_(ref, "symmetric"),
            CheckpointError,
            "a model in memory is initialized",
        ),
        Mistake(lambda: wqk.report("folder"), TableError, "no such file or folder"),
        Mistake(lambda: wqk.report(net), TableError, "scan it first"),
        Mistake(lambda: wqk.report(model), TableError, "got Model"),
        Mistake(lambda: wqk.scan({"model": net.state_dict()}), CheckpointError, "under 'model'"),
        Mistake(lambda: wqk.open(str(ref)[:-2] + "r"), CheckpointError, "did you mean"),
        Mistake(lambda: wqk.same(ref, other_ref).reasons, AttributeError, "did you mean 'causes'"),
        Mistake(lambda: wqk.scan(ref).groupby("layer"), TableError, "on table.layers or on table"),
        Mistake(lambda: wqk.WqkCallback(), AttributeError, "(folder).attach(trainer)?"),
        Mistake(
            lambda: wqk.Monitor(net).step(),
            TypeError,
            "monitor(): missing a required argument: 'step'; expected monitor(step), with the "
            "number of optimizer steps done so far",
        ),
        Mistake(lambda: wqk.scan(ref).loc, AttributeError, "'table[layer, head]'"),
        Mistake(lambda: wqk.scan(ref).to_csv("a.txt"), TableError, "expected the ending .csv"),
        Mistake(lambda: wqk.scan(ref).to_csv(index=True), TableError, "has no index"),
        Mistake(lambda: wqk.scan(ref).plot(y="rank"), TableError, "the score is one of symmetry"),
        Mistake(lambda: wqk.scan(ref).plot(kind="bar"), TypeError, 'table.plot(y="symmetry")'),
        Mistake(
            lambda: wqk.initialize_(net), TypeError, 'wqk.initialize_(model, "symmetric"), or "ind'
        ),
        Mistake(
            lambda: wqk.clip_(net, batch=batch),
            TypeError,
            "wqk.clip_(model, limit, wqk.logits(model, batch))",
        ),
        Mistake(lambda: wqk.survey([ref, other_ref]), TypeError, "wqk.survey(refs, out=folder)"),
        Mistake(lambda: wqk.tokens(net), TypeError, "expected wqk.tokens(ref, layer, head)"),
        Mistake(lambda: wqk.BilinearForm(desk.a), TypeError, "BilinearForm.from_matrix(matrix)"),
        Mistake(lambda: wqk.tokens(net, 0, 1, tops=3), TypeError, "did you mean 'top'?"),
        Mistake(lambda: model[0, 1].qk.symmetric(), TypeError, "has no parentheses"),
        Mistake(lambda: model[0, 1].top_pairs(), AttributeError, "has no attribute 'top_pairs'"),
        Mistake(lambda: model[0, 1].directions(), AttributeError, "layer, head, directions=5)"),
        Mistake(lambda: model[0, 1].composition(), AttributeError, "wqk.compose(ref)"),
        Mistake(lambda: wqk.open(ref, adapter="a"), TypeError, "wqk.open(adapter, base=base)"),
        Mistake(lambda: wqk.scan(ref, revision="a"), TypeError, "wqk.open(ref, revision=...)"),
        Mistake(lambda: wqk.scan(ref, n_heads=4), TypeError, "wqk.open(ref, heads_per_layer=...)"),
        Mistake(lambda: wqk.scan(ref).plot(ax=None), TypeError, "figure.savefig(path)"),
        Mistake(lambda: model.cfg.n_layers, AttributeError, "n_layers, model.n_heads"),
        Mistake(lambda: wqk.repair(ref, ref), AttributeError, "candidate, repair=folder)"),
        Mistake(lambda: wqk.scan(ref).filter("symetry > 0"), TableError, "did you mean 'symmetry'"),
        Mistake(lambda: wqk.scan(ref).filter("symmetry >"), TableError, "expected one such as"),
        Mistake(lambda: wqk.scan(ref).nlargest(3, "symmetry"), TableError, "on table.layers or on"),
        Mistake(lambda: model[0, 1].symmetric_part(), TypeError, "has no parentheses"),
        Mistake(lambda: wqk.same(ref, ref).explain, AttributeError, "did you mean 'causes'"),
        Mistake(lambda: wqk.explain(ref).size, AttributeError, "did you mean 'bytes_to_read'"),
        Mistake(lambda: wqk.scan(ref, layers=0), CheckpointError, "such as layers=[0, -1]; got 0"),
        Mistake(
            lambda: wqk.scan(ref, distances="0,5"),
            CheckpointError,
            "such as distances=[0, 64]; got '0,5'",
        ),
        Mistake(
            lambda: wqk.scan(ref, measures="ceiling"),
            CheckpointError,
            "such as measures=['ceiling']",
        ),
        Mistake(
            lambda: wqk.same(ref, ref, layers="1"),
            CheckpointError,
            "such as layers=[0, -1]; got '1'",
        ),
        Mistake(
            lambda: wqk.same(ref, ref, up_to="heads"), CheckpointError, "such as up_to=['heads']"
        ),
        Mistake(
            lambda: wqk.same(ref, ref, tolerance=-1.0), CheckpointError, "at least 0, got -1.0"
        ),
        Mistake(
            lambda: wqk.same(ref, ref).repair("folder"),
            TypeError,
            "wqk.same(reference, candidate, repair=folder) writes a repaired copy",
        ),
        Mistake(lambda: desk.model.plot(), AttributeError, "wqk.scan(model).plot()"),
        Mistake(lambda: wqk.compose(desk.pair).heatmap(), AttributeError, 'matrix("k").plot()'),
        Mistake(lambda: wqk.scan(ref).heatmap(), AttributeError, 'plot("heads")'),
        Mistake(lambda: wqk.tokens(net, 0, 1, top=0), CheckpointError, "1 or more; got 0"),
        Mistake(
            lambda: wqk.verify(ref, batch), CheckpointError, "a batch is for a module in memory"
        ),
        Mistake(
            lambda: wqk.demo_model("enc"), CheckpointError, "one of encoder, decoder, induction"
        ),
        Mistake(lambda: wqk.scan(ref).mean(), TableError, "on table.layers or on table.heads"),
        Mistake(lambda: wqk.scan(ref).pivot(), AttributeError, 'heads.pivot_table(index="layer"'),
        Mistake(lambda: wqk.scan(ref).set_index("layer"), AttributeError, "'to_pandas().set_index"),
        Mistake(lambda: model[0, 1].qk.max(), AttributeError, "did you mean 'numpy().max'"),
        Mistake(lambda: model[0, 1].qk.at(3), AttributeError, "[layer, head].at(distance)"),
        Mistake(lambda: model[0, 1].form(distance=3), TypeError, "[layer, head].at(distance)"),
        Mistake(lambda: wqk.Model(ref), TypeError, "Model(): missing a required argument"),
        Mistake(lambda: model.W_E, AttributeError, "wqk.tokens(model, layer, head)"),
        Mistake(lambda: wqk.open(ref, device="cpu"), TypeError, "wqk.scan(ref, device=...)"),
        Mistake(lambda: wqk.scan(ref, verbose=True), TypeError, "leave it out"),
        Mistake(lambda: wqk.verify(net, input_ids=batch), TypeError, 'batch={"input_ids": ids}'),
        Mistake(
            lambda: wqk.verify(net, batch, heads_per_layer=2),
            TypeError,
            "wqk.open(ref, heads_per_layer=...) in place of the ref",
        ),
        Mistake(lambda: wqk.compose(desk.pair, "K"), TypeError, 'wqk.compose(ref, kind="k")'),
        Mistake(lambda: wqk.tokens(net, 0, 1, words=3), TypeError, "tokens(): got an unexpected"),
        Mistake(lambda: wqk.ablate(net), AttributeError, "wqk.parts(ref, text, each_head=True)"),
        Mistake(lambda: wqk.logits(ref, batch), CheckpointError, "AutoModelForCausalLM.from_pret"),
        Mistake(lambda: model[0].ov, CheckpointError, 'wqk.demo_model("induction")'),
        Mistake(lambda: wqk.compose(ref), CheckpointError, 'wqk.demo_model("induction")'),
        Mistake(lambda: wqk.tokens(ref, 0, 1), CheckpointError, 'wqk.demo_model("induction")'),
        Mistake(lambda: wqk.scan(ref).filter(lyer=2), TableError, "did you mean 'layer'"),
        Mistake(
            lambda: wqk.ScoreCallback("run", 200), TypeError, "ScoreCallback(folder, every=200"
        ),
        Mistake(
            lambda: wqk.ScoreCallback("run", evry=200),
            TypeError,
            "'evry'; did you mean 'every'?; its options are those of wqk.Monitor",
        ),
        Mistake(lambda: wqk.Monitor(net).save(), AttributeError, "'table.write(path)'"),
        Mistake(lambda: wqk.clip_(net, batch, 100), FormError, "wqk.clip_(model, limit, wqk.logit"),
        Mistake(lambda: wqk.survey([ref], out="a.parquet"), OutputError, "a survey needs a folder"),
        Mistake(lambda: wqk.demo_model(), TypeError, 'wqk.demo_model("encoder"), "decoder" or'),
        Mistake(lambda: model[0].causal, AttributeError, "did you mean 'plan.causal'"),
        Mistake(lambda: model.to("cuda"), AttributeError, 'wqk.scan(model, device="cuda")'),
        Mistake(
            lambda: wqk.symmetry(desk.a, desk.b, heads=2),
            TypeError,
            "symmetry(): got an unexpected keyword argument 'heads'; expected wqk.symmetry(form)",
        ),
        Mistake(
            lambda: wqk.attention_matrices(net, batch)[0, 1],
            CheckpointError,
            "matrices[layer][:, head]",
        ),
        Mistake(lambda: wqk.label_heads(net).induction, AttributeError, "of('induction')"),
        Mistake(lambda: wqk.compose(desk.pair).layers, TableError, "has no column 'head'"),
        Mistake(
            lambda: model[0, 1].qk.decompose(),
            AttributeError,
            "form.symmetric_part, form.skew_part",
        ),
        Mistake(lambda: model[0, 1].qk.truncate(4), AttributeError, "did you mean 'svd()'"),
        Mistake(lambda: wqk.ScoreCallback("run").table, AttributeError, "'monitor.table'"),
        Mistake(lambda: wqk.scan(""), CheckpointError, "got an empty name"),
        Mistake(lambda: wqk.scan(torch.nn.Linear(3, 3)), UnknownFamily, "it names no model type"),
    ]


def error_of(call: Call) -> str:
    """Return the error that a call raises; empty if it returns something."""
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def failures(errors_by_goal: dict[str, list[str]]) -> Iterator[str]:
    """Lines that name the goal, the number and the error of each guess that fails."""
    for goal, errors in errors_by_goal.items():
        for number, error in enumerate(errors, start=1):
            if error:
                yield f"{goal}, guess {number}: {error}"


@pytest.mark.usefixtures("unchecked_arguments")
def test_first_guesses_work(desk: Desk) -> None:
    errors_by_goal = {
        goal: [error_of(guess) for guess in guesses]
        for goal, guesses in guesses_by_goal(desk).items()
    }
    report = "\n".join(failures(errors_by_goal))
    first_that_work = [goal for goal, errors in errors_by_goal.items() if not errors[0]]
    goals_that_work = [goal for goal, errors in errors_by_goal.items() if "" in errors]
    assert len(first_that_work) >= FIRST_THAT_WORK, report
    assert len(goals_that_work) >= GOALS_THAT_WORK, report


@pytest.mark.usefixtures("unchecked_arguments")
def test_the_error_of_a_mistaken_call_names_what_to_do(desk: Desk) -> None:
    for mistake in mistakes(desk):
        with pytest.raises(mistake.error) as caught:
            mistake.call()
        assert mistake.words in str(caught.value)


def test_advice_is_given_once_and_names_nothing_private() -> None:
    for code in ("wqk.symetry", "wqk.explain(wqk.demo_model('encoder')).shown"):
        done = subprocess.run(
            [sys.executable, "-c", f"import wqk; {code}"], capture_output=True, text=True
        )
        assert done.stderr.lower().count("did you mean") == ("symetry" in code), done.stderr
        assert "'_" not in done.stderr.splitlines()[-1]
