"""Hand-set constants of `sweeps.fit` that decide what is said of a curve, each with the data it was set on.

How finely something is computed (grids, rounds, draws) stands beside the computation: it decides nothing, and
`tests/sweeps/fit/test_law.py` holds it to a sampler that knows no grid. Rewards are on a scale of width 1, compute is
in windows: units of the largest that was evaluated. docs/reference/methods.md has the equations. "The zoo" is
benchmarks/forecast_zoo.py, "real curves" benchmarks/real_curves.py.
"""

from __future__ import annotations

# --- before the data ------------------------------------------------------------------------------------------------

# Forecasts (`sweeps.fit.posterior`): none of these was set on a curve. Probability of each law, and mean and standard
# deviation of the logarithms of its shape: B of a sigmoid, power of a Weibull curve; C_mid or scale, in windows.
P_SIGMOID = P_WEIBULL = 0.4
P_NONE = 0.2
SIGMOID_PRIOR, WEIBULL_PRIOR, SCALE_PRIOR = (0.6, 0.45), (0.0, 0.35), (-0.7, 1.2)
# The other families' shapes: logarithm of k and c of a logistic, and logarithm of a power law's B.
RATE_PRIOR, MIDPOINT_PRIOR, POWER_PRIOR = (1.6, 0.8), (0.3, 0.6), (-0.7, 0.8)
# R0 and A of a law that rises, and the level of none.
R0_PRIOR, A_PRIOR, LEVEL_PRIOR = (0.3, 0.35), (0.6, 0.35), (0.45, 0.35)
# The walk about a law: mean and standard deviation of the logarithm of its standard deviation over one window (about
# 0.06), and in how many windows beyond the end it levels.
WALK_PRIOR, LEVELLING = (-2.8, 1.0), 1.0
# A counts from where the walk stands: its mean over so much of a window beyond the end.
STANDING = 0.25
# Prior standard deviation of a fixed R0 or A.
FIXED = 1e-5
# No noise is smaller than this.
EXACT = 1e-3
# How far seeds walk from their mean, in units of the recipe's walk, as likely one as another: a grid.
SEED_WALKS = (0.3, 1.0, 3.0)
# Standard deviation of the logarithm of the noise about the points' roughness, which is no less than this; and about
# the errors that the source gives (times `KNOWN`: the same prompts every time make evaluations agree better).
NOISE_SD, QUIET = 0.5, 0.004
KNOWN, KNOWN_SD = 0.85, 0.2
# Beyond this many windows a forecast is not read where A is not named, and no ceiling: no study could use it.
FARTHEST = 10.0

# A learning rate that has come down to this share of its peak brings as much a compute as at the peak, for cooling down
# brings what it costs; below, proportionally less. Set on 18 runs of the arithmetic task (docs/reference/methods.md).
COOLED = 0.5

# --- noise ----------------------------------------------------------------------------------------------------------

# Seeds of one recipe end about this far apart (three ScaleRL runs lay within it: arXiv 2510.13786, A.7), and do not
# begin so. With their policies' wander, means over half a window lie apart by twice that, which is also the ridge on
# offsets between the seeds given, weak on purpose.
SEED_SD, SETTLED = 0.015, 0.15
MEANS_SD = SEED_SD + SEED_SD
# Evaluations that all agree are not infinitely precise.
LEAST_SD = 0.04
# A seed with less than this share of the best seed's information on A says nothing of its own asymptote.
INFORMING = 0.2
# A seed has left the others beyond this many standard deviations of what sets honest means apart. A choice, held on the
# zoo's and docs/measured/ranking.md's studies with a bad seed.
BAD_SEED = 4.0
# With `--robust`, residuals beyond this many robust standard deviations count with less weight (Huber 1964).
HUBER = 1.5

# --- verdicts -------------------------------------------------------------------------------------------------------

# Fewer distinct computes along one run, or a narrower window by factor, show a point of a curve, not its shape.
MIN_COMPUTES, MIN_SPAN = 6, 1.5
# An interval wider than this (in units of the reward's range, and never more than the gain itself) cannot separate any
# two of the published recipes, whose A lie within 0.16 of each other (arXiv 2510.13786, fig. 2).
MAX_WIDTH = 0.2
# A plateau counts as observed at a bound if the last quarter's mean is this close: the margin of a tie.
PLATEAU = 0.02
# The bend may lie beyond the window with this probability. Set on real curves, of which any limit up to 0.5 named more
# asymptotes and none that the runs then exceeded (but digits, 10 of 82 at every limit).
BEND = 0.2
# A curve is flat if it is likelier than not that there is no law, and a rise by more than `PLATEAU`, from its beginning
# to two windows, is less likely than this. Set on real curves: of 15 so called none had risen by then.
P_FLAT = 0.25
# A law whose log evidence is ahead of the sigmoid's by this much (20 times as likely) is preferred to it.
AHEAD = 3.0
# A is named if this much of what all laws say of the ceiling lies within its interval.
AGREED = 0.65
# A run has gone bad if it ends this share of its gain below its best stretch; and only what was at this reward can be
# said to have died. A choice, held on the zoo.
COLLAPSE = 0.2
