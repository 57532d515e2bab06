"""Hand-set constants of `sweeps.fit` that affect the conclusions from a curve, each with the data on which it was set.

Numerical resolution (grids, rounds, draws) is set next to each computation instead, because it affects no conclusion:
`tests/sweeps/fit/test_posterior.py` compares the evidence with that of many samples of the prior. Rewards are on a
scale of width 1. Compute is in windows: multiples of the largest evaluated compute. docs/reference/methods.md has the
equations. "The zoo" is the simulated studies of benchmarks/forecast_zoo.py, "real curves" are those of
benchmarks/real_curves.py.
"""

from __future__ import annotations

# --- priors ---------------------------------------------------------------------------------------------------------

# Priors of forecasts (`sweeps.fit.posterior`); none was tuned on a curve. P_*: prior probability of each law (form of
# the curve): sigmoid, Weibull or none. The others are (mean, standard deviation) of the logarithm of a shape parameter:
# B of a sigmoid, the power of a Weibull curve, and C_mid or the Weibull scale in windows.
P_SIGMOID = P_WEIBULL = 0.4
P_NONE = 0.2
SIGMOID_PRIOR, WEIBULL_PRIOR, SCALE_PRIOR = (0.6, 0.45), (0.0, 0.35), (-0.7, 1.2)
# Priors of the other families' shape parameters: log k and c of a logistic, log B of a power law.
RATE_PRIOR, MIDPOINT_PRIOR, POWER_PRIOR = (1.6, 0.8), (0.3, 0.6), (-0.7, 0.8)
# Prior (mean, standard deviation) of R0 and A under a law that rises, and of the constant level under no law.
R0_PRIOR, A_PRIOR, LEVEL_PRIOR = (0.3, 0.35), (0.6, 0.35), (0.45, 0.35)
# WALK_PRIOR: prior mean and standard deviation of log tau. tau is the standard deviation, over one window, of the
# random walk by which a curve departs from its law; its prior median is 0.06. LEVELLING: beyond the largest compute the
# walk levels off, on a scale of this many windows.
WALK_PRIOR, LEVELLING = (-2.8, 1.0), 1.0
# A is the law's asymptote plus the mean of the walk from the largest compute to this many windows later.
OFFSET_WINDOWS = 0.25
# Prior standard deviation of a fixed R0 or A: practically 0.
FIXED = 1e-5
# Lower limit of the noise's standard deviation.
EXACT = 1e-3
# Grid of scales, equally likely, of the walks of seeds about their mean, relative to the recipe's walk.
SEED_WALKS = (0.3, 1.0, 3.0)
# Log-normal prior of the noise's standard deviation. If the source gives no errors, the median is the points'
# roughness, at least QUIET, and NOISE_SD is the standard deviation of the logarithm. If it gives errors, the median is
# KNOWN times these errors, because evaluations on the same prompts agree better than independent evaluations, and
# KNOWN_SD is the standard deviation of the logarithm.
NOISE_SD, QUIET = 0.5, 0.004
KNOWN, KNOWN_SD = 0.85, 0.2
# Where A is not identifiable, forecasts and ceilings are limited to this many windows, because no study could use more.
FARTHEST = 10.0

# While the learning rate is above this fraction of its peak, compute counts in full, because the gain from cooling down
# makes up for the lower rate. At lower rates compute counts proportionally less. Set on 18 runs of the arithmetic task
# (docs/reference/methods.md).
COOLED = 0.5

# --- noise ----------------------------------------------------------------------------------------------------------

# SEED_SD: spread of asymptotes between seeds of one recipe (arXiv 2510.13786, A.7: three ScaleRL runs were within it).
# SETTLED: compute, in windows, over which the spread builds up. MEANS_SD: spread between seeds of the mean reward over
# half a window, which is twice as large because policies also drift.
SEED_SD, SETTLED = 0.015, 0.15
MEANS_SD = SEED_SD + SEED_SD
# Lower limit of the noise where all evaluations are equal: they are not infinitely precise.
LEAST_SD = 0.04
# A seed counts in comparisons of seeds' asymptotes if it has at least this fraction of the best seed's information on
# A.
INFORMING = 0.2
# A seed is an outlier if its gap to the others exceeds this many standard deviations of a healthy gap. The value is a
# choice, checked on the studies with a bad seed in the zoo and in docs/measured/ranking.md.
BAD_SEED = 4.0
# With `--robust`, residuals beyond this many robust standard deviations get less weight (Huber 1964).
HUBER = 1.5

# --- verdicts -------------------------------------------------------------------------------------------------------

# The points do not show the curve's shape if one run has fewer distinct computes than MIN_COMPUTES, or the largest
# compute is less than MIN_SPAN times the smallest.
MIN_COMPUTES, MIN_SPAN = 6, 1.5
# An interval of A wider than this, in units of the reward's range, cannot separate the published recipes, whose A are
# within 0.16 of each other (arXiv 2510.13786, fig. 2). The interval must not be wider than A - R0 either.
MAX_WIDTH = 0.2
# A plateau at a bound is observed if the mean of the last quarter is this close to the bound. The value is the margin
# of a tie.
PLATEAU = 0.02
# Highest allowed probability that the bend (C_mid) is beyond the largest compute. Set on real curves: limits up to 0.5
# made more asymptotes identifiable, and no reward later exceeded these (except on digits, 10 of 82 at every limit).
BEND = 0.2
# A curve is flat if "no law" is more likely than not, and the probability of a rise by more than `PLATEAU`, from the
# start to twice the largest compute, is below this. Set on real curves: none of the 15 curves called flat had risen by
# then.
P_FLAT = 0.25
# A law is preferred to the sigmoid if its log evidence is higher by more than this (20 times as likely).
MIN_RIVAL_LEAD = 3.0
# A is identifiable only if its interval holds at least this fraction of the ceiling's posterior over all laws.
AGREED = 0.65
# A run has gone bad if it ends below its best fifth by more than this fraction of its gain. A run can only be called
# dead if its reward was once this high. The value is a choice, checked on the zoo.
COLLAPSE = 0.2
