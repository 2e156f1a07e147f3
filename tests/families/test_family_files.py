"""A family's file: what is wrong in it is named with its place, and with the key that was meant."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace
from tests import small
from tools.mutating.mutants import data_mutants

import wqk
from wqk.checkpoints.modules import StateDict
from wqk.errors import CheckpointError, UnknownFamily
from wqk.families.family import families, parse_family
from wqk.families.model_types import default_values, part_types
from wqk.families.rules import TENSOR_KEYS, AttentionRule

DATA = Path(wqk.__file__).parent / "families" / "data"

HEAD = 'name = "toy"\nmodel_types = "toy"\n'
RULE = HEAD + '[[attention]]\nstack = "encoder"\nquery = "q{layer}"\nkey = "k{layer}"\n'


def test_single_values_stand_for_lists_of_one():
    family = parse_family(RULE + "scale = 2\n", "toy.toml")
    assert family.model_types == ("toy",)
    (rule,) = family.attention
    assert (rule.query, rule.scale, rule.norm_offset) == (("q{layer}",), (2,), 0.0)
    assert parse_family(RULE.replace("[[attention]]", "[attention]"), "toy.toml").attention == (
        parse_family(RULE, "toy.toml").attention
    )


FUSED = HEAD + '[[attention]]\nstack = "encoder"\nfused = "qkv{layer}"\n'
LATENT = (
    RULE + 'layout = "latent"\nkey_inner = "c{layer}"\nkey_inner_norm = "n{layer}"\n'
    'content_width = "content"\nposition_width = "position"\n'
)


# Parts of family files that are wrong, and the message.
WRONG_FILES = [
    ("nmae = 'toy'\nRULE", "unknown key 'nmae'; did you mean 'name'"),
    ("RULE\nqeury = 'q'", "unknown key 'qeury' in PLACE; did you mean 'query'"),
    ("RULE\nzzzz = 1", "unknown key 'zzzz' in PLACE; known are stack, kind"),
    ("RULE\n[attention.rotary]\nordr = 1", "in 'rotary' of PLACE; did you mean 'order'"),
    ("RULE\n[attention.rotary]\nbase = 'b'", "missing key 'order' in 'rotary' of PLACE"),
    (
        "RULE\n[attention.rotary]\norder = 'half'\n"
        "kinds = { full = { parameters = 'main', base = 'b', sclaed = false } }",
        "unknown key 'sclaed' in 'rotary.kinds.*' of PLACE; did you mean 'scaled'",
    ),
    (
        "HEAD\n[[attention]]\nstack = 3\nquery = 'q{layer}'\nkey = 'k{layer}'",
        "'stack' of PLACE: expected text, got a whole number",
    ),
    ("RULE\ncausal = 1", "'causal' of PLACE: expected true or false, got a whole"),
    ("RULE\nnorm_offset = true", "'norm_offset' of PLACE: expected a number, got true or"),
    ("RULE\nwindow = ['w', 1]", "'window\\[1\\]' of PLACE: expected text, got a whole"),
    ("RULE\nrotary = 1", "'rotary' of PLACE: expected a table"),
    ("RULE\nlayout = 'seperate'", "PLACE: unknown layout 'seperate'; expected one of"),
    ("RULE\noutput = {a = 1}", "'output\\[0\\]' of PLACE: expected text, got a table"),
    (
        "HEAD\n[[attention]]\nstack = 'encoder'\nquery = 'q{layer}'\nkey_bias = 'k{layer}'",
        "unknown key 'key_bias'",
    ),
    (
        "HEAD\n[[attention]]\nstack = 'encoder'\nquery = 'q{layer}'\nkey = ['k', 'l']",
        "as many spellings as each other",
    ),
    ("HEAD\n[[attention]]\nstack = 'encoder'", "needs 'query' and 'key', or 'fused'"),
    ("RULE\nlayout = 'latent'", "'latent' lacks 'key_inner', 'key_inner_norm', 'content_width'"),
    ("LATENT\nquery_inner = 'd{layer}'", "'latent' lacks 'query_inner_norm'; expected"),
    ("RULE\nfused = 'qkv{layer}'", "PLACE: .*, got both; remove one of them$"),
    ("FUSED", "layout 'separate' is not that of a 'fused' tensor; expected sectioned \\(all"),
    ("FUSED\nlayout = 'fused'", "layout 'fused'; expected .*sectioned \\(all queries, then"),
    ("FUSED\nsections = [['query', '*'], ['key', '*']]", "'q', .* got 'query', 'key'; correct"),
    ("FUSED\nsections = [['q', '*'], ['k', '*'], ['q', '*']]", "got 'q', 'k', 'q'; correct"),
    ("FUSED\nsections = [['q', '*'], ['k']]", "a part has no width; .*, got \\['k'\\]; add"),
    ("FUSED\nsections = [['q', '*'], []]", "a part has no width"),
    ("FUSED\nsections = [['q', '*'], ['k', 'width //']]", "'sections': 'width //' is not"),
    ("FUSED\nlayout = 'conv1d'\nsections = [['q', '*'], ['k', '*']]", "got the layout 'conv1d'"),
    ("RULE\nsections = [['q', '*'], ['k', '*']]", "'separate' and no fused tensor; correct"),
    ("RULE\nkind = 'slef'", "unknown kind 'slef'; expected one of self, cross, linear"),
    ("RULE\nwindow_counts = 'all'", "unknown window_counts 'all'; expected one of '', each side"),
    ("RULE\nwindow_axes = 3", "unknown window_axes 3; expected one of 1, 2"),
    ("RULE\nrotary_only = ['norms']", "unknown rotary_only 'norms'; expected one of norm, window"),
    ("RULE\nposition_uses = 'value'", "unknown position_uses 'value'; expected one of query"),
    ("RULE\nposition_uses_if = { keys = 'a' }", "unknown position_uses_if 'keys'"),
    ("RULE\n[attention.rotary]\norder = 'pairs'", "'rotary' of PLACE: unknown order 'pairs'"),
    ("RULE\n[attention.rotary]\norder = 'half'\naxes = 0", "unknown axes 0; expected one of 1"),
    ("HEAD", "at least one \\[\\[attention\\]\\] table"),
    ("model_types = 'toy'", "missing key 'name'$"),
    ("name = ", "not valid TOML"),
]


@pytest.mark.parametrize(("text", "message"), WRONG_FILES)
def test_what_is_wrong_is_named_with_its_place(text, message):
    expected = message.replace("PLACE", r"the first \[\[attention\]\]")
    starts = {"LATENT": LATENT, "FUSED": FUSED, "RULE": RULE, "HEAD": HEAD}
    for name, start in starts.items():
        text = text.replace(name, start)
    with pytest.raises(UnknownFamily, match=f"^toy.toml: .*{expected}"):
        parse_family(text, "toy.toml")


def test_a_file_of_latent_attention_with_all_keys_is_read() -> None:
    (rule,) = parse_family(LATENT, "toy.toml").attention
    assert rule.layout == "latent"


def test_no_key_says_what_holds_without_it() -> None:
    idle = []
    for name in families():
        text = (DATA / f"{name}.toml").read_text(encoding="utf-8")
        for mutant in data_mutants(Path(name), text):
            if mutant.what.endswith("left out"):
                with suppress(UnknownFamily):  # a key that has to be there
                    is_equal = parse_family(mutant.text, name) == families()[name]
                    idle += [str(mutant)] * is_equal
    assert idle == []


def test_no_file_repeats_what_every_type_of_it_has_by_default() -> None:
    """A default of a file counts only where the class of `transformers` has none."""
    for family in families().values():
        for rule in family.attention:
            types_of_part = [part_types(t).get(rule.config, t) for t in family.model_types]
            defaults_of_types = [
                default_values(kind) or default_values(rule.model_type) for kind in types_of_part
            ]
            assert [
                k for k in rule.defaults if all(k in defaults for defaults in defaults_of_types)
            ] == [], family.name


# Defaults of keys that wqk reads in every configuration.
ALWAYS_READ = {"kinds_by_number", "windowed_kind", "latent_norm_epsilon", "global_attn_indexes"}
# Another attention's scores are in one softmax with the form's, without a position.
JOINED = {"deepseek-v4", "longformer", "pegasus-x", "qwen4-exp-text"}
# Tables that are partial for a reason that no other key shows.
BEYOND = {
    "beam",
    "deepseek-v4",
    "diffllama",
    "gemma4-audio",
    "informer",
    "mistral4",
    "swinv2",
    "wavlm",
}

# Half of the heads are convolutions; outputs are made in groups; the last block's text has none.
WITHOUT_OUTPUT = {"convbert", "deepseek-v4", "diffusers-flux"}


def test_what_rules_say_has_its_reason() -> None:
    """A default is of a key that is read; what is added to a whole score is named."""
    for family in families().values():
        for rule in family.attention:
            rule_without_defaults = str(replace(rule, defaults={}))
            assert {
                key for key in rule.defaults if key not in rule_without_defaults
            } <= ALWAYS_READ, family.name
            numbered = all(name.count("{") == 1 for name in (*rule.query, *rule.fused))
            assert rule.layers or numbered, family.name  # else nothing counts layers
            named = rule.whole_score or rule.position or family.name in JOINED
            has_circuit = rule.output and (rule.value or rule.fused or rule.layout == "latent")
            assert has_circuit or rule.between or family.name in WITHOUT_OUTPUT, family.name
            assert named or rule.partial, family.name
            is_explained = family.name in BEYOND or rule.partial.startswith("beside")  # LongT5's
            assert rule.between or bool(named and rule.partial) == is_explained, family.name
            assert not (rule.kind == "cross" and rule.causal), family.name


def test_stacks_are_called_as_their_tensors() -> None:
    """The model types decide if no tensor is called encoder or decoder.

    Cross-attention of BERT's kin, which a switch brings, makes a decoder of what it is in.
    """
    for family in families().values():
        for rule in family.attention:
            names = "".join((*rule.query, *rule.fused)).replace("encoder_attn", "")
            crossing = "crossattention" in names and "qformer" not in family.name
            sources = [names] if re.search("(en|de)coder", names) else family.model_types
            stacks_of_names = {
                stack
                for stack in ("encoder", "decoder")
                if all(stack in source for source in sources)
            }
            stacks_of_names = {"decoder"} if crossing else stacks_of_names
            if len(stacks_of_names) == 1 and ("crossattention" in names) == crossing:
                wrong_stack = {"encoder": "decoder", "decoder": "encoder"}[stacks_of_names.pop()]
                assert not rule.stack.startswith(wrong_stack), (family.name, rule.stack)
            sees_all = rule.kind == "self" and not (rule.causal or rule.causal_if)
            assert not sees_all or rule.stack != "decoder" or "decoder" in names + family.name


# Families whose cross-attention lies within an encoder: learned queries attend to a picture, and
# prompts and pictures, or two pictures, to each other.
CROSSING_ENCODERS = {
    "blip-2-qformer",
    "efficientloftr",
    "idefics2-perceiver",
    "instructblip-qformer",
    "instructblipvideo-qformer",
    "lightglue",
    "perceiver",
    "sam3-detr-encoder",
    "sam3-geometry-encoder",
}


def test_encoders_see_all_tokens_unless_a_switch_masks_them() -> None:
    """A mask that is always there makes a decoder; cross-attention lies in a decoder, too."""
    crossing = set()
    for family in families().values():
        for rule in family.attention:
            has_switch = bool(rule.causal_if or rule.causal_under)
            if rule.kind == "self" and not rule.between and rule.stack in ("encoder", "decoder"):
                assert has_switch <= (rule.stack == "encoder"), family.name
                is_always_masked = rule.causal and not has_switch
                assert is_always_masked <= (rule.stack == "decoder"), family.name
            if rule.kind == "cross" and rule.stack == "encoder":
                crossing.add(family.name)
    assert crossing == CROSSING_ENCODERS


# Both stacks are in one configuration.
TEXT_AND_VISION = {"lxmert"}


def test_vision_has_patches_and_text_has_a_vocabulary() -> None:
    """Classes of configurations in `transformers` have the sizes of what a stack reads."""
    transformers = pytest.importorskip("transformers")
    sizes_of_pictures = {"image_size", "patch_size", "patch_embed_hidden_size"}
    for family in families().values():
        for rule in family.attention:
            if rule.stack not in ("vision", "text") or family.name in TEXT_AND_VISION:
                continue
            types = {part_types(kind).get(rule.config, kind) for kind in family.model_types}
            for kind in types & set(transformers.CONFIG_MAPPING):
                settings = set(transformers.CONFIG_MAPPING[kind].__dataclass_fields__)
                has_vocabulary = "vocab_size" in settings
                has_pictures = not settings.isdisjoint(sizes_of_pictures)
                is_text = rule.stack == "text"
                assert (has_vocabulary, has_pictures) == (is_text, not is_text), (
                    f"{family.name}: {kind} is called {rule.stack}"
                )


# Tensors that are in the modules of the queries, or in none of them.
WITH_QUERIES = ("key", "value", "query_norm", "key_norm")
# Of several spellings, these have as many as queries have.
PAIRED = (*WITH_QUERIES, "output")
# Families with a tensor whose spellings are not those of queries: their files mix two namings, or
# queries without an inner projection have a name of their own.
SPELLED_OTHERWISE = {"bailing-hybrid", "cosmos3-edge", "mistral-large4", "qianfan-ocr-vision"}


def test_every_spelling_of_queries_has_other_tensors_beside_it() -> None:
    """A file that calls queries otherwise has values, outputs and norms in the same place."""
    names_of_families = set()
    for family in families().values():
        for rule in family.attention:
            for role in () if rule.between else ("key", *TENSOR_KEYS):
                names = getattr(rule, role)
                if names and not are_spelled_as_queries(rule, role, names):
                    names_of_families.add(family.name)
    assert names_of_families == SPELLED_OTHERWISE


def are_spelled_as_queries(rule: AttentionRule, role: str, names: tuple[str, ...]) -> bool:
    """Return whether names of a role lie in the layers, and modules, that queries lie in."""
    queries = (*rule.query, *rule.fused)
    is_paired = role in PAIRED and rule.layout != "latent" and len(queries) > 1
    if is_paired and len(names) != len(queries):
        return False
    if role in WITH_QUERIES:
        modules, modules_of_role = (
            {name.rpartition(".")[0] for name in spellings} for spellings in (queries, names)
        )
        if not modules.isdisjoint(modules_of_role) and modules != modules_of_role:
            return False
    layers, layers_of_role = (
        {name.partition("{layer}")[0] for name in spellings} for spellings in (queries, names)
    )
    is_numbered = all("{layer}" in name for name in (*queries, *names))
    return layers == layers_of_role or not is_numbered


def norms_of_inputs(rule: AttentionRule) -> bool:
    return bool(rule.input_norm or rule.first_input_norm or rule.key_input_norm)


# What all tables of a family have in common, and the families whose tables differ in it.
COMMON: dict[str, tuple[Callable[[AttentionRule], Any], set[str]]] = {
    "kind of the norms of inputs": (
        lambda rule: rule.input_norm_kind if norms_of_inputs(rule) else None,
        {
            "cosmos3-edge",
            "evolla-model",
            "litgpt",
            "megatron-core",
            "mllama",
            "musicgen",
            "transformer-lens",
        },
    ),
    "epsilon of the norms of inputs": (
        lambda rule: rule.input_norm_epsilon if norms_of_inputs(rule) else None,
        {"bridgetower", "transformer-lens"},
    ),
    "kind of the norms of queries": (
        lambda rule: rule.norm if rule.query_norm else None,
        {"litgpt", "megatron-core"},
    ),
    "norms of inputs": (
        lambda rule: bool(rule.input_norm),
        {
            "blip-2-qformer",
            "chameleon",
            "d-fine",
            "deberta-v2",
            "diffusers-wan",
            "grounding-dino",
            "instructblip-qformer",
            "instructblipvideo-qformer",
            "lxmert",
            "mask2former",
            "patchtst",
            "pegasus-x",
            "sam",
            "siglip",
            "siglip-vision",
            "xclip",
        },
    ),
    "values": (lambda rule: bool(rule.value or rule.fused), set()),
    "outputs": (lambda rule: bool(rule.output), {"diffusers-flux"}),
    "key heads": (lambda rule: bool(rule.key_heads), {"evolla-model", "mllama"}),
    "scale": (lambda rule: rule.scale, {"groupvit-vision-model", "musicgen", "transformer-lens"}),
    "order of rotary positions": (
        lambda rule: rule.rotary and rule.rotary.order,
        {"pixtral", "step3p5-vision", "transformer-lens"},
    ),
    "base of rotary positions": (lambda rule: rule.rotary and rule.rotary.base, {"nomic-bert"}),
    "fraction of rotary positions": (
        lambda rule: rule.rotary and rule.rotary.fraction,
        {"nomic-bert"},
    ),
}


def added_settings(source: str) -> Iterator[str]:
    """Yield the settings that code adds to a configuration: the keys of what it calls ``added``."""
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Subscript(ast.Name("added"), ast.Constant(str() as key), ast.Store()):
                yield key
            case (
                ast.Assign([ast.Name("added")], ast.Dict(keys))
                | ast.AnnAssign(ast.Name("added"), _, ast.Dict(keys))
                | ast.AugAssign(ast.Name("added"), _, ast.Dict(keys))
            ):
                yield from (key.value for key in keys if isinstance(key, ast.Constant))


def test_settings_that_formats_add_are_read() -> None:
    source = Path(wqk.__file__).parent / "checkpoints" / "configurations.py"
    settings = {*added_settings(source.read_text(encoding="utf-8"))}
    assert {"rope_scaling", "layer_norms", "score_factor"} <= settings
    quoted: set[str] = set()
    for path in {*DATA.parent.glob("*.py")} - {DATA.parent / "guessing.py"}:  # which writes rules
        quoted |= {*re.findall(r'"(\w+)"', path.read_text(encoding="utf-8"))}
    for path in DATA.glob("*.toml"):
        values = re.sub(r"^\w+ = |#.*", "", path.read_text(encoding="utf-8"), flags=re.MULTILINE)
        quoted |= {*re.findall(r"\w+", values)}
    assert settings - quoted == set()


def test_conditions_of_positions_name_every_side_that_the_positions_use() -> None:
    for family in families().values():
        for rule in family.attention:
            assert set(rule.position_uses_if) in (set(), set(rule.position_uses)), family.name


@pytest.mark.parametrize("common", COMMON)
def test_tables_of_a_family_differ_only_where_their_models_do(common: str) -> None:
    value_of, differing = COMMON[common]
    names = set()
    for family in families().values():
        values = [value_of(rule) for rule in family.attention if not rule.between]
        known = [value for value in values if value is not None]
        if any(value != known[0] for value in known):
            names.add(family.name)
    assert names == differing


def test_an_absent_number_of_heads_is_answered_with_the_numbers_that_there_are(
    tmp_path: Path,
) -> None:
    checkpoint = small.llama(layers=1)
    config = {"depth": 1, "n_att": 4, "width": 24, "model_type": "homemade"}
    rule = (
        "[[attention]]\nstack = 'encoder'\nlayers = 'depth'\nheads = 'HEADS'\n"
        "query = 'model.layers.{layer}.self_attn.q_proj'\n"
        "key = 'model.layers.{layer}.self_attn.k_proj'\n"
    )
    messages = {
        "n_heads": "=N; the configuration has depth (1), n_att (4), width (24)",
        "n_atts": "=N; did you mean 'n_att'?",
    }
    path = tmp_path / "home.toml"
    for key, advice in messages.items():
        path.write_text("name = 'home'\n" + rule.replace("HEADS", key))
        with pytest.raises(CheckpointError) as error:
            wqk.open(StateDict(checkpoint._arrays, config, "tiny"), family=path)
        assert f"config.json lacks {key}, which the family file names as 'heads'" in str(
            error.value
        )
        assert str(error.value).endswith(advice)


def test_an_explanation_names_what_a_file_leaves_out(tmp_path: Path) -> None:
    file = tmp_path / "plain.toml"
    text = """
name = "plain"
[[attention]]
stack = "decoder"
query = "{layer}.q"
key = "{layer}.k"
"""
    tensors = {f"0.{name}": np.eye(8, dtype=np.float32) for name in "qk"}

    def notes(further: str) -> str:
        file.write_text(text + further)
        model = wqk.open(tensors, family=file, heads_per_layer=2)
        return " ".join(wqk.explain(model).notes)

    assert "states no positions (rotary, position), no norm before the projections" in notes("")
    assert "no mask (causal, window); wqk computes without" in notes("")
    assert "no mask" not in notes("causal = true\n")
    assert "no positions" not in notes('position = "alibi"\n')
    shipped = wqk.explain(wqk.demo_model("encoder")).notes
    assert not any("the family file states" in note for note in shipped)
