"""``wqk kin``: whether models are related."""

from __future__ import annotations

from typing import Any

import click

from wqk.cli.options import REF, family_file, json_output, opened


@click.command()
@click.argument("refs", metavar="A B", type=REF, nargs=2)
@click.option(
    "--revision", "revisions", multiple=True, metavar="R",
    help="Hub revision; give it once for each model, in their order.",
)  # fmt: skip
@click.option("--matches", is_flag=True, help="Also print which layers and heads match.")
@family_file
@json_output
def kin(
    refs: tuple[str, str], revisions: tuple[str, ...], matches: bool, as_json: bool, **options: Any
) -> None:
    """Test whether two models are related: by descent, or by a shared initialization.

    Reads queries and keys only. The agreement of two models' forms is compared with that after
    renumbering one model's heads, coordinates and dimensions; models that share an architecture,
    a recipe and a text, and no weights, agree no better than by chance. Where nothing but the
    coordinates of the residual stream agree, embeddings and norms are compared, too: models may
    share these and no more.

    \b
    Examples:
      wqk kin Qwen/Qwen2.5-7B ./a-model-that-hides-its-parent
      wqk kin ./merged ./parent --matches
    """
    from wqk.cli import display
    from wqk.comparing.kinship import kin as relate
    from wqk.comparing.kinship import layer_table

    if revisions and len(revisions) != len(refs):
        raise click.UsageError(
            f"expected --revision once for each of the two models, or not at all; got "
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
    tables = (
        (f"{result.other}, and its matches in {result.checkpoint}", layer_table(result))
        if matches and result.related
        else ()
    )
    display.show(result.to_dict(), result, *tables, as_json=as_json)
