from .page import ClaimsPage as ClaimsPage
from .page import PaperClaim as PaperClaim
from .page import claims as claims
from .records import start_contrasts as start_contrasts
from .records import trained as trained
