"""All tolerances of the comparisons, each with its meaning and source."""

from __future__ import annotations

# By how many times its expected rounding anything may differ: what is expected is the mean of
# independent errors, which single weights exceed.
SAFETY = 1.5

# -- forms -------------------------------------------------------------------------------------

# Products of float64 Gram matrices resolve no smaller distance, relative to ‖A‖ ‖B‖: the root of
# float64's rounding, as distances are roots of differences, and what many sums add.
RESOLUTION = 1e-7
# Signatures of the same heads have at least this cosine; those of quantized ones less, by twice the
# square of what rounding explains of their distance, but never less than the second.
ALIKE_FORMS, LEAST_ALIKE = 0.99, 0.8
# Added to the likeness of heads, far below any difference: among equal heads, the head in place is
# the best match, and with its own key head even more so.
IN_PLACE, WITH_OWN_KEY = 1e-6, 2e-6
# Far below any tolerance; replaces the tolerance of a pruned head, 0.
TINY = 1e-30
# Share of the distance due to quantization from which columns are searched in other groups.
SUSPECT = 0.5
# Distances of two heads, relative to the first: of a copy that was trained on, and of heads that
# share next to nothing (√2 for independent ones).
CLOSE_BELOW, DIFFERENT_ABOVE = 0.3, 0.9
# Factor by which a block must be farther from its reference without an edit than with the edit.
FARTHER = 2.0
# Share of the tolerance above which a head next to differing heads is not called equal.
NEARLY = 0.5
# Frequencies of rotary positions; files and programs compute frequencies in float32.
SAME_FREQUENCY = 1e-6
# Largest distance of vectors from rotated vectors, besides rounding: the error of float32 sums.
ROTATED = 1e-5

# -- quantized weights and adapters --------------------------------------------------------------

# Share of entries that may lie beyond half a step, because stored scales are rounded.
FEW_BEYOND = 0.006
# Share of half a step that entries may exceed, if scales are rounded to eight bits.
STEP_SLACK = 0.04
# Gaps of neighboring levels are equal steps up to this share of a step.
EVEN_STEPS = 0.05
# Gaps of levels exceed this share of the span of a scale; smaller gaps are rounding.
SAME_LEVEL = 1e-5
# Entries of quantized and exact weights correspond if they lie at most this many roundings apart.
CORRESPONDING = 1.5
# Factors of rows in one group of columns spread by chance up to this many standard errors, and by
# up to this many times those in the group where they spread least. Groups with the scales of
# others begin at 7 and 7; GPTQ of weights and inputs of any kind ends at 5 and 3.
SPREAD_OF_FACTORS, SPREAD_OVER_LEAST = 6.0, 4.0
# Shares of an adapter differ by chance up to this many standard deviations, or up to the second.
CHANCE, LEAST_SHARE = 6.0, 0.02
# Larger differences of shares within one layer are listed by module.
DIFFERING_SHARES = 0.1
# The change besides an adapter is at most this multiple of the rounding.
BESIDE_ADAPTER = 3.0
# The norm of the rest of a change may be this share of the update, for any rounding.
LEAST_RESIDUAL = 1e-6

# -- tensors outside the forms -----------------------------------------------------------------

# Sketches of equal tensors differ by less than this, also if one is rounded to eight bits.
NEAR_SKETCH = 0.05
# Standard deviation of initial weights in most models, if not in the configuration.
INITIALIZER_RANGE = 0.02
# Standard deviations of trained and of first weights differ by more than this share, and by more
# than chance.
MOST_CHANCE = 0.1
# Smallest added constant; largest distance of a constant from a whole number.
LEAST_OFFSET, WHOLE = 1e-6, 1e-2

# -- stored weights ----------------------------------------------------------------------------

# Rows and columns are the same above this cosine; those of quantized weights above the second.
# Unrelated ones in 64 directions have cosines of ⅛, root mean square.
ALIKE, QUANTIZED_ALIKE = 0.999, 0.9
# Numbers are the same up to this share of the largest, and factors up to this share: the rounding
# of bfloat16 is .4 %.
SAME_SHARE = 1e-2
# Ratios of two stored tensors with smaller differences are one factor.
SAME_FACTOR = 1e-3
# Equal rows differ by at most this share in single precision.
TIED = 1e-6
# A fitted factor stands for a round number that is at most this many standard deviations away, if
# the gap between round numbers is larger than the distance by the inverse of the second: of factors
# that are not round, one in ten of a kind is so near by chance.
DEVIATIONS_OF_FACTOR, CHANCE_OF_ROUND = 3.0, 0.05
# Programs multiply in float32, in which 1.05 is 1.04999995.
ROUNDING_OF_FACTORS = 2.0**-24
# Factors and offsets of many groups leave at most this share of the distance that they explain:
# fitted to noise, they leave nearly all of it.
UNEXPLAINED_BY_FACTORS = 0.5
# Largest share of the distance that a reordering of a vector's entries may leave.
UNEXPLAINED_BY_ORDER = 0.1
# Number of rows that are fitted first. All rows are fitted if at most this share of the first is
# left: of unrelated weights of one size, .7 is left.
SCREENED, RESIDUAL_OF_SAMPLE = 64, 0.6
# A change of coordinates, or of a head, changes most of its entries or rows; one of single entries
# does not.
MAJORITY = 0.5
# Columns belong to other groups if at most this share of the squares is left.
LEFT_BY_REGROUPING = 0.7
# Largest distance of whole numbers from unrounded values: a half plus the error of a factor.
INTEGER_SLACK = 0.75
# Singular values below this share of the largest are the rounding of float32.
RANK_FLOOR = 1e-4

# -- weighted sums -----------------------------------------------------------------------------

# Smallest weight of a model in a sum; weights with smaller differences are equal.
LEAST_PART = 1e-3
# Weights have this number of decimals if that differs by no more than this many deviations, or by
# no more than the smallest difference.
DECIMALS, DEVIATIONS, SMALLEST = 3, 4.0, 1e-6
