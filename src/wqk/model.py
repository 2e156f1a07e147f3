"""The central class, `Model`: a checkpoint with its family and attention blocks, opened once.

Every function that reads a checkpoint accepts a `Model`, or opens one. Only `open` has the options
for the family, the numbers of heads and the access to the Hub.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any, Unpack, overload

from wqk._console import kind_in_words, spans
from wqk._guesses import METHOD_CALLS
from wqk._typing import FilePath
from wqk.attention import Block, Head
from wqk.checkpoints import Checkpoint, open_checkpoint
from wqk.errors import Advising, CheckpointError, called_as, demo_folder, errors_about, require_list
from wqk.families import (
    AttentionPlan,
    find_family,
    load_family,
    plan_attention,
    plan_mixers,
    with_head_counts,
)
from wqk.families.candidates import POSITIONAL, candidates, neighbors_of
from wqk.families.naming import layers_beyond
from wqk.forms import BilinearForm
from wqk.forms.arrays import is_number
from wqk.storage.references import HubOptions, check_options

# Attributes of similar libraries, and the expressions to use instead.
MODEL_SYNONYMS = {
    "attention": "layers",
    "block_count": "len(model)",
    **dict.fromkeys(
        ("W_E", "W_U", "embed", "embeddings", "unembed", "wte"),
        "wqk.tokens(model, layer, head), or model.checkpoint.tensors()",
    ),
    "cfg": 'n_layers, model.n_heads, model.d_model and model.config["name"]',
    "coupling": "wqk.coupling(model, layer=0)",
    "head": "model[layer, head]",
    "heads": "model[layer].heads",
    **dict.fromkeys(("heatmap", "imshow"), "wqk.show(model, layer)"),
    "layer": "model[layer]",
    **dict.fromkeys(
        ("form", "qk", "QK", "W_QK", "W_qk"), "model[layer].form, or model[layer, head].qk"
    ),
    **dict.fromkeys(("ov", "OV", "W_OV"), "model[layer].ov, or model[layer, head].ov"),
    **dict.fromkeys(("query", "q", "W_q", "W_Q"), "model[layer].W_Q, or model[layer, head].W_Q"),
    **dict.fromkeys(("key", "k", "W_k", "W_K"), "model[layer].W_K, or model[layer, head].W_K"),
    **dict.fromkeys(("value", "v", "W_v", "W_V"), "model[layer, head].W_V"),
    **dict.fromkeys(("output", "o", "W_o", "W_O"), "model[layer, head].W_O"),
    **dict.fromkeys(("cuda", "device", "to"), 'wqk.scan(model, device="cuda")'),
    **dict.fromkeys(("n_params", "num_parameters"), 'wqk.scan(model)["parameters"]'),
    "plot": "wqk.scan(model).plot()",
    **dict.fromkeys(("directionality", "scores", "symmetry", "to_pandas"), "wqk.scan(model)"),
    **dict.fromkeys(("named_parameters", "parameters", "state_dict"), "checkpoint.tensors()"),
    "tensors": "checkpoint.tensors()",
    **{verb: f"wqk.{verb}(model)" for verb in ("compose", "explain", "scan", "show", "verify")},
}


@called_as("wqk.open(ref)")
def open(
    ref: Any,
    *,
    family: FilePath | None = None,
    heads_per_layer: int | None = None,
    key_heads: int | None = None,
    **hub: Unpack[HubOptions],
) -> Model:
    """Open a model: find its queries and keys, without reading weights.

    Parameters
    ----------
    ref
        A folder or file; the folder of a training run, for its last step; a hub id such as
        ``google-bert/bert-base-uncased``, or with a revision, ``id@revision``; ``demo:encoder``,
        ``demo:decoder`` or ``demo:induction``, a small model of the package; an ``https://``
        address; an `nn.Module`; a state dict; a `Checkpoint`; or a `Model`, which is returned
        unchanged.
    family
        The name of a family of the package, such as ``"nanogpt"``, or a family file, to use instead
        of the family of the model type.
    heads_per_layer, key_heads
        Numbers of query and key heads, if the configuration does not contain them.
    **hub
        ``revision``, ``subfolder``, ``base``, ``token``, ``cache_dir``, ``local_files_only``: see
        `open_checkpoint`.

    Returns
    -------
    Model
        ``model[3]`` is the attention block of layer 3, ``model[3, 5]`` its head 5.

    Raises
    ------
    UnknownFamily
        No family describes the model, and no family can be guessed; or the file is not a family.
    CheckpointError
        The checkpoint does not exist, tensors are missing, or tensors do not fit the configuration.
    HubError
        The Hub, or another server, does not provide the checkpoint.

    Examples
    --------
    >>> import wqk
    >>> model = wqk.open(wqk.demo_model("decoder"))
    >>> model[2]
    Block(decoder self-attention, layer 2: 4 heads of width 32)
    >>> model[2, 1].qk
    BilinearForm(128 × 128, rank 32)
    """
    check_options("open", hub, known=("family", "heads_per_layer", "key_heads"))
    if isinstance(ref, Model):
        options = {
            "family": family,
            "heads_per_layer": heads_per_layer,
            "key_heads": key_heads,
            **hub,
        }
        if option := next((name for name, value in options.items() if value is not None), None):
            raise CheckpointError(
                f"{ref.name}: is already open; pass {option}= to wqk.open() instead"
            )
        return ref
    if isinstance(ref, str):
        ref = demo_folder(ref) or ref  # functions that run the model load the folder
    checkpoint = open_checkpoint(ref, **hub)
    if family:
        found_family = load_family(family)
    else:
        found_family = find_family(checkpoint, heads_per_layer is None)
    with errors_about(checkpoint.name):
        counted = with_head_counts(found_family, checkpoint, heads_per_layer, key_heads)
        plans = plan_attention(checkpoint, counted)
        mixers = plan_mixers(checkpoint, counted)
    checkpoint.notes = _notes(checkpoint, (*plans, *mixers))
    hub.pop("base", None)  # the opened adapter names the base; transformers has no such option
    return Model(checkpoint, plans, mixers, ref=ref, family_file=family, hub=hub)


def _one_number(numbers: Iterable[int], name: str) -> int:
    """Return a number that is equal in all blocks; `CheckpointError` if it differs."""
    distinct = sorted(set(numbers))
    if len(distinct) != 1:
        raise CheckpointError(
            f"the blocks of the model have different numbers of {name}, {distinct}; "
            "each block has its own: model[layer]"
        )
    return distinct[0]


def _notes(checkpoint: Checkpoint, plans: Sequence[AttentionPlan]) -> tuple[str, ...]:
    """Return the notes of a checkpoint, with notes on stored weights that no block uses."""
    notes = [*checkpoint.notes]
    queries: set[str] = set()
    for plan in plans:
        queries.update(part.name for part in plan.query.parts)
    if beyond := layers_beyond(queries, checkpoint.tensors()):
        notes.append(
            f"layers {spans(beyond)} are stored, too, but not counted by the configuration"
        )
    # Files of loralib do not contain whether the products are merged into the weights. The products
    # of a PEFT model in memory are added when the weights are read.
    unmerged = next((name for name in checkpoint.tensors() if ".lora_A" in name), "")
    if unmerged and not getattr(checkpoint, "adapted", ()):
        notes.append(
            f"products such as that of {unmerged} are stored beside weights, and not added"
        )
    return tuple(dict.fromkeys(notes))


class Model(Advising, synonyms=MODEL_SYNONYMS, calls=METHOD_CALLS):
    """A checkpoint with its attention blocks; `open` makes it.

    Attributes
    ----------
    checkpoint
        The checkpoint that stores the weights.
    plans
        Plans of the blocks with a softmax, in order.
    mixers
        Plans of the blocks that score pairs of tokens without a softmax: linear attention, state
        spaces. ``model.block(layer, kind="linear")`` is such a block.
    ref, family_file, hub
        The arguments of `open`.
    """

    @called_as("wqk.open(ref)")
    def __init__(
        self,
        checkpoint: Checkpoint,
        plans: Sequence[AttentionPlan],
        mixers: Sequence[AttentionPlan] = (),
        *,
        ref: Any,
        family_file: FilePath | None,
        hub: HubOptions,
    ) -> None:
        self.checkpoint, self.plans, self.mixers = checkpoint, tuple(plans), tuple(mixers)
        self.ref, self.family_file, self.hub = ref, family_file, hub
        self._last: Block | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for copies and pickles, without weights and without the token."""
        hub = {name: value for name, value in self.hub.items() if name != "token"}
        return {**self.__dict__, "hub": hub, "_last": None}

    @property
    def name(self) -> str:
        """The checkpoint's name: a path, a hub id, a class."""
        return self.checkpoint.name

    @property
    def family(self) -> str:
        """The family's name."""
        return self.scored[0].family

    @property
    def scored(self) -> tuple[AttentionPlan, ...]:
        """Plans of all blocks that have a form, with and without a softmax."""
        return (*self.plans, *self.mixers)

    @property
    def without_softmax(self) -> list[str]:
        """Blocks without a softmax: ``["decoder linear attention, layers 0-2"]``."""
        layers: dict[str, list[int]] = {}
        for plan in self.mixers:
            layers.setdefault(f"{plan.stack} {plan.what}", []).append(plan.layer)
        return [f"{kind}, layers {spans(numbers)}" for kind, numbers in layers.items()]

    def require_softmax(self) -> None:
        """Raise `CheckpointError` if no block has a softmax."""
        if not self.plans:
            has = "; ".join(self.without_softmax)
            raise CheckpointError(f"{self.name}: no attention with a softmax; it has {has}")

    def __iter__(self) -> Iterator[Block]:
        """Yield all blocks of all stacks in order; weights are read on demand."""
        return (Block(self.checkpoint, plan) for plan in self.plans)

    def __len__(self) -> int:
        """Return the number of blocks of all stacks."""
        return len(self.plans)

    def __bool__(self) -> bool:
        return True  # also without a softmax in any block

    @property
    def layers(self) -> list[Block]:
        """Self-attention blocks of the model's stack, in order.

        Raises `CheckpointError` if the model has several stacks: choose a stack with `select`.
        """
        return [Block(self.checkpoint, plan) for plan in self._stack()]

    @overload
    def __getitem__(self, index: int) -> Block: ...
    @overload
    def __getitem__(self, index: slice) -> list[Block]: ...
    @overload
    def __getitem__(self, index: tuple[int, int]) -> Head: ...
    @overload
    def __getitem__(self, index: tuple[int, slice]) -> BilinearForm: ...
    @overload
    def __getitem__(self, index: tuple[slice, int]) -> list[Head]: ...
    def __getitem__(self, index: Any) -> Any:
        """Return the self-attention block of a layer, or with two numbers, a head of the block.

        A slice of layers returns a list: ``model[:, 0]`` contains the first head of each layer.
        """
        layer, *head = index if isinstance(index, tuple) else (index,)
        if isinstance(layer, slice):
            return [block[head[0]] if head else block for block in self.layers[layer]]
        if not is_number(layer) or len(head) > 1:
            raise IndexError(
                f"a model takes numbers, model[layer] or model[layer, head]; got {index!r}"
            )
        return self.block(layer)[head[0]] if head else self.block(layer)

    def block(self, layer: int, *, stack: str | None = None, kind: str = "self") -> Block:
        """Return the attention of one layer.

        Parameters
        ----------
        layer
            Number within its stack, from 0; negative numbers count from the end.
        stack, kind
            The attention, if a model has several: ``encoder`` or ``decoder``, ``self`` or
            ``cross``.

        Raises
        ------
        CheckpointError
            The layer does not exist, or the model has several stacks and ``stack`` is omitted.
        """
        if not is_number(layer):
            raise CheckpointError(f"{self.name}: a layer is a number, got {layer!r}")
        plans = self._stack(stack, kind)
        by_layer = {plan.layer: plan for plan in plans}
        number = layer if layer >= 0 else max(by_layer, default=-1) + 1 + layer
        if number not in by_layer:
            detail = f" of the {plans[0].stack}, which has {len(plans)}" if plans else ""
            alternative = next(
                (plan for plan in self.scored if plan.layer == layer and plan.kind != kind), None
            )
            if alternative is not None:
                detail = f", but {alternative.what}, kind={alternative.kind!r}"
            raise CheckpointError(f"{self.name}: no {kind_in_words(kind)} in layer {layer}{detail}")
        if self._last is None or self._last.plan is not by_layer[number]:
            # Successive heads of one layer share weights after reading.
            self._last = Block(self.checkpoint, by_layer[number])
        return self._last

    def _stack(self, stack: str | None = None, kind: str = "self") -> list[AttentionPlan]:
        plans = [plan for plan in self.scored if plan.kind == kind and stack in (None, plan.stack)]
        stacks = list(dict.fromkeys(plan.stack for plan in plans))
        if len(stacks) > 1:
            raise CheckpointError(
                f"{self.name}: has several stacks; choose one with stack="
                f"{' or '.join(map(repr, stacks))}"
            )
        return plans

    def select(
        self,
        *,
        layers: Collection[int] | None = None,
        stack: str | None = None,
        kind: str | None = None,
    ) -> Model:
        """Return a model with some of the blocks: of these layers, this stack, this kind.

        Negative layers count from the end of each stack.

        Raises
        ------
        CheckpointError
            The layer or the block does not exist.
        """
        plans = [p for p in self.scored if stack in (None, p.stack) and kind in (None, p.kind)]
        if not plans:
            kinds = ", ".join(dict.fromkeys(f"{p.stack} {p.kind}" for p in self.scored))
            raise CheckpointError(
                f"{self.name}: no {' '.join(filter(None, (stack, kind)))}-attention; it has {kinds}"
            )
        if layers is not None:
            require_list("layers", layers, [0, -1])
            counts: dict[str, int] = {}
            for p in plans:
                counts[p.stack] = max(1 + p.layer, counts.get(p.stack, 0))
            numbers = [{p.layer, p.layer - counts[p.stack]} for p in plans]
            missing = sorted(set(layers).difference(*numbers))
            if missing or not layers:
                problem = f"no layer {missing[0]}" if missing else "no layer was chosen"
                present = [p.layer for p in plans]
                raise CheckpointError(
                    f"{self.name}: {problem}; layers are numbered from {min(present)} to "
                    f"{max(present)}"
                )
            plans = [
                p
                for p, layer_numbers in zip(plans, numbers, strict=True)
                if not layer_numbers.isdisjoint(layers)
            ]
        return self.on(self.checkpoint, plans)

    def on(self, checkpoint: Checkpoint, plans: Sequence[AttentionPlan] | None = None) -> Model:
        """Return a model with the same blocks and the weights of another checkpoint."""
        chosen = self.scored if plans is None else plans
        return Model(
            checkpoint,
            [plan for plan in chosen if plan.has_softmax],
            [plan for plan in chosen if not plan.has_softmax],
            ref=self.ref,
            family_file=self.family_file,
            hub=self.hub,
        )

    @property
    def _layer_count(self) -> int:
        """Number of layers, for models with one block in each layer."""
        places = [(block.stack, block.kind, block.layer) for block in self]
        if places != [(*places[0][:2], layer) for layer in range(len(places))]:
            raise CheckpointError(
                f"the model has {len(places)} blocks in several stacks, or layers without "
                "attention: len(model) counts the blocks, and block.layer is the layer"
            )
        return len(places)

    @property
    def _head_count(self) -> int:
        """Number of heads, if equal in all blocks."""
        return _one_number((block.head_count for block in self), "heads")

    @property
    def _key_head_count(self) -> int:
        """Number of key heads, if equal in all blocks."""
        return _one_number((block.key_head_count for block in self), "key heads")

    @property
    def _width(self) -> int:
        """Width of the residual stream, at the first block."""
        return next(iter(self)).groups.widths[0]

    @property
    def _head_width(self) -> int:
        """Width of a head, if equal in all blocks."""
        return _one_number((block.plan.query.head_width for block in self), "head dimensions")

    @property
    def _model_type(self) -> str | None:
        """Model type of the configuration."""
        return self.checkpoint.config.get("model_type")

    @property
    def _dtype(self) -> str:
        """Number types of the stored queries."""
        tensors = self.checkpoint.tensors()
        names = {part.name for plan in self.scored for part in plan.query.parts}
        types = sorted({tensors[name].dtype for name in names if name in tensors})
        return ", ".join(types)

    @property
    def unread(self) -> list[str]:
        """Names of tensors that seem to be queries, but that no block reads.

        Examples are cross-attention that a family does not describe, another tower, or a pooling
        head.
        """
        read: set[str] = set()
        for plan in self.scored:
            read.update(part.name for part in plan.parts)
        tensors = self.checkpoint.tensors()
        similar = candidates(tensors)
        return [
            candidate.query
            for candidate in similar
            if read.isdisjoint(candidate.tensors)
            and not candidate.words & POSITIONAL
            and not neighbors_of(candidate, similar, tensors).recurrent
        ]

    def __repr__(self) -> str:
        heads_of_kinds: dict[str, list[int]] = {}
        for block in self.scored:
            kind = f"{block.stack} {block.what} blocks"
            heads_of_kinds.setdefault(kind, []).append(block.query.heads)
        parts = []
        for kind, heads in heads_of_kinds.items():
            numbers = sorted(set(heads))
            parts.append(f"{len(heads)} {kind} of {' or '.join(map(str, numbers))} heads")
        return f"Model({os.fspath(self.name)!r}: family {self.family}, {', '.join(parts)})"
