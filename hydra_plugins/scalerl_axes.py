"""The part `scalerl_axes` of `conf/train.yaml`: every axis at its neutral choice, where it has one.

Hydra imports the modules of this namespace before it composes anything, whichever program has started it.
"""

from hydra.core.config_store import ConfigStore

from lightning_scalerl.choices import NEUTRAL

ConfigStore.instance().store("scalerl_axes", {"defaults": [{axis: file} for axis, file in NEUTRAL.items()]})
