"""Two groups of tests: `make test` runs the fast ones, `make test-slow` those marked slow here.

Slow is what starts a notebook, a browser, a server's peers or several processes, kills them, trains
a model, or takes more than `MOST` seconds of processor time. Of a test that is repeated for every
family, a tenth is fast, another one each day, and all families whose data differ from `main`. Of
one that is repeated for settings, all are fast where the code that reads them differs.
"""

from __future__ import annotations

import os
import subprocess
import tomllib
import zlib
from collections import Counter
from datetime import date
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
MOST = 2.0  # seconds of processor time of a fast test, its children among them
DAY = "WQK_TEST_DAY"  # the day whose turn it is, as its ordinal number; one for all workers
# Of what the campaign repeats for many cases, one in so many is run, others each day.
SHARE = "WQK_CAMPAIGN_SHARE"
MANY = 40
LONGEST = 600  # seconds by the clock of a test of the campaign

# What the names of tests begin with.
SLOW = (
    "tests/checkpoints/test_attacks.py::test_a_server_at_its_worst",
    "tests/checkpoints/test_endless.py::test_a_yaml_file_whose_parts_name_each_other",
    "tests/checkpoints/test_formats.py::test_a_distributed_checkpoint_is_refused_until_pytorch",
    "tests/checkpoints/test_http.py::test_a_server_that_keeps_one_waiting_is_given_up",
    "tests/checkpoints/test_hub.py::test_a_killed_scan_leaves_a_cache_that_goes_on",
    "tests/families/test_every_family.py::test_every_rule_is_that_of_a_proven_model_or_marked",
    "tests/families/test_in_threads.py",
    "tests/forms/test_spectra.py::test_values_by_chance_are_those_of_drawn_forms[shape3]",
    "tests/lab/figures/test_command.py::test_the_papers_runs_below_ones_own",
    "tests/lab/figures/test_drawing.py::test_names_of_models_cover_neither",
    "tests/lab/figures/test_drawing.py::test_own_scans_are_named_in_figure_2",
    "tests/lab/figures/test_drawing.py::test_the_packages_own_models_stand_in[fig2]",
    "tests/lab/figures/test_model_sizes.py::test_one_model_alone_fills_both_panels",
    "tests/lab/figures/test_model_sizes.py::test_the_models_that_matter_are_named",
    "tests/lab/figures/test_paired.py::test_a_planted_effect_is_found",
    "tests/lab/figures/test_paired.py::test_an_untrained_copy_differs_by_exactly_zero",
    "tests/lab/figures/test_paired.py::test_nothing_is_found_where_nothing_is_planted",
    "tests/lab/figures/test_paired.py::test_the_figure_and_its_numbers",
    "tests/lab/figures/test_sources.py::test_the_folder_of_a_monitor",
    "tests/lab/runs/test_claims.py::test_a_bold_sentence_without_its_contrast",
    "tests/lab/runs/test_claims.py::test_the_page_says_what_the_records_say[conversion.md",
    "tests/lab/theory/test_command.py::test_findings_are_printed_saved_and_drawn",
    "tests/lab/theory/test_study.py::test_a_run_is_followed_from_save_to_save",
    "tests/lab/training/corpus/test_interruptions.py",
    "tests/lab/training/test_conversion.py",
    "tests/lab/training/test_experiments.py",
    "tests/lab/training/test_glue.py",
    "tests/lab/training/test_recipe.py::test_whatever_a_file_holds_is_a_recipe_or_an_error",
    "tests/lab/training/test_repeating.py",
    "tests/lab/training/test_resuming.py",
    "tests/lab/training/test_torchrun.py",
    "tests/lab/training/test_train_command.py",
    "tests/lab/training/test_training.py::test_a_full_disk_is_one_line_and_leaves_whole_lines",
    "tests/lab/training/test_training.py::test_a_run_can_be_clipped_and_its_logits_measured",
    "tests/lab/training/test_training.py::test_the_task_and_the_loss_are_one_graph",
    "tests/live/test_callback.py::test_a_resumed_run_goes_on_in_the_same_files",
    "tests/live/test_distributed.py",
    "tests/live/test_logits.py::test_compiled_models_are_measured",
    "tests/reporting/test_browser.py",
    "tests/reporting/test_notebooks.py",
    "tests/scanning/test_scan.py::test_memory_does_not_grow_with_the_number_of_layers",
    "tests/scanning/test_surveys.py::test_a_dask_cluster_gives_the_same_bytes",
    "tests/scanning/test_surveys.py::test_a_worker_that_dies_fails_its_job_and_no_other",
    "tests/scanning/test_surveys.py::test_an_interrupt_is_one_line_and_resumable",
    "tests/scanning/test_surveys.py::test_any_executor_gives_the_same_bytes",
    "tests/scanning/test_surveys.py::test_killed_and_resumed_the_table_is_identical",
    "tests/scanning/test_watch.py::test_a_killed_watch_loses_nothing",
    "tests/tables/test_in_a_kernel.py",
    "tests/test_advice.py",
    "tests/test_first_guesses.py::test_first_guesses_work",
    "tests/test_notebooks.py::test_a_notebook_runs",
    "tests/test_odd_input.py::test_odd_models_are_a_result_or_a_line",
)
# Functions that are repeated for every family, architecture or statement.
BY_TURNS = (
    "tests/families/test_every_family.py::test_the_family_is_what_the_model_computes",
    "tests/families/test_proofs.py",
    "tests/families/test_published.py",
    "tests/live/test_contract.py",
    "tests/lab/theory/test_gradients.py",
    "tests/lab/theory/test_planted.py::test_chance_rarely_decides",
    "tests/lab/training/starts/test_every_family.py",
)
# Which of them are repeated for settings, and the code that reads those.
OF_SETTINGS = "tests/families/test_published.py"
READERS = "src/wqk/families"


def is_slow(item: pytest.Item) -> bool:
    """Whether a test is of the slow group today."""
    if item.nodeid.startswith(SLOW):
        return True
    if item.nodeid.startswith(OF_SETTINGS) and changed_files(f"{READERS}/*.py"):
        return False
    if not item.nodeid.startswith(BY_TURNS) or not isinstance(item, pytest.Function):
        return False
    case = item.nodeid.rpartition("[")[2].removesuffix("]") if hasattr(item, "callspec") else ""
    return bool(case) and not has_turn(case, int(os.environ[DAY]), changed_families())


def has_none(path: Path, marks: str) -> bool:
    """Whether a file has, as its name tells, no test of the group that these marks select."""
    name = path.relative_to(ROOT).as_posix() if path.is_relative_to(ROOT) else ""
    if not name.endswith(".py"):
        return False
    if "not slow" in marks:
        return name in SLOW
    return "slow" in marks and not any(one.startswith(name) for one in (*SLOW, *BY_TURNS))


def has_turn(case: str, day: int, changed: frozenset[str]) -> bool:
    """Whether a case, named after its family, is run on a day."""
    named = any(case == family or case.startswith(f"{family}-") for family in changed)
    return named or zlib.crc32(case.encode()) % 10 == day % 10


def has_share(case: str) -> bool:
    """Whether a case of the campaign is run today."""
    share = int(os.environ.get(SHARE, "1"))
    return (zlib.crc32(case.encode()) + int(os.environ[DAY])) % share == 0


def left_to_other_days(items: list[pytest.Item]) -> list[pytest.Item]:
    """Tests of the campaign that are repeated for many cases, without those of today."""
    repeated = [item for item in items if item.get_closest_marker("campaign")]
    counts = Counter(item.nodeid.partition("[")[0] for item in repeated)
    return [
        item
        for item in repeated
        if counts[item.nodeid.partition("[")[0]] > MANY and not has_share(item.nodeid)
    ]


@cache
def changed_files(pattern: str) -> list[Path]:
    """The files that differ from `main`; none where git or `main` is missing."""
    lists = (
        ["diff", "--name-only", "--merge-base", "main", "--", pattern],
        ["ls-files", "--others", "--exclude-standard", "--", pattern],
    )
    found: list[str] = []
    for arguments in lists:
        try:
            done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True)
        except OSError:
            break
        found += done.stdout.splitlines() if done.returncode == 0 else []
    return [ROOT / name for name in found]


@cache
def changed_families() -> frozenset[str]:
    """The names and the model types of families whose files differ, with hyphens."""
    found: set[str] = set()
    for file in changed_files(f"{READERS}/data"):
        text = file.read_text(encoding="utf-8") if file.is_file() else ""
        found |= {file.stem, *tomllib.loads(text).get("model_types", [])}
    return frozenset(name.replace("_", "-") for name in found)


def today() -> None:
    """Set the day, unless it is set."""
    os.environ.setdefault(DAY, str(date.today().toordinal()))


def mark(items: list[pytest.Item]) -> None:
    """Mark the tests of the slow group."""
    for item in items:
        if is_slow(item):
            item.add_marker("slow")
