"""wqk_lab: the laboratory around `wqk`, which trains, experiments and tests the paper's statements.

The public names are listed in ``__init__.pyi`` and imported when first used.
"""

from wqk import errors

# Every command has its name here, but for `figures` and `theory`, which are modules; those of some
# functions say more.
__getattr__, __dir__, __all__ = errors.public(
    __name__,
    __file__,
    {
        "corpus": "build_corpus",
        "experiments": "run_experiments",
        "glue": "fine_tune",
        "speedup": "speedups",
    },
)
