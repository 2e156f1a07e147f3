"""Two groups of tests: `make test` runs the fast ones, `make test-slow` those marked slow here.

A test is slow if it starts a notebook, a browser, a server's peers or several processes, kills
processes, trains a model, or takes more than `MOST_SECONDS` of processor time.

Tests that are repeated for every family take turns: a tenth of their cases is fast, and all cases
of families whose data differ from `main`. The commit decides which tenth (`turn`), so that a
failure can be repeated from its commit. If the code that reads settings differs from `main`, all
tests of settings are fast.
"""

from __future__ import annotations

import os
import subprocess
import tomllib
import zlib
from collections import Counter
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
MOST_SECONDS = 2.0  # processor time of a fast test and its children
TURNS = 10
# The whole number that decides which cases run: set by `choose_turn`, the same in all workers.
TURN = "WQK_TEST_TURN"
# One of this many cases runs, where the campaign repeats a test for more than `MANY` cases.
SHARE = "WQK_CAMPAIGN_SHARE"
MANY = 40
CAMPAIGN_SECONDS = 600  # by the clock, for one test of the campaign

# Beginnings of the names of slow tests.
SLOW = (
    "tests/attacks/test_attacks.py",
    "tests/checkpoints/test_attacks.py::test_a_server_at_its_worst",
    "tests/checkpoints/test_distributed_checkpoints.py::test_shards_of_safetensors_that_ranks_write",
    "tests/checkpoints/test_distributed_checkpoints.py::test_two_ranks_of_fsdp_are_one_model",
    "tests/checkpoints/test_endless.py::test_a_yaml_file_whose_parts_name_each_other",
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
    "tests/lab/training/test_conversion.py::test_a_child_waits",
    "tests/lab/training/test_conversion.py::test_a_killed_child",
    "tests/lab/training/test_conversion.py::test_blocks_go_on",
    "tests/lab/training/test_conversion.py::test_experiments_train_parents",
    "tests/lab/training/test_conversion.py::test_loss_and_mask",
    "tests/lab/training/test_conversion.py::test_the_figure_s_numbers",
    "tests/lab/training/test_conversion.py::test_what_cannot_be_continued",
    "tests/lab/training/test_experiments.py::test_runs_stop_resume",
    "tests/lab/training/test_glue.py::test_every_seed_has_a_head",
    "tests/lab/training/test_glue.py::test_long_texts_are_cut",
    "tests/lab/training/test_glue.py::test_runs_are_compared_over_seeds",
    "tests/lab/training/test_glue.py::test_the_command_compares_two",
    "tests/lab/training/test_glue.py::test_what_a_word_decides_is_learned",
    "tests/lab/training/test_recipe.py::test_whatever_a_file_holds_is_a_recipe_or_an_error",
    "tests/lab/training/test_repeating.py",
    "tests/lab/training/test_resuming.py",
    "tests/lab/training/test_torchrun.py",
    "tests/lab/training/test_train_command.py::test_a_configuration_of_one_s_own",
    "tests/lab/training/test_train_command.py::test_resuming_needs",
    "tests/lab/training/test_train_command.py::test_what_is_given_is_heard",
    "tests/lab/training/test_training.py::test_a_full_disk_is_one_line_and_leaves_whole_lines",
    "tests/lab/training/test_training.py::test_a_run_can_be_clipped_and_its_logits_measured",
    "tests/lab/training/test_training.py::test_the_task_and_the_loss_are_one_graph",
    "tests/live/test_callback.py::test_a_resumed_run_goes_on_in_the_same_files",
    "tests/live/test_diffusion.py::test_positions_on_three_axes_turn_as_in_diffusers",
    "tests/live/test_diffusion.py::test_transformers_of_diffusers_are_verified",
    "tests/live/test_distributed.py",
    "tests/live/test_live_display.py::test_in_a_notebook",
    "tests/live/test_logits.py::test_compiled_models_are_measured",
    "tests/live/test_logits.py::test_they_are_in_towers_with_positions_on_two_axes",
    "tests/reporting/test_browser.py",
    "tests/reporting/test_notebooks.py",
    "tests/reporting/test_pages.py",
    "tests/sameness/test_converters.py::test_a_mistake_is_seen_named_and_undone",
    "tests/sameness/test_converters.py::test_a_right_conversion_into_another_layout_is_the_same",
    "tests/sameness/test_converters.py::test_a_right_conversion_is_the_same",
    "tests/sameness/test_every_tensor.py::test_no_tensor_differs_unnoticed",
    "tests/scanning/test_scan.py::test_memory_does_not_grow_with_the_number_of_layers",
    "tests/scanning/test_surveys.py::test_a_dask_cluster_gives_the_same_bytes",
    "tests/scanning/test_surveys.py::test_a_survey_that_is_asked_to_end_is_one_line_and_resumable",
    "tests/scanning/test_surveys.py::test_a_worker_that_dies_fails_its_job_and_no_other",
    "tests/scanning/test_surveys.py::test_an_interrupt_is_one_line_and_resumable",
    "tests/scanning/test_surveys.py::test_any_executor_gives_the_same_bytes",
    "tests/scanning/test_surveys.py::test_killed_and_resumed_the_table_is_identical",
    "tests/scanning/test_watch.py::test_a_killed_watch_loses_nothing",
    "tests/storage/test_stores.py",
    "tests/tables/test_in_a_kernel.py",
    "tests/test_action.py::test_the_first_step_installs_the_package_that_the_second_runs",
    "tests/test_advice.py",
    "tests/test_first_guesses.py::test_first_guesses_work",
    "tests/test_notebooks.py::test_a_notebook_runs",
    "tests/test_odd_input.py::test_odd_models_are_a_result_or_a_line",
    "tests/test_printed_runs.py::test_every_printed_command_runs",
    "tests/test_printed_runs.py::test_snippets_of_python_run",
    "tests/test_printed_runs.py::test_transcripts_show_what_is_printed",
)
# Tests that are repeated for every family, architecture or statement.
BY_TURNS = (
    "tests/families/test_every_family.py::test_the_family_is_what_the_model_computes",
    "tests/families/test_proofs.py",
    "tests/families/test_published.py",
    "tests/live/test_contract.py",
    "tests/lab/theory/test_gradients.py",
    "tests/lab/theory/test_planted.py::test_chance_rarely_decides",
    "tests/lab/training/starts/test_every_family.py",
)
# Cases of these tests that take more than `MOST_SECONDS`, whatever the sizes: slow at every turn.
HEAVY = ("depth-pro-0", "oneformer", "sapiens2")
# The files whose slow tests take longest, a minute or more: they begin first, so that no worker
# waits for another at the end.
LONGEST = (
    "tests/families/test_every_family.py",
    "tests/test_printed_runs.py",
    "tests/reporting/test_browser.py",
    "tests/families/test_published.py",
    "tests/live/test_distributed.py",
)
# The test that is repeated for settings, and the code that reads settings.
OF_SETTINGS = "tests/families/test_published.py"
READERS = "src/wqk/families"


def is_slow(item: pytest.Item) -> bool:
    """Return whether a test belongs to the slow group at this commit."""
    if item.nodeid.startswith(SLOW):
        return True
    if item.nodeid.startswith(OF_SETTINGS) and changed_files(f"{READERS}/*.py"):
        return False
    return takes_turns(item) and not has_turn(case_of(item), turn(), changed_families())


def takes_turns(item: pytest.Item) -> bool:
    """Return whether a test is one case of a test that is repeated by turns."""
    return (
        item.nodeid.startswith(BY_TURNS)
        and isinstance(item, pytest.Function)
        and hasattr(item, "callspec")
    )


def case_of(item: pytest.Item) -> str:
    """Name of the case that a repeated test runs with: what its id has in brackets."""
    return item.nodeid.rpartition("[")[2].removesuffix("]")


def begins_first(item: pytest.Item) -> bool:
    """Return whether a test is in one of the files that take longest."""
    return item.nodeid.startswith(LONGEST)


def has_none(path: Path, marks: str) -> bool:
    """Return whether a file has, by its name, no test of the group that these marks select."""
    name = path.relative_to(ROOT).as_posix() if path.is_relative_to(ROOT) else ""
    if not name.endswith(".py"):
        return False
    if "not slow" in marks:
        return name in SLOW
    return "slow" in marks and not any(test.startswith(name) for test in (*SLOW, *BY_TURNS))


def has_turn(case: str, turn: int, changed: frozenset[str]) -> bool:
    """Return whether a case runs at a turn: at every turn if its family changed; heavy cases only
    then."""
    is_changed = any(case == family or case.startswith(f"{family}-") for family in changed)
    return is_changed or (case not in HEAVY and zlib.crc32(case.encode()) % TURNS == turn % TURNS)


def has_share(case: str) -> bool:
    """Return whether a case of the campaign runs at this commit."""
    share = int(os.environ.get(SHARE, "1"))
    return (zlib.crc32(case.encode()) + turn()) % share == 0


def left_out_of_campaign(items: list[pytest.Item]) -> list[pytest.Item]:
    """Tests of the campaign that are repeated for many cases and have no share at this commit."""
    campaign = [item for item in items if item.get_closest_marker("campaign")]
    counts = Counter(item.nodeid.partition("[")[0] for item in campaign)
    return [
        item
        for item in campaign
        if counts[item.nodeid.partition("[")[0]] > MANY and not has_share(item.nodeid)
    ]


def turn() -> int:
    """Return the number that decides which cases run."""
    return int(os.environ[TURN])


def choose_turn() -> None:
    """Take the turn from the commit, unless the environment sets one.

    Outside a git checkout, such as in a source distribution, the turn is 0.
    """
    commit = _output_of_git("rev-parse", "--short=7", "HEAD")
    os.environ.setdefault(TURN, str(int(commit[0], 16) if commit else 0))


def repeating_command(name: str) -> str:
    """Command that runs one test again in the same turn."""
    return f"{TURN}={turn()} python -m pytest '{name}'"


@cache
def changed_files(pattern: str) -> list[Path]:
    """The files that differ from `main`; none where git or `main` is missing."""
    names = [
        *_output_of_git("diff", "--name-only", "--merge-base", "main", "--", pattern),
        *_output_of_git("ls-files", "--others", "--exclude-standard", "--", pattern),
    ]
    return [ROOT / name for name in names]


def _output_of_git(*arguments: str) -> list[str]:
    """Lines that git prints; none where git is missing or fails."""
    try:
        done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True)
    except OSError:
        return []
    return done.stdout.splitlines() if done.returncode == 0 else []


@cache
def changed_families() -> frozenset[str]:
    """The names and the model types of families whose files differ, with hyphens."""
    names: set[str] = set()
    for file in changed_files(f"{READERS}/data"):
        text = file.read_text(encoding="utf-8") if file.is_file() else ""
        names |= {file.stem, *tomllib.loads(text).get("model_types", [])}
    return frozenset(name.replace("_", "-") for name in names)


def mark(items: list[pytest.Item]) -> None:
    """Mark the tests of the slow group."""
    for item in items:
        if is_slow(item):
            item.add_marker("slow")
