"""What a row of the tables is, and the configurations that several rows share."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Architecture:
    """A tiny random model of one kind.

    Attributes
    ----------
    name, model
        The test's, and the class in `transformers`.
    config
        Arguments of its configuration.
    blocks
        Number of applications of attention blocks that have to agree; or of each stack and kind.
    hub
        Keys of config.json as older files on the hub have them; None takes a key out.
    spelling
        Patterns and replacements that turn the saved names of tensors into those of older files.
    fed_by_norms
        Whether some queries or keys are projected from what a norm with a gain puts out; not where
        positions are added in between, or where norms come after attention.
    """

    name: str
    model: str
    config: dict[str, Any]
    blocks: int | dict[tuple[str, str], int] = 2
    hub: dict[str, Any] = field(default_factory=dict)
    spelling: dict[str, str] = field(default_factory=dict)
    fed_by_norms: bool = True

    @property
    def block_count(self) -> int:
        return self.blocks if isinstance(self.blocks, int) else sum(self.blocks.values())


TOKENS = {"vocab_size": 61, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
BERT = TOKENS | {
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "intermediate_size": 24,
    "max_position_embeddings": 64,
}
# 6 query heads over 2 key heads (H/G ≠ G), of width 12 where hidden/heads is 8.
GROUPED = BERT | {
    "hidden_size": 48,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 12,
}
BART = TOKENS | {
    "d_model": 32,
    "encoder_layers": 2,
    "encoder_attention_heads": 4,
    "encoder_ffn_dim": 24,
    "decoder_layers": 3,
    "decoder_attention_heads": 8,
    "decoder_ffn_dim": 24,
    "max_position_embeddings": 64,
}
T5 = TOKENS | {
    "d_model": 32,
    "num_heads": 4,
    "d_kv": 12,
    "d_ff": 24,
    "num_layers": 2,
    "num_decoder_layers": 3,
    "relative_attention_num_buckets": 8,
    "relative_attention_max_distance": 12,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 100.0,
    "factor": 4.0,
    "original_max_position_embeddings": 16,
}
LONGROPE = {
    "rope_type": "longrope",
    "short_factor": [1.0, 1.1, 1.3, 1.6],
    "long_factor": [1.0, 2.0, 3.0, 4.0],
}
