from .catalog import FIGURES as FIGURES
from .catalog import draw as draw
from .catalog import numbers as numbers
from .catalog import save as save
from .results import table_text as table_text
from .sources import Sources as Sources
from .sources import read_sources as read_sources
