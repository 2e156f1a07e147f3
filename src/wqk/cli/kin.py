"""``wqk kin``: whether models are related."""

from __future__ import annotations

from typing import Any

import click

from wqk.cli.options import REF, family_file, json_output, opened


@click.command()
@click.argument("refs", metavar="A B [C]...", type=REF, nargs=-1, required=True)
@click.option(
    "--revision", "revisions", multiple=True, metavar="R",
    help="Hub revision; give it once for each model, in their order.",
)  # fmt: skip
@click.option("--layers", is_flag=True, help="Also print which layers and heads match.")
@family_file
@click.option(
    "--renumberings", type=click.IntRange(min=999), default=4999, metavar="N",
    help="How often a model is renumbered; p cannot be smaller than 1 / (N + 1).",
)  # fmt: skip
@click.option("--seed", type=click.IntRange(min=0), default=0, metavar="N", help="Of these.")
@json_output
def kin(
    refs: tuple[str, ...], revisions: tuple[str, ...], layers: bool, as_json: bool, **options: Any
) -> None:
    """Test whether models are related: by descent, or by a shared initialization.

    Reads queries and keys only. The agreement of two models' forms is compared with that after
    renumbering one model's heads, coordinates and dimensions; models that share an architecture,
    a recipe and a text, and no weights, agree no better than by chance. Of three models or more,
    also finds mixtures of two others, and draws a tree by distance.

    \b
    Examples:
      wqk kin Qwen/Qwen2.5-7B ./a-model-that-hides-its-parent
      wqk kin ./merged ./parent-one ./parent-two
    """
    from wqk.cli import display
    from wqk.comparing.kinship import kin as relate
    from wqk.comparing.relations import Kinship, layer_table

    if len(refs) < 2:
        raise click.UsageError("expected two models or more, got one")
    if revisions and len(revisions) != len(refs):
        raise click.UsageError(
            f"expected --revision once for each of the {len(refs)} models, or not at all; got "
            f"{len(revisions)}"
        )
    with display.bar(
        "Reading", lambda done, total: {"completed": done, "total": total}
    ) as on_progress:
        family = options.pop("family")
        models = [
            opened(ref, {"family": family, "revision": revision})
            for ref, revision in zip(refs, revisions or [None] * len(refs), strict=True)
        ]
        result = relate(*models, on_progress=on_progress, **options)
    pairs = [result] if isinstance(result, Kinship) else result.pairs
    tables = [
        line
        for pair in pairs
        if layers and pair.related
        for line in (f"{pair.other}, and its matches in {pair.checkpoint}", layer_table(pair))
    ]
    display.show(result.to_dict(), result, *tables, as_json=as_json)
