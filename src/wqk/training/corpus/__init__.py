"""Text as tokens: readers, vocabularies, and the store that training reads from."""

from wqk.training.corpus.store import TokenStore
from wqk.training.corpus.writing import Chunk, write_store

__all__ = ["Chunk", "TokenStore", "write_store"]
