"""Text as tokens: how a corpus is built, and the store that training reads from."""

from wqk.training.corpus.building import CorpusProgress, build_corpus
from wqk.training.corpus.options import CorpusOptions
from wqk.training.corpus.store import TokenStore
from wqk.training.corpus.writing import Chunk, write_store

__all__ = ["Chunk", "CorpusOptions", "CorpusProgress", "TokenStore", "build_corpus", "write_store"]
