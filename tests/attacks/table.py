"""The attacks, each with its number of cases for one seed."""

from __future__ import annotations

from tests.attacks import (
    adapters,
    changing,
    family_files,
    forking,
    freedoms,
    gguf_files,
    hybrids,
    verifying,
    watching,
    yaml_files,
)
from tests.attacks.outcomes import Attack

# Number of seeds of the campaign, which runs 24,000 cases.
SEEDS = 16
ATTACKS: dict[str, tuple[Attack, int]] = {
    "hybrid models": (hybrids.attack, 250),
    "GGUF files": (gguf_files.attack, 250),
    "adapters": (adapters.attack, 250),
    "family files": (family_files.attack, 250),
    "LitGPT's YAML": (yaml_files.attack, 250),
    "same --up-to": (freedoms.attack, 75),
    "files that change": (changing.attack, 100),
    "watch": (watching.attack, 25),
    "verify": (verifying.attack, 25),
    "fork": (forking.attack, 25),
}
