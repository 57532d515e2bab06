"""Configurations without a file in `conf/`: the part `scalerl_axes` of `train.yaml`, and variants with one choice.

`scalerl_axes` sets every axis to its neutral choice, if it has one. Hydra imports the modules of this namespace before
it composes anything, in every program.
"""

from hydra.core.config_store import ConfigStore

from lightning_scalerl.choices import NEUTRAL
from lightning_scalerl.composition import plain_variants

_store = ConfigStore.instance()
_store.store("scalerl_axes", {"defaults": [{axis: file} for axis, file in NEUTRAL.items()]})
for _name, (_axis, _file) in plain_variants().items():
    _node = {"defaults": [{f"override /{_axis}": _file}], "label": f"{_axis}={_file}"}
    _store.store(_name, _node, group="variant", package="_global_")
