from .building import CorpusProgress as CorpusProgress
from .building import build_corpus as build_corpus
from .settings import CorpusOptions as CorpusOptions
from .store import TokenStore as TokenStore
from .writing import TokenChunk as TokenChunk
from .writing import write_store as write_store
