"""Closer looks: images, couplings, distances, differences; values first, then their pictures."""

from __future__ import annotations

import itertools
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests import small
from tests.command import run
from tests.small import llama

import wqk
from wqk.errors import FormError, TableError
from wqk.forms.images import matrix_image
from wqk.inspecting.showing import coupling_view
from wqk_lab.figures.by_layer import distance_rows

ENCODER = str(wqk.demo_model("encoder"))
DECODER = str(wqk.demo_model("decoder"))


def shown_as_json(*arguments: str) -> Any:
    """JSON of ``wqk show``, as the standard has it: without NaN and infinity."""
    return json.loads(run("show", *arguments, "--json").stdout, parse_constant=pytest.fail)


def read_heads(query: np.ndarray, key: np.ndarray) -> wqk.Block:
    """A block with these heads, (H, R, D) each."""
    sides = {"q": query, "k": key}.items()
    tensors = {f"layers.0.{s}_proj.weight": w.reshape(-1, w.shape[-1]) for s, w in sides}
    return wqk.open(tensors, heads_per_layer=len(query))[0]


def test_an_image_keeps_the_largest_entry_of_each_pixel() -> None:
    rng = np.random.default_rng(0)
    form = wqk.BilinearForm(rng.standard_normal((30, 4)), rng.standard_normal((45, 4)))
    dense = form.dense()
    image = matrix_image(form, side=15)
    assert image.pixels.shape == (15, 15)
    for i in range(15):
        for j in range(15):
            block = dense[2 * i : 2 * i + 2, 3 * j : 3 * j + 3].ravel()
            assert image.pixels[i, j] == pytest.approx(block[np.abs(block).argmax()])
    np.testing.assert_allclose(image.row_norms, np.linalg.norm(dense, axis=1))
    np.testing.assert_allclose(matrix_image(form, side=99).pixels, dense)


def test_bands_leave_out_pruned_heads() -> None:
    """Head 1 of layer 0 and all of layer 1 score nothing."""
    checkpoint = llama()
    tensors = checkpoint._arrays
    tensors["model.layers.0.self_attn.q_proj.weight"][6:12] = 0
    tensors["model.layers.1.self_attn.k_proj.weight"][:] = 0
    rows = wqk.scan(checkpoint, measures=["bands"]).frame
    is_scored = rows["rotary_low_share"].is_finite().to_list()
    assert is_scored == [True, True, False, True, True] + [False] * 5


def test_terms_of_a_difference_are_those_of_its_factors() -> None:
    table = wqk.diff(
        wqk.open(ENCODER, family=None), wqk.open(DECODER, family=None), terms=True
    ).heads.frame
    old, new = (wqk.open(ref)[2][1] for ref in (ENCODER, DECODER))
    query, key = new.query - old.query, new.key - old.key
    first, second = query @ old.key.T + old.query @ key.T, query @ key.T
    row = table.filter(layer=2, head=1).row(0, named=True)
    for name, term in (("first", first), ("second", second)):
        norm, size = np.linalg.norm(term), np.linalg.norm(term, 2)
        expected = {"norm": norm, "spectral_norm": size, "stable_rank": (norm / size) ** 2}
        shown = {column: row[f"{name}_order_{column}"] for column in expected}
        assert shown == pytest.approx(expected, rel=1e-5)
    printed = run("diff", ENCODER, DECODER, "--terms").output
    assert "term of second order" in printed
    assert "stable rank" in printed


def test_an_image_of_a_stack_is_refused() -> None:
    with pytest.raises(FormError, match="one form"):
        matrix_image(wqk.BilinearForm(np.ones((2, 4, 1)), np.ones((2, 4, 1))))


def test_show_names_the_outlying_rows_and_columns() -> None:
    shown = shown_as_json(DECODER, "--layer", "3")
    dense = wqk.open(DECODER)[3].form.dense()
    norms = np.linalg.norm(dense, axis=0)
    outlying = np.flatnonzero(norms > norms.mean() + 2 * norms.std(ddof=1))
    assert shown["outlying_columns"] == outlying.tolist()
    assert shown["symmetry"] == pytest.approx(np.sum(dense * dense.T) / np.sum(dense**2), abs=1e-5)


def test_the_coupling_of_planted_transposes_is_one() -> None:
    coupling = np.array(shown_as_json(ENCODER, "--layer", "0", "--coupling")["coupling"])
    np.testing.assert_allclose(coupling, coupling.T, atol=1e-6)
    heads = [wqk.open(ENCODER)[0][h] for h in range(4)]
    np.testing.assert_allclose(np.diag(coupling), [wqk.symmetry(h) for h in heads], atol=1e-5)
    matrix, color_scale = wqk.show(ENCODER, layer=0, coupling=True).plot().axes
    assert "tr" in color_scale.get_ylabel()
    assert matrix.get_xlabel() == "head b\n(printed: coupling × 100)"


def test_the_strongest_pairs_are_listed_with_the_terms_of_the_layer(tmp_path: Path) -> None:
    line = ("show", ENCODER, "--layer", "0", "--coupling", "--out", str(tmp_path / "pairs.png"))
    lines = run(*line).stdout.splitlines()
    coupling = np.array(shown_as_json(ENCODER, "--layer", "0", "--coupling")["coupling"])
    pairs = [line.split()[:4] for line in lines if " and " in line and ":" not in line]
    assert [int(first) for first, *_ in pairs[:2]] == [0, 1]
    assert len(pairs) == 6
    listed = [float(value) for *_, value in pairs]
    assert listed == sorted(listed, reverse=True)
    for first, _, second, value in pairs:
        assert float(value) == pytest.approx(coupling[int(first), int(second)], abs=5e-4)
    terms = wqk.head_terms(wqk.open(ENCODER)[0].heads)
    total = wqk.symmetry(wqk.open(ENCODER)[0].form)
    sentence = (
        f"symmetry of the layer {total:.3f}: {terms.within:.3f} within heads, "
        f"{terms.between:.3f} between heads ({terms.within_random:.3f} within heads if "
    )
    assert sentence in " ".join(" ".join(lines).split())
    values = wqk.show(ENCODER, layer=0, coupling=True).values
    assert values["symmetry_between_heads"] == pytest.approx(terms.between)
    assert values["symmetry_within_heads"] + terms.between == pytest.approx(values["symmetry"])


def test_further_pairs_are_counted() -> None:
    five_heads = wqk.open(llama(heads=5, key_heads=5))[0]  # 10 pairs
    view = coupling_view(five_heads, "five")
    assert view.note.startswith("2 more pairs: in the picture, and in --json")


@pytest.fixture
def pruned(tmp_path: Path) -> str:
    """The encoder without the queries of head 1 in layer 0."""
    folder = Path(shutil.copytree(ENCODER, tmp_path / "pruned"))
    is_kept = np.arange(128) // 32 != 1

    def prune(name: str, tensor: np.ndarray) -> np.ndarray:
        return (tensor.T * is_kept).T if ".layer.0.attention.self.query." in name else tensor

    return str(small.edit(folder, prune))


def test_a_pruned_head_has_no_scores(pruned: str, tmp_path: Path) -> None:
    assert shown_as_json(pruned, "--layer", "0", "--head", "1")["symmetry"] is None
    coupling = shown_as_json(pruned, "--layer", "0", "--coupling")["coupling"]
    assert coupling[1] == [None] * 4
    assert None not in (coupling[0][0], coupling[2][3])
    for view, note in ((("--head", "1"), "the form is zero"), (("--coupling",), "pair 0 and 3")):
        out = tmp_path / "pruned.png"
        assert note in run("show", pruned, "--layer", "0", *view, "--out", str(out)).stdout
        assert out.exists()


def test_the_strongest_pair_may_be_negative() -> None:
    """Heads 0 and 1 are each other's negative transpose; no pair is positive."""
    a, b, c, d = np.eye(4)
    query = np.stack([a, -b, c])[:, None]
    attention = read_heads(query, np.stack([b, a, d])[:, None])
    subtitle = coupling_view(attention, "three heads").subtitle
    assert subtitle == "strongest pair 0 and 1: -1.00 (minus the transpose); 0% of pairs positive"
    silent = read_heads(0 * query, query)
    assert repr(coupling_view(silent, "none")) == "none, coupling of heads\nno two heads to compare"


@pytest.mark.parametrize(
    "arguments",
    [
        ("show", ENCODER, "--layer", "-1", "--out"),
        ("show", ENCODER, "--layer", "0", "--head", "2", "--out"),
        ("show", ENCODER, "--layer", "0", "--coupling", "--out"),
        ("diff", ENCODER, ENCODER, "--picture"),
        ("compose", str(wqk.demo_model("induction")), "--picture"),
        ("same", ENCODER, ENCODER, "--picture"),
    ],
)
@pytest.mark.parametrize(
    ("ending", "start"), [(".png", b"\x89PNG"), (".pdf", b"%PDF"), (".svg", b"<?xml")]
)
def test_pictures_are_written(tmp_path, arguments, ending, start):
    path = tmp_path / f"picture{ending}"
    run(*arguments, path)
    assert path.read_bytes().startswith(start)


def test_a_difference_is_scored_as_the_dense_difference_is() -> None:
    frame = wqk.diff(ENCODER, DECODER).frame
    assert frame.height == 4 * (1 + 4)
    for layer in range(4):
        before, after = (wqk.open(ref)[layer].form.dense() for ref in (ENCODER, DECODER))
        row = frame.filter(layer=layer).row(0, named=True)
        step = after - before
        norms = np.linalg.norm(before), np.linalg.norm(after)
        assert row["head"] is None
        assert row["moved"] == pytest.approx(np.linalg.norm(step) / norms[0], rel=1e-5)
        assert row["cosine"] == pytest.approx(np.sum(before * after) / np.prod(norms), abs=1e-5)
        symmetry = np.sum(step * step.T) / np.sum(step**2)
        assert row["symmetry"] == pytest.approx(symmetry, abs=1e-5)


def test_diff_prints_layers_and_heads() -> None:
    assert "moved" in run("diff", ENCODER, ENCODER).output
    rows = json.loads(run("diff", ENCODER, ENCODER, "--heads", "--json").stdout)["rows"]
    assert len(rows) == 20
    assert {row["moved"] for row in rows} == {0.0}


def test_titles_tell_the_attentions_of_a_model_apart() -> None:
    random = np.random.default_rng(0)
    shown = [("encoder", "self"), ("decoder", "self"), ("decoder", "cross")]
    kinds = [f"{stack}.layers.0.{kind}_attn" for stack, kind in shown]
    names = [f"{kind}.{side}_proj.weight" for kind, side in itertools.product(kinds, "qk")]
    tensors = {name: random.standard_normal((8, 8)) for name in names}
    model = wqk.open(tensors, heads_per_layer=2)
    titles = [wqk.show(model, 0, stack=stack, kind=kind).title for stack, kind in shown]
    assert titles == [f"state dict, {stack} {kind}, layer 0" for stack, kind in shown]
    self_attention = {name: tensor for name, tensor in tensors.items() if "self" in name}
    doubled = {name: 2 * tensor for name, tensor in self_attention.items() if "decoder" in name}
    before = wqk.open(self_attention, heads_per_layer=2)
    after = wqk.open(self_attention | doubled, heads_per_layer=2)
    assert "Layer 0 of the decoder (self-attention) moved most" in wqk.diff(before, after).result


def test_curves_over_distance_need_several_distances() -> None:
    near, far = (wqk.scan(llama(), distances=distances) for distances in ((0,), (0, 1, 4)))
    rows = distance_rows(far)
    assert sorted(rows["distance"].unique()) == [0, 1, 4]
    assert (rows["symmetry_untrained_low"] < rows["symmetry_untrained_high"]).all()
    for table in (None, near):
        with pytest.raises(TableError, match="at several distances"):
            distance_rows(table)
