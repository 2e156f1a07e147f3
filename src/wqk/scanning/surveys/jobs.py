"""The jobs of a survey: one for each checkpoint of its refs and revisions."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path

from wqk.checkpoints import steps_of
from wqk.checkpoints.folders import exists, has_weights
from wqk.checkpoints.references import digest_of_query, redacted, step_in
from wqk.checkpoints.retries import within_deadline
from wqk.errors import CheckpointError, HubError, WqkError, all_lines
from wqk.scanning.surveys.model_sets import PREFIX, model_set, read_list


@dataclass(frozen=True)
class Job:
    """One checkpoint of a survey; ``name``, ``revision`` and ``step`` as in the table."""

    name: str
    revision: str | None
    step: int | None
    location: str  # what a worker opens in any folder: an absolute path, a hub id, a URL
    problem: WqkError | None = None  # why the ref cannot be resolved, if so

    @property
    def title(self) -> str:
        """Name and revision, readable."""
        return self.name + (f" @ {self.revision}" if self.revision else "")

    @property
    def key(self) -> str:
        """A file name determined by name and revision."""
        identity = json.dumps([self.name, self.revision]).encode()
        digest = hashlib.blake2b(identity, digest_size=8).hexdigest()
        readable = re.sub(r"[^A-Za-z0-9.]+", "-", self.title).strip("-.")[-60:]
        return f"{readable}-{digest}"


def expand(
    refs: Iterable[str],
    revisions: Sequence[str] = (),
    list_revisions: Callable[[str], list[str]] | None = None,
) -> list[Job]:
    """Every checkpoint that refs and revisions name, in order, each once; arguments as `survey`'s.

    ``list_revisions`` lists a repository's revisions; it is called only for patterns. A ref that
    cannot be resolved is a job with a problem, but a list or set that does not exist is an error.

    Examples
    --------
    >>> [job.title for job in expand(["owner/model"], ["step8", "step16"])]
    ['owner/model @ step8', 'owner/model @ step16']
    """
    jobs: dict[str, Job] = {}
    for ref in _words(refs):
        try:
            named = list(_jobs_of(ref, revisions, list_revisions or hub_revisions))
        except WqkError as error:
            named = [Job(_name(ref), None, None, ref, problem=error)]
        for job in named:
            one, number = job, 1
            # Of addresses that differ only in their signatures, the second is another checkpoint.
            while jobs.setdefault(one.key, one).location != job.location:
                number += 1
                one = replace(job, name=f"{job.name} ({number})")
    return list(jobs.values())


def _name(ref: str) -> str:
    """A ref's name in tables: redacted, and another one for every address."""
    digest = digest_of_query(ref)
    return redacted(ref) + (f" ({digest})" if digest else "")


def hub_revisions(repository: str, token: str | bool | None = None) -> list[str]:
    """Names of a repository's branches and tags; `HubError` if the hub does not answer."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HFValidationError

    try:
        refs = within_deadline(
            lambda: HfApi(token=token).list_repo_refs(repository), lambda _: None
        )
    except HFValidationError:
        raise CheckpointError(
            f"{redacted(repository)}: neither a local path nor a Hub id, so it has no revisions"
        ) from None
    except Exception as error:  # the client lets errors of its transport through, of any class
        reason = all_lines(error)
        raise HubError(f"{repository}: its revisions cannot be listed ({reason})") from None
    return list(dict.fromkeys(ref.name for ref in (*refs.branches, *refs.tags)))


def natural_order(name: str) -> list[str | int]:
    """A key that sorts numbers within names as numbers: step2 before step10.

    Examples
    --------
    >>> sorted(["step10", "step2", "main"], key=natural_order)
    ['main', 'step2', 'step10']
    """
    return [int(t) if i % 2 else t for i, t in enumerate(re.split(r"([0-9]+)", name))]


def _words(refs: Iterable[str]) -> Iterator[str]:
    """Refs with lists and named sets written out."""
    for ref in refs:
        is_list = ref.startswith("@")
        for word in read_list(Path(ref[1:])) if is_list else [ref]:
            if is_list and word.startswith("@"):
                raise CheckpointError(
                    f"{ref[1:]}: a list cannot include another list, got {redacted(word)}"
                )
            yield from model_set(word) if word.startswith(PREFIX) else [word]


def _jobs_of(
    ref: str, revisions: Sequence[str], list_revisions: Callable[[str], list[str]]
) -> Iterator[Job]:
    if exists(Path(ref)):
        if not revisions:
            paths = steps_of(ref)
        else:  # names or patterns of a run's folders with weights
            if not Path(ref).is_dir():
                raise CheckpointError(f"{ref}: a file has no revisions; leave out the revision")
            steps = [path.name for path in Path(ref).iterdir() if has_weights(path)]
            matching = (name for pattern in revisions for name in _chosen(pattern, steps, ref))
            paths = [str(Path(ref, name)) for name in dict.fromkeys(matching)]
        for path in paths:
            absolute = Path(path).absolute()
            yield Job(redacted(path), None, step_in(absolute.name), str(absolute))
    elif not revisions:
        yield Job(_name(ref), None, None, ref)
    else:
        names: dict[str, None] = {}
        for pattern in revisions:  # listed only where there is a pattern
            is_plain = not set(pattern) & set("*?[")
            found = [pattern] if is_plain else _chosen(pattern, list_revisions(ref), ref)
            names |= dict.fromkeys(found)
        for name in names:
            yield Job(_name(ref), name, step_in(name), ref)


def _chosen(pattern: str, names: Sequence[str], ref: str) -> list[str]:
    chosen = [name for name in names if fnmatchcase(name, pattern)]
    if not chosen:
        some = ", ".join(sorted(names, key=natural_order)[:3])
        more = f": {some}{', …' if len(names) > 3 else ''}" if names else ""
        there = f"it has {len(names) or 'none'}{more}"
        raise CheckpointError(f"{redacted(ref)}: no revision or step matches {pattern!r}; {there}")
    return sorted(chosen, key=natural_order)
