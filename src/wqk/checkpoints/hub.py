"""Checkpoints on the hub, through its own client and cache."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from wqk.checkpoints.local import open_local
from wqk.errors import HubError

if TYPE_CHECKING:
    import os

    from wqk.checkpoints.checkpoint import Checkpoint

# A configuration, an index and the weights: what `open_local` looks for.
WANTED = ("config.json", "*.safetensors", "*.safetensors.index.json")
WANTED_ARCHIVES = ("config.json", "pytorch_model*.bin", "pytorch_model.bin.index.json")


def open_hub(
    repository: str,
    *,
    revision: str | None = None,
    subfolder: str | None = None,
    token: str | bool | None = None,
    cache_dir: str | os.PathLike[str] | None = None,
    local_files_only: bool = False,
) -> Checkpoint:
    """The repository's weights, downloaded into the hub client's cache where not there already.

    Raises
    ------
    HubError
        No such repository or revision, no permission, no network, or nothing in the cache.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    prefix = f"{subfolder}/" if subfolder else ""
    for wanted in (WANTED, WANTED_ARCHIVES):
        try:
            folder = snapshot_download(
                repository,
                revision=revision,
                allow_patterns=[prefix + pattern for pattern in wanted],
                token=token,
                cache_dir=Path(cache_dir) if cache_dir else None,
                local_files_only=local_files_only,
            )
        except GatedRepoError:
            reason = "is gated; accept its terms on the hub and log in (hf auth login)"
        except RepositoryNotFoundError:
            reason = "is neither a path here nor a repository that this login can see"
        except RevisionNotFoundError:
            reason = f"has no revision {revision!r}"
        except LocalEntryNotFoundError:
            reason = "is not a path here, not in the cache, and the hub cannot be reached"
        except (HfHubHTTPError, OSError) as error:
            reason = f"could not be fetched ({type(error).__name__})"
        else:
            path = Path(folder, subfolder) if subfolder else Path(folder)
            if any(p.suffix in (".safetensors", ".bin") for p in path.glob("*")):
                checkpoint = open_local(path)
                checkpoint.name, checkpoint.revision = repository, revision
                return checkpoint
            reason = "holds neither safetensors nor torch weights"
            continue
        break
    raise HubError(f"{repository}: {reason}") from None
