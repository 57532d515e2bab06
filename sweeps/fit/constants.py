"""Hand-set constants of `sweeps.fit` that decide what is said of a curve, each with the data it was set on.

How finely something is computed (grids, rounds, draws) stands beside the computation: it decides nothing, and
`tests/sweeps/fit/test_law.py` holds it to a sampler that knows no grid. Rewards are on a scale of width 1, compute is
in windows: units of the largest that was evaluated. docs/reference/methods.md has the equations. "The zoo" is
benchmarks/forecast_zoo.py, "real curves" benchmarks/real_curves.py.
"""

from __future__ import annotations

# --- before the data ------------------------------------------------------------------------------------------------

# Of each kind of curve (`sweeps.fit.kinds`): how likely it is. Set on the zoo; what each is worth on real curves:
# docs/measured/real_curves.md. A power law was worth nothing there, nor is a delayed start, but only by its kind it is
# named.
P_LINE = P_CONSTANT = 0.12
P_DELAYED = P_WALK = 0.06
# And the mean and standard deviation of the logarithm of its shape (B of a sigmoid; of a delayed start when it begins,
# in windows); then of the logarithm of its scale in windows (C_mid), for all alike.
KIND_PRIORS: dict[str, tuple[float, tuple[float, float]]] = {
    "sigmoid": (0.24, (0.8, 0.45)),
    "weibull": (0.36, (0.1, 0.3)),
    "delayed": (P_DELAYED, (0.25, 0.25)),
}
SCALE_PRIOR = (-1.0, 1.2)
# The kinds' prior is worth this many recipes when a study's own are counted: a choice, held on
# docs/measured/ranking.md.
KINDS_WORTH = 4.0
# R0 and A, mean and standard deviation; twice that where rewards have no bounds: wide, a choice. What they do to
# intervals: docs/measured/coverage.md.
LEVEL_SD = 0.4
R0_PRIOR, A_PRIOR = (0.3, LEVEL_SD), (0.6, LEVEL_SD)
# A line goes on straight to this many windows, then ever more slowly: nothing rises for ever. A drift goes on to as
# many, and to one more by and by. A choice.
STRAIGHT = 3.0
# A slow drift over the window: its standard deviation in units of the points' roughness, and how likely there is one.
# What a run strays from any law goes with its noise; set on real curves (docs/measured/real_curves.md).
DRIFT_SD, P_DRIFT = 3.0, 0.5
# No law holds more exactly than this.
EXACT = 1e-3
# A jump: standard deviation of its size, how likely there is one, and its widths in units of the evaluations' spacing.
# Set on the zoo's steps and collapses.
JUMP_SD, P_JUMP = 0.3, 0.45
JUMP_WIDTHS = (EXACT, 0.35, 1.0)
# Beside a jump no wander is considered whose kind has less log weight before the data: either explains the same points.
# A choice, held on the zoo's steps and collapses.
RARE = -5.0
# The random walk: standard deviations over one window, as likely one as another: a grid.
WALK_STEPS = (0.015, 0.06, 0.2)
# A curve without a ceiling counts as ending where it is at this many windows: beyond, no study could tell or use it.
FARTHEST = 10.0

# A learning rate that has come down to this share of its peak brings as much a compute as at the peak, for cooling down
# brings what it costs; below, proportionally less. Set on 18 runs of the arithmetic task (docs/reference/methods.md).
COOLED = 0.5

# --- noise ----------------------------------------------------------------------------------------------------------

# The wander's standard deviation that half the policies exceed, at a memory of one window; and how likely there is none
# to speak of. Set on the zoo.
WANDER_SD, P_STILL = 0.055, 0.15
# Strengths tried, in units of the points' roughness, and memories, in windows, as likely one as another: a grid over
# what the prior on the rate allows.
STRENGTHS, MEMORIES = (0.5, 1.7, 4.5), (0.04, 0.7)
# Sampling errors tried, as likely one as another: as multiples of the variance given (the same prompts every time make
# evaluations agree better than their own errors say), or standard deviations in units of the roughness where none is
# given.
WHITE_KNOWN, WHITE_UNKNOWN = (0.7, 1.0), (0.6, 1.2)
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
# The bend is in the window if even the upper end of C_mid's interval lies below this share of it: intervals that
# miss, one in twenty, mostly miss by little.
BEND = 0.85
# Before this many times the upper end of C_mid a window shows the bend and no plateau, and a lull passes for one: A
# must then be known all the better, by the square of what is missing. Set on the zoo.
REACH = 3.5
# A rise needs this much log evidence over a constant with a policy that wanders; and whatever wander explains, a trend
# of more standard deviations than this, by the points' scatter or by their sampling errors, is no level curve. Set on
# the zoo's flat curves.
RISE, TREND = 2.0, 4.5
# A kind of curve ahead of the sigmoid by this much log predictive density (20 times as likely) is preferred to it.
AHEAD = 3.0
# A is named if this much of what all kinds of curves say of the ceiling lies within its interval. Set on the zoo.
AGREED = 0.65
# Other laws than the sigmoid lie above it: the upper half of A's interval is this much longer, unless all of them are
# behind by this much log predictive density. Set on the zoo's Frechet curves, whose A is then held in 0.84 of the cases
# in which it is named (docs/measured/forecast_zoo.md).
OTHERS, RULED_OUT = 1.4, 6.0
# A run has gone bad if it ends this share of its gain below its best stretch; and only what was at this reward can be
# said to have died. A choice, held on the zoo.
COLLAPSE = 0.2
