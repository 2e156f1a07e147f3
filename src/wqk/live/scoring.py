"""Scores of a model in training: its queries and keys, found once and copied for each scoring.

If parameters are sharded (FSDP 2, or any other DTensor), copying is a collective operation: all
processes gather the tensors one by one, and only the first process keeps them.

Terms of the loss can pull the forms toward symmetry, or toward skew-symmetry. The paper's two
ratios are functions of the symmetry s of a form M:

=============  ===========================  ===========  ==================
kind           ratio                        in s         least, at
=============  ===========================  ===========  ==================
``symmetric``  ‖M‖² / ‖M_s‖² (S147)         2/(1 + s)    1, at s = 1
``skew``       ‖M‖² / ‖M_n‖² (S148)         2/(1 − s)    1, at s = −1
=============  ===========================  ===========  ==================

(According to the paper, S148 leads to s = 0.) Each ratio has a pole at the opposite end, where the
denominator vanishes. The denominator is 1 ± s + `FLOOR`, so that value and gradient stay finite:
the value is at most 2/FLOOR, and the gradient vanishes only at the two ends.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import polars as pl

from wqk._typing import Array, Float
from wqk.attention import Block
from wqk.attention.measures import ceiling_parts
from wqk.checkpoints import Checkpoint, Part, TensorInfo
from wqk.checkpoints.files import PLAIN
from wqk.checkpoints.modules import LiveCheckpoint, Read, require_plain_lora
from wqk.errors import CheckpointError, FormError, RunError
from wqk.families import AttentionPlan
from wqk.forms import BilinearForm
from wqk.forms.chaining import change
from wqk.forms.scores import symmetry
from wqk.live.addresses import network_of
from wqk.model import Model
from wqk.model import open as open_model
from wqk.scanning.scan import scan_model
from wqk.tables.schema import LOGITS, SUMMARIZED
from wqk.tables.score_table import ScoreTable

if TYPE_CHECKING:
    import numpy as np
    import torch

    from wqk.live.logits import Logits


class Snapshot(Checkpoint):
    """Queries and keys after some step, on the host and in the types of the model.

    ``non_finite`` names the tensors with NaN or infinite entries, which are stored as zeros.
    """

    def __init__(
        self,
        name: str,
        config: Mapping[str, Any],
        tensors: Mapping[str, TensorInfo],
        step: int | None = None,
        copies: Mapping[Part, torch.Tensor] | None = None,
    ) -> None:
        self.name, self.config, self.step = name, config, step
        self._tensors = tensors
        self._copies = dict(copies or {})
        self.non_finite = {part for part, copy in self._copies.items() if not copy.isfinite().all()}
        for part in self.non_finite:
            self._copies[part] = self._copies[part].zero_()

    def tensors(self) -> Mapping[str, TensorInfo]:
        """Type, shape and size of every tensor of the model, copied or not."""
        return self._tensors

    def read(self, parts: Sequence[Part]) -> list[np.ndarray]:
        """Return the copies of these parts, in float32, or in float64 for a float64 model."""
        arrays = []
        for part in parts:
            copy = self._copies[part]
            if copy.element_size() != 8:
                copy = copy.float()
            arrays.append(copy.numpy())
        return arrays

    def is_finite(self, plan: AttentionPlan) -> bool:
        """Return whether all tensors of a block are finite."""
        return self.non_finite.isdisjoint((*plan.parts, *ceiling_parts(plan)))


class Tracker:
    """Finds a model's queries and keys once, and copies them at any step.

    Parameters
    ----------
    model
        The `nn.Module`, plain or wrapped, or a `Model` opened from one.
    name
        Name of the checkpoint in score tables.
    with_norms
        Whether snapshots also contain the blocks' input norms, for ceilings.

    Raises
    ------
    RunError
        The parameters are flattened (FSDP 1) or partitioned between steps (ZeRO stage 3).
    CheckpointError
        The parameters are not floating-point numbers, or have an adapter that is not plain LoRA.
    """

    def __init__(self, model: Any, name: str, with_norms: bool = False) -> None:
        network = network_of(model, "followed")
        _require_whole_parameters(network)
        self.model = open_model(model)
        self._network, self._name, self._weights = network, name, LiveCheckpoint(network)
        parts: list[Part] = []
        for plan in self.model.scored:
            parts += plan.parts
            if with_norms:
                parts += ceiling_parts(plan)
        self._parts_by_tensor: dict[str, list[Part]] = {}
        for part in dict.fromkeys(parts):
            self._parts_by_tensor.setdefault(part.name, []).append(part)
        for tensor in self._parts_by_tensor:
            dtype = self._weights.info(tensor).dtype
            if dtype not in PLAIN:
                raise CheckpointError(f"{tensor}: holds {dtype}, not floating-point weights")
            if tensor in self._weights.adapted:
                require_plain_lora(self._weights.adapted[tensor], tensor)

    def snapshot(self, step: int) -> Snapshot | None:
        """Copy the queries and keys; in a distributed run, None in all processes except the first.

        In a run with sharded parameters, every process must call this method at the same step.
        """
        import torch

        keeps = is_first_process()
        copies: dict[Part, torch.Tensor] = {}
        # After a forward pass, FSDP 2 may leave an unsharded copy in the compute type in place of
        # the trained parameter; resharding restores the parameter.
        for module in self._network.modules():
            if hasattr(module, "reshard"):
                module.reshard()
        # Since the last look, adapters may have been added, or modules replaced.
        self._weights = LiveCheckpoint(self._network)
        with torch.no_grad():
            for name, parts in self._parts_by_tensor.items():
                tensor = self._weights.whole(name)
                if keeps:
                    copies |= {part: _copied(tensor, part) for part in parts}
        if not keeps:
            return None
        return Snapshot(self._name, self._weights.config, self._weights.tensors(), step, copies)


def is_first_process() -> bool:
    """Return whether this process scores and writes: the only process, or rank 0."""
    from torch import distributed

    return not is_distributed() or distributed.get_rank() == 0


def is_distributed() -> bool:
    """Return whether several processes train together."""
    from torch import distributed

    return bool(distributed.is_available() and distributed.is_initialized())


def _require_whole_parameters(model: Any) -> None:
    """Raise `RunError` if the parameters of a model cannot be read one by one."""
    if any(type(module).__name__ == "FullyShardedDataParallel" for module in model.modules()):
        raise RunError(
            "a monitor cannot read the parameters of FullyShardedDataParallel (FSDP 1), which "
            "flattens the parameters; train with fully_shard (fsdp_version: 2)"
        )
    if any(hasattr(parameter, "ds_id") for parameter in model.parameters()):
        raise RunError(
            "a monitor cannot read parameters that DeepSpeed ZeRO stage 3 has partitioned; "
            "train with stage 2, or with fully_shard (FSDP 2)"
        )


def _copied(tensor: torch.Tensor, part: Part) -> torch.Tensor:
    """Return a copy of a part's rows, joined, on the host."""
    import torch

    rows = tensor
    if part.rows is not None:
        ranges = part.row_ranges(tuple(tensor.shape))
        rows = torch.cat([tensor[start:stop] for start, stop in ranges])
    return rows.to("cpu", copy=True)


# The key columns of the rows of one step.
ROW = ["stack", "kind", "layer", "head"]

# Sizes whose medians are logged, if a table has them. Those of logits are logged once measured.
LOGGED_SIZES = (
    "spectral_norm",
    "query_norm",
    "key_norm",
    "score_ceiling",
    "score_ceiling_any_distance",
)


def score_look(model: Model, snapshot: Snapshot, **options: Any) -> ScoreTable:
    """Return the table of `wqk.scan` for the model; non-finite blocks are marked.

    ``options`` are options of `wqk.scanning.scan.scan_model`.
    """
    table = scan_model(model.on(snapshot), **options)
    return _blanked(table, [plan for plan in model.scored if not snapshot.is_finite(plan)])


def score_update(
    model: Model,
    before: Snapshot,
    after: Snapshot,
    *,
    measures: Collection[str] = (),
    **options: Any,
) -> ScoreTable:
    """Score the forms after minus the forms before, ΔW_qk (paper, Remark S1.6), of rank 2r.

    ``symmetry_within_random`` is null, because it assigns dimensions to heads at random, and a
    difference has other dimensions than the model. Measures of the spectrum also apply to the
    change.
    """
    measures = [name for name in measures if name in ("spectral_norm", "spectrum")]

    def moved(new: Block) -> BilinearForm:
        return change(Block(before, new.plan).groups, new.groups)

    table = scan_model(model.on(after), measures=measures, forms=moved, **options)
    unknown = pl.lit(None, pl.Float64).alias("symmetry_within_random")
    broken = [
        plan for plan in model.scored if not (before.is_finite(plan) and after.is_finite(plan))
    ]
    frame = _blanked(table, broken).frame.with_columns(unknown)
    return ScoreTable(frame, {**table.metadata, "form": "update"})


def with_logits(table: ScoreTable, logits: Logits) -> ScoreTable:
    """Return the table with the logits that were measured after this look; else null.

    Rows with logits that are not finite have the status ``non-finite``.
    """
    plain = table.frame.drop(LOGITS, strict=False)
    measured = logits.frame.drop("module").drop_nulls("stack")
    frame = plain.join(measured, on=ROW, how="left", nulls_equal=True).with_columns(
        status=pl.when(pl.col("max_logit").is_finite() | pl.col("max_logit").is_null())
        .then("status")
        .otherwise(pl.lit("non-finite"))
    )
    return ScoreTable(frame, table.metadata)


def logit_summary(table: ScoreTable, layers: bool = False) -> dict[str, float]:
    """Return numbers to log from logits: the largest logit, and `medians` of other columns."""
    largest: Any = table.layers.frame["max_logit"].fill_nan(None).max()
    summary: dict[str, float] = {}
    if largest is not None:
        summary["max_logit"] = largest
    for name, value in medians(table, layers=layers, columns=list(LOGITS)).items():
        if not name.endswith("max_logit_median"):
            summary[name] = value
    return summary


def medians(
    table: ScoreTable, prefix: str = "", layers: bool = False, columns: Sequence[str] = ()
) -> dict[str, float]:
    """Return medians over layers by name, such as ``symmetry_median``.

    With several stacks or kinds of attention, names begin with stack and kind:
    ``decoder/cross/symmetry_median``.

    Parameters
    ----------
    table
        Scores of one step.
    prefix
        Beginning of the names of columns, such as ``update_``.
    layers
        Whether to also return the value of each layer: ``layer_03/symmetry``.
    columns
        Columns to summarize; by default the scores and the measured sizes.
    """
    frame = table.layers.frame.with_columns(pl.col(pl.Float64).fill_nan(None))
    sizes = [name for name in LOGGED_SIZES if name in frame.columns]
    columns = columns or [*SUMMARIZED, *sizes]
    leading = [name for name in ("stack", "kind") if frame[name].n_unique() > 1]
    values: dict[str, float] = {}

    def add(row: Mapping[str, Any], start: str, end: str) -> None:
        for column in columns:
            if row[column] is not None:
                values[f"{start}{prefix}{column}{end}"] = row[column]

    for part in frame.partition_by("stack", "kind", maintain_order=True):
        start = "".join(f"{part[name][0]}/" for name in leading)
        add(part.select(pl.col(columns).median()).row(0, named=True), start, "_median")
        if layers:
            for row in part.iter_rows(named=True):
                add(row, f"{start}layer_{row['layer']:02d}/", "")
    return values


def _blanked(table: ScoreTable, broken: Sequence[AttentionPlan]) -> ScoreTable:
    """Return the table with empty scores and the status ``non-finite`` for these blocks."""
    if not broken:
        return table
    blocks = pl.DataFrame(
        [plan.place for plan in broken], schema=["stack", "kind", "layer"], orient="row"
    ).with_columns(is_broken=True)
    is_broken = pl.col("is_broken").fill_null(False)
    scores = [name for name, kind in table.frame.schema.items() if kind == pl.Float64]
    frame = table.frame.join(blocks, on=["stack", "kind", "layer"], how="left").with_columns(
        *(pl.when(~is_broken).then(score).alias(score) for score in scores),
        status=pl.when(is_broken).then(pl.lit("non-finite")).otherwise("status"),
    )
    return ScoreTable(frame, table.metadata)


# Sign of s in the denominator.
SIGNS = {"symmetric": 1.0, "skew": -1.0}

# Lower limit of the denominator, far above the rounding of s in float32.
FLOOR = 1e-4


class Penalty:
    """Mean penalty over a model's self-attention layers, as a function of its live weights.

    Tensors are found once. A call computes each layer's factors from the parameters, with
    gradients. It computes in float32 even under autocast. The caller multiplies the penalty by a
    weight, and adds it to the loss (S146).

    Parameters
    ----------
    model
        An `nn.Module` of `transformers`.
    kind
        ``symmetric`` or ``skew``.
    layers
        Numbers of the penalized layers, in every stack; None for all.
    heads
        Whether to average over heads instead of layers. A layer's form can be symmetric although
        the forms of its heads are not.

    Raises
    ------
    FormError
        The kind is unknown.
    UnknownFamily
        The model's queries and keys cannot be found.
    CheckpointError
        The model lacks these layers, or its weights are not loaded.

    Examples
    --------
    >>> import torch, transformers
    >>> config = transformers.BertConfig(hidden_size=64, num_hidden_layers=2, num_attention_heads=4)
    >>> model = transformers.BertModel(config)
    >>> penalty = Penalty(model, "symmetric")
    >>> (0.1 * penalty()).backward()
    >>> bool(model.encoder.layer[0].attention.self.query.weight.grad.any())
    True
    """

    def __init__(
        self, model: Any, kind: str, layers: Sequence[int] | None = None, heads: bool = False
    ) -> None:
        if kind not in SIGNS:
            raise FormError(f"a penalty must be one of {', '.join(SIGNS)}, got {kind!r}")
        self._sign, self._heads = SIGNS[kind], heads
        self._parameters = LiveCheckpoint(model, Read.GRADIENT)
        self_plans = [plan for plan in open_model(self._parameters).plans if plan.kind == "self"]
        numbers = sorted({plan.layer for plan in self_plans})
        chosen = numbers if layers is None else list(layers)
        if not chosen or not set(chosen) <= set(numbers):
            raise CheckpointError(
                f"{self._parameters.name}: a penalty applies to layers with self-attention, which "
                f"are {numbers}, got {chosen}"
            )
        self._plans = [plan for plan in self_plans if plan.layer in chosen]

    def __call__(self) -> Float[Array, ""]:
        """Return the penalty of the current weights, a scalar tensor.

        Zero forms, which have no symmetry, count as s = 0. Raises `NonFiniteWeights` if a weight is
        NaN or infinite.
        """
        import torch

        device = self._parameters.current(self._plans[0].query.tensor).device
        with torch.autocast(device.type, enabled=False):
            scores = torch.cat([self._symmetry(plan) for plan in self._plans])
            return (2 / (1 + self._sign * scores + FLOOR)).mean()

    def _symmetry(self, plan: AttentionPlan) -> Float[Array, " forms"]:
        """Return the symmetry of a block's layer, (1,), or of its heads, (H,); 0 for zero forms."""
        block = Block(self._parameters, plan)
        form = block.groups if self._heads else block.form
        scores: Any = symmetry(form)
        return scores.nan_to_num(0.0).reshape(-1)
