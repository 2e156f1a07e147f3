"""What people type first: guesses written down before looking at the reference, best first.

A goal is met if its guess gives something and no error. Those that fail must say what to do.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from tests import small

import wqk

GOALS = """
open a model | wqk.open(ref) | wqk.load(ref)
open a live module | wqk.open(net) | wqk.Model(net)
number of layers | len(model) | model.n_layers
a layer | model[2] | model.layers[2]
the last layer | model[-1] | model.layers[-1]
a head | model[2, 1] | model[2][1] | model.head(2, 1)
the heads of a layer | model[2].heads | list(model[2])
the first head of every layer | model[:, 0] | [layer[0] for layer in model]
a layer's matrix as an array | np.asarray(model[2].form) | model[2].W_qk | model[2].form.numpy()
a head's matrix as an array | np.asarray(model[2, 1]) | model[2, 1].numpy()
a head's symmetry | model[2, 1].symmetry | wqk.symmetry(model[2, 1])
a layer's symmetry | model[2].symmetry | model[2].form.symmetry | wqk.symmetry(model[2])
symmetry of all heads | model[2].heads.symmetry | [head.symmetry for head in model[2]]
symmetry of two matrices | wqk.symmetry(a, b) | wqk.symmetry(a @ b.T)
directionality of a matrix | wqk.directionality(a @ b.T) | wqk.directionality(a, b)
singular values of a head | model[2, 1].svd().S | model[2, 1].singular_values()
singular values as an array | model[2, 1].S | np.linalg.svd(model[2, 1])[1]
eigenvalues of a head | model[2, 1].eigenvalues() | np.linalg.eigvals(np.asarray(model[2, 1]))
norm of a head | model[2, 1].norm | np.linalg.norm(model[2, 1])
transpose of a head | model[2, 1].T | model[2, 1].transpose()
product of two heads | model[1, 0] @ model[2, 1]
difference of two heads | model[1, 0] - model[2, 1]
score of two vectors | model[2, 1](x, x) | x @ model[2, 1] @ x
queries and keys of a head | model[2, 1].query, model[2, 1].key | model[2, 1].W_q
a form of my own factors | wqk.BilinearForm(a, b) | wqk.Head(a, b)
a form of my own matrix | wqk.BilinearForm.from_matrix(a @ b.T) | wqk.BilinearForm(a @ b.T)
the output-value circuit | rotary[1, 2].ov | rotary[1].ov
a form at a distance | rotary[1].at(distance=4) | rotary[1].form(distance=4)
scores of all layers | wqk.scan(ref) | model.scan()
scores as a data frame | wqk.scan(ref).frame | wqk.scan(ref).to_pandas()
the table's column | wqk.scan(ref)["symmetry"] | wqk.scan(ref).frame["symmetry"]
plot the scores | wqk.scan(ref).plot() | wqk.plot(ref)
picture of a head | model[2, 1].plot() | wqk.show(ref, 2, 1) | wqk.show(model[2, 1])
are two models the same | wqk.same(ref, ref) | wqk.same(ref, ref).same
is one made of the other | wqk.kin(ref, other) | wqk.kin([ref, other])
where two models differ | wqk.diff(ref, ref) | wqk.compare(ref, ref)
which heads compose | wqk.compose(pair) | wqk.compose(wqk.open(pair))
which tokens a head matches | wqk.tokens(net, 0, 1) | wqk.tokens(net, layer=0, head=1)
coupling of heads | wqk.coupling(model[2]) | wqk.coupling(model[2].heads) | model[2].coupling
initialize symmetric | wqk.initialize_(net, "symmetric") | wqk.initialize_(net, kind="symmetric")
clip large logits | wqk.clip_(net) | wqk.clip_(net, 100)
an HTML report | wqk.report(wqk.scan(ref)) | wqk.report(wqk.scan(ref), "r.html")
what a scan reads | wqk.explain(ref) | wqk.explain(model)
is it the same | bool(wqk.same(ref, ref)) | wqk.same(ref, ref).same
is it another | 1 / (not wqk.same(ref, other)) | 1 / (not wqk.same(ref, other).same)
why not the same | wqk.same(ref, other).reason | wqk.same(ref, other).causes
same by layer | wqk.same(ref, ref).frame
same as JSON | json.dumps(wqk.same(ref, other).to_dict())
same, every tensor | wqk.same(ref, ref, all=True) | wqk.same(ref, ref, everything=True)
the repair | wqk.same(ref, other).repair | wqk.same(ref, other).fix
show a head | wqk.show(ref, layer=0, head=1) | wqk.show(ref, 0, 1)
save what is shown | wqk.show(ref, 0, 1).save("s.png") | wqk.show(ref, 0, 1).savefig("s.png")
show the coupling | wqk.show(ref, layer=0, coupling=True)
are they related | bool(wqk.kin(ref, other)) | wqk.kin(ref, other).related
what kin says | wqk.kin(ref, other).verdict | wqk.kin(ref, other).conclusion
kin's numbers | wqk.kin(ref, other).frame
compose's frame | wqk.compose(pair).frame
the strongest pairs | wqk.compose(pair).top(5) | wqk.compose(pair).frame.head(5)
compose, keys only | wqk.compose(pair, kind="K") | wqk.compose(pair, kind="k")
draw compose | wqk.compose(pair).plot() | wqk.compose(pair).save("c.png")
parts of a text | wqk.parts(net, tokens) | wqk.parts(net, tokens=tokens)
diff's frame | wqk.diff(ref, ref).frame
heads that moved most | wqk.diff(ref, ref, heads=True).heads.frame | wqk.diff(ref, ref).heads
token pairs | wqk.tokens(net, layer=0, head=1).frame | wqk.tokens(net, 0, 1).frame
five pairs of tokens | wqk.tokens(net, 0, 1, top=5) | wqk.tokens(net, 0, 1, k=5)
explain as a frame | wqk.explain(ref).frame
bytes to be read | wqk.explain(ref).bytes | wqk.explain(ref).bytes_to_read
verify a module | wqk.verify(net, batch) | wqk.verify(net)
was it right | bool(wqk.verify(net, batch)) | wqk.verify(net, batch).ok
logits of a batch | wqk.logits(net, batch).frame
the largest logit | wqk.logits(net, batch).max | wqk.logits(net, batch).largest
scores in a loop | wqk.Monitor(net)(0) | wqk.Monitor(net, None)(0)
clip by a batch | wqk.clip_(net, 100, wqk.logits(net, batch)) | wqk.clip_(net, 100, batch)
a head at a distance | rotary[1, 0].at(4) | rotary[1, 0].at(distance=4)
"""

FIRST, ANY = 66, 74

# Calls that cannot mean anything, and what their errors say.
MISTAKES = """
wqk.logits(ref, batch) | CheckpointError | expected an nn.Module
wqk.Monitor(ref) | CheckpointError | a model in memory is followed: expected an nn.Module
wqk.Monitor(net)(-1) | RunError | number of optimizer steps done so far, got -1
wqk.Monitor(net).look(2.5) | RunError | number of optimizer steps done so far, got 2.5
wqk.Monitor(net, steps=3) | RunError | steps must be numbers, or 'log' for 1, 2, 4, 8, ...; got 3
wqk.Monitor(net, steps=[-3]) | RunError | number of optimizer steps done so far, got -3
wqk.Monitor(net, every="9") | RunError | every N steps with N at least 1, got every=9
wqk.Monitor(net).plot() | AttributeError | did you mean 'table.plot()'
wqk.clip_("ckpt.pt") | CheckpointError | a model in memory is clipped
wqk.clip_(net, "100") | FormError | limit must be a positive number, got '100'
wqk.initialize_(ref, "symmetric") | CheckpointError | a model in memory is initialized
wqk.report("folder") | TableError | no such file or folder
wqk.report(net) | TableError | scan it first
wqk.report(model) | TableError | got Model
wqk.scan({"model": net.state_dict()}) | CheckpointError | under 'model'
wqk.open(str(ref)[:-2] + "r") | CheckpointError | did you mean
wqk.same(ref, other).reasons | AttributeError | did you mean 'causes'
wqk.explain(ref).bytes | AttributeError | did you mean 'bytes_to_read'
wqk.scan(ref, layers=0) | CheckpointError | such as layers=[0, -1]; got 0
wqk.scan(ref, distances="0,5") | CheckpointError | such as distances=[0, 64]; got '0,5'
wqk.scan(ref, measures="ceiling") | CheckpointError | such as measures=['ceiling']
wqk.same(ref, ref, layers="1") | CheckpointError | such as layers=[0, -1]; got '1'
wqk.same(ref, ref, up_to="heads") | CheckpointError | such as up_to=['heads']
wqk.same(ref, ref, tolerance=-1.0) | CheckpointError | at least 0, got -1.0
wqk.tokens(net, 0, 1, top=0) | CheckpointError | 1 or more; got 0
wqk.verify(ref, batch) | CheckpointError | a batch is for a module in memory
wqk.demo_model("enc") | CheckpointError | one of encoder, decoder, induction
wqk.scan("") | CheckpointError | got an empty name
wqk.scan(torch.nn.Linear(3, 3)) | UnknownFamily | it names no model type
"""


@pytest.fixture
def names(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    torch = pytest.importorskip("torch")
    monkeypatch.chdir(tmp_path)
    ref, random = wqk.demo_model("encoder"), np.random.default_rng(0)
    return {
        "wqk": wqk, "np": np, "ref": ref, "model": wqk.open(ref),
        "other": wqk.demo_model("decoder"), "pair": wqk.demo_model("induction"),
        "rotary": wqk.open(small.llama(sides="qkvo", name="llama")),
        "json": json, "torch": torch, "batch": torch.arange(8)[None] % 9,
        "tokens": torch.arange(64)[None] % 9,
        "a": random.standard_normal((8, 2)), "b": random.standard_normal((8, 2)), "x": np.ones(128),
        "net": small.running(key_heads=2),
    }  # fmt: skip


def tried(goals: str, names: dict[str, Any]) -> Iterator[tuple[str, list[str]]]:
    """Each goal with what its guesses raised."""
    for line in goals.strip().splitlines():
        goal, *guesses = line.split(" | ")
        errors = []
        for guess in guesses:
            try:
                eval(guess, dict(names))
                errors.append("")
            except Exception as error:
                errors.append(f"{guess}: {type(error).__name__}: {error}")
        yield goal, errors


@pytest.mark.usefixtures("unchecked_arguments")
def test_first_guesses_work(names):
    found = dict(tried(GOALS, names))
    failed = "\n".join(error for errors in found.values() for error in errors if error)
    assert sum(not errors[0] for errors in found.values()) >= FIRST, failed
    assert sum("" in errors for errors in found.values()) >= ANY, failed


@pytest.mark.usefixtures("unchecked_arguments")
def test_a_mistaken_call_is_told_what_to_do(names):
    for line in MISTAKES.strip().splitlines():
        call, kind, words = line.split(" | ")
        ((_, (message,)),) = tried(f"{call} | {call}", names)
        assert f"{kind}: " in message, message or call
        assert words in message, message
